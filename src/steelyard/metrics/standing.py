"""Decide which runs' rates carry a statement: what a record's status is today, and which runs
together have a proven rate.

A rate is proven by the 95 % interval of its own steps, or by the spread of at least three repeats.
Everything that compares rates or names a best one selects its runs here; `validity.py` sets the
status of new records by the same rule.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeVar

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


def select_proven(records: Iterable[Record]) -> list[Record]:
    """Return those of some repeats whose rates may be averaged and compared (`select_proven_items`
    by `find_status`).
    """
    return select_proven_items(records, find_status)


def select_proven_items(items: Iterable[Item], status_of: Callable[[Item], str]) -> list[Item]:
    """Return those of some repeats whose rates may be averaged and compared: the valid ones and, if
    these are at least three together with the unproven ones, those too. Repeats prove by their
    spread what a short run cannot prove alone.

    `status_of` returns an item's status by today's rule.
    """
    right = [item for item in items if status_of(item) in RIGHT_STATUSES]
    if len(right) >= MIN_PROVING_REPEATS:
        return right
    return [item for item in right if status_of(item) == "valid"]


def select_not_proven(records: Sequence[Record]) -> list[Record]:
    """Return those of some repeats whose rates are neither averaged nor compared: all that
    `select_proven` leaves out.
    """
    counted = {id(record) for record in select_proven(records)}
    return [record for record in records if id(record) not in counted]


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
