"""The only readers of a clock."""

import time
from datetime import UTC, datetime


def now() -> float:
    """Monotonic seconds; on one host, the same timeline in every process."""
    return time.monotonic()


def today() -> str:
    """The calendar time of a record, UTC."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def sleep(seconds: float) -> None:
    time.sleep(seconds)
