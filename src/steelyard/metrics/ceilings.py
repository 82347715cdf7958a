"""Derive the ceilings of a spec record from its raw benchmarks, and verify spec records.

A ceiling is a rate with its interval, mean clock and power meanwhile, and its share of the
datasheet's rate. `run/` calls this when `steelyard spec` writes a record; `verify` and `report`
call it again.
"""

from math import fsum, isclose
from pathlib import Path

from steelyard.errors import RequestError
from steelyard.metrics import readings, stats
from steelyard.record import spec
from steelyard.record.facts import PeakFacts, Series
from steelyard.record.spec import Bench, Ceiling, Limits, SpecRecord, Stretch
from steelyard.words import Message, storable

SHORTEST_S = 1e-9  # no clock resolves less
LEAST = 1.0  # FLOP/s or bytes/s; a share of a smaller datasheet rate may not be finite


def derive(record: SpecRecord) -> list[Ceiling]:
    """Return the ceiling of each benchmark of a spec record, in the same order."""
    peak = record.environment.hardware.peak
    devices = {rank.rank: rank.device for rank in record.ranks}
    every = {one.device: one for one in record.telemetry}
    return [
        _ceiling(one, record.limits, peak, every.get(devices.get(one.rank) or ""))
        for one in record.benches
    ]


def _ceiling(
    bench: Bench, limits: Limits, peak: PeakFacts | None, series: Series | None
) -> Ceiling:
    """Return the ceiling of one benchmark: amount of work over time of its settled stretches, in
    the benchmark's unit per second.

    For a benchmark in bytes (unit "B") the value is the amount itself. The value is None, with a
    note, if the result was wrong or missing, or took less time than a clock can tell. `series` is
    the telemetry of its device.
    """
    said = remark(bench, limits)
    note = said and storable(said)
    if _why_absent(bench) is not None or bench.amount is None:
        return Ceiling(value=None, note=note)
    if bench.unit == "B":
        return Ceiling(value=bench.amount, note=note)
    steady, kept = settled(bench.stretches, limits)
    work, times = [bench.amount * one.calls for one in kept], [one.time_s for one in kept]
    if fsum(times) < SHORTEST_S:
        return Ceiling(value=None, note=note)
    value = fsum(work) / fsum(times)
    found = stats.rate_interval(value, work, times)
    sheet = datasheet(bench, peak)
    clock, power = _meanwhile(series, kept)
    return Ceiling(
        value=value,
        interval=found,
        steady=steady,
        sm_clock_mhz=clock,
        power_w=power,
        peak=sheet,
        share=None if sheet is None else value / sheet,
        note=note,
    )


def remark(bench: Bench, limits: Limits) -> Message | None:
    """Return the note beside a ceiling: why it has no value, how an amount in bytes was found, or
    that its rate did not become steady; None if there is nothing to say.
    """
    why = _why_absent(bench)
    if why is not None:
        return why
    if bench.unit == "B":
        return (
            Message("ceiling.text", {"text": str(bench.detail["how"])})
            if "how" in bench.detail
            else None
        )
    steady, kept = settled(bench.stretches, limits)
    if fsum(one.time_s for one in kept) < SHORTEST_S:
        return Message("ceiling.short")
    return (
        None
        if steady
        else Message("ceiling.not_steady", {"last": limits.last, "within": limits.within})
    )


def _why_absent(bench: Bench) -> Message | None:
    """Return why a benchmark has no value: its own reason, a wrong result, or no amount; None if it
    has one.
    """
    if bench.reason is not None:
        return Message("ceiling.text", {"text": bench.reason})
    if bench.checked is not None and not bench.checked.ok:
        return wrong(bench)
    return Message("ceiling.nothing") if bench.amount is None else None


def wrong(bench: Bench) -> Message:
    """Return a message for a result that failed its check against fp64: not finite, or the error
    and the bound that it exceeds.
    """
    if bench.checked is None or bench.checked.error is None:
        return Message("ceiling.not_finite")
    return Message("ceiling.wrong", {"error": bench.checked.error, "bound": bench.checked.bound})


