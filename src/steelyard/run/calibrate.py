"""The matmul rate of a device, measured in the run that uses it: one large square matmul, and the
case's own shapes.
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
SHAPES_S = 0.4  # for all shapes together, by their share of the FLOPs
# that all shapes may take, as the square one lets expect; then fewer tokens are multiplied at once
MOST_S = 1.0
# of a shape, at the least: one for what a library does once, three to warm up, three that count
CALLS = 7
AFTER_S = 0.05  # for the square matmul after the passes: a short run must not get noticeably longer
STRETCHES = 8  # most parts of a timing whose CPU time is read
STRETCH_CALLS = 3  # fewest calls in a part: a thread that ends late would distort a single call

ShapesOf = Callable[[int], tuple[Matmul, ...]]  # of a batch that is so many times smaller


def calibrate(
    framework: Framework,
    precision: str,
    shapes_of: ShapesOf,
    clock: Clock = now,
    used: Clock = busy,
) -> dict[str, Any]:
    """Return the rate of the square matmul, the same over CPU time, and the rate of each shape;
    where the device works in CPU time, also its rates in parts of the timing. Return nothing where
    the framework multiplies nothing."""
    found = framework.matmul(precision)
    if found is None:
        return {}
    work, flops = found
    calls, marks, reads = 0, [], _works_in_cpu_time(framework)

    def counted() -> None:
        nonlocal calls
        calls += 1
        work()
        if reads and calls % STRETCH_CALLS == 0:
            marks.append(used())

    work()  # what a library does once is no part of a rate
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
    """Return rates of the square matmul over CPU time, in as many short timings as fit `AFTER_S`,
    at least one, on a device that multiplied at `rate` before; none where the device does not work
    in CPU time."""
    found = framework.matmul(precision) if _works_in_cpu_time(framework) else None
    if found is None:
        return []
    work, flops = found
    calls = max(1, min(STRETCH_CALLS, int(AFTER_S * rate / flops)))
    begin, marks = clock(), []
    if calls > 1:
        work()  # the operands are new to the caches
    marks.append(used())
    while len(marks) < 2 or clock() - begin + calls * flops / rate <= AFTER_S:
        for _ in range(calls):
            work()
        marks.append(used())
    return _stretches(marks, calls * flops)


def _works_in_cpu_time(framework: Framework) -> bool:
    """Return whether the host's cores do the work: their events are readings of its clock."""
    return clock_of(framework.event()) == "host"


def _stretches(marks: list[float], flops: int) -> list[float]:
    """Return the rates between readings of CPU time, which have `flops` between two of them, joined
    to at most `STRETCHES` parts."""
    between = len(marks) - 1
    count = min(STRETCHES, between)
    edges = [between * i // count for i in range(count + 1)] if count else []
    times = [(end - begin, marks[end] - marks[begin]) for begin, end in pairwise(edges)]
    return [flops * calls / time_s for calls, time_s in times if time_s > 0]


def _shapes(
    framework: Framework, precision: str, shapes_of: ShapesOf, rate: float, clock: Clock
) -> list[MatmulRate]:
    """All of them, or none: a mean over some would be of another model."""
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
    """The shapes of the whole batch, or of the largest part of it, in halves, that can be timed in
    time.
    """
    smaller, shapes = 1, shapes_of(1)
    while CALLS * sum(one.flops for one in shapes) / rate > MOST_S:
        smaller *= 2
        fewer = shapes_of(smaller)
        if fewer == shapes:  # one token
            break
        shapes = fewer
    return shapes
