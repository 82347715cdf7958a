"""Tokenised texts: the part that scoring engines read. Each task's own class has more."""

from typing import Protocol


class Texts(Protocol):
    @property
    def rows(self) -> list[list[int]]:
        """The tokens of each text."""

    @property
    def groups(self) -> list[int]:
        """A number for each text; those of one group begin with the same tokens."""


class Choices(Texts, Protocol):
    """Texts that are each followed by one of a few answers."""

    @property
    def letters(self) -> list[int]:
        """The token of each answer."""


class Passages(Texts, Protocol):
    """Texts that are scored token by token, and their last words on their own."""

    @property
    def last(self) -> list[int]:
        """How many tokens the last word of each text has; the end of the text is not one of them."""
