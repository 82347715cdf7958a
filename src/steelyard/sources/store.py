"""The folder of fetched sources: one subfolder per source, and a lock file with the hashes of files
that were pinned at first use.

A source's folder appears complete with its manifest, or not at all; while it is fetched, its files
are in `.NAME.part` beside it. Each source has a lock, so that one process fetches it and others
wait.
"""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import Field

from steelyard import files
from steelyard.errors import RequestError
from steelyard.schema import FrozenModel

MANIFEST_NAME = ".steelyard"  # not .json: a task reads the only .json of a folder as its data
PINS_NAME = "pins.json"
MOST_BYTES = 16 << 20  # of a manifest or lock file
Table = TypeVar("Table", bound=FrozenModel)


class ManifestFile(FrozenModel):
    """A file in a source's folder: its `path` relative to that folder, and its `size_bytes`. Hashes
    are only those of the downloads (`DownloadedFile`).
    """

    path: str
    size_bytes: int


# What a file was checked by: the catalog, the lock file, or the hub's listing. Not checked: "first
# use" (it was pinned), and "nothing" (a model copied from a local folder).
CheckedBy = Literal["table", "pins", "hub", "first use", "nothing"]


class DownloadedFile(FrozenModel):
    """A file as it was downloaded or copied (an archive before unpacking): `name`, `url` (file: if
    copied), `size_bytes`, `sha256`, and `checked_by`: `table` (the catalog), `pins`, `hub` (its
    listing), `first use` (unchecked, but pinned) or `nothing`.
    """

    name: str
    url: str
    size_bytes: int
    sha256: str
    checked_by: CheckedBy


class SourceManifest(FrozenModel):
    """The JSON file `.steelyard` in a source's folder: `name`, `licence` and `time` of fetching
    (text), `revision` (commit of a hub model, else None), the `downloads` it came from, and all
    `files` it holds with their sizes; `size_bytes` is their sum. `version` is that of the format,
    1.
    """

    version: int = 1
    name: str
    licence: str
    time: str
    revision: str | None = None  # commit of a hub model
    downloads: tuple[DownloadedFile, ...]
    files: tuple[ManifestFile, ...]

    @property
    def size_bytes(self) -> int:
        """The size of all files of the source."""
        return sum(piece.size_bytes for piece in self.files)


class Pin(FrozenModel):
    """What a file, or the revision of a hub model, was at its first download, with address (`url`)
    and `time`; later downloads must equal it. A file's pin has `size_bytes` and `sha256`, a model's
    only the `revision`; the others are None.
    """

    url: str
    size_bytes: int | None = None
    sha256: str | None = None
    revision: str | None = None
    time: str


class PinFile(FrozenModel):
    """The lock file `pins.json` of a store: `pins` (Pin) by `SOURCE/FILE`, or by the id of a hub
    model, and the `version` of the format, 1.
    """

    version: int = 1
    pins: dict[str, Pin] = Field(default_factory=dict)


@dataclass(frozen=True)
class StoredSource:
    """A source that is complete in the store: its folder (`path`) and its `manifest`
    (SourceManifest). Made by `SourceStore.find` and `publish`.
    """

    path: Path
    manifest: SourceManifest


