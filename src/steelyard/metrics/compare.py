"""Compare two sides, BASE and NEW, of one question: the ratio of their rates, and what else
changed. A side is one run, or repeats of it.

Behind `steelyard compare` and `reproduce`. Rates, metrics and phases are means over valid runs;
other runs are counted and named. Answers are those of every finished run, each compared with the
base's first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isclose
from typing import Literal

from steelyard.errors import RequestError
from steelyard.metrics import engines, fields, rates, ratio, runs, spans, stats, table
from steelyard.metrics.engines import Answers
from steelyard.metrics.fields import Field
from steelyard.metrics.ratio import Ratio
from steelyard.metrics.result import work_name
from steelyard.metrics.runs import Estimate, Source
from steelyard.record.record import Record

STEP_SIZE = 0.01  # relative; packed steps of one size differ by less
# Fields of `list_setting_fields` that the runs of one side have in common, beside their question.
REPEATED = (
    *("case.size", "engine.name", "tune.", "scope.", "environment.hardware.devices"),
    *("plan.nodes", "plan.devices", "plan.tp", "plan.pp", "plan.dp"),
    *("weights.source", "weights.seed", "weights.header_sha256"),
)

Outcome = Literal["faster", "slower", "below threshold", "not significant", "not tested", "no rate"]
Direction = Literal["better", "worse", ""]


@dataclass(frozen=True)
class Side:
    """The records of one side of a comparison, oldest first, each once."""

    name: str
    records: tuple[Record, ...]

    @property
    def valid(self) -> tuple[Record, ...]:
        """Return the records with status valid."""
        return tuple(record for record in self.records if record.status == "valid")

    @property
    def left_out(self) -> tuple[Record, ...]:
        """Return the records that are invalid or failed, whose numbers do not count."""
        return tuple(record for record in self.records if record.status != "valid")

    @property
    def finished(self) -> tuple[Record, ...]:
        """Return the records that did not fail (valid or invalid)."""
        return tuple(record for record in self.records if record.status != "failed")


@dataclass(frozen=True)
class Change:
    """A metric or phase on both sides: means over valid runs, and their ratio.

    `base` or `new` is None if a valid run of that side lacks the value, or there is none. `better`
    is "higher", "lower" or "" if neither is; `form` is how the number is written. `ratio` is None
    if a side is unknown or not positive.
    """

    name: str
    unit: str
    better: str
    form: str
    base: float | None
    new: float | None
    ratio: Ratio | None

    @property
    def direction(self) -> Direction:
        """Return whether NEW is "better" or "worse"; "" if values are equal or unknown, or no
        direction is better.
        """
        if self.base is None or self.new is None or not self.better or self.base == self.new:
            return ""
        # the ratio is of geometric means, which may disagree with arithmetic ones
        more = self.new > self.base if self.ratio is None else self.ratio.value > 1
        return "better" if more == (self.better == "higher") else "worse"


@dataclass(frozen=True)
class Rate:
    """The rate of a side, the mean over its valid runs, and what its interval comes from."""

    estimate: Estimate
    source: Source | None


@dataclass(frozen=True)
class Why:
    """Why there is no ratio: `values` name the side that has no valid run or no rate, or the two
    units of rates that count different work.
    """

    code: Literal["no_valid_run", "no_rate", "different_work"]
    values: tuple[str, ...]


@dataclass(frozen=True)
class Comparison:
    """Two sides of a question compared; pairs are (base, new).

    `threshold` is the share below which a change does not matter. `ratio` is that of the rates, in
    `unit`; None for the reason in `why`.
    """

    base: Side
    new: Side
    threshold: float
    across: tuple[Field, ...]  # those that `across` allows
    unit: str
    rates: tuple[Rate | None, Rate | None]
    ratio: Ratio | None
    why: Why | None  # why `ratio` is None
    quality: str  # the metric by which answers are compared
    # the base's are those of its other runs: how far apart runs of one side are
    answers: tuple[Answers | None, Answers | None]
    metrics: tuple[Change, ...]
    equal: int  # number of metrics with the same mean on both sides
    phases: tuple[Change, ...]
    steps: tuple[float | None, float | None]  # mean tokens per step of each side
    same_steps: bool
    differs: tuple[Field, ...]

    @property
    def outcome(self) -> Outcome:
        """Return "faster" or "slower" if the ratio is significant and beyond the threshold, "below
        threshold" if it is only significant, else "not significant" or "not tested"; "no rate"
        without a ratio.
        """
        found = self.ratio
        if found is None:
            return "no rate"
        if found.verdict != "significant":
            return found.verdict
        if not found.beyond(self.threshold):
            return "below threshold"
        return "faster" if found.value > 1 else "slower"

    @property
    def regressed(self) -> bool:
        """Return whether NEW is significantly slower by more than the threshold, or a side has no
        valid run and so nobody can rule it out.
        """
        return self.outcome == "slower" or not (self.base.valid and self.new.valid)


def side(name: str, records: Sequence[Record]) -> Side:
    """Make a side of records that repeat one run, sorted by creation time; a record that is given
    twice counts once.

    Raises RequestError if there are no records, or if finished ones differ in their question or in
    `REPEAT_FIELDS` (engine, tune, scope, devices, plan, weights).
    """
    each = {record.id: record for record in records}
    out = Side(name, tuple(sorted(each.values(), key=lambda one: (one.created, one.id))))
    if not out.records:
        raise RequestError(f"{name}: no records; give a record, or a folder of repeats")
    first, *others = out.finished or out.records
    mixed = fields.questions([first], others) if others else ()
    told = [fields.setting(record) for record in out.finished or out.records]
    mixed += (
        tuple(one for one in fields.differing(told[:1], told[1:]) if one.name.startswith(REPEATED))
        if others
        else ()
    )
    if mixed:
        raise RequestError(
            f"{name}: these records are not repeats of one run: {fields.line(mixed)}; give the"
            " records of one run"
        )
    return out


def compare(base: Side, new: Side, across: Sequence[str], threshold: float) -> Comparison:
    """Compare two sides and return rates, ratio, answers, metrics, phases and differing settings.

    `across` names question fields that may differ (a dotted name or its beginning; "case" allows
    all). Raises RequestError if the questions differ in any other field, if `across` names no field
    of these questions, or if `threshold` is not a share from 0 to below 1.
    """
    ratio.check_threshold(threshold)
    fields.check_across(across, [*base.records, *new.records])
    ours, theirs = base.finished or base.records, new.finished or new.records
    asked = fields.questions(ours, theirs)
    refused = [one for one in asked if not fields.covered(one.name, across)]
    if refused:
        raise RequestError(
            f"the questions differ: {fields.line(refused)}; to compare them anyway, name what"
            f" differs, such as --across {'.'.join(refused[0].name.split('.')[:2])}"
        )
    unit, work, why = _work(base, new)
    found = tuple(_rates(one, work) if work else [] for one in (base, new))
    compared, equal = _metrics(base, new)
    settings = fields.differing(
        [fields.setting(one) for one in ours], [fields.setting(one) for one in theirs]
    )
    steps = (_step_size(base), _step_size(new))
    same_steps = (
        steps[0] is not None
        and steps[1] is not None
        and isclose(steps[0], steps[1], rel_tol=STEP_SIZE)
    )
    metric = runs.quality([*ours, *theirs])
    return Comparison(
        base=base,
        new=new,
        threshold=threshold,
        across=asked,
        unit=unit,
        rates=(_rate(found[0]), _rate(found[1])),
        ratio=ratio.of_rates(*found),
        why=why or _lacking(base, found[0]) or _lacking(new, found[1]),
        quality=metric,
        answers=_answers(base, new, metric),
        metrics=compared,
        equal=equal,
        phases=_phases(base, new, same_steps),
        steps=steps,
        same_steps=same_steps,
        differs=settings,
    )


def _work(base: Side, new: Side) -> tuple[str, str | None, Why | None]:
    """Return the unit of both rates, the count they are taken of ("tokens" or "samples"), and None;
    or "", None and the reason if they cannot be compared.

    It is what both records' own rates count, else samples, if both tasks have the same kind of
    item.
    """
    ours, theirs = base.records[0], new.records[0]
    units = {rates.work_unit(ours), rates.work_unit(theirs)}
    if len(units) == 1:
        return units.pop(), work_name(ours), None
    if ours.task.noun == theirs.task.noun:
        return f"{ours.task.noun}s/s", "samples", None
    return "", None, Why("different_work", tuple(sorted(units)))


def _rates(one: Side, work: str) -> list[Estimate]:
    """Return the rates of the side's valid runs that have one, by this count."""
    return [
        found for found in (runs.rate(record, work) for record in one.valid) if found is not None
    ]


