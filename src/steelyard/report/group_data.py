"""Groups of records as data for JSON: repeats, engines compared, scaling over devices.

`run --json` and `report --json` print the same models. Input are records, grouped by metrics/.
"""

from collections.abc import Iterable
from typing import Any

from pydantic import Field

from steelyard.metrics import engine_groups as side
from steelyard.metrics import repeat_groups as same
from steelyard.metrics import scaling_groups as scale
from steelyard.metrics import standing
from steelyard.metrics.engine_groups import AnswerDifferences, EngineGroup, EngineRuns
from steelyard.metrics.estimates import Estimate, Interval, IntervalSource
from steelyard.metrics.ratio import Ratio, Significance
from steelyard.metrics.repeat_groups import MetricSpread, RepeatGroup
from steelyard.metrics.scaling_groups import ScalingGroup, ScalingRow
from steelyard.metrics.vouching import EngineMark, find_weakest_mark
from steelyard.record.record import Record, Scope
from steelyard.schema import FrozenModel


class NotValidRun(FrozenModel):
    """A run that does not count: `id` of its record, `status` (unproven, invalid or failed), and
    the codes of its `reasons`, each once.
    """

    id: str
    status: str
    reasons: list[str]


class SpreadData(FrozenModel):
    """A metric over the runs of a group that count and have a value for it; `runs` is their
    number. `mean`, `interval` (95 %, low and high end, of the mean), `lowest` and `highest` are in
    `unit`.

    `interval_from` is what the interval comes from: "steps" of one run, or the spread of "runs".
    `deviation` is the standard deviation between runs as a share of the mean. Null is unknown.
    """

    unit: str
    runs: int
    mean: float
    interval: Interval | None
    interval_from: IntervalSource | None
    deviation: float | None
    lowest: float
    highest: float


class RepeatsData(FrozenModel):
    """Two or more repeated runs of the same question (`key` is its hash), engine, plan and
    settings; `scope` is how much of the question was run, `config` nodes x devices.

    `records` are the ids of runs that count; `metrics` are over these, by name: `rate` (work of all
    devices per second of wall time), mfu, mem, energy_per_token and the quality metric. `not_valid`
    lists the other runs; `interval_only` counts those that are invalid only because their interval
    is too wide.
    """

    case: str
    size: str
    key: str
    division: str
    precision: str
    engine: str
    config: str
    plan: str
    scope: Scope
    records: list[str]
    not_valid: list[NotValidRun]
    interval_only: int
    metrics: dict[str, SpreadData]


class EngineData(FrozenModel):
    """The finished runs of one engine; `base`: whether the others are compared with it. `rate` (of
    all devices) and `mfu` are means over its runs that count, `quality` over all, `mem` is the
    highest in GiB; null is unknown.

    `ratio` is the rate over the base engine's, `ratio_verdict` whether it was tested (null for the
    base); intervals are 95 % (low, high), and `interval_from` is what that of the rate comes from
    ("steps" or "runs"). `answers` is how far its answers are from those of the base's first run,
    `valid` the number of runs that count, `records` the ids of all.
    """

    engine: str
    engine_mark: EngineMark = Field(description="as in a summary row, the worst of its runs")
    base: bool
    answers: AnswerDifferences | None
    rate: float | None
    rate_interval: Interval | None
    ratio: float | None
    ratio_interval: Interval | None
    ratio_verdict: Significance | None
    interval_from: IntervalSource | None
    mfu: float | None
    mem: float | None
    quality: float | None
    valid: int
    records: list[str]


class EnginesData(FrozenModel):
    """Finished runs of two or more engines that differ in the engine alone: `rows`, one per engine,
    the base first. `key` is the hash of their question, `unit` that of the rates; `quality` names
    the metric of the rows' quality; `without` lists engines that have only failed runs.
    """

    case: str
    key: str
    division: str
    precision: str
    unit: str
    quality: str
    without: list[str]
    rows: list[EngineData]


class PlanData(FrozenModel):
    """The runs of one parallel plan that prove its rate: `nodes`, `devices` of each node, `config`
    (nodes x devices) and `plan` (degrees, such as TP2PP1DP4). `rate` is the mean of all devices
    together; `speedup` is over the base plan (`base`), and `efficiency` is the speed-up divided by
    the ratio of devices; `speedup_verdict` is whether it was tested (null for the base).

    Intervals are 95 % (low, high), null if unknown; `interval_from` is what that of the rate comes
    from. `records` are ids.
    """

    config: str
    nodes: int
    devices: int
    plan: str
    base: bool
    rate: float
    rate_interval: Interval | None
    speedup: float
    speedup_interval: Interval | None
    efficiency: float
    efficiency_interval: Interval | None
    speedup_verdict: Significance | None
    interval_from: IntervalSource | None
    records: list[str]