@dataclass(frozen=True)
class SourceStore:
    """The folder (`folder`) of all fetched sources of one kind, data or weights: one folder per
    source, and the lock file with pins. `find(name)` returns a complete source or None,
    `list_names` all names; `lock_source`, `working_folder`, `publish` (move a fetched folder into
    place), `read_pins` and `add_pins` are for fetching. The folder must exist to fetch.
    """

    folder: Path

    def source_folder(self, name: str) -> Path:
        """Return the folder of a source in the store (its name with "--" for each slash), whether
        it exists or not. Raises RequestError if the name is invalid.
        """
        return self.folder / make_folder_name(name)

    def working_folder(self, name: str) -> Path:
        """Return the hidden folder `.NAME.part` in which a source is while it is fetched, whether
        it exists or not. Raises RequestError if the name is invalid.
        """
        return self.folder / f".{make_folder_name(name)}{files.PART_SUFFIX}"

    def find(self, name: str) -> StoredSource | None:
        """Return a source of the store if its manifest is readable and all files of it exist at
        their sizes (contents are not read); else None. Raises RequestError if the name is invalid.
        """
        path = self.source_folder(name)
        manifest = _read_model(path / MANIFEST_NAME, SourceManifest)
        if manifest is None:
            return None
        for file in manifest.files:
            with suppress(OSError):
                if (path / file.path).stat().st_size == file.size_bytes:
                    continue
            return None
        return StoredSource(path, manifest)

    def list_names(self) -> list[str]:
        """Return the names of all sources in the store whose manifest is readable, complete or not,
        in the order of their folders' names; empty if the store does not exist.
        """
        if not self.folder.is_dir():
            return []
        manifests = (
            _read_model(path / MANIFEST_NAME, SourceManifest)
            for path in sorted(self.folder.iterdir())
            if path.is_dir()
        )
        return [manifest.name for manifest in manifests if manifest is not None]

    def count_partial_bytes(self, name: str) -> int:
        """Return how many bytes an unfinished download of a source has left in its working folder,
        0 if there is none. Raises RequestError if the name is invalid.
        """
        working = self.working_folder(name)
        return (
            sum(path.stat().st_size for path in working.rglob("*") if path.is_file())
            if working.is_dir()
            else 0
        )

    @contextmanager
    def lock_source(self, name: str, on_wait: Callable[[], None]) -> Iterator[None]:
        """As a context manager, hold the lock of a source: a file lock on `.NAME.lock` in the
        store, which the kernel releases if the process dies. If another process holds it, call
        `on_wait` once and wait without limit. The lock's file is created and stays.
        """
        with (self.folder / f".{make_folder_name(name)}.lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                on_wait()
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def publish(
        self,
        tree: Path,
        name: str,
        licence: str,
        time: str,
        downloads: Iterable[DownloadedFile],
        revision: str | None = None,
    ) -> StoredSource:
        """Write the manifest (`.steelyard`) into the complete folder `tree` and rename it to the
        source's folder in the store; return the stored source.

        An older folder of the source is moved away first and deleted with the working folder, so
        there is a moment without one. `tree` must be on the same disk; all files in it are listed
        with their sizes. `time` and `downloads` are written into the manifest, as is `revision`,
        the commit of a hub model. Raises OSError if that fails.
        """
        paths = sorted(
            path for path in tree.rglob("*") if path.is_file() and path.name != MANIFEST_NAME
        )
        manifest_files = tuple(
            ManifestFile(path=path.relative_to(tree).as_posix(), size_bytes=path.stat().st_size)
            for path in paths
        )
        manifest = SourceManifest(
            name=name,
            licence=licence,
            time=time,
            revision=revision,
            downloads=tuple(downloads),
            files=manifest_files,
        )
        files.write_file(tree / MANIFEST_NAME, manifest.model_dump_json(indent=1).encode())
        target, old = self.source_folder(name), self.working_folder(name) / "old"
        shutil.rmtree(old, ignore_errors=True)
        if target.exists():
            target.rename(old)
        os.replace(tree, target)
        files.sync_folder(self.folder)
        shutil.rmtree(self.working_folder(name), ignore_errors=True)
        return StoredSource(target, manifest)

    @property
    def pins_path(self) -> Path:
        """The path of the store's lock file, `pins.json`."""
        return self.folder / PINS_NAME

    def read_pins(self) -> dict[str, Pin]:
        """Return the pins of the store's lock file by `SOURCE/FILE` or hub id; empty if there is no
        such file. Raises RequestError if it cannot be read or is malformed.
        """
        if not self.pins_path.exists():
            return {}
        pin_file = _read_model(self.pins_path, PinFile)
        if pin_file is None:
            raise RequestError(
                f"{self.pins_path}: not a lock file of Steelyard; restore it, or remove it to pin"
                " the files again"
            )
        return pin_file.pins

    def add_pins(self, new_pins: dict[str, Pin]) -> None:
        """Add pins to the store's lock file, replacing those of the same keys; with no pins nothing
        is written. Holds a lock, because other processes may add too. Raises RequestError if the
        lock file is malformed.
        """
        if new_pins:
            with self.lock_source("pins", lambda: None):
                pin_file = PinFile(pins={**self.read_pins(), **new_pins})
                files.write_file(
                    self.pins_path, pin_file.model_dump_json(indent=1, exclude_none=True).encode()
                )


def make_folder_name(name: str) -> str:
    """Return the folder name of a source: its name with "--" for each slash. Raises RequestError if
    that is empty, begins with '.', or has other characters than ASCII letters, digits, '.', '_' and
    '-'.
    """
    text = name.replace("/", "--")
    if (
        text.startswith(".")
        or not all(c.isascii() and (c.isalnum() or c in "._-") for c in text)
        or not text
    ):
        raise RequestError(
            f"{name!r} is not the name of a source: allowed are letters, digits, '.', '_' and '-';"
            " a model's id has"
            " one slash"
        )
    return text


def _read_model(path: Path, model_class: type[Table]) -> Table | None:
    """Read a JSON file as a model; return None if it is missing, unreadable, larger than 16 MiB or
    invalid.
    """
    try:
        return model_class.model_validate(files.parse_json(files.read_file(path, MOST_BYTES)))
    except (OSError, ValueError, files.TooLargeError):
        return None