def _rate(found: list[Estimate]) -> Rate | None:
    """Return the mean of the rates; None if there are none."""
    return Rate(*runs.over_runs(found)) if found else None


def _lacking(one: Side, found: list[Estimate]) -> Why | None:
    """Return why a side has no rates; None if it has."""
    return None if found else Why("no_rate" if one.valid else "no_valid_run", (one.name,))


def _answers(base: Side, new: Side, metric: str) -> tuple[Answers | None, Answers | None]:
    """Return how far answers are from those of the base's first finished run: of the base's other
    runs, and of the new side's runs; of several the farthest.

    Each is None if there is nothing to compare: no finished run on a side, no other run of the
    base, or another task or other data on the new side.
    """
    if not base.finished or not new.finished:
        return None, None
    first, *others = base.finished
    own = (
        engines.farthest([engines.answers(first, record, metric) for record in others])
        if others
        else None
    )
    theirs = new.finished
    if any(
        (one.task.name, one.fingerprint) != (first.task.name, first.fingerprint) for one in theirs
    ):
        return own, None
    return own, engines.farthest([engines.answers(first, record, metric) for record in theirs])


def _metrics(base: Side, new: Side) -> tuple[tuple[Change, ...], int]:
    """Return the metrics of valid runs whose means differ, in the order of the metric table, and
    the number of metrics that are equal.

    Metrics whose unit differs between records are left out, as are those that neither side knows.
    """
    valid = (*base.valid, *new.valid)
    out, equal = [], 0
    for name in table.in_order({name for record in valid for name in record.metrics}):
        unit, *others = {record.metrics[name].unit for record in valid if name in record.metrics}
        if others:  # such as tokens/s on one side and questions/s on the other
            continue
        row = table.row(name, unit, valid[0].task)
        ours, theirs = ([runs.metric(record, name) for record in one.valid] for one in (base, new))
        found = _change(name, unit, row.better, row.form, ours, theirs)
        if found is not None and found.base == found.new:
            equal += 1
        elif found is not None:
            out.append(found)
    return tuple(out), equal


