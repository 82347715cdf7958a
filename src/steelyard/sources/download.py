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
from steelyard.schema import FrozenModel
from steelyard.sources.http import (
    HttpClient,
    HttpReply,
    RangeError,
    RefusedAddressError,
    TransferError,
    is_loopback,
)
from steelyard.sources.store import CheckedBy, DownloadedFile

TRIES = 4  # in a row without progress, per address
PROGRESS_BYTES = 64 << 10  # the least that counts as progress
PAUSE_S = 1.0  # before the second try, doubled before each further one
SPARE_BYTES = 64 << 20  # reserve that stays free on the disk
MAX_NOTE_BYTES = 64 << 10

ProgressWatch = Callable[[int, int], None]  # bytes received, and total (0: unknown)
SayLine = Callable[[str], None]


class DownloadError(Exception):
    """A file could not be downloaded from any address, or is not the right one; the text is one
    line with the reasons.
    """


class MismatchError(Exception):
    """A file is not the expected one: its size, hash or content is wrong. Callers in this package
    turn it into a DownloadError, or try another address.
    """


class NoSpaceError(RequestError):
    """The disk has no room for a file; raised before it is written. A RequestError, so that the
    command ends with exit code 2.
    """


@dataclass(frozen=True)
class ExpectedFile:
    """What is known of a file `name` before it is downloaded: from the catalog, a pin, or the hub's
    listing.

    `size_bytes`, `sha256` and `git_blob` (git's object id, SHA-1) must be met; None: unknown.
    `most_bytes` is the largest size that is accepted. `origin` names, for error messages, who says
    so; `checked_by` is what the manifest will say the file was checked by.
    """

    name: str
    size_bytes: int | None
    sha256: str | None
    git_blob: str | None
    most_bytes: int
    origin: str
    checked_by: CheckedBy = "nothing"


class PartialDownload(FrozenModel):
    """The content of `NAME.part.json` beside a partial file: its address (`url`), the server's
    version of it (`validator`: ETag or Last-Modified) and its full `size_bytes` (None: unknown). If
    `validator` is None the file cannot be resumed.
    """

    url: str
    validator: str | None
    size_bytes: int | None


class TransferMeter:
    """Adds up the bytes that this command transfers over all its files, and reports them to
    `watch(done, total)` after every chunk; total is 0 while unknown. Bytes left by an earlier
    command are not counted.

    Call `set_ahead` once, `start_file` and `begin_transfer` for each file, and `add` for each
    chunk.
    """

    def __init__(self, watch: ProgressWatch) -> None:
        """Begin at 0 bytes; `watch` is called with (bytes so far, total or 0)."""
        self._watch, self._done_bytes, self._ahead_bytes = watch, 0, 0
        self._end_bytes: int | None = None

    def set_ahead(self, size_bytes: int) -> None:
        """Set how many bytes the meter's command has still to transfer in files that have not begun
        yet; files of unknown size count 0. Reports nothing.
        """
        self._ahead_bytes = size_bytes

    def begin_transfer(self, size_bytes: int | None) -> None:
        """Note that a request begins that will transfer `size_bytes`, so that the total is the
        bytes so far, these, and the files ahead. None makes the total unknown. A resumed transfer
        calls it again with what is left.
        """
        self._end_bytes = None if size_bytes is None else self._done_bytes + size_bytes

    def add(self, count: int) -> None:
        """Add `count` received bytes and call `watch` with the bytes so far and the total (0:
        unknown).
        """
        self._done_bytes += count
        self._watch(
            self._done_bytes, 0 if self._end_bytes is None else self._end_bytes + self._ahead_bytes
        )

    def start_file(self, size_bytes: int) -> None:
        """Take the bytes of a file that is about to begin off the meter's bytes ahead;
        `begin_transfer` then counts them. Reports nothing.
        """
        self._ahead_bytes -= size_bytes


@dataclass(frozen=True)
class DownloadTools:
    """What a download uses of the outside world, so that tests can replace it: `web` (an
    HttpClient), `sleep(seconds)`, `say(line)` for lines to the user, and the progress `meter`
    (TransferMeter).
    """

    web: HttpClient
    sleep: Callable[[float], None]
    say: SayLine
    meter: TransferMeter


