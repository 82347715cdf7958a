"""Read files within a size limit, and write files so that a reader sees all of a file or nothing.

An untrusted file may have any size and content, so the functions that read a file's content take a
limit and stop at it; gzip is unpacked on the way. A file is written completely under a temporary
name in the same folder, synced to disk, and then renamed. Parsers for untrusted JSON and TOML, and
a call of git, are here too. All rooms use this module; it knows nothing of records or checkpoints.
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

DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)  # the disk is full, or the user's quota is
GZIP_MAGIC = b"\x1f\x8b"
PART_SUFFIX = ".part"  # suffix of a file that is not complete
CHUNK_BYTES = 1 << 20
GIT_TIMEOUT_S = 10.0
MAX_TOML_DEPTH = 16  # of tables and lists; a case has tables four deep
MAX_TOML_WORD = 255  # characters of a bare key or a number

FileContent = bytes | Callable[[BinaryIO], None]


class TooLargeError(Exception):
    """A file, or a line of it, is larger than its reader allows. `max_bytes` is that limit in
    bytes, counted after unpacking gzip.
    """

    def __init__(self, max_bytes: int) -> None:
        super().__init__(f"larger than {max_bytes} bytes")
        self.max_bytes = max_bytes


class TomlLimitError(ValueError):
    """The ValueError that `parse_toml` raises for a text it does not parse: nested deeper than
    `MAX_TOML_DEPTH` tables and lists, or with a bare key or number of more than `MAX_TOML_WORD`
    characters.
    """


def open_regular(path: Path) -> io.BufferedReader:
    """Open a regular file for reading bytes, following links. The caller closes it.

    Raise OSError for a folder, FIFO, socket or device, without waiting: opening a FIFO would wait
    for a writer, and a device may never end.
    """
    _require_regular(path.stat().st_mode, path)  # before a device is opened
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _require_regular(os.fstat(descriptor).st_mode, path)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _require_regular(mode: int, path: Path) -> None:
    """Raise IsADirectoryError if `mode` is that of a folder, OSError if it is not that of a regular
    file; `path` is only for the message.
    """
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))


def read_file(path: Path, max_bytes: int, unpack: bool = True) -> bytes:
    """Return the whole content of a regular file, unpacked if it is gzip and `unpack` is true.

    Raise OSError if it cannot be read or its gzip data is damaged, TooLargeError if the content has
    more than `max_bytes`.
    """
    chunks, size = [], 0
    with _open_unpacked(path, unpack) as (file, _):
        # one read of the whole limit would allocate that much for any file
        while chunk := file.read(CHUNK_BYTES):
            chunks.append(chunk)
            size += len(chunk)
            if size > max_bytes:
                raise TooLargeError(max_bytes)
    return b"".join(chunks)


def read_file_start(path: Path, size_bytes: int) -> bytes:
    """Return the first `size_bytes` of a regular file's content, unpacked if it is gzip; fewer if
    it is shorter. Raise OSError if it cannot be read.
    """
    with _open_unpacked(path) as (file, _):
        return file.read(size_bytes)


def read_lines(
    path: Path,
    max_line_bytes: int,
    max_bytes: int | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> Iterator[tuple[int, bytes]]:
    """Yield the number (from 1) and the bytes of each line of a regular file, without its line
    feed; gzip is unpacked.

    A line longer than `max_line_bytes` is not refused: it is yielded in parts of one byte more than
    the limit, each with its own number, and the caller refuses the first. `on_progress` is called
    before each line with the number of bytes of the file on disk, packed or not, that were read so
    far. Raise TooLargeError when all lines together exceed `max_bytes`, OSError if the file cannot
    be read.
    """
    size = 0
    with _open_unpacked(path) as (file, disk_file):
        number = 0
        while line := file.readline(max_line_bytes + 1):
            number += 1
            size += len(line)
            if max_bytes is not None and size > max_bytes:
                raise TooLargeError(max_bytes)
            if on_progress is not None:
                on_progress(disk_file.tell())
            yield number, line.removesuffix(b"\n")


@contextlib.contextmanager
def _open_unpacked(path: Path, unpack: bool = True) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """Open a regular file as a context manager that yields two file objects: one to read the
    content from, and the file on disk. They are the same object unless the file is gzip and
    `unpack` is true.

    Raise OSError if it cannot be opened. Damaged gzip data that is met inside the `with` block is
    raised as OSError.
    """
    try:
        with open_regular(path) as disk_file:
            packed = unpack and disk_file.read(len(GZIP_MAGIC)) == GZIP_MAGIC
            disk_file.seek(0)
            with (
                gzip.GzipFile(fileobj=disk_file)
                if packed
                else contextlib.nullcontext(disk_file) as file
            ):
                yield file, disk_file  # type: ignore[misc]
    except (EOFError, zlib.error) as error:
        raise OSError(None, str(error)) from error


def parse_json(raw: bytes) -> Any:
    """Return the value of untrusted JSON in UTF-8. Raise ValueError with the reason if it is not
    JSON or UTF-8, repeats a key in an object, or has NaN or infinity; RecursionError if it is
    nested too deep.
    """
    return json.loads(
        raw.decode("utf-8"),
        object_pairs_hook=_refuse_repeated_keys,
        parse_constant=_refuse_constant,
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
    """Return the dict of an untrusted TOML text. Raise ValueError with the reason if it is not
    UTF-8 or not TOML, and TomlLimitError if it is nested deeper than `MAX_TOML_DEPTH` or holds a
    bare key or number longer than `MAX_TOML_WORD`.

    Depth is bounded before parsing: tomllib's time and memory grow with the square of a dotted
    key's length. Where this scan and tomllib would disagree on what a string is, the text is not
    TOML, and tomllib stops there.
    """
    text = raw.decode("utf-8") if isinstance(raw, bytes) else raw
    # a quoted part of a key counts as one, too
    bare = _TOML_TEXT.sub(lambda match: "s" if match[1] else "", text)
    if _TOML_DEEP_KEY.search(bare) or _bracket_depth(bare) > MAX_TOML_DEPTH:
        raise TomlLimitError(f"tables nested more than {MAX_TOML_DEPTH} deep")
    if _TOML_LONG_WORD.search(bare):
        raise TomlLimitError(f"a key or a number has more than {MAX_TOML_WORD} characters")
    return tomllib.loads(text)


def _bracket_depth(text: str) -> int:
    """Return how deep brackets and braces in a text are nested at most; strings and comments must
    have been removed.
    """
    depth = deepest = 0
    for bracket in re.findall(r"[\[\]{}]", text):
        depth += 1 if bracket in "[{" else -1
        deepest = max(deepest, depth)
    return deepest


def explain_json_error(error: Exception) -> str:
    """Return why `parse_json` refused a text, for a message: of a JSONDecodeError the parser's
    reason with line (unless it is the first) and column, of any other error its text.
    """
    if isinstance(error, json.JSONDecodeError):
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        return f"{error.msg} ({line}column {error.colno})"
    return str(error)


def _refuse_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs of a JSON object as a dict; raise ValueError if a key stands twice."""
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("a key is repeated")
    return members


