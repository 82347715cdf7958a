"""Every text that is made of a record, in English and in Chinese: one catalogue of templates by code.

Whoever finds something makes a Message: a code and values. It becomes text where it is stored, which is always English, or
shown. Other packages bring the texts of their own codes through the entry-point group `steelyard.words`, one Text each.
"""

from functools import cache
from typing import Any

from steelyard import plugins
from steelyard.words import cases, checks, failures, machine, metrics, notes, units, version_1
from steelyard.words.message import LANGS, Lang, Message, Text, Value, Values

__all__ = [
    "GROUP",
    "LANGS",
    "Lang",
    "Message",
    "Text",
    "Value",
    "Values",
    "both",
    "case_text",
    "english",
    "items",
    "table",
    "text",
    "unit",
]

GROUP = "steelyard.words"
SHIPPED: dict[str, tuple[str, str]] = {
    **checks.TABLE,
    **notes.TABLE,
    **metrics.TABLE,
    **machine.TABLE,
    **failures.TABLE,
    **units.TABLE,
}
_LISTED: dict[Lang, str] = {"en": ", ", "zh": "、"}
WORDINGS = (1, 2)  # version 1 is kept for the notes of published records


@cache
def _shipped() -> dict[str, Text]:
    return {code: Text(code, *both_languages) for code, both_languages in SHIPPED.items()}


def table() -> dict[str, Text]:
    """Every text by its code: the shipped ones, and those of other packages."""
    return plugins.table(list(_shipped().values()), GROUP, Text, "text")


def _known(code: str) -> Text | None:
    return _shipped().get(code) or table().get(code)


def text(message: Message, lang: Lang = "en", wording: int = WORDINGS[-1]) -> str:
    """The message in a language. `wording` 1 is the English of older records, as far as it is kept."""
    old = version_1.NOTES.get(message.code) if wording == 1 else None
    found = _known(message.code)
    if old is None and found is None:  # of a package whose texts are not installed
        old = " ".join([message.code, *(f"{{{name}}}" for name in message.values)])
    template = old if old is not None or found is None else found.of(lang)
    return (template or "").format_map({name: _shown(value, lang, wording) for name, value in message.values.items()})


def english(message: Message | None) -> str | None:
    """As a record stores it."""
    return None if message is None else text(message)


def _shown(value: Value, lang: Lang, wording: int) -> Any:
    if isinstance(value, Message):
        return text(value, lang, wording)
    if isinstance(value, tuple):
        return _LISTED[lang].join(str(_shown(one, lang, wording)) for one in value)
    return value


def both(*messages: Message | None) -> Message | None:
    """Several in one: none of none, and each after the other."""
    known = [one for one in messages if one is not None]
    out = known[0] if known else None
    for one in known[1:]:
        out = Message("both", {"first": out or "", "second": one})
    return out


def items(noun: str) -> Message | str:
    """What a task calls its items, many of them. A package whose noun has no text gets the bare one."""
    code = f"items.{noun}"
    return Message(code) if _known(code) is not None else f"{noun}s"


def unit(name: str, lang: Lang) -> str:
    """A unit as a page spells it: that of a record, where no text is written for it."""
    found = _known(f"unit.{name}") if lang != "en" else None
    return name if found is None else found.of(lang)


def case_text(told: str, lang: Lang) -> str:
    """A text of a shipped case: its title, what it is about, the source and the note of a published row. Texts of a user's own
    case file stay as they are."""
    return cases.CHINESE.get(told, told) if lang == "zh" else told
