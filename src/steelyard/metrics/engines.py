"""Group records that differ only in their engine: how far their answers are from the base's, and
their rates.

The base is engine `torch`, else the engine of the first record. Answers are those of every finished
run; rates are those of valid runs only.
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

# Parts that also failed runs have, and all parts that records of one group have in common.
ASKED = ("case", "division", "precision", "sample", "steps", "plan", "asked_tune")
ALIKE = (*ASKED, "key", "headline", "weights", "devices")


@dataclass(frozen=True)
class Apart:
    """The largest absolute difference of a value over the steps that two runs have in common, and
    the step of it, counted from 0.
    """

    value: float
    step: int


@dataclass(frozen=True)
class Answers:
    """How far a run's answers are from those of a base run, as absolute differences; of several
    runs, the farthest of each.

    None is unknown, or not applicable to this kind of work. `chosen` counts items that were
    answered differently, `loss` and `grad_norm` compare training steps, `quality` is the difference
    of the quality metric.
    """

    chosen: Differences | None  # items that were answered differently
    loss: Apart | None  # of training steps
    grad_norm: Apart | None
    quality: float | None


@dataclass(frozen=True)
class EngineRuns:
    """The finished runs of one engine in a group.

    `answers` compares them with the base engine's first run. For the base itself these are its
    other runs, which shows how far apart runs of one engine are; None if it ran once.
    """

    name: str
    records: tuple[Record, ...]
    base: bool
    answers: Answers | None
    quality: float | None  # mean over finished runs
    rate: Estimate | None  # of all devices together; mean over valid runs
    source: Source | None  # what the interval of `rate` comes from
    ratio: Estimate | None  # rate over the base's rate
    mfu: float | None  # mean over valid runs
    mem: float | None  # GiB, highest over finished runs

    @property
    def valid(self) -> int:
        """Return the number of valid runs."""
        return sum(record.status == "valid" for record in self.records)

    @property
    def invalid_rate(self) -> float | None:
        """Return the mean rate of the runs that are not valid, which is shown and never compared;
        None if one has no rate, or all are valid.
        """
        found = [runs.rate(one) for one in self.records if one.status != "valid"]
        return stats.mean_of_all([None if one is None else one.value for one in found])


@dataclass(frozen=True)
class Engines:
    """Finished runs of two or more engines that were asked the same, the base engine first.

    `metric` is the quality that is compared: the case's, else the loss of the last steps. `without`
    names engines that were asked the same and have only failed runs.
    """

    metric: str
    rows: tuple[EngineRuns, ...]
    without: tuple[str, ...]

    @property
    def records(self) -> tuple[Record, ...]:
        """Return the records of all engines."""
        return tuple(record for row in self.rows for record in row.records)

    @property
    def base(self) -> EngineRuns:
        """Return the base engine's runs."""
        return self.rows[0]

    @property
    def unit(self) -> str:
        """Return the unit of the rates."""
        return rates.work_unit(self.records[0])


def groups(records: Iterable[Record]) -> list[Engines]:
    """Return the groups of finished, comparable records (equal in `ENGINE_PARTS`) that have at
    least two engines.
    """
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
    """Return the runs of each engine: the base (torch, else the first record's engine) first, the
    others in the order in which they came.
    """
    by_name = stats.grouped(group, lambda record: record.engine.name)
    names = sorted(by_name, key=lambda name: name != DEFAULT_ENGINE)
    return tuple(_row(name, by_name[name], by_name[names[0]], metric) for name in names)


def _row(name: str, records: list[Record], base: list[Record], metric: str) -> EngineRuns:
    """Summarize the runs of one engine against the base engine's.

    Rate, MFU and ratio are means over valid runs; quality is the mean over all, None if one lacks
    it; memory is the highest of all. The ratio of the base is 1. Answers are compared with the
    base's first record.
    """
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
    """Return the records with status valid."""
    return [record for record in records if record.status == "valid"]


def answers(base: Record, record: Record, metric: str) -> Answers:
    """Return how far a record's answers are from those of `base`; both must be of the same
    question. `metric` names the quality metric.
    """
    values = base.task.kind_row.step_values
    one, other = runs.metric(base, metric), runs.metric(record, metric)
    return Answers(
        chosen=_chosen(base, record),
        loss=_steps(base, record, "loss") if "loss" in values else None,
        grad_norm=_steps(base, record, "grad_norm") if "grad_norm" in values else None,
        quality=None if one is None or other is None else abs(other - one),
    )


def _chosen(base: Record, record: Record) -> Differences | None:
    """Return how many items of the headline pass were answered differently; None if the task does
    not compare them, or a record has no answers.
    """
    differences, name = base.task.differences, spans.headline(base)
    ours, theirs = base.answers, record.answers
    if differences is None or name is None or ours is None or theirs is None:
        return None
    found: Differences | None = differences(ours, theirs, name)
    return found


def _steps(base: Record, record: Record, name: str) -> Apart | None:
    """Return the largest difference of a step's value ("loss" or "grad_norm") over the steps that
    both runs have.

    None if there are none, or the value is not finite in one of them. None also for a resumed run,
    except for losses, which are known from the first step on.
    """
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
    """Return the largest of each difference over one or more runs; each is None if it is unknown
    for one of them.
    """
    return Answers(
        chosen=_worst([one.chosen for one in every]),
        loss=_largest([one.loss for one in every], lambda one: one.value),
        grad_norm=_largest([one.grad_norm for one in every], lambda one: one.value),
        quality=_largest([one.quality for one in every], lambda one: one),
    )


def _worst(every: list[Differences | None]) -> Differences | None:
    """Return the differences of the run with most different answers, with the largest of the other
    numbers over all runs; None if one is unknown.
    """
    most = _largest(every, lambda one: one.other)
    if most is None:
        return None
    largest = _largest([None if one is None else one.largest for one in every], lambda one: one)
    tokens = _largest([None if one is None else one.tokens for one in every], lambda one: one)
    return Differences(most.items, most.other, largest, tokens)


def _largest(every: list[T | None], of: Callable[[T], float]) -> T | None:
    """Return the item with the largest `size_of`; None if one of the items is None. Raises
    ValueError if there are no items.
    """
    known = [one for one in every if one is not None]
    return max(known, key=of) if len(known) == len(every) else None
