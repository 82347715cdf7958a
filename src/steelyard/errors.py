"""The errors a user meets as one line: a request that cannot be carried out as it was made, a lost
answer, a bad network.
"""

import errno
import os
import re
from collections.abc import Collection, Iterable
from difflib import get_close_matches
from itertools import chain
from typing import Any

# the next step of whoever has too little
MORE_MEMORY = "free memory, or raise its limit (ulimit -v)"
# What torch's CPU allocator and the C library say: neither has an exception of its own for a lack
# of memory.
NO_MEMORY = ("can't allocate memory", os.strerror(errno.ENOMEM))
NOT_MAPPED = "failed to map segment from shared object"
# The last line of a Python program that ran out of memory, or of a C++ program that did.
OUT_OF_MEMORY_LINE = re.compile(rf"^([\w.]*MemoryError\b.*|.*\bstd::bad_alloc|.*{NOT_MAPPED}.*)$")


def short_repr(value: Any) -> str:
    """Return the repr of a value from someone else's file, for an error message: on one line and at
    most 100 characters. A container is named by its type unless it holds a few short values: its
    text can be many times as long as the file."""
    if isinstance(value, str | bytes):
        value = value[:100]
    elif isinstance(value, Collection):
        inner = chain(value.keys(), value.values()) if isinstance(value, dict) else value
        if len(value) > 20 or not all(map(_is_short, inner)):
            return f"a {type(value).__name__}"
    elif not _is_short(value):  # Python refuses to print the longest
        return "a number of over 128 bits"
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _is_short(value: Any) -> bool:
    if isinstance(value, int):
        return value.bit_length() <= 128
    return (
        len(value) <= 100 if isinstance(value, str | bytes) else not isinstance(value, Collection)
    )


def known(name: str, names: Iterable[str], word: str = "known") -> str:
    """What to write instead of a name that is none of these: the one it looks like, else all of
    them.
    """
    spelled = {name.lower(): name for name in names}
    near = get_close_matches(name[:200].lower(), spelled, 1)
    return (
        f"did you mean {spelled[near[0]]!r}?" if near else f"{word}: {', '.join(spelled.values())}"
    )


class RequestError(Exception):
    """One line: the value, what is allowed, the next step. The command ends with exit code 2 and
    leaves no record.
    """

    @property
    def lines(self) -> list[str]:
        """As it is printed: a file with several problems has a line for each."""
        return [str(self)]


class EngineError(RequestError):
    """What this engine cannot do, or does not have here; another engine may."""


class LostError(Exception):
    """The work was done and its answer has nowhere to go: a full disk, say. The command ends with
    exit code 1. What is left of the answer, where no file could take it, is printed on stderr."""

    def __init__(self, text: str, left: str | None = None) -> None:
        super().__init__(text)
        self.left = left


class ExchangeError(Exception):
    """Ranks cannot exchange what they must: the sum of an all-reduce is wrong."""


def first_cause(error: BaseException) -> BaseException:
    """Return the error that an error was raised from, and that one from, as far as that goes."""
    seen = {id(error)}
    while error.__cause__ is not None and id(error.__cause__) not in seen:
        error = error.__cause__
        seen.add(id(error))
    return error


def lacks_memory(error: BaseException) -> bool:
    """Return whether an error, or its first cause, says that memory ran out."""
    return any(_starved(one) for one in (error, first_cause(error)))


def _starved(error: BaseException) -> bool:
    """The dynamic loader says the same of a file system from which nothing may be run."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    text = str(error)
    mapped = NOT_MAPPED in text and os.strerror(errno.EPERM) not in text
    return any(one in text for one in NO_MEMORY) or (
        mapped and not _runs_nothing(getattr(error, "path", None))
    )


def _runs_nothing(path: str | None) -> bool:
    """Return whether a file lies on a file system that is mounted noexec; False if that cannot be
    known.
    """
    try:
        return path is not None and bool(os.statvfs(path).f_flag & os.ST_NOEXEC)
    except OSError:
        return False


def in_one_line(error: BaseException) -> str:
    """Return the text of an error without line breaks, or its type if it has none."""
    return " ".join(str(error).split()) or type(error).__name__
