"""Formulas of the metric table: energy of the devices in the span that rates are taken over, and
work for it.

Each takes a record and returns a `Result`: a value, or None with the reason.
"""

from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise
from math import fsum

from steelyard import words
from steelyard.metrics import readings
from steelyard.metrics.rates import missing, series_of
from steelyard.metrics.result import Result
from steelyard.metrics.spans import Span, span
from steelyard.record.facts import Series
from steelyard.record.record import Record
from steelyard.words import Message

# Between two readings of power nothing is known. Three periods are one reading that came late and
# one that failed; over more, a step of training could begin and end unseen.
GAP_PERIODS = 3.0
NOTHING = Message("energy.counter")  # the note of version 1 of the formulas

Window = tuple[float, float]


@dataclass(frozen=True)
class Used:
    """The energy of one device over a time range.

    `joules` is None if it is unknown, `why` then says why. `power_readings` is the number of power
    readings that were integrated; None if the device's energy counter was read.
    """

    joules: float | None
    powers: int | None = None
    why: Message | None = None


def energy(record: Record, ranks: Collection[int] | None = None) -> Result:
    """Return the joules that devices used in the span that rates are taken over: of all ranks, or
    only of `ranks`.

    None if the energy of one device is unknown. From formulas version 2 on, a device that ranks
    share counts once.
    """
    found = span(record)
    if found is None or not found.borders:
        return missing(record)
    chosen = {
        rank: window for rank, window in found.borders.items() if ranks is None or rank in ranks
    }
    return (
        _counted(record, chosen, found) if record.formulas is None else _used(record, chosen, found)
    )


def _counted(record: Record, chosen: dict[int, Window], found: Span) -> Result:
    """Return the energy by version 1 of the formulas: the sum of the energy counters of the ranks'
    devices.

    `windows` are begin and end seconds by rank. A device that ranks share counts for each of them.
    None if one counter cannot be read.
    """
    used = 0.0
    for rank, (begin, end) in chosen.items():
        series = series_of(record, rank)
        joules = readings.energy_j(series, begin, end) if series else None
        if joules is None:
            return Result(None, NOTHING)
        used += joules
    return Result(used, found.note)


def _used(record: Record, chosen: dict[int, Window], found: Span) -> Result:
    """Return the energy from version 2 of the formulas on: the sum over devices.

    `windows` are begin and end seconds by rank. A device that several ranks share counts once, from
    the first rank's begin to the last one's end. None if a rank has no telemetry or a device's
    energy is unknown. The note says if power was integrated.
    """
    windows: dict[tuple[str | None, str], tuple[Series, float, float]] = {}
    for rank, (begin, end) in chosen.items():
        series = series_of(record, rank)
        if series is None:
            return Result(None, Message("energy.no_device", {"rank": rank}))
        _, first, last = windows.get((series.host, series.device), (series, begin, end))
        windows[series.host, series.device] = (series, min(first, begin), max(last, end))
    parts = [
        (series.device, of_device(series, begin, end)) for series, begin, end in windows.values()
    ]
    for device, part in parts:
        if part.joules is None and part.why is not None:
            return Result(None, Message("energy.device", {"device": device, "why": part.why}))
    powers = [part.powers for _, part in parts if part.powers is not None]
    how = (
        Message("energy.integrated", {"readings": sum(powers), "devices": len(powers)})
        if powers
        else None
    )
    return Result(
        fsum(part.joules for _, part in parts if part.joules is not None),
        words.both(found.note, how),
    )


def of_device(series: Series, begin_s: float, end_s: float) -> Used:
    """Return the energy of one device between two times: from its energy counter, else by
    integrating power with the trapezoidal rule.

    A counter that fell was reset and is not used. Power is interpolated at both ends. `joules` is
    None, with the reason, if there is no power reading, none before `begin_s` or none after
    `end_s`, fewer than two inside, or a gap of over three sampling periods.
    """
    counted = readings.energy_j(series, begin_s, end_s)
    if counted is not None and counted >= 0:  # a negative difference: the counter was reset
        return Used(counted)
    columns = series.columns
    points = [
        (t_s, power)
        for t_s, power in zip(columns.t_s, columns.power_w, strict=False)
        if power is not None
    ]
    inside = [point for point in points if begin_s < point[0] < end_s]
    if not points:
        return Used(None, why=Message("energy.nothing"))
    first, last = readings.at(points, begin_s), readings.at(points, end_s)
    if first is None or last is None:
        return Used(None, why=Message("energy.no_border"))
    if len(inside) < 2:
        return Used(
            None, why=Message("energy.few", {"readings": len(inside), "time": end_s - begin_s})
        )
    around = [t_s for t_s, _ in points if t_s <= begin_s][-1:] + [t_s for t_s, _ in inside]
    around += [t_s for t_s, _ in points if t_s >= end_s][:1]
    gap = max(later - t_s for t_s, later in pairwise(around))
    if gap > GAP_PERIODS * series.period_s:
        told = {"gap": gap, "periods": GAP_PERIODS, "most": GAP_PERIODS * series.period_s}
        return Used(None, why=Message("energy.gap", told))
    whole = [(begin_s, first), *inside, (end_s, last)]
    return Used(fsum((b - a) * (p + q) / 2 for (a, p), (b, q) in pairwise(whole)), len(inside))


def energy_per(record: Record, key: str) -> Result:
    """Return joules per unit of the count `key` ("tokens" or "samples") in the same span; None if
    either is unknown.
    """
    used, found = energy(record), span(record)
    if used.value is None or found is None:
        return used
    done = found.counts.get(key)
    return Result(used.value / done, used.note) if done else missing(record)


def per_joule(record: Record, key: str) -> Result:
    """Return the count `key` ("tokens" or "samples") of the span per joule; None if either is
    unknown, or the energy is 0.
    """
    used, found = energy(record), span(record)
    if used.value is None or found is None:
        return used
    if not used.value:
        return Result(None, Message("energy.zero"))
    done = found.counts.get(key)
    return Result(done / used.value, used.note) if done else missing(record)
