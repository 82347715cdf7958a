"""Compare a record of an engine with one of engine `torch` on the same question: whether it
computes the same.

Behind `steelyard conform`. `CHECKS` lists what is compared. Counts must be equal; answers, losses
and norms may differ by what the order of additions explains, in the precision of the matmuls.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from steelyard.data.division import COUNTED
from steelyard.metrics import spans
from steelyard.record.record import Record

# Largest relative difference of two engines' numbers, by precision of the matmuls.
LOSS = {"fp32": 1e-4, "tf32": 2e-3, "fp16": 5e-3, "bf16": 1e-2, "fp8": 3e-2}
NORM = {"fp32": 1e-3, "tf32": 1e-2, "fp16": 2e-2, "bf16": 5e-2, "fp8": 1e-1}
# by name of a step's value; others are judged as a loss
FIRST_STEP = {"loss": LOSS, "grad_norm": NORM}
# Share of answers that may differ: random weights leave near ties.
AGREE = {"fp32": 0.02, "tf32": 0.05, "fp16": 0.05, "bf16": 0.05, "fp8": 0.2}
NAMED = ("loss", "loss_before", "perplexity_last")  # means over all rows of the data


@dataclass(frozen=True)
class Compared:
    """One quantity of both records, and whether it conforms.

    `ours` is of engine torch. `apart` and `allowed` are shares: the relative difference, or the
    share of answers that differ. `apart` is None if nothing could be compared, which does not
    conform.
    """

    case: str
    what: str
    ours: float | str | None
    theirs: float | str | None
    apart: float | None
    allowed: float

    @property
    def ok(self) -> bool:
        """Return whether the difference is known and at most `allowed`."""
        return self.apart is not None and self.apart <= self.allowed


def compare(ours: Record, theirs: Record) -> list[Compared]:
    """Return one row for each compared quantity: status, counts, values of the first step, mean
    losses, answers. `ours` is the record of engine torch.
    """
    return [row for rows in ROWS for row in rows(ours, theirs)]


def _apart(ours: float | None, theirs: float | None) -> float | None:
    """Return the difference as a share of ours; None if one of them is unknown."""
    if ours is None or theirs is None:
        return None
    return abs(theirs - ours) / max(abs(ours), 1e-30)


def _status(ours: Record, theirs: Record) -> Iterator[Compared]:
    """Yield whether both runs are valid; a run that is not valid shows nothing. The values are
    status and reason codes.
    """
    mine, other = (
        " ".join([one.status, *(reason.code for reason in one.reasons)]) for one in (ours, theirs)
    )
    sound = ours.status == theirs.status == "valid"
    yield Compared(theirs.case.name, "status", mine, other, 0.0 if sound else None, 0.0)


def _counts(ours: Record, theirs: Record) -> Iterator[Compared]:
    """Yield for each pass of our record whether all counts (tokens, samples, ...) are equal. The
    values are the counts, joined by spaces; "/" is a missing one.
    """
    for name in dict.fromkeys(window.pass_name for window in ours.passes):
        mine, other = (
            " ".join(str(spans.total(one, name).get(key, "/")) for key in COUNTED)
            for one in (ours, theirs)
        )
        yield Compared(theirs.case.name, f"{name} counts", mine, other, float(mine != other), 0.0)


def _first_step(ours: Record, theirs: Record) -> Iterator[Compared]:
    """Yield each value (loss, gradient norm) of rank 0's first working step in the headline pass of
    training; nothing in scoring.
    """
    kind, precision = ours.task.kind_row, ours.question.precision.matmul
    for key in kind.step_values:
        first = [
            next(iter(spans.working(one, kind.headline[0]).get(0, [])), None)
            for one in (ours, theirs)
        ]
        a, b = (None if one is None else one.values.get(key) for one in first)
        allowed = FIRST_STEP.get(key, LOSS).get(precision, 0.0)
        yield Compared(theirs.case.name, f"step 1 {key}", a, b, _apart(a, b), allowed)


def _means(ours: Record, theirs: Record) -> Iterator[Compared]:
    """Yield each of the metrics in `MEAN_METRICS` that our record has."""
    precision = ours.question.precision.matmul
    for name in NAMED:
        mine, other = ours.metrics.get(name), theirs.metrics.get(name)
        if mine is not None and mine.value is not None:
            b = None if other is None else other.value
            yield Compared(
                theirs.case.name,
                name,
                mine.value,
                b,
                _apart(mine.value, b),
                LOSS.get(precision, 0.0),
            )


def _answers(ours: Record, theirs: Record) -> Iterator[Compared]:
    """Yield for each pass of our record the share of answers that differ; nothing if the task does
    not define agreement.

    The answers of both records are put into one table, as if they were two passes of one run. If
    their record lacks the pass, `apart` is None and the row does not conform.
    """
    agreement, precision = ours.task.agreement, ours.question.precision.matmul
    if agreement is None:
        return
    for name, mine in ours.outputs.get("passes", {}).items():
        other = theirs.outputs.get("passes", {}).get(name)
        both = ours.outputs | {"passes": {"val": mine, "infer": other}}
        share = (
            None
            if other is None
            else agreement(ours.task.outputs.model_validate(both), "val", "infer")
        )
        apart = None if share is None else 1 - share
        yield Compared(
            theirs.case.name, f"{name} answers", 1.0, share, apart, AGREE.get(precision, 0.0)
        )


ROWS: tuple[Callable[[Record, Record], Iterator[Compared]], ...] = (
    _status,
    _counts,
    _first_step,
    _means,
    _answers,
)
