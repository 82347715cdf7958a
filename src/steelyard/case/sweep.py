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

PLAN_KEYS = ("devices", "nodes")  # keys of the plan, which no case holds
SWEEP_EXAMPLE = "tune.micro_batch=1,2,4"
_COMMA = re.compile(r',(?=(?:[^"]*"[^"]*")*[^"]*$)')  # commas outside of quotes

SweepPoint = tuple[tuple[str, str], ...]  # (key, value) pairs, values as they were typed


@dataclass(frozen=True)
class SweepAxis:
    """One axis of a sweep: `key`, dotted (`tune.micro_batch`), or `devices` or `nodes`, and
    `values` that it takes in turn, texts as they were typed.
    """

    key: str
    values: tuple[str, ...]


def parse_axes(options: list[str], set_keys: Mapping[str, str]) -> tuple[SweepAxis, ...]:
    """Parse the `--sweep` options (`key=value,value`) into axes, in their order. A tune's name may
    stand without `tune.`; the axis has the full key. Values stay as typed.

    `set_keys` are keys that the command line sets otherwise, each with the option that does (such
    as `--devices 2`). Raise RequestError for a bad form, an unknown key, a value that is empty, a
    table or a list, or no count of devices or nodes; and if two keys, both swept or one set
    otherwise, are equal or one is a table that holds the other.
    """
    parsed: list[SweepAxis] = []
    for option in options:
        axis = _parse_axis(option)
        for other in parsed:
            if axis.key == other.key:
                raise RequestError(
                    f"--sweep {option!r}: {axis.key} is swept twice; name all its values in one"
                    " --sweep"
                )
            if _has_overlap(axis.key, other.key):
                raise RequestError(
                    f"--sweep {option!r}: {axis.key} and {other.key} set the same value; leave"
                    " one out"
                )
        for key, set_by in set_keys.items():
            if _has_overlap(axis.key, key):
                raise RequestError(
                    f"--sweep {option!r}: {axis.key} is also set by {set_by}; leave one of the"
                    " two out"
                )
        parsed.append(axis)
    return tuple(parsed)


def _parse_axis(option: str) -> SweepAxis:
    """Return the axis of one `--sweep` option; the name of a tune may stand without `tune.`, that
    of a load without `question.`, which the axis' key has. Values are separated by commas outside
    of quotes, stripped, and not converted. Raise RequestError if its form, key or a value is not
    allowed.
    """
    name, sign, text = option.partition("=")
    if not sign or not name:
        raise RequestError(
            f"--sweep {option!r} is not of the form key=value,value, such as {SWEEP_EXAMPLE}"
        )
    key = f"tune.{name}" if name.partition(".")[0] in Tune.model_fields else name
    key = resolve.expand_key(key)
    resolve.check_option_key(key, list_sweepable_keys(), "--sweep")
    values = tuple(value.strip() for value in _COMMA.split(text))
    for value in values:
        _check_value(option, key, value)
    return SweepAxis(key, values)


def _check_value(option: str, key: str, value: str) -> None:
    """Raise RequestError if a value of a sweep is empty, a table or list, or for devices and nodes
    not a whole number of at least 1. `option` is shown in the message.
    """
    if not value:
        raise RequestError(
            f"--sweep {option!r}: a value is empty; name each, as in {SWEEP_EXAMPLE}"
        )
    parsed = resolve.parse_value(value)
    if isinstance(parsed, dict | list):
        raise RequestError(
            f"--sweep {option!r}: {value} is a table or a list; a sweep has single values, as in"
            f" {SWEEP_EXAMPLE}"
        )
    if key in PLAN_KEYS and (type(parsed) is not int or parsed < 1):
        raise RequestError(
            f"--sweep {option!r}: {value} is not a number of {key}; allowed: 1 or more, as in"
            f" {key}=1,2,4"
        )


def list_sweepable_keys() -> list[str]:
    """Return every key that --sweep takes, sorted: `devices`, `nodes`, and the keys of --set
    without those below `published.`, which change no run.
    """
    return sorted(
        [
            *PLAN_KEYS,
            *(key for key in resolve.list_settable_keys() if not key.startswith("published.")),
        ]
    )


def _has_overlap(key: str, other: str) -> bool:
    """Return whether two dotted keys set the same value: they are equal, or one names a table that
    holds the other.
    """
    return f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")


def make_grid(axes: tuple[SweepAxis, ...]) -> list[SweepPoint]:
    """Return all points of the grid, the last axis changing fastest. Without axes it is one point
    that sets nothing.
    """
    return [
        tuple(zip((axis.key for axis in axes), values, strict=True))
        for values in product(*(a.values for a in axes))
    ]


def format_settings(point: SweepPoint) -> list[str]:
    """Return a point's values as `key=value` texts for --set, without `devices` and `nodes`."""
    return [f"{key}={value}" for key, value in point if key not in PLAN_KEYS]


def find_count(point: SweepPoint, key: str) -> int | None:
    """Return the number of `devices` or `nodes` (`key`) that a point of a sweep sets; None if it
    does not set it.
    """
    return next((int(resolve.parse_value(value)) for name, value in point if name == key), None)


def format_point(point: SweepPoint) -> str:
    """Return a point as text for messages, such as `tune.micro_batch=2 devices=4`."""
    return " ".join(f"{key}={value}" for key, value in point)


@contextmanager
def name_point_in_errors(point: SweepPoint) -> Iterator[None]:
    """Return a context manager that prefixes the message of a RequestError raised inside it with
    the point, such as `point devices=4: `, and raises it as a plain RequestError; errors pass
    unchanged for a point without keys.
    """
    try:
        yield
    except RequestError as error:
        if not point:
            raise
        raise RequestError(f"point {format_point(point)}: {error}") from error
