"""Telemetry: the agent of a host samples its devices while workers run, the parent keeps what is
sent.
"""

from collections.abc import Callable
from itertools import zip_longest
from threading import Event, Lock, Thread
from typing import Any

from steelyard.accelerators.events import Clock
from steelyard.accelerators.row import Reading, Source
from steelyard.record.facts import Columns, Series
from steelyard.run.clock import now

PERIOD_S = 0.2
MAX_ROWS = 4096

Rows = dict[str, list[Any]]


class Sampler:
    """Samples all sources from `start`, which is called before any worker is there, until `stop`.
    `take` hands over what is new. After so many rows the period doubles, and whoever keeps them
    drops every second one: a long run has no more."""

    def __init__(
        self,
        sources: list[Source],
        origin_s: float,
        clock: Clock = now,
        period_s: float = PERIOD_S,
        max_rows: int = MAX_ROWS,
    ) -> None:
        self.sources = sources
        self.period_s = period_s
        self._pids: tuple[int, ...] = ()
        self._origin_s = origin_s
        self._clock = clock
        self._max_rows = max_rows
        self._rows = 0
        self._new: list[Rows] = [{} for _ in sources]
        self._lock = Lock()
        self._ended = Event()
        self._error: Exception | None = None
        self._thread = Thread(target=self._loop, name="telemetry", daemon=True)

    def start(self) -> None:
        self._sample(whole=True)
        self._thread.start()

    def watch(self, pids: tuple[int, ...]) -> None:
        """From now on the run's processes are these, and what they start."""
        self._pids = pids

    def stop(self) -> None:
        """End with one last sample, after all windows. An error met while sampling is raised here."""
        self._ended.set()
        self._thread.join()
        if self._error is not None:
            raise self._error
        self._sample(whole=True)

    def take(self) -> tuple[float, list[Rows]]:
        """The period, and the rows of each source since the last call."""
        with self._lock:
            new, self._new = self._new, [{} for _ in self.sources]
            return self.period_s, new

    def _loop(self) -> None:
        try:
            while not self._ended.wait(self.period_s):
                self._sample()
        except Exception as error:  # noqa: BLE001 - a thread has no caller: `stop` raises it, whatever it is
            self._error = error

    def _sample(self, whole: bool = False) -> None:
        reads = [one.whole if whole and one.whole is not None else one.read for one in self.sources]
        rows: list[Reading] = [
            {"t_s": self._clock() - self._origin_s, **read(self._pids)} for read in reads
        ]
        with self._lock:
            for row, columns in zip(rows, self._new, strict=True):
                for name, value in row.items():
                    columns.setdefault(name, []).append(value)
            self._rows += 1
            if self._rows > self._max_rows:
                self._rows = -(-self._rows // 2)
                self.period_s *= 2


class DeviceReadings:
    """The readings of one device as they arrive."""

    def __init__(self, host: str, device: str, severity: dict[str, str]) -> None:
        self.host, self.device, self.severity = host, device, severity
        self.period_s = 0.0
        self.columns: Rows = {}

    def add(self, period_s: float, columns: Rows) -> None:
        """Rows of a longer period than before come after every second row was dropped, these among
        them.
        """
        for name, values in columns.items():
            self.columns.setdefault(name, []).extend(values)
        before = self.period_s or period_s
        while before < period_s:
            self.columns, before = halve(self.columns), 2 * before
        self.period_s = period_s

    def series(self, shift: Callable[[float], float] = lambda t_s: t_s) -> Series:
        columns = {**self.columns, "t_s": [shift(t_s) for t_s in self.columns.get("t_s", [])]}
        return Series(
            device=self.device,
            host=self.host,
            period_s=self.period_s,
            baseline_processes=columns.get("processes", [None])[0],
            severity=self.severity,
            columns=Columns(**columns),
        )


def _first(a: Any, b: Any) -> Any:
    return a


def _largest(a: Any, b: Any) -> Any:
    return max((value for value in (a, b) if value is not None), default=None)


def _union(a: Any, b: Any) -> Any:
    return a if b is None else b if a is None else sorted({*a, *b})


# What a dropped row leaves in the one before it: a peak, another's process or a slowdown must not
# vanish because a run is long. The share of samples with a reason is therefore an upper bound once
# rows were dropped.
_KEPT: dict[str, Callable[[Any, Any], Any]] = {
    "memory_bytes": _largest,
    "processes": _largest,
    "reasons": _union,
}


def halve(columns: Rows) -> Rows:
    """Return the columns without every second row; the last row may have no second one."""
    pairs = {name: zip_longest(values[::2], values[1::2]) for name, values in columns.items()}
    return {
        name: [_KEPT.get(name, _first)(first, second) for first, second in rows]
        for name, rows in pairs.items()
    }
