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
    """The shipped texts in one language (`lang`, "en" or "zh") for the builders of a page. They
    call it as `say(code, *values)`, which returns the text with the values filled in (KeyError for
    an unknown code). `get_or_fallback(code, fallback)` is for codes that may lack a text;
    `get_meaning(code)` returns (name, meaning) of a metric, score or setting. Texts of plug-ins are
    not looked up.
    """

    lang: Lang

    def __call__(self, code: str, *values: str) -> str:
        """Return the shipped text of a code in the page's language, with `values` in its numbered
        placeholders ({0}, {1}, …). Raises KeyError for an unknown code, and IndexError if a value
        is missing.
        """
        return SHIPPED_TEXTS[code].in_language(self.lang).format(*values)

    def get_or_fallback(self, code: str, fallback: str) -> str:
        """Return the text of a code in the page's language if it is a shipped one, else `fallback`,
        such as the bare name that a record uses. The text must have no placeholders.
        """
        return self(code) if code in SHIPPED_TEXTS else fallback

    def get_meaning(self, code: str) -> Meaning:
        """Return (name, meaning) of a metric, score or setting in the page's language. Raises
        KeyError for an unknown code.
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
    """Return all texts by their code: the shipped ones first, then those of installed packages
    (entry points `steelyard.words`), which are imported. Raises RequestError if a package's text
    cannot be loaded, is no `Text` or repeats a code.
    """
    return plugins.load_rows_by_name(list(SHIPPED_TEXTS.values()), ENTRY_POINT_GROUP, Text, "text")


def _find_text(code: str) -> Text | None:
    """Return the text of a code, or None; texts of installed packages are loaded only for a code
    that is not shipped (RequestError if that fails).
    """
    return SHIPPED_TEXTS.get(code) or load_texts().get(code)


def render_text(message: Message | str, lang: Lang = "en", wording: int = WORDINGS[-1]) -> str:
    """Render a message, and the messages inside it, as a sentence; a sentence, as older records
    store it, is returned as it is.

    `wording` 1 takes the English of older records, in any language, for codes whose text has
    changed since. If no template fits (its package is not installed, or the record was changed by
    hand), the code and the values are returned, separated by spaces.
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
    """Return a message's value as its template takes it: a message is rendered, a tuple becomes one
    text of its rendered items joined as a list in the language, and all else stays as it is,
    numbers too.
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
    """Return a message in the form in which a record of this wording stores it: for 3 a copy with
    storable values, for 1, 2 and None (which is 1) an English sentence. None stays None.
    """
    if message is None or wording == WORDINGS[-1]:
        return message and make_storable(message)
    return render_text(message, wording=wording or 1)


def make_storable(message: Message) -> Message:
    """Return a copy of a message whose values can be written to JSON: text, integers, finite floats
    and tuples are unchanged, nested messages are copied the same way, and any other value, such as
    NaN, infinity or wrong data from a damaged rank file, becomes its `str`. Items of tuples are not
    looked at.
    """
    return Message(
        message.code, {name: _make_value_storable(value) for name, value in message.values.items()}
    )


def _make_value_storable(value: MessageValue) -> MessageValue:
    """Return a message's value if it is text, an integer, a finite float or a tuple, whose items
    are not looked at; a nested message is copied by `make_storable`, and anything else becomes its
    `str`.
    """
    if isinstance(value, Message):
        return make_storable(value)
    is_plain = isinstance(value, str | int | tuple) or (
        isinstance(value, float) and isfinite(value)
    )
    return value if is_plain else str(value)


def are_all_among(messages: Iterable[Message | str], candidates: Collection[Message | str]) -> bool:
    """Return whether each of `messages` equals one of `candidates`, in any order; True if there are
    none. Floats are equal within a relative 1e-9; all else must be the same.
    """
    return all(
        any(_are_equal(message, candidate) for candidate in candidates) for message in messages
    )


def _are_equal(one: MessageValue, other: MessageValue) -> bool:
    """Return whether two values of messages are equal: nested messages and tuples part by part, two
    floats within a relative 1e-9, all else by `==`.
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
    """Join messages to one, in their order, leaving out None: None if nothing is left, a single
    message as it is, several as nested messages of code `both`, in which `second` is the last
    message and `first` all before it, joined.
    """
    present = [message for message in messages if message is not None]
    joined = present[0] if present else None
    for message in present[1:]:
        joined = Message("both", {"first": joined or "", "second": message})
    return joined


def name_items(noun: str) -> Message | str:
    """Return what a task calls its items, in the plural: a message if there is a text `items.NOUN`,
    else the noun with an `s`. Texts of installed packages are looked up too.
    """
    code = f"items.{noun}"
    return Message(code) if _find_text(code) is not None else f"{noun}s"


def translate_unit(name: str, lang: Lang) -> str:
    """Return the name of a unit in a language, from the text `unit.NAME` (shipped or of an
    installed package); the name as it is for English, and where there is no such text.
    """
    translation = _find_text(f"unit.{name}") if lang != "en" else None
    return name if translation is None else translation.in_language(lang)


def translate_case_text(english_text: str, lang: Lang) -> str:
    """Return a text of a shipped case (title, description, source or note of a published row) in a
    language. For English, and for a text without a translation, such as that of a user's own case
    file, it is returned as it is.
    """
    return chinese.CASES.get(english_text, english_text) if lang == "zh" else english_text
