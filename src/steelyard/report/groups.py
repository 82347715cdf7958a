"""Groups of records as data for JSON: repeats, engines compared, scaling over devices.

`run --json` and `report --json` print the same models. Input are records, grouped by metrics/.
"""

from collections.abc import Iterable
from typing import Any

from steelyard.metrics import engines as side
from steelyard.metrics import repeats as same
from steelyard.metrics import scaling as scale
from steelyard.metrics.engines import Answers, EngineRuns, Engines
from steelyard.metrics.repeats import Repeats, Spread
from steelyard.metrics.runs import Estimate, Interval, Source
from steelyard.metrics.scaling import Scaling, ScalingRow
from steelyard.record.record import Record, Scope
from steelyard.schema import Frozen


class NotValid(Frozen):
    """A run that is not valid, with the codes of its reasons."""

    id: str
    status: str
    reasons: list[str]


class SpreadData(Frozen):
    """A metric over the valid runs of a group. `interval_from` is what the interval comes from:
    steps of one run, or the spread of runs; `deviation` is the standard deviation as a share of the
    mean.
    """

    unit: str
    runs: int
    mean: float
    interval: Interval | None
    interval_from: Source | None
    deviation: float | None
    lowest: float
    highest: float


class RepeatsData(Frozen):
    """Repeated runs of the same question, engine, plan and settings.

    `records` are the ids of valid runs, and `metrics` are over these; `rate` among them is work of
    all devices over wall time. `interval_only` counts runs that are invalid only because their
    interval is too wide.
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
    not_valid: list[NotValid]
    interval_only: int
    metrics: dict[str, SpreadData]


class EngineData(Frozen):
    """The finished runs of one engine. `rate` is that of all devices together, `ratio` is relative
    to the base engine.
    """

    engine: str
    base: bool
    answers: Answers | None
    rate: float | None
    rate_interval: Interval | None
    ratio: float | None
    ratio_interval: Interval | None
    interval_from: Source | None
    mfu: float | None
    mem: float | None
    quality: float | None
    valid: int
    records: list[str]


class EnginesData(Frozen):
    """Runs that differ in the engine alone. `quality` names the metric of the rows' quality;
    `without` lists engines without a finished run.
    """

    case: str
    key: str
    division: str
    precision: str
    unit: str
    quality: str
    without: list[str]
    rows: list[EngineData]


class PlanData(Frozen):
    """The runs of one parallel plan. Efficiency is the speed-up over the base divided by the ratio
    of devices.
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
    interval_from: Source | None
    records: list[str]


class ScalingData(Frozen):
    """Runs that differ in the parallel plan alone."""

    case: str
    key: str
    division: str
    precision: str
    engine: str
    unit: str
    rows: list[PlanData]


def repeats(records: Iterable[Record]) -> list[RepeatsData]:
    """Return the groups of at least two repeated runs as data; empty if there are none."""
    return [_repeats(group) for group in same.groups(records)]


def _repeats(group: Repeats) -> RepeatsData:
    """Return a group of repeated runs as data."""
    first, case = group.records[0], group.records[0].case
    lost = [
        NotValid(
            id=one.id,
            status=one.status,
            reasons=list(dict.fromkeys(reason.code for reason in one.reasons)),
        )
        for one in group.not_valid
    ]
    return RepeatsData(
        case=case.name,
        size=case.size,
        key=case.key,
        division=case.division,
        precision=case.precision,
        engine=first.engine.name,
        config=first.plan.config,
        plan=str(first.plan),
        scope=first.scope,
        records=[one.id for one in group.valid],
        not_valid=lost,
        interval_only=group.interval_only,
        metrics={one.name: _spread(one) for one in group.metrics},
    )


def _spread(one: Spread) -> SpreadData:
    """Return the spread of a metric as data."""
    return SpreadData(
        unit=one.unit,
        runs=one.runs,
        mean=one.mean.value,
        interval=one.mean.interval,
        interval_from=one.source,
        deviation=one.deviation,
        lowest=one.lowest,
        highest=one.highest,
    )


def engines(records: Iterable[Record]) -> list[EnginesData]:
    """Return groups of runs that differ in the engine alone as data; empty if there are none."""
    return [_engines(group) for group in side.groups(records)]


def _engines(group: Engines) -> EnginesData:
    """Return a group of compared engines as data."""
    case = group.records[0].case
    return EnginesData(
        case=case.name,
        key=case.key,
        division=case.division,
        precision=case.precision,
        unit=group.unit,
        quality=group.metric,
        without=list(group.without),
        rows=[_engine(row) for row in group.rows],
    )


def _engine(row: EngineRuns) -> EngineData:
    """Return the runs of one engine as data."""
    return EngineData(
        engine=row.name,
        base=row.base,
        answers=row.answers,
        **_estimate("rate", row.rate),
        **_estimate("ratio", row.ratio),
        interval_from=row.source,
        mfu=row.mfu,
        mem=row.mem,
        quality=row.quality,
        valid=row.valid,
        records=[one.id for one in row.records],
    )


def scaling(records: Iterable[Record]) -> list[ScalingData]:
    """Return the groups of runs that differ in the parallel plan alone as data; empty if there are
    none.
    """
    return [_scaling(group) for group in scale.groups(records)]


def _scaling(group: Scaling) -> ScalingData:
    """Return a group of plans as data."""
    first, case = group.records[0], group.records[0].case
    return ScalingData(
        case=case.name,
        key=case.key,
        division=case.division,
        precision=case.precision,
        engine=first.engine.name,
        unit=group.unit,
        rows=[_plan(row) for row in group.rows],
    )


def _plan(row: ScalingRow) -> PlanData:
    """Return the runs of one plan as data."""
    return PlanData(
        config=row.plan.config,
        nodes=row.plan.nodes,
        devices=row.plan.devices,
        plan=str(row.plan),
        base=row.base,
        **_estimate("rate", row.rate),
        **_estimate("speedup", row.speedup),
        **_estimate("efficiency", row.efficiency),
        interval_from=row.source,
        records=[one.id for one in row.records],
    )


def _estimate(name: str, one: Estimate | None) -> dict[str, Any]:
    """Return a dict with `name` and `name_interval`, the fields of an estimate in JSON; both are
    None for None.
    """
    return {name: one and one.value, f"{name}_interval": one and one.interval}
