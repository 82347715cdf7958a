"""The only readers of a clock."""

import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

# Clocks that tick alike, beside the one that everything is timed with: what the kernel calls each.
OTHERS = {"raw": "CLOCK_MONOTONIC_RAW", "boottime": "CLOCK_BOOTTIME"}
UPTIME = Path("/proc/uptime")  # a text that the kernel writes: a library that stands in for libc's clocks does not see it
TRIES = 8


def now() -> float:
    """Monotonic seconds; on one host, the same timeline in every process."""
    return time.monotonic()


def busy() -> float:
    """CPU seconds that this process has used, all its threads together."""
    return time.process_time()


def every() -> dict[str, float]:
    """All clocks of this host at one moment: of several tries the one that took least, in which nothing came between."""
    return min((_read() for _ in range(TRIES)), key=lambda one: one[0])[1]


def _read() -> tuple[float, dict[str, float]]:
    begin = now()
    out = {"monotonic": begin}
    for name, number in OTHERS.items():
        if hasattr(time, number):
            out[name] = time.clock_gettime(getattr(time, number))
    with suppress(OSError, ValueError, IndexError):  # a system without it
        out["uptime"] = float(UPTIME.read_text().split()[0])
    return now() - begin, out


def today() -> str:
    """The calendar time of a record, UTC."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def sleep(seconds: float) -> None:
    time.sleep(seconds)
