"""Cache a summary of every record in one index file, so that `history` does not parse and verify
thousands of records again.

The index is one JSON file in the user's cache folder and can be deleted at any time. It is never
trusted over the records: a summary is used only for the file that it was made from, known by size
and times, or else by its SHA-256, and only by the version of the package that made it. An index
that another user owns or can write is not used; one that is damaged, truncated or no index at all
is replaced.

In the flow: cli/compare.py (history) -> `summarize_records` -> metrics/rate_history.py.
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
from steelyard.schema import FrozenModel

INDEX_NAME = "records.json"
INDEX_MAGIC = b'{"steelyard_index":'
MAX_BYTES = 64 << 20  # about 80,000 records
MAX_ENTRY_BYTES = 1 << 20

Text = Annotated[str, Field(max_length=4096)]
Number = Annotated[float, Field(ge=-1e300, le=1e300)]


class RecordSummary(FrozenModel):
    """What `history` needs of a record, cached in the index; made by `summarize_record`
    (metrics/rate_history.py). `wrong` says why a file is not a record that verifies, and then all
    other fields have their defaults; it is None for a sound one.

    `codes` are those of its reasons; `name` and `size` are the case's; `engine_mark` says who
    vouches for the engine; `scope` is how much of the
    question was run, as text; `read` is whether the run came to read its data. `key` (question with
    data), `unread_key` (question alone) and `setup` (tune, software, machine, weights) are hashes
    to group runs by. `rate` is the headline metric in `unit`, with its 95 % `interval`, and
    `max_interval` the widest that the case allows, as a share of the rate; `quality` names the
    quality metric, `quality_value` is its value. `revision`, `version` and `dirty` are of the
    package that made the record. None is what is not known.
    """

    wrong: str | None = None
    id: Text = ""
    created: Text = ""
    status: Text = ""
    codes: tuple[Text, ...] = ()  # of its reasons
    name: Text = ""
    size: Text = ""
    key: Text = ""
    unread_key: Text = Field(
        "",
        description="the key without the data, which a run that failed early did not read",
    )
    read: bool = True
    division: Text = ""
    precision: Text = ""
    engine: Text = ""
    engine_mark: Text = Field(
        "ours", description="who vouches for the engine (metrics/vouching.py)"
    )
    plan: Text = ""
    scope: Text = ""
    devices: tuple[Text, ...] = ()
    accelerator_package: Text | None = Field(
        None, description="that of the accelerator, unless it is this one; empty: not known"
    )
    setup: Text = Field(
        "", description="hash of tune, software, machine, weights and revision: equal in repeats"
    )
    revision: Text | None = None
    version: Text | None = None
    dirty: bool | None = None
    unit: Text = ""
    rate: Number | None = None
    interval: tuple[Number, Number] | None = None
    max_interval: Number | None = None
    quality: Text = ""
    quality_value: Number | None = None


class IndexRow(FrozenModel):
    """A row of the index: the summary of a record (`entry`), with size in bytes, mtime and ctime in
    ns and SHA-256 of the file that it was made from. `size_and_times` returns the first three, by
    which an unchanged file is recognized.
    """

    size: int
    mtime_ns: int
    ctime_ns: int
    sha256: str
    entry: RecordSummary

    @property
    def size_and_times(self) -> tuple[int, int, int]:
        """Return size in bytes, mtime and ctime in ns of the record file that this row was made
        from, as `_stat_file` does.
        """
        return self.size, self.mtime_ns, self.ctime_ns


class RecordIndex(FrozenModel):
    """The content of the index file records.json. Keys of `rows` are absolute paths of record
    files, percent-encoded because a path need not be UTF-8. `version` is a hash of the package that
    made the summaries: another package does not use them. `steelyard_index` is the version of the
    format.
    """

    steelyard_index: Literal[2] = 2
    version: str = Field(description="version of the package that made the entries")
    rows: dict[str, IndexRow]


IndexRows = dict[str, IndexRow]
Summarizer = Callable[[Path], RecordSummary]


def summarize_records(
    paths: Iterable[Path], index_file: Path | None, version: str, summarize: Summarizer
) -> tuple[dict[Path, RecordSummary], list[str]]:
    """Return the summary of every record file by its path, and a list of warnings about the index.

    `summarize` makes a summary and is called only for files that are new or changed since the index
    `index_file` was written, or for all if it is None. The index is then replaced if anything in it
    changed; files of the same folders that no longer exist are dropped from it. Problems with the
    index never raise: they become warnings. `version` is the hash of this package; an index with
    another version counts as empty.
    """
    if index_file is None:
        return {path: summarize(path) for path in paths}, []
    paths = list(paths)
    folders = {path.absolute().parent for path in paths}
    stored_rows, warnings = _read_index(index_file, version)
    rows, used, summaries = dict(stored_rows), set(), {}
    for path in paths:
        row_key = quote(os.fsencode(path.absolute()))
        row, summaries[path] = _look_up(path, rows.pop(row_key, None), summarize)
        if row is not None:
            rows[row_key] = row
            used.add(row_key)
    rows = {
        row_key: row
        for row_key, row in rows.items()
        if row_key in used or not _is_gone(row_key, folders)
    }
    if rows != stored_rows or warnings:
        warnings += _write_index(index_file, version, rows, used)
    return summaries, warnings


def _is_gone(row_key: str, folders: set[Path]) -> bool:
    """Return whether a record file, given by its percent-encoded path, lies directly in one of
    these folders and no longer exists. False for other folders, which are not touched: they may be
    on a dead mount.
    """
    path = Path(os.fsdecode(unquote_to_bytes(row_key)))
    return path.parent in folders and not os.path.lexists(path)


def _look_up(
    path: Path, known: IndexRow | None, summarize: Summarizer
) -> tuple[IndexRow | None, RecordSummary]:
    """Return the index row of a record file and its summary: those in `known`, the row of an
    earlier index, if the file is the same, else made by `summarize`.

    The file is the same if size and times are equal, else if size and SHA-256 are. The row is None,
    so that it is not stored, if the file cannot be read, changes meanwhile, or makes a row of more
    than `MAX_ENTRY_BYTES`. Errors of the file are not raised here.
    """
    try:
        times = _stat_file(path)
        if known is not None and times == known.size_and_times:
            return known, known.entry
        with files.open_regular(path) as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        is_same = known is not None and (known.size, known.sha256) == (times[0], digest)
        summary = known.entry if is_same and known is not None else summarize(path)
        row = IndexRow(
            size=times[0], mtime_ns=times[1], ctime_ns=times[2], sha256=digest, entry=summary
        )
        return (
            row
            if _stat_file(path) == times and len(row.model_dump_json()) <= MAX_ENTRY_BYTES
            else None
        ), summary
    except (OSError, ValueError):  # ValueError: a text that JSON cannot hold
        return None, summarize(path)


def _stat_file(path: Path) -> tuple[int, int, int]:
    """Return size in bytes, mtime and ctime in ns of a file."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _read_index(file: Path, version: str) -> tuple[IndexRows, list[str]]:
    """Read the rows of an index file, and return them with a list of warnings.

    There are no rows and no warning if the file does not exist or is of another `version`; no rows
    and one warning if it is damaged, too large, unreadable, or not an index that only this user can
    have written.
    """
    if not os.path.lexists(file):
        return {}, []
    try:
        problem = _find_index_problem(file)
        if problem is None:
            index = RecordIndex.model_validate_json(files.read_file(file, MAX_BYTES, unpack=False))
            return (index.rows if index.version == version else {}), []
    except ValidationError:
        problem = "it is damaged"
    except (OSError, files.TooLargeError) as error:
        problem = getattr(error, "strerror", None) or f"it is {error}"
    return {}, [f"index {str(file)!r} is ignored ({problem}) and rebuilt"]


