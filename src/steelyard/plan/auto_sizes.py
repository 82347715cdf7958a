"""Choose sizes that are `auto` in the tune: the largest micro-batch and batch that the devices of a
run have room for, from shapes alone.

Larger is faster as far as it was measured (docs/results.md), until a step has no more rows, or
matmuls are so large that they gain nothing more. What is chosen is a number in the record, like one
that was typed. Called by the parent before workers start, and again with less after one ran out of
memory.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from steelyard.case.case import Case
from steelyard.case.resolve import ResolvedCase
from steelyard.plan import memory
from steelyard.plan.degrees import Plan

# The share of a device's memory that a prediction may take: a framework has its own context and
# libraries beside it. On an H200, of 140.4 GiB, runs used 65.9 GiB for 64.1 predicted, 92.8 for
# 92.0, 134.6 for 133.9.
MAX_MEMORY_SHARE = 0.96
# Fixed cost of a micro-batch, in rows: times of micro-batches of 2, 3, 4, 6 and 8 rows of Llama-7B
# on an H200 fit 0.07 to 0.1.
MICRO_BATCH_ROWS = 0.08
# sizes that divide a step's rows are preferred if they cost at most this factor more
EVEN_COST_FACTOR = 1.01
# Numbers in one layer's input beyond which a batch gains nothing: 32 Ki tokens of 4096 each on an
# H200, where 8, 16 and 24 Ki reached 60.1, 60.8 and 61.9 % instead of 62.1.
MAX_BATCH_NUMBERS = 32768 * 4096
MAX_TOKENS, MIN_TOKENS = 65536, 1024
SMALLER_FACTOR = 0.75  # of the size that ran out of memory: the next one tried is at most this


@dataclass(frozen=True)
class DeviceLimits:
    """What `auto` sizes are chosen by. `plan`: the parallel plan. `memory_bytes`: the memory of the
    device that has least, None if unknown. `fused_blocks`: the engine's transformer blocks are
    those of models/llama_fused.py, which save less. `needs_even`: micro-batches must divide a
    step's rows without remainder. `memory_factor`: the engine's real memory as a multiple of what
    shapes predict. `sample_size`: how many rows or samples of a global batch the run computes, None
    for all (a run cut by `--sample` has fewer).
    """

    plan: Plan
    memory_bytes: int | None
    fused_blocks: bool = False
    needs_even: bool = False
    memory_factor: float = 1.0
    sample_size: int | None = None  # rows or samples of a global batch in scope; None: all


def choose_sizes(resolved: ResolvedCase, limits: DeviceLimits) -> ResolvedCase:
    """Return a copy of the resolved case with a number for each tune that is `auto` (micro_batch,
    batch_tokens): the best size that is expected to fit into memory, or the smallest if none is.
    Returned unchanged if the devices' memory is unknown or nothing is `auto`.
    """
    for name in resolved.auto if limits.memory_bytes is not None else ():
        resolved = _set_tune(resolved, name, _CHOOSERS[name](resolved.case, limits, None))
    return resolved


def choose_smaller_sizes(resolved: ResolvedCase, limits: DeviceLimits) -> ResolvedCase | None:
    """Return a copy of the resolved case with every `auto` size chosen again, at most three
    quarters of what it is, after a worker ran out of memory; a size of 1 stays. None if nothing is
    `auto` or can be smaller.
    """
    out = resolved
    for name in resolved.auto:
        max_size = int(getattr(resolved.case.tune, name) * SMALLER_FACTOR)
        if max_size >= 1:
            out = _set_tune(out, name, _CHOOSERS[name](resolved.case, limits, max_size))
    return None if out is resolved else out


def _set_tune(resolved: ResolvedCase, name: str, value: int) -> ResolvedCase:
    """Return a copy of the resolved case with tune `name` set to `value`; origins and the list of
    `auto` tunes stay.
    """
    tune = resolved.case.tune.model_copy(update={name: value})
    return replace(resolved, case=resolved.case.model_copy(update={"tune": tune}))


def _can_fit(case: Case, limits: DeviceLimits, name: str, value: int) -> bool:
    """Return whether the memory that is expected (`estimate_bytes`, times the engine's
    `memory_factor`) with tune `name` at `value` is at most 96 % of a device's; True if its memory
    is unknown.
    """
    if limits.memory_bytes is None:
        return True
    changed = case.model_copy(update={"tune": case.tune.model_copy(update={name: value})})
    predicted = (
        memory.estimate_bytes(changed, limits.plan, limits.fused_blocks) * limits.memory_factor
    )
    return predicted <= MAX_MEMORY_SHARE * limits.memory_bytes


def _choose_micro_batch(case: Case, limits: DeviceLimits, max_size: int | None) -> int:
    """Return the rows of a micro-batch: of all sizes up to the largest that fits, and at most
    `max_size` if given, the one with which a step costs least, the larger of equals; 1 if none
    fits.

    Sizes that divide a replica's rows of a step are preferred if they cost at most 1 % more, and
    demanded if `limits.needs_even`. Rows that are packed from several texts take the largest size
    that fits, or 1 with pipeline stages. A step has at least as many micro-batches as stages.
    Without training the tune's own value is returned.
    """
    train, plan = case.question.train, limits.plan
    if train is None:
        return case.tune.micro_batch
    # rows of a step on one replica
    rows = max(1, -(-min(train.batch, limits.sample_size or train.batch) // plan.dp))
    # how many rows packed texts make is not known here
    rows_are_packed = case.tune.pack and case.question.task_row.packs
    bound = 1 if rows_are_packed and plan.pp > 1 else min(rows // plan.pp or 1, max_size or rows)
    largest_fitting = next(
        (size for size in range(bound, 1, -1) if _can_fit(case, limits, "micro_batch", size)), 1
    )
    if rows_are_packed:
        return largest_fitting

    def cost(size: int) -> float:
        """Return the cost of a step with micro-batches of this size, in rows of one replica:
        pipeline bubbles included, and 0.08 rows for each micro-batch.
        """
        count = -(-rows // size)
        return size * (count + plan.pp - 1) + MICRO_BATCH_ROWS * count

    even_sizes = [size for size in range(1, largest_fitting + 1) if rows % size == 0]
    cheapest = min(
        even_sizes if limits.needs_even else range(1, largest_fitting + 1),
        key=lambda size: (cost(size), -size),
    )
    return max(
        (size for size in even_sizes if cost(size) <= EVEN_COST_FACTOR * cost(cheapest)),
        default=cheapest,
    )


def _choose_batch_tokens(case: Case, limits: DeviceLimits, max_size: int | None) -> int:
    """Return the tokens of a scoring batch: the largest power of two that fits and is at most
    `max_size` if given, 65536, and 2^27 over the hidden size; none below 1024 is tried unless the
    bound is lower. The smallest tried if none fits.
    """
    model = case.question.model
    bound = min(MAX_BATCH_NUMBERS // model.hidden, MAX_TOKENS, max_size or MAX_TOKENS)
    sizes = [
        1 << power
        for power in range(bound.bit_length())
        if 1 << power >= min(MIN_TOKENS, bound // 2 + 1)
    ][::-1]
    return next((size for size in sizes if _can_fit(case, limits, "batch_tokens", size)), sizes[-1])


_CHOOSERS: dict[str, Callable[[Case, DeviceLimits, int | None], int]] = {
    "micro_batch": _choose_micro_batch,
    "batch_tokens": _choose_batch_tokens,
}
