"""The form of training data: rows of fixed length, made of segments that do not attend to each
other.

A training set (`TrainingRows`) says which rows make the global batch of each step, the same for
every parallel plan; each rank takes its part of it. `data/corpus.py` and `tasks/alpaca` implement
it; the engines read it.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
RowKey = Any  # identifies a row; opaque to all but the data set

IGNORED = -100  # the target of a token that has no loss


@dataclass(frozen=True)
class TrainingRow:
    """One training row: segments (samples, or pieces of documents) laid end to end that do not
    attend to each other, and padding, if any, as a last segment of its own.

    `tokens` and `targets` are int64 arrays of the row's length; a target is the next token of the
    same segment, or IGNORED (-100). `lens` are the lengths of the segments, padding included;
    `real` is the number of tokens that are not padding, `samples` how many samples the row counts
    as.
    """

    tokens: Ids
    targets: Ids  # the next token of the same segment, or IGNORED
    lens: tuple[int, ...]  # lengths of the segments; they add up to the row's length
    real: int  # number of tokens that are not padding
    samples: int


class TrainingRows(Protocol):
    """A data set of training rows, addressed by keys that only the data set understands:
    `batch(step)` returns the keys of a step's global batch, `held_out()` those of rows that are
    never trained on, `row(key)` the `TrainingRow`. Implemented by `CorpusRows` and alpaca's
    `ConversationRows`.
    """

    def batch(self, step: int) -> list[RowKey]:
        """Return the keys of the rows in the global batch of a step, counted from 0."""

    def row(self, key: RowKey) -> TrainingRow:
        """Return the training row with this key: tokens, targets and lengths of its segments."""

    def held_out(self) -> list[RowKey]:
        """Return the keys of the rows that are never trained on and whose loss is measured before
        and after; the same at every call.
        """
