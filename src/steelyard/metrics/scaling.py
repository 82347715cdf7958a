"""Group valid records that differ only in their plan: how the rate of one question grows with the
number of devices.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from steelyard.metrics import rates, runs, stats
from steelyard.metrics.runs import Estimate, Source
from steelyard.plan.degrees import Plan
from steelyard.record.record import Record

# Parts that records of one group have in common. `sample` is one, because a sample changes how many
# prefixes are shared and how large a batch is.
ALIKE = ("key", "division", "precision", "engine", "headline", "sample", "devices", "asked_tune")


@dataclass(frozen=True)
class ScalingRow:
    """The runs of one plan, with speed-up and efficiency relative to the base plan.

    Speed-up is the rate over the base's; efficiency is speed-up over the ratio of device counts.
    Those of the base are 1 by definition and have no interval.
    """

    records: tuple[Record, ...]
    rate: Estimate  # of all devices together; mean over runs
    source: Source | None  # what the interval of `rate` comes from
    speedup: Estimate
    efficiency: Estimate
    base: bool

    @property
    def plan(self) -> Plan:
        """Return the plan, which all runs of the row share."""
        return self.records[0].plan


@dataclass(frozen=True)
class Scaling:
    """Records that differ only in their plan: one row for each plan, fewest devices first.

    `unit` is that of the rates. The base row is the fastest plan on the fewest devices.
    """

    unit: str
    rows: tuple[ScalingRow, ...]

    @property
    def records(self) -> tuple[Record, ...]:
        """Return the records of all rows."""
        return tuple(record for row in self.rows for record in row.records)

    @property
    def base(self) -> ScalingRow:
        """Return the row that speed-ups are relative to."""
        return next(row for row in self.rows if row.base)


def groups(records: Iterable[Record]) -> list[Scaling]:
    """Return the groups of valid, comparable records that have runs on at least two different
    numbers of devices.

    Records that are not valid or have no rate are left out. Empty if there is no such group.
    """
    rated = (
        record for record in records if record.status == "valid" and runs.rate(record) is not None
    )
    alike = stats.grouped(rated, lambda record: runs.in_common(record, ALIKE))
    several = [
        group for group in alike.values() if len({record.plan.world for record in group}) > 1
    ]
    return [Scaling(rates.work_unit(group[0]), _rows(group)) for group in several]


def _rows(group: list[Record]) -> tuple[ScalingRow, ...]:
    """Return a row for each plan of the group, fewest devices first; the base is the plan with the
    highest mean rate on the fewest devices.
    """
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
    """Return (devices, nodes, tp, pp, dp), which identifies a plan and sorts plans by number of
    devices.
    """
    plan = record.plan
    return plan.world, plan.nodes, plan.tp, plan.pp, plan.dp
