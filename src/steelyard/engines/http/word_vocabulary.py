"""The texts of the tokens of a model with random weights: a letter and the token's id in digits,
all of one width, so that ids follow from text and back.
"""

from collections.abc import Iterable

LETTER = "t"


def find_word_width(vocab: int) -> int:
    """Return the number of characters of each word of a vocabulary of so many tokens."""
    return len(LETTER) + len(str(vocab - 1))


def format_word(token: int, width: int) -> str:
    """Return the text of a token, of so many characters."""
    return f"{LETTER}{token:0{width - len(LETTER)}}"


def format_words(tokens: Iterable[int], width: int) -> str:
    """Return the text of tokens, with blanks between their words."""
    return " ".join(format_word(token, width) for token in tokens)


def parse_words(text: str, width: int) -> list[int]:
    """Return the ids of words without blanks between them. Raises ValueError for other text."""
    words = [text[i : i + width] for i in range(0, len(text), width)]
    for word in words:
        if len(word) != width or word[0] != LETTER or not (word.isascii() and word[1:].isdecimal()):
            raise ValueError(f"not a word of this model's vocabulary: {word!r}")
    return [int(word[1:]) for word in words]
