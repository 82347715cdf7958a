"""The parts of tokenized texts that scoring engines read. Each task's own class implements one of
these protocols and has more fields.
"""

from typing import Protocol


class TokenizedTexts(Protocol):
    """Tokenized texts to score, as engines read them: `rows` has the token ids of each text,
    `groups` its group number; texts of one group begin with the same tokens, which division open
    computes once.
    """

    @property
    def rows(self) -> list[list[int]]:
        """The token ids of each text."""

    @property
    def groups(self) -> list[int]:
        """The group number of each text; texts of one group begin with the same tokens."""


class ChoicePrompts(TokenizedTexts, Protocol):
    """Tokenized prompts (`rows`, `groups` as in `TokenizedTexts`) that are each followed by one of
    a few one-token answers; `letters` has the token id of each answer, the same for all prompts.
    """

    @property
    def letters(self) -> list[int]:
        """The token id of each answer."""


class PassageTexts(TokenizedTexts, Protocol):
    """Tokenized texts (`rows`, `groups` as in `TokenizedTexts`) whose tokens all have a loss, and
    whose last words are also scored on their own; `last` has the number of tokens of each text's
    last word, without the token that ends the text.
    """

    @property
    def last(self) -> list[int]:
        """The number of tokens of each text's last word, without the token that ends the text."""


class GeneratedTexts(TokenizedTexts, Protocol):
    """Prompts with generated tokens behind them (`rows`, `groups` as in `TokenizedTexts`);
    `prompt_lens` has the number of tokens of each prompt, `numbers` that of each request.
    """

    @property
    def prompt_lens(self) -> list[int]:
        """The number of tokens of each prompt."""

    @property
    def numbers(self) -> list[int]:
        """The number of each row's request."""