def _find_index_problem(file: Path) -> str | None:
    """Return why a file must not be read as an index (not a regular file, owned or writable by
    another user, no index), or None if it may be. Raise OSError if it cannot be looked at.
    """
    status = file.lstat()
    if not stat.S_ISREG(status.st_mode):
        return "it is not a regular file"
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        return "another user owns it, or can write it"
    return None if _is_index(file) else "it is not a steelyard index"


def _is_index(file: Path) -> bool:
    """Return whether a file begins with the bytes of an index; the rest is not checked. Raise
    OSError if it cannot be read.
    """
    with files.open_regular(file) as opened:
        return opened.read(len(INDEX_MAGIC)) == INDEX_MAGIC


def _write_index(file: Path, version: str, rows: IndexRows, used: set[str]) -> list[str]:
    """Replace the index file as a whole, with mode 0600, and return warnings: an empty list if all
    went well.

    If all rows exceed `MAX_BYTES`, only those of this call (`used`, their keys) are written; if
    these are too large as well, or the file cannot be written, nothing is, and one warning says so.
    """

    def dump(open_file: BinaryIO) -> None:
        """Make the open file private to the user (mode 0600) and write the index content, of the
        enclosing function, to it.
        """
        os.fchmod(open_file.fileno(), 0o600)
        open_file.write(content)

    for written_rows in (rows, {name: row for name, row in rows.items() if name in used}):
        content = RecordIndex(version=version, rows=written_rows).model_dump_json().encode()
        if len(content) <= MAX_BYTES:
            break
    else:
        return [f"the index was not saved: {len(used)} records take more than {MAX_BYTES} bytes"]
    try:
        files.write_file(file, dump, durable=False)
    except OSError as error:
        return [f"the index was not saved: {str(file)!r} cannot be written: {error.strerror}"]
    return []


def check_index_path(file: Path) -> Path:
    """Return the path that a user gave as `--index`, if an index may be written there.

    Raise RequestError if the file exists and is a link, not a steelyard index, or another user's
    (it would be overwritten), if it cannot be read, or if its folder does not exist.
    """
    try:
        if os.path.lexists(file) and (
            file.is_symlink() or not _is_index(file) or file.stat().st_uid != os.geteuid()
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
