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
from steelyard.sources.catalog import CatalogSource, SourceFile
from steelyard.sources.download import (
    DownloadError,
    DownloadTools,
    ExpectedFile,
    MismatchError,
    check_disk_space,
    check_file,
    discard_part,
    download_file,
    find_origin_url,
    measure_file,
)
from steelyard.sources.store import CheckedBy, DownloadedFile, Pin, SourceStore, StoredSource
from steelyard.sources.unpack import unpack_archive

TREE_FOLDER = "tree"  # subfolder in which a source's folder is built


@dataclass(frozen=True)
class FetchOptions:
    """How the user wants a source to be fetched, from the options of `data get` and `weights get`:
    `mirrors` (`--mirror`: base addresses tried before the catalog's, each with SOURCE/FILE below
    it), `offline` (`--from`: a folder with the files, nothing is downloaded; None: download),
    `again` (`--again`: fetch even if it is in the store) and `repin` (`--repin`: fetch again,
    ignore existing pins, and pin anew).
    """

    # base addresses tried before the catalog's; each has SOURCE/FILE below it
    mirrors: tuple[str, ...] = ()
    offline: Path | None = None  # folder with the files; nothing is downloaded
    again: bool = False  # fetch even if it is in the store
    repin: bool = False  # ignore existing pins, and pin anew


def fetch_source(
    store: SourceStore,
    source: CatalogSource,
    options: FetchOptions,
    tools: DownloadTools,
    today: Callable[[], str],
) -> tuple[StoredSource, bool]:
    """Fetch a source of files into the store; return it, and whether it was already there (then
    nothing is downloaded, unless `options` say again or repin).

    Other processes that fetch the same source wait. Right files of an interrupted command are used
    again. Files without a known SHA-256 are pinned in the lock file. `today` returns the current
    time as text. Raises DownloadError if a file cannot be downloaded or is wrong, RequestError if a
    file is not in the `--from` folder or the lock file is malformed, NoSpaceError if the disk is
    full.
    """
    with store.lock_source(
        source.name, lambda: tools.say(f"{source.name}: another process is downloading it; waiting")
    ):
        stored = store.find(source.name)
        if stored is not None and not (options.again or options.repin):
            return stored, True
        working = store.working_folder(source.name)
        working.mkdir(exist_ok=True)
        pins = {} if options.repin else store.read_pins()
        expected = [
            _expect_file(file, pins.get(f"{source.name}/{file.name}")) for file in source.files
        ]
        if options.offline is None:
            missing_bytes = sum(_count_missing_bytes(working, file_info) for file_info in expected)
            check_disk_space(working, missing_bytes)
            tools.meter.set_ahead(missing_bytes)
        downloads = [
            _fetch_file(source, file, file_info, options, working, tools)
            for file, file_info in zip(source.files, expected, strict=True)
        ]
        tree = _build_tree(working, source.files, downloads)
        time = today()
        store.add_pins(
            {
                f"{source.name}/{file_info.name}": Pin(
                    url=file_info.url,
                    size_bytes=file_info.size_bytes,
                    sha256=file_info.sha256,
                    time=time,
                )
                for file_info in downloads
                if file_info.checked_by == "first use"
            }
        )
        return store.publish(tree, source.name, source.licence, time, downloads), False


def _expect_file(file: SourceFile, pin: Pin | None) -> ExpectedFile:
    """Return what a file must be: by the catalog if that has its SHA-256 or there is no pin, else
    with size and SHA-256 of the pin. `checked_by` is then "table", "first use" (no SHA-256 known,
    so it will be pinned) or "pins". The catalog's git object id and size limit always apply.
    """
    if file.sha256 is not None or pin is None:
        checked_by: CheckedBy = "first use" if file.sha256 is None else "table"
        catalog_facts = (file.size_bytes, file.sha256, file.git_blob, file.most_bytes)
        return ExpectedFile(file.name, *catalog_facts, "the catalog", checked_by)
    origin = f"the lock file (pinned {pin.time[:10]}; if it has changed on purpose: --repin)"
    return ExpectedFile(
        file.name, pin.size_bytes, pin.sha256, file.git_blob, file.most_bytes, origin, "pins"
    )


