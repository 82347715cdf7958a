"""Download one file from one of its addresses: resume where a transfer broke, check the result, and
only then give the file its name.

The bytes received so far are in `NAME.part`; `NAME.part.json` beside it says from which address and
of which version they are. A partial file is continued only from that address and only as that
version (HTTP If-Range); otherwise the server sends the whole file. Called by `sources/fetch.py`;
requests go through `sources/http.py`.
"""

import hashlib
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from steelyard import files
from steelyard.errors import RequestError
from steelyard.schema import Frozen
from steelyard.sources.http import BrokenError, RangeError, RefusedError, Reply, Web, is_loopback
from steelyard.sources.store import CheckedBy, Downloaded

TRIES = 4  # in a row without progress, per address
PROGRESS_BYTES = 64 << 10  # the least that counts as progress
PAUSE_S = 1.0  # before the second try, doubled before each further one
SPARE_BYTES = 64 << 20  # reserve that stays free on the disk
NOTE_BYTES = 64 << 10

Watch = Callable[[int, int], None]  # bytes received, and total (0: unknown)
Say = Callable[[str], None]


class DownloadError(Exception):
    """A file could not be downloaded from any address, or is not the right one; the text is one
    line with the reasons.
    """


class MismatchError(Exception):
    """A file is not the expected one: its size, hash or content is wrong."""


class NoSpaceError(RequestError):
    """The disk has no room for a file."""


@dataclass(frozen=True)
class Expected:
    """What is known of a file before it is downloaded.

    None means unknown. `git_blob` is git's object id (SHA-1). `most_bytes` limits the size if it is
    unknown. `origin` names, for error messages, who says so; `checked_by` is what the manifest will
    say the file was checked by.
    """

    name: str
    size_bytes: int | None
    sha256: str | None
    git_blob: str | None
    most_bytes: int
    origin: str
    checked_by: CheckedBy = "nothing"


class Part(Frozen):
    """The JSON beside a partial file: its address, the server's version of it (ETag or
    Last-Modified) and its full size. Without a validator the file cannot be resumed.
    """

    url: str
    validator: str | None
    size_bytes: int | None


class Meter:
    """Adds up the bytes that this command transfers over all its files, and reports them to
    `watch(done, total)`; total is 0 while unknown. Bytes left by an earlier command are not
    counted.
    """

    def __init__(self, watch: Watch) -> None:
        """Begin at 0 bytes; `watch` is called with (bytes so far, total or 0)."""
        self._watch, self._done, self._ahead = watch, 0, 0
        self._end: int | None = None

    def expect(self, size_bytes: int) -> None:
        """Set the number of bytes of files that have not begun yet, as far as known."""
        self._ahead = size_bytes

    def begin(self, size_bytes: int | None) -> None:
        """Note that a transfer of `size_bytes` begins; None if the size is unknown, and then the
        total is unknown too.
        """
        self._end = None if size_bytes is None else self._done + size_bytes

    def add(self, count: int) -> None:
        """Count received bytes and report progress."""
        self._done += count
        self._watch(self._done, 0 if self._end is None else self._end + self._ahead)

    def passed(self, size_bytes: int) -> None:
        """Take a file that is about to begin off the bytes ahead; `begin` then counts it."""
        self._ahead -= size_bytes


@dataclass(frozen=True)
class Tools:
    """What a download uses of the outside world, so that tests can replace it: HTTP, sleeping
    (seconds), messages to the user, and the progress meter.
    """

    web: Web
    sleep: Callable[[float], None]
    say: Say
    meter: Meter


