"""Files: read within a limit, unpacked where they are gzip's; written whole or not at all.

A stranger's file may be of any size and hold anything, so every reader here takes a limit and stops
at it. A file that is written is first complete under another name, then synced, then renamed: a
reader sees all of it or nothing.
"""

import contextlib
import errno
import gzip
import io
import json
import os
import re
import secrets
import stat
import subprocess
import tomllib
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO

FULL = (errno.ENOSPC, errno.EDQUOT)  # no space is left, or none of one's share
GZIP = b"\x1f\x8b"
PART = ".part"  # ends the name of a file that is not complete
CHUNK_BYTES = 1 << 20
GIT_TIMEOUT_S = 10.0
MAX_TOML_DEPTH = 16  # of tables and lists; a case has tables four deep
MAX_TOML_WORD = 255  # characters of a bare key or a number

Content = bytes | Callable[[BinaryIO], None]


class TooLargeError(Exception):
    """A file, or a line of it, is larger than its reader allows."""

    def __init__(self, most_bytes: int) -> None:
        super().__init__(f"larger than {most_bytes} bytes")
        self.most_bytes = most_bytes


class TomlLimitError(ValueError):
    """TOML is nested deeper, or holds a longer word, than its reader allows."""


def open_regular(path: Path) -> io.BufferedReader:
    """Open a regular file for reading, in bytes.

    Raise OSError for anything else, at once: opening a FIFO would wait for a writer, and a device
    may never end."""
    _require_regular(path.stat().st_mode, path)  # before a device is opened
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _require_regular(os.fstat(descriptor).st_mode, path)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _require_regular(mode: int, path: Path) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))


def read(path: Path, most_bytes: int, unpack: bool = True) -> bytes:
    """Read a whole file, unpacked if it is gzip's and `unpack` holds. Raise OSError if it cannot be
    read, TooLargeError beyond the limit."""
    chunks, size = [], 0
    with _unpacked(path, unpack) as (file, _):
        # a read of the whole limit would take that much memory for any file
        while chunk := file.read(CHUNK_BYTES):
            chunks.append(chunk)
            size += len(chunk)
            if size > most_bytes:
                raise TooLargeError(most_bytes)
    return b"".join(chunks)


def begin(path: Path, size_bytes: int) -> bytes:
    """Return the first bytes of a file, unpacked if they are gzip's. OSError where it cannot be
    read."""
    with _unpacked(path) as (file, _):
        return file.read(size_bytes)


def lines(
    path: Path,
    most_line_bytes: int,
    most_bytes: int | None = None,
    watch: Callable[[int], None] | None = None,
) -> Iterator[tuple[int, bytes]]:
    """Number and bytes of each line, one at a time, its end left out. A line beyond the limit comes
    cut off, one byte longer than the limit: its reader says what is wrong with it. `watch` is told
    how far in the file, packed or not, a line ends."""
    size = 0
    with _unpacked(path) as (file, raw):
        number = 0
        while line := file.readline(most_line_bytes + 1):
            number += 1
            size += len(line)
            if most_bytes is not None and size > most_bytes:
                raise TooLargeError(most_bytes)
            if watch is not None:
                watch(raw.tell())
            yield number, line.removesuffix(b"\n")


@contextlib.contextmanager
def _unpacked(path: Path, unpack: bool = True) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """A file to read from, and the one that lies on disk, which is the same unless that is gzip's."""
    try:
        with open_regular(path) as raw:
            packed = unpack and raw.read(len(GZIP)) == GZIP
            raw.seek(0)
            with gzip.GzipFile(fileobj=raw) if packed else contextlib.nullcontext(raw) as file:
                yield file, raw  # type: ignore[misc]
    except (EOFError, zlib.error) as error:
        raise OSError(None, str(error)) from error


def parse(raw: bytes) -> Any:
    """JSON of a stranger: UTF-8, no key twice, no NaN or infinity. ValueError with the reason
    otherwise.
    """
    return json.loads(
        raw.decode("utf-8"), object_pairs_hook=_without_repeats, parse_constant=_no_constant
    )


