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
from steelyard.engine.profile import KernelTotal, divide_device_time
from steelyard.engine.work import Phase, Work
from steelyard.plan import flops
from steelyard.plan.degrees import Plan
from steelyard.record.profile_facts import MAX_NAMED_KERNELS, OTHER_KERNELS, KernelFacts, Profile
from steelyard.run.measure import CountStep, measure

MAX_STEPS = 4  # at most
# FLOPs of a device in all profiled steps: seconds on a fast one; a step has thousands of events
MAX_FLOPS = 2e15


@runtime_checkable
class ContinuableEngine(Protocol):
    """An engine whose passes cannot be run a second time, such as training, and which therefore has
    the method `continue_pass(name)`: it yields more steps like those of a finished pass, without
    end. A protocol that can be tested with isinstance; other engines are profiled by running the
    pass again.
    """

    def continue_pass(self, name: str) -> Iterator[Phase | Work]:
        """Yield steps like those of a finished pass, without end, and without evaluations and
        checkpoints.
        """


def count_profiled_steps(case: Case, plan: Plan, sample: int | None) -> int:
    """Return how many steps are profiled, the same on every rank: `MAX_STEPS` for inference; for
    training fewer, at least one, if these steps would cost each device more than `MAX_FLOPS` FLOPs.
    `sample` is how many rows of a global batch are in scope (None: all).
    """
    train = case.question.train
    if train is None:
        return MAX_STEPS
    tokens = min(train.batch, sample or train.batch) * train.length
    counts = {"tokens": tokens, "logits": tokens, "pairs": tokens * train.length // 2}
    step_flops = (
        flops.count_flops(case.question.model, counts, "causal", case.question.kind_row.forwards)
        or 0
    )
    return (
        max(1, min(MAX_STEPS, int(MAX_FLOPS * plan.world / step_flops)))
        if step_flops
        else MAX_STEPS
    )


def profile_steps(
    engine: Engine,
    pass_name: str,
    framework: Framework,
    count: CountStep,
    steps: int,
    rank: int,
    use_profiler: bool,
    trace_path: Path | None,
) -> Profile | None:
    """Run `steps` more steps of the finished pass `pass_name` after one to warm up, on all ranks
    together, and return their profile: summed counts, wall time, and device time by kernel, longest
    first (beyond `MAX_NAMED_KERNELS` summed by kind).

    With `use_profiler`, this rank runs them under the framework's profiler, which writes the whole
    trace to the file `trace_path` unless that is None. Returns None if this rank does not profile
    or its framework has no profiler. `count` returns the counts of a step's work.
    """
    profiler = framework.profiler() if use_profiler else None
    items = _skip_first_step(
        lambda: (
            engine.continue_pass(pass_name)
            if isinstance(engine, ContinuableEngine)
            else engine.work(pass_name)
        )
    )
    framework.synchronize()
    if profiler is not None:
        profiler.start()
    pass_trace = measure(_take_steps(items, steps), framework)
    if profiler is None:
        return None
    kernels = divide_device_time(profiler.stop(trace_path))  # before samples are computed
    samples = pass_trace.make_samples(pass_name, rank, count)
    step_samples = [sample for sample in samples if sample.counts]
    return Profile(
        pass_name=pass_name,
        rank=rank,
        steps=len(step_samples),
        counts=(
            {
                key: sum(sample.counts.get(key, 0) for sample in step_samples)
                for key in step_samples[0].counts
            }
            if step_samples
            else {}
        ),
        wall_s=pass_trace.wall_s,
        data_s=sum(sample.phases.get("data", 0.0) for sample in samples),
        kernels=[
            *map(_to_kernel_facts, kernels[:MAX_NAMED_KERNELS]),
            *_sum_by_kind(kernels[MAX_NAMED_KERNELS:]),
        ],
        trace=None if trace_path is None else trace_path.name,
    )


def _skip_first_step(start_pass: Callable[[], Iterator[Phase | Work]]) -> Iterator[Phase | Work]:
    """Start a pass with `start_pass()`, run its first step up to its `Work`, and return an iterator
    of the items that follow; if there is only one step, a pass started anew, none of it run. The
    work is done while items are taken.
    """
    items = start_pass()
    for item in items:
        if isinstance(item, Work):
            break
    following = next(items, None)
    # The phase that reads answers at the end of a pass is no step.
    is_only_step = following is None or (isinstance(following, Phase) and following.name == "score")
    return start_pass() if is_only_step else chain([following], items)  # type: ignore[list-item]


def _take_steps(items: Iterator[Phase | Work], steps: int) -> Iterator[Phase | Work]:
    """Yield items up to and including the `Work` that ends step number `steps`, or all if there are
    fewer.
    """
    taken = 0
    for item in items:
        yield item
        taken += isinstance(item, Work)
        if taken == steps:
            return


def _to_kernel_facts(kernel: KernelTotal) -> KernelFacts:
    """Return a kernel's total (kind, calls, seconds, bytes) as a record states it, its name cut to
    200 characters.
    """
    return KernelFacts(
        name=kernel.name[:200],
        kind=kernel.kind,
        calls=kernel.calls,
        time_s=kernel.time_s,
        size_bytes=kernel.size_bytes,
    )


def _sum_by_kind(kernels: list[KernelTotal]) -> Iterator[KernelFacts]:
    """Yield one row per kind of kernel, in the order in which kinds first occur, with the summed
    calls and seconds of these kernels, the name `OTHER_KERNELS` ("the rest") and no size.
    """
    for kind in dict.fromkeys(kernel.kind for kernel in kernels):
        same_kind = [kernel for kernel in kernels if kernel.kind == kind]
        time_s, calls = (
            sum(kernel.time_s for kernel in same_kind),
            sum(kernel.calls for kernel in same_kind),
        )
        yield KernelFacts(
            name=OTHER_KERNELS, kind=kind, calls=calls, time_s=time_s, size_bytes=None
        )
