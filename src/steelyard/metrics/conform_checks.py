"""Compare a record of an engine with one of engine `torch` on the same question: whether it
computes the same, with the weights and the model that were asked for.

Behind `steelyard conform`. `CHECKS` lists what is compared. Counts must be equal; answers, losses
and norms may differ by what the order of additions explains, in the precision of the matmuls.
`proportion_checks.py` adds what only the time of several runs can show.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from steelyard.data.division import COUNT_NAMES
from steelyard.metrics import passes, standing
from steelyard.plan import flops
from steelyard.record.record import Record

# Largest relative difference of two engines' numbers, by precision of the matmuls.
LOSS_TOLERANCE = {"fp32": 1e-4, "tf32": 2e-3, "fp16": 5e-3, "bf16": 1e-2, "fp8": 3e-2}
NORM_TOLERANCE = {"fp32": 1e-3, "tf32": 1e-2, "fp16": 2e-2, "bf16": 5e-2, "fp8": 1e-1}
# by name of a step's value; others are judged as a loss
STEP_TOLERANCES = {"loss": LOSS_TOLERANCE, "grad_norm": NORM_TOLERANCE}
# Share of answers that may differ: random weights leave near ties.
ANSWER_TOLERANCE = {"fp32": 0.02, "tf32": 0.05, "fp16": 0.05, "bf16": 0.05, "fp8": 0.2}
# Least probability that two rows have different answers, for answers of one row given to another
# to be seen: a third of 48 rows changed at random then differ by 10 % on average.
MIN_VARIETY = 0.3
MEAN_METRICS = ("loss", "loss_before", "perplexity_last")  # means over all rows of the data
# Rows that an engine may add to a vocabulary, which its detail `padded_vocab` states. Megatron's
# default pads to a multiple of 128 on each of up to 8 tensor-parallel ranks.
MAX_PADDING_ROWS = 1024


@dataclass(frozen=True)
class ConformCheck:
    """One quantity of two records compared, and whether it conforms: a row of `steelyard conform`,
    made by `check_conformity`.

    `case` is the name of the case, `what` names the quantity, such as "train counts". `ours` is the
    value of engine torch, `theirs` that of the engine under test; both are texts for status and
    counts. `apart` and `allowed` are shares (0.01 is 1 %): the relative difference, or the share of
    answers that differ. `apart` is None if nothing could be compared. `untested` says why a
    quantity was not tested, None if it was. Property `ok`: None if it was not tested, else whether
    `apart` is known and at most `allowed`.
    """

    case: str
    what: str
    ours: float | str | None
    theirs: float | str | None
    apart: float | None
    allowed: float
    untested: str | None = None

    @property
    def ok(self) -> bool | None:
        """Return whether the compared quantity conforms: the difference `apart` is known and at
        most `allowed`. None if it was not tested, which speaks neither for nor against the engine.
        """
        if self.untested is not None:
            return None
        return self.apart is not None and self.apart <= self.allowed


def check_conformity(ours: Record, theirs: Record) -> list[ConformCheck]:
    """Return one row for each compared quantity, in this order: status, weights, parameters, counts
    of each pass, values of each step, mean losses, answers of each pass. `ours` is the record of
    engine torch, `theirs` of the engine under test. Nothing is raised if they differ.
    """
    return [row for rows in CHECKS for row in rows(ours, theirs)]


def check_answers(ours: Record, theirs: Record) -> list[ConformCheck]:
    """Return one row for each compared answer of two finished runs of one question: of training the
    values of the first step, because later ones depend on chance too; of other work the mean losses
    and the answers of each pass. Empty for training with dropout, which engines draw in different
    orders.
    """
    if not ours.task.kind_row.trains:
        return [*_check_mean_metrics(ours, theirs), *_check_answers(ours, theirs)]
    has_dropout = bool(getattr(ours.question.model, "dropout", 0.0))
    if has_dropout:
        return []
    return [row for row in _check_steps(ours, theirs) if row.what.startswith("step 1 ")]


def check_answers_again(ours: Record, theirs: Record, condition: str) -> list[ConformCheck]:
    """Return the rows of `ANSWER_CHECKS` (status, counts, losses, answers) for another run of the
    engine under test, `theirs`, under a condition that must not change its answers; the condition's
    name is put behind each quantity. Answers that agree are not tested if they hardly differ from
    row to row (`has_variety`).
    """
    rows = [row for rows in ANSWER_CHECKS for row in rows(ours, theirs)]
    if not has_variety(ours):
        reason = "answers to different rows are the same"
        answers = {row.what for row in _check_answers(ours, theirs) if row.ok}
        rows = [replace(row, untested=reason) if row.what in answers else row for row in rows]
    return [replace(row, what=f"{row.what}, {condition}") for row in rows]


def has_variety(record: Record) -> bool:
    """Return whether answers differ so much from row to row, in every pass, that an answer given to
    the wrong row is likely to be seen; True for tasks whose answers are numbers.
    """
    measure = record.task.variety
    if measure is None:
        return True
    outputs = record.task.outputs.model_validate(record.outputs)
    varieties = [measure(outputs, name) for name in record.outputs.get("passes", {})]
    return all(variety is not None and variety >= MIN_VARIETY for variety in varieties)


def format_status(record: Record) -> str:
    """Return a record's status and the codes of its reasons, joined by spaces."""
    return " ".join([standing.find_status(record), *(reason.code for reason in record.reasons)])


