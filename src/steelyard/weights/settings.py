"""Refuse settings of a checkpoint that differ from the case's model. Imports no torch."""

import math
from pathlib import Path
from typing import Any

from steelyard.errors import RequestError, short_repr


def agree(path: Path, key: str, found: Any, field: str, wanted: Any) -> None:
    """Raise RequestError unless setting `key` of the file at `path` has the value of the case's
    `field`. Floats are equal within a relative 1e-6, because some tools store 1e-5 as fp32.
    """
    # some tools store 1e-5 rounded to fp32
    both = isinstance(found, float) and isinstance(wanted, float)
    if not (math.isclose(found, wanted, rel_tol=1e-6) if both else found == wanted):
        raise RequestError(
            f"{path}: {key} is {short_repr(found)}, the case's {field} is {wanted!r}; "
            "give weights of the case's model, or the case of theirs"
        )


def allow(path: Path, key: str, found: Any, allowed: tuple[Any, ...]) -> None:
    """Raise RequestError if setting `key` of the file at `path` is neither absent (None) nor one of
    the allowed values: with another value the model computes something else.
    """
    if found is not None and found not in allowed:
        raise RequestError(
            f"{path}: {key} is {short_repr(found)}, allowed:"
            f" {', '.join(map(repr, allowed)) or None}; give weights of a plain Llama, or save"
            " these in that form"
        )
