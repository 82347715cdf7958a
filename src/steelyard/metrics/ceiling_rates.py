"""Derive the ceilings of a spec record from its raw benchmarks, and verify spec records.

A ceiling is a rate with its interval, mean clock and power meanwhile, and its share of the
datasheet's rate. `run/` calls this when `steelyard spec` writes a record; `verify` and `report`
call it again.
"""

import re
from math import fsum, isclose
from pathlib import Path

from steelyard.errors import RequestError, clean_error_line
from steelyard.metrics import device_readings, stats
from steelyard.metrics.shipped_peaks import list_peak_remarks
from steelyard.record import ceilings_record
from steelyard.record.ceilings_record import (
    BenchLimits,
    BenchTimings,
    Ceiling,
    SpecRecord,
    TimedCalls,
)
from steelyard.record.run_facts import PeakFacts, TelemetrySeries
from steelyard.words import Message, make_storable

MIN_TIME_S = 1e-9  # no clock resolves less
# how older records gave an exception as the reason: its type, a colon and its first line
RAW_REASON = re.compile(r"[A-Za-z_]\w*(?:Error|Exception)(?:: |$)")
MIN_DATASHEET_RATE = 1.0  # FLOP/s or bytes/s; a share of a smaller datasheet rate may not be finite


def derive_ceilings(record: SpecRecord) -> list[Ceiling]:
    """Return the ceiling (rate with interval, clock, power, share of the datasheet) of each
    benchmark of a spec record, in the same order; computed anew from the raw timings, stored
    ceilings are not read.
    """
    peak = record.environment.hardware.peak
    devices = {rank.rank: rank.device for rank in record.ranks}
    series_by_device = {item.device: item for item in record.telemetry}
    return [
        _derive_ceiling(
            item, record.limits, peak, series_by_device.get(devices.get(item.rank) or "")
        )
        for item in record.benches
    ]


def _derive_ceiling(
    bench: BenchTimings, limits: BenchLimits, peak: PeakFacts | None, series: TelemetrySeries | None
) -> Ceiling:
    """Return the ceiling of one benchmark: amount of work over time of its settled stretches
    (groups of calls timed together), in the benchmark's unit per second, with interval, mean clock
    and power, and share of the datasheet's rate.

    For a benchmark in bytes (unit "B") the value is the amount itself, without these. The value is
    None, with a note, if the benchmark gave its own reason, its result was wrong or missing, or all
    took less than 1 ns. `series` is the telemetry of its device, None if there is none.
    """
    message = make_ceiling_note(bench, limits)
    note = message and make_storable(message)
    if _explain_absence(bench) is not None or bench.amount is None:
        return Ceiling(value=None, note=note)
    if bench.unit == "B":
        return Ceiling(value=bench.amount, note=note)
    steady, stretches = select_settled_stretches(bench.stretches, limits)
    work, times = (
        [bench.amount * stretch.calls for stretch in stretches],
        [stretch.time_s for stretch in stretches],
    )
    if fsum(times) < MIN_TIME_S:
        return Ceiling(value=None, note=note)
    value = fsum(work) / fsum(times)
    interval = stats.estimate_rate_interval(value, work, times)
    datasheet_rate = find_datasheet_rate(bench, peak)
    clock, power = _mean_clock_and_power(series, stretches)
    return Ceiling(
        value=value,
        interval=interval,
        steady=steady,
        sm_clock_mhz=clock,
        power_w=power,
        peak=datasheet_rate,
        share=None if datasheet_rate is None else value / datasheet_rate,
        note=note,
    )


def make_ceiling_note(bench: BenchTimings, limits: BenchLimits) -> Message | None:
    """Return the note beside a ceiling, the first that applies: why it has no value; for an amount
    in bytes how it was found; that timings were too short (below 1 ns in total); that the last
    `limits.last` stretches did not agree within the share `limits.within`. None if there is nothing
    to say.
    """
    why = _explain_absence(bench)
    if why is not None:
        return why
    if bench.unit == "B":
        return (
            Message("ceiling.text", {"text": str(bench.detail["how"])})
            if "how" in bench.detail
            else None
        )
    steady, stretches = select_settled_stretches(bench.stretches, limits)
    if fsum(stretch.time_s for stretch in stretches) < MIN_TIME_S:
        return Message("ceiling.short")
    return (
        None
        if steady
        else Message("ceiling.not_steady", {"last": limits.last, "within": limits.within})
    )


def _explain_absence(bench: BenchTimings) -> Message | None:
    """Return why a benchmark has no value: its own reason, a result beyond its error bound, or no
    amount of work, in this order; None if it has one. An exception that an older record gives as
    the reason becomes a message in our words.
    """
    if isinstance(bench.reason, Message):
        return bench.reason
    if bench.reason is not None:
        return (
            Message("ceiling.failed")
            if RAW_REASON.match(bench.reason)
            else Message("ceiling.text", {"text": bench.reason})
        )
    if bench.checked is not None and not bench.checked.is_within_bound:
        return describe_wrong_result(bench)
    return Message("ceiling.nothing") if bench.amount is None else None


def find_error_text(bench: BenchTimings) -> str | None:
    """Return type and first line of the exception that left a benchmark without a value, cleaned of
    paths and addresses: `error_text`, or an older record's reason; None if there was none.
    """
    text = bench.error_text
    if text is None and isinstance(bench.reason, str) and RAW_REASON.match(bench.reason):
        text = bench.reason
    return None if text is None else clean_error_line(text)