def _count_missing_bytes(working: Path, expected: ExpectedFile) -> int:
    """Return how many bytes of a file are still to be downloaded, beside what the working folder
    holds of it, complete or partial; 0 if its size is unknown.
    """
    present_bytes = measure_file(working / expected.name) or measure_file(
        working / f"{expected.name}{files.PART_SUFFIX}"
    )
    return max(0, (expected.size_bytes or 0) - present_bytes)


def _fetch_file(
    source: CatalogSource,
    file: SourceFile,
    expected: ExpectedFile,
    options: FetchOptions,
    working: Path,
    tools: DownloadTools,
) -> DownloadedFile:
    """Bring one file into the working folder, check it, and return its name, address, size and
    SHA-256.

    With `--from` it is copied from that folder. A file left by an earlier command is used if it is
    right, else deleted. Otherwise it is downloaded, from MIRROR/SOURCE/FILE before the catalog's
    addresses. Raises what `_copy_file` or `download_file` raises.
    """
    target = working / file.name
    if options.offline is not None:
        return _copy_file(source, file, expected, options.offline, target)
    tools.meter.start_file(_count_missing_bytes(working, expected))
    urls = (
        *(f"{mirror.rstrip('/')}/{source.name}/{file.name}" for mirror in options.mirrors),
        *file.urls,
    )
    if target.exists():
        try:
            return check_file(target, expected, find_origin_url(target))
        except MismatchError:
            target.unlink()
    return download_file(expected, urls, working, tools)


def _copy_file(
    source: CatalogSource, file: SourceFile, expected: ExpectedFile, folder: Path, target: Path
) -> DownloadedFile:
    """Copy a file from a local folder, or else from its subfolder named like the source, to
    `target`; check it before and after, and return its facts with a file: address. Raises
    RequestError if it is in neither, NoSpaceError, or DownloadError if it is not the expected file
    (a wrong copy is deleted).
    """
    paths = [
        path for path in (folder / file.name, folder / source.name / file.name) if path.is_file()
    ]
    if not paths:
        raise RequestError(
            f"--from {folder}: no {file.name} in it, nor in its {source.name}/; copy it there from"
            f" {file.urls[0]}"
        )
    check_disk_space(target.parent, paths[0].stat().st_size)
    try:
        check_file(paths[0], expected)
        shutil.copyfile(paths[0], target)
        return check_file(target, expected, paths[0].absolute().as_uri())
    except MismatchError as error:
        target.unlink(missing_ok=True)
        raise DownloadError(f"{paths[0]}: {error}") from error


def _build_tree(
    working: Path, source_files: tuple[SourceFile, ...], downloads: list[DownloadedFile]
) -> Path:
    """Build the source's future folder `tree` in the working folder and return it: the first
    archive unpacked, and all files that are no archives moved into it. An earlier tree is deleted
    first. Raises DownloadError, after deleting the archive, if that is unsafe, malformed or lacks
    its `top`; NoSpaceError if the disk is full.
    """
    tree = working / TREE_FOLDER
    shutil.rmtree(tree, ignore_errors=True)
    archives = [
        (file, downloaded)
        for file, downloaded in zip(source_files, downloads, strict=True)
        if file.top
    ]
    for file, downloaded in archives[:1]:
        try:
            unpack_archive(working / file.name, tree, file.top, file.most_bytes)
        except MismatchError as error:
            (working / file.name).unlink()
            discard_part(working / file.name)
            raise DownloadError(f"{file.name} from {downloaded.url}: {error}") from error
    tree.mkdir(exist_ok=True)
    for file in source_files:
        if not file.top:
            os.replace(working / file.name, tree / file.name)
    return tree
