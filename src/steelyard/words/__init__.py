"""Every text that is made of a record, in English and in Chinese: one catalogue of templates by
code.

Whoever finds something makes a Message: a code and values. A record stores it so, and it becomes
text where it is shown. Other packages bring the texts of their own codes through the entry-point
group `steelyard.words`, one Text each.
"""

from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from math import isclose, isfinite
from typing import Any, overload

from steelyard import plugins
from steelyard.words import chinese, english, version_1
from steelyard.words.message import LANGS, Lang, Message, Text, Value, Values

__all__ = [
    "GROUP",
    "LANGS",
    "Lang",
    "Meaning",
    "Message",
    "Text",
    "Value",
    "Values",
    "Words",
    "all_among",
    "both",
    "case_text",
    "in_english",
    "items",
    "meaning",
    "pair",
    "storable",
    "stored",
    "table",
    "text",
    "unit",
]

GROUP = "steelyard.words"
Meaning = tuple[str, str]  # what something is called, and what it means
SHIPPED = {code: Text(code, english.TEXTS[code], chinese.TEXTS[code]) for code in english.TEXTS}
# 1 and 2 are English sentences, which older records store; from 3 on a record stores messages
WORDINGS = (1, 2, 3)


@dataclass(frozen=True)
class Words:
    """The words of a page in its language."""

    lang: Lang

    def __call__(self, code: str, *values: str) -> str:
        return SHIPPED[code].of(self.lang).format(*values)

    def known(self, code: str, fallback: str) -> str:
        """Return the words of a code, or the bare name that a record uses where there are none."""
        return self(code) if code in SHIPPED else fallback

    def meaning(self, code: str) -> Meaning:
        return meaning(code)[LANGS.index(self.lang)]


def pair(code: str) -> tuple[str, str]:
    """Return a text in English and in Chinese, as rows hold it."""
    return SHIPPED[code].en, SHIPPED[code].zh


def meaning(code: str) -> tuple[Meaning, Meaning]:
    """Return what a metric, a score or a setting is called and means, in English and in Chinese."""
    return english.MEANINGS[code], chinese.MEANINGS[code]


def table() -> dict[str, Text]:
    """Every text by its code: the shipped ones, and those of other packages."""
    return plugins.table(list(SHIPPED.values()), GROUP, Text, "text")


def _known(code: str) -> Text | None:
    return SHIPPED.get(code) or table().get(code)


def text(said: Message | str, lang: Lang = "en", wording: int = WORDINGS[-1]) -> str:
    """Return a message as a sentence; a sentence, as older records store it, is returned as it is.

    `wording` 1 is the English of older records, where it was another. A message that no template
    fits (of a package that is not installed, or of a record that was changed by hand) is shown as
    its code and values."""
    if isinstance(said, str):
        return said
    values = {name: _shown(value, lang, wording) for name, value in said.values.items()}
    found = _known(said.code)
    old = version_1.NOTES.get(said.code) if wording == 1 else None
    template = old or (None if found is None else found.of(lang))
    with suppress(LookupError, ValueError):
        if template is not None:
            return template.format_map(values)
    return " ".join(map(str, [said.code, *values.values()]))


def in_english(said: Message | str | None) -> str | None:
    return None if said is None else text(said)


def _shown(value: Value, lang: Lang, wording: int) -> Any:
    if isinstance(value, Message):
        return text(value, lang, wording)
    if isinstance(value, tuple):
        return SHIPPED["listed"].of(lang).join(text(one, lang, wording) for one in value)
    return value


@overload
def stored(message: Message, wording: int | None) -> Message | str: ...
@overload
def stored(message: Message | None, wording: int | None) -> Message | str | None: ...
def stored(message: Message | None, wording: int | None) -> Message | str | None:
    """Return a message as a record of this wording stores it: from 3 on as it is, before as an
    English sentence.
    """
    if message is None or wording == WORDINGS[-1]:
        return message and storable(message)
    return text(message, wording=wording or 1)


def storable(message: Message) -> Message:
    """Return the message with values that a record can hold: any other, such as a number that is
    not finite or what a damaged rank file has in the place of one, becomes its text."""
    return Message(message.code, {name: _storable(value) for name, value in message.values.items()})


def _storable(value: Value) -> Value:
    if isinstance(value, Message):
        return storable(value)
    plain = isinstance(value, str | int | tuple) or (isinstance(value, float) and isfinite(value))
    return value if plain else str(value)


def all_among(told: Iterable[Message | str], every: Collection[Message | str]) -> bool:
    """Return whether each of the first messages equals one of the others, numbers but for their
    last bits.
    """
    return all(any(_same(one, other) for other in every) for one in told)


def _same(one: Value, other: Value) -> bool:
    if isinstance(one, Message) and isinstance(other, Message):
        names = one.values.keys()
        return (
            one.code == other.code
            and names == other.values.keys()
            and all(_same(one.values[name], other.values[name]) for name in names)
        )
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return isclose(one, other, rel_tol=1e-9)
    return one == other


def both(*messages: Message | None) -> Message | None:
    """Several in one: none of none, and each after the other."""
    known = [one for one in messages if one is not None]
    out = known[0] if known else None
    for one in known[1:]:
        out = Message("both", {"first": out or "", "second": one})
    return out


def items(noun: str) -> Message | str:
    """What a task calls its items, many of them. A package whose noun has no text gets the bare
    one.
    """
    code = f"items.{noun}"
    return Message(code) if _known(code) is not None else f"{noun}s"


def unit(name: str, lang: Lang) -> str:
    """A unit as a page spells it: that of a record, where no text is written for it."""
    found = _known(f"unit.{name}") if lang != "en" else None
    return name if found is None else found.of(lang)


def case_text(told: str, lang: Lang) -> str:
    """A text of a shipped case: its title, what it is about, the source and the note of a published
    row. Texts of a user's own case file stay as they are."""
    return chinese.CASES.get(told, told) if lang == "zh" else told