def describe_wrong_result(bench: BenchTimings) -> Message:
    """Return a message for a benchmark whose result failed its check against fp64: that it is not
    finite (also if there is no check or no error), or its error and the bound that it exceeds.
    """
    if bench.checked is None or bench.checked.error is None:
        return Message("ceiling.not_finite")
    return Message("ceiling.wrong", {"error": bench.checked.error, "bound": bench.checked.bound})


def select_settled_stretches(
    stretches: list[TimedCalls], limits: BenchLimits
) -> tuple[bool, list[TimedCalls]]:
    """Return (whether the rate is steady, the stretches that it is taken over); a stretch is a
    number of calls timed together.

    It is steady if there are `limits.last` stretches and the times per call of the last ones are
    positive and agree within the share `limits.within`; these are then returned. Otherwise the
    later half of all, at least `limits.last` as far as there are so many.
    """
    last_stretches = stretches[-limits.last :]
    call_times_s = [stretch.time_s / stretch.calls for stretch in last_stretches]
    if (
        len(last_stretches) == limits.last
        and min(call_times_s) > 0
        and max(call_times_s) <= (1 + limits.within) * min(call_times_s)
    ):
        return True, last_stretches
    return False, stretches[-max(limits.last, len(stretches) // 2) :]


def find_datasheet_rate(bench: BenchTimings, peak: PeakFacts | None) -> float | None:
    """Return the datasheet's rate of one device for a benchmark: dense FLOP/s of its precision for
    groups matmul and attention, bytes/s for group memory.

    None for other groups, and if the datasheet row or its rate is unknown or below 1.
    """
    if peak is None:
        return None
    if bench.group in ("matmul", "attention"):
        rate = peak.flops_per_s.get(bench.precision or "")
        return rate if rate is not None and rate >= MIN_DATASHEET_RATE else None
    bandwidth = peak.bandwidth_bytes_per_s if bench.group == "memory" else None
    return bandwidth if bandwidth is not None and bandwidth >= MIN_DATASHEET_RATE else None


def _mean_clock_and_power(
    series: TelemetrySeries | None, stretches: list[TimedCalls]
) -> tuple[float | None, float | None]:
    """Return (mean SM clock in MHz, mean power in W) of the device from the first stretch's start
    to the last one's end; each None if unknown, both without telemetry.

    If no reading lies within, those up to one sampling period before and after count.
    """
    if series is None:
        return None, None
    start_s, end_s = stretches[0].start_s, stretches[-1].start_s + stretches[-1].time_s
    for margin_s in (0.0, series.period_s):
        columns = device_readings.select_readings(
            series, start_s - margin_s, end_s + margin_s
        ).columns
        if columns.t_s:
            return stats.mean_of_known(columns.sm_clock_mhz), stats.mean_of_known(columns.power_w)
    return None, None


def verify_spec_record(path: Path) -> list[str]:
    """Return what is wrong with a spec record, as sentences; empty if it is sound.

    Raises RequestError if the file is not a spec record.
    """
    return _find_problems(path, ceilings_record.read_spec_record(path))


def list_spec_remarks(path: Path) -> list[str]:
    """Return remarks on a spec record that are no errors, as sentences: on a datasheet peak that
    the shipped table never had. Raises RequestError if the file is not a spec record.
    """
    return list_peak_remarks(ceilings_record.read_spec_record(path).environment.hardware)


def read_verified_spec_record(path: Path) -> SpecRecord:
    """Read a spec record (a machine's measured ceilings, of `steelyard spec`), verify it and return
    it; raise RequestError if the file is none, or, with the first problem, if it does not verify.
    """
    record = ceilings_record.read_spec_record(path)
    problems = _find_problems(path, record)
    if problems:
        raise RequestError(f"{path}: does not verify: {problems[0]}; see steelyard verify")
    return record


def _find_problems(path: Path, record: SpecRecord) -> list[str]:
    """Return what is wrong with a spec record, as sentences: bytes of the file at `path` that do
    not match its hashes, ceilings that do not follow from its benchmarks, or a status or reasons
    that contradict its failure; empty if it is sound.
    """
    problems = ceilings_record.find_spec_record_damage(path)
    for bench, stored, derived in zip(
        record.benches, record.ceilings, derive_ceilings(record), strict=True
    ):
        if not _is_same_ceiling(stored, derived):
            bench_name = " ".join(
                filter(None, (bench.group, bench.name, bench.precision, f"on rank {bench.rank}"))
            )
            problems.append(
                f"{bench_name} is {stored.value}; recomputed from its stretches: {derived.value}"
            )
    if record.status != ("failed" if record.failure else "valid") or bool(record.failure) != bool(
        record.reasons
    ):
        problems.append("the status contradicts the failure and reasons of the record")
    return problems


def _is_same_ceiling(stored: Ceiling, derived: Ceiling) -> bool:
    """Return whether two ceilings are equal: `steady` exactly, numbers and interval to a relative
    1e-9, None only to None. Notes are not compared.
    """
    if (stored.interval is None) != (derived.interval is None) or stored.steady != derived.steady:
        return False
    names = ("value", "sm_clock_mhz", "power_w", "peak", "share")
    pairs = [(getattr(stored, name), getattr(derived, name)) for name in names]
    pairs += zip(stored.interval or (), derived.interval or (), strict=True)
    return all(
        a is b or (a is not None and b is not None and isclose(a, b, rel_tol=1e-9))
        for a, b in pairs
    )