def settled(stretches: list[Stretch], limits: Limits) -> tuple[bool, list[Stretch]]:
    """Return whether the last `limits.last` stretches agree in time per call within
    `limits.within`, and the stretches that the rate is taken over.

    These are the last ones if they agree, else the later half of all (at least `limits.last`).
    """
    last = stretches[-limits.last :]
    costs = [one.time_s / one.calls for one in last]
    if (
        len(last) == limits.last
        and min(costs) > 0
        and max(costs) <= (1 + limits.within) * min(costs)
    ):
        return True, last
    return False, stretches[-max(limits.last, len(stretches) // 2) :]


def datasheet(bench: Bench, peak: PeakFacts | None) -> float | None:
    """Return the datasheet's rate for a benchmark: dense FLOP/s of its precision for groups matmul
    and attention, bytes/s for group memory.

    None for other groups, and if the datasheet or its rate is unknown.
    """
    if peak is None:
        return None
    if bench.group in ("matmul", "attention"):
        rate = peak.flops_per_s.get(bench.precision or "")
        return rate if rate is not None and rate >= LEAST else None
    found = peak.bandwidth_bytes_per_s if bench.group == "memory" else None
    return found if found is not None and found >= LEAST else None


def _meanwhile(series: Series | None, kept: list[Stretch]) -> tuple[float | None, float | None]:
    """Return the device's mean SM clock (MHz) and power (W) while the stretches ran; each None if
    unknown.

    If no reading lies within, those one sampling period around it count.
    """
    if series is None:
        return None, None
    start_s, end_s = kept[0].start_s, kept[-1].start_s + kept[-1].time_s
    for margin_s in (0.0, series.period_s):
        seen = readings.window(series, start_s - margin_s, end_s + margin_s).columns
        if seen.t_s:
            return stats.mean_of_known(seen.sm_clock_mhz), stats.mean_of_known(seen.power_w)
    return None, None


def verify(path: Path) -> list[str]:
    """Return what is wrong with a spec record, as sentences; empty if it is sound.

    Raises RequestError if the file is not a spec record.
    """
    return _wrong(path, spec.read(path))


def read(path: Path) -> SpecRecord:
    """Read a spec record and verify it; raise RequestError with the first problem if it is none or
    does not verify.
    """
    found = spec.read(path)
    wrong = _wrong(path, found)
    if wrong:
        raise RequestError(f"{path}: does not verify: {wrong[0]}; see steelyard verify")
    return found


def _wrong(path: Path, found: SpecRecord) -> list[str]:
    """Return what is wrong with a spec record: bytes that do not match its hashes, ceilings that do
    not follow from its benchmarks, or a status that contradicts its failure.
    """
    out = spec.integrity(path)
    for bench, told, again in zip(found.benches, found.ceilings, derive(found), strict=True):
        if not _same(told, again):
            what = " ".join(
                filter(None, (bench.group, bench.name, bench.precision, f"on rank {bench.rank}"))
            )
            out.append(f"{what} is {told.value}; recomputed from its stretches: {again.value}")
    if found.status != ("failed" if found.failure else "valid") or bool(found.failure) != bool(
        found.reasons
    ):
        out.append("the status does not follow from what is there")
    return out


def _same(told: Ceiling, again: Ceiling) -> bool:
    """Return whether two ceilings are equal, numbers to a relative 1e-9; their notes may differ."""
    if (told.interval is None) != (again.interval is None) or told.steady != again.steady:
        return False
    names = ("value", "sm_clock_mhz", "power_w", "peak", "share")
    pairs = [(getattr(told, name), getattr(again, name)) for name in names]
    pairs += zip(told.interval or (), again.interval or (), strict=True)
    return all(
        a is b or (a is not None and b is not None and isclose(a, b, rel_tol=1e-9))
        for a, b in pairs
    )