def _step_size(one: Side) -> float | None:
    """Return the mean number of tokens per step over the side's valid runs; None if it is unknown
    for one or there are none.
    """
    return stats.mean_of_all([spans.tokens_per_step(record) for record in one.valid])


def _phases(base: Side, new: Side, same_steps: bool) -> tuple[Change, ...]:
    """Return the mean seconds per step of each phase on both sides, in step order.

    A phase that a run does not have took 0 s in it, if the run has any phases. Lower is better only
    if both sides have steps of one size.
    """
    better = "lower" if same_steps else ""
    ours, theirs = ([spans.phases_per_step(record) for record in one.valid] for one in (base, new))

    def change(name: str) -> Change | None:
        """Return the change of one phase, in seconds per step; None if neither side knows it."""
        times = ([one.get(name, 0.0) if one else None for one in every] for every in (ours, theirs))
        return _change(name, "s", better, "seconds", *times)

    names = spans.phases_in_order({name for one in (*ours, *theirs) for name in one})
    return tuple(one for one in map(change, names) if one is not None)


def _change(
    name: str,
    unit: str,
    better: str,
    form: str,
    ours: list[float | None],
    theirs: list[float | None],
) -> Change | None:
    """Return the change of a number, given one value for each valid run of both sides; None if
    neither side knows it for all its runs.
    """
    base, new = stats.mean_of_all(ours), stats.mean_of_all(theirs)
    if base is None and new is None:
        return None
    known = [[one for one in values if one is not None] for values in (ours, theirs)]
    found = None if base is None or new is None else ratio.of_values(*known)
    return Change(name, unit, better, form, base, new, found)
