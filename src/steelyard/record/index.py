"""An index of records: what a history needs of each, so that thousands need not be parsed and
verified again.

It is one JSON file in this user's cache, and can be deleted at any time. It is never trusted over
the records: an entry holds only for the file that it was made of, by size and times, or else by its
SHA-256, and only for this version of the package. Nobody else can have written it: a file that
another user owns or can write is not used. Whatever else is wrong with it, damaged, truncated or
foreign, it is made anew.
"""

import hashlib
import os
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, BinaryIO, Literal
from urllib.parse import quote, unquote_to_bytes

from pydantic import Field, ValidationError

from steelyard import files
from steelyard.errors import RequestError
from steelyard.schema import Frozen

NAME = "records.json"
MAGIC = b'{"steelyard_index":'
MAX_BYTES = 64 << 20  # about 80,000 records
MAX_ENTRY_BYTES = 1 << 20

Text = Annotated[str, Field(max_length=4096)]
Number = Annotated[float, Field(ge=-1e300, le=1e300)]


class Entry(Frozen):
    """What a history needs of a record. `wrong` says why a file is none that verifies; then nothing
    else is known.
    """

    wrong: str | None = None
    id: Text = ""
    created: Text = ""
    status: Text = ""
    codes: tuple[Text, ...] = ()  # of the reasons why it is not valid
    name: Text = ""
    size: Text = ""
    key: Text = ""
    unread_key: Text = Field(
        "",
        description="the key without the data, which a run that failed early did not come to read",
    )
    read: bool = True
    division: Text = ""
    precision: Text = ""
    engine: Text = ""
    plan: Text = ""
    scope: Text = ""
    devices: tuple[Text, ...] = ()
    setup: Text = Field(
        "", description="hash of tune, software, machine, weights and revision: equal in repeats"
    )
    revision: Text | None = None
    version: Text | None = None
    dirty: bool | None = None
    unit: Text = ""
    rate: Number | None = None
    interval: tuple[Number, Number] | None = None
    quality: Text = ""
    quality_value: Number | None = None


class Row(Frozen):
    """An entry, and the file that it was made of."""

    size: int
    mtime_ns: int
    ctime_ns: int
    sha256: str
    entry: Entry

    @property
    def times(self) -> tuple[int, int, int]:
        return self.size, self.mtime_ns, self.ctime_ns


class Index(Frozen):
    """The file. Names of rows are absolute paths, percent-encoded: a path need not be UTF-8."""

    steelyard_index: Literal[2] = 2
    version: str = Field(description="of the package that made the entries")
    rows: dict[str, Row]


Rows = dict[str, Row]
Summarize = Callable[[Path], Entry]


def entries(
    paths: Iterable[Path], file: Path | None, version: str, summarize: Summarize
) -> tuple[dict[Path, Entry], list[str]]:
    """Return the entry of every file, made anew only where the file changed, and warnings on the
    index. Without a `file` every entry is made anew."""
    if file is None:
        return {path: summarize(path) for path in paths}, []
    paths = list(paths)
    folders = {path.absolute().parent for path in paths}
    before, notes = _read(file, version)
    rows, own, out = dict(before), set(), {}
    for path in paths:
        name = quote(os.fsencode(path.absolute()))
        row, out[path] = _look_up(path, rows.pop(name, None), summarize)
        if row is not None:
            rows[name] = row
            own.add(name)
    rows = {name: row for name, row in rows.items() if name in own or not _is_gone(name, folders)}
    if rows != before or notes:
        notes += _write(file, version, rows, own)
    return out, notes


def _is_gone(name: str, folders: set[Path]) -> bool:
    """Return whether a file of these folders is no more. Others are not looked for: they may be on
    a dead mount.
    """
    path = Path(os.fsdecode(unquote_to_bytes(name)))
    return path.parent in folders and not os.path.lexists(path)


def _look_up(path: Path, known: Row | None, summarize: Summarize) -> tuple[Row | None, Entry]:
    """Return the row of a file and its entry; no row for a file that changes meanwhile, or cannot
    be read.
    """
    try:
        times = _times(path)
        if known is not None and times == known.times:
            return known, known.entry
        with files.open_regular(path) as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        same = known is not None and (known.size, known.sha256) == (times[0], digest)
        entry = known.entry if same and known is not None else summarize(path)
        row = Row(size=times[0], mtime_ns=times[1], ctime_ns=times[2], sha256=digest, entry=entry)
        return (
            row if _times(path) == times and len(row.model_dump_json()) <= MAX_ENTRY_BYTES else None
        ), entry
    except (OSError, ValueError):  # a text that JSON cannot hold is a ValueError
        return None, summarize(path)


def _times(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _read(file: Path, version: str) -> tuple[Rows, list[str]]:
    """Return the rows that hold; none, with a warning, where the file is no index of this user."""
    if not os.path.lexists(file):
        return {}, []
    try:
        wrong = _strange(file)
        if wrong is None:
            found = Index.model_validate_json(files.read(file, MAX_BYTES, unpack=False))
            return (found.rows if found.version == version else {}), []
    except ValidationError:
        wrong = "it is damaged"
    except (OSError, files.TooLargeError) as error:
        wrong = getattr(error, "strerror", None) or f"it is {error}"
    return {}, [f"index {str(file)!r} is not used ({wrong}) and is made anew"]


def _strange(file: Path) -> str | None:
    """Return why a file is not read; None where it is an index that only this user can have
    written.
    """
    status = file.lstat()
    if not stat.S_ISREG(status.st_mode):
        return "it is no plain file"
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        return "another user owns it, or can write it"
    return None if _ours(file) else "it is no index of steelyard"


def _ours(file: Path) -> bool:
    """Return whether a file begins as an index, sound or not."""
    with files.open_regular(file) as opened:
        return opened.read(len(MAGIC)) == MAGIC


def _write(file: Path, version: str, rows: Rows, own: set[str]) -> list[str]:
    """Replace the index, so that a reader sees all of it or none; where all is too much, keep the
    rows of this call.
    """

    def dump(opened: BinaryIO) -> None:
        os.fchmod(opened.fileno(), 0o600)
        opened.write(content)

    for kept in (rows, {name: row for name, row in rows.items() if name in own}):
        content = Index(version=version, rows=kept).model_dump_json().encode()
        if len(content) <= MAX_BYTES:
            break
    else:
        return [f"no index is kept: {len(own)} records take more than {MAX_BYTES} bytes"]
    try:
        files.write(file, dump, durable=False)
    except OSError as error:
        return [f"no index is kept: {str(file)!r} cannot be written: {error.strerror}"]
    return []


def named(file: Path) -> Path:
    """Return an index that a user named. Raise RequestError for another's file, which would be
    overwritten.
    """
    try:
        if os.path.lexists(file) and (
            file.is_symlink() or not _ours(file) or file.stat().st_uid != os.geteuid()
        ):
            raise RequestError(
                f"--index {str(file)!r} exists and is not a steelyard index; name another file"
            )
    except OSError as error:
        raise RequestError(
            f"--index {str(file)!r} cannot be read: {error.strerror}; name another file"
        ) from error
    if not file.parent.is_dir():
        raise RequestError(
            f"--index {str(file)!r}: no folder {str(file.parent)!r}; make it, or name another file"
        )
    return file
