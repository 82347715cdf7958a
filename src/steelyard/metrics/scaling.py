"""Scaling: how the rate of one question grows with the number of devices, over the valid records of a set."""

from collections.abc import Iterable
from dataclasses import dataclass

from steelyard.metrics import rates, runs
from steelyard.metrics.runs import Estimate, Runs, Source
from steelyard.plan.degrees import Plan
from steelyard.record.record import Record

# What records of one group have in common. A sample changes how much is shared and how large a batch is, so it counts.
ALIKE = ("key", "division", "precision", "engine", "headline", "sample", "devices", "asked_tune")


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
        if record.status == "valid" and runs.rate(record) is not None:
            alike.setdefault(runs.in_common(record, ALIKE), []).append(record)
    several = [group for group in alike.values() if len({record.plan.world for record in group}) > 1]
    return [Scaling(rates.work_unit(group[0]), _rows(group)) for group in several]


def _rows(group: list[Record]) -> tuple[ScalingRow, ...]:
    by_plan: dict[tuple[int, ...], list[Record]] = {}
    for record in group:
        plan = record.plan
        by_plan.setdefault((plan.world, plan.nodes, plan.tp, plan.pp, plan.dp), []).append(record)
    plans = [runs.rate_over_runs(records) for _, records in sorted(by_plan.items())]
    base = max((one for one in plans if one.world == plans[0].world), key=lambda one: one.rate.value)
    return tuple(_row(one, base) for one in plans)


def _row(one: Runs, base: Runs) -> ScalingRow:
    speedup = Estimate(1.0) if one is base else runs.ratio(one.rate, base.rate)
    share = base.world / one.world
    ends = speedup.interval
    efficiency = Estimate(speedup.value * share, (ends[0] * share, ends[1] * share) if ends else None)
    return ScalingRow(one.records, one.rate, one.source, speedup, efficiency, one is base)
