"""An index of records: what a history needs of each, so that thousands need not be parsed and verified again.

It is a SQLite file beside the records, and nothing but a cache: it can be deleted at any time. It is never trusted over the
records. A row holds only for the file that it was made of, by size and times, or else by its SHA-256; only for this version
of the package; and only with a seal (HMAC) that this user's own key made, so an index that came with somebody's records
says nothing. Whatever else the file is, damaged, truncated, foreign or made to harm, its rows are made anew.
"""

import contextlib
import hashlib
import hmac
import os
import secrets
import sqlite3
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

from pydantic import Field, ValidationError

from steelyard import files
from steelyard.errors import RequestError
from steelyard.schema import Frozen, canonical

NAME = ".steelyard-index.sqlite"
SCHEMA = 1
APPLICATION = 0x57544259  # of the header of the file: whose it is
APPLICATION_AT = 68  # https://www.sqlite.org/fileformat.html, section 1.3
HEADER_BYTES = 100
MAGIC = b"SQLite format 3\x00"
MOST_BYTES = 1 << 30
MOST_TEXT = 1 << 20  # of one entry
TABLE = (
    "CREATE TABLE records (path TEXT PRIMARY KEY, size INTEGER, mtime_ns INTEGER, ctime_ns INTEGER, sha256 TEXT, entry TEXT, "
    "seal TEXT)"
)
KEY_BYTES = 32

Text = Annotated[str, Field(max_length=4096)]
Number = Annotated[float, Field(ge=-1e300, le=1e300)]


class Entry(Frozen):
    """What a history needs of a record. `wrong` says why a file is none that verifies; then nothing else is known."""

    wrong: str | None = None
    id: Text = ""
    created: Text = ""
    status: Text = ""
    codes: tuple[Text, ...] = ()  # of the reasons why it is not valid
    name: Text = ""
    size: Text = ""
    key: Text = ""
    unread_key: Text = Field("", description="the key without the data, which a run that failed early did not come to read")
    read: bool = True
    division: Text = ""
    precision: Text = ""
    engine: Text = ""
    plan: Text = ""
    scope: Text = ""
    devices: tuple[Text, ...] = ()
    setup: Text = Field("", description="hash of tune, software, machine, weights and revision: equal in repeats")
    revision: Text | None = None
    version: Text | None = None
    dirty: bool | None = None
    unit: Text = ""
    rate: Number | None = None
    interval: tuple[Number, Number] | None = None
    quality: Text = ""
    quality_value: Number | None = None


@dataclass(frozen=True)
class Row:
    """An entry, and the file that it is of."""

    size: int
    mtime_ns: int
    ctime_ns: int
    sha256: str
    entry: str  # JSON

    @property
    def times(self) -> tuple[int, int, int]:
        return self.size, self.mtime_ns, self.ctime_ns


@dataclass(frozen=True)
class Seal:
    """Who vouches for rows: a secret of this user, and the version of the package that made them."""

    key: bytes
    version: str

    def of(self, path: str, row: Row) -> str:
        told = canonical([SCHEMA, self.version, path, *row.times, row.sha256, row.entry])
        return hmac.new(self.key, told.encode(), hashlib.sha256).hexdigest()


Rows = dict[str, Row]
Summarize = Callable[[Path], Entry]


def entries(
    paths: Iterable[Path], file: Path | None, seal: Seal | None, summarize: Summarize
) -> tuple[dict[Path, Entry], list[str]]:
    """The entry of every file, from the index where it holds, and what is to be said of the index."""
    if file is None or seal is None:
        return {path: summarize(path) for path in paths}, []
    before, notes = _read(file, seal)
    after: Rows = {}
    out: dict[Path, Entry] = {}
    for path in paths:
        name = os.path.relpath(path, file.parent)
        row, out[path] = _looked_up(path, before.get(name), summarize)
        if row is not None:
            after[name] = row
    if after != before or notes:
        notes += _write(file, after, seal)
    return out, notes


def _looked_up(path: Path, known: Row | None, summarize: Summarize) -> tuple[Row | None, Entry]:
    """A row that holds, or a new one; none of a file that changes meanwhile, or cannot be read."""
    try:
        times = _times(path)
        if known is not None and times == known.times:
            return known, Entry.model_validate_json(known.entry)
        digest = _sha256(path)
        if known is not None and (times[0], digest) == (known.size, known.sha256):
            return Row(*times, digest, known.entry), Entry.model_validate_json(known.entry)
        entry = summarize(path)
        row = Row(*times, digest, entry.model_dump_json(exclude_defaults=True))
        return (row if _times(path) == times and len(row.entry) <= MOST_TEXT else None), entry
    except (OSError, ValidationError):
        return None, summarize(path)