def download_file(
    expected: ExpectedFile, urls: tuple[str, ...], folder: Path, tools: DownloadTools
) -> DownloadedFile:
    """Download a file into `folder`, trying the addresses in order, and check it; return its name,
    address, size, SHA-256 and `checked_by`.

    It is written to `NAME.part` and renamed once it is right; `NAME.part.json` stays. The address
    from which a partial file exists is tried first. A partial file survives a broken transfer, but
    is deleted if the file is wrong. Each failed address is reported with `tools.say`. Raises
    DownloadError with all reasons if no address works; NoSpaceError at once if the disk is full.
    """
    target, reasons = folder / expected.name, []
    earlier_url = find_origin_url(target)
    if earlier_url in urls:  # a partial file continues only from its own address
        urls = (earlier_url, *(url for url in urls if url != earlier_url))
    for url in urls:
        try:
            _complete_part(expected, url, target, tools)
            downloaded = check_file(_part_path(target), expected, url)
        except (RefusedAddressError, TransferError) as error:
            reason = str(error)
        except MismatchError as error:
            discard_part(target)
            reason = str(error)
        else:
            files.move_into_place(_part_path(target), target)
            return downloaded
        tools.say(f"warning: {url}: {reason}")
        reasons.append(f"{urlsplit(url).netloc}: {reason}")
    partial_bytes = measure_file(_part_path(target))
    next_step = (
        f"{partial_bytes} bytes were saved; run the same command again to resume"
        if partial_bytes
        else "try later, or copy the file here and use --from DIR"
    )
    raise DownloadError(
        f"{expected.name} could not be downloaded: {'; '.join(reasons)}; {next_step}"
    )


def _complete_part(expected: ExpectedFile, url: str, target: Path, tools: DownloadTools) -> None:
    """Request one address until the partial file of `target` is complete, resuming where it broke.

    After a broken transfer it says so and sleeps: 1 s, doubled for each failure in a row, or longer
    if the server asks. Raises TransferError after four failures in a row, of which at most the
    first brought 64 KiB or more, or after four replies in all whose range does not fit (the part is
    deleted each time). Raises RefusedAddressError for plain http without a known SHA-256, unless
    the address is on this machine; other errors of `_request_once` pass through.
    """
    if url.startswith("http:") and expected.sha256 is None and not is_loopback(url):
        raise RefusedAddressError("plain http for a file without a known SHA-256; use https")
    failed = bad_ranges = 0
    while True:
        size_before = measure_file(_part_path(target))
        try:
            return _request_once(expected, url, target, tools)
        except RangeError as error:
            discard_part(target)
            bad_ranges += 1
            if bad_ranges >= TRIES:
                raise TransferError(
                    f"its byte ranges do not belong to one file (tried {bad_ranges} times)"
                ) from error
        except TransferError as error:
            failed = (
                1
                if measure_file(_part_path(target)) - size_before >= PROGRESS_BYTES
                else failed + 1
            )
            if failed >= TRIES:
                raise TransferError(f"{error} (tried {failed} times)") from error
            wait_s = max(error.wait_s, PAUSE_S * 2 ** (failed - 1))
            tools.say(f"{expected.name}: {error}; retrying in {wait_s:g} s")
            tools.sleep(wait_s)


def _request_once(expected: ExpectedFile, url: str, target: Path, tools: DownloadTools) -> None:
    """Make one request and append what arrives to the partial file of `target`; return when the
    reply ends. If the part is already complete, nothing is requested.

    It resumes only if the JSON beside the part names this address and a validator, and the server
    sends the rest; else part and JSON are begun anew. Each chunk is flushed and metered, and the
    part synced at the end. Raises TransferError, RangeError, RefusedAddressError (also by
    `_check_length`), NoSpaceError, or MismatchError beyond the size limit.
    """
    part, note = _part_path(target), _read_note(target)
    can_resume = note is not None and note.url == url and note.validator is not None
    start = measure_file(part) if can_resume else 0
    if note is not None and start and start == note.size_bytes:
        return
    with tools.web.request_file(
        url, start, note.validator if note is not None and can_resume else None
    ) as reply:
        _check_length(expected, reply)
        remaining_bytes = None if reply.total is None else reply.total - reply.start
        check_disk_space(target.parent, remaining_bytes)
        if reply.start:
            tools.say(f"{expected.name}: continues after {reply.start} bytes")
        else:
            discard_part(target)
            new_note = PartialDownload(url=url, validator=reply.validator, size_bytes=reply.total)
            files.write_file(_note_path(target), new_note.model_dump_json().encode())
        tools.meter.begin_transfer(remaining_bytes)
        size = reply.start
        with part.open("ab" if reply.start else "wb") as part_file:
            try:
                for chunk in reply.chunks(files.CHUNK_BYTES):
                    size += len(chunk)
                    most_bytes = expected.size_bytes or expected.most_bytes
                    if size > most_bytes:
                        raise MismatchError(
                            f"more than {most_bytes} bytes, the limit for this file"
                        )
                    part_file.write(chunk)
                    part_file.flush()  # counted bytes survive a kill of this process
                    tools.meter.add(len(chunk))
            finally:
                files.sync_file(part_file)


