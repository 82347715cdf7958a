"""Untrusted JSON lines: one value per line, read within limits. Any error is one line, with its
location.

A reader says what a line of its file looks like (`form`, such as 'a line is {"text": "…"}') and how
large a file of its kind is (`usual`, such as "; the test set has 2 MB"); both end the refusals.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as shown
from typing import Any

from steelyard import files
from steelyard.errors import RequestError


@dataclass(frozen=True)
class Line:
    """A line that is JSON."""

    number: int  # counted from 1
    raw: bytes  # without its end
    value: Any
    where: str  # the file and the line: what the refusal of a value begins with


def read(
    path: Path,
    form: str,
    most_line_bytes: int,
    most_bytes: int | None = None,
    usual: str = "",
    watch: Callable[[int], None] | None = None,
) -> Iterator[Line]:
    """The lines of a file, one at a time. `watch` is told how far in the file, compressed or not,
    each ends.
    """
    with refusals(path, usual):
        yield from parse(
            files.lines(path, most_line_bytes, most_bytes, watch), path, form, most_line_bytes
        )


def split(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Number and bytes of each line, without a copy of them all."""
    number = start = 0
    while start < len(content):
        stop = content.find(b"\n", start)
        stop = len(content) if stop < 0 else stop
        number += 1
        yield number, content[start:stop]
        start = stop + 1


def parse(
    lines: Iterable[tuple[int, bytes]], path: Path, form: str, most_line_bytes: int | None = None
) -> Iterator[Line]:
    """The values of numbered lines."""
    for number, raw in lines:
        where = f"{path}: line {number}"
        if most_line_bytes is not None and len(raw) > most_line_bytes:
            raise RequestError(
                f"{where} has more than {most_line_bytes} bytes, the limit for a line; {form}"
            )
        try:
            value = files.parse(raw)
        except (ValueError, RecursionError) as error:
            raise RequestError(
                f"{where} is not JSON in UTF-8: {files.reason(error)}; {form}"
            ) from error
        yield Line(number, raw, value, where)


def text(value: Any, what: str, form: str) -> str:
    """Return a value that is a text. Raise RequestError otherwise: `what` begins the line, `form`
    says what is allowed. JSON can write half a character, which no tokenizer reads."""
    if not isinstance(value, str):
        raise RequestError(f"{what} {shown(value)}; {form}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(f"{what} {shown(value)}; a text must be valid Unicode") from error
    return value


@contextlib.contextmanager
def refusals(path: Path, usual: str = "") -> Iterator[None]:
    """Around what reads a file: one that cannot be read, or is too large, is refused in one line."""
    try:
        yield
    except files.TooLargeError as error:
        raise RequestError(f"{path}: {error}{usual}") from error
    except OSError as error:
        raise RequestError(f"{path}: cannot be read: {error.strerror or error}") from error
