"""Measure the matmul rate of a device in the run that uses it: one large square matmul, and the
case's own shapes.

Called by run/worker.py before the first pass, and again after the last. The rates are the base of
the metric `mfu_achievable`.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

from steelyard.accelerators.events import Clock, clock_of
from steelyard.engine.framework import Framework
from steelyard.plan.matmuls import Matmul
from steelyard.record.facts import MatmulRate
from steelyard.run.clock import busy, now
from steelyard.run.measure import mean_time_s

SQUARE_S = 0.3
SHAPES_S = 0.4  # seconds for all shapes, divided by their share of the FLOPs
# Seconds that all shapes may take, as predicted from the square matmul's rate; beyond it a smaller
# batch is timed.
MOST_S = 1.0
# fewest calls of a shape: one for a library's initialization, three to warm up, three timed
CALLS = 7
AFTER_S = 0.05  # seconds after the passes: a short run must not get noticeably longer
STRETCHES = 8  # most parts of a timing whose CPU time is read
STRETCH_CALLS = 3  # fewest calls in a part: a thread that ends late would distort a single call

ShapesOf = Callable[[int], tuple[Matmul, ...]]  # n → shapes of a batch 1/n in size


def calibrate(
    framework: Framework,
    precision: str,
    shapes_of: ShapesOf,
    clock: Clock = now,
    used: Clock = busy,
) -> dict[str, Any]:
    """Time matmuls and return fields for the rank file: `matmul_flops_per_s` of a large square
    matmul and `matmuls`, the rate of each of the case's shapes.

    `matmul_flops_per_cpu_s` is the square rate over this process's CPU time, if any was used; on a
    device that is the host's own CPU, `matmul_cpu_rates` has the same in several parts of the
    timing under `before`. Empty if the framework cannot multiply. `shapes_of(n)` returns the matmul
    shapes of a batch that is n times smaller than the case's; `cpu_clock` reads CPU time in
    seconds.
    """
    found = framework.matmul(precision)
    if found is None:
        return {}
    work, flops = found
    calls, marks, reads = 0, [], _works_in_cpu_time(framework)

    def counted() -> None:
        """Run the square matmul once and, on a CPU device, append the CPU time to the marks after
        every `STRETCH_CALLS` calls.
        """
        nonlocal calls
        calls += 1
        work()
        if reads and calls % STRETCH_CALLS == 0:
            marks.append(used())

    work()  # a library's initialization is not timed
    begin = used()
    rate = flops / mean_time_s(counted, framework, SQUARE_S, clock)
    used_s = used() - begin
    out: dict[str, Any] = {
        "matmul_flops_per_s": rate,
        "matmuls": _shapes(framework, precision, shapes_of, rate, clock),
    }
    out |= {"matmul_flops_per_cpu_s": flops * calls / used_s} if used_s else {}
    rates = _stretches([begin, *marks], STRETCH_CALLS * flops)
    return out | ({"matmul_cpu_rates": {"before": rates}} if rates else {})


def calibrate_after(
    framework: Framework, precision: str, rate: float, clock: Clock = now, used: Clock = busy
) -> list[float]:
    """Time the square matmul again after the passes and return its rates over CPU time, in FLOP/s,
    one per short timing.

    As many timings as fit into `AFTER_S` are made, at least one; `rate` is the FLOP/s measured
    before the passes. Empty if the device is not the host's own CPU.
    """
    found = framework.matmul(precision) if _works_in_cpu_time(framework) else None
    if found is None:
        return []
    work, flops = found
    calls = max(1, min(STRETCH_CALLS, int(AFTER_S * rate / flops)))
    begin, marks = clock(), []
    if calls > 1:
        work()  # warm up: the operands are not in the caches
    marks.append(used())
    while len(marks) < 2 or clock() - begin + calls * flops / rate <= AFTER_S:
        for _ in range(calls):
            work()
        marks.append(used())
    return _stretches(marks, calls * flops)


def _works_in_cpu_time(framework: Framework) -> bool:
    """Return whether the host's cores do the work, which shows in events that are readings of the
    host's clock.
    """
    return clock_of(framework.event()) == "host"


def _stretches(marks: list[float], flops: int) -> list[float]:
    """Return the rates in FLOP/s between readings of CPU time with `flops` FLOPs between any two,
    joined to at most `STRETCHES` parts; parts without CPU time are left out.
    """
    between = len(marks) - 1
    count = min(STRETCHES, between)
    edges = [between * i // count for i in range(count + 1)] if count else []
    times = [(end - begin, marks[end] - marks[begin]) for begin, end in pairwise(edges)]
    return [flops * calls / time_s for calls, time_s in times if time_s > 0]


def _shapes(
    framework: Framework, precision: str, shapes_of: ShapesOf, rate: float, clock: Clock
) -> list[MatmulRate]:
    """Return the rate of each matmul shape of the case, timed for a share of `SHAPES_S` by its
    FLOPs.

    Empty if the framework cannot compute one of the shapes, or one takes no measurable time: a mean
    over some of them would be that of another model.
    """
    shapes = _within(shapes_of, rate)
    whole = sum(one.count * one.flops for one in shapes)
    out: list[MatmulRate] = []
    for one in shapes:
        made = framework.product(precision, one)
        if made is None:
            return []
        work, flops = made
        work()
        time_s = mean_time_s(work, framework, SHAPES_S * one.count * one.flops / whole, clock)
        if time_s <= 0:  # too short for the clock
            return []
        out.append(MatmulRate(**one.model_dump(), flops_per_s=flops / time_s))
    return out


def _within(shapes_of: ShapesOf, rate: float) -> tuple[Matmul, ...]:
    """Return the matmul shapes of the whole batch or, if `CALLS` calls of each would take longer
    than `MOST_S` at this rate, of a half, a quarter and so on until they fit.
    """
    smaller, shapes = 1, shapes_of(1)
    while CALLS * sum(one.flops for one in shapes) / rate > MOST_S:
        smaller *= 2
        fewer = shapes_of(smaller)
        if fewer == shapes:  # one token
            break
        shapes = fewer
    return shapes
