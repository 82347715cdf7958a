"""Engines side by side: the records of one question that differ in their engine alone, differences
of the answers first.

The base is engine `torch`, else the engine of the first record. Answers are those of every run that
finished; rates are those of valid runs, for a run that is not valid has no rate to compare.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from steelyard.case.request import DEFAULT_ENGINE
from steelyard.metrics import rates, runs, spans, stats, training
from steelyard.metrics.runs import Estimate, Source
from steelyard.record.record import Record
from steelyard.tasks.task import Differences

T = TypeVar("T")

# What is known of a run that failed, too, and what else records of one group have in common.
ASKED = ("case", "division", "precision", "sample", "steps", "plan", "asked_tune")
ALIKE = (*ASKED, "key", "headline", "weights", "devices")


@dataclass(frozen=True)
class Apart:
    """The largest difference of a value over the steps that two runs have in common, and its step,
    counted from 0.
    """

    value: float
    step: int


@dataclass(frozen=True)
class Answers:
    """How far an engine's answers are from those of the base's first run: of several runs, the
    farthest. None is unknown, or nothing that this kind of case has."""

    chosen: Differences | None  # items that got another answer
    loss: Apart | None  # of training's steps
    grad_norm: Apart | None
    quality: float | None


@dataclass(frozen=True)
class EngineRuns:
    """The finished runs of one engine. `answers` are None of a base that ran once: there is nothing
    to compare it with. Of one that ran more often they are those of its other runs, and say how far
    apart runs of the same engine are."""

    name: str
    records: tuple[Record, ...]
    base: bool
    answers: Answers | None
    quality: float | None  # the mean over runs
    rate: Estimate | None  # of all devices together, over valid runs
    source: Source | None  # of the interval of `rate`
    ratio: Estimate | None  # to the base's rate
    mfu: float | None  # the mean over valid runs
    mem: float | None  # GiB, the highest of all runs

    @property
    def valid(self) -> int:
        return sum(record.status == "valid" for record in self.records)

    @property
    def invalid_rate(self) -> float | None:
        """The mean rate of runs that are not valid: shown with their reasons, never compared."""
        found = [runs.rate(one) for one in self.records if one.status != "valid"]
        return stats.mean_of_all([None if one is None else one.value for one in found])


@dataclass(frozen=True)
class Engines:
    """Two engines or more; `without` are those that were asked the same and have no finished run.
    `metric` is the quality that is set side by side: the case's, else the loss of the last steps,
    where no pass looked at held-out data."""

    metric: str
    rows: tuple[EngineRuns, ...]
    without: tuple[str, ...]

    @property
    def records(self) -> tuple[Record, ...]:
        return tuple(record for row in self.rows for record in row.records)

    @property
    def base(self) -> EngineRuns:
        return self.rows[0]

    @property
    def unit(self) -> str:
        return rates.work_unit(self.records[0])


def groups(records: Iterable[Record]) -> list[Engines]:
    """The groups of finished records that can be compared and have at least two engines."""
    every = list(records)
    finished = (record for record in every if record.status != "failed")
    alike = stats.grouped(finished, lambda record: runs.in_common(record, ALIKE))
    out = []
    for group in alike.values():
        names = {record.engine.name for record in group}
        if len(names) > 1:
            asked = runs.in_common(group[0], ASKED)
            lost = [
                one.engine.name
                for one in every
                if one.status == "failed" and runs.in_common(one, ASKED) == asked
            ]
            metric = runs.quality(group)
            without = tuple(name for name in dict.fromkeys(lost) if name not in names)
            out.append(Engines(metric, _rows(group, metric), without))
    return out


def _rows(group: list[Record], metric: str) -> tuple[EngineRuns, ...]:
    """The base first, the others in the order in which they came."""
    by_name = stats.grouped(group, lambda record: record.engine.name)
    names = sorted(by_name, key=lambda name: name != DEFAULT_ENGINE)
    return tuple(_row(name, by_name[name], by_name[names[0]], metric) for name in names)


def _row(name: str, records: list[Record], base: list[Record], metric: str) -> EngineRuns:
    own = records is base
    valid, others = _valid(records), records[1:] if own else records
    (rate, source), (base_rate, _) = (
        runs.mean(map(runs.rate, some)) for some in (valid, _valid(base))
    )
    ratio = None
    if rate is not None and base_rate is not None:
        ratio = Estimate(1.0) if own else runs.ratio(rate, base_rate)
    return EngineRuns(
        name=name,
        records=tuple(records),
        base=own,
        answers=(
            farthest([answers(base[0], record, metric) for record in others]) if others else None
        ),
        quality=stats.mean_of_all([runs.metric(record, metric) for record in records]),
        rate=rate,
        source=source,
        ratio=ratio,
        mfu=stats.mean_of_all([runs.metric(record, "mfu") for record in valid]),
        mem=max(
            (
                value
                for value in (runs.metric(record, "mem") for record in records)
                if value is not None
            ),
            default=None,
        ),
    )


def _valid(records: list[Record]) -> list[Record]:
    return [record for record in records if record.status == "valid"]


def answers(base: Record, record: Record, metric: str) -> Answers:
    """How far a record's answers are from another's, both of one question."""
    values = base.task.kind_row.step_values
    one, other = runs.metric(base, metric), runs.metric(record, metric)
    return Answers(
        chosen=_chosen(base, record),
        loss=_steps(base, record, "loss") if "loss" in values else None,
        grad_norm=_steps(base, record, "grad_norm") if "grad_norm" in values else None,
        quality=None if one is None or other is None else abs(other - one),
    )


def _chosen(base: Record, record: Record) -> Differences | None:
    differences, name = base.task.differences, spans.headline(base)
    ours, theirs = base.answers, record.answers
    if differences is None or name is None or ours is None or theirs is None:
        return None
    found: Differences | None = differences(ours, theirs, name)
    return found


def _steps(base: Record, record: Record, name: str) -> Apart | None:
    """None where a step's value is not known in both, which is no small difference. Of a run that
    goes on from another only the losses are known from the first step on."""
    if name != "loss" and (base.restarts or record.restarts):
        return None
    pairs = list(zip(training.values(base, name), training.values(record, name), strict=False))
    apart = [
        Apart(abs(b - a), step)
        for step, (a, b) in enumerate(pairs)
        if a is not None and b is not None
    ]
    return max(apart, key=lambda one: one.value, default=None) if len(apart) == len(pairs) else None


def farthest(every: list[Answers]) -> Answers:
    """Of several runs the largest of each difference; unknown where one of them is."""
    return Answers(
        chosen=_worst([one.chosen for one in every]),
        loss=_largest([one.loss for one in every], lambda one: one.value),
        grad_norm=_largest([one.grad_norm for one in every], lambda one: one.value),
        quality=_largest([one.quality for one in every], lambda one: one),
    )


def _worst(every: list[Differences | None]) -> Differences | None:
    most = _largest(every, lambda one: one.other)
    if most is None:
        return None
    largest = _largest([None if one is None else one.largest for one in every], lambda one: one)
    tokens = _largest([None if one is None else one.tokens for one in every], lambda one: one)
    return Differences(most.items, most.other, largest, tokens)


def _largest(every: list[T | None], of: Callable[[T], float]) -> T | None:
    known = [one for one in every if one is not None]
    return max(known, key=of) if len(known) == len(every) else None
