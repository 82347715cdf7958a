"""Sweeps: keys with several values each, and the grid of points that they make.

`cli/requests.py` parses `--sweep` here and makes one request per point. Pure: no case is resolved,
nothing is run.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product

from steelyard.case import resolve
from steelyard.case.case import Tune
from steelyard.errors import RequestError

DEVICES = ("devices", "nodes")  # keys of the plan, which no case holds
EXAMPLE = "tune.micro_batch=1,2,4"
_COMMA = re.compile(r',(?=(?:[^"]*"[^"]*")*[^"]*$)')  # commas outside of quotes

Point = tuple[tuple[str, str], ...]  # (key, value) pairs, values as they were typed


@dataclass(frozen=True)
class Axis:
    """A dotted key of a sweep, and the values that it takes, as they were typed."""

    key: str
    values: tuple[str, ...]


def axes(options: list[str], given: Mapping[str, str]) -> tuple[Axis, ...]:
    """Parse the `--sweep` options (`key=value,value`) into axes, in their order.

    `set_keys` are keys that the command line sets otherwise, each with the option that does (such
    as `--devices 2`). Raise RequestError for an unknown key, an empty value, or a key that is swept
    twice or also set.
    """
    out: list[Axis] = []
    for option in options:
        axis = _axis(option)
        for other in out:
            if axis.key == other.key:
                raise RequestError(
                    f"--sweep {option!r}: {axis.key} is swept twice; name all its values in one"
                    " --sweep"
                )
            if _overlap(axis.key, other.key):
                raise RequestError(
                    f"--sweep {option!r}: {axis.key} and {other.key} set the same value; leave"
                    " one out"
                )
        for key, words in given.items():
            if _overlap(axis.key, key):
                raise RequestError(
                    f"--sweep {option!r}: {axis.key} is also set by {words}; leave one of the"
                    " two out"
                )
        out.append(axis)
    return tuple(out)


def _axis(option: str) -> Axis:
    """Parse one `--sweep` option; the name of a tune may stand without `tune.`. Raise RequestError
    if its form, key or a value is not allowed. Commas in quotes do not separate.
    """
    name, sign, text = option.partition("=")
    if not sign or not name:
        raise RequestError(
            f"--sweep {option!r} is not of the form key=value,value, such as {EXAMPLE}"
        )
    key = f"tune.{name}" if name.partition(".")[0] in Tune.model_fields else name
    resolve.check_key(key, sweepable(), "--sweep")
    values = tuple(value.strip() for value in _COMMA.split(text))
    for value in values:
        _check_value(option, key, value)
    return Axis(key, values)


def _check_value(option: str, key: str, value: str) -> None:
    """Raise RequestError if a value of a sweep is empty, a table or list, or for devices and nodes
    not a whole number of at least 1. `option` is shown in the message.
    """
    if not value:
        raise RequestError(f"--sweep {option!r}: a value is empty; name each, as in {EXAMPLE}")
    read = resolve.typed(value)
    if isinstance(read, dict | list):
        raise RequestError(
            f"--sweep {option!r}: {value} is a table or a list; a sweep has single values, as in"
            f" {EXAMPLE}"
        )
    if key in DEVICES and (type(read) is not int or read < 1):
        raise RequestError(
            f"--sweep {option!r}: {value} is no number of {key}; allowed: 1 or more, as in"
            f" {key}=1,2,4"
        )


def sweepable() -> list[str]:
    """Return every key that --sweep takes, sorted: `devices`, `nodes`, and the keys of --set
    without those below `published.`, which change no run.
    """
    return sorted(
        [*DEVICES, *(key for key in resolve.settable() if not key.startswith("published."))]
    )


def _overlap(one: str, other: str) -> bool:
    """Return whether two dotted keys set the same value: they are equal, or one names a table that
    holds the other.
    """
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")


def grid(axes: tuple[Axis, ...]) -> list[Point]:
    """Return all points of the grid, the last axis changing fastest. Without axes it is one point
    that sets nothing.
    """
    return [
        tuple(zip((axis.key for axis in axes), values, strict=True))
        for values in product(*(a.values for a in axes))
    ]


def settings(point: Point) -> list[str]:
    """Return a point's values as `key=value` texts for --set, without `devices` and `nodes`."""
    return [f"{key}={value}" for key, value in point if key not in DEVICES]


def number(point: Point, key: str) -> int | None:
    """Return the number at `key` (`devices` or `nodes`) of a point; None if the point does not set
    it.
    """
    return next((int(resolve.typed(value)) for name, value in point if name == key), None)


def text(point: Point) -> str:
    """Return a point as text for messages, such as `tune.micro_batch=2 devices=4`."""
    return " ".join(f"{key}={value}" for key, value in point)


@contextmanager
def named(point: Point) -> Iterator[None]:
    """Prefix the message of a RequestError that is raised inside the `with` block with the point;
    nothing is added for a point without keys.
    """
    try:
        yield
    except RequestError as error:
        if not point:
            raise
        raise RequestError(f"point {text(point)}: {error}") from error
