"""Decide which runs' rates carry a statement: what a record's status is today, and which runs
together have a proven rate.

A rate is proven by the 95 % interval of its own steps, or by the spread of at least three repeats,
which must be as small as the case asks of an interval. Everything that compares rates or names a
best one selects its runs here; `validity.py` sets the status of new records by the same rule.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from steelyard.metrics.estimates import Estimate, average_known_runs, estimate_rate
from steelyard.record.record import Record, Status

Item = TypeVar("Item")

UNPROVEN_CODE: Final = "few_steps"  # the reason code of an unproven run
FIRST_VERSION_WITH_UNPROVEN = 5  # of the formulas
MIN_PROVING_REPEATS = 3  # runs without intervals of their own that prove a rate together
RATE_METRIC = "tokens_per_device_s"  # the metric whose interval proves a rate
RIGHT_STATUSES = ("valid", "unproven")  # nothing speaks against the run
# from best to worst
STATUS_ORDER: tuple[Status, ...] = ("valid", "unproven", "invalid", "failed")


def derive_status(has_failed: bool, reason_codes: Iterable[str]) -> Status:
    """Return the status that follows from a run's failure and the codes of its reasons: "failed",
    else "invalid" for any reason but `UNPROVEN_CODE`, else "unproven" for that one, else "valid".
    """
    codes = set(reason_codes)
    if has_failed:
        return "failed"
    if codes - {UNPROVEN_CODE}:
        return "invalid"
    return "unproven" if codes else "valid"


def is_proven(size: str, rate: float | None, interval: tuple[float, float] | None) -> bool:
    """Return whether a run's own steps prove its rate: it has a 95 % interval. True for size smoke,
    which measures nothing, and if there is no rate to prove.
    """
    return size == "smoke" or rate is None or interval is not None


def find_status(record: Record) -> Status:
    """Return the status of a record by today's rule: its stored one, but "unproven" for a valid
    record of an earlier formulas version whose rate has no interval. Pages and comparisons use this
    one; the stored one stays as it was published.
    """
    rate = record.metrics.get(RATE_METRIC)
    if (
        record.status != "valid"
        or rate is None
        or is_proven(record.case.size, rate.value, rate.interval)
    ):
        return record.status
    return "unproven"


def is_valid(record: Record) -> bool:
    """Return whether a record is valid by today's rule (`find_status`)."""
    return find_status(record) == "valid"


def is_answer_right(record: Record) -> bool:
    """Return whether nothing speaks against a record: it is valid, or only too short for an
    interval (unproven).
    """
    return find_status(record) in RIGHT_STATUSES


@dataclass(frozen=True)
class RunEvidence:
    """The facts that decide whether a run counts among its repeats: its `status` by today's rule,
    its `rate` (None if unknown), and the widest interval that its case allows, as a share of the
    rate (`max_interval`; None: any).
    """

    status: str
    rate: Estimate | None = None
    max_interval: float | None = None


def select_proven(records: Iterable[Record]) -> list[Record]:
    """Return those of some repeats whose rates may be averaged and compared
    (`select_proven_items`).
    """
    return select_proven_items(
        records,
        lambda record: RunEvidence(
            find_status(record), estimate_rate(record), record.case.max_interval
        ),
    )


def select_proven_items(
    items: Iterable[Item], describe: Callable[[Item], RunEvidence]
) -> list[Item]:
    """Return those of some repeats whose rates may be averaged and compared: the valid ones and, if
    these are at least three together with the unproven ones, those too. Repeats prove by their
    spread what a short run cannot prove alone, if the 95 % interval of their mean is as narrow as
    the case asks of a single run.

    `describe` returns what is known of an item.
    """
    described = [(item, describe(item)) for item in items]
    right = [(item, run) for item, run in described if run.status in RIGHT_STATUSES]
    valid = [item for item, run in right if run.status == "valid"]
    is_proof = len(right) >= MIN_PROVING_REPEATS and (
        len(valid) == len(right) or _is_spread_allowed([run for _, run in right])
    )
    return [item for item, _ in right] if is_proof else valid


def _is_spread_allowed(runs: Sequence[RunEvidence]) -> bool:
    """Return whether the 95 % interval of the mean of these runs' rates is no wider than the case
    allows; True if no rate is known, or there is no limit.
    """
    mean, limit = average_known_runs(run.rate for run in runs)[0], runs[0].max_interval
    if mean is None or mean.interval is None or limit is None:
        return True
    return mean.interval[1] - mean.interval[0] <= limit * mean.value


def select_not_proven(records: Sequence[Record]) -> list[Record]:
    """Return those of some repeats whose rates are neither averaged nor compared: all that
    `select_proven` leaves out.
    """
    counted = {id(record) for record in select_proven(records)}
    return [record for record in records if id(record) not in counted]


def select_shown(records: Sequence[Record]) -> list[Record]:
    """Return those of some repeats whose values a row of means shows: the runs that prove a rate;
    if there are none, those that nothing speaks against, else those that finished.
    """
    return (
        select_proven(records)
        or [record for record in records if is_answer_right(record)]
        or [record for record in records if record.status != "failed"]
    )


def average_shown(
    records: Sequence[Record], estimate: Callable[[Record], Estimate | None]
) -> Estimate | None:
    """Return the mean of an estimate over the repeats of `select_shown` that have it, with its 95 %
    interval; None if none has it. Several runs that prove nothing together have no interval, which
    would look like a proof.
    """
    shown = select_shown(records)
    mean, source = average_known_runs(map(estimate, shown))
    if mean is None or source != "runs" or select_proven(records):
        return mean
    return Estimate(mean.value)


def list_reason_codes(record: Record) -> list[str]:
    """Return the codes of a record's reasons, each once, and `UNPROVEN_CODE` for a record of an
    earlier formulas version that is unproven by today's rule.
    """
    codes = list(dict.fromkeys(reason.code for reason in record.reasons))
    is_unproven = find_status(record) == "unproven" and UNPROVEN_CODE not in codes
    return [*codes, UNPROVEN_CODE] if is_unproven else codes


def find_group_status(records: Sequence[Record]) -> Status:
    """Return the status of repeats as one result: "valid" if their rate is proven
    (`select_proven`), else the best status of the runs. `records` must not be empty.
    """
    if select_proven(records):
        return "valid"
    statuses = {find_status(record) for record in records}
    return next(status for status in STATUS_ORDER if status in statuses)
