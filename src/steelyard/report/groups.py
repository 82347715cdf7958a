"""Groups of records as data: repeats, engines side by side, scaling. The same in the JSON of `run`
and of `report`.
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
    id: str
    status: str
    reasons: list[str]


class SpreadData(Frozen):
    """A metric over the valid runs of a group."""

    unit: str
    runs: int
    mean: float
    interval: Interval | None
    interval_from: Source | None
    deviation: float | None
    lowest: float
    highest: float


class RepeatsData(Frozen):
    """Runs that were asked the same. `metrics` are those of the valid ones; `rate` is work of all
    devices over wall time.
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
    """The runs of one engine. `rate` is that of all devices together, `ratio` is to the base's."""

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
    """Runs that differ in the engine alone. `quality` names the metric that `rows` have; `without`
    has no finished run.
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
    """The runs of one plan. Efficiency is speed-up over the ratio of devices."""

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
    """Runs that differ in the plan alone."""

    case: str
    key: str
    division: str
    precision: str
    engine: str
    unit: str
    rows: list[PlanData]


def repeats(records: Iterable[Record]) -> list[RepeatsData]:
    return [_repeats(group) for group in same.groups(records)]


def _repeats(group: Repeats) -> RepeatsData:
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
    return [_engines(group) for group in side.groups(records)]


def _engines(group: Engines) -> EnginesData:
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
    return [_scaling(group) for group in scale.groups(records)]


def _scaling(group: Scaling) -> ScalingData:
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
    """Return a number and its interval under the names that JSON gives them."""
    return {name: one and one.value, f"{name}_interval": one and one.interval}
