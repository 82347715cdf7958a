"""The folder of what was got: a folder for each source, and a lock file with the hashes of what was
pinned at first use.

A source's folder appears whole, with its manifest in it, or not at all. What is on its way is in
`.NAME.part` beside it. Each source has a lock, so that of several processes one gets it and the
others wait.
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
from steelyard.schema import Frozen

MANIFEST = ".steelyard"  # no .json: a task takes the only .json of a folder for its data
PINS = "pins.json"
MOST_BYTES = 16 << 20  # of a manifest
Table = TypeVar("Table", bound=Frozen)


class Piece(Frozen):
    """A file of a source, as it is here."""

    path: str
    size_bytes: int


# What a file was checked by: the table of sources, the lock file, or what the hub lists; or by
# nothing, at its first use, which pins it, or where somebody brought it and nobody is asked.
CheckedBy = Literal["table", "pins", "hub", "first use", "nothing"]


class Downloaded(Frozen):
    """A file as it was published."""

    name: str
    url: str
    size_bytes: int
    sha256: str
    checked_by: CheckedBy


class Manifest(Frozen):
    """What a source's folder holds, and where that is from."""

    version: int = 1
    name: str
    licence: str
    time: str
    revision: str | None = None  # of a model of the hub
    downloads: tuple[Downloaded, ...]
    files: tuple[Piece, ...]

    @property
    def size_bytes(self) -> int:
        return sum(piece.size_bytes for piece in self.files)


class Pin(Frozen):
    """What a file, or the revision of a model, was at its first use."""

    url: str
    size_bytes: int | None = None
    sha256: str | None = None
    revision: str | None = None
    time: str


class Pins(Frozen):
    """The lock file: pins by `SOURCE/FILE`, or by the id of a model."""

    version: int = 1
    pins: dict[str, Pin] = Field(default_factory=dict)


@dataclass(frozen=True)
class Here:
    """A source that is here."""

    path: Path
    manifest: Manifest


@dataclass(frozen=True)
class Store:
    """All sources of a kind."""

    folder: Path

    def place(self, name: str) -> Path:
        return self.folder / slug(name)

    def working(self, name: str) -> Path:
        """Where a source is while it is on its way."""
        return self.folder / f".{slug(name)}{files.PART}"

    def find(self, name: str) -> Here | None:
        """A source that is here with all its files, each as large as it was."""
        path = self.place(name)
        manifest = _read(path / MANIFEST, Manifest)
        if manifest is None:
            return None
        for piece in manifest.files:
            with suppress(OSError):
                if (path / piece.path).stat().st_size == piece.size_bytes:
                    continue
            return None
        return Here(path, manifest)

    def names(self) -> list[str]:
        """Of what is here, whole or not."""
        if not self.folder.is_dir():
            return []
        found = (
            _read(path / MANIFEST, Manifest)
            for path in sorted(self.folder.iterdir())
            if path.is_dir()
        )
        return [manifest.name for manifest in found if manifest is not None]

    def partial_bytes(self, name: str) -> int:
        """What of a source is on its way."""
        working = self.working(name)
        return (
            sum(path.stat().st_size for path in working.rglob("*") if path.is_file())
            if working.is_dir()
            else 0
        )

    @contextmanager
    def locked(self, name: str, waiting: Callable[[], None]) -> Iterator[None]:
        """One process at a time; the others wait, and are told so once. The kernel ends a lock with
        its process.
        """
        with (self.folder / f".{slug(name)}.lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waiting()
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def appear(
        self,
        tree: Path,
        name: str,
        licence: str,
        time: str,
        downloads: Iterable[Downloaded],
        revision: str | None = None,
    ) -> Here:
        """Give a folder that is complete its manifest and its place, instead of one that may be
        there.
        """
        found = sorted(one for one in tree.rglob("*") if one.is_file() and one.name != MANIFEST)
        pieces = tuple(
            Piece(path=one.relative_to(tree).as_posix(), size_bytes=one.stat().st_size)
            for one in found
        )
        manifest = Manifest(
            name=name,
            licence=licence,
            time=time,
            revision=revision,
            downloads=tuple(downloads),
            files=pieces,
        )
        files.write(tree / MANIFEST, manifest.model_dump_json(indent=1).encode())
        target, old = self.place(name), self.working(name) / "old"
        shutil.rmtree(old, ignore_errors=True)
        if target.exists():
            target.rename(old)
        os.replace(tree, target)
        files.sync(self.folder)
        shutil.rmtree(self.working(name), ignore_errors=True)
        return Here(target, manifest)

    @property
    def pins_path(self) -> Path:
        return self.folder / PINS

    def pins(self) -> dict[str, Pin]:
        if not self.pins_path.exists():
            return {}
        found = _read(self.pins_path, Pins)
        if found is None:
            raise RequestError(
                f"{self.pins_path}: not a lock file of Steelyard; bring it back, or remove it to"
                " pin anew"
            )
        return found.pins

    def pin(self, found: dict[str, Pin]) -> None:
        """Add to the lock file, which other processes may add to as well."""
        if found:
            with self.locked("pins", lambda: None):
                table = Pins(pins={**self.pins(), **found})
                files.write(
                    self.pins_path, table.model_dump_json(indent=1, exclude_none=True).encode()
                )


def slug(name: str) -> str:
    """The name of a folder. The id of a model has a slash."""
    text = name.replace("/", "--")
    if (
        text.startswith(".")
        or not all(c.isascii() and (c.isalnum() or c in "._-") for c in text)
        or not text
    ):
        raise RequestError(
            f"{name!r} is no name of a source: letters, digits, '.', '_' and '-'; a model's id has"
            " one slash"
        )
    return text


def _read(path: Path, kind: type[Table]) -> Table | None:
    try:
        return kind.model_validate(files.parse(files.read(path, MOST_BYTES)))
    except (OSError, ValueError, files.TooLargeError):
        return None
