"""Which rows of a global batch a replica computes, and the rows of a micro-batch as arrays laid end
to end. Needs numpy only.

`TrainingLoop` calls this through a `RowPacker`; subclasses copy the arrays to a device
(micro_batches.py, engines/paddle/paddle_batches.py).
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from steelyard.data.rows import IGNORED, Key, Row
from steelyard.engine.job import Job

GRAIN = 128  # tokens: matmul kernels work in tiles


@dataclass(frozen=True)
class Packed:
    """The rows of a micro-batch as host arrays, laid end to end. `segment_lengths` are the lengths
    of all segments; `counts` has tokens, samples, padded, logits, pairs and square.
    """

    tokens: np.ndarray[Any, np.dtype[np.int64]]
    positions: np.ndarray[Any, np.dtype[np.int64]]
    lens: list[int]
    pick: np.ndarray[Any, np.dtype[np.int64]]  # indices of tokens that have a target
    targets: np.ndarray[Any, np.dtype[np.int64]]
    counts: dict[str, int]


def packed(rows: list[Row]) -> Packed:
    """Return the rows laid end to end, with the positions of tokens in their segments and the
    counts. Padding is counted as `padded` and in no other count.
    """
    targets = np.concatenate([row.targets for row in rows])
    pick = np.flatnonzero(targets != IGNORED)
    lens = [n for row in rows for n in row.lens]
    real = [n for row in rows for n in _real(row)]
    return Packed(
        tokens=np.concatenate([row.tokens for row in rows]),
        positions=np.concatenate([np.arange(n, dtype=np.int64) for n in lens]),
        lens=lens,
        pick=pick,
        targets=targets[pick],
        counts={
            "tokens": sum(real),
            "samples": sum(row.samples for row in rows),
            "padded": sum(lens) - sum(real),
            "logits": len(pick),
            "pairs": sum(n * (n + 1) // 2 for n in real),
            "square": sum(n * n for n in real),
        },
    )


def _real(row: Row) -> tuple[int, ...]:
    """Return the lengths of a row's segments that are not padding; padding is the last segment."""
    return row.lens if row.real == len(row.tokens) else row.lens[:-1]


def empty_row(length: int) -> Row:
    """Return a row of `length` padding tokens without targets, for a micro-batch that has too few
    rows.
    """
    return Row(
        np.zeros(length, dtype=np.int64), np.full(length, IGNORED, dtype=np.int64), (length,), 0, 0
    )


def without_padding(rows: list[Row], grain: int = GRAIN) -> list[Row]:
    """Return the rows without their padding, and one more row of padding that makes their tokens
    together a multiple of `token_multiple`, if they are not. For no rows, return one row of
    `token_multiple` padding tokens.
    """
    short = [row if row.real == len(row.tokens) else _cut(row) for row in rows]
    left = -sum(row.real for row in rows) % grain if rows else grain
    return [*short, empty_row(left)] if left else short


def _cut(row: Row) -> Row:
    """Return a row without its padding segment."""
    return replace(
        row, tokens=row.tokens[: row.real], targets=row.targets[: row.real], lens=row.lens[:-1]
    )


class PackedRows:
    """Makes a replica's micro-batches of a task's rows, as host arrays.

    With `padded` every row has its full length and missing rows are padding. Otherwise rows are not
    padded, and only the tokens of a micro-batch are filled up to a multiple of `token_multiple`.
    Subclasses add `to_device`.
    """

    def __init__(self, job: Job, length: int, padded: bool = True, grain: int = GRAIN) -> None:
        self.job, self.length, self.padded, self.grain = job, length, padded, grain

    def groups(self, keys: list[Key], size: int | None = None) -> list[list[Key]]:
        """Return the row keys of this replica's micro-batches; None is a missing row."""
        return deal(self.job, keys, size)

    def pack(self, keys: list[Key]) -> Packed:
        """Return one micro-batch as arrays. A key None becomes a row of padding, or is left out if
        rows are not padded.
        """
        texts = self.job.inputs
        if self.padded:
            return packed(
                [empty_row(self.length) if key is None else texts.row(key) for key in keys]
            )
        return packed(
            without_padding([texts.row(key) for key in keys if key is not None], self.grain)
        )

    def targets(self, pack: Packed) -> int:
        """Return the number of tokens with a target."""
        return len(pack.pick)

    def seed(self, step: int) -> None:
        """Do nothing: there is no dropout in these models."""


def deal(job: Job, keys: list[Key], size: int | None = None) -> list[list[Key]]:
    """Deal row keys to replicas in turn, and return this replica's, divided into micro-batches of
    equal size.

    `size` is the number of keys of a micro-batch. If it is None, there are as few micro-batches as
    `tune.micro_batch` allows, with rows spread evenly over them. All replicas have equally many
    micro-batches; missing keys at the end are None.
    """
    replica, replicas = job.place.dp, job.plan.dp
    count = -(-len(keys) // (replicas * (size or job.case.tune.micro_batch)))
    size = size or -(-len(keys) // (replicas * count))
    full = [*keys, *[None] * (size * count * replicas - len(keys))]
    own = full[replica::replicas]
    return [own[i : i + size] for i in range(0, size * count, size)]
