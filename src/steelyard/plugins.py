"""Rows that other packages bring, through entry points, and code that a row names and that is
imported on use.
"""

import sys
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import Any, TypeVar

from steelyard.errors import MORE_MEMORY, RequestError, first_cause, in_one_line, lacks_memory

Kind = TypeVar("Kind")


def rows(group: str, kind: type[Kind], noun: str) -> list[Kind]:
    """What the entry points of a group name, each of which must be a row of this kind."""
    found = []
    for entry in _entries(group, tuple(sys.path)):
        about = f"{noun} {entry.name!r} ({entry.value})"
        try:
            row = entry.load()
        except (ImportError, AttributeError) as error:
            raise RequestError(f"{about}: {error}; fix or uninstall its package") from error
        if not isinstance(row, kind):
            raise RequestError(
                f"{about} is not of type {kind.__name__}; fix or uninstall its package"
            )
        found.append(row)
    return found


@cache
def _entries(group: str, path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """Looked up once for a search path: rows are asked for often."""
    return tuple(entry_points(group=group))


def table(shipped: list[Kind], group: str, kind: type[Kind], noun: str) -> dict[str, Kind]:
    """Shipped rows and those of other packages by name; a name stands for one row."""
    out: dict[str, Kind] = {}
    for row in [*shipped, *rows(group, kind, noun)]:
        name = str(getattr(row, "name"))  # noqa: B009  every kind of row has one
        if name in out:
            raise RequestError(
                f"{noun} {name!r} is defined twice; uninstall one of the packages that define it"
            )
        out[name] = row
    return out


def load(reference: str) -> Any:
    """The object that `module:name` stands for."""
    module, _, name = reference.partition(":")
    return getattr(import_module(module), name)


def installed(module: str) -> bool:
    """Return whether this Python has a module; raise RequestError if the package around it is there
    but fails.

    Looking for a module in a package imports the package, which may be what is missing."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False
    except (ImportError, MemoryError) as error:
        why, package = in_one_line(first_cause(error)), module.partition(".")[0]
        if lacks_memory(error):
            said = f"importing it ran out of memory ({why}); {MORE_MEMORY}, then run again"
        else:
            said = f"it cannot be imported ({why}); install it again"
        raise RequestError(f"{package} is installed, but {said}") from error
