"""Refuse settings of a checkpoint that differ from the case's model. Imports no torch."""

import math
from pathlib import Path
from typing import Any

from steelyard.errors import RequestError, short_repr


def check_setting_equals(path: Path, key: str, value: Any, field: str, expected: Any) -> None:
    """Raise RequestError unless setting `key` of the file at `path` has the value of the case's
    `field`. Floats are equal within a relative 1e-6, because some tools store 1e-5 as fp32.
    """
    # some tools store 1e-5 rounded to fp32
    are_floats = isinstance(value, float) and isinstance(expected, float)
    if not (math.isclose(value, expected, rel_tol=1e-6) if are_floats else value == expected):
        raise RequestError(
            f"{path}: {key} is {short_repr(value)}, the case's {field} is {expected!r}; "
            "give weights of the case's model, or the case of theirs"
        )


def check_setting_allowed(path: Path, key: str, value: Any, allowed: tuple[Any, ...]) -> None:
    """Raise RequestError if setting `key` of the file at `path` is neither absent (None) nor one of
    the allowed values: with another value the model computes something else.
    """
    if value is not None and value not in allowed:
        raise RequestError(
            f"{path}: {key} is {short_repr(value)}, allowed:"
            f" {', '.join(map(repr, allowed)) or None}; give weights of a plain Llama, or save"
            " these in that form"
        )
