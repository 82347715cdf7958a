"""Compare two sides, BASE and NEW, of one question: the ratio of their rates, and what else
changed. A side is one run, or repeats of it.

Behind `steelyard compare` and `reproduce`. Rates, metrics and phases are means over the runs that
prove a rate (`standing.select_proven`); other runs are counted and named. Answers are those of
every finished run, each compared with the base's first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isclose
from typing import Literal

from steelyard.errors import RequestError
from steelyard.metrics import (
    engine_groups,
    estimates,
    metric_table,
    passes,
    rates,
    ratio,
    record_fields,
    standing,
    stats,
)
from steelyard.metrics.engine_groups import AnswerDifferences
from steelyard.metrics.estimates import Estimate, IntervalSource
from steelyard.metrics.ratio import Ratio
from steelyard.metrics.record_fields import FieldDifference
from steelyard.metrics.result import WorkName, work_name
from steelyard.record.record import Record

STEP_SIZE_TOLERANCE = 0.01  # relative; packed steps of one size differ by less
# Fields of `list_setting_fields` that the runs of one side have in common, beside their question.
REPEAT_FIELDS = (
    *("case.size", "engine.name", "tune.", "scope.", "environment.hardware.devices"),
    *("plan.nodes", "plan.devices", "plan.tp", "plan.pp", "plan.dp"),
    *("weights.source", "weights.seed", "weights.header_sha256"),
)

RateOutcome = Literal[
    "faster", "slower", "below threshold", "not significant", "not tested", "no rate"
]
ChangeOutcome = Literal["better", "worse", "changed", "equal", "not significant", "not tested"]


@dataclass(frozen=True)
class ComparisonSide:
    """The records of one side (BASE or NEW) of a comparison, oldest first, each once; made by
    `make_side`. `name` stands for it in messages. Properties: `counted`, the records whose rates
    and metrics count (`standing.select_proven`), `not_counted`, and `finished` (not failed).
    """

    name: str
    records: tuple[Record, ...]

    @property
    def counted(self) -> tuple[Record, ...]:
        """Return the records of this side of a comparison whose rates and metrics count."""
        return tuple(standing.select_proven(self.records))

    @property
    def not_counted(self) -> tuple[Record, ...]:
        """Return the records of this side of a comparison whose rates and metrics do not count:
        invalid, failed, or too short while fewer than three repeats are right.
        """
        return tuple(standing.select_not_proven(self.records))

    @property
    def finished(self) -> tuple[Record, ...]:
        """Return the records of this side of a comparison that did not fail."""
        return tuple(record for record in self.records if record.status != "failed")


@dataclass(frozen=True)
class ValueChange:
    """A metric, or a phase in seconds per step (`name`), on both sides of a comparison: means over
    counted runs (`base`, `new`) in `unit`, and their ratio; made by `_make_change`.

    `base` or `new` is None if a counted run of that side lacks the value, or no run of it counts.
    `better` is "higher", "lower" or "" if neither is; `form` is how the number is written, such as
    "percent". `ratio` (new / base, of geometric means) is None if a side is unknown or a value is
    not positive. Property `outcome`: what may be said of the change.
    """

    name: str
    unit: str
    better: str
    form: str
    base: float | None
    new: float | None
    ratio: Ratio | None

    @property
    def outcome(self) -> ChangeOutcome | None:
        """Return what may be said of NEW against BASE in this metric or phase; None if a mean is
        unknown.

        "better" or "worse" only if the ratio is significant, "changed" if it is and no direction is
        better. Otherwise "equal" if the means are, else "not significant", or "not tested" if
        there is no test, as of a value that is not positive.
        """
        if self.base is None or self.new is None:
            return None
        if self.ratio is not None and self.ratio.verdict == "significant":
            if not self.better:
                return "changed"
            # the ratio is of geometric means, which may disagree with arithmetic ones
            return "better" if (self.ratio.value > 1) == (self.better == "higher") else "worse"
        if self.base == self.new:
            return "equal"
        is_tested = self.ratio is not None and self.ratio.verdict != "not tested"
        return "not significant" if is_tested else "not tested"


@dataclass(frozen=True)
class SideRate:
    """The rate of a side of a comparison: `estimate`, the mean over its counted runs with interval,
    in the unit of the comparison, and `source`, what the interval comes from: "steps" of one run,
    or the spread of "runs"; None without an interval.
    """

    estimate: Estimate
    source: IntervalSource | None


@dataclass(frozen=True)
class NoRatioReason:
    """Why a comparison has no ratio of rates. `code` is "no_valid_run", "unproven" (runs that are
    too short, and fewer than three) or "no_rate", with the name of that side in `values`, or
    "different_work", with the two units of the rates.
    """

    code: Literal["no_valid_run", "unproven", "no_rate", "different_work"]
    values: tuple[str, ...]


@dataclass(frozen=True)
class Comparison:
    """Two sides of a question compared, as `compare_sides` returns it; pairs are (base, new), None
    is unknown.

    `rates` are means in `unit`, `ratio` is new / base; None for the reason in `why`. `threshold` is
    the share below which a change of the rate does not matter. `answers` say how far answers are
    from the base's first run, by `quality_metric`. `metrics` are those that changed
    (`equal_metric_count` did not), `phases` seconds per step; steps compare if `has_equal_steps`
    (`tokens_per_step` agree). `question_differences` are those that `across` allows,
    `setting_differences` what else the runs were made with. Properties: `outcome` (a word for the
    rate) and `has_regressed`.
    """

    base: ComparisonSide
    new: ComparisonSide
    threshold: float
    question_differences: tuple[FieldDifference, ...]  # those that `across` allows
    unit: str
    rates: tuple[SideRate | None, SideRate | None]
    ratio: Ratio | None
    why: NoRatioReason | None  # why `ratio` is None
    quality_metric: str  # the metric by which answers are compared
    # the base's are those of its other runs: how far apart runs of one side are
    answers: tuple[AnswerDifferences | None, AnswerDifferences | None]
    metrics: tuple[ValueChange, ...]
    equal_metric_count: int  # number of metrics with the same mean on both sides
    phases: tuple[ValueChange, ...]
    tokens_per_step: tuple[float | None, float | None]  # mean tokens per step of each side
    has_equal_steps: bool
    setting_differences: tuple[FieldDifference, ...]

    @property
    def outcome(self) -> RateOutcome:
        """Return the outcome for the rate of NEW against BASE: "faster" or "slower" if the ratio is
        significant and beyond the threshold, "below threshold" if it is only significant, else the
        ratio's verdict "not significant" or "not tested"; "no rate" without a ratio.
        """
        rate_ratio = self.ratio
        if rate_ratio is None:
            return "no rate"
        if rate_ratio.verdict != "significant":
            return rate_ratio.verdict
        if not rate_ratio.exceeds(self.threshold):
            return "below threshold"
        return "faster" if rate_ratio.value > 1 else "slower"

    @property
    def has_regressed(self) -> bool:
        """Return whether NEW is significantly slower by more than the threshold, or all runs of a
        side are invalid or failed and so nobody can rule it out. A side that is unproven is not
        called slower, as single runs are not.
        """
        return self.outcome == "slower" or not all(
            any(map(standing.is_answer_right, side.records)) for side in (self.base, self.new)
        )


def make_side(name: str, records: Sequence[Record]) -> ComparisonSide:
    """Return a side of records that repeat one run, sorted by creation time; a record that is given
    twice counts once.

    Raises RequestError if there are no records, or if finished ones (all, if none finished) differ
    in their question or in a field of `REPEAT_FIELDS`: size, engine, tune, scope, devices, plan,
    weights. `name` stands for the side in messages.
    """
    record_by_id = {record.id: record for record in records}
    new_side = ComparisonSide(
        name, tuple(sorted(record_by_id.values(), key=lambda item: (item.created, item.id)))
    )
    if not new_side.records:
        raise RequestError(f"{name}: no records; give a record, or a folder of repeats")
    first, *others = new_side.finished or new_side.records
    differences = record_fields.find_question_differences([first], others) if others else ()
    settings = [
        record_fields.list_setting_fields(record)
        for record in new_side.finished or new_side.records
    ]
    differences += (
        tuple(
            item
            for item in record_fields.find_differences(settings[:1], settings[1:])
            if item.name.startswith(REPEAT_FIELDS)
        )
        if others
        else ()
    )
    if differences:
        raise RequestError(
            f"{name}: these records are not repeats of one run:"
            f" {record_fields.format_differences(differences)}; give the records of one run"
        )
    return new_side


def compare_sides(
    base: ComparisonSide, new: ComparisonSide, across: Sequence[str], threshold: float
) -> Comparison:
    """Compare two sides and return rates, their ratio, answers, metrics, phases and differing
    settings.

    `across` names question fields that may differ (a dotted name or its beginning; "case" allows
    all). Raises RequestError if the questions of the finished records differ in any other field, if
    `across` names no field of these questions, or if `threshold` is not a share from 0 to below 1.
    If rates cannot be compared nothing is raised: `ratio` is None and `why` set.
    """
    ratio.check_threshold(threshold)
    record_fields.check_across(across, [*base.records, *new.records])
    base_records, new_records = base.finished or base.records, new.finished or new.records
    question_differences = record_fields.find_question_differences(base_records, new_records)
    not_allowed = [
        item for item in question_differences if not record_fields.is_covered(item.name, across)
    ]
    if not_allowed:
        raise RequestError(
            f"the questions differ: {record_fields.format_differences(not_allowed)}; to compare"
            f" them anyway, name what differs, such as"
            f" --across {'.'.join(not_allowed[0].name.split('.')[:2])}"
        )
    unit, count_name, why = _choose_work(base, new)
    side_rates = tuple(_list_rates(item, count_name) if count_name else [] for item in (base, new))
    metric_changes, equal_count = _compare_metrics(base, new)
    settings = record_fields.find_differences(
        [record_fields.list_setting_fields(item) for item in base_records],
        [record_fields.list_setting_fields(item) for item in new_records],
    )
    tokens_per_step = (_mean_tokens_per_step(base), _mean_tokens_per_step(new))
    has_equal_steps = (
        tokens_per_step[0] is not None
        and tokens_per_step[1] is not None
        and isclose(tokens_per_step[0], tokens_per_step[1], rel_tol=STEP_SIZE_TOLERANCE)
    )
    quality_metric = estimates.choose_quality_metric([*base_records, *new_records])
    return Comparison(
        base=base,
        new=new,
        threshold=threshold,
        question_differences=question_differences,
        unit=unit,
        rates=(_average_rate(side_rates[0]), _average_rate(side_rates[1])),
        ratio=ratio.compare_rates(*side_rates),
        why=why
        or _explain_missing_rate(base, side_rates[0])
        or _explain_missing_rate(new, side_rates[1]),
        quality_metric=quality_metric,
        answers=_compare_side_answers(base, new, quality_metric),
        metrics=metric_changes,
        equal_metric_count=equal_count,
        phases=_compare_phases(base, new, has_equal_steps),
        tokens_per_step=tokens_per_step,
        has_equal_steps=has_equal_steps,
        setting_differences=settings,
    )


def _choose_work(
    base: ComparisonSide, new: ComparisonSide
) -> tuple[str, WorkName | None, NoRatioReason | None]:
    """Return (unit of both rates, the count they are taken of: "tokens" or "samples", None); or
    ("", None, the reason) if the rates count different work.

    It is what the first records' own rates count if that has the same unit, else samples, if both
    tasks have the same noun for an item.
    """
    base_record, new_record = base.records[0], new.records[0]
    units = {rates.work_unit(base_record), rates.work_unit(new_record)}
    if len(units) == 1:
        return units.pop(), work_name(base_record), None
    if base_record.task.noun == new_record.task.noun:
        return f"{base_record.task.noun}s/s", "samples", None
    return "", None, NoRatioReason("different_work", tuple(sorted(units)))


def _list_rates(one_side: ComparisonSide, count_name: WorkName) -> list[Estimate]:
    """Return the rates of the side's counted runs that have one, in `count_name` ("tokens" or
    "samples") of all devices per second.
    """
    return [
        estimate
        for estimate in (estimates.estimate_rate(record, count_name) for record in one_side.counted)
        if estimate is not None
    ]


def _average_rate(known_rates: list[Estimate]) -> SideRate | None:
    """Return the arithmetic mean of a side's rates with its interval, and what that comes from;
    None if there are none.
    """
    return SideRate(*estimates.average_runs(known_rates)) if known_rates else None


def _explain_missing_rate(
    one_side: ComparisonSide, known_rates: list[Estimate]
) -> NoRatioReason | None:
    """Return why a side has no rates, with its name: code "no_rate" if runs of it count, "unproven"
    if some are right but too short and too few, else "no_valid_run"; None if it has rates.
    """
    if known_rates:
        return None
    if one_side.counted:
        return NoRatioReason("no_rate", (one_side.name,))
    is_unproven = any(map(standing.is_answer_right, one_side.records))
    return NoRatioReason("unproven" if is_unproven else "no_valid_run", (one_side.name,))


def _compare_side_answers(
    base: ComparisonSide, new: ComparisonSide, quality_metric: str
) -> tuple[AnswerDifferences | None, AnswerDifferences | None]:
    """Return how far answers are from those of the base's first finished run, as a pair: of the
    base's other finished runs, and of the new side's; of several the farthest of each difference.

    Both are None if a side has no finished run. The first is None if the base has one run; the
    second if a new run has another task or other data (fingerprint).
    """
    if not base.finished or not new.finished:
        return None, None
    first_record, *others = base.finished
    base_answers = (
        engine_groups.merge_farthest(
            [
                engine_groups.compare_answers(first_record, record, quality_metric)
                for record in others
            ]
        )
        if others
        else None
    )
    new_records = new.finished
    if any(
        (new_record.task.name, new_record.fingerprint)
        != (first_record.task.name, first_record.fingerprint)
        for new_record in new_records
    ):
        return base_answers, None
    return base_answers, engine_groups.merge_farthest(
        [
            engine_groups.compare_answers(first_record, record, quality_metric)
            for record in new_records
        ]
    )


def _compare_metrics(
    base: ComparisonSide, new: ComparisonSide
) -> tuple[tuple[ValueChange, ...], int]:
    """Return (the metrics whose means over counted runs differ, in the order of the metric table;
    the number of metrics with equal means).

    Metrics whose unit differs between records are left out of both, as are those that no side knows
    for all its counted runs.
    """
    counted = (*base.counted, *new.counted)
    changes, equal_count = [], 0
    for name in metric_table.sort_metric_names(
        {name for record in counted for name in record.metrics}
    ):
        unit, *others = {record.metrics[name].unit for record in counted if name in record.metrics}
        if others:  # such as tokens/s on one side and questions/s on the other
            continue
        row = metric_table.find_metric(name, unit, counted[0].task)
        base_values, new_values = (
            [estimates.get_metric_value(record, name) for record in one_side.counted]
            for one_side in (base, new)
        )
        change = _make_change(name, unit, row.better, row.form, base_values, new_values)
        if change is not None and change.base == change.new:
            equal_count += 1
        elif change is not None:
            changes.append(change)
    return tuple(changes), equal_count


def _mean_tokens_per_step(one_side: ComparisonSide) -> float | None:
    """Return the mean over a side's counted runs of their tokens per step, of all replicas, in the
    span that rates are taken over; None if it is unknown for one of them or there are none.
    """
    return stats.mean_of_all([passes.tokens_per_step(record) for record in one_side.counted])


def _compare_phases(
    base: ComparisonSide, new: ComparisonSide, has_equal_steps: bool
) -> tuple[ValueChange, ...]:
    """Return the seconds per step of each phase on both sides, averaged over the counted runs of
    a side, in the order of a step.

    A phase that a run does not have took 0 s in it; a run without any phases makes its side unknown
    (None). Phases that neither side knows are left out. `better` is "lower" if `has_equal_steps`
    (both sides have steps of one size), else "".
    """
    better = "lower" if has_equal_steps else ""
    base_phases, new_phases = (
        [passes.phases_per_step(record) for record in item.counted] for item in (base, new)
    )

    def compare_phase(phase: str) -> ValueChange | None:
        """Return the change of one phase, in mean seconds per step over each side's counted runs;
        None if neither side knows it.
        """
        times = (
            [phases.get(phase, 0.0) if phases else None for phases in side_phases]
            for side_phases in (base_phases, new_phases)
        )
        return _make_change(phase, "s", better, "seconds", *times)

    names = passes.sort_phases({name for item in (*base_phases, *new_phases) for name in item})
    return tuple(item for item in map(compare_phase, names) if item is not None)


def _make_change(
    name: str,
    unit: str,
    better: str,
    form: str,
    base_values: list[float | None],
    new_values: list[float | None],
) -> ValueChange | None:
    """Return the change of a number, given one value for each counted run of both sides; None if
    neither side has a mean.

    A side's mean is None if it has no runs or a value is None; the ratio is None if a mean is None
    or a value is not positive.
    """
    base, new = stats.mean_of_all(base_values), stats.mean_of_all(new_values)
    if base is None and new is None:
        return None
    known = [
        [value for value in values if value is not None] for values in (base_values, new_values)
    ]
    value_ratio = None if base is None or new is None else ratio.compare_values(*known)
    return ValueChange(name, unit, better, form, base, new, value_ratio)
