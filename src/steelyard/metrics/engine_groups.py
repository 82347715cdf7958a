"""Group records that were asked the same with different engines: how far their answers are from
the base's, and their rates.

The base is engine `torch`, else the engine of the first record. Answers are those of every finished
run; rates are those of runs that prove one (`standing.select_proven`).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from steelyard.case.request import DEFAULT_ENGINE
from steelyard.metrics import estimates, passes, rates, standing, stats, training_formulas
from steelyard.metrics.estimates import Estimate, IntervalSource
from steelyard.metrics.ratio import BASE_RATIO, Ratio, compare_rates
from steelyard.record.record import Record
from steelyard.tasks.task import Differences

T = TypeVar("T")

# Parts that also failed runs have, and all parts that records of one group have in common.
ENGINE_REQUEST_PARTS = ("case", "division", "precision", "sample", "steps", "plan", "asked_tune")
ENGINE_PARTS = (*ENGINE_REQUEST_PARTS, "key", "headline", "weights", "devices", "formulas")


@dataclass(frozen=True)
class StepDifference:
    """The largest absolute difference of a value (loss or gradient norm) between two runs, over the
    training steps that both have: `value`, and `step`, the step at which it is, counted from 0. A
    part of `AnswerDifferences`.
    """

    value: float
    step: int


@dataclass(frozen=True)
class AnswerDifferences:
    """How far a run's answers are from those of a base run, as absolute differences
    (`compare_answers`); of several runs, the farthest of each (`merge_farthest`). A field of None
    is unknown, or not applicable to this kind of work.

    `chosen` (a `Differences`) counts the items that were answered differently, out of those that
    both answered. `loss` and `grad_norm` (`StepDifference`) are the largest difference over
    training steps, with its step. `quality` is the difference of the quality metric's values.
    """

    chosen: Differences | None  # items that were answered differently
    loss: StepDifference | None  # of training steps
    grad_norm: StepDifference | None
    quality: float | None


@dataclass(frozen=True)
class EngineRuns:
    """The finished runs (`records`) of one engine (`name`) in an `EngineGroup`, summarized against
    the base engine's; None is unknown.

    `rate` (all devices together, with interval) and `mfu` are means over the counted runs
    (`standing.select_proven`), `quality` over all; `mem` is the highest in GiB; `ratio` is the rate
    over the base's (1 for the base), tested if both engines have repeats. `source`: what the rate's
    interval comes from, "steps" of one run or the spread of "runs". `answers` compares them with
    the base engine's first run; for the base itself these are its other runs, None if it ran once.
    Properties: `counted`, `uncounted_rate` (mean rate of the other runs).
    """

    name: str
    records: tuple[Record, ...]
    is_base: bool
    answers: AnswerDifferences | None
    quality: float | None  # mean over finished runs
    rate: Estimate | None  # of all devices together; mean over counted runs
    source: IntervalSource | None  # what the interval of `rate` comes from
    ratio: Ratio | None  # rate over the base's rate
    mfu: float | None  # mean over counted runs
    mem: float | None  # GiB, highest over finished runs

    @property
    def counted(self) -> tuple[Record, ...]:
        """Return this engine's runs whose rates are averaged and compared."""
        return tuple(standing.select_proven(self.records))

    @property
    def uncounted_rate(self) -> float | None:
        """Return the mean rate, of all devices together, of this engine's finished runs that do not
        count, which is shown and never compared; None if one of them has no rate, or all count.
        """
        run_rates = map(estimates.estimate_rate, standing.select_not_proven(self.records))
        return stats.mean_of_all([None if item is None else item.value for item in run_rates])