def download(wanted: Expected, urls: tuple[str, ...], folder: Path, tools: Tools) -> Downloaded:
    """Download a file into `folder` and check it, trying the addresses in order; return its size,
    SHA-256 and the address it came from.

    An address from which a partial file exists is tried first. A partial file survives a broken
    transfer but is deleted if the complete file is wrong. Reports each failed address with
    `tools.say`. Raises DownloadError if no address works, NoSpaceError if the disk is full.
    """
    target, reasons = folder / wanted.name, []
    earlier = from_url(target)
    if earlier in urls:  # a partial file continues only from its own address
        urls = (earlier, *(url for url in urls if url != earlier))
    for url in urls:
        try:
            _transfer(wanted, url, target, tools)
            arrived = check(_part(target), wanted, url)
        except (RefusedError, BrokenError) as error:
            reason = str(error)
        except MismatchError as error:
            discard(target)
            reason = str(error)
        else:
            files.place(_part(target), target)
            return arrived
        tools.say(f"warning: {url}: {reason}")
        reasons.append(f"{urlsplit(url).netloc}: {reason}")
    kept = size_of(_part(target))
    rest = (
        f"{kept} bytes are kept, run the same command again to go on"
        if kept
        else "try later, or bring it with --from DIR"
    )
    raise DownloadError(f"{wanted.name} could not be had: {'; '.join(reasons)}; {rest}")


def _transfer(wanted: Expected, url: str, target: Path, tools: Tools) -> None:
    """Complete the partial file from one address, resuming as often as needed.

    Gives up with TransferError after four tries in a row that bring less than 64 KiB, or four
    replies whose ranges do not fit; sleeps between tries, doubling from one second. Raises
    RefusedAddressError for plain http of a file without known SHA-256, unless it is from this
    machine.
    """
    if url.startswith("http:") and wanted.sha256 is None and not is_loopback(url):
        raise RefusedError(
            "plain http, and no SHA-256 is known that would tell whose bytes they are; use https"
        )
    failed = odd = 0
    while True:
        before = size_of(_part(target))
        try:
            return _attempt(wanted, url, target, tools)
        except RangeError as error:
            discard(target)
            odd += 1
            if odd >= TRIES:
                raise BrokenError(
                    f"its ranges are not those of one file (tried {odd} times)"
                ) from error
        except BrokenError as error:
            failed = 1 if size_of(_part(target)) - before >= PROGRESS_BYTES else failed + 1
            if failed >= TRIES:
                raise BrokenError(f"{error} (tried {failed} times)") from error
            wait_s = max(error.wait_s, PAUSE_S * 2 ** (failed - 1))
            tools.say(f"{wanted.name}: {error}; again in {wait_s:g} s")
            tools.sleep(wait_s)


def _attempt(wanted: Expected, url: str, target: Path, tools: Tools) -> None:
    """Make one request and append what arrives to the partial file, or begin it anew if the server
    sends the whole file; return at once if it is already complete.

    Writes the JSON beside it, flushes after each chunk and syncs at the end. Raises TransferError,
    RangeError, RefusedAddressError, NoSpaceError, or MismatchError beyond the size limit.
    """
    part, note = _part(target), _note(target)
    usable = note is not None and note.url == url and note.validator is not None
    start = size_of(part) if usable else 0
    if note is not None and start and start == note.size_bytes:
        return
    with tools.web.get(
        url, start, note.validator if note is not None and usable else None
    ) as reply:
        _check_length(wanted, reply)
        left = None if reply.total is None else reply.total - reply.start
        check_space(target.parent, left)
        if reply.start:
            tools.say(f"{wanted.name}: continues after {reply.start} bytes")
        else:
            discard(target)
            told = Part(url=url, validator=reply.validator, size_bytes=reply.total)
            files.write(_note_path(target), told.model_dump_json().encode())
        tools.meter.begin(left)
        size = reply.start
        with part.open("ab" if reply.start else "wb") as out:
            try:
                for chunk in reply.chunks(files.CHUNK_BYTES):
                    size += len(chunk)
                    most_bytes = wanted.size_bytes or wanted.most_bytes
                    if size > most_bytes:
                        raise MismatchError(
                            f"more than {most_bytes} bytes, the limit for this file"
                        )
                    out.write(chunk)
                    out.flush()  # counted bytes survive a kill of this process
                    tools.meter.add(len(chunk))
            finally:
                files.synced(out)


