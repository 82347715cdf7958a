"""Evaluate the telemetry of one device over a time range: memory, energy, slowdowns, processes.

Times are seconds from the start of the run, as in the record. Called by the formulas in `rates.py`
and `energy.py` and by validity rules.
"""

from bisect import bisect_left
from typing import TypeVar

from steelyard.record.run_facts import TelemetryColumns, TelemetrySeries

Reading = TypeVar("Reading")


def select_readings(series: TelemetrySeries, start_s: float, end_s: float) -> TelemetrySeries:
    """Return a copy of a device's telemetry series with only the readings from `start_s` to
    `end_s`, both included, in all columns.

    Columns that the record leaves out stay left out.
    """
    rows = [i for i, t_s in enumerate(series.columns.t_s) if start_s <= t_s <= end_s]
    present_columns = {
        name: values for name, values in series.columns if name in series.columns.model_fields_set
    }
    return series.model_copy(
        update={
            "columns": TelemetryColumns(
                **{name: [values[i] for i in rows] for name, values in present_columns.items()}
            )
        }
    )


def find_peak_memory_bytes(series: TelemetrySeries) -> int | None:
    """Return the most bytes in use in any reading; None if the device gave no memory reading."""
    return max(_drop_none(series.columns.memory_bytes), default=None)


def count_energy_j(series: TelemetrySeries, start_s: float, end_s: float) -> float | None:
    """Return how many joules a device's energy counter rose by between the two times.

    The counter is interpolated linearly at both ends. None if fewer than two readings lie inside
    the range (ends included), or an end is before the first or after the last reading. Negative if
    the counter was reset.
    """
    columns = series.columns
    points = [
        (t_s, energy)
        for t_s, energy in zip(columns.t_s, columns.energy_j, strict=False)
        if energy is not None
    ]
    if sum(start_s <= t_s <= end_s for t_s, _ in points) < 2:
        return None
    start_energy, end_energy = interpolate(points, start_s), interpolate(points, end_s)
    return None if start_energy is None or end_energy is None else end_energy - start_energy


def interpolate(points: list[tuple[float, float]], t_s: float) -> float | None:
    """Return the value at `t_s`, linearly interpolated between (time, value) points sorted by time,
    or that of a point at exactly this time; None before the first point and after the last, and
    without points.
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


def find_slowdown_shares(series: TelemetrySeries, start_s: float, end_s: float) -> dict[str, float]:
    """Return each reason for a low clock that a device showed between the two times, sorted by
    name, with the share (0 to 1) of readings in which it was active.

    Readings that do not tell reasons are not counted. Empty if no reason was active or the device
    reports none.
    """
    known_reasons = _drop_none(select_readings(series, start_s, end_s).columns.reasons)
    names = sorted({name for reasons in known_reasons for name in reasons})
    return {
        name: sum(name in reasons for reasons in known_reasons) / len(known_reasons)
        for name in names
    }


def has_foreign_processes(
    series: TelemetrySeries, start_s: float, end_s: float, workers: int = 1
) -> bool | None:
    """Return whether the device ever had more compute processes than this run's `workers` on it
    between the two times.

    Only counts are compared, because a process namespace may hide or rename processes. None
    (unknown) if the device does not count processes, or never shows as many as the run's own.
    """
    max_processes = max(
        _drop_none(select_readings(series, start_s, end_s).columns.processes), default=0
    )
    return None if max_processes < workers else max_processes > workers


def _drop_none(column: list[Reading | None]) -> list[Reading]:
    """Return the values of a telemetry column that are not None."""
    return [value for value in column if value is not None]
