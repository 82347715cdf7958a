"""Compare a record of an engine with one of engine `torch` on the same question: whether it
computes the same.

Behind `steelyard conform`. `CHECKS` lists what is compared. Counts must be equal; answers, losses
and norms may differ by what the order of additions explains, in the precision of the matmuls.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from steelyard.data.division import COUNT_NAMES
from steelyard.metrics import passes
from steelyard.record.record import Record

# Largest relative difference of two engines' numbers, by precision of the matmuls.
LOSS_TOLERANCE = {"fp32": 1e-4, "tf32": 2e-3, "fp16": 5e-3, "bf16": 1e-2, "fp8": 3e-2}
NORM_TOLERANCE = {"fp32": 1e-3, "tf32": 1e-2, "fp16": 2e-2, "bf16": 5e-2, "fp8": 1e-1}
# by name of a step's value; others are judged as a loss
FIRST_STEP_TOLERANCES = {"loss": LOSS_TOLERANCE, "grad_norm": NORM_TOLERANCE}
# Share of answers that may differ: random weights leave near ties.
ANSWER_TOLERANCE = {"fp32": 0.02, "tf32": 0.05, "fp16": 0.05, "bf16": 0.05, "fp8": 0.2}
MEAN_METRICS = ("loss", "loss_before", "perplexity_last")  # means over all rows of the data


@dataclass(frozen=True)
class ConformCheck:
    """One quantity of two records compared, and whether it conforms: a row of `steelyard conform`,
    made by `check_conformity`.

    `case` is the name of the case, `what` names the quantity, such as "train counts". `ours` is the
    value of engine torch, `theirs` that of the engine under test; both are texts for status and
    counts. `apart` and `allowed` are shares (0.01 is 1 %): the relative difference, or the share of
    answers that differ. `apart` is None if nothing could be compared. Property `ok`: `apart` is
    known and at most `allowed`.
    """

    case: str
    what: str
    ours: float | str | None
    theirs: float | str | None
    apart: float | None
    allowed: float

    @property
    def ok(self) -> bool:
        """Return whether the compared quantity conforms: the difference `apart` is known and at
        most `allowed`.
        """
        return self.apart is not None and self.apart <= self.allowed


def check_conformity(ours: Record, theirs: Record) -> list[ConformCheck]:
    """Return one row for each compared quantity, in this order: status, counts of each pass, values
    of the first step, mean losses, answers of each pass. `ours` is the record of engine torch,
    `theirs` of the engine under test. Nothing is raised if they differ.
    """
    return [row for rows in CHECKS for row in rows(ours, theirs)]


def _relative_difference(ours: float | None, theirs: float | None) -> float | None:
    """Return the absolute difference of two numbers as a share of ours (of at least 1e-30); None if
    one of them is unknown.
    """
    if ours is None or theirs is None:
        return None
    return abs(theirs - ours) / max(abs(ours), 1e-30)


def _check_status(ours: Record, theirs: Record) -> Iterator[ConformCheck]:
    """Yield one row "status", which conforms only if both runs are valid (else `apart` is None);
    its values are texts of status and reason codes.
    """
    our_text, their_text = (
        " ".join([record.status, *(reason.code for reason in record.reasons)])
        for record in (ours, theirs)
    )
    are_valid = ours.status == theirs.status == "valid"
    yield ConformCheck(
        theirs.case.name, "status", our_text, their_text, 0.0 if are_valid else None, 0.0
    )


def _check_counts(ours: Record, theirs: Record) -> Iterator[ConformCheck]:
    """Yield for each pass of our record a row "PASS counts", which conforms only if all counts
    (tokens, samples, logits, pairs, square), summed over replicas, are equal. The values are the
    counts, joined by spaces; "/" is a missing one.
    """
    for pass_name in dict.fromkeys(window.pass_name for window in ours.passes):
        our_text, their_text = (
            " ".join(str(passes.sum_counts(record, pass_name).get(key, "/")) for key in COUNT_NAMES)
            for record in (ours, theirs)
        )
        yield ConformCheck(
            theirs.case.name,
            f"{pass_name} counts",
            our_text,
            their_text,
            float(our_text != their_text),
            0.0,
        )


def _check_first_step(ours: Record, theirs: Record) -> Iterator[ConformCheck]:
    """Yield a row "step 1 NAME" for each value that the kind of work records (loss, gradient norm
    in training; none in scoring), of rank 0's first working step in the headline pass; a value that
    is missing or not finite does not conform.

    The allowed relative difference depends on the precision of the matmuls and is 0 for an unknown
    one.
    """
    kind, precision = ours.task.kind_row, ours.question.precision.matmul
    for key in kind.step_values:
        first_steps = [
            next(iter(passes.group_working_steps(item, kind.headline[0]).get(0, [])), None)
            for item in (ours, theirs)
        ]
        our_value, their_value = (
            None if item is None else item.values.get(key) for item in first_steps
        )
        allowed = FIRST_STEP_TOLERANCES.get(key, LOSS_TOLERANCE).get(precision, 0.0)
        yield ConformCheck(
            theirs.case.name,
            f"step 1 {key}",
            our_value,
            their_value,
            _relative_difference(our_value, their_value),
            allowed,
        )


def _check_mean_metrics(ours: Record, theirs: Record) -> Iterator[ConformCheck]:
    """Yield a row for each metric of `MEAN_METRICS` that our record has a value for; it does not
    conform if their record has none. The allowed relative difference is that of a loss in the
    precision of the matmuls.
    """
    precision = ours.question.precision.matmul
    for metric_name in MEAN_METRICS:
        our_metric, their_metric = ours.metrics.get(metric_name), theirs.metrics.get(metric_name)
        if our_metric is not None and our_metric.value is not None:
            their_value = None if their_metric is None else their_metric.value
            yield ConformCheck(
                theirs.case.name,
                metric_name,
                our_metric.value,
                their_value,
                _relative_difference(our_metric.value, their_value),
                LOSS_TOLERANCE.get(precision, 0.0),
            )


def _check_answers(ours: Record, theirs: Record) -> Iterator[ConformCheck]:
    """Yield for each pass of our record's outputs a row "PASS answers" with the share of answers
    that are equal (`theirs`; `ours` is 1.0) and that differ (`apart`); nothing if the task does not
    define agreement.

    The answers of both records are put into one table, as if they were two passes of one run. If
    their record lacks the pass, `apart` is None and the row does not conform.
    """
    agreement, precision = ours.task.agreement, ours.question.precision.matmul
    if agreement is None:
        return
    for pass_name, our_answers in ours.outputs.get("passes", {}).items():
        their_answers = theirs.outputs.get("passes", {}).get(pass_name)
        merged_outputs = ours.outputs | {"passes": {"val": our_answers, "infer": their_answers}}
        share = (
            None
            if their_answers is None
            else agreement(ours.task.outputs.model_validate(merged_outputs), "val", "infer")
        )
        apart = None if share is None else 1 - share
        yield ConformCheck(
            theirs.case.name,
            f"{pass_name} answers",
            1.0,
            share,
            apart,
            ANSWER_TOLERANCE.get(precision, 0.0),
        )


CHECKS: tuple[Callable[[Record, Record], Iterator[ConformCheck]], ...] = (
    _check_status,
    _check_counts,
    _check_first_step,
    _check_mean_metrics,
    _check_answers,
)
