"""Group runs that were asked the same (repeats), as one result with the spread between them.

Numbers are those of valid runs and, from three runs on, of unproven ones: their spread proves what
a run that is too short cannot prove alone (`standing.select_proven`). Any other run is counted and
named, and never averaged: not even one whose own steps are too uneven for the case while its
repeats agree. Its rate may be right, but its record does not show it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from steelyard.metrics import estimates, rates, standing, stats
from steelyard.metrics.estimates import Estimate, IntervalSource
from steelyard.record.record import Record

# Parts that also failed runs have, and all parts that repeats have in common.
REPEAT_REQUEST_PARTS = (
    "case",
    "division",
    "precision",
    "limits",
    "engine",
    "sample",
    "steps",
    "plan",
    "tune",
)
REPEAT_PARTS = (
    *REPEAT_REQUEST_PARTS,
    "key",
    "headline",
    "weights",
    "devices",
    "restarts",
    "formulas",
)
RATE_NAME = "rate"
MAX_REPEATED_VALUE = 1e30  # as for rates, so that squares stay finite


@dataclass(frozen=True)
class MetricSpread:
    """One metric over the counted runs of a group that have a value for it (`runs` is their
    number).

    `name` is a metric, or `rate`: work of all devices per second of wall time; values are in
    `unit`. `mean` is an estimate; `source` is what its interval comes from, the spread of "runs",
    or "steps" of a single run (None without an interval). `deviation` is the sample standard
    deviation between runs as a share of the mean; None for one run, or a mean of 0. `lowest` and
    `highest` are over the runs.
    """

    name: str  # a metric, or `rate`: work of all devices per second of wall time
    unit: str
    runs: int
    mean: Estimate
    source: IntervalSource | None  # what the interval of `mean` comes from
    deviation: float | None  # standard deviation as a share of the mean
    lowest: float
    highest: float


@dataclass(frozen=True)
class RepeatGroup:
    """Two or more runs that were asked the same (`records`, in the order in which they came), from
    `find_repeat_groups`.

    `metrics` are the spreads of rate, MFU, memory, energy per token and quality over the counted
    runs; empty if none counts. Properties: `counted` records (`standing.select_proven`) and
    `not_counted` ones, and `interval_only`, the number of runs whose only reason is code
    "interval": their own steps are too uneven.
    """

    records: tuple[Record, ...]
    metrics: tuple[MetricSpread, ...]

    @property
    def counted(self) -> tuple[Record, ...]:
        """Return the records of this group of repeats whose rates are averaged."""
        return tuple(standing.select_proven(self.records))

    @property
    def not_counted(self) -> tuple[Record, ...]:
        """Return the records of this group of repeats that are not averaged: invalid, failed, or
        too short while fewer than three repeats are right.
        """
        return tuple(standing.select_not_proven(self.records))

    @property
    def interval_only(self) -> int:
        """Return the number of runs of this group that are not valid only because the interval of
        their own steps is too wide (all their reasons have code "interval").
        """
        return sum(
            {reason.code for reason in record.reasons} == {"interval"}
            for record in self.not_counted
        )


def find_repeat_groups(records: Iterable[Record]) -> list[RepeatGroup]:
    """Return the groups of at least two runs that were asked the same, in the order in which they
    come: equal in all `REPEAT_PARTS` (case and size, division, precision, gate and interval limit,
    engine, scope, plan, tune, question key, headline pass, weights, device names, steps of
    restarts, formulas version).

    A failed run, which lacks some parts, joins the group of the first finished run with equal
    `REPEAT_REQUEST_PARTS` (up to tune); failed runs without one form groups of their own.
    """
    all_records = list(records)
    key_by_request = {
        estimates.make_group_key(item, REPEAT_REQUEST_PARTS): estimates.make_group_key(
            item, REPEAT_PARTS
        )
        for item in reversed(all_records)
        if item.status != "failed"
    }

    def group_key(record: Record) -> str:
        """Return the text by which a record is grouped: equal for equal `REPEAT_PARTS`; for a
        failed run that of the first finished run with the same request, or of the request alone if
        there is none.
        """
        request = estimates.make_group_key(record, REPEAT_REQUEST_PARTS)
        return (
            key_by_request.get(request, request)
            if record.status == "failed"
            else estimates.make_group_key(record, REPEAT_PARTS)
        )

    return [
        RepeatGroup(tuple(group), _measure_spreads(group))
        for group in stats.group_by(all_records, group_key).values()
        if len(group) > 1
    ]


def _measure_spreads(group: list[Record]) -> tuple[MetricSpread, ...]:
    """Return the spread of rate, MFU, memory, energy per token and quality over the counted runs,
    in this order; those that none of these has are left out. Empty if no run counts.
    """
    counted = standing.select_proven(group)
    if not counted:
        return ()
    quality_metric = estimates.choose_quality_metric(counted)
    spreads = [
        _measure_spread(
            RATE_NAME,
            rates.work_unit(counted[0]),
            [estimates.estimate_rate(record) for record in counted],
        )
    ]
    for name in ("mfu", "mem", "energy_per_token", quality_metric):
        unit = next((record.metrics[name].unit for record in counted if name in record.metrics), "")
        spreads.append(
            _measure_spread(
                name,
                unit,
                [_make_estimate(estimates.get_metric_value(record, name)) for record in counted],
            )
        )
    return tuple(spread for spread in spreads if spread is not None)


def _make_estimate(value: float | None) -> Estimate | None:
    """Return the value as an estimate without an interval; None if unknown or absurdly large."""
    return Estimate(value) if value is not None and abs(value) < MAX_REPEATED_VALUE else None


def _measure_spread(name: str, unit: str, run_values: list[Estimate | None]) -> MetricSpread | None:
    """Return the spread of a metric over the runs that have it (not None): their number, mean with
    interval, lowest, highest, and the standard deviation as a share of the mean; None if no run has
    it.
    """
    known = [estimate for estimate in run_values if estimate is not None]
    if not known:
        return None
    values = [estimate.value for estimate in known]
    mean, source = estimates.average_runs(known)
    relative_deviation = (
        estimates.standard_deviation(values) / abs(mean.value)
        if len(values) > 1 and mean.value
        else None
    )
    return MetricSpread(
        name, unit, len(values), mean, source, relative_deviation, min(values), max(values)
    )