def _check_length(wanted: Expected, reply: Reply) -> None:
    """Raise RefusedAddressError before the transfer if the announced size is not the expected one
    or too large, or if neither size nor hash would reveal a truncated file.
    """
    total = reply.total
    if not reply.ends and (wanted.size_bytes, wanted.sha256, wanted.git_blob) == (None, None, None):
        raise RefusedError(
            "does not say how long the file is, and nothing else would tell that it was cut"
        )
    if total is None:
        return
    if wanted.size_bytes is not None and total != wanted.size_bytes:
        raise RefusedError(f"has {total} bytes; {wanted.origin} says {wanted.size_bytes}")
    if total > wanted.most_bytes:
        raise RefusedError(f"has {total} bytes; at most {wanted.most_bytes} are taken")


def check(path: Path, wanted: Expected, url: str = "") -> Downloaded:
    """Read a file and return its name, size, SHA-256 and where it came from (`url`). Raises
    MismatchError if its size, SHA-256 or git object id is not the expected one, FileNotFoundError
    if it does not exist.
    """
    size_bytes = path.stat().st_size
    if wanted.size_bytes is not None and size_bytes != wanted.size_bytes:
        raise MismatchError(f"{size_bytes} bytes; {wanted.origin} says {wanted.size_bytes}")
    # git's object id of a file
    sha256, blob = hashlib.sha256(), hashlib.sha1(b"blob %d\0" % size_bytes, usedforsecurity=False)
    with files.open_regular(path) as file:
        while chunk := file.read(files.CHUNK_BYTES):
            sha256.update(chunk)
            if wanted.git_blob is not None:
                blob.update(chunk)
    if wanted.sha256 is not None and sha256.hexdigest() != wanted.sha256:
        raise MismatchError(f"sha256 {sha256.hexdigest()}; {wanted.origin} says {wanted.sha256}")
    if wanted.git_blob is not None and blob.hexdigest() != wanted.git_blob:
        raise MismatchError(f"git blob {blob.hexdigest()}; {wanted.origin} says {wanted.git_blob}")
    return Downloaded(
        name=wanted.name,
        url=url,
        size_bytes=size_bytes,
        sha256=sha256.hexdigest(),
        checked_by=wanted.checked_by,
    )


def check_space(folder: Path, needed_bytes: int | None) -> None:
    """Raise NoSpaceError if the disk of `folder` has less than `needed_bytes` and a reserve of 64
    MiB free. None checks nothing.
    """
    free = shutil.disk_usage(folder).free
    if needed_bytes is not None and needed_bytes > free - SPARE_BYTES:
        raise NoSpaceError(
            f"{needed_bytes} bytes are needed in {folder}, and {max(0, free - SPARE_BYTES)} are"
            f" free (beside {SPARE_BYTES} that stay so); make room, or name a folder on another"
            " disk in XDG_CACHE_HOME"
        )


def discard(target: Path) -> None:
    """Delete the partial file of `target` and the JSON beside it, if they exist."""
    _part(target).unlink(missing_ok=True)
    _note_path(target).unlink(missing_ok=True)


def from_url(target: Path) -> str:
    """Return the address that a file or its partial file came from; "" if unknown."""
    note = _note(target)
    return "" if note is None else note.url


def size_of(path: Path) -> int:
    """Return the size of a file in bytes; 0 if it does not exist."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _part(target: Path) -> Path:
    """Return the path of the partial file of `target`."""
    return target.with_name(f"{target.name}{files.PART}")


def _note_path(target: Path) -> Path:
    """Return the path of the JSON that describes the partial file of `target`."""
    return target.with_name(f"{target.name}{files.PART}.json")


def _note(target: Path) -> Part | None:
    """Read the JSON that describes the partial file of `target`; None if missing or invalid."""
    with suppress(OSError, ValueError, files.TooLargeError):
        return Part.model_validate(files.parse(files.read(_note_path(target), NOTE_BYTES)))
    return None
