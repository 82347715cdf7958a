"""Scaling: how the rate of one question grows with the number of devices, over the valid records of a set."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import fsum, hypot, sqrt
from typing import Literal

from steelyard.metrics import rates, spans, stats
from steelyard.metrics.result import work_name
from steelyard.plan.degrees import Plan
from steelyard.record.record import Record
from steelyard.schema import canonical

RATE_BOUNDS = (1e-30, 1e30)  # that no machine comes near: a stranger's record makes no formula overflow

Interval = tuple[float, float]
Source = Literal["steps", "runs"]  # what an interval comes from: the steps of one run, or the spread between runs


@dataclass(frozen=True)
class Estimate:
    """A number with its 95 % interval; None where that is unknown."""

    value: float
    interval: Interval | None = None


@dataclass(frozen=True)
class ScalingRow:
    """The runs of one plan. Speed-up is the rate over the base's; efficiency is speed-up over the ratio of devices. Those of
    the base are 1 by definition, and have no interval."""

    records: tuple[Record, ...]
    rate: Estimate  # of all devices together; the mean over runs
    source: Source | None  # of the interval of `rate`
    speedup: Estimate
    efficiency: Estimate
    base: bool

    @property
    def plan(self) -> Plan:
        return self.records[0].plan


@dataclass(frozen=True)
class Scaling:
    """Records that differ in their plan alone: a row for each plan, fewest devices first. The base is the fastest plan on the
    fewest devices."""

    unit: str
    rows: tuple[ScalingRow, ...]

    @property
    def records(self) -> tuple[Record, ...]:
        return tuple(record for row in self.rows for record in row.records)

    @property
    def base(self) -> ScalingRow:
        return next(row for row in self.rows if row.base)


def groups(records: Iterable[Record]) -> list[Scaling]:
    """The groups of valid records that can be compared and have at least two numbers of devices."""
    alike: dict[str, list[Record]] = {}
    for record in records:
        if record.status == "valid" and rate(record) is not None:
            alike.setdefault(_alike(record), []).append(record)
    several = [group for group in alike.values() if len({record.plan.world for record in group}) > 1]
    return [Scaling(rates.work_unit(group[0]), _rows(group)) for group in several]


def _alike(record: Record) -> str:
    """What records of one group have in common. A sample changes how much is shared and how large a batch is, so it counts."""
    case, scope = record.case, record.scope
    tune = record.tune.model_dump(mode="json", exclude={"parallel"})
    measured = [record.engine.name, spans.headline(record), scope.kind, scope.sample, kinds(record)]
    return canonical([case.key, case.division, case.precision, *measured, tune])


def kinds(record: Record) -> list[str]:
    """The kinds of device of a run, each once."""
    devices = [*record.environment.hardware.devices, *(device for host in record.hosts for device in host.devices)]
    return sorted({device.name for device in devices})


def rate(record: Record, work: str | None = None) -> Estimate | None:
    """Work of all devices over wall time: tokens, or samples where that is what the record's rates count, or else what is
    asked for. Of training, over the steady window."""
    tokens = (work or work_name(record)) == "tokens"
    name, devices = ("tokens_per_device_s", record.plan.world) if tokens else ("samples_per_s", 1)
    found = record.metrics.get(name)
    if found is None or found.value is None or not RATE_BOUNDS[0] < found.value < RATE_BOUNDS[1]:
        return None
    ends = found.interval
    within = ends is not None and 0 <= ends[0] <= found.value <= ends[1] < RATE_BOUNDS[1]
    return Estimate(found.value * devices, (ends[0] * devices, ends[1] * devices) if ends and within else None)


def _rows(group: list[Record]) -> tuple[ScalingRow, ...]:
    by_plan: dict[tuple[int, ...], list[Record]] = {}
    for record in group:
        plan = record.plan
        by_plan.setdefault((plan.world, plan.nodes, plan.tp, plan.pp, plan.dp), []).append(record)
    plans = [over_runs(records) for _, records in sorted(by_plan.items())]
    base = max((one for one in plans if one.world == plans[0].world), key=lambda one: one.rate.value)
    return tuple(_row(one, base) for one in plans)


@dataclass(frozen=True)
class Runs:
    """Runs as one rate."""

    records: tuple[Record, ...]
    rate: Estimate
    source: Source | None

    @property
    def world(self) -> int:
        return self.records[0].plan.world


def over_runs(records: list[Record]) -> Runs:
    """The mean over runs. Of one run the interval is its own; of several it is that of their spread (Student's t)."""
    return Runs(tuple(records), *mean_of([one for one in map(rate, records) if one is not None]))


def mean_of(found: Sequence[Estimate]) -> tuple[Estimate, Source | None]:
    """The mean of at least one rate, and what its interval comes from."""
    count = len(found)
    if count == 1:
        return found[0], None if found[0].interval is None else "steps"
    mean = fsum(one.value for one in found) / count
    variance = fsum((one.value - mean) ** 2 for one in found) / (count - 1)
    half = stats.t_95(count - 1) * sqrt(variance / count)
    return Estimate(mean, (max(0.0, mean - half), mean + half)), "runs"


def _row(one: Runs, base: Runs) -> ScalingRow:
    speedup = Estimate(1.0) if one is base else ratio(one.rate, base.rate)
    share = base.world / one.world
    ends = speedup.interval
    efficiency = Estimate(speedup.value * share, (ends[0] * share, ends[1] * share) if ends else None)
    return ScalingRow(one.records, one.rate, one.source, speedup, efficiency, one is base)


def ratio(top: Estimate, bottom: Estimate) -> Estimate:
    """A ratio of two independent rates: their relative errors add as squares, each end's with the other's opposite end."""
    value = top.value / bottom.value
    if top.interval is None or bottom.interval is None:
        return Estimate(value)
    (down, up), (bottom_down, bottom_up) = _relative(top, top.interval), _relative(bottom, bottom.interval)
    return Estimate(value, (max(0.0, value * (1 - hypot(down, bottom_up))), value * (1 + hypot(up, bottom_down))))


def _relative(one: Estimate, ends: Interval) -> Interval:
    return (one.value - ends[0]) / one.value, (ends[1] - one.value) / one.value
