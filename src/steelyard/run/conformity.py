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
from steelyard.engine.engine_rows import EngineRow
from steelyard.errors import RequestError
from steelyard.run import environment
from steelyard.run.clock import read_utc_time
from steelyard.schema import to_canonical_json

PackageVersions = Mapping[str, str] | None
RESULTS_FILE = "conform.json"
MAX_FILE_BYTES = 1 << 20


def hash_engine(row: EngineRow, packages: PackageVersions = None) -> str:
    """Return a hash of 16 hex digits over all that decides what an engine computes: its name, this
    package's files, the source of other packages that implement it, and the versions of the
    packages it needs.

    `packages` are the package versions by name of another Python, if the engine runs in one
    (`engine.python`); then all of them count. None: the needed ones as installed here.
    """
    parts = [row.name, environment.hash_package()]
    top_packages = {
        reference.partition(":")[0].partition(".")[0] for reference in row.works.values()
    }
    parts += [f"{name} {_hash_source(name)}" for name in sorted(top_packages - {"steelyard"})]
    parts += (
        [f"{name} {_find_installed_version(name)}" for name in sorted(row.needs)]
        if packages is None
        else [to_canonical_json(dict(packages))]
    )
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _hash_source(name: str) -> str | None:
    """Return a hash of 16 hex digits over the source files of a top-level package, or the file of a
    module, or None if it is not installed or has no file. It is not imported.
    """
    module_spec = find_spec(name)
    if module_spec is None or module_spec.origin is None:
        return None
    if module_spec.submodule_search_locations:
        return environment.hash_package(Path(module_spec.origin).parent)
    return hashlib.sha256(Path(module_spec.origin).read_bytes()).hexdigest()[:16]


def _find_installed_version(name: str) -> str | None:
    """Return the installed version of a package, or None if it is not installed."""
    with suppress(PackageNotFoundError):
        return version(name)
    return None


def write_conformity(
    row: EngineRow, cases: list[str], conforms: bool, packages: PackageVersions = None
) -> Path:
    """Write into conform.json in the user's cache folder whether this version of the engine
    conforms, replacing its earlier result and keeping other engines', and return the path of the
    file.

    `cases` are the names of the cases it was tested on; `packages` as for `hash_engine`. Raises
    RequestError if the cache folder cannot be made or is not private to the user, OSError if the
    file cannot be written.
    """
    try:
        path = environment.make_private_cache(os.environ) / RESULTS_FILE
    except OSError as error:
        raise RequestError(
            f"the result of conform cannot be stored: {error}; set XDG_CACHE_HOME to a folder of"
            " yours"
        ) from error
    result = {
        "version": hash_engine(row, packages),
        "conforms": conforms,
        "cases": cases,
        "created": read_utc_time(),
    }
    files.write_file(path, json.dumps(_read_results(path) | {row.name: result}, indent=2).encode())
    return path


def read_conformity(row: EngineRow, packages: PackageVersions = None) -> bool | None:
    """Return whether this very version of the engine (`hash_engine`) was found to conform on this
    machine, or None if it was not tested or the cache cannot be read. Creates the user's cache
    folder if it is missing; nothing is raised for it.
    """
    # a cache that is not private is refused elsewhere, where code is loaded from it
    with suppress(RequestError, OSError):
        result = _read_results(environment.make_private_cache(os.environ) / RESULTS_FILE).get(
            row.name
        )
        if isinstance(result, dict) and result.get("version") == hash_engine(row, packages):
            return result.get("conforms") is True
    return None


def _read_results(path: Path) -> dict[str, Any]:
    """Return the stored results of conform.json by engine name; empty if the file is missing,
    larger than `MAX_FILE_BYTES` or not a JSON object.
    """
    with suppress(OSError, ValueError, RecursionError, files.TooLargeError):
        table = json.loads(files.read_file(path, MAX_FILE_BYTES))
        return table if isinstance(table, dict) else {}
    return {}