def _check_length(expected: ExpectedFile, reply: HttpReply) -> None:
    """Raise RefusedAddressError before the transfer if the size that the server announces is not
    the expected one or above `most_bytes`, or if a truncated file would go unnoticed: the reply has
    no known end, and neither size nor hash is expected.
    """
    total = reply.total
    if not reply.has_known_end and (expected.size_bytes, expected.sha256, expected.git_blob) == (
        None,
        None,
        None,
    ):
        raise RefusedAddressError(
            "does not send the file's length, and without a known size or hash a truncated file"
            " would not be noticed"
        )
    if total is None:
        return
    if expected.size_bytes is not None and total != expected.size_bytes:
        raise RefusedAddressError(
            f"has {total} bytes; {expected.origin} says {expected.size_bytes}"
        )
    if total > expected.most_bytes:
        raise RefusedAddressError(f"has {total} bytes; at most {expected.most_bytes} are taken")


def check_file(path: Path, expected: ExpectedFile, url: str = "") -> DownloadedFile:
    """Read a file and return its expected name, `url`, size, SHA-256 and the `checked_by` of
    `expected`. Raises MismatchError if size, SHA-256 or git object id is not the expected one
    (those that are None are not compared), FileNotFoundError if it does not exist.
    """
    size_bytes = path.stat().st_size
    if expected.size_bytes is not None and size_bytes != expected.size_bytes:
        raise MismatchError(f"{size_bytes} bytes; {expected.origin} says {expected.size_bytes}")
    # git's object id of a file
    sha256, blob = hashlib.sha256(), hashlib.sha1(b"blob %d\0" % size_bytes, usedforsecurity=False)
    with files.open_regular(path) as file:
        while chunk := file.read(files.CHUNK_BYTES):
            sha256.update(chunk)
            if expected.git_blob is not None:
                blob.update(chunk)
    if expected.sha256 is not None and sha256.hexdigest() != expected.sha256:
        raise MismatchError(
            f"sha256 {sha256.hexdigest()}; {expected.origin} says {expected.sha256}"
        )
    if expected.git_blob is not None and blob.hexdigest() != expected.git_blob:
        raise MismatchError(
            f"git blob {blob.hexdigest()}; {expected.origin} says {expected.git_blob}"
        )
    return DownloadedFile(
        name=expected.name,
        url=url,
        size_bytes=size_bytes,
        sha256=sha256.hexdigest(),
        checked_by=expected.checked_by,
    )


def check_disk_space(folder: Path, needed_bytes: int | None) -> None:
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


def discard_part(target: Path) -> None:
    """Delete the partial file of `target` and the JSON beside it, if they exist."""
    _part_path(target).unlink(missing_ok=True)
    _note_path(target).unlink(missing_ok=True)


def find_origin_url(target: Path) -> str:
    """Return the address that a file or its partial file was downloaded from, as `NAME.part.json`
    beside it says; "" if that is missing or invalid.
    """
    note = _read_note(target)
    return "" if note is None else note.url


def measure_file(path: Path) -> int:
    """Return the size of a file in bytes; 0 if it does not exist."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _part_path(target: Path) -> Path:
    """Return the path of the partial file of `target`."""
    return target.with_name(f"{target.name}{files.PART_SUFFIX}")


def _note_path(target: Path) -> Path:
    """Return the path of the JSON that describes the partial file of `target`."""
    return target.with_name(f"{target.name}{files.PART_SUFFIX}.json")


def _read_note(target: Path) -> PartialDownload | None:
    """Return the content of the JSON that describes the partial file of `target`; None if it is
    missing, unreadable, larger than 64 KiB or invalid.
    """
    with suppress(OSError, ValueError, files.TooLargeError):
        return PartialDownload.model_validate(
            files.parse_json(files.read_file(_note_path(target), MAX_NOTE_BYTES))
        )
    return None
