"""Identify the code that an engine runs with: one hash over all that its Python can import.

The node agent starts this module in the Python of the workers, with their variables, as
`python -P -m steelyard.run.engine_identity MODULE...` (`environment.identify_engine`), and the
parent compares the hash with that of `steelyard conform`. Modules are found, not imported. Nothing
is imported here that takes long, because the run waits for the answer.

On each entry of the module search path, the standard library's too, there count:

- installed distributions: name, version, metadata, entry points, and the hashes in RECORD;
- all files that Python can import (source, shared libraries, bytecode without source), in packages
  and namespace packages, and `.pth` files, by content. Of a library of more than `LARGE_BYTES` that
  a RECORD lists, only the size counts, beside the hash in RECORD;
- the packages that implement the engine, `sitecustomize` and `usercustomize`: every file, and every
  file of the distributions that they belong to, by content;
- packages of editable installs that are not on the search path, by content.

Bytecode in `__pycache__`, hidden files outside of the engine's packages, times, and where the
entries themselves are do not count.
"""

import hashlib
import json
import os
import re
import stat
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.machinery import all_suffixes
from pathlib import Path

from steelyard.files import TooLargeError
from steelyard.run.installed_distributions import (
    InstalledDistribution,
    find_by_hooks,
    read_distributions,
)

IMPORTABLE = re.compile(r"\.(?:py|pyc|pyd|dylib|so(?:\.[\w.]+)?)$")
LIBRARY = re.compile(r"\.(?:pyd|dylib|so(?:\.[\w.]+)?)$")
STARTUP_SUFFIXES = (".pth", ".egg-link")  # in a folder of the search path, not below it
STARTUP_MODULES = ("sitecustomize", "usercustomize")
BYTECODE_FOLDER = "__pycache__"
# Of 597 MB of libraries in a Python with torch, the seven that are larger have 560 MB.
LARGE_BYTES = 8 << 20
CHUNK_BYTES = 1 << 20
UNREADABLE = "cannot be read"


@dataclass(frozen=True)
class IdentityLimits:
    """Limits on what is read to identify an engine: `entries` of folders, `files` by content, and
    `size_bytes` of content in all. An engine that needs more has no identity.
    """

    entries: int = 400_000
    files: int = 100_000
    size_bytes: int = 1 << 30


DEFAULT_LIMITS = IdentityLimits()


@dataclass(frozen=True)
class EngineIdentity:
    """The identity of an engine in one Python: `hash`, of 16 hex digits, or None and the `problem`
    that prevented it, in one line. `files` is how many files were read by content, `size_bytes` how
    many bytes they have.
    """

    hash: str | None = None
    problem: str | None = None
    files: int = 0
    size_bytes: int = 0


class IdentityLimitError(Exception):
    """More would have to be read than `IdentityLimits` allows; the text says of what."""


@dataclass(frozen=True)
class CountedFile:
    """A file that counts for an identity: its `path` and size, and whether it counts `by_content`
    or by its size alone.
    """

    path: str
    size_bytes: int
    by_content: bool


def identify(
    modules: Sequence[str], search_path: Sequence[str], limits: IdentityLimits = DEFAULT_LIMITS
) -> EngineIdentity:
    """Return the identity of an engine that is implemented by these modules, in a Python with this
    module search path. If more would have to be read than `limits` allow, its hash is None.
    """
    code = ImportableCode(limits)
    try:
        code.add_search_path(search_path)
        code.add_modules([*modules, *STARTUP_MODULES])
        code.add_editable_installs()
        return code.identify()
    except IdentityLimitError as error:
        return EngineIdentity(problem=str(error))
    except TooLargeError as error:
        return EngineIdentity(problem=f"metadata of a distribution is {error}")
    except OSError as error:
        return EngineIdentity(problem=str(error))


