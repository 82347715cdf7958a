"""Formulas over a record: the energy of its devices, and work for it."""

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
NOTHING = Message("energy.counter")  # of version 1 of the formulas

Window = tuple[float, float]


@dataclass(frozen=True)
class Used:
    """Joules of one device; `powers` is the number of power readings that they were integrated
    from, None of a counter.
    """

    joules: float | None
    powers: int | None = None
    why: Message | None = None


def energy(record: Record, ranks: Collection[int] | None = None) -> Result:
    """Of the devices of all ranks, or of some, over what rates are taken from."""
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
    """Version 1: the counter of every rank's device, or nothing."""
    used = 0.0
    for rank, (begin, end) in chosen.items():
        series = series_of(record, rank)
        joules = readings.energy_j(series, begin, end) if series else None
        if joules is None:
            return Result(None, NOTHING)
        used += joules
    return Result(used, found.note)


def _used(record: Record, chosen: dict[int, Window], found: Span) -> Result:
    """A device that several ranks share is counted once, from where the first of them begins to
    where the last ends.
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
    """From the energy counter; else from power, by trapezoids between readings."""
    counted = readings.energy_j(series, begin_s, end_s)
    if counted is not None and counted >= 0:  # one that was set back in between tells nothing
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
    """Energy over what the same span counts."""
    used, found = energy(record), span(record)
    if used.value is None or found is None:
        return used
    done = found.counts.get(key)
    return Result(used.value / done, used.note) if done else missing(record)


def per_joule(record: Record, key: str) -> Result:
    """What the span counts over its energy."""
    used, found = energy(record), span(record)
    if used.value is None or found is None:
        return used
    if not used.value:
        return Result(None, Message("energy.zero"))
    done = found.counts.get(key)
    return Result(done / used.value, used.note) if done else missing(record)
