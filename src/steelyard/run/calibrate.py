"""Measure the matmul rate of a device in the run that uses it: one large square matmul, and the
case's own shapes.

Called in a process of its own (run/calibration_worker.py) before the engine is imported, and again
after the last pass. The rates are the base of the metric `mfu_achievable`, and the limit on the
rates of passes.
"""

from collections.abc import Callable
from itertools import pairwise

from pydantic import Field

from steelyard.accelerators.events import Clock, get_clock_name
from steelyard.engine.framework import Framework
from steelyard.plan.matmuls import Matmul
from steelyard.record.run_facts import MatmulRate, Rate
from steelyard.run.clock import now, read_cpu_time_s
from steelyard.run.measure import measure_mean_time_s
from steelyard.schema import FrozenModel

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

ShapesForSmallerBatch = Callable[[int], tuple[Matmul, ...]]  # n → shapes of a batch 1/n in size


class CalibratedRates(FrozenModel):
    """Rates of matmuls that were timed on one device, in FLOP/s: `matmul_flops_per_s` of a large
    square one (None: another program drives the device), the same over the CPU time of this process
    (`matmul_flops_per_cpu_s`; None: it used none, or was not timed long enough), and in several
    short timings (`matmul_cpu_rates`; only on a device that is the host's own CPU); `matmuls`, the
    case's own shapes (may be empty).
    """

    matmul_flops_per_s: Rate | None = None
    matmul_flops_per_cpu_s: Rate | None = None
    matmul_cpu_rates: list[Rate] = Field(default_factory=list)
    matmuls: list[MatmulRate] = Field(default_factory=list)


def calibrate_matmuls(
    framework: Framework,
    precision: str,
    shapes_of: ShapesForSmallerBatch,
    clock: Clock = now,
    cpu_clock: Clock = read_cpu_time_s,
) -> CalibratedRates:
    """Time matmuls in `precision` and return the rates of a large square matmul and of each of the
    case's shapes.

    `matmul_flops_per_cpu_s` is the square rate over this process's CPU time, if any was used; on a
    device that is the host's own CPU, `matmul_cpu_rates` has the same in up to `STRETCHES` parts of
    the timing. Without any rates if another program drives the device. `shapes_of(n)` returns the
    matmul shapes of a batch that is n times smaller than the case's; `cpu_clock` reads CPU time in
    seconds.
    """
    square = framework.prepare_square_matmul(precision)
    if square is None:
        return CalibratedRates()
    work, flops = square
    calls, marks, marks_cpu_time = 0, [], _is_host_cpu(framework)

    def work_and_mark() -> None:
        """Run the square matmul once and count it in `calls`; on a CPU device, append the CPU time
        to `marks` after every `STRETCH_CALLS` calls.
        """
        nonlocal calls
        calls += 1
        work()
        if marks_cpu_time and calls % STRETCH_CALLS == 0:
            marks.append(cpu_clock())

    work()  # a library's initialization is not timed
    begin = cpu_clock()
    rate = flops / measure_mean_time_s(work_and_mark, framework, SQUARE_S, clock)
    used_s = cpu_clock() - begin
    return CalibratedRates(
        matmul_flops_per_s=rate,
        matmul_flops_per_cpu_s=flops * calls / used_s if used_s else None,
        matmul_cpu_rates=_compute_rates([begin, *marks], STRETCH_CALLS * flops),
        matmuls=_time_shapes(framework, precision, shapes_of, rate, clock),
    )


def recalibrate_square_matmul(
    framework: Framework,
    precision: str,
    rate: float,
    clock: Clock = now,
    cpu_clock: Clock = read_cpu_time_s,
) -> CalibratedRates:
    """Time the square matmul again after the passes, for `AFTER_S` seconds, and return its rate or,
    on a device that is the host's own CPU, its rates over CPU time for at most `STRETCHES` parts of
    the timing. `rate` is the FLOP/s measured before the passes. Without any rates if another
    program drives the device.
    """
    square = framework.prepare_square_matmul(precision)
    if square is None:
        return CalibratedRates()
    work, flops = square
    if _is_host_cpu(framework):
        rates = _time_over_cpu_time(work, flops, rate, clock, cpu_clock)
        return CalibratedRates(matmul_cpu_rates=rates)
    work()  # a library's initialization is not timed
    return CalibratedRates(
        matmul_flops_per_s=flops / measure_mean_time_s(work, framework, AFTER_S, clock)
    )


