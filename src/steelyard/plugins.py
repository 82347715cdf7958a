"""Load rows that other packages bring through entry points, and objects that a row names as
`module:attribute`.

A row describes an engine, task, accelerator, family, launcher, metric or text. Each of these rooms
calls `load_rows_by_name` with its shipped rows and its entry-point group. `load_reference` imports
code that a row names only when it is used, so that reading the rows imports no framework.
"""

import sys
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import Any, TypeVar

from steelyard.errors import (
    MORE_MEMORY_HINT,
    RequestError,
    find_first_cause,
    format_in_one_line,
    is_out_of_memory,
)

RowType = TypeVar("RowType")


def load_rows(group: str, row_type: type[RowType], noun: str) -> list[RowType]:
    """Load the objects that the entry points of a group name, and return them in the order of the
    entry points. Imports their packages; the list of entry points is cached.

    Raise RequestError if one cannot be imported (ImportError, AttributeError) or is not of type
    `row_type`; `noun` names the kind of row in the message, such as "task".
    """
    loaded = []
    for entry in _find_entry_points(group, tuple(sys.path)):
        about = f"{noun} {entry.name!r} ({entry.value})"
        try:
            row = entry.load()
        except (ImportError, AttributeError) as error:
            raise RequestError(f"{about}: {error}; fix or uninstall its package") from error
        if not isinstance(row, row_type):
            raise RequestError(
                f"{about} is not of type {row_type.__name__}; fix or uninstall its package"
            )
        loaded.append(row)
    return loaded


@cache
def _find_entry_points(group: str, path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """Return the entry points of a group, looked up once per search path and then cached; `path` is
    sys.path and only part of the cache's key.
    """
    return tuple(entry_points(group=group))


def load_rows_by_name(
    shipped: list[RowType], group: str, row_type: type[RowType], noun: str
) -> dict[str, RowType]:
    """Return the shipped rows and those of other packages (see `load_rows`) by their `name`,
    shipped ones first. Imports these packages.

    Raise RequestError if two rows have one name, or if a package's row cannot be loaded or has
    another type.
    """
    by_name: dict[str, RowType] = {}
    for row in [*shipped, *load_rows(group, row_type, noun)]:
        name = str(getattr(row, "name"))  # noqa: B009  every kind of row has one
        if name in by_name:
            raise RequestError(
                f"{noun} {name!r} is defined twice; uninstall one of the packages that define it"
            )
        by_name[name] = row
    return by_name


def load_reference(reference: str) -> Any:
    """Import the module of a reference `module:name` and return its attribute of that name. Raise
    ImportError or AttributeError if there is none.
    """
    module, _, name = reference.partition(":")
    return getattr(import_module(module), name)


def is_installed(module: str) -> bool:
    """Return whether this Python can find a module; raise RequestError if a package around it is
    installed but its import fails, for example for lack of memory.

    To find `a.b`, the package `a` is imported; the module itself is not.
    """
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False
    except (ImportError, MemoryError) as error:
        cause, package = format_in_one_line(find_first_cause(error)), module.partition(".")[0]
        if is_out_of_memory(error):
            explanation = (
                f"importing it ran out of memory ({cause}); {MORE_MEMORY_HINT}, then run again"
            )
        else:
            explanation = f"it cannot be imported ({cause}); install it again"
        raise RequestError(f"{package} is installed, but {explanation}") from error
