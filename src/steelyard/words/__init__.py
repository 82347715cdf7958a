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
from steelyard.words.coded_message import LANGS, Lang, Message, MessageValue, MessageValues, Text

__all__ = [
    "ENTRY_POINT_GROUP",
    "LANGS",
    "Lang",
    "Meaning",
    "Message",
    "MessageValue",
    "MessageValues",
    "PageWords",
    "Text",
    "are_all_among",
    "get_meanings",
    "get_text_pair",
    "join_messages",
    "load_texts",
    "make_storable",
    "name_items",
    "render_in_english",
    "render_text",
    "to_stored_form",
    "translate_case_text",
    "translate_unit",
]

ENTRY_POINT_GROUP = "steelyard.words"
Meaning = tuple[str, str]  # name and explanation
SHIPPED_TEXTS = {
    code: Text(code, english.TEXTS[code], chinese.TEXTS[code]) for code in english.TEXTS
}
# 1 and 2: older records store English sentences; 3: records store messages
WORDINGS = (1, 2, 3)


@dataclass(frozen=True)
class PageWords:
    """The shipped texts in the language of one page."""

    lang: Lang

    def __call__(self, code: str, *values: str) -> str:
        """Return the text of a shipped code with `values` in its numbered placeholders. Raise
        KeyError for an unknown code.
        """
        return SHIPPED_TEXTS[code].in_language(self.lang).format(*values)

    def get_or_fallback(self, code: str, fallback: str) -> str:
        """Return the text of a code if it is a shipped one, else `fallback`: the bare name that a
        record uses.
        """
        return self(code) if code in SHIPPED_TEXTS else fallback

    def get_meaning(self, code: str) -> Meaning:
        """Return what a metric, score or setting is called and what it means, in this language.
        Raise KeyError for an unknown code.
        """
        return get_meanings(code)[LANGS.index(self.lang)]


def get_text_pair(code: str) -> tuple[str, str]:
    """Return the text of a shipped code in English and in Chinese. Raise KeyError for an unknown
    code.
    """
    return SHIPPED_TEXTS[code].en, SHIPPED_TEXTS[code].zh


def get_meanings(code: str) -> tuple[Meaning, Meaning]:
    """Return what a metric, score or setting is called and what it means: (name, meaning) in
    English, then in Chinese. Raise KeyError for an unknown code.
    """
    return english.MEANINGS[code], chinese.MEANINGS[code]


def load_texts() -> dict[str, Text]:
    """Return all texts by their code: the shipped ones, and those of installed packages, which are
    imported. Raise RequestError if a package's text cannot be loaded or repeats a code.
    """
    return plugins.load_rows_by_name(list(SHIPPED_TEXTS.values()), ENTRY_POINT_GROUP, Text, "text")


def _find_text(code: str) -> Text | None:
    """Return the text of a code, shipped or of an installed package, or None."""
    return SHIPPED_TEXTS.get(code) or load_texts().get(code)


def render_text(message: Message | str, lang: Lang = "en", wording: int = WORDINGS[-1]) -> str:
    """Render a message as a sentence; a sentence, as older records store it, is returned as it is.

    `wording` 1 takes the English of older records for codes whose text has changed since. If no
    template fits (its package is not installed, or the record was changed by hand), the code and
    the values are returned, separated by spaces.
    """
    if isinstance(message, str):
        return message
    values = {name: _render_value(value, lang, wording) for name, value in message.values.items()}
    template_pair = _find_text(message.code)
    old_template = version_1.NOTES.get(message.code) if wording == 1 else None
    template = old_template or (None if template_pair is None else template_pair.in_language(lang))
    with suppress(LookupError, ValueError):
        if template is not None:
            return template.format_map(values)
    return " ".join(map(str, [message.code, *values.values()]))


def render_in_english(message: Message | str | None) -> str | None:
    """Render a message as an English sentence; None stays None, and a sentence stays as it is."""
    return None if message is None else render_text(message)


def _render_value(value: MessageValue, lang: Lang, wording: int) -> Any:
    """Return a message's value as its template takes it: messages are rendered, tuples become a
    list in one text, and all else stays as it is.
    """
    if isinstance(value, Message):
        return render_text(value, lang, wording)
    if isinstance(value, tuple):
        return (
            SHIPPED_TEXTS["listed"]
            .in_language(lang)
            .join(render_text(item, lang, wording) for item in value)
        )
    return value


@overload
def to_stored_form(message: Message, wording: int | None) -> Message | str: ...
@overload
def to_stored_form(message: Message | None, wording: int | None) -> Message | str | None: ...
def to_stored_form(message: Message | None, wording: int | None) -> Message | str | None:
    """Return a message in the form in which a record of this wording stores it: for 3 a message
    with storable values, for 1, 2 and None (which is 1) an English sentence. None stays None.
    """
    if message is None or wording == WORDINGS[-1]:
        return message and make_storable(message)
    return render_text(message, wording=wording or 1)


def make_storable(message: Message) -> Message:
    """Return a copy of a message whose values can be written to JSON. Any other value, such as NaN,
    infinity or wrong data from a damaged rank file, becomes its `str`; nested messages are copied
    the same way.
    """
    return Message(
        message.code, {name: _make_value_storable(value) for name, value in message.values.items()}
    )


def _make_value_storable(value: MessageValue) -> MessageValue:
    """Return a message's value if JSON can hold it, else its `str`."""
    if isinstance(value, Message):
        return make_storable(value)
    is_plain = isinstance(value, str | int | tuple) or (
        isinstance(value, float) and isfinite(value)
    )
    return value if is_plain else str(value)


def are_all_among(messages: Iterable[Message | str], candidates: Collection[Message | str]) -> bool:
    """Return whether each of `messages` equals one of `candidates`. Floats are equal within a
    relative 1e-9; all else must be the same.
    """
    return all(
        any(_are_equal(message, candidate) for candidate in candidates) for message in messages
    )


def _are_equal(one: MessageValue, other: MessageValue) -> bool:
    """Compare two values of messages: nested messages and tuples part by part, floats within a
    relative 1e-9.
    """
    if isinstance(one, Message) and isinstance(other, Message):
        names = one.values.keys()
        return (
            one.code == other.code
            and names == other.values.keys()
            and all(_are_equal(one.values[name], other.values[name]) for name in names)
        )
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_are_equal, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return isclose(one, other, rel_tol=1e-9)
    return one == other


def join_messages(*messages: Message | None) -> Message | None:
    """Join messages to one, in their order, leaving out None: None if nothing is left, and a single
    message as it is.
    """
    present = [message for message in messages if message is not None]
    joined = present[0] if present else None
    for message in present[1:]:
        joined = Message("both", {"first": joined or "", "second": message})
    return joined


def name_items(noun: str) -> Message | str:
    """Return what a task calls its items, in the plural: a message if there is a text `items.NOUN`,
    else the noun with an `s`.
    """
    code = f"items.{noun}"
    return Message(code) if _find_text(code) is not None else f"{noun}s"


def translate_unit(name: str, lang: Lang) -> str:
    """Return the name of a unit in a language; the name in the record for English, and where no
    text `unit.NAME` exists.
    """
    translation = _find_text(f"unit.{name}") if lang != "en" else None
    return name if translation is None else translation.in_language(lang)


def translate_case_text(english_text: str, lang: Lang) -> str:
    """Return a text of a shipped case (title, description, source or note of a published row) in a
    language. Texts that have no translation, such as those of a user's own case file, are returned
    as they are.
    """
    return chinese.CASES.get(english_text, english_text) if lang == "zh" else english_text
