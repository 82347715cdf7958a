"""Plan the batches that a replica scores in a pass: prompts packed end to end, or padded to one
length.

A batch is planned before the pass, and its arrays are made inside of it, where making them is timed
as phase `data`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np

from steelyard.data.prompt_batches import (
    Ids,
    PromptBatch,
    deal_equal_bins,
    make_closed_batch,
    make_open_batch,
    make_sorted_batches,
    measure_prefixes,
    plan_open_bins,
)
from steelyard.engine.job import Job
from steelyard.errors import RequestError

T = TypeVar("T")


@dataclass(frozen=True)
class PaddedBatch:
    """Prompts as rows of one length, padded on the right with token 0, on the host; made by
    `make_padded_batch`. `tokens` is int64 [prompts, length], `pick` has the index of each prompt's
    last token in the rows laid end to end, `items` the prompts' indices, `counts` only `padded`,
    the number of padding tokens; `prefixes`, the groups whose shared prefix is in the batch, is
    always empty.
    """

    tokens: Ids  # [prompts, length]
    pick: Ids
    items: list[int]
    counts: dict[str, int]
    prefixes: tuple[int, ...] = ()


MakeBatch = Callable[[], PromptBatch | PaddedBatch]


@dataclass(frozen=True)
class ScoringBatches:
    """The batches of this replica, each as a function that makes its host arrays (`PromptBatch` or
    `PaddedBatch`) when called. `in_pass` are those of the timed pass; `warmup` repeats some of them
    before a pass that is not compiled, `compile_warmup` before a compiled one, so that kernels are
    compiled. `prefix_rows` is the number of tokens of the longest prefix that prompts share in
    division open, else 0. Made by `plan_packed_batches` or `plan_padded_batches`.
    """

    in_pass: list[MakeBatch]
    warmup: list[MakeBatch]  # computed before a pass that is not compiled
    compile_warmup: list[MakeBatch]  # computed before a compiled pass, so that kernels are compiled
    prefix_rows: int = 0  # division open: tokens of the longest prefix that prompts share


def plan_packed_batches(job: Job, engine_name: str) -> ScoringBatches:
    """Plan this replica's batches of about `tune.batch_tokens` tokens without padding, in an order
    drawn from `tune.order`, at most `job.steps`. In division closed every prompt is a row of its
    own, in open prompts of a group share their prefix. Warm-up are the first `tune.warmup` batches,
    of a compiled pass at least one. Raises RequestError unless `tune.batching` is auto or packed;
    `engine_name` is for that message.
    """
    tune, rows = job.case.tune, job.inputs.rows
    if tune.batching not in ("auto", "packed"):
        raise RequestError(
            f"engine {engine_name} packs sequences; tune.batching={tune.batching!r} is for engine"
            " transformers"
        )
    batches: list[MakeBatch]
    prefix_rows = 0
    if job.case.question.division == "closed":
        bins = deal_equal_bins(
            [len(row) for row in rows], tune.batch_tokens, tune.order, job.plan.dp
        )
        batches = [partial(make_closed_batch, rows, items) for items in _take_own_bins(job, bins)]
    else:
        groups = job.inputs.groups
        prefix_lengths = measure_prefixes(rows, groups)
        prefix_rows = max(prefix_lengths, default=0)
        pieces = plan_open_bins(rows, groups, tune.batch_tokens, tune.order, job.plan.dp)[
            job.place.dp
        ]
        following = [*pieces[1:], None]  # longer than `pieces` on a rank without pieces
        pairs = list(zip(pieces, following, strict=False))[: job.steps]
        batches = [
            partial(make_open_batch, rows, piece, next_piece, prefix_lengths, prefix_rows)
            for piece, next_piece in pairs
        ]
    return ScoringBatches(
        batches, batches[: tune.warmup], batches[: max(tune.warmup, 1)], prefix_rows
    )


def plan_padded_batches(job: Job, engine_name: str) -> ScoringBatches:
    """Plan this replica's batches of prompts of similar length, padded to a multiple of
    `tune.pad_to`, of at most about `tune.batch_tokens` tokens; with `tune.batching=single` of one
    prompt each, unpadded. At most `job.steps`, in an order drawn from `tune.order`.

    Before a compiled pass also the batches of extreme size are computed: fewest and most prompts,
    shortest and longest. Raises RequestError for division open, or if `tune.batching` is `packed`;
    `engine_name` is for these messages.
    """
    tune, rows = job.case.tune, job.inputs.rows
    if job.case.question.division != "closed":
        raise RequestError(
            f"engine {engine_name} computes every token of every prompt; allowed: --division closed"
        )
    if tune.batching == "packed":
        raise RequestError(
            f"engine {engine_name} pads sequences; allowed: tune.batching=auto, sorted or single"
        )
    budget, pad_to = (1, 1) if tune.batching == "single" else (tune.batch_tokens, tune.pad_to)
    bins = _take_own_bins(
        job, make_sorted_batches([len(row) for row in rows], budget, pad_to, tune.order)
    )
    batches: list[MakeBatch] = [partial(make_padded_batch, rows, items, pad_to) for items in bins]
    # Extreme shapes are compiled before the pass, not in it.
    keys = (lambda i: len(bins[i]), lambda i: max(len(rows[item]) for item in bins[i]))
    extremes = (
        [batches[pick(range(len(bins)), key=key)] for key in keys for pick in (min, max)]
        if bins
        else []
    )
    warmup = batches[: tune.warmup]
    return ScoringBatches(batches, warmup, [*extremes, *warmup])


def _take_own_bins(job: Job, bins: list[T]) -> list[T]:
    """Return this replica's bins (lists of prompts), every dp-th from its number on, at most
    `job.steps` (None: all).
    """
    return bins[job.place.dp :: job.plan.dp][: job.steps]


def make_padded_batch(rows: list[list[int]], items: list[int], pad_to: int) -> PaddedBatch:
    """Return the prompts `items` (indices into `rows`) as rows of one length, the longest rounded
    up to a multiple of `pad_to`, filled with token 0. `pick` has the index of each prompt's last
    token in the rows laid end to end, `counts` the number of padding tokens. Raises ValueError for
    no items.
    """
    lens = [len(rows[i]) for i in items]
    width = -(-max(lens) // pad_to) * pad_to
    tokens = np.zeros((len(items), width), dtype=np.int64)
    for row, i in enumerate(items):
        tokens[row, : lens[row]] = rows[i]
    ends = np.arange(len(items)) * width + np.array(lens, dtype=np.int64) - 1
    return PaddedBatch(tokens, ends, items, {"padded": tokens.size - sum(lens)})
