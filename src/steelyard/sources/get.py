"""Fetch a source of the catalog from its publisher, a mirror or a local folder: download, check,
unpack, and only then put it in its place.

`cli/get.py` calls `fetch_source` for sources with addresses, and `sources/huggingface.py` for
models of the hub. Files arrive in the store's working folder; the source's own folder appears
complete or not at all.
"""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from steelyard import files
from steelyard.errors import RequestError
from steelyard.sources.download import (
    DownloadError,
    Expected,
    MismatchError,
    Tools,
    check,
    check_space,
    discard,
    download,
    from_url,
    size_of,
)
from steelyard.sources.store import CheckedBy, Downloaded, Here, Pin, Store
from steelyard.sources.table import File, Source
from steelyard.sources.unpack import unpack

TREE = "tree"  # subfolder in which a source's folder is built


@dataclass(frozen=True)
class Wish:
    """How the user wants a source to be fetched."""

    # base addresses tried before the catalog's; each has SOURCE/FILE below it
    mirrors: tuple[str, ...] = ()
    offline: Path | None = None  # folder with the files; nothing is downloaded
    again: bool = False  # fetch even if it is in the store
    repin: bool = False  # ignore existing pins, and pin anew


def get(
    store: Store, source: Source, wish: Wish, tools: Tools, today: Callable[[], str]
) -> tuple[Here, bool]:
    """Fetch a source into the store; return it, and whether it was already there (then nothing is
    downloaded, unless `options` say again or repin).

    Other processes that fetch the same source wait. Files without a known hash are pinned in the
    lock file. `today` returns the current time as text. Raises DownloadError if a file cannot be
    had or is wrong, RequestError if a file is not in the `--from` folder, NoSpaceError if the disk
    is full.
    """
    with store.locked(
        source.name, lambda: tools.say(f"{source.name}: another process is getting it; waiting")
    ):
        here = store.find(source.name)
        if here is not None and not (wish.again or wish.repin):
            return here, True
        working = store.working(source.name)
        working.mkdir(exist_ok=True)
        pins = {} if wish.repin else store.pins()
        expected = [_expect(file, pins.get(f"{source.name}/{file.name}")) for file in source.files]
        if wish.offline is None:
            ahead = sum(_left(working, one) for one in expected)
            check_space(working, ahead)
            tools.meter.expect(ahead)
        arrived = [
            _one(source, file, one, wish, working, tools)
            for file, one in zip(source.files, expected, strict=True)
        ]
        tree = _tree(working, source.files, arrived)
        time = today()
        store.pin(
            {
                f"{source.name}/{one.name}": Pin(
                    url=one.url, size_bytes=one.size_bytes, sha256=one.sha256, time=time
                )
                for one in arrived
                if one.checked_by == "first use"
            }
        )
        return store.appear(tree, source.name, source.licence, time, arrived), False


def _expect(file: File, pin: Pin | None) -> Expected:
    """Return what a file must be: by the catalog if that knows its SHA-256 or nothing was pinned,
    else by the pin of its first download.
    """
    if file.sha256 is not None or pin is None:
        by: CheckedBy = "first use" if file.sha256 is None else "table"
        known = (file.size_bytes, file.sha256, file.git_blob, file.most_bytes)
        return Expected(file.name, *known, "the table of sources", by)
    origin = f"the lock file (pinned {pin.time[:10]}; if it has changed on purpose: --repin)"
    return Expected(
        file.name, pin.size_bytes, pin.sha256, file.git_blob, file.most_bytes, origin, "pins"
    )


def _left(working: Path, wanted: Expected) -> int:
    """Return how many bytes of a file are still to be downloaded; 0 if its size is unknown."""
    had = size_of(working / wanted.name) or size_of(working / f"{wanted.name}{files.PART}")
    return max(0, (wanted.size_bytes or 0) - had)


def _one(
    source: Source, file: File, wanted: Expected, wish: Wish, working: Path, tools: Tools
) -> Downloaded:
    """Bring one file into the working folder and return what it is: copied from the `--from`
    folder, left from an earlier command if it is right, or downloaded (mirrors first).
    """
    target = working / file.name
    if wish.offline is not None:
        return _copied(source, file, wanted, wish.offline, target)
    tools.meter.passed(_left(working, wanted))
    urls = (
        *(f"{mirror.rstrip('/')}/{source.name}/{file.name}" for mirror in wish.mirrors),
        *file.urls,
    )
    if target.exists():
        try:
            return check(target, wanted, from_url(target))
        except MismatchError:
            target.unlink()
    return download(wanted, urls, working, tools)


def _copied(source: Source, file: File, wanted: Expected, folder: Path, target: Path) -> Downloaded:
    """Copy a file from a local folder (or its subfolder named like the source) to `target` and
    check it. Raises RequestError if it is not there, DownloadError if it is not the expected file.
    """
    places = [
        place for place in (folder / file.name, folder / source.name / file.name) if place.is_file()
    ]
    if not places:
        raise RequestError(
            f"--from {folder}: no {file.name} in it, nor in its {source.name}/; bring it there from"
            f" {file.urls[0]}"
        )
    check_space(target.parent, places[0].stat().st_size)
    try:
        check(places[0], wanted)
        shutil.copyfile(places[0], target)
        return check(target, wanted, places[0].absolute().as_uri())
    except MismatchError as error:
        target.unlink(missing_ok=True)
        raise DownloadError(f"{places[0]}: {error}") from error


def _tree(working: Path, wanted: tuple[File, ...], arrived: list[Downloaded]) -> Path:
    """Build the source's future folder in the working folder and return it: the archive, if there
    is one, unpacked, and the other files moved beside it. An archive that cannot be unpacked is
    deleted, and DownloadError raised. An earlier tree is replaced.
    """
    tree = working / TREE
    shutil.rmtree(tree, ignore_errors=True)
    packed = [(file, one) for file, one in zip(wanted, arrived, strict=True) if file.top]
    for file, one in packed[:1]:
        try:
            unpack(working / file.name, tree, file.top, file.most_bytes)
        except MismatchError as error:
            (working / file.name).unlink()
            discard(working / file.name)
            raise DownloadError(f"{file.name} from {one.url}: {error}") from error
    tree.mkdir(exist_ok=True)
    for file in wanted:
        if not file.top:
            os.replace(working / file.name, tree / file.name)
    return tree
