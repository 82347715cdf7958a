"""A text before it has a language: a code and its values. Each language has a template for each
code.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Union

from pydantic import ConfigDict

Lang = Literal["en", "zh"]
LANGS: tuple[Lang, ...] = ("en", "zh")
# a tuple is shown as a list
Value = Union[str, int, float, "Message", tuple[Union[str, "Message"], ...]]
Values = dict[str, Value]


@dataclass(frozen=True)
class Message:
    """What is said, and with which numbers and names. Numbers are not rounded: the template rounds
    them. A record stores messages in this form, so pydantic reads and writes them."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", allow_inf_nan=False)

    code: str
    values: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True)
class Text:
    """A template in both languages, with the same placeholders: what a plug-in brings for each of
    its codes.
    """

    name: str  # the code
    en: str
    zh: str

    def of(self, lang: Lang) -> str:
        return self.zh if lang == "zh" else self.en
