"""Tunes that are `auto`: the largest micro-batch and batch that the devices of a run have room for,
from shapes alone.

Larger is faster as far as it was measured (docs/results.md), until there are no more rows in a
step, or matmuls have all the work at once that they gain from. What is chosen is a number in the
record, like one that was typed.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from steelyard.case.case import Case
from steelyard.case.resolve import Resolved
from steelyard.plan import memory
from steelyard.plan.degrees import Plan

# The share of a device's memory that a prediction may take: a framework has its own context and
# libraries beside it. On an H200, of 140.4 GiB, runs used 65.9 GiB for 64.1 predicted, 92.8 for
# 92.0, 134.6 for 133.9.
ROOM = 0.96
# What a micro-batch costs beside its rows, in rows: on an H200 micro-batches of 2, 3, 4, 6 and 8
# rows of Llama-7B differ as they do with 0.07 to 0.1.
MICRO_BATCH_ROWS = 0.08
# sizes that divide a step's rows without rest are preferred as long as they cost no more than this
EVEN = 1.01
# Numbers in one layer's input beyond which a batch gains nothing: 32 Ki tokens of 4096 each on an
# H200, where 8, 16 and 24 Ki reached 60.1, 60.8 and 61.9 % instead of 62.1.
BATCH_NUMBERS = 32768 * 4096
MOST_TOKENS, LEAST_TOKENS = 65536, 1024
STEP_DOWN = 0.75  # of the size that ran out of memory: what is tried after it is at most this


@dataclass(frozen=True)
class Devices:
    """What a run has: its plan, the memory of the device that has least, and the engine's need of
    it. `fused`: its blocks are those of models/llama_fused.py; `even`: micro-batches must divide a
    step's rows; `factor`: what it holds beside what shapes tell."""

    plan: Plan
    memory_bytes: int | None
    fused: bool = False
    even: bool = False
    factor: float = 1.0
    sample: int | None = None  # how much of a global batch is in scope


def choose(resolved: Resolved, devices: Devices) -> Resolved:
    """The case with a number for each tune that is auto. One of unknown memory is left as it is."""
    for name in resolved.auto if devices.memory_bytes is not None else ():
        resolved = _with(resolved, name, _CHOICES[name](resolved.case, devices, None))
    return resolved


def smaller(resolved: Resolved, devices: Devices) -> Resolved | None:
    """The same with all that is auto a size smaller, after what was chosen ran out of memory; None
    where nothing is.
    """
    out = resolved
    for name in resolved.auto:
        most = int(getattr(resolved.case.tune, name) * STEP_DOWN)
        if most >= 1:
            out = _with(out, name, _CHOICES[name](resolved.case, devices, most))
    return None if out is resolved else out


def _with(resolved: Resolved, name: str, value: int) -> Resolved:
    tune = resolved.case.tune.model_copy(update={name: value})
    return replace(resolved, case=resolved.case.model_copy(update={"tune": tune}))


def _fits(case: Case, devices: Devices, name: str, value: int) -> bool:
    """Whether a size has room. Of unknown memory it has: whoever asks has a bound of another kind."""
    if devices.memory_bytes is None:
        return True
    changed = case.model_copy(update={"tune": case.tune.model_copy(update={name: value})})
    predicted = memory.expected_bytes(changed, devices.plan, devices.fused) * devices.factor
    return predicted <= ROOM * devices.memory_bytes


def _micro_batch(case: Case, devices: Devices, most: int | None) -> int:
    """Rows of a micro-batch: of all sizes that fit, the one with which a step costs least."""
    train, plan = case.question.train, devices.plan
    if train is None:
        return case.tune.micro_batch
    # of a replica; of samples at most so many
    rows = max(1, -(-min(train.batch, devices.sample or train.batch) // plan.dp))
    # then nobody knows here how many rows they make
    packs = case.tune.pack and case.question.row.packs
    bound = 1 if packs and plan.pp > 1 else min(rows // plan.pp or 1, most or rows)
    fit = next(
        (size for size in range(bound, 1, -1) if _fits(case, devices, "micro_batch", size)), 1
    )
    if packs:
        return fit

    def cost(size: int) -> float:
        count = -(-rows // size)
        return size * (count + plan.pp - 1) + MICRO_BATCH_ROWS * count

    even = [size for size in range(1, fit + 1) if rows % size == 0]
    least = min(even if devices.even else range(1, fit + 1), key=lambda size: (cost(size), -size))
    return max((size for size in even if cost(size) <= EVEN * cost(least)), default=least)


def _batch_tokens(case: Case, devices: Devices, most: int | None) -> int:
    """Tokens of a batch: a power of two."""
    model = case.question.model
    bound = min(BATCH_NUMBERS // model.hidden, MOST_TOKENS, most or MOST_TOKENS)
    sizes = [
        1 << power
        for power in range(bound.bit_length())
        if 1 << power >= min(LEAST_TOKENS, bound // 2 + 1)
    ][::-1]
    return next((size for size in sizes if _fits(case, devices, "batch_tokens", size)), sizes[-1])


_CHOICES: dict[str, Callable[[Case, Devices, int | None], int]] = {
    "micro_batch": _micro_batch,
    "batch_tokens": _batch_tokens,
}
