"""Rows that other packages bring, through entry points, and code that a row names and that is imported on use."""

import sys
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from steelyard.errors import RequestError

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
            raise RequestError(f"{about} is not of type {kind.__name__}; fix or uninstall its package")
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
            raise RequestError(f"{noun} {name!r} is defined twice; uninstall one of the packages that define it")
        out[name] = row
    return out


def load(reference: str) -> Any:
    """The object that `module:name` stands for."""
    module, _, name = reference.partition(":")
    return getattr(import_module(module), name)
