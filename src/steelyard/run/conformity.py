"""Store and look up whether an engine conforms on this machine, as `steelyard conform` found.

The results are kept in conform.json in the user's cache folder, by engine. Records state them:
run/parent.py asks for each run. A result holds for one version of the engine: its identity
(run/engine_identity.py), which agents find in the workers' Python, of `conform` and of a run.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from steelyard import files
from steelyard.engine import engine_rows
from steelyard.engine.engine_rows import EngineRow
from steelyard.errors import RequestError
from steelyard.run import environment
from steelyard.run.clock import read_utc_time

RESULTS_FILE = "conform.json"
MAX_FILE_BYTES = 1 << 20
OWN_PACKAGE = __name__.partition(".")[0]


def list_modules(row: EngineRow) -> list[str]:
    """Return the modules of other packages that implement an engine or its framework, sorted.
    Imports the packages that have frameworks; raises RequestError if one's row is bad.
    """
    framework = engine_rows.load_framework_rows().get(row.framework)
    references = [*row.works.values(), *([] if framework is None else [framework.make])]
    modules = {reference.partition(":")[0] for reference in references}
    return sorted(name for name in modules if name.partition(".")[0] != OWN_PACKAGE)


def merge_identities(identities: Iterable[str | None]) -> str | None:
    """Return the identity of an engine over all hosts or runs: the one that all have, or None if
    they differ or one is unknown.
    """
    distinct = set(identities)
    return distinct.pop() if len(distinct) == 1 else None


def hash_engine(row: EngineRow, identity: str | None) -> str | None:
    """Return a hash of 16 hex digits over all that decides what an engine computes: its name, this
    package's files, and its identity, the code that its workers can import; None if that is
    unknown.
    """
    if identity is None:
        return None
    parts = [row.name, environment.hash_package(), identity]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def write_conformity(
    row: EngineRow, cases: list[str], conforms: bool, identity: str, untested: Sequence[str] = ()
) -> Path:
    """Write into conform.json in the user's cache folder whether this version of the engine
    conforms, replacing its earlier result and keeping other engines', and return the path of the
    file.

    `cases` are the names of the cases it was tested on, `identity` is that of its records,
    `untested` names what could not be tested. Raises RequestError if the cache folder cannot be
    made or is not private to the user, OSError if the file cannot be written.
    """
    try:
        path = environment.make_private_cache(os.environ) / RESULTS_FILE
    except OSError as error:
        raise RequestError(
            f"the result of conform cannot be stored: {error}; set XDG_CACHE_HOME to a folder of"
            " yours"
        ) from error
    result = {
        "version": hash_engine(row, identity),
        "conforms": conforms,
        "cases": cases,
        "untested": list(untested),
        "created": read_utc_time(),
    }
    files.write_file(path, json.dumps(_read_results(path) | {row.name: result}, indent=2).encode())
    return path


def is_tested(row: EngineRow) -> bool:
    """Return whether there is a result for any version of the engine on this machine. Creates the
    user's cache folder if it is missing; nothing is raised for it.
    """
    return _read_result(row) is not None


def read_conformity(row: EngineRow, identity: str | None) -> bool | None:
    """Return whether this very version of the engine (`hash_engine`) was found to conform on this
    machine, or None if it was not tested, its identity is unknown, or the cache cannot be read.
    Creates the user's cache folder if it is missing; nothing is raised for it.
    """
    version, result = hash_engine(row, identity), _read_result(row)
    if version is None or result is None or result.get("version") != version:
        return None
    return result.get("conforms") is True


def _read_result(row: EngineRow) -> dict[str, Any] | None:
    """Return the stored result of an engine, or None if there is none or the cache cannot be
    read.
    """
    # a cache that is not private is refused elsewhere, where code is loaded from it
    with suppress(RequestError, OSError):
        results = _read_results(environment.make_private_cache(os.environ) / RESULTS_FILE)
        result = results.get(row.name)
        return result if isinstance(result, dict) else None
    return None


def _read_results(path: Path) -> dict[str, Any]:
    """Return the stored results of conform.json by engine name; empty if the file is missing,
    larger than `MAX_FILE_BYTES` or not a JSON object.
    """
    with suppress(OSError, ValueError, RecursionError, files.TooLargeError):
        table = json.loads(files.read_file(path, MAX_FILE_BYTES))
        return table if isinstance(table, dict) else {}
    return {}
