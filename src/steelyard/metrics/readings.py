"""Evaluate the telemetry of one device over a time range: memory, energy, slowdowns, processes.

Times are seconds from the start of the run, as in the record. Called by the formulas in `rates.py`
and `energy.py` and by validity rules.
"""

from bisect import bisect_left
from typing import TypeVar

from steelyard.record.facts import Columns, Series

Value = TypeVar("Value")


def window(series: Series, start_s: float, end_s: float) -> Series:
    """Return a copy of the series with only the readings from `start_s` to `end_s`, both included.

    Columns that the record leaves out stay left out.
    """
    rows = [i for i, t_s in enumerate(series.columns.t_s) if start_s <= t_s <= end_s]
    told = {
        name: values for name, values in series.columns if name in series.columns.model_fields_set
    }
    return series.model_copy(
        update={
            "columns": Columns(**{name: [values[i] for i in rows] for name, values in told.items()})
        }
    )


def peak_memory(series: Series) -> int | None:
    """Return the most bytes in use in any reading; None if the device gave no memory reading."""
    return max(_known(series.columns.memory_bytes), default=None)


def energy_j(series: Series, start_s: float, end_s: float) -> float | None:
    """Return how many joules the energy counter rose by between the two times.

    The counter is interpolated linearly at both ends. None if fewer than two readings lie inside
    the range, or an end is before the first or after the last reading. Negative if the counter was
    reset.
    """
    columns = series.columns
    points = [
        (t_s, energy)
        for t_s, energy in zip(columns.t_s, columns.energy_j, strict=False)
        if energy is not None
    ]
    if sum(start_s <= t_s <= end_s for t_s, _ in points) < 2:
        return None
    first, last = at(points, start_s), at(points, end_s)
    return None if first is None or last is None else last - first


def at(points: list[tuple[float, float]], t_s: float) -> float | None:
    """Return the value at `t_s`, linearly interpolated between (time, value) points sorted by time;
    None before the first point and after the last.
    """
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
    """Return each clock slowdown reason seen between the two times, with the share (0 to 1) of
    readings in which it was active.

    Readings without reasons information are not counted. Empty if no reason was active or the
    device reports none.
    """
    seen = _known(window(series, start_s, end_s).columns.reasons)
    names = sorted({name for reasons in seen for name in reasons})
    return {name: sum(name in reasons for reasons in seen) / len(seen) for name in names}


def foreign(series: Series, start_s: float, end_s: float, workers: int = 1) -> bool | None:
    """Return whether the device ever had more compute processes than this run's `workers` between
    the two times.

    Only counts are compared, because a process namespace may hide or rename processes. None if the
    device does not count processes, or never shows even the run's own.
    """
    most = max(_known(window(series, start_s, end_s).columns.processes), default=0)
    return None if most < workers else most > workers


def _known(column: list[Value | None]) -> list[Value]:
    """Return the values of a telemetry column that are not None."""
    return [value for value in column if value is not None]