def _time_over_cpu_time(
    work: Callable[[], object], flops: int, rate: float, clock: Clock, cpu_clock: Clock
) -> list[float]:
    """Return the rates of `work` over CPU time, in FLOP/s: timings of up to `STRETCH_CALLS` calls
    of `flops` FLOPs each are made as long as they fit into `AFTER_S` seconds, at least one; `rate`
    is the FLOP/s by which that is predicted.
    """
    calls = max(1, min(STRETCH_CALLS, int(AFTER_S * rate / flops)))
    begin, marks = clock(), []
    if calls > 1:
        work()  # warm up: the operands are not in the caches
    marks.append(cpu_clock())
    while len(marks) < 2 or clock() - begin + calls * flops / rate <= AFTER_S:
        for _ in range(calls):
            work()
        marks.append(cpu_clock())
    return _compute_rates(marks, calls * flops)


def _is_host_cpu(framework: Framework) -> bool:
    """Return whether the host's cores do the work, which shows in events that are readings of the
    host's clock.
    """
    return get_clock_name(framework.event()) == "host"


def _compute_rates(marks: list[float], flops: int) -> list[float]:
    """Return the rates in FLOP/s between readings of CPU time (`marks`, in seconds) with `flops`
    FLOPs between any two neighbours, joined to at most `STRETCHES` parts; parts without CPU time
    are left out. Empty for fewer than two readings.
    """
    between = len(marks) - 1
    count = min(STRETCHES, between)
    edges = [between * i // count for i in range(count + 1)] if count else []
    times = [(end - begin, marks[end] - marks[begin]) for begin, end in pairwise(edges)]
    return [flops * calls / time_s for calls, time_s in times if time_s > 0]


def _time_shapes(
    framework: Framework,
    precision: str,
    shapes_of: ShapesForSmallerBatch,
    rate: float,
    clock: Clock,
) -> list[MatmulRate]:
    """Return the rate of each matmul shape of the case, timed for a share of `SHAPES_S` seconds by
    its FLOPs in a batch; `rate` is that of the square matmul, by which a smaller batch is chosen if
    the whole would take too long.

    Empty if the framework cannot compute one of the shapes, or one takes no measurable time: a mean
    over some of them would be that of another model.
    """
    shapes = _choose_shapes(shapes_of, rate)
    total_flops = sum(shape.count * shape.flops for shape in shapes)
    rates: list[MatmulRate] = []
    for shape in shapes:
        product = framework.prepare_matmul(precision, shape)
        if product is None:
            return []
        work, flops = product
        work()
        time_s = measure_mean_time_s(
            work, framework, SHAPES_S * shape.count * shape.flops / total_flops, clock
        )
        if time_s <= 0:  # too short for the clock
            return []
        rates.append(MatmulRate(**shape.model_dump(), flops_per_s=flops / time_s))
    return rates


def _choose_shapes(shapes_of: ShapesForSmallerBatch, rate: float) -> tuple[Matmul, ...]:
    """Return the matmul shapes of the whole batch or, if `CALLS` calls of each would take longer
    than `MOST_S` seconds at `rate` FLOP/s, of a half, a quarter and so on until they fit or do not
    get smaller. `shapes_of(n)` returns the shapes of a batch 1/n in size.
    """
    divisor, shapes = 1, shapes_of(1)
    while CALLS * sum(shape.flops for shape in shapes) / rate > MOST_S:
        divisor *= 2
        fewer = shapes_of(divisor)
        if fewer == shapes:  # one token
            break
        shapes = fewer
    return shapes
