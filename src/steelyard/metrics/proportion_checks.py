"""Check that the CPU time of an engine's runs, which the node agent reads from outside, grows with
their work.

Behind `steelyard conform`, for what no answer can show: an engine that has its answers from
elsewhere (a file, an earlier pass) answers correctly. The same case is run several times in three
sizes, and a straight line is fitted to CPU seconds over model FLOPs, so that the start of a worker
is no part of the slope. Two things are judged: no FLOP can take less CPU time than in a matmul, and
rows that are computed in a second pass of a run must cost as much as in the first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from steelyard.metrics import cpu_contention, passes, plausibility, standing, stats
from steelyard.metrics.conform_checks import ConformCheck, format_status
from steelyard.plan import flops
from steelyard.record.record import Record

# the widest half of an interval, as a share of the slope, with which something is said to be tested
MAX_HALF_WIDTH = 0.5
# The share of the work on repeated rows that may be missing. Honest engines were measured at -0.17
# to 0.20 on a host that others used, so that a run of bad luck must not decide.
MAX_SAVED = 0.2
TERA = 1e12
SLOPE_NAME = "CPU s per TFLOP"
SAVING_NAME = "work saved on repeated rows"


@dataclass(frozen=True)
class TimedRun:
    """One run in a series, from `time_run`: `cpu_s`, the CPU seconds of its processes without the
    agent's; `work`, the model FLOPs of all its passes; and `repeated`, those of all passes but the
    first, which compute the same rows again.
    """

    cpu_s: float
    work: float
    repeated: float


@dataclass(frozen=True)
class Coefficient:
    """A coefficient of a fit, with half the width of its 95 % interval (infinite if there are no
    more runs than coefficients).
    """

    value: float
    half_width: float

    @property
    def low(self) -> float:
        """The lower end of the interval."""
        return self.value - self.half_width

    @property
    def high(self) -> float:
        """The upper end of the interval."""
        return self.value + self.half_width

    def divide(self, divisor: float) -> "Coefficient":
        """Return the estimate divided by a number whose own error is not counted; unknown, with an
        infinite interval, for a divisor that is not positive.
        """
        if divisor <= 0:
            return Coefficient(0.0, inf)
        return Coefficient(self.value / divisor, self.half_width / divisor)


def check_proportion(timed: Sequence[Record], measured: Sequence[Record]) -> list[ConformCheck]:
    """Return the rows of a series of runs of one case by the engine under test: its statuses, CPU
    seconds per TFLOP and, if some runs have several passes, the work saved on repeated rows.

    `timed` are the records of the series. The least time of a FLOP comes from the fastest matmul in
    these and in `measured`, other records of the same case and host. What was timed says nothing,
    and the latter rows are not tested, if there is an obstacle (`find_obstacle`) to any of these
    runs, or an interval is too wide. Without timed runs there are only these rows.
    """
    case_name, rows = measured[0].case.name, [_check_statuses(timed)] if timed else []
    rates = [
        rate
        for record in (*measured, *timed)
        for rank in record.ranks
        for rate in plausibility.list_cpu_rates(rank, has_several=True)
    ]
    obstacle = find_obstacle(timed or measured)
    if obstacle is None and not rates:
        obstacle = "no matmul was timed"
    runs = [] if obstacle else [time_run(record) for record in timed]
    if obstacle is None and len({run.work for run in runs} - {0.0}) < 2:
        obstacle = "the runs do not differ in their work"
    if obstacle is not None:
        return [*rows, ConformCheck(case_name, SLOPE_NAME, None, None, None, 0.0, obstacle)]
    slope, deficit = fit_costs(runs)
    least = 1 / (plausibility.MATMUL_MARGIN * max(rates))
    rows.append(_judge_slope(case_name, slope, least))
    if deficit is not None:
        rows.append(_judge_saving(case_name, deficit.divide(slope.value)))
    return rows


def find_obstacle(records: Sequence[Record]) -> str | None:
    """Return why the CPU time of runs says nothing about their engine, as the end of a sentence, or
    None if it does: a run that failed, a device other than the host's CPU, a host without CPU
    readings, or other processes on its cores.
    """
    if any(record.status == "failed" for record in records):
        return "a run failed"
    limits = [
        cpu_contention.find_contention_limits(record.environment.hardware.accelerator)
        for record in records
    ]
    if any(limit is not cpu_contention.CPU_IS_DEVICE_LIMITS for limit in limits):
        return "the time of this device is not read from outside"
    shares = [
        None
        if load is None or not load.agent_s
        else cpu_contention.measure_contention(load, load.t_s[0], load.t_s[-1]).value
        for record in records
        for load in (host.load for host in record.hosts)
    ]
    known = [share for share in shares if share is not None]
    if not known or len(known) < len(shares):
        return "this host does not count CPU time"
    allowed = cpu_contention.CPU_IS_DEVICE_LIMITS.invalid_above
    if max(known) > allowed:
        return f"other processes took {max(known):.0%} of the cores; allowed: {allowed:.0%}"
    return None


def time_run(record: Record) -> TimedRun:
    """Return CPU seconds and work of a record whose hosts have CPU readings. CPU time is that of
    all processes of the run, from the first reading, before any worker, to the last, after all have
    ended.
    """
    loads = [host.load for host in record.hosts if host.load is not None]
    cpu_s = sum(
        load.own_s[-1] - load.own_s[0] - (load.agent_s[-1] - load.agent_s[0]) for load in loads
    )
    kind = record.task.kind_row
    works = [
        flops.count_flops(
            record.question.model,
            passes.sum_counts(record, name),
            "causal",
            kind.forwards_in_pass(name),
        )
        or 0
        for name in dict.fromkeys(window.pass_name for window in record.passes)
    ]
    return TimedRun(cpu_s, float(sum(works)), float(sum(works[1:])))


def fit_costs(runs: Sequence[TimedRun]) -> tuple[Coefficient, Coefficient | None]:
    """Fit CPU seconds = start + slope x work - deficit x repeated work by least squares, and return
    slope and deficit in seconds per FLOP, with 95 % intervals by Student's t; the deficit is None
    if no run has repeated work.
    """
    has_repeats = any(run.repeated for run in runs)
    # of the order of 1, like the constant
    unit = max(run.work for run in runs)
    columns = [
        [1.0, run.work / unit, -run.repeated / unit][: 3 if has_repeats else 2] for run in runs
    ]
    design, seconds = np.array(columns), np.array([run.cpu_s for run in runs])
    coefficients, *_ = np.linalg.lstsq(design, seconds, rcond=None)
    freedom = len(runs) - design.shape[1]
    half_widths = [inf] * design.shape[1]
    if freedom > 0:
        variance = float(np.sum((seconds - design @ coefficients) ** 2)) / freedom
        errors = np.sqrt(np.diag(np.linalg.inv(design.T @ design)) * variance)
        half_widths = [stats.student_t_95(freedom) * float(error) for error in errors]
    slope, *rest = (
        Coefficient(float(value) / unit, half_width / unit)
        for value, half_width in zip(coefficients[1:], half_widths[1:], strict=True)
    )
    return slope, rest[0] if rest else None


def _check_statuses(timed: Sequence[Record]) -> ConformCheck:
    """Return the row "status, timed runs", which conforms if nothing speaks against any of the
    runs; its value is the status of the first that does not, else of the first.
    """
    wrong = [record for record in timed if not standing.is_answer_right(record)]
    return ConformCheck(
        timed[0].case.name,
        "status, timed runs",
        None,
        format_status([*wrong, *timed][0]),
        None if wrong else 0.0,
        0.0,
    )


def _judge_slope(case_name: str, slope: Coefficient, least: float) -> ConformCheck:
    """Return the row on CPU seconds per FLOP. It is wrong if even the upper end of the interval is
    below `least`, what a matmul takes: the engine does not compute the rows that it answers. It is
    not tested if the interval is wider than `MAX_HALF_WIDTH` of the slope to each side.
    """
    apart = max(0.0, 1 - slope.high / least)
    is_wide = slope.half_width > MAX_HALF_WIDTH * abs(slope.value)
    return ConformCheck(
        case_name,
        SLOPE_NAME,
        f"at least {TERA * least:.3g}",
        f"{TERA * slope.value:.3g} ± {TERA * slope.half_width:.2g}",
        apart,
        0.0,
        "the interval is too wide" if is_wide and not apart else None,
    )


def _judge_saving(case_name: str, saving: Coefficient) -> ConformCheck:
    """Return the row on the share of work that a second pass over the same rows does not do. It is
    wrong if even the lower end of its interval is above `MAX_SAVED`, and not tested if the interval
    is wider than `MAX_HALF_WIDTH` to each side.
    """
    apart = max(0.0, saving.low)
    is_wide = saving.half_width > MAX_HALF_WIDTH
    return ConformCheck(
        case_name,
        SAVING_NAME,
        0.0,
        f"{saving.value:.2f} ± {saving.half_width:.2f}",
        apart,
        MAX_SAVED,
        "the interval is too wide" if is_wide and apart <= MAX_SAVED else None,
    )