def _times(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _sha256(path: Path) -> str:
    with files.open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read(file: Path, seal: Seal) -> tuple[Rows, list[str]]:
    """The rows that hold; none, with a note, where the file is no index of ours."""
    if not file.is_symlink() and not file.exists():
        return {}, []
    rows: Rows = {}
    try:
        wrong = _strange(file)
        rows = {} if wrong else _rows(file, seal)
    except (OSError, sqlite3.Error, ValueError, TypeError, OverflowError) as error:
        wrong = str(error) or type(error).__name__
    return rows, [f"index {str(file)!r} is not used ({wrong}) and is made anew"] if wrong else []


def _strange(file: Path) -> str | None:
    """What is wrong with a file before SQLite is asked to open it."""
    if file.is_symlink() or not file.is_file():
        return "it is no plain file"
    if file.stat().st_size > MOST_BYTES:
        return f"it is larger than {MOST_BYTES} bytes"
    return None if ours(file) else "it is no index of steelyard"


def ours(file: Path) -> bool:
    """Whether a file's header says that it is an index, sound or not."""
    with files.open_regular(file) as opened:
        header = opened.read(HEADER_BYTES)
    told = header[APPLICATION_AT : APPLICATION_AT + 4]
    return header.startswith(MAGIC) and told == APPLICATION.to_bytes(4, "big")


def _rows(file: Path, seal: Seal) -> Rows:
    """Nothing that the file defines is ever run: its one table is the one that is written here, word for word."""
    with contextlib.closing(sqlite3.connect(f"file:{quote(str(file.resolve()))}?mode=ro&immutable=1", uri=True)) as opened:
        opened.execute("PRAGMA trusted_schema = OFF")
        opened.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 4 * MOST_TEXT)
        told = opened.execute("SELECT type, sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall()
        version = opened.execute("PRAGMA user_version").fetchone()[0]
        if told != [("table", TABLE)] or version != SCHEMA:
            raise ValueError("it has other tables")
        if opened.execute("PRAGMA quick_check").fetchone() != ("ok",):
            raise ValueError("it is damaged")
        out: Rows = {}
        for path, size, mtime_ns, ctime_ns, sha256, entry, sealed in opened.execute(
            "SELECT path, size, mtime_ns, ctime_ns, sha256, entry, seal FROM records"
        ):
            row = Row(size, mtime_ns, ctime_ns, sha256, entry)
            if isinstance(sealed, str) and hmac.compare_digest(sealed.encode(), seal.of(path, row).encode()):
                out[path] = row
        return out


def _write(file: Path, rows: Rows, seal: Seal) -> list[str]:
    """The whole index under another name, then in its place: a reader sees all of it or none."""
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(4)}{files.PART}")
    try:
        with contextlib.closing(sqlite3.connect(temporary)) as made:
            made.execute("PRAGMA journal_mode = MEMORY")
            made.execute(f"PRAGMA application_id = {APPLICATION}")
            made.execute(f"PRAGMA user_version = {SCHEMA}")
            made.execute(TABLE)
            told = [(path, *row.times, row.sha256, row.entry, seal.of(path, row)) for path, row in rows.items()]
            made.executemany("INSERT INTO records VALUES (?, ?, ?, ?, ?, ?, ?)", told)
            made.commit()
        os.replace(temporary, file)
    except (OSError, sqlite3.Error) as error:
        return [f"no index is kept: {str(file)!r} cannot be written: {getattr(error, 'strerror', None) or error}"]
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    return []


def named(file: Path) -> Path:
    """An index that a user named: never another's file, which would be overwritten."""
    try:
        if file.is_symlink() or (file.exists() and not (file.is_file() and ours(file))):
            raise RequestError(f"--index {str(file)!r} exists and is not a steelyard index; name another file")
    except OSError as error:
        raise RequestError(f"--index {str(file)!r} cannot be read: {error.strerror}; name another file") from error
    if not file.parent.is_dir():
        raise RequestError(f"--index {str(file)!r}: no folder {str(file.parent)!r}; make it, or name another file")
    return file


def secret(folder: Path) -> bytes:
    """This user's key for seals, made when there is none. Who can read it can make an index that is believed."""
    path = folder / "key"
    for _ in range(2):
        with contextlib.suppress(FileNotFoundError):
            found = path.read_bytes()
            if len(found) == KEY_BYTES:
                return found
            path.unlink()
        with contextlib.suppress(FileExistsError):
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(handle, "wb") as file:
                file.write(secrets.token_bytes(KEY_BYTES))
    return path.read_bytes()
