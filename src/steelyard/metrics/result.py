"""What a formula finds: a value, or the reason why there is none."""

from collections.abc import Callable
from dataclasses import dataclass

from steelyard.record.record import Check, Record, Value

GIB = 1 << 30

Finding = tuple[Check | None, str | None, str | None]  # a check, its reason code if it fails, a note
Rule = Callable[[Record, dict[str, Value]], list[Finding]]


@dataclass(frozen=True)
class Result:
    """A value with what belongs beside it; a value of None has its reason in `note`."""

    value: float | None
    note: str | None = None
    interval: tuple[float, float] | None = None


def absent(name: str) -> Result:
    return Result(None, f"the {name} pass was not run or did not finish")


def work_name(record: Record) -> str:
    """What is counted as work: tokens where all are computed, samples where sharing them is allowed, or where that is how
    the published rows count."""
    return "tokens" if record.case.division == "closed" and not record.task.rates_in_samples else "samples"
