"""Whether an engine computes what engine `torch` computes: two records of one question, set side by
side.

What is compared is a table of rows. Counts must be the same; answers, losses and norms within what
the order of additions in the precision of the matmuls explains.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from steelyard.data.division import COUNTED
from steelyard.metrics import spans
from steelyard.record.record import Record

# How far two engines' numbers may be apart, as a share of ours, by what matmuls run in.
LOSS = {"fp32": 1e-4, "tf32": 2e-3, "fp16": 5e-3, "bf16": 1e-2, "fp8": 3e-2}
NORM = {"fp32": 1e-3, "tf32": 1e-2, "fp16": 2e-2, "bf16": 5e-2, "fp8": 1e-1}
FIRST_STEP = {"loss": LOSS, "grad_norm": NORM}  # by name of a step's value; others as a loss
# Answers that may differ: random weights leave near ties.
AGREE = {"fp32": 0.02, "tf32": 0.05, "fp16": 0.05, "bf16": 0.05, "fp8": 0.2}
NAMED = ("loss", "loss_before", "perplexity_last")  # metrics that are means over all rows


@dataclass(frozen=True)
class Compared:
    """A quantity of both. `apart` and `allowed` are shares."""

    case: str
    what: str
    ours: float | str | None
    theirs: float | str | None
    apart: float | None
    allowed: float

    @property
    def ok(self) -> bool:
        return self.apart is not None and self.apart <= self.allowed


def compare(ours: Record, theirs: Record) -> list[Compared]:
    """`ours` is of engine torch."""
    return [row for rows in ROWS for row in rows(ours, theirs)]


def _apart(ours: float | None, theirs: float | None) -> float | None:
    """None where one of them is not known: then nothing was shown."""
    if ours is None or theirs is None:
        return None
    return abs(theirs - ours) / max(abs(ours), 1e-30)


def _status(ours: Record, theirs: Record) -> Iterator[Compared]:
    """A run that is not valid shows nothing, whoever is to blame."""
    mine, other = (
        " ".join([one.status, *(reason.code for reason in one.reasons)]) for one in (ours, theirs)
    )
    sound = ours.status == theirs.status == "valid"
    yield Compared(theirs.case.name, "status", mine, other, 0.0 if sound else None, 0.0)


def _counts(ours: Record, theirs: Record) -> Iterator[Compared]:
    for name in dict.fromkeys(window.pass_name for window in ours.passes):
        mine, other = (
            " ".join(str(spans.total(one, name).get(key, "/")) for key in COUNTED)
            for one in (ours, theirs)
        )
        yield Compared(theirs.case.name, f"{name} counts", mine, other, float(mine != other), 0.0)


def _first_step(ours: Record, theirs: Record) -> Iterator[Compared]:
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
    """How many answers differ: both engines' put into one table as if they were two passes."""
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
