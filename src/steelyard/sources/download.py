"""One file from one of its addresses: resumed where a transfer broke, checked, and only then given
its name.

What has arrived is in `NAME.part`, and beside it in `NAME.part.json` from which address and of
which version it is. A part is continued only from that address, and only as that version
(If-Range); the server sends the whole file otherwise.
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

TRIES = 4  # in a row that bring nothing, of one address
PROGRESS_BYTES = 64 << 10  # what counts as something
PAUSE_S = 1.0  # before the second try, and twice as long before each further one
SPARE_BYTES = 64 << 20  # of the disk, which stay free
NOTE_BYTES = 64 << 10

Watch = Callable[[int, int], None]  # bytes that have arrived, of how many; 0: unknown
Say = Callable[[str], None]


class DownloadError(Exception):
    """One line: no address gave the file, and why not."""


class MismatchError(Exception):
    """A file is not the one that was expected."""


class NoSpaceError(RequestError):
    """The disk has no room for a file."""


@dataclass(frozen=True)
class Expected:
    """What is known of a file before it is here. `origin` says in words who knows its hash, for
    errors.
    """

    name: str
    size_bytes: int | None
    sha256: str | None
    git_blob: str | None
    most_bytes: int
    origin: str
    checked_by: CheckedBy = "nothing"


class Part(Frozen):
    """What is known of a part, and later of the whole file. Without a validator it cannot be
    continued.
    """

    url: str
    validator: str | None
    size_bytes: int | None


class Meter:
    """Bytes that this command transfers, over all its files: what an earlier one left is no part of
    its rate.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch, self._done, self._ahead = watch, 0, 0
        self._end: int | None = None

    def expect(self, size_bytes: int) -> None:
        """So many bytes are ahead, as far as is known."""
        self._ahead = size_bytes

    def begin(self, size_bytes: int | None) -> None:
        """A transfer of so many bytes begins."""
        self._end = None if size_bytes is None else self._done + size_bytes

    def add(self, count: int) -> None:
        self._done += count
        self._watch(self._done, 0 if self._end is None else self._end + self._ahead)

    def passed(self, size_bytes: int) -> None:
        """A file of those ahead has its turn."""
        self._ahead -= size_bytes


@dataclass(frozen=True)
class Tools:
    """What a download is done with; a test brings its own."""

    web: Web
    sleep: Callable[[float], None]
    say: Say
    meter: Meter


def download(wanted: Expected, urls: tuple[str, ...], folder: Path, tools: Tools) -> Downloaded:
    """Put the file into `folder`, from the first address that gives the right one; DownloadError
    where none does.
    """
    target, reasons = folder / wanted.name, []
    earlier = from_url(target)
    if earlier in urls:  # go on where a part is from
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
    """Bring the part to its full length. Tries that bring nothing have a limit, others have none."""
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
                    out.flush()  # what is counted survives a kill
                    tools.meter.add(len(chunk))
            finally:
                files.synced(out)


def _check_length(wanted: Expected, reply: Reply) -> None:
    """Before the transfer of gigabytes that cannot be right."""
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
    """Return what a file from an address is, with its size and SHA-256; MismatchError if it is not
    the right one.
    """
    size_bytes = path.stat().st_size
    if wanted.size_bytes is not None and size_bytes != wanted.size_bytes:
        raise MismatchError(f"{size_bytes} bytes; {wanted.origin} says {wanted.size_bytes}")
    # as git names a file
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
    free = shutil.disk_usage(folder).free
    if needed_bytes is not None and needed_bytes > free - SPARE_BYTES:
        raise NoSpaceError(
            f"{needed_bytes} bytes are needed in {folder}, and {max(0, free - SPARE_BYTES)} are"
            f" free (beside {SPARE_BYTES} that stay so); make room, or name a folder on another"
            " disk in XDG_CACHE_HOME"
        )


def discard(target: Path) -> None:
    """Forget what has arrived."""
    _part(target).unlink(missing_ok=True)
    _note_path(target).unlink(missing_ok=True)


def from_url(target: Path) -> str:
    """The address that a file, or its part, is from; empty where nobody knows."""
    note = _note(target)
    return "" if note is None else note.url


def size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _part(target: Path) -> Path:
    return target.with_name(f"{target.name}{files.PART}")


def _note_path(target: Path) -> Path:
    return target.with_name(f"{target.name}{files.PART}.json")


def _note(target: Path) -> Part | None:
    """What is known of a part; None where there is none, or nothing sound is known of it."""
    with suppress(OSError, ValueError, files.TooLargeError):
        return Part.model_validate(files.parse(files.read(_note_path(target), NOTE_BYTES)))
    return None
