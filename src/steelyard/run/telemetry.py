"""Telemetry: the parent samples the devices while workers run; pure functions read the series that a record keeps.

A series is JSON as it lies in a record: `device`, `period_s`, `baseline_processes` (compute processes on the device
before any worker started) and `columns`, equally long lists of which `t_s` counts from the start of the run. None is a
reading that the device does not give.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Event, Thread
from typing import Any

from steelyard.run.measure import Clock, now

PERIOD_S = 0.2
MAX_ROWS = 4096

Reading = dict[str, float | int | list[str] | None]
Series = dict[str, Any]


@dataclass(frozen=True)
class Source:
    """A device and its reading now, the same columns every time. `read` takes the root of the run's process tree."""

    device: str
    read: Callable[[int], Reading]
    severity: dict[str, str] = field(default_factory=dict)  # what each reason means: nothing, note, invalidates


class Sampler:
    """Samples all sources from `start`, which is called before any worker is there, until `stop`."""

    def __init__(
        self,
        sources: list[Source],
        root_pid: int,
        origin_s: float,
        clock: Clock = now,
        period_s: float = PERIOD_S,
        max_rows: int = MAX_ROWS,
    ) -> None:
        self._sources = sources
        self._root_pid = root_pid
        self._origin_s = origin_s
        self._clock = clock
        self._period_s = period_s
        self._max_rows = max_rows
        self._columns: list[dict[str, list[Any]]] = [{} for _ in sources]
        self._ended = Event()
        self._error: Exception | None = None
        self._thread = Thread(target=self._loop, name="telemetry", daemon=True)

    def start(self) -> None:
        self._sample()
        self._thread.start()

    def watch(self, pid: int) -> None:
        """From now on the run's process tree is that of `pid`."""
        self._root_pid = pid

    def stop(self) -> list[Series]:
        """End with one last sample, after all windows. An error met while sampling is raised here."""
        self._ended.set()
        self._thread.join()
        if self._error is not None:
            raise self._error
        self._sample()
        return [self._series(source, columns) for source, columns in zip(self._sources, self._columns, strict=True)]

    def _loop(self) -> None:
        try:
            while not self._ended.wait(self._period_s):
                self._sample()
        except Exception as error:  # noqa: BLE001 - a thread has no caller: `stop` raises it, whatever it is
            self._error = error

    def _sample(self) -> None:
        for source, columns in zip(self._sources, self._columns, strict=True):
            row: Reading = {"t_s": self._clock() - self._origin_s, **source.read(self._root_pid)}
            if not columns:
                columns.update({name: [] for name in row})
            for name, values in columns.items():
                values.append(row[name])
        if any(len(columns["t_s"]) > self._max_rows for columns in self._columns):
            self._columns = [halve(columns) for columns in self._columns]
            self._period_s *= 2

    def _series(self, source: Source, columns: dict[str, list[Any]]) -> Series:
        return {
            "device": source.device,
            "period_s": self._period_s,
            "baseline_processes": columns.get("processes", [None])[0],
            "severity": source.severity,
            "columns": columns,
        }


def _largest(a: Any, b: Any) -> Any:
    return max((value for value in (a, b) if value is not None), default=None)


def _union(a: Any, b: Any) -> Any:
    return a if b is None else b if a is None else sorted({*a, *b})


# What a dropped row leaves in the one before it: a peak, another's process or a slowdown must not vanish because a run
# is long. The share of samples with a reason is therefore an upper bound once rows were dropped.
_KEPT: dict[str, Callable[[Any, Any], Any]] = {"memory_bytes": _largest, "processes": _largest, "reasons": _union}


def halve(columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """The columns without every second row."""
    return {name: _halved(values, _KEPT.get(name)) for name, values in columns.items()}


def _halved(values: list[Any], keep: Callable[[Any, Any], Any] | None) -> list[Any]:
    if keep is None:
        return values[::2]
    pairs = zip(values[::2], [*values[1::2], None], strict=False)  # the last row may have no second one
    return [keep(first, second) for first, second in pairs]


def window(series: Series, start_s: float, end_s: float) -> Series:
    """The rows from `start_s` to `end_s`, both included."""
    columns = series["columns"]
    rows = [i for i, t_s in enumerate(columns["t_s"]) if start_s <= t_s <= end_s]
    return {**series, "columns": {name: [values[i] for i in rows] for name, values in columns.items()}}


def peak_memory(series: Series) -> int | None:
    """The most bytes in use in any sample."""
    return max(_known(series, "memory_bytes"), default=None)


def energy_j(series: Series, start_s: float, end_s: float) -> float | None:
    """What the energy counter rose by, taken linearly between the samples around each border of the window."""
    columns = series["columns"]
    counter = columns.get("energy_j", [])
    points = [(t_s, energy) for t_s, energy in zip(columns["t_s"], counter, strict=False) if energy is not None]
    if sum(start_s <= t_s <= end_s for t_s, _ in points) < 2:
        return None
    first, last = _at(points, start_s), _at(points, end_s)
    return None if first is None or last is None else last - first


def _at(points: list[tuple[float, float]], t_s: float) -> float | None:
    """The counter at a moment; None before the first sample and after the last."""
    right = bisect_left(points, t_s, key=lambda point: point[0])
    if right == len(points):
        return None
    t1, value1 = points[right]
    if t1 == t_s:
        return value1
    if right == 0:
        return None
    t0, value0 = points[right - 1]
    return value0 + (value1 - value0) * (t_s - t0) / (t1 - t0)


def slowdowns(series: Series, start_s: float, end_s: float) -> dict[str, float]:
    """Each clock reason in the window and its share of the samples; empty, too, where the device gives no reasons."""
    seen = _known(window(series, start_s, end_s), "reasons")
    names = sorted({name for reasons in seen for name in reasons})
    return {name: sum(name in reasons for reasons in seen) / len(seen) for name in names}


def foreign(series: Series, start_s: float, end_s: float, workers: int = 1) -> bool | None:
    """Whether more than this run's workers used the device. Only counts tell: a namespace may hide or rename processes.
    None where the device does not count them, or does not even show the run's own."""
    most = max(_known(window(series, start_s, end_s), "processes"), default=0)
    return None if most < workers else most > workers


def _known(series: Series, column: str) -> list[Any]:
    return [value for value in series["columns"].get(column, []) if value is not None]
