"""What a formula finds, a value or the reason why there is none, and what a rule finds: checks and
notes.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from steelyard.record.record import Record, Value
from steelyard.words import Message, Values

GIB = 1 << 30


@dataclass(frozen=True)
class Judged:
    """A check and what it says."""

    name: str
    ok: bool
    said: Message


@dataclass(frozen=True)
class Finding:
    """A check with its reason code, which counts where it is not ok; a note; or both."""

    check: Judged | None = None
    code: str | None = None
    note: Message | None = None


Rule = Callable[[Record, dict[str, Value]], Iterable[Finding]]


def judged(
    name: str, ok: bool, code: str, said: str, values: Values, note: Message | None = None
) -> Finding:
    """A check that says one thing where it holds and another where it does not: `said` is the code
    of the pair.
    """
    return Finding(Judged(name, ok, Message(f"{said}.{'ok' if ok else 'bad'}", values)), code, note)


def failed(name: str, code: str, said: str, values: Values) -> Finding:
    """A check that is only made where something is wrong."""
    return judged(name, False, code, said, values)


def note(message: Message) -> Finding:
    return Finding(note=message)


@dataclass(frozen=True)
class Result:
    """A value with what belongs beside it; a value of None has its reason in `note`."""

    value: float | None
    note: Message | None = None
    interval: tuple[float, float] | None = None


def absent(name: str) -> Result:
    return Result(None, Message("metric.absent", {"pass": name}))


def work_name(record: Record) -> str:
    """What is counted as work: tokens where all are computed, samples where sharing them is
    allowed, or where that is how the published rows count."""
    return (
        "tokens"
        if record.case.division == "closed" and not record.task.rates_in_samples
        else "samples"
    )
