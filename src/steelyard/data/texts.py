"""The parts of tokenized texts that scoring engines read. Each task's own class implements one of
these protocols and has more fields.
"""

from typing import Protocol


class TokenizedTexts(Protocol):
    """Tokenized texts to score: `rows`, the token ids of each, and `groups`, which texts share a
    prefix.
    """

    @property
    def rows(self) -> list[list[int]]:
        """The token ids of each text."""

    @property
    def groups(self) -> list[int]:
        """The group number of each text; texts of one group begin with the same tokens."""


class ChoicePrompts(TokenizedTexts, Protocol):
    """Tokenized prompts that are each followed by one of a few one-token answers, whose token ids
    are `letters`.
    """

    @property
    def letters(self) -> list[int]:
        """The token id of each answer."""


class PassageTexts(TokenizedTexts, Protocol):
    """Tokenized texts whose tokens all have a loss, and whose last words, of `last` tokens each,
    are also scored on their own.
    """

    @property
    def last(self) -> list[int]:
        """The number of tokens of each text's last word, without the token that ends the text."""