# Strings of TOML, the longest form first. One over several lines may end in one or two quotes of
# its own. A string without an end reaches to the end of its line or text: searching on behind its
# first quote would take time that grows with the square of its length.
TOML_STRING = (
    r'"""(?:\\.|[^\\])*?(?:"{3,5}|\\?\Z)'
    r"|'''.*?(?:'{3,5}|\Z)"
    r'|"(?:\\.|[^"\\\n])*"?'
    r"|'[^'\n]*'?"
)
_TOML_TEXT = re.compile(rf"({TOML_STRING})|#[^\n]*", re.DOTALL)  # a comment has no group
_TOML_DEEP_KEY = re.compile(rf"(?<![\w-])(?:[\w-]+[ \t]*\.[ \t]*){{{MAX_TOML_DEPTH}}}", re.ASCII)
_TOML_LONG_WORD = re.compile(rf"[\w+-]{{{MAX_TOML_WORD + 1}}}", re.ASCII)


def parse_toml(raw: bytes | str) -> dict[str, Any]:
    """Parse TOML from a stranger. Raise ValueError with the reason if it is not TOML, and
    TomlLimitError if it is nested deeper than `MAX_TOML_DEPTH` or holds a bare key or number longer
    than `MAX_TOML_WORD`.

    Depth is bounded before parsing: tomllib's time and memory grow with the square of a dotted
    key's length. Where this scan and tomllib would disagree on what a string is, the text is not
    TOML, and tomllib stops there."""
    text = raw.decode("utf-8") if isinstance(raw, bytes) else raw
    # a quoted part of a key counts
    bare = _TOML_TEXT.sub(lambda match: "s" if match[1] else "", text)
    if _TOML_DEEP_KEY.search(bare) or _bracket_depth(bare) > MAX_TOML_DEPTH:
        raise TomlLimitError(f"tables nested more than {MAX_TOML_DEPTH} deep")
    if _TOML_LONG_WORD.search(bare):
        raise TomlLimitError(f"a key or a number has more than {MAX_TOML_WORD} characters")
    return tomllib.loads(text)


def _bracket_depth(text: str) -> int:
    """Return how deep brackets and braces are nested at most."""
    depth = deepest = 0
    for bracket in re.findall(r"[\[\]{}]", text):
        depth += 1 if bracket in "[{" else -1
        deepest = max(deepest, depth)
    return deepest


def reason(error: Exception) -> str:
    """Why JSON was refused, with the place."""
    if isinstance(error, json.JSONDecodeError):
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        return f"{error.msg} ({line}column {error.colno})"
    return str(error)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("a key stands twice")
    return out


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number")


# for a part of a text
DECODER = json.JSONDecoder(object_pairs_hook=_without_repeats, parse_constant=_no_constant)


def write(path: Path, content: Content, new: bool = False, durable: bool = True) -> None:
    """A whole file or none, on disk when this returns unless it need not be `durable`. A `new` one
    must not exist yet.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{PART}")
    try:
        with temporary.open("xb") as file:
            if callable(content):
                content(file)
            else:
                file.write(content)
            if durable:
                synced(file)
        if durable:
            place(temporary, path, new)
        else:
            os.replace(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()


def synced(file: BinaryIO) -> None:
    """Bring what was written to an open file to disk."""
    file.flush()
    os.fsync(file.fileno())


def place(temporary: Path, path: Path, new: bool = False) -> None:
    """Give a complete, synced file its name, so that it has it after a loss of power too."""
    if new:
        os.link(temporary, path)
    else:
        os.replace(temporary, path)
    sync(path.parent)


def sync(folder: Path) -> None:
    """Bring the names in a folder to disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def git(folder: Path, *arguments: str) -> str | None:
    """What git says about the folder; None without git, without a repository or without a timely
    answer.
    """
    # Variables such as GIT_DIR, set inside a hook, would point at another repository; no lock is
    # taken to only look.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    command = ["git", "-c", "core.fsmonitor=false", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=GIT_TIMEOUT_S,
            env={**environment, "GIT_OPTIONAL_LOCKS": "0"},
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
