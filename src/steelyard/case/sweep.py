"""Sweeps: keys with several values each, and the grid of points that they make. Pure: nothing is
resolved or run here.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product

from steelyard.case import resolve
from steelyard.case.case import Tune
from steelyard.errors import RequestError

DEVICES = ("devices", "nodes")  # of the plan: no case holds them
EXAMPLE = "tune.micro_batch=1,2,4"
_COMMA = re.compile(r',(?=(?:[^"]*"[^"]*")*[^"]*$)')  # outside of quotes

Point = tuple[tuple[str, str], ...]  # keys with one value each, as they were typed


@dataclass(frozen=True)
class Axis:
    """A key and the values that it takes, as they were typed."""

    key: str
    values: tuple[str, ...]


def axes(options: list[str], given: Mapping[str, str]) -> tuple[Axis, ...]:
    """What the options of a command line sweep. `given` are keys that it also sets, each with the
    words that do.
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
    """Every key that --sweep takes: those of --set but for facts on published data, which change no
    run, and the plan's.
    """
    return sorted(
        [*DEVICES, *(key for key in resolve.settable() if not key.startswith("published."))]
    )


def _overlap(one: str, other: str) -> bool:
    """Whether two keys set the same value: they are equal, or one is a table that holds the other."""
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")


def grid(axes: tuple[Axis, ...]) -> list[Point]:
    """All points, the last axis changing first. Without an axis there is one, which sets nothing."""
    return [
        tuple(zip((axis.key for axis in axes), values, strict=True))
        for values in product(*(a.values for a in axes))
    ]


def settings(point: Point) -> list[str]:
    """A point as --set takes it, but for the keys of the plan."""
    return [f"{key}={value}" for key, value in point if key not in DEVICES]


def number(point: Point, key: str) -> int | None:
    """How many devices or nodes a point asks for; None where it does not say."""
    return next((int(resolve.typed(value)) for name, value in point if name == key), None)


def text(point: Point) -> str:
    return " ".join(f"{key}={value}" for key, value in point)


@contextmanager
def named(point: Point) -> Iterator[None]:
    """What is refused inside says at which point."""
    try:
        yield
    except RequestError as error:
        if not point:
            raise
        raise RequestError(f"point {text(point)}: {error}") from error