@dataclass(frozen=True)
class EngineGroup:
    """Finished runs of two or more engines that were asked the same; made by `find_engine_groups`.

    `rows` has one `EngineRuns` for each engine, the base engine (torch if it is there) first.
    `metric` names the quality metric that is compared: the case's, else the loss of the last steps.
    `without` names engines that were asked the same and have only failed runs. Properties:
    `records` of all engines, `base` (the first row), `unit` of the rates.
    """

    metric: str
    rows: tuple[EngineRuns, ...]
    without: tuple[str, ...]

    @property
    def records(self) -> tuple[Record, ...]:
        """Return the finished records of all engines of the group, the base engine's first."""
        return tuple(record for row in self.rows for record in row.records)

    @property
    def base(self) -> EngineRuns:
        """Return the base engine's runs: the first row of the group."""
        return self.rows[0]

    @property
    def unit(self) -> str:
        """Return the unit of the rates of the compared engines, such as "tokens/s"."""
        return rates.work_unit(self.records[0])


def find_engine_groups(records: Iterable[Record]) -> list[EngineGroup]:
    """Return the groups of finished records that are equal in `ENGINE_PARTS` (case and size,
    division, precision, scope, plan, requested tune, question key, headline pass, weights, device
    names) and have at least two engines, in the order in which they come.

    Engines that have only failed runs with equal `ENGINE_REQUEST_PARTS` (the first six of these)
    are named in `without`.
    """
    all_records = list(records)
    finished = (record for record in all_records if record.status != "failed")
    records_by_key = stats.group_by(
        finished, lambda record: estimates.make_group_key(record, ENGINE_PARTS)
    )
    found_groups = []
    for group in records_by_key.values():
        names = {record.engine.name for record in group}
        if len(names) > 1:
            request_key = estimates.make_group_key(group[0], ENGINE_REQUEST_PARTS)
            failed_engines = [
                candidate.engine.name
                for candidate in all_records
                if candidate.status == "failed"
                and estimates.make_group_key(candidate, ENGINE_REQUEST_PARTS) == request_key
            ]
            metric = estimates.choose_quality_metric(group)
            without = tuple(name for name in dict.fromkeys(failed_engines) if name not in names)
            found_groups.append(EngineGroup(metric, _make_engine_runs(group, metric), without))
    return found_groups


def _make_engine_runs(group: list[Record], metric: str) -> tuple[EngineRuns, ...]:
    """Summarize the runs of each engine of a group against the base engine's, and return them: the
    base (torch, else the first record's engine) first, the others in the order in which they came.
    `metric` is the quality metric that is compared.
    """
    by_name = stats.group_by(group, lambda record: record.engine.name)
    names = sorted(by_name, key=lambda name: name != DEFAULT_ENGINE)
    return tuple(
        _summarize_engine(name, by_name[name], by_name[names[0]], metric) for name in names
    )


def _summarize_engine(
    name: str, records: list[Record], base: list[Record], metric: str
) -> EngineRuns:
    """Return the summary of one engine's runs against the base engine's (`base`, the same list
    object for the base itself).

    Rate and ratio are over counted runs that have a rate; MFU over counted runs and quality
    (`metric`) over all are None if one lacks it; memory is the highest of all. The base's ratio is
    1; None if either has no rate. Answers are compared with the base's first record.
    """
    is_base = records is base
    counted, compared_records = standing.select_proven(records), records[1:] if is_base else records
    rates_of_base, rates_of_engine = (
        [rate for rate in map(estimates.estimate_rate, engine_records) if rate is not None]
        for engine_records in (standing.select_proven(base), counted)
    )
    rate, source = estimates.average_known_runs(rates_of_engine)
    ratio = BASE_RATIO if is_base else compare_rates(rates_of_base, rates_of_engine)
    return EngineRuns(
        name=name,
        records=tuple(records),
        is_base=is_base,
        answers=(
            merge_farthest(
                [compare_answers(base[0], record, metric) for record in compared_records]
            )
            if compared_records
            else None
        ),
        quality=stats.mean_of_all(
            [estimates.get_metric_value(record, metric) for record in records]
        ),
        rate=rate,
        source=source,
        ratio=None if rate is None else ratio,
        mfu=stats.mean_of_all([estimates.get_metric_value(record, "mfu") for record in counted]),
        mem=max(
            (
                value
                for value in (estimates.get_metric_value(record, "mem") for record in records)
                if value is not None
            ),
            default=None,
        ),
    )


