"""The types of a text before it has a language: `Message`, a code with values, and `Text`, the
template of a code in each language.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Union

from pydantic import ConfigDict

Lang = Literal["en", "zh"]
LANGS: tuple[Lang, ...] = ("en", "zh")
# a tuple is rendered as a list in one text
MessageValue = Union[str, int, float, "Message", tuple[Union[str, "Message"], ...]]
MessageValues = dict[str, MessageValue]


@dataclass(frozen=True)
class Message:
    """A text without a language yet: `code` names a template, `values` are those for its
    placeholders by name. `words.render_text` makes a sentence of it in English or Chinese.

    Values are texts, numbers, which the template rounds, nested messages, and tuples, which are
    rendered as a list. A record stores messages in this form, so pydantic reads and writes them,
    refusing unknown keys, NaN and infinity.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", allow_inf_nan=False)

    code: str
    values: Mapping[str, MessageValue] = field(default_factory=dict)


@dataclass(frozen=True)
class Text:
    """The templates of one code (`name`) in English (`en`) and Chinese (`zh`), with the same
    placeholders; `in_language(lang)` returns one of them. A plug-in brings one for each of its
    codes, through entry points `steelyard.words`.
    """

    name: str  # the code
    en: str
    zh: str

    def in_language(self, lang: Lang) -> str:
        """Return the template of this text in a language ("en" or "zh"). Raise ValueError for
        another one.
        """
        if lang not in LANGS:
            raise ValueError(f"language {lang!r} is not known; allowed: {', '.join(LANGS)}")
        return self.zh if lang == "zh" else self.en