class ImportableCode:
    """The code that counts for the identity of an engine: `add_search_path` comes first, then
    `add_modules` and `add_editable_installs`, and `identify` reads all of it. Each of them raises
    IdentityLimitError beyond the limits.

    Files are kept by label: the number of an entry of the search path, and the path below it. So an
    environment that was moved has the same labels.
    """

    def __init__(self, limits: IdentityLimits) -> None:
        """Begin with no code; no file is looked at."""
        self._limits = limits
        self._folders: dict[str, Path] = {}  # those of the search path, by label
        self._distributions: list[InstalledDistribution] = []
        self._recorded: set[str] = set()  # labels of files that a RECORD lists with a hash
        self._files: dict[str, CountedFile] = {}
        self._unreadable: set[str] = set()
        self._entries = 0

    def add_search_path(self, search_path: Sequence[str]) -> None:
        """Add the distributions, importable files and archives of a module search path. An entry
        that is there twice, also through a link, counts once: Python finds all of it at the first.
        """
        places: dict[Path, None] = {}
        for entry in search_path:
            with suppress(OSError, RuntimeError):  # it is missing, or a link to itself
                places.setdefault(_find_file_or_folder(entry))
        for number, place in enumerate(places):
            label = str(number)
            if place.is_dir() and os.access(place, os.R_OK | os.X_OK):
                self._folders[label] = place
                self._distributions += read_distributions(label, place)
            else:
                self._add_file(label, place)
        self._recorded = {
            f"{distribution.label}/{path}"
            for distribution in self._distributions
            for path in distribution.hashes
        }
        for label, folder in self._folders.items():
            self._add_folder(label, folder, importable_only=True)

    def add_modules(self, modules: Sequence[str]) -> None:
        """Add every file of the packages that have these modules, and of the distributions that
        they belong to.
        """
        sources: dict[str, Path] = {}
        for module in modules:
            sources |= _find_sources(module, self._folders)
        for label, path in sources.items():
            self._add_path(label, path, importable_only=False)
        for distribution in self._distributions:
            if distribution.contains_any(sources):
                for name in distribution.hashes:
                    self._add_file(f"{distribution.label}/{name}", distribution.folder / name)

    def add_editable_installs(self) -> None:
        """Add the importable files of editable installs that are not on the search path."""
        for distribution in self._distributions:
            sources = distribution.find_editable_sources(self._folders.values())
            for number, path in enumerate(sources):
                self._add_path(f"{distribution.name}:{number}", path, importable_only=True)

    def identify(self) -> EngineIdentity:
        """Read the files that count by content, and return the identity of all."""
        contents = [found for found in self._files.values() if found.by_content]
        size_bytes = sum(found.size_bytes for found in contents)
        if len(contents) > self._limits.files:
            raise IdentityLimitError(
                f"Python can import {len(contents)} files, more than {self._limits.files}"
            )
        if size_bytes > self._limits.size_bytes:
            raise IdentityLimitError(
                f"the files that Python can import have {size_bytes >> 20} MiB, more than"
                f" {self._limits.size_bytes >> 20} MiB"
            )
        lines = [
            f"{sys.implementation.cache_tag} {sys.version}",
            *sorted(distribution.describe() for distribution in self._distributions),
            *(f"{label} {UNREADABLE}" for label in sorted(self._unreadable)),
            *(f"{label} {_hash_file(found)}" for label, found in sorted(self._files.items())),
        ]
        digest = hashlib.sha256(os.fsencode("\0".join(lines)))
        return EngineIdentity(digest.hexdigest()[:16], None, len(contents), size_bytes)

    def _add_path(self, label: str, path: Path, importable_only: bool) -> None:
        """Add a file, or the files of a folder as `_add_folder` does."""
        if path.is_dir():
            self._add_folder(label, path, importable_only)
        else:
            self._add_file(label, path)

    def _add_folder(self, label: str, folder: Path, importable_only: bool) -> None:
        """Add the files of a folder and its subfolders: all or, with `importable_only`, those that
        Python can import, in subfolders with the names of packages (`site-packages`, which may lie
        in a folder of the search path, is none). Hidden ones count only if all do. Links are
        followed, and each folder is visited once, in the order of names.
        """
        waiting: list[tuple[str, Path | os.DirEntry[str]]] = [(label, folder)]
        visited: set[tuple[int, int]] = set()
        while waiting:
            label, place = waiting.pop()
            try:
                status = place.stat()
                with os.scandir(place) as scan:
                    entries = sorted(scan, key=lambda entry: entry.name)
            except OSError:
                self._unreadable.add(label)
                continue
            if (status.st_dev, status.st_ino) in visited:
                continue
            visited.add((status.st_dev, status.st_ino))
            self._add_to_entries(len(entries), place)
            is_bytecode_folder = place.name == BYTECODE_FOLDER
            for entry in entries:
                is_bytecode = is_bytecode_folder and entry.name.endswith(".pyc")
                if is_bytecode or (importable_only and entry.name.startswith(".")):
                    continue
                entry_label = f"{label}/{entry.name}"
                try:
                    is_folder = entry.is_dir()
                except OSError:  # a link to itself, or into a folder without permission
                    self._unreadable.add(entry_label)
                    continue
                if is_folder:
                    is_package_name = entry.name.isidentifier() and not is_bytecode_folder
                    if is_package_name or not importable_only:
                        waiting.append((entry_label, entry))
                elif not importable_only or _is_importable(entry.name, label in self._folders):
                    self._add_file(entry_label, entry, sized=importable_only)

    def _add_to_entries(self, number: int, folder: os.PathLike[str]) -> None:
        """Add to the number of entries of folders so far; raise IdentityLimitError beyond the
        limit.
        """
        self._entries += number
        if self._entries > self._limits.entries:
            raise IdentityLimitError(
                f"the folders that Python imports from have more than {self._limits.entries}"
                f" entries, the last in {os.fspath(folder)!r}"
            )

    def _add_file(self, label: str, path: Path | os.DirEntry[str], sized: bool = False) -> None:
        """Add a regular file, by content; with `sized`, a large library that a RECORD lists by its
        size.
        """
        try:
            status = path.stat()
        except OSError:
            self._unreadable.add(label)
            return
        if stat.S_ISREG(status.st_mode):
            by_size = sized and status.st_size > LARGE_BYTES and LIBRARY.search(path.name)
            by_content = not (by_size and label in self._recorded)
            self._files[label] = CountedFile(os.fspath(path), status.st_size, by_content)


