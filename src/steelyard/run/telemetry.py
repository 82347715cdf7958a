"""Telemetry: the parent samples the devices while workers run."""

from collections.abc import Callable
from threading import Event, Thread
from typing import Any

from steelyard.accelerators.events import Clock
from steelyard.accelerators.row import Reading, Source
from steelyard.record.facts import Columns, Series
from steelyard.run.measure import now

PERIOD_S = 0.2
MAX_ROWS = 4096


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
        return Series(
            device=source.device,
            period_s=self._period_s,
            baseline_processes=columns.get("processes", [None])[0],
            severity=dict(source.severity),
            columns=Columns(**columns),
        )


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
