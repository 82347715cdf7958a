"""Profile a few steps after the measured passes, for `--explain`; no measured pass runs under the
profiler.

Called by run/worker.py; the profile goes into the rank file and the record.
"""

from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Protocol, runtime_checkable

from steelyard.case.case import Case
from steelyard.engine.framework import Framework
from steelyard.engine.job import Engine
from steelyard.engine.profile import Kernel, divide
from steelyard.engine.work import Phase, Work
from steelyard.plan import flops
from steelyard.plan.degrees import Plan
from steelyard.record.profile import MOST, REST, KernelFacts, Profile
from steelyard.run.measure import Count, measure

STEPS = 4  # at most
# FLOPs of a device in all profiled steps: seconds on a fast one; a step has thousands of events
FLOPS = 2e15


@runtime_checkable
class Again(Protocol):
    """An engine whose passes cannot be run a second time, such as training, and which therefore
    offers more steps like those of a finished pass.
    """

    def again(self, name: str) -> Iterator[Phase | Work]:
        """Yield steps like those of a finished pass, without end, and without evaluations and
        checkpoints.
        """


def steps_of(case: Case, plan: Plan, sample: int | None) -> int:
    """Return how many steps are profiled, the same on every rank: `MAX_STEPS`, or fewer, at least
    one, if a training step costs so many FLOPs that each device would compute more than
    `MAX_FLOPS`.
    """
    train = case.question.train
    if train is None:
        return STEPS
    tokens = min(train.batch, sample or train.batch) * train.length
    counts = {"tokens": tokens, "logits": tokens, "pairs": tokens * train.length // 2}
    one = flops.work(case.question.model, counts, "causal", case.question.kind_row.forwards) or 0
    return max(1, min(STEPS, int(FLOPS * plan.world / one))) if one else STEPS


def explain(
    engine: Engine,
    name: str,
    framework: Framework,
    count: Count,
    steps: int,
    rank: int,
    watch: bool,
    trace: Path | None,
) -> Profile | None:
    """Run `steps` more steps of pass `pass_name` and return their profile: counts, wall time and
    time by kernel.

    With `use_profiler`, this rank runs them under the framework's profiler, which writes the whole
    trace to the file `trace_path` unless that is None. Returns None if this rank does not profile
    or its framework has no profiler. `count` returns the token counts of a step. One step to warm
    up comes before.
    """
    profiler = framework.profiler() if watch else None
    items = _warm(lambda: engine.again(name) if isinstance(engine, Again) else engine.work(name))
    framework.synchronize()
    if profiler is not None:
        profiler.start()
    seen = measure(_first(items, steps), framework)
    if profiler is None:
        return None
    kernels = divide(profiler.stop(trace))  # before samples are computed
    samples = seen.samples(name, rank, count)
    worked = [sample for sample in samples if sample.counts]
    return Profile(
        pass_name=name,
        rank=rank,
        steps=len(worked),
        counts=(
            {key: sum(sample.counts.get(key, 0) for sample in worked) for key in worked[0].counts}
            if worked
            else {}
        ),
        wall_s=seen.wall_s,
        data_s=sum(sample.phases.get("data", 0.0) for sample in samples),
        kernels=[*map(_facts, kernels[:MOST]), *_rest(kernels[MOST:])],
        trace=None if trace is None else trace.name,
    )


def _warm(make: Callable[[], Iterator[Phase | Work]]) -> Iterator[Phase | Work]:
    """Start a pass, run its first step, and return the items that follow; if there is only one
    step, return those of a pass started anew.
    """
    items = make()
    for item in items:
        if isinstance(item, Work):
            break
    following = next(items, None)
    # The phase that reads answers at the end of a pass is no step.
    alone = following is None or (isinstance(following, Phase) and following.name == "score")
    return make() if alone else chain([following], items)  # type: ignore[list-item]


def _first(items: Iterator[Phase | Work], steps: int) -> Iterator[Phase | Work]:
    """Yield items up to the end of step number `steps`, or all if there are fewer."""
    taken = 0
    for item in items:
        yield item
        taken += isinstance(item, Work)
        if taken == steps:
            return


def _facts(one: Kernel) -> KernelFacts:
    """Return a kernel as a record states it, its name cut to 200 characters."""
    return KernelFacts(
        name=one.name[:200],
        kind=one.kind,
        calls=one.calls,
        time_s=one.time_s,
        size_bytes=one.size_bytes,
    )


def _rest(kernels: list[Kernel]) -> Iterator[KernelFacts]:
    """Yield one row per kind of kernel with the summed calls and times of these kernels, under the
    name `REST`.
    """
    for kind in dict.fromkeys(one.kind for one in kernels):
        of = [one for one in kernels if one.kind == kind]
        time_s, calls = sum(one.time_s for one in of), sum(one.calls for one in of)
        yield KernelFacts(name=REST, kind=kind, calls=calls, time_s=time_s, size_bytes=None)
