"""Sample the devices of a host while workers run, and collect the samples in the parent.

In the node agent, a `TelemetrySampler` reads the accelerator's sources from a thread (run/ranks.py
sends what is new); in the parent, `DeviceReadings` collect them for the record.
"""

from collections.abc import Callable
from itertools import zip_longest
from threading import Event, Lock, Thread
from typing import Any

from steelyard.accelerators.events import Clock
from steelyard.accelerators.row import Reading, TelemetrySource
from steelyard.record.run_facts import TelemetryColumns, TelemetrySeries
from steelyard.run.clock import now

PERIOD_S = 0.2
MAX_ROWS = 4096

ReadingColumns = dict[str, list[Any]]


class TelemetrySampler:
    """Samples all telemetry sources of a host, for its node agent: `start` takes a first sample,
    before there is a worker, and starts a thread; `watch` sets the workers' process ids; `stop`
    ends the thread, takes a last sample, and raises an error that the thread met.

    `take_new_rows` returns the current period in seconds and what is new, as columns for each
    source. After `max_rows` rows the period doubles, by which the collector sees that it must drop
    every second row, so that a long run has no more rows than that.
    """

    def __init__(
        self,
        sources: list[TelemetrySource],
        origin_s: float,
        clock: Clock = now,
        period_s: float = PERIOD_S,
        max_rows: int = MAX_ROWS,
    ) -> None:
        """Store the settings of the sampler; nothing is sampled before `start`. `origin_s` is the
        start of the run on this host's clock; `period_s` the seconds between two samples at first,
        `max_rows` the rows after which they double.
        """
        self.sources = sources
        self.period_s = period_s
        self._pids: tuple[int, ...] = ()
        self._origin_s = origin_s
        self._clock = clock
        self._max_rows = max_rows
        self._row_count = 0
        self._new: list[ReadingColumns] = [{} for _ in sources]
        self._lock = Lock()
        self._ended = Event()
        self._error: Exception | None = None
        self._thread = Thread(target=self._loop, name="telemetry", daemon=True)

    def start(self) -> None:
        """Take a first sample of all sources, slow columns included, in the caller's thread, which
        raises what a source raises, then start the sampling thread.
        """
        self._sample(with_slow_columns=True)
        self._thread.start()

    def watch(self, pids: tuple[int, ...]) -> None:
        """Set the process ids of the run's workers for this sampler; they are given to each source
        at every sample, which tells them from other processes.
        """
        self._pids = pids

    def stop(self) -> None:
        """End the sampling thread and take one last sample of all sources, slow columns included;
        an error that the thread met is raised here instead.
        """
        self._ended.set()
        self._thread.join()
        if self._error is not None:
            raise self._error
        self._sample(with_slow_columns=True)

    def take_new_rows(self) -> tuple[float, list[ReadingColumns]]:
        """Return the current sampling period in seconds and, for each source in order, the rows
        since the last call as columns by name (empty: no new row); they are forgotten here.
        """
        with self._lock:
            new, self._new = self._new, [{} for _ in self.sources]
            return self.period_s, new

    def _loop(self) -> None:
        """Sample all sources once a period until `stop`; any error ends the thread and is stored
        for `stop` to raise. Runs in the thread.
        """
        try:
            while not self._ended.wait(self.period_s):
                self._sample()
        except Exception as error:  # noqa: BLE001 - a thread has no caller: `stop` raises it, whatever it is
            self._error = error

    def _sample(self, with_slow_columns: bool = False) -> None:
        """Read every source once and append a row for each, with the time since the start of the
        run as `t_s`; beyond `max_rows` rows, double the period and count only half of the rows, as
        the collector drops the others. `with_slow_columns`: use the sources' `read_all`, where
        columns that are slow to read are never left None.
        """
        reads = [
            source.read_all if with_slow_columns and source.read_all is not None else source.read
            for source in self.sources
        ]
        rows: list[Reading] = [
            {"t_s": self._clock() - self._origin_s, **read(self._pids)} for read in reads
        ]
        with self._lock:
            for row, columns in zip(rows, self._new, strict=True):
                for name, value in row.items():
                    columns.setdefault(name, []).append(value)
            self._row_count += 1
            if self._row_count > self._max_rows:
                self._row_count = -(-self._row_count // 2)
                self.period_s *= 2


class DeviceReadings:
    """The telemetry of one `device` of a `host`, as the session in the parent receives it: `add`
    appends rows to `columns` (lists by column name) and drops every second row when the sampling
    period has doubled; `to_series` returns what the record states. `period_s` is the period in
    seconds, 0 before the first rows; `severity` says by slowdown reason what it means for a run.
    """

    def __init__(self, host: str, device: str, severity: dict[str, str]) -> None:
        """Begin without readings of this device; `severity` says by slowdown reason how much it
        matters.
        """
        self.host, self.device, self.severity = host, device, severity
        self.period_s = 0.0
        self.columns: ReadingColumns = {}

    def add(self, period_s: float, columns: ReadingColumns) -> None:
        """Append rows of this device, given as columns; if their period is longer than before, drop
        every second row of all, these included, once for each doubling (`halve_rows`).
        """
        for name, values in columns.items():
            self.columns.setdefault(name, []).extend(values)
        before = self.period_s or period_s
        while before < period_s:
            self.columns, before = halve_rows(self.columns), 2 * before
        self.period_s = period_s

    def to_series(
        self, to_parent_clock: Callable[[float], float] = lambda t_s: t_s
    ) -> TelemetrySeries:
        """Return the readings of this device as a record states them; `to_parent_clock` converts
        each time since the start of the run to the parent's clock. `baseline_processes` is the
        first reading of `processes`, before workers started, None without one.
        """
        columns = {
            **self.columns,
            "t_s": [to_parent_clock(t_s) for t_s in self.columns.get("t_s", [])],
        }
        return TelemetrySeries(
            device=self.device,
            host=self.host,
            period_s=self.period_s,
            baseline_processes=columns.get("processes", [None])[0],
            severity=self.severity,
            columns=TelemetryColumns(**columns),
        )


def _keep_first(a: Any, b: Any) -> Any:
    """Return the value of the first of two rows, the one that stays."""
    return a


def _keep_largest(a: Any, b: Any) -> Any:
    """Return the larger of two values, of which either may be None; None if both are."""
    return max((value for value in (a, b) if value is not None), default=None)


def _merge_lists(a: Any, b: Any) -> Any:
    """Return the sorted union of two lists, of which either may be None."""
    return a if b is None else b if a is None else sorted({*a, *b})


# How a dropped row is merged into the one before it: a peak, another run's process or a slowdown
# must not vanish because a run is long. The share of samples with a reason is therefore an upper
# bound once rows were dropped.
_MERGE_BY_COLUMN: dict[str, Callable[[Any, Any], Any]] = {
    "memory_bytes": _keep_largest,
    "processes": _keep_largest,
    "reasons": _merge_lists,
}


def halve_rows(columns: ReadingColumns) -> ReadingColumns:
    """Return new columns without every second row (the second, fourth, ...): of a dropped row, the
    larger `memory_bytes` and `processes` and the union of `reasons` go into the row before it. A
    last row without a second one stays.
    """
    pairs = {name: zip_longest(values[::2], values[1::2]) for name, values in columns.items()}
    return {
        name: [_MERGE_BY_COLUMN.get(name, _keep_first)(first, second) for first, second in rows]
        for name, rows in pairs.items()
    }
