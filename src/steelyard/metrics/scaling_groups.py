"""Group records that differ only in their plan: how the rate of one question grows with the
number of devices.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from steelyard.metrics import estimates, rates, repeat_groups, standing, stats
from steelyard.metrics.estimates import Estimate, IntervalSource
from steelyard.metrics.ratio import BASE_RATIO, Ratio, compare_rates
from steelyard.plan.degrees import Plan
from steelyard.record.record import Record

# Parts that records of one group have in common. `sample` is one, because a sample changes how many
# prefixes are shared and how large a batch is.
SCALING_PARTS = (
    "key",
    "division",
    "precision",
    "engine",
    "headline",
    "sample",
    "devices",
    "asked_tune",
)


@dataclass(frozen=True)
class ScalingRow:
    """The runs of one plan that prove its rate (`records`) in a `ScalingGroup`, with speed-up and
    efficiency relative to the base plan.

    `rate` is the mean over the runs, of all devices together; `source` is what its interval comes
    from ("steps" or "runs"). `speedup` is the rate over the base's, `efficiency` is speed-up over
    the ratio of device counts; both are ratios, tested if both plans have repeats. Those of the
    base (`is_base`) are 1 by definition. Property `plan`: nodes, devices and degrees.
    """

    records: tuple[Record, ...]
    rate: Estimate  # of all devices together; mean over runs
    source: IntervalSource | None  # what the interval of `rate` comes from
    speedup: Ratio
    efficiency: Ratio
    is_base: bool

    @property
    def plan(self) -> Plan:
        """Return the plan, which all runs of the row share."""
        return self.records[0].plan


@dataclass(frozen=True)
class ScalingGroup:
    """Records with a proven rate on at least two numbers of devices that differ only in their
    plan; made by `find_scaling_groups`.

    `rows` has one `ScalingRow` for each plan, fewest devices first; `unit` is that of the rates.
    Properties: `records` of all rows, and `base`, the row that speed-ups are relative to: the
    fastest plan on the fewest devices.
    """

    unit: str
    rows: tuple[ScalingRow, ...]

    @property
    def records(self) -> tuple[Record, ...]:
        """Return the records of all plans of the group, fewest devices first."""
        return tuple(record for row in self.rows for record in row.records)

    @property
    def base(self) -> ScalingRow:
        """Return the row that the speed-ups of the group are relative to."""
        return next(row for row in self.rows if row.is_base)


def find_scaling_groups(records: Iterable[Record]) -> list[ScalingGroup]:
    """Return the groups of records that are equal in `SCALING_PARTS` (question key, division,
    precision, engine, headline pass, scope without its number of steps, device names, requested
    tune) and have runs on at least two different numbers of devices, in the order in which they
    come.

    Of each plan the records count that prove its rate, alone or with their repeats (`REPEAT_PARTS`,
    `standing.select_proven`). Empty if there is no such group.
    """
    rated = (record for record in records if estimates.estimate_rate(record) is not None)
    records_by_key = stats.group_by(
        rated, lambda record: estimates.make_group_key(record, SCALING_PARTS)
    )
    proven_groups = [
        [
            record
            for repeats in stats.group_by(group, _make_repeat_key).values()
            for record in standing.select_proven(repeats)
        ]
        for group in records_by_key.values()
    ]
    scaled_groups = [
        group for group in proven_groups if len({record.plan.world for record in group}) > 1
    ]
    return [
        ScalingGroup(rates.work_unit(group[0]), _make_scaling_rows(group))
        for group in scaled_groups
    ]


def _make_scaling_rows(group: list[Record]) -> tuple[ScalingRow, ...]:
    """Return a row for each plan of the group (nodes, devices, tp, pp, dp), sorted by number of
    devices; the base is the plan with the highest mean rate on the fewest devices.

    All records must have a rate. Efficiency is speed-up over the ratio of device counts to the
    base's.
    """
    by_plan = stats.group_by(group, _make_plan_key)
    rates_by_plan = {
        plan: [estimate for estimate in map(estimates.estimate_rate, by_plan[plan]) if estimate]
        for plan in sorted(by_plan)
    }
    rate_by_plan = {plan: estimates.average_runs(known) for plan, known in rates_by_plan.items()}
    fewest_devices = min(world for world, *_ in rate_by_plan)
    base = max(
        (plan for plan in rate_by_plan if plan[0] == fewest_devices),
        key=lambda plan: rate_by_plan[plan][0].value,
    )
    rows = []
    for plan, (rate, source) in rate_by_plan.items():
        compared = compare_rates(rates_by_plan[base], rates_by_plan[plan])
        speedup = BASE_RATIO if plan == base else compared
        if speedup is None:  # rates are positive, so there always is one
            continue
        efficiency = speedup.scale(fewest_devices / plan[0])
        rows.append(
            ScalingRow(tuple(by_plan[plan]), rate, source, speedup, efficiency, plan == base)
        )
    return tuple(rows)


def _make_repeat_key(record: Record) -> str:
    """Return a text that is equal for repeats of one run."""
    return estimates.make_group_key(record, repeat_groups.REPEAT_PARTS)


def _make_plan_key(record: Record) -> tuple[int, ...]:
    """Return (devices of all nodes, nodes, tp, pp, dp) of a record, which identifies its plan and
    sorts plans by number of devices.
    """
    plan = record.plan
    return plan.world, plan.nodes, plan.tp, plan.pp, plan.dp
