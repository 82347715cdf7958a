"""What the readings of a device say about a stretch of time: memory, energy, slowdowns, other
processes.
"""

from bisect import bisect_left
from typing import TypeVar

from steelyard.record.facts import Columns, Series

Value = TypeVar("Value")


def window(series: Series, start_s: float, end_s: float) -> Series:
    """The rows from `start_s` to `end_s`, both included."""
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
    """The most bytes in use in any sample."""
    return max(_known(series.columns.memory_bytes), default=None)


def energy_j(series: Series, start_s: float, end_s: float) -> float | None:
    """What the energy counter rose by, taken linearly between the samples around each border of the
    window.
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
    """Each clock reason in the window and its share of the samples; empty, too, where the device
    gives no reasons.
    """
    seen = _known(window(series, start_s, end_s).columns.reasons)
    names = sorted({name for reasons in seen for name in reasons})
    return {name: sum(name in reasons for reasons in seen) / len(seen) for name in names}


def foreign(series: Series, start_s: float, end_s: float, workers: int = 1) -> bool | None:
    """Whether more than this run's workers used the device. Only counts tell: a namespace may hide
    or rename processes. None where the device does not count them, or does not even show the run's
    own."""
    most = max(_known(window(series, start_s, end_s).columns.processes), default=0)
    return None if most < workers else most > workers


def _known(column: list[Value | None]) -> list[Value]:
    return [value for value in column if value is not None]
