"""Rows of training data: fixed in length, made of segments that do not see each other.

A training set says which rows make the global batch of a step, the same for every plan; ranks take
theirs of it.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Key = Any  # what names a row of a set; only the set looks inside

IGNORED = -100  # the target of a token from which nothing is learned


@dataclass(frozen=True)
class Row:
    """Segments laid end to end. What is left of the row is padding, a last segment of its own."""

    tokens: Ids
    targets: Ids  # the next token of the same segment, or IGNORED
    lens: tuple[int, ...]  # of the segments, adding up to the length of the row
    real: int  # tokens that are no padding
    samples: int


class Rows(Protocol):
    def batch(self, step: int) -> list[Key]:
        """The rows of the global batch of a step, counted from 0."""

    def row(self, key: Key) -> Row: ...

    def held_out(self) -> list[Key]:
        """Rows that are never trained on, for the loss before and after; the same at every call."""
