"""Define the errors that end a command with one line instead of a traceback, and the helpers that
word them.

Any room raises `RequestError`, `EngineError` or `LostError`; `cli` catches them, prints their text
and chooses the exit code. Also here: recognizing that memory ran out, short texts of untrusted
values, and one clean line of another library's error.
"""

import errno
import os
import re
from collections.abc import Collection, Iterable
from difflib import get_close_matches
from itertools import chain
from typing import Any

# the next step to advise when memory ran out
MORE_MEMORY_HINT = "free memory, or raise its limit (ulimit -v)"
# Messages of torch's CPU allocator and the C library, which have no exception type for a lack of
# memory.
OUT_OF_MEMORY_TEXTS = ("can't allocate memory", os.strerror(errno.ENOMEM))
LIBRARY_NOT_MAPPED = "failed to map segment from shared object"
# The last line on stderr of a Python or C++ program that ran out of memory.
OUT_OF_MEMORY_LINE = re.compile(
    rf"^([\w.]*MemoryError\b.*|.*\bstd::bad_alloc|.*{LIBRARY_NOT_MAPPED}.*)$"
)
# What a library's error says of the machine and not of the problem: paths of files (two slashes or
# more), source files with their line, addresses.
_PLACES = re.compile(
    r"[\w.~+-]*(?:/[\w.~+-]+){2,}(?::\d+)?|[a-z]+://\S*|\b[\w-]+\.(?:cpp|cc|cuh?|hpp|h|py):\d+"
    r"|\b0x[0-9a-fA-F]+"
)
_EXCEPTION_NAME = re.compile(r"\b(?:[A-Za-z_]\w*)?(?:Error|Exception)\b|\b\w+ error: ")
ERROR_LINE_CHARS = 200
_READ_CHARS = 10 * ERROR_LINE_CHARS  # of a first line: some errors list all that a library has


def short_repr(value: Any) -> str:
    """Return the repr of a value from an untrusted file for an error message: one line of at most
    100 characters, cut with `...`.

    Strings and bytes are cut to their first 100 items. A container with more than 20 items, or with
    an item that is long or a container itself, becomes "a list", "a dict" and so on; an integer of
    more than 128 bits becomes "a number of over 128 bits".
    """
    if isinstance(value, str | bytes):
        value = value[:100]
    elif isinstance(value, Collection):
        inner = chain(value.keys(), value.values()) if isinstance(value, dict) else value
        if len(value) > 20 or not all(map(_is_short, inner)):
            return f"a {type(value).__name__}"
    elif not _is_short(value):  # Python refuses to print very long integers
        return "a number of over 128 bits"
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _is_short(value: Any) -> bool:
    """Return whether a value can be printed in full: an integer of at most 128 bits, a text or
    bytes of at most 100 items, or anything else that is not a container.
    """
    if isinstance(value, int):
        return value.bit_length() <= 128
    return (
        len(value) <= 100 if isinstance(value, str | bytes) else not isinstance(value, Collection)
    )


def suggest_name(name: str, names: Iterable[str], label: str = "known") -> str:
    """Return a hint for a name that is not among `names`, for the end of an error message.

    The hint is "did you mean 'X'?" if one name is spelled much like it (upper and lower case are
    equal), else `label` and all names, such as "known: a, b, c". Only the first 200 characters of
    `name` count.
    """
    spelled = {name.lower(): name for name in names}
    near = get_close_matches(name[:200].lower(), spelled, 1)
    return (
        f"did you mean {spelled[near[0]]!r}?" if near else f"{label}: {', '.join(spelled.values())}"
    )


class RequestError(Exception):
    """A request that cannot be carried out. Its text is one line: the value, what is allowed, and
    the next step; `lines` are the lines to print, one unless a subclass for a file with several
    problems returns more.

    The command prints them and ends with exit code 2; no record is written.
    """

    @property
    def lines(self) -> list[str]:
        """Return the lines to print: the text alone. Subclasses for files with several problems
        return one line per problem.
        """
        return [str(self)]


class EngineError(RequestError):
    """A `RequestError` (exit code 2) that concerns one engine: it cannot carry the request out, or
    its packages are not installed here; another engine may be able to.
    """


class LostError(Exception):
    """The work was done but its result could not be saved where it belongs, for example because the
    disk is full.

    The command ends with exit code 1. `unsaved` is the result itself, as text, if no file could
    take it: the command prints it, so that it is not lost; else None.
    """

    def __init__(self, text: str, unsaved: str | None = None) -> None:
        super().__init__(text)
        self.unsaved = unsaved


class ExchangeError(Exception):
    """Ranks cannot exchange data correctly: the sum of a test all-reduce is wrong. Raised in a
    worker after the ranks have joined; the run then fails with reason `network`.
    """


def find_first_cause(error: BaseException) -> BaseException:
    """Follow `__cause__` from an error to the one that it was first raised from, and return that;
    the error itself if it has no cause. A cycle of causes ends the search.
    """
    seen = {id(error)}
    while error.__cause__ is not None and id(error.__cause__) not in seen:
        error = error.__cause__
        seen.add(id(error))
    return error


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error, or the error that it was first raised from, says that host or device
    memory ran out; errors between the two are not looked at.
    """
    return any(_says_out_of_memory(cause) for cause in (error, find_first_cause(error)))


def _says_out_of_memory(error: BaseException) -> bool:
    """Return whether this one error says that memory ran out: a MemoryError, an exception named
    OutOfMemoryError (torch's), a text of an allocator, or of the dynamic loader that could not map
    a library.

    The loader's text does not count if it says that the operation is not permitted, or if the
    library (`error.path`) is known to lie on a file system mounted noexec: neither is a lack of
    memory.
    """
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    text = str(error)
    mapping_failed = LIBRARY_NOT_MAPPED in text and os.strerror(errno.EPERM) not in text
    return any(phrase in text for phrase in OUT_OF_MEMORY_TEXTS) or (
        mapping_failed and not _is_on_noexec_mount(getattr(error, "path", None))
    )


def _is_on_noexec_mount(path: str | None) -> bool:
    """Return whether a file lies on a file system that is mounted noexec; False if the path is None
    or this cannot be found out.
    """
    try:
        return path is not None and bool(os.statvfs(path).f_flag & os.ST_NOEXEC)
    except OSError:
        return False


def format_in_one_line(error: BaseException) -> str:
    """Return the text of an error with all white space, line breaks included, made single spaces;
    the name of its type if it has no text.
    """
    return " ".join(str(error).split()) or type(error).__name__


def clean_error_line(text: str) -> str:
    """Return the first line of another library's error on one line of at most `ERROR_LINE_CHARS`
    characters: without unprintable characters, and with `…` in the place of paths, URLs, source
    lines and addresses; empty if the text is.
    """
    first_line = next(iter(text.strip().splitlines()), "")[:_READ_CHARS]
    printable = "".join(char if char.isprintable() else " " for char in first_line)
    line = " ".join(_PLACES.sub("…", printable).split())
    return line if len(line) <= ERROR_LINE_CHARS else line[: ERROR_LINE_CHARS - 1].rstrip() + "…"


def names_exception(text: str) -> bool:
    """Return whether a text holds the name of an exception class, such as RuntimeError, or the
    beginning of a device library's error, such as `CUDA error: `.
    """
    return _EXCEPTION_NAME.search(text) is not None
