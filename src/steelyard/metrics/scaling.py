"""Scaling: how the rate of one question grows with the number of devices, over the valid records of
a set.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from steelyard.metrics import rates, runs, stats
from steelyard.metrics.runs import Estimate, Source
from steelyard.plan.degrees import Plan
from steelyard.record.record import Record

# What records of one group have in common. A sample changes how much is shared and how large a
# batch is, so it counts.
ALIKE = ("key", "division", "precision", "engine", "headline", "sample", "devices", "asked_tune")


@dataclass(frozen=True)
class ScalingRow:
    """The runs of one plan. Speed-up is the rate over the base's; efficiency is speed-up over the
    ratio of devices. Those of the base are 1 by definition, and have no interval."""

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
    """Records that differ in their plan alone: a row for each plan, fewest devices first. The base
    is the fastest plan on the fewest devices."""

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
    rated = (
        record for record in records if record.status == "valid" and runs.rate(record) is not None
    )
    alike = stats.grouped(rated, lambda record: runs.in_common(record, ALIKE))
    several = [
        group for group in alike.values() if len({record.plan.world for record in group}) > 1
    ]
    return [Scaling(rates.work_unit(group[0]), _rows(group)) for group in several]


def _rows(group: list[Record]) -> tuple[ScalingRow, ...]:
    by_plan = stats.grouped(group, _degrees)
    rates = {
        plan: runs.over_runs([one for one in map(runs.rate, by_plan[plan]) if one])
        for plan in sorted(by_plan)
    }
    fewest = min(world for world, *_ in rates)
    base = max((plan for plan in rates if plan[0] == fewest), key=lambda plan: rates[plan][0].value)
    rows = []
    for plan, (rate, source) in rates.items():
        speedup = Estimate(1.0) if plan == base else runs.ratio(rate, rates[base][0])
        efficiency = speedup.scaled(fewest / plan[0])
        rows.append(
            ScalingRow(tuple(by_plan[plan]), rate, source, speedup, efficiency, plan == base)
        )
    return tuple(rows)


def _degrees(record: Record) -> tuple[int, ...]:
    """Return what makes a plan, the number of devices first."""
    plan = record.plan
    return plan.world, plan.nodes, plan.tp, plan.pp, plan.dp
