"""Sample the devices of a host while workers run, and collect the samples in the parent.

In the node agent, a `TelemetrySampler` reads the accelerator's sources from a thread (run/ranks.py
sends what is new); in the parent, `DeviceReadings` collect them for the record.
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
    """Samples all telemetry sources in a thread from `start`, before there is a worker, until
    `stop`; `take_new_rows` returns what is new.

    After `max_rows` rows the sampling period doubles, and whoever collects the rows drops every
    second one, so that a long run has no more rows than that.
    """

    def __init__(
        self,
        sources: list[Source],
        origin_s: float,
        clock: Clock = now,
        period_s: float = PERIOD_S,
        max_rows: int = MAX_ROWS,
    ) -> None:
        """Store the settings; nothing is sampled before `start`. `origin_s` is the start of the run
        on this host's clock.
        """
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
        """Take a first, full sample in the caller's thread, then start the sampling thread."""
        self._sample(whole=True)
        self._thread.start()

    def watch(self, pids: tuple[int, ...]) -> None:
        """Set the process ids of the run's workers, which the sources tell from other processes."""
        self._pids = pids

    def stop(self) -> None:
        """End the thread and take one last full sample; an error that the thread met is raised here
        instead.
        """
        self._ended.set()
        self._thread.join()
        if self._error is not None:
            raise self._error
        self._sample(whole=True)

    def take(self) -> tuple[float, list[Rows]]:
        """Return the current period in seconds and, for each source, the rows since the last call,
        as columns; they are forgotten here.
        """
        with self._lock:
            new, self._new = self._new, [{} for _ in self.sources]
            return self.period_s, new

    def _loop(self) -> None:
        """Sample once a period until `stop`; an error ends the thread and is stored for `stop`."""
        try:
            while not self._ended.wait(self.period_s):
                self._sample()
        except Exception as error:  # noqa: BLE001 - a thread has no caller: `stop` raises it, whatever it is
            self._error = error

    def _sample(self, whole: bool = False) -> None:
        """Read every source once and append the rows; double the period when there are too many.
        `with_slow_columns`: also read the slow columns, which are None in most rows.
        """
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
    """The telemetry of one device, as the parent receives it."""

    def __init__(self, host: str, device: str, severity: dict[str, str]) -> None:
        """Begin without readings; `severity` says how much each slowdown reason matters."""
        self.host, self.device, self.severity = host, device, severity
        self.period_s = 0.0
        self.columns: Rows = {}

    def add(self, period_s: float, columns: Rows) -> None:
        """Append rows, given as columns; if their period is longer than before, drop every second
        row of all, these included, once for each doubling.
        """
        for name, values in columns.items():
            self.columns.setdefault(name, []).extend(values)
        before = self.period_s or period_s
        while before < period_s:
            self.columns, before = halve(self.columns), 2 * before
        self.period_s = period_s

    def series(self, shift: Callable[[float], float] = lambda t_s: t_s) -> Series:
        """Return the readings as a record states them; `to_parent_clock` converts each time since
        the start of the run to the parent's clock.
        """
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
    """Return the value of the row that stays."""
    return a


def _largest(a: Any, b: Any) -> Any:
    """Return the larger of two values, of which either may be None; None if both are."""
    return max((value for value in (a, b) if value is not None), default=None)


def _union(a: Any, b: Any) -> Any:
    """Return the sorted union of two lists, of which either may be None."""
    return a if b is None else b if a is None else sorted({*a, *b})


# How a dropped row is merged into the one before it: a peak, another run's process or a slowdown
# must not vanish because a run is long. The share of samples with a reason is therefore an upper
# bound once rows were dropped.
_KEPT: dict[str, Callable[[Any, Any], Any]] = {
    "memory_bytes": _largest,
    "processes": _largest,
    "reasons": _union,
}


def halve(columns: Rows) -> Rows:
    """Return the columns without every second row; peaks, process counts and slowdown reasons of a
    dropped row are merged into the row before it. A last row without a second one stays.
    """
    pairs = {name: zip_longest(values[::2], values[1::2]) for name, values in columns.items()}
    return {
        name: [_KEPT.get(name, _first)(first, second) for first, second in rows]
        for name, rows in pairs.items()
    }
