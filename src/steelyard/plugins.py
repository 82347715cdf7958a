"""Load rows that other packages bring through entry points, and objects that a row names as
`module:attribute`.

A row describes an engine, task, accelerator, family, launcher, metric or text. Each of these rooms
calls `load_rows_by_name` with its shipped rows and its entry-point group. `load_reference` imports
code that a row names only when it is used, so that reading the rows imports no framework.
"""

import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
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
MAX_NAME_CHARS = 100  # of a package's name or version, both of which other people write


@dataclass(frozen=True)
class Provider:
    """The installed package (distribution) whose entry point brings a row: its `name` and its
    `version`, None if its metadata states none. As text `name version`.
    """

    name: str
    version: str | None

    def __str__(self) -> str:
        """Return name and version, such as `acme-engine 1.2`; the name alone without a version."""
        return " ".join(filter(None, (self.name, self.version)))


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


def find_provider(group: str, name: str) -> Provider | None:
    """Return the package that brings the row of this name to an entry-point group, or None if the
    row is a shipped one or unknown. Rows count by where they come from: that of another package is
    its own, even if it names code of this one.

    Imports the packages of the group. Raises ImportError or AttributeError if one cannot be loaded;
    `load_rows` reports that better, so call it before.
    """
    entries = _find_entry_points(group, tuple(sys.path))
    return next((_describe_provider(entry) for entry in entries if entry.load().name == name), None)


def _describe_provider(entry: EntryPoint) -> Provider:
    """Return the package of an entry point, each text on one line and bounded; the module that the
    entry point names stands for a package whose metadata has no name.
    """
    metadata = {} if entry.dist is None else entry.dist.metadata.json
    name, version = (
        " ".join(str(metadata.get(key) or "").split())[:MAX_NAME_CHARS]
        for key in ("name", "version")
    )
    return Provider(name or entry.module[:MAX_NAME_CHARS], version or None)


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
    rows = [*shipped, *load_rows(group, row_type, noun)]
    names = [str(getattr(row, "name")) for row in rows]  # noqa: B009  every kind of row has one
    check_unique_names(names, noun)
    return dict(zip(names, rows, strict=True))


def check_unique_names(names: Iterable[str], noun: str) -> None:
    """Raise RequestError, with the name, if a name occurs twice among rows of one kind: no package
    replaces a row of another, nor a shipped one. `noun` names the kind of row, such as "task".
    """
    for name, count in Counter(names).items():
        if count > 1:
            raise RequestError(
                f"{noun} {name!r} is defined twice; uninstall one of the packages that define it"
            )


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
