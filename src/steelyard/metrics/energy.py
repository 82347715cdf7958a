"""Formulas of the metric table: energy of the devices in the span that rates are taken over, and
work for it.

Each takes a record and returns a `Result`: a value, or None with the reason.
"""

from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise
from math import fsum

from steelyard import words
from steelyard.metrics import device_readings
from steelyard.metrics.passes import RateSpan, find_rate_span
from steelyard.metrics.rates import find_series, make_missing_headline_result
from steelyard.metrics.result import Result, WorkName
from steelyard.record.record import Record
from steelyard.record.run_facts import TelemetrySeries
from steelyard.words import Message

# Between two readings of power nothing is known. Three periods are one reading that came late and
# one that failed; over more, a step of training could begin and end unseen.
MAX_GAP_PERIODS = 3.0
NO_COUNTER = Message("energy.counter")  # the note of version 1 of the formulas

TimeRange = tuple[float, float]


@dataclass(frozen=True)
class DeviceEnergy:
    """The energy of one device over a time range.

    `joules` is None if it is unknown; `why`, a message, then says why. `power_readings` is the
    number of power readings (W) that were integrated; None if the device's energy counter was read
    instead, or nothing is known.
    """

    joules: float | None
    power_readings: int | None = None
    why: Message | None = None


def energy(record: Record, ranks: Collection[int] | None = None) -> Result:
    """Return the joules that devices used in the span that rates are taken over: those of all
    ranks, or only of `ranks`; a device that ranks share counts once (from formulas version 2 on).

    Without a value if there is no span or the energy of one device is unknown.
    """
    rate_span = find_rate_span(record)
    if rate_span is None or not rate_span.bounds:
        return make_missing_headline_result(record)
    windows = {
        rank: window for rank, window in rate_span.bounds.items() if ranks is None or rank in ranks
    }
    return (
        _sum_counters_v1(record, windows, rate_span)
        if record.formulas is None
        else _sum_devices(record, windows, rate_span)
    )


def _sum_counters_v1(record: Record, windows: dict[int, TimeRange], rate_span: RateSpan) -> Result:
    """Return the joules by version 1 of the formulas: the sum of the energy counters of the ranks'
    devices, without a check for resets; a device that ranks share counts for each of them.

    `windows` are (begin, end) seconds by rank. Of `rate_span` only the note is used. Without a
    value if one counter cannot be read.
    """
    total_j = 0.0
    for rank, (begin, end) in windows.items():
        series = find_series(record, rank)
        joules = device_readings.count_energy_j(series, begin, end) if series else None
        if joules is None:
            return Result(None, NO_COUNTER)
        total_j += joules
    return Result(total_j, rate_span.note)


def _sum_devices(record: Record, windows: dict[int, TimeRange], rate_span: RateSpan) -> Result:
    """Return the joules by version 2 of the formulas and later: the sum over devices.

    `windows` are (begin, end) seconds by rank. A device that several ranks share counts once, from
    the first rank's begin to the last one's end. Without a value if a rank has no telemetry or a
    device's energy is unknown. The note is that of `rate_span`, of which nothing else is used, and
    says if power was integrated.
    """
    device_windows: dict[tuple[str | None, str], tuple[TelemetrySeries, float, float]] = {}
    for rank, (begin, end) in windows.items():
        series = find_series(record, rank)
        if series is None:
            return Result(None, Message("energy.no_device", {"rank": rank}))
        _, first_begin, last_end = device_windows.get(
            (series.host, series.device), (series, begin, end)
        )
        device_windows[series.host, series.device] = (
            series,
            min(first_begin, begin),
            max(last_end, end),
        )
    parts = [
        (series.device, measure_device_energy(series, begin, end))
        for series, begin, end in device_windows.values()
    ]
    for device, part in parts:
        if part.joules is None and part.why is not None:
            return Result(None, Message("energy.device", {"device": device, "why": part.why}))
    powers = [part.power_readings for _, part in parts if part.power_readings is not None]
    integration_note = (
        Message("energy.integrated", {"readings": sum(powers), "devices": len(powers)})
        if powers
        else None
    )
    return Result(
        fsum(part.joules for _, part in parts if part.joules is not None),
        words.join_messages(rate_span.note, integration_note),
    )


def measure_device_energy(series: TelemetrySeries, begin_s: float, end_s: float) -> DeviceEnergy:
    """Return the energy of one device between two times, in joules: the difference of its energy
    counter, if that has two readings inside and covers both ends, else the integral of power by the
    trapezoidal rule, with the number of readings integrated.

    Both are interpolated at the ends. A counter that is lower at the end was reset and is not used.
    `joules` is None, with the reason, if there is no power reading, none up to `begin_s` or from
    `end_s` on, fewer than two inside, or a gap of over three sampling periods.
    """
    counter_j = device_readings.count_energy_j(series, begin_s, end_s)
    if counter_j is not None and counter_j >= 0:  # a negative difference: the counter was reset
        return DeviceEnergy(counter_j)
    columns = series.columns
    points = [
        (t_s, power)
        for t_s, power in zip(columns.t_s, columns.power_w, strict=False)
        if power is not None
    ]
    inside = [point for point in points if begin_s < point[0] < end_s]
    if not points:
        return DeviceEnergy(None, why=Message("energy.nothing"))
    begin_power, end_power = (
        device_readings.interpolate(points, begin_s),
        device_readings.interpolate(points, end_s),
    )
    if begin_power is None or end_power is None:
        return DeviceEnergy(None, why=Message("energy.no_border"))
    if len(inside) < 2:
        return DeviceEnergy(
            None, why=Message("energy.few", {"readings": len(inside), "time": end_s - begin_s})
        )
    times_around = [t_s for t_s, _ in points if t_s <= begin_s][-1:] + [t_s for t_s, _ in inside]
    times_around += [t_s for t_s, _ in points if t_s >= end_s][:1]
    gap = max(later - t_s for t_s, later in pairwise(times_around))
    if gap > MAX_GAP_PERIODS * series.period_s:
        message_values = {
            "gap": gap,
            "periods": MAX_GAP_PERIODS,
            "most": MAX_GAP_PERIODS * series.period_s,
        }
        return DeviceEnergy(None, why=Message("energy.gap", message_values))
    power_curve = [(begin_s, begin_power), *inside, (end_s, end_power)]
    return DeviceEnergy(
        fsum((b - a) * (p + q) / 2 for (a, p), (b, q) in pairwise(power_curve)), len(inside)
    )


def energy_per_count(record: Record, key: WorkName) -> Result:
    """Return joules per unit of the count `key` ("tokens" or "samples") in the span that rates are
    taken over, all devices together; without a value if energy or count is unknown or the count is
    0.
    """
    used_energy, rate_span = energy(record), find_rate_span(record)
    if used_energy.value is None or rate_span is None:
        return used_energy
    count = rate_span.counts.get(key)
    return (
        Result(used_energy.value / count, used_energy.note)
        if count
        else make_missing_headline_result(record)
    )


def count_per_joule(record: Record, key: WorkName) -> Result:
    """Return the count `key` ("tokens" or "samples") of the span that rates are taken over per
    joule, all devices together; without a value if energy or count is unknown, or either is 0.
    """
    used_energy, rate_span = energy(record), find_rate_span(record)
    if used_energy.value is None or rate_span is None:
        return used_energy
    if not used_energy.value:
        return Result(None, Message("energy.zero"))
    count = rate_span.counts.get(key)
    return (
        Result(count / used_energy.value, used_energy.note)
        if count
        else make_missing_headline_result(record)
    )