class ScalingData(FrozenModel):
    """Runs with a proven rate on at least two numbers of devices that differ in the parallel plan
    alone: `rows`, one per plan, fewest devices first. `key` is the hash of their question, `unit`
    that of the rates.
    """

    case: str
    key: str
    division: str
    precision: str
    engine: str
    unit: str
    rows: list[PlanData]


def collect_repeats(records: Iterable[Record]) -> list[RepeatsData]:
    """Return the groups of at least two repeated runs as data; empty if there are none."""
    return [_repeats_data(group) for group in same.find_repeat_groups(records)]


def _repeats_data(group: RepeatGroup) -> RepeatsData:
    """Return a group of repeated runs as data; what its runs have in common is read from its first
    record.
    """
    first_record, case = group.records[0], group.records[0].case
    not_valid = [
        NotValidRun(
            id=item.id,
            status=standing.find_status(item),
            reasons=standing.list_reason_codes(item),
        )
        for item in group.not_counted
    ]
    return RepeatsData(
        case=case.name,
        size=case.size,
        key=case.key,
        division=case.division,
        precision=case.precision,
        engine=first_record.engine.name,
        config=first_record.plan.config,
        plan=str(first_record.plan),
        scope=first_record.scope,
        records=[item.id for item in group.counted],
        not_valid=not_valid,
        interval_only=group.interval_only,
        metrics={item.name: _spread_data(item) for item in group.metrics},
    )


def _spread_data(spread: MetricSpread) -> SpreadData:
    """Return the spread of a metric as data."""
    return SpreadData(
        unit=spread.unit,
        runs=spread.runs,
        mean=spread.mean.value,
        interval=spread.mean.interval,
        interval_from=spread.source,
        deviation=spread.deviation,
        lowest=spread.lowest,
        highest=spread.highest,
    )


def collect_engines(records: Iterable[Record]) -> list[EnginesData]:
    """Return groups of finished runs of at least two engines that differ in the engine alone as
    data; empty if there are none.
    """
    return [_engines_data(group) for group in side.find_engine_groups(records)]


def _engines_data(group: EngineGroup) -> EnginesData:
    """Return a group of compared engines as data; what its runs have in common is read from its
    first record.
    """
    case = group.records[0].case
    return EnginesData(
        case=case.name,
        key=case.key,
        division=case.division,
        precision=case.precision,
        unit=group.unit,
        quality=group.metric,
        without=list(group.without),
        rows=[_engine_data(row) for row in group.rows],
    )


def _engine_data(row: EngineRuns) -> EngineData:
    """Return the runs of one engine as data."""
    return EngineData(
        engine=row.name,
        engine_mark=find_weakest_mark(row.records),
        base=row.is_base,
        answers=row.answers,
        **_estimate_fields("rate", row.rate),
        **_estimate_fields("ratio", row.ratio),
        ratio_verdict=None if row.is_base or row.ratio is None else row.ratio.verdict,
        interval_from=row.source,
        mfu=row.mfu,
        mem=row.mem,
        quality=row.quality,
        valid=len(row.counted),
        records=[record.id for record in row.records],
    )


def collect_scaling(records: Iterable[Record]) -> list[ScalingData]:
    """Return the groups of valid runs that differ in the parallel plan alone, on at least two
    numbers of devices, as data; empty if there are none.
    """
    return [_scaling_data(group) for group in scale.find_scaling_groups(records)]


def _scaling_data(group: ScalingGroup) -> ScalingData:
    """Return a group of parallel plans as data; what its runs have in common is read from its first
    record.
    """
    first_record, case = group.records[0], group.records[0].case
    return ScalingData(
        case=case.name,
        key=case.key,
        division=case.division,
        precision=case.precision,
        engine=first_record.engine.name,
        unit=group.unit,
        rows=[_plan_data(row) for row in group.rows],
    )


def _plan_data(row: ScalingRow) -> PlanData:
    """Return the runs of one plan as data."""
    return PlanData(
        config=row.plan.config,
        nodes=row.plan.nodes,
        devices=row.plan.devices,
        plan=str(row.plan),
        base=row.is_base,
        **_estimate_fields("rate", row.rate),
        **_estimate_fields("speedup", row.speedup),
        **_estimate_fields("efficiency", row.efficiency),
        speedup_verdict=None if row.is_base else row.speedup.verdict,
        interval_from=row.source,
        records=[record.id for record in row.records],
    )


def _estimate_fields(name: str, estimate: Estimate | Ratio | None) -> dict[str, Any]:
    """Return a dict with `name` and `name_interval`, the fields of an estimate in JSON; both are
    None for None.
    """
    return {name: estimate and estimate.value, f"{name}_interval": estimate and estimate.interval}
