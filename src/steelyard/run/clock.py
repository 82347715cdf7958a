"""The only readers of a clock, and how far the clock of each host is from the parent's."""

import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

# Clocks that tick alike, beside the one that everything is timed with: what the kernel calls each.
OTHERS = {"raw": "CLOCK_MONOTONIC_RAW", "boottime": "CLOCK_BOOTTIME"}
# a text that the kernel writes: a library that stands in for libc's clocks does not see it
UPTIME = Path("/proc/uptime")
TRIES = 8

PINGS = 8  # quick ones, after hello


def now() -> float:
    """Monotonic seconds; on one host, the same timeline in every process."""
    return time.monotonic()


def busy() -> float:
    """CPU seconds that this process has used, all its threads together."""
    return time.process_time()


def every() -> dict[str, float]:
    """All clocks of this host at one moment: of several tries the one that took least, in which
    nothing came between.
    """
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


@dataclass(frozen=True)
class Reading:
    """One ping and its answer: when it was sent and heard here, and what the other clock said in
    between.
    """

    sent_s: float
    heard_s: float
    there_s: float

    @property
    def offset_s(self) -> float:
        """The other clock less ours, as if both ways took the same time."""
        return self.there_s - (self.sent_s + self.heard_s) / 2

    @property
    def uncertainty_s(self) -> float:
        """It can be off by no more than half of what both ways took."""
        return (self.heard_s - self.sent_s) / 2


class HostClock:
    """The clock of a host, from all readings so far. Two hosts drift apart, by seconds in a day:
    early and late readings both count. A clock that cannot be told from ours is ours."""

    def __init__(self) -> None:
        self._readings: list[Reading] = []

    def add(self, reading: Reading) -> None:
        self._readings.append(reading)

    def early(self) -> Reading | None:
        """The surest reading of the first ones, which the run's start is taken from."""
        return min(self._readings[:PINGS], key=lambda one: one.uncertainty_s, default=None)

    def late(self) -> Reading | None:
        """The surest of the last ones."""
        return min(self._readings[-PINGS:], key=lambda one: one.uncertainty_s, default=None)

    @property
    def offset_s(self) -> float:
        first = self.early()
        return 0.0 if first is None or self.same else first.offset_s

    @property
    def uncertainty_s(self) -> float | None:
        first = self.early()
        return None if first is None else first.uncertainty_s

    @property
    def same(self) -> bool:
        """Whether it may be our own."""
        return all(abs(one.offset_s) <= one.uncertainty_s for one in self._readings)

    def drift(self) -> float:
        """Seconds that it gains on ours in a second; 0 where the readings do not tell."""
        first, last = self.early(), self.late()
        if first is None or last is None or self.same:
            return 0.0
        gained = last.offset_s - first.offset_s
        passed = last.heard_s - first.heard_s
        if passed <= 0 or abs(gained) <= first.uncertainty_s + last.uncertainty_s:
            return 0.0
        return gained / passed
