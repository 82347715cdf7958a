"""Read clocks, and estimate how far each host's clock is from the parent's.

No other module reads a clock, so tests can inject their own. Pings between parent and node agent
give the readings of a `HostClock`.
"""

import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

# Clocks that advance at the same rate as the monotonic one, by the kernel's names.
OTHER_CLOCKS = {"raw": "CLOCK_MONOTONIC_RAW", "boottime": "CLOCK_BOOTTIME"}
# read as text from the kernel: a library that replaces libc's clocks cannot change it
UPTIME = Path("/proc/uptime")
TRIES = 8

PINGS = 8  # sent one right after the other when `hello` has arrived

# Bound here, before an engine is imported that may replace those of the module.
_read_monotonic_s, _read_process_s = time.monotonic, time.process_time
_read_clock_s, _sleep_s = time.clock_gettime, time.sleep


def now() -> float:
    """Return monotonic seconds; all processes of one host have the same timeline."""
    return _read_monotonic_s()


def read_cpu_time_s() -> float:
    """Return the CPU seconds that all threads of this process have used so far."""
    return _read_process_s()


def read_all_clocks() -> dict[str, float]:
    """Return the readings of all clocks of this host in seconds, by name (`monotonic`, `raw`,
    `boottime`, `uptime`; those that exist).

    They are read eight times, and the quickest try is returned: in that one the readings are
    closest together.
    """
    return min((_read_clocks_once() for _ in range(TRIES)), key=lambda reading: reading[0])[1]


def _read_clocks_once() -> tuple[float, dict[str, float]]:
    """Read every clock of this host once, and return how many seconds that took, and the readings
    in seconds by name (`monotonic`, `raw`, `boottime`, `uptime`); clocks that the system does not
    have are left out.
    """
    begin = now()
    readings = {"monotonic": begin}
    for name, constant in OTHER_CLOCKS.items():
        if hasattr(time, constant):
            readings[name] = _read_clock_s(getattr(time, constant))
    with suppress(OSError, ValueError, IndexError):  # a system without it
        readings["uptime"] = float(UPTIME.read_text().split()[0])
    return now() - begin, readings


def read_utc_time() -> str:
    """Return the current UTC date and time in ISO 8601 with milliseconds, as records state it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def sleep(seconds: float) -> None:
    """Suspend this thread for so many seconds."""
    _sleep_s(seconds)


@dataclass(frozen=True)
class PingReading:
    """One ping to another host and its answer: when it was sent and answered on our clock
    (`sent_s`, `heard_s`), and what the other host's clock showed in between (`remote_s`), all in
    monotonic seconds. `offset_s` and `uncertainty_s` follow from it.
    """

    sent_s: float
    heard_s: float
    remote_s: float

    @property
    def offset_s(self) -> float:
        """Seconds that the other clock is ahead of ours, if the ping and its answer took equally
        long.
        """
        return self.remote_s - (self.sent_s + self.heard_s) / 2

    @property
    def uncertainty_s(self) -> float:
        """Half of the round trip in seconds: the offset is wrong by no more than this."""
        return (self.heard_s - self.sent_s) / 2


class HostClock:
    """Another host's monotonic clock compared with ours, from the pings so far (`PingReading`),
    which `add` appends. `offset_s` is how far it was ahead at the start of the run (0 without
    readings), `uncertainty_s` by how much that may be wrong (None without readings);
    `estimate_drift` returns the seconds that it gains per second.

    Clocks of two hosts drift apart, by seconds in a day, so the best of the first and of the last
    `PINGS` readings are compared. If the offset of every reading is within its uncertainty,
    `is_same_clock` is True, and offset and drift are 0.
    """

    def __init__(self) -> None:
        self._readings: list[PingReading] = []

    def add(self, reading: PingReading) -> None:
        """Append the reading of one ping to those of this host's clock; the order of calls is that
        of time.
        """
        self._readings.append(reading)

    def find_early_reading(self) -> PingReading | None:
        """Return the reading of this host's clock with the least uncertainty among the first
        `PINGS`, or None without any.
        """
        return min(self._readings[:PINGS], key=lambda reading: reading.uncertainty_s, default=None)

    def find_late_reading(self) -> PingReading | None:
        """Return the reading of this host's clock with the least uncertainty among the last
        `PINGS`, or None without any.
        """
        return min(self._readings[-PINGS:], key=lambda reading: reading.uncertainty_s, default=None)

    @property
    def offset_s(self) -> float:
        """Seconds that the host's clock was ahead of ours at the start of the run; 0 without
        readings, or if it may be our own clock.
        """
        first = self.find_early_reading()
        return 0.0 if first is None or self.is_same_clock else first.offset_s

    @property
    def uncertainty_s(self) -> float | None:
        """Uncertainty of this host clock's `offset_s` in seconds: that of the best of the first
        `PINGS` readings, or None without readings.
        """
        first = self.find_early_reading()
        return None if first is None else first.uncertainty_s

    @property
    def is_same_clock(self) -> bool:
        """Whether this host's clock may be our own: the offset of every reading is within its
        uncertainty. True without readings.
        """
        return all(abs(reading.offset_s) <= reading.uncertainty_s for reading in self._readings)

    def estimate_drift(self) -> float:
        """Return the seconds that the host's clock gains on ours per second, from the best early
        and the best late ping; 0 without readings, if it may be our own clock, or if the change is
        within the uncertainty of the two.
        """
        first, last = self.find_early_reading(), self.find_late_reading()
        if first is None or last is None or self.is_same_clock:
            return 0.0
        gained = last.offset_s - first.offset_s
        passed = last.heard_s - first.heard_s
        if passed <= 0 or abs(gained) <= first.uncertainty_s + last.uncertainty_s:
            return 0.0
        return gained / passed
