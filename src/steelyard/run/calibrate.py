"""The matmul rate of a device, measured in the run that uses it: one large square matmul, and the case's own shapes."""

from collections.abc import Callable
from typing import Any

from steelyard.accelerators.events import Clock
from steelyard.engines.framework import Framework
from steelyard.plan.matmuls import Matmul
from steelyard.record.facts import MatmulRate
from steelyard.run.clock import busy, now
from steelyard.run.measure import mean_time_s

SQUARE_S = 0.3
SHAPES_S = 0.4  # for all shapes together, by their share of the FLOPs
MOST_S = 1.0  # that all shapes may take, as the square one lets expect; then fewer tokens are multiplied at once
CALLS = 7  # of a shape, at the least: one for what a library does once, three to warm up, three that count

ShapesOf = Callable[[int], tuple[Matmul, ...]]  # of a batch that is so many times smaller


def calibrate(
    framework: Framework, precision: str, shapes_of: ShapesOf, clock: Clock = now, used: Clock = busy
) -> dict[str, Any]:
    """The rate of the square matmul, and over CPU time alone, which others on a busy host take nothing of; and the rate of each
    shape. Nothing where the framework multiplies nothing."""
    found = framework.matmul(precision)
    if found is None:
        return {}
    work, flops = found
    calls = 0

    def counted() -> None:
        nonlocal calls
        calls += 1
        work()

    work()  # what a library does once is no part of a rate
    begin = used()
    rate = flops / mean_time_s(counted, framework, SQUARE_S, clock)
    used_s = used() - begin
    out: dict[str, Any] = {"matmul_flops_per_s": rate, "matmuls": _shapes(framework, precision, shapes_of, rate, clock)}
    return out | ({"matmul_flops_per_cpu_s": flops * calls / used_s} if used_s else {})


def _shapes(framework: Framework, precision: str, shapes_of: ShapesOf, rate: float, clock: Clock) -> list[MatmulRate]:
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
    """The shapes of the whole batch, or of the largest part of it, in halves, that can be timed in time."""
    smaller, shapes = 1, shapes_of(1)
    while CALLS * sum(one.flops for one in shapes) / rate > MOST_S:
        smaller *= 2
        fewer = shapes_of(smaller)
        if fewer == shapes:  # one token
            break
        shapes = fewer
    return shapes
