"""The errors a user meets as one line: a request that cannot be carried out as it was made, a lost answer, a bad network."""

from collections.abc import Iterable
from difflib import get_close_matches


def known(name: str, names: Iterable[str], word: str = "known") -> str:
    """What to write instead of a name that is none of these: the one it looks like, else all of them."""
    spelled = {name.lower(): name for name in names}
    near = get_close_matches(name[:200].lower(), spelled, 1)
    return f"did you mean {spelled[near[0]]!r}?" if near else f"{word}: {', '.join(spelled.values())}"


class RequestError(Exception):
    """One line: the value, what is allowed, the next step. The command ends with exit code 2 and leaves no record."""

    @property
    def lines(self) -> list[str]:
        """As it is printed: a file with several problems has a line for each."""
        return [str(self)]


class EngineError(RequestError):
    """What this engine cannot do, or does not have here; another engine may."""


class LostError(Exception):
    """The work was done and its answer has nowhere to go: a full disk, say. The command ends with exit code 1. What is left
    of the answer, where no file could take it, is printed on stderr."""

    def __init__(self, text: str, left: str | None = None) -> None:
        super().__init__(text)
        self.left = left


class ExchangeError(Exception):
    """Ranks cannot exchange what they must: the sum of an all-reduce is wrong."""
