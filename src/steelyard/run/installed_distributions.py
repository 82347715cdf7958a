"""Read the metadata of installed distributions: which files a RECORD lists with which hashes, and
where the code of an editable install is.

Used by run/engine_identity.py, in the Python of the workers. Files are read as they are, and no
distribution is imported.
"""

import hashlib
import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

from steelyard import files

METADATA_FOLDER = re.compile(r"\.(?:dist|egg)-info$")
METADATA_FILES = ("METADATA", "PKG-INFO", "entry_points.txt")
# files of a metadata folder that say how, and from which path, a distribution was installed
INSTALLER_FILES = ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json")
MAX_METADATA_BYTES = 64 << 20


@dataclass(frozen=True)
class InstalledDistribution:
    """A distribution that is installed in a `folder` of the module search path, with the `label` of
    that folder. `name` is that of its metadata folder (`torch-2.9.0.dist-info`), `hashes` are those
    of RECORD by path (empty without one), `metadata_hash` covers its `METADATA_FILES`.
    """

    label: str
    folder: Path
    name: str
    hashes: Mapping[str, str]
    metadata_hash: str

    def describe(self) -> str:
        """Return its name, version, and the hash of its metadata and of RECORD, as one line."""
        rows = "\n".join(f"{path},{file_hash}" for path, file_hash in sorted(self.hashes.items()))
        record_hash = hashlib.sha256(os.fsencode(rows)).hexdigest()
        return f"{self.label}/{self.name} {self.metadata_hash} {record_hash}"

    def contains_any(self, labels: Collection[str]) -> bool:
        """Return whether RECORD lists one of these files or folders; `labels` begin with the label
        of a folder of the search path.
        """
        prefix = f"{self.label}/"
        paths = {label.removeprefix(prefix) for label in labels if label.startswith(prefix)}
        folders = tuple(f"{path}/" for path in paths)
        return any(path in paths or path.startswith(folders) for path in self.hashes)

    def find_editable_sources(self, search_path: Collection[Path]) -> list[Path]:
        """Return where the code of an editable install is, if import hooks find it there: the
        folders and files of its packages, or the whole project if their names are unknown. Empty if
        the code is on the search path, and for every other distribution.
        """
        metadata_folder = self.folder / self.name
        project = _find_editable_project(metadata_folder)
        if project is None or self._extends(search_path):
            return []
        names = read_metadata(metadata_folder / "top_level.txt").split()
        sources = [find_by_hooks(name) for name in names]
        are_known = bool(sources) and all(sources)
        return [path for paths in sources for path in paths] if are_known else [project]

    def _extends(self, search_path: Collection[Path]) -> bool:
        """Return whether a `.pth` file of this distribution names a folder of the search path."""
        lines = [
            line.strip()
            for path in self.hashes
            if path.endswith(".pth")
            for line in read_metadata(self.folder / path).splitlines()
        ]
        return any(Path(line).resolve() in search_path for line in lines if line)


def read_distributions(label: str, folder: Path) -> Sequence[InstalledDistribution]:
    """Return the distributions that are installed in a folder of the module search path, by name;
    empty if it cannot be read. Raises files.TooLargeError for metadata of more than
    `MAX_METADATA_BYTES`.
    """
    try:
        names = [path.name for path in folder.iterdir()]
    except OSError:
        return []
    return [
        _read_distribution(label, folder, name)
        for name in sorted(names)
        if METADATA_FOLDER.search(name)
    ]


def _read_distribution(label: str, folder: Path, name: str) -> InstalledDistribution:
    """Return the distribution whose metadata folder is `name` in a folder of the search path. Of
    RECORD, files without a hash, outside of the folder, or about the installation are left out.
    """
    hashes = {}
    for line in read_metadata(folder / name / "RECORD").splitlines():
        path, _, file_hash = line.rpartition(",")[0].rpartition(",")
        path = path.strip('"')
        of_installer = path.startswith(f"{name}/") and path.endswith(INSTALLER_FILES)
        if file_hash and not of_installer and not path.startswith(("..", "/")):
            hashes[path] = file_hash
    metadata = "\0".join(read_metadata(folder / name / file) for file in METADATA_FILES)
    metadata_hash = hashlib.sha256(os.fsencode(metadata)).hexdigest()
    return InstalledDistribution(label, folder, name, hashes, metadata_hash)


def read_metadata(path: Path) -> str:
    """Return the text of a file; empty if it is missing or cannot be read. Raises
    files.TooLargeError if it has more than `MAX_METADATA_BYTES`.
    """
    try:
        return os.fsdecode(files.read_file(path, MAX_METADATA_BYTES, unpack=False))
    except OSError:
        return ""


def _find_editable_project(metadata_folder: Path) -> Path | None:
    """Return the project folder of an editable install, as its direct_url.json gives it, or None if
    it is not one.
    """
    with suppress(ValueError, RecursionError, TypeError, AttributeError, KeyError):
        table = json.loads(read_metadata(metadata_folder / "direct_url.json"))
        if table["dir_info"]["editable"] is True:
            return Path(unquote(urlsplit(table["url"]).path))
    return None


def find_by_hooks(name: str) -> list[Path]:
    """Return the folders, or the file, from which this Python would import a top-level module, by
    asking its import hooks; empty if they do not find it. The module is not imported.
    """
    with suppress(ImportError, ValueError, AttributeError):
        spec = find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            return [Path(location) for location in spec.submodule_search_locations]
        if spec is not None and spec.origin is not None and Path(spec.origin).is_file():
            return [Path(spec.origin)]
    return []