def _relative_difference(ours: float | None, theirs: float | None) -> float | None:
    """Return the absolute difference of two numbers as a share of ours (of at least 1e-30); None if
    one of them is unknown.
    """
    if ours is None or theirs is None:
        return None
    return abs(theirs - ours) / max(abs(ours), 1e-30)


def _check_status(ours: Record, theirs: Record) -> Iterator[ConformCheck]:
    """Yield one row "status", which conforms only if nothing speaks against either run: both are
    valid, or too short for an interval (else `apart` is None); its values are texts of status and
    reason codes.
    """
    are_right = standing.is_answer_right(ours) and standing.is_answer_right(theirs)
    yield ConformCheck(
        theirs.case.name,
        "status",
        format_status(ours),
        format_status(theirs),
        0.0 if are_right else None,
        0.0,
    )


def _check_weights(ours: Record, theirs: Record) -> Iterator[ConformCheck]:
    """Yield one row "weights": the engine must state the source of weights that was asked for. That
    is random ones with the question's seed, since `conform` names no checkpoint. An engine that
    states no seed is judged by the source alone.
    """
    our_text, their_text = (
        " ".join(
            str(value)
            for value in (record.weights.source, getattr(record.weights, "seed", None))
            if value is not None
        )
        for record in (ours, theirs)
    )
    asked = {"random", f"random {ours.question.seed}"}
    yield ConformCheck(
        theirs.case.name, "weights", our_text, their_text, float(their_text not in asked), 0.0
    )


def _check_parameters(ours: Record, theirs: Record) -> Iterator[ConformCheck]:
    """Yield one row "parameters": the number that the engine says it holds (`details.parameters`)
    must be that of the question's model; not tested if it does not say. Both runs use one device,
    which holds the whole model.

    A vocabulary that the engine pads, as its detail `padded_vocab` says, counts with its padding,
    of at most `MAX_PADDING_ROWS` rows.
    """
    model = ours.question.model
    stated = getattr(theirs.engine.details, "parameters", None)
    padded = getattr(theirs.engine.details, "padded_vocab", None)
    if isinstance(padded, int) and 0 <= padded - model.vocab <= MAX_PADDING_ROWS:
        model = model.model_copy(update={"vocab": padded})
    expected = flops.count_model_parameters(model)
    is_number = isinstance(stated, int) and not isinstance(stated, bool)
    yield ConformCheck(
        theirs.case.name,
        "parameters",
        str(expected),
        None if stated is None else str(stated),
        _relative_difference(expected, stated) if is_number else None,
        0.0,
        "the engine does not say how many it holds" if stated is None else None,
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


def _check_steps(ours: Record, theirs: Record) -> Iterator[ConformCheck]:
    """Yield a row "step N NAME" for each value that the kind of work records (loss, gradient norm
    in training; none in scoring) and each of rank 0's working steps in the headline pass of our
    record; a value that is missing or not finite does not conform.

    The allowed relative difference depends on the precision of the matmuls and is 0 for an unknown
    one.
    """
    kind, precision = ours.task.kind_row, ours.question.precision.matmul
    our_steps, their_steps = (
        passes.group_working_steps(record, kind.headline[0]).get(0, []) for record in (ours, theirs)
    )
    for index, our_step in enumerate(our_steps):
        their_values = their_steps[index].values if index < len(their_steps) else {}
        for key in kind.step_values:
            our_value, their_value = our_step.values.get(key), their_values.get(key)
            yield ConformCheck(
                theirs.case.name,
                f"step {index + 1} {key}",
                our_value,
                their_value,
                _relative_difference(our_value, their_value),
                STEP_TOLERANCES.get(key, LOSS_TOLERANCE).get(precision, 0.0),
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


RecordCheck = Callable[[Record, Record], Iterable[ConformCheck]]
CHECKS: tuple[RecordCheck, ...] = (
    _check_status,
    _check_weights,
    _check_parameters,
    _check_counts,
    _check_steps,
    _check_mean_metrics,
    _check_answers,
)
# what another run of the same question must give again
ANSWER_CHECKS: tuple[RecordCheck, ...] = (
    _check_status,
    _check_counts,
    _check_mean_metrics,
    _check_answers,
)
