"""Which rows of a global batch a replica computes, and the rows of a micro-batch as arrays laid end
to end. Needs numpy only.

`TrainingLoop` calls this through a `RowPacker`; subclasses copy the arrays to a device
(micro_batches.py, engines/paddle/paddle_batches.py).
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from steelyard.data.training_rows import IGNORED, RowKey, TrainingRow
from steelyard.engine.job import Job

TOKEN_MULTIPLE = 128  # tokens: matmul kernels work in tiles


@dataclass(frozen=True)
class RowPack:
    """The rows of a micro-batch as int64 host arrays, laid end to end; made by `pack_rows`.
    `tokens` and `positions` have one entry per token, positions beginning at 0 in each segment;
    `segment_lengths` are the lengths of all segments, padding included; `pick` are the indices of
    tokens that have a target, `targets` their target tokens. `counts` has tokens, samples, padded,
    logits, pairs and square (`pack_rows`).
    """

    tokens: np.ndarray[Any, np.dtype[np.int64]]
    positions: np.ndarray[Any, np.dtype[np.int64]]
    segment_lengths: list[int]
    pick: np.ndarray[Any, np.dtype[np.int64]]  # indices of tokens that have a target
    targets: np.ndarray[Any, np.dtype[np.int64]]
    counts: dict[str, int]


def pack_rows(rows: list[TrainingRow]) -> RowPack:
    """Return the rows laid end to end, with the positions of tokens in their segments and the
    counts: `logits` are tokens with a target, `pairs` causal query-key pairs inside segments,
    `square` all pairs. Padding is counted as `padded` and in no other count. Raises ValueError for
    no rows.
    """
    targets = np.concatenate([row.targets for row in rows])
    pick = np.flatnonzero(targets != IGNORED)
    lengths = [n for row in rows for n in row.lens]
    real_lengths = [n for row in rows for n in _get_real_lengths(row)]
    return RowPack(
        tokens=np.concatenate([row.tokens for row in rows]),
        positions=np.concatenate([np.arange(n, dtype=np.int64) for n in lengths]),
        segment_lengths=lengths,
        pick=pick,
        targets=targets[pick],
        counts={
            "tokens": sum(real_lengths),
            "samples": sum(row.samples for row in rows),
            "padded": sum(lengths) - sum(real_lengths),
            "logits": len(pick),
            "pairs": sum(n * (n + 1) // 2 for n in real_lengths),
            "square": sum(n * n for n in real_lengths),
        },
    )


def _get_real_lengths(row: TrainingRow) -> tuple[int, ...]:
    """Return the lengths in tokens of a row's segments that are not padding: all, or all but the
    last if the row has padding, which is its last segment.
    """
    return row.lens if row.real == len(row.tokens) else row.lens[:-1]


def make_padding_row(length: int) -> TrainingRow:
    """Return a row of `length` padding tokens without targets, for a micro-batch that has too few
    rows.
    """
    return TrainingRow(
        np.zeros(length, dtype=np.int64), np.full(length, IGNORED, dtype=np.int64), (length,), 0, 0
    )


def drop_padding(
    rows: list[TrainingRow], token_multiple: int = TOKEN_MULTIPLE
) -> list[TrainingRow]:
    """Return the rows without their padding, and after them one row of padding that makes their
    tokens together a multiple of `token_multiple`, if they are not. For no rows, return one row of
    `token_multiple` padding tokens.
    """
    cut_rows = [row if row.real == len(row.tokens) else _cut_padding(row) for row in rows]
    padding = -sum(row.real for row in rows) % token_multiple if rows else token_multiple
    return [*cut_rows, make_padding_row(padding)] if padding else cut_rows


def _cut_padding(row: TrainingRow) -> TrainingRow:
    """Return a copy of a row with padding without that, its last segment; `real` and `samples`
    stay.
    """
    return replace(
        row, tokens=row.tokens[: row.real], targets=row.targets[: row.real], lens=row.lens[:-1]
    )


class RowPacker:
    """Makes a replica's micro-batches of a task's training rows as host arrays: `split_keys`
    chooses the rows, `pack` returns a `RowPack`, `count_targets` its target tokens, `seed` does
    nothing. Subclasses add `to_device` and are the loop's `MicroBatchMaker`.

    With `padded` every row has its full length (`length` tokens) and missing rows are padding.
    Otherwise rows are not padded, and only the tokens of a micro-batch together are filled up to a
    multiple of `token_multiple`.
    """

    def __init__(
        self, job: Job, length: int, padded: bool = True, token_multiple: int = TOKEN_MULTIPLE
    ) -> None:
        self.job, self.length, self.padded, self.token_multiple = (
            job,
            length,
            padded,
            token_multiple,
        )

    def split_keys(self, keys: list[RowKey], size: int | None = None) -> list[list[RowKey]]:
        """Return the row keys of this replica's micro-batches, of the global batch `keys`: equally
        many and equally large on all replicas, None for a missing row. `size` is the number of rows
        of a micro-batch; None: from `tune.micro_batch`.
        """
        return deal_keys(self.job, keys, size)

    def pack(self, keys: list[RowKey]) -> RowPack:
        """Return one micro-batch as arrays. `keys` are those of rows of `job.inputs`; a key None
        becomes a row of padding, or is left out if rows are not padded. In that case the rows' own
        padding is cut too, and only the tokens together are filled up to a multiple of
        `token_multiple`.
        """
        rows = self.job.inputs
        if self.padded:
            return pack_rows(
                [make_padding_row(self.length) if key is None else rows.row(key) for key in keys]
            )
        return pack_rows(
            drop_padding([rows.row(key) for key in keys if key is not None], self.token_multiple)
        )

    def count_targets(self, pack: RowPack) -> int:
        """Return the number of tokens with a target in a packed micro-batch, which the loss is a
        mean over.
        """
        return len(pack.pick)

    def seed(self, step: int) -> None:
        """Do nothing: models that train on packed rows have no dropout."""


def deal_keys(job: Job, keys: list[RowKey], size: int | None = None) -> list[list[RowKey]]:
    """Deal row keys to replicas in turn, and return this replica's, divided into micro-batches of
    equal size.

    `size` is the number of keys of a micro-batch. If it is None, there are as few micro-batches as
    `tune.micro_batch` allows, with rows spread evenly over them. All replicas have equally many
    micro-batches; missing keys at the end are None. For no keys returns an empty list, or raises
    ZeroDivisionError without `size`.
    """
    replica, replicas = job.place.dp, job.plan.dp
    count = -(-len(keys) // (replicas * (size or job.case.tune.micro_batch)))
    size = size or -(-len(keys) // (replicas * count))
    padded_keys = [*keys, *[None] * (size * count * replicas - len(keys))]
    replica_keys = padded_keys[replica::replicas]
    return [replica_keys[i : i + size] for i in range(0, size * count, size)]