def compare_answers(base: Record, record: Record, metric: str) -> AnswerDifferences:
    """Return how far a record's answers are from those of `base`, as absolute differences; both
    must be of the same question.

    `chosen` counts the items of the base's headline pass that were answered differently, `loss` and
    `grad_norm` are the largest difference over the training steps that both have (with its step),
    `quality` is that of the metric named `metric`. A difference is None if either record lacks it,
    or the kind of work has no such value.
    """
    step_values = base.task.kind_row.step_values
    base_quality, record_quality = (
        estimates.get_metric_value(base, metric),
        estimates.get_metric_value(record, metric),
    )
    return AnswerDifferences(
        chosen=_compare_choices(base, record),
        loss=_find_largest_step_difference(base, record, "loss") if "loss" in step_values else None,
        grad_norm=_find_largest_step_difference(base, record, "grad_norm")
        if "grad_norm" in step_values
        else None,
        quality=None
        if base_quality is None or record_quality is None
        else abs(record_quality - base_quality),
    )


def _compare_choices(base: Record, record: Record) -> Differences | None:
    """Return how many items of the base's headline pass were answered differently, as the task
    counts them; None if the task does not compare answers, the base has no headline pass, a record
    has no answers, or both answered other prompts: requests have a new salt in each run.
    """
    salts = [[samples.salt for samples in one.requests] for one in (base, record)]
    if salts[0] != salts[1]:
        return None
    differences, pass_name = base.task.differences, passes.find_headline_pass(base)
    base_answers, record_answers = base.answers, record.answers
    if differences is None or pass_name is None or base_answers is None or record_answers is None:
        return None
    result: Differences | None = differences(base_answers, record_answers, pass_name)
    return result


def _find_largest_step_difference(
    base: Record, record: Record, value_name: str
) -> StepDifference | None:
    """Return the largest absolute difference of a training step's value ("loss" or "grad_norm")
    over the first steps that both runs have, and its step, counted from 0; of equal ones the first.

    None if there are no such steps, or the value is not finite in one of them. None also if either
    run was resumed, except for losses, which are known from the first step on.
    """
    if value_name != "loss" and (base.restarts or record.restarts):
        return None
    pairs = list(
        zip(
            training_formulas.list_step_values(base, value_name),
            training_formulas.list_step_values(record, value_name),
            strict=False,
        )
    )
    known_differences = [
        StepDifference(abs(b - a), step)
        for step, (a, b) in enumerate(pairs)
        if a is not None and b is not None
    ]
    return (
        max(known_differences, key=lambda difference: difference.value, default=None)
        if len(known_differences) == len(pairs)
        else None
    )


def merge_farthest(differences: list[AnswerDifferences]) -> AnswerDifferences:
    """Return the largest of each difference over the given runs; each is None if it is unknown for
    one of them. Raises ValueError if the list is empty.
    """
    return AnswerDifferences(
        chosen=_merge_choices([item.chosen for item in differences]),
        loss=_max_if_all_known([item.loss for item in differences], lambda item: item.value),
        grad_norm=_max_if_all_known(
            [item.grad_norm for item in differences], lambda item: item.value
        ),
        quality=_max_if_all_known([item.quality for item in differences], lambda item: item),
    )


def _merge_choices(differences: list[Differences | None]) -> Differences | None:
    """Return the items and differing answers of the run with most different answers, with the
    largest `largest` and `tokens` over all runs (each None if unknown for one); None if one of the
    runs has no differences. Raises ValueError if the list is empty.
    """
    worst = _max_if_all_known(differences, lambda item: item.other)
    if worst is None:
        return None
    largest_number = _max_if_all_known(
        [None if item is None else item.largest for item in differences], lambda item: item
    )
    token_count = _max_if_all_known(
        [None if item is None else item.tokens for item in differences], lambda item: item
    )
    return Differences(worst.items, worst.other, largest_number, token_count)


def _max_if_all_known(items: list[T | None], size_of: Callable[[T], float]) -> T | None:
    """Return the item with the largest `size_of`, the first of equal ones; None if one of the items
    is None. Raises ValueError if there are no items.
    """
    known = [item for item in items if item is not None]
    return max(known, key=size_of) if len(known) == len(items) else None