def _find_file_or_folder(entry: str) -> Path:
    """Return the resolved file or folder of an entry of the search path: for a folder inside of an
    archive, the archive. Raise OSError or RuntimeError if there is none.
    """
    path = Path(entry)
    archive = next((parent for parent in path.parents if parent.is_file()), None)
    return (archive or path).resolve(strict=True)


def _is_importable(name: str, in_search_path: bool) -> bool:
    """Return whether Python can import a file of this name or, `in_search_path`, reads it as it
    starts.
    """
    return bool(IMPORTABLE.search(name)) or (in_search_path and name.endswith(STARTUP_SUFFIXES))


def _hash_file(found: CountedFile) -> str:
    """Return the SHA-256 of a file's content, or its size if that is what counts. Of a file that
    cannot be read this is said; Python cannot import it either.
    """
    if not found.by_content:
        return f"has {found.size_bytes} bytes"
    try:
        # not by files.open_regular, which takes twice the time for thousands of small files
        descriptor = os.open(found.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return UNREADABLE
    digest = hashlib.sha256()
    try:
        while chunk := os.read(descriptor, min(found.size_bytes + 1, CHUNK_BYTES)):
            digest.update(chunk)
    except OSError:
        return UNREADABLE
    finally:
        os.close(descriptor)
    return digest.hexdigest()


def _find_sources(module: str, folders: Mapping[str, Path]) -> dict[str, Path]:
    """Return where the code of a module is, by label: the outermost package around it that is not a
    namespace, or the module's file, in every folder that has it; of a namespace package, all its
    parts. What no folder has is asked of import hooks; empty if they do not have it either.
    """
    portions = dict(folders)
    for name in module.split("."):
        found: dict[str, Path] = {}
        for label, folder in portions.items():
            found |= _find_in_folder(name, label, folder)
        if found:
            return found
        portions = {
            f"{label}/{name}": folder / name
            for label, folder in portions.items()
            if (folder / name).is_dir()
        }
    hooked = [] if portions else find_by_hooks(module.partition(".")[0])
    return portions | {f"{module}:{number}": path for number, path in enumerate(hooked)}


def _find_in_folder(name: str, label: str, folder: Path) -> dict[str, Path]:
    """Return the regular package and the module files of this name in a folder, by label."""
    suffixes = all_suffixes()
    found = {
        f"{label}/{name}{suffix}": folder / f"{name}{suffix}"
        for suffix in suffixes
        if (folder / f"{name}{suffix}").is_file()
    }
    if any((folder / name / f"__init__{suffix}").is_file() for suffix in suffixes):
        found[f"{label}/{name}"] = folder / name
    return found


def main() -> None:
    """Print the identity of the engine that is implemented by the modules named in the arguments,
    in this Python, as a line of JSON on stdout.
    """
    identity = identify(sys.argv[1:], sys.path)
    os.write(1, json.dumps(asdict(identity)).encode() + b"\n")


if __name__ == "__main__":
    main()