def _refuse_constant(name: str) -> Any:
    """Raise ValueError for NaN, Infinity or -Infinity in JSON; called by the parser with the
    constant's name.
    """
    raise ValueError(f"{name} is not allowed in JSON")


# to parse JSON values inside a longer text, with the same refusals as parse_json
JSON_DECODER = json.JSONDecoder(
    object_pairs_hook=_refuse_repeated_keys, parse_constant=_refuse_constant
)


def write_file(path: Path, content: FileContent, new: bool = False, durable: bool = True) -> None:
    """Write a file completely or not at all, replacing an existing one; `content` is its bytes, or
    a function that writes them to an open file.

    With `new`, raise FileExistsError instead of replacing; `new` without `durable` raises
    ValueError. With `durable`, file and name are synced to disk before this returns. The content
    goes to a temporary file `.NAME.XXXXXXXX.part` in the same folder first, which is removed in any
    case. Raise OSError if it cannot be written.
    """
    if new and not durable:
        raise ValueError("write_file: new=True needs durable=True")
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{PART_SUFFIX}")
    try:
        with temporary.open("xb") as file:
            if callable(content):
                content(file)
            else:
                file.write(content)
            if durable:
                sync_file(file)
        if durable:
            move_into_place(temporary, path, new)
        else:
            os.replace(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()


def sync_file(file: BinaryIO) -> None:
    """Flush an open file and sync its content to disk (fsync)."""
    file.flush()
    os.fsync(file.fileno())


def move_into_place(temporary: Path, path: Path, new: bool = False) -> None:
    """Give a complete, synced temporary file its final name and sync the folder, so that the name
    survives a loss of power.

    With `new`, link it: raise FileExistsError if `path` exists, and leave the temporary name for
    the caller to remove. Otherwise rename it over `path`.
    """
    if new:
        os.link(temporary, path)
    else:
        os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Sync a folder to disk (fsync), so that new names in it survive a loss of power."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def run_git(folder: Path, *arguments: str) -> str | None:
    """Run git in a folder and return its stdout without surrounding white space; None if git is
    missing or fails (no repository), or does not answer within `GIT_TIMEOUT_S`.

    Variables GIT_* of the environment are not passed on, and no optional locks are taken.
    """
    # Variables such as GIT_DIR, set inside a hook, would point at another repository. Reading needs
    # no lock.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    command = ["git", "-c", "core.fsmonitor=false", "-C", str(folder), *arguments]
    try:
        process = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=GIT_TIMEOUT_S,
            env={**environment, "GIT_OPTIONAL_LOCKS": "0"},
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return process.stdout.strip() if process.returncode == 0 else None
