"""Store and look up whether an engine conforms on this machine, as `steelyard conform` found.

The results are kept in conform.json in the user's cache folder, by engine. Records state them:
run/parent.py asks for each run.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from steelyard import files
from steelyard.engine.rows import EngineRow
from steelyard.errors import RequestError
from steelyard.run import environment
from steelyard.run.clock import today
from steelyard.schema import canonical

Packages = Mapping[str, str] | None
NAME = "conform.json"
MOST_BYTES = 1 << 20


def engine_version(row: EngineRow, packages: Packages = None) -> str:
    """Return a hash of 16 hex digits over all that decides what an engine computes: this package's
    files, the engine's own source, and the versions of the packages it needs.

    `packages` are the package versions of another Python, if the engine runs in one
    (`engine.python`); None: those installed here.
    """
    parts = [row.name, environment.package_hash()]
    tops = {reference.partition(":")[0].partition(".")[0] for reference in row.works.values()}
    parts += [f"{name} {_source(name)}" for name in sorted(tops - {"steelyard"})]
    parts += (
        [f"{name} {_installed(name)}" for name in sorted(row.needs)]
        if packages is None
        else [canonical(dict(packages))]
    )
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _source(name: str) -> str | None:
    """Return the hash of a top-level package's or module's source files, or None if it is not
    installed or has no file.
    """
    found = find_spec(name)
    if found is None or found.origin is None:
        return None
    if found.submodule_search_locations:
        return environment.package_hash(Path(found.origin).parent)
    return hashlib.sha256(Path(found.origin).read_bytes()).hexdigest()[:16]


def _installed(name: str) -> str | None:
    """Return the installed version of a package, or None if it is not installed."""
    with suppress(PackageNotFoundError):
        return version(name)
    return None


def keep(row: EngineRow, cases: list[str], conforms: bool, packages: Packages = None) -> Path:
    """Write whether the engine conforms to conform.json, replacing its earlier result, and return
    the path of the file.

    `cases` are the names of the cases it was tested on. Raises RequestError if the cache folder
    cannot be made or is not private to the user.
    """
    try:
        path = environment.private_cache(os.environ) / NAME
    except OSError as error:
        raise RequestError(
            f"what was found cannot be kept: {error}; name a folder of yours in XDG_CACHE_HOME"
        ) from error
    found = {
        "version": engine_version(row, packages),
        "conforms": conforms,
        "cases": cases,
        "created": today(),
    }
    files.write(path, json.dumps(_read(path) | {row.name: found}, indent=2).encode())
    return path


def conforms(row: EngineRow, packages: Packages = None) -> bool | None:
    """Return whether this very version of the engine was found to conform, or None if it was not
    tested or the cache cannot be read.
    """
    # a cache that is not private is refused elsewhere, where code is loaded from it
    with suppress(RequestError, OSError):
        found = _read(environment.private_cache(os.environ) / NAME).get(row.name)
        if isinstance(found, dict) and found.get("version") == engine_version(row, packages):
            return found.get("conforms") is True
    return None


def _read(path: Path) -> dict[str, Any]:
    """Return the stored results by engine; empty if the file is missing, too large or not a JSON
    object.
    """
    with suppress(OSError, ValueError, RecursionError, files.TooLargeError):
        table = json.loads(files.read(path, MOST_BYTES))
        return table if isinstance(table, dict) else {}
    return {}
