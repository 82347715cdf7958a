"""Whether this version of an engine conforms, as `steelyard conform` found on this machine."""

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
    """Of its own source, this package's, and the packages it needs: whatever changes one of them
    must be tried again. An engine that lives in another Python needs the packages of that one,
    which are given then."""
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
    found = find_spec(name)
    if found is None or found.origin is None:
        return None
    if found.submodule_search_locations:
        return environment.package_hash(Path(found.origin).parent)
    return hashlib.sha256(Path(found.origin).read_bytes()).hexdigest()[:16]


def _installed(name: str) -> str | None:
    with suppress(PackageNotFoundError):
        return version(name)
    return None


def keep(row: EngineRow, cases: list[str], conforms: bool, packages: Packages = None) -> Path:
    """Write down what was found; the last word on an engine counts."""
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
    """Whether this version of an engine conforms; None where nobody has tried."""
    # a cache that is not ours is refused where something is loaded from it
    with suppress(RequestError, OSError):
        found = _read(environment.private_cache(os.environ) / NAME).get(row.name)
        if isinstance(found, dict) and found.get("version") == engine_version(row, packages):
            return found.get("conforms") is True
    return None


def _read(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError, RecursionError, files.TooLargeError):
        table = json.loads(files.read(path, MOST_BYTES))
        return table if isinstance(table, dict) else {}
    return {}
