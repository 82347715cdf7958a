"""Texts of reports, notes, checks and reasons in English and Chinese: a catalogue of templates by
code.

`metrics` and `run` make a `Message`, a code and values, and records store messages. `report` and
`cli` render them in a language. Other packages bring texts for their own codes through the
entry-point group `steelyard.words`, one `Text` each.
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
Meaning = tuple[str, str]  # name and explanation
SHIPPED = {code: Text(code, english.TEXTS[code], chinese.TEXTS[code]) for code in english.TEXTS}
# 1 and 2: older records store English sentences; 3: records store messages
WORDINGS = (1, 2, 3)


@dataclass(frozen=True)
class Words:
    """The shipped texts in the language of one page."""

    lang: Lang

    def __call__(self, code: str, *values: str) -> str:
        """Return the text of a shipped code with `values` in its numbered placeholders. Raise
        KeyError for an unknown code.
        """
        return SHIPPED[code].of(self.lang).format(*values)

    def known(self, code: str, fallback: str) -> str:
        """Return the text of a code if it is a shipped one, else `fallback`: the bare name that a
        record uses.
        """
        return self(code) if code in SHIPPED else fallback

    def meaning(self, code: str) -> Meaning:
        """Return what a metric, score or setting is called and what it means, in this language.
        Raise KeyError for an unknown code.
        """
        return meaning(code)[LANGS.index(self.lang)]


def pair(code: str) -> tuple[str, str]:
    """Return the text of a shipped code in English and in Chinese. Raise KeyError for an unknown
    code.
    """
    return SHIPPED[code].en, SHIPPED[code].zh


def meaning(code: str) -> tuple[Meaning, Meaning]:
    """Return what a metric, score or setting is called and what it means: (name, meaning) in
    English, then in Chinese. Raise KeyError for an unknown code.
    """
    return english.MEANINGS[code], chinese.MEANINGS[code]


def table() -> dict[str, Text]:
    """Return all texts by their code: the shipped ones, and those of installed packages, which are
    imported. Raise RequestError if a package's text cannot be loaded or repeats a code.
    """
    return plugins.table(list(SHIPPED.values()), GROUP, Text, "text")


def _known(code: str) -> Text | None:
    """Return the text of a code, shipped or of an installed package, or None."""
    return SHIPPED.get(code) or table().get(code)


def text(said: Message | str, lang: Lang = "en", wording: int = WORDINGS[-1]) -> str:
    """Render a message as a sentence; a sentence, as older records store it, is returned as it is.

    `wording` 1 takes the English of older records for codes whose text has changed since. If no
    template fits (its package is not installed, or the record was changed by hand), the code and
    the values are returned, separated by spaces.
    """
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
    """Render a message as an English sentence; None stays None, and a sentence stays as it is."""
    return None if said is None else text(said)


def _shown(value: Value, lang: Lang, wording: int) -> Any:
    """Return a message's value as its template takes it: messages are rendered, tuples become a
    list in one text, and all else stays as it is.
    """
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
    """Return a message in the form in which a record of this wording stores it: for 3 a message
    with storable values, for 1, 2 and None (which is 1) an English sentence. None stays None.
    """
    if message is None or wording == WORDINGS[-1]:
        return message and storable(message)
    return text(message, wording=wording or 1)


def storable(message: Message) -> Message:
    """Return a copy of a message whose values can be written to JSON. Any other value, such as NaN,
    infinity or wrong data from a damaged rank file, becomes its `str`; nested messages are copied
    the same way.
    """
    return Message(message.code, {name: _storable(value) for name, value in message.values.items()})


def _storable(value: Value) -> Value:
    """Return a message's value if JSON can hold it, else its `str`."""
    if isinstance(value, Message):
        return storable(value)
    plain = isinstance(value, str | int | tuple) or (isinstance(value, float) and isfinite(value))
    return value if plain else str(value)


def all_among(told: Iterable[Message | str], every: Collection[Message | str]) -> bool:
    """Return whether each of `messages` equals one of `candidates`. Floats are equal within a
    relative 1e-9; all else must be the same.
    """
    return all(any(_same(one, other) for other in every) for one in told)


def _same(one: Value, other: Value) -> bool:
    """Compare two values of messages: nested messages and tuples part by part, floats within a
    relative 1e-9.
    """
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
    """Join messages to one, in their order, leaving out None: None if nothing is left, and a single
    message as it is.
    """
    known = [one for one in messages if one is not None]
    out = known[0] if known else None
    for one in known[1:]:
        out = Message("both", {"first": out or "", "second": one})
    return out


def items(noun: str) -> Message | str:
    """Return what a task calls its items, in the plural: a message if there is a text `items.NOUN`,
    else the noun with an `s`.
    """
    code = f"items.{noun}"
    return Message(code) if _known(code) is not None else f"{noun}s"


def unit(name: str, lang: Lang) -> str:
    """Return the name of a unit in a language; the name in the record for English, and where no
    text `unit.NAME` exists.
    """
    found = _known(f"unit.{name}") if lang != "en" else None
    return name if found is None else found.of(lang)


def case_text(told: str, lang: Lang) -> str:
    """Return a text of a shipped case (title, description, source or note of a published row) in a
    language. Texts that have no translation, such as those of a user's own case file, are returned
    as they are.
    """
    return chinese.CASES.get(told, told) if lang == "zh" else told
