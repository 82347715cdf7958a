"""Rows as a share of a global batch: which rows a replica computes, and their arrays end to end.
Without a framework.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from steelyard.data.rows import IGNORED, Key, Row
from steelyard.engine.job import Job

GRAIN = 128  # tokens: matmul kernels work in tiles


@dataclass(frozen=True)
class Packed:
    """Rows of a micro-batch as arrays, laid end to end."""

    tokens: np.ndarray[Any, np.dtype[np.int64]]
    positions: np.ndarray[Any, np.dtype[np.int64]]
    lens: list[int]
    pick: np.ndarray[Any, np.dtype[np.int64]]  # tokens from which something is learned
    targets: np.ndarray[Any, np.dtype[np.int64]]
    counts: dict[str, int]


def packed(rows: list[Row]) -> Packed:
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
    """The segments of a row that are no padding."""
    return row.lens if row.real == len(row.tokens) else row.lens[:-1]


def empty_row(length: int) -> Row:
    """Padding alone: what fills a micro-batch that has too few rows."""
    return Row(
        np.zeros(length, dtype=np.int64), np.full(length, IGNORED, dtype=np.int64), (length,), 0, 0
    )


def without_padding(rows: list[Row], grain: int = GRAIN) -> list[Row]:
    """The same rows without what fills them up, and less than `grain` tokens that fill up all of
    them together; of no rows, so many."""
    short = [row if row.real == len(row.tokens) else _cut(row) for row in rows]
    left = -sum(row.real for row in rows) % grain if rows else grain
    return [*short, empty_row(left)] if left else short


def _cut(row: Row) -> Row:
    return replace(
        row, tokens=row.tokens[: row.real], targets=row.targets[: row.real], lens=row.lens[:-1]
    )


class PackedRows:
    """Rows of a task as a replica's micro-batches, without what puts them on a device: every row is
    padded to its length, or none is, and their tokens are a multiple of `grain`."""

    def __init__(self, job: Job, length: int, padded: bool = True, grain: int = GRAIN) -> None:
        self.job, self.length, self.padded, self.grain = job, length, padded, grain

    def groups(self, keys: list[Key], size: int | None = None) -> list[list[Key]]:
        return deal(self.job, keys, size)

    def pack(self, keys: list[Key]) -> Packed:
        texts = self.job.inputs
        if self.padded:
            return packed(
                [empty_row(self.length) if key is None else texts.row(key) for key in keys]
            )
        return packed(
            without_padding([texts.row(key) for key in keys if key is not None], self.grain)
        )

    def targets(self, pack: Packed) -> int:
        return len(pack.pick)

    def seed(self, step: int) -> None:
        """Nothing here is dropped at random."""


def deal(job: Job, keys: list[Key], size: int | None = None) -> list[list[Key]]:
    """Keys dealt to replicas in turn: the fewest micro-batches of at most the asked size, all of
    one size, and as many on each replica; or micro-batches of a given size. What is missing at the
    end is None."""
    replica, replicas = job.place.dp, job.plan.dp
    count = -(-len(keys) // (replicas * (size or job.case.tune.micro_batch)))
    size = size or -(-len(keys) // (replicas * count))
    full = [*keys, *[None] * (size * count * replicas - len(keys))]
    own = full[replica::replicas]
    return [own[i : i + size] for i in range(0, size * count, size)]
