"""Read untrusted JSON lines (one JSON value per line) within limits; every error is a RequestError
of one line with file and line number.

The reader of a file passes `line_format`, which says what a line looks like (such as 'a line is
{"text": "…"}'), and `size_hint`, which says how large such a file is (such as "; the test set has 2
MB"); error messages end with these.
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
    """One line of a file, parsed as JSON."""

    number: int  # counted from 1
    raw: bytes  # without the line feed
    value: Any
    where: str  # `PATH: line N`, with which an error message begins


def read(
    path: Path,
    form: str,
    most_line_bytes: int,
    most_bytes: int | None = None,
    usual: str = "",
    watch: Callable[[int], None] | None = None,
) -> Iterator[Line]:
    """Yield the lines of a file, gzipped or not, parsed one at a time.

    Raises RequestError if the file cannot be read, is larger than `most_bytes` unpacked, or a line
    is too long or not JSON. `watch` is called before each line with the byte offset reached in the
    file as it is on disk.
    """
    with refusals(path, usual):
        yield from parse(
            files.lines(path, most_line_bytes, most_bytes, watch), path, form, most_line_bytes
        )


def split(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the number (from 1) and the bytes of each line, without its line feed and without
    copying the whole content.
    """
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
    """Parse numbered lines as JSON, one at a time. Raises RequestError with path and line number if
    a line is longer than `most_line_bytes` or is not JSON in UTF-8.
    """
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
    """Return `value` if it is a string of valid Unicode; otherwise raise RequestError. The message
    begins with `label` and, if it is no string, ends with `line_format`. (JSON can hold half of a
    surrogate pair, which no tokenizer reads.)
    """
    if not isinstance(value, str):
        raise RequestError(f"{what} {shown(value)}; {form}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(f"{what} {shown(value)}; a text must be valid Unicode") from error
    return value


@contextlib.contextmanager
def refusals(path: Path, usual: str = "") -> Iterator[None]:
    """Turn errors of reading a file inside the `with` block into RequestError: OSError, and
    TooLargeError with `size_hint` behind it.
    """
    try:
        yield
    except files.TooLargeError as error:
        raise RequestError(f"{path}: {error}{usual}") from error
    except OSError as error:
        raise RequestError(f"{path}: cannot be read: {error.strerror or error}") from error
