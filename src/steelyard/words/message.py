"""A text before it has a language: a code and its values. The catalogue has a template for each code and language."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Union

Lang = Literal["en", "zh"]
LANGS: tuple[Lang, ...] = ("en", "zh")
Value = Union[str, int, float, "Message", tuple["Value", ...]]  # a tuple is a list in words
Values = dict[str, Value]


@dataclass(frozen=True)
class Message:
    """What is said, and with which numbers and names. Numbers are given as they are: the template rounds them."""

    code: str
    values: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True)
class Text:
    """A template in both languages, with the same placeholders: what a plug-in brings for each of its codes."""

    name: str  # the code
    en: str
    zh: str

    def of(self, lang: Lang) -> str:
        return self.zh if lang == "zh" else self.en
