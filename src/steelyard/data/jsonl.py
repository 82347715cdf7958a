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
class JsonLine:
    """One line of a JSON-lines file, yielded by the readers of this file: its `number` from 1, its
    bytes without the line feed (`raw`), its parsed `value` (any JSON value), and its `location` for
    messages, `PATH: line N`.
    """

    number: int  # counted from 1
    raw: bytes  # without the line feed
    value: Any
    location: str  # `PATH: line N`, with which an error message begins


def read_json_lines(
    path: Path,
    line_format: str,
    most_line_bytes: int,
    most_bytes: int | None = None,
    size_hint: str = "",
    watch: Callable[[int], None] | None = None,
) -> Iterator[JsonLine]:
    """Yield the lines of a file, gzipped or not, parsed one at a time.

    Raises RequestError, when the iteration gets there, if the file cannot be read, is larger than
    `most_bytes` unpacked (None: any size), or a line is longer than `most_line_bytes`, empty or not
    JSON. `watch` is called before each line with the number of bytes read so far of the file as it
    is on disk.
    """
    with refuse_unreadable(path, size_hint):
        yield from parse_json_lines(
            files.read_lines(path, most_line_bytes, most_bytes, watch),
            path,
            line_format,
            most_line_bytes,
        )


def split_lines(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the number (from 1) and the bytes of each line, without its line feed and without
    copying the whole content. Empty lines are yielded too; a line feed at the end begins no further
    line.
    """
    number = start = 0
    while start < len(content):
        stop = content.find(b"\n", start)
        stop = len(content) if stop < 0 else stop
        number += 1
        yield number, content[start:stop]
        start = stop + 1


def parse_json_lines(
    lines: Iterable[tuple[int, bytes]],
    path: Path,
    line_format: str,
    most_line_bytes: int | None = None,
) -> Iterator[JsonLine]:
    """Parse numbered lines as JSON and yield them one at a time. Raises RequestError with path and
    line number if a line is longer than `most_line_bytes` (None: no limit), empty, not JSON in
    UTF-8, or has an object with a repeated key, NaN or infinity. `path` is only for messages.
    """
    for number, raw in lines:
        location = f"{path}: line {number}"
        if most_line_bytes is not None and len(raw) > most_line_bytes:
            raise RequestError(
                f"{location} has more than {most_line_bytes} bytes, the limit for a line;"
                f" {line_format}"
            )
        try:
            value = files.parse_json(raw)
        except (ValueError, RecursionError) as error:
            raise RequestError(
                f"{location} is not JSON in UTF-8: {files.explain_json_error(error)}; {line_format}"
            ) from error
        yield JsonLine(number, raw, value, location)


def require_text(value: Any, label: str, line_format: str) -> str:
    """Return `value` if it is a string of valid Unicode; otherwise raise RequestError. The message
    begins with `label` and, if it is no string, ends with `line_format`. (JSON can hold half of a
    surrogate pair, which no tokenizer reads.)
    """
    if not isinstance(value, str):
        raise RequestError(f"{label} {shown(value)}; {line_format}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(f"{label} {shown(value)}; a text must be valid Unicode") from error
    return value


@contextlib.contextmanager
def refuse_unreadable(path: Path, size_hint: str = "") -> Iterator[None]:
    """As a context manager, turn errors of reading a file inside the `with` block into RequestError
    with its path: OSError, and `files.TooLargeError` with `size_hint` behind it.
    """
    try:
        yield
    except files.TooLargeError as error:
        raise RequestError(f"{path}: {error}{size_hint}") from error
    except OSError as error:
        raise RequestError(f"{path}: cannot be read: {error.strerror or error}") from error
