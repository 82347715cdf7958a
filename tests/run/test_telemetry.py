"""Tests of the telemetry sampler with a fake clock, and of everything that is derived from a series
of readings.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import count
from threading import Event
from typing import Any

import pytest

from steelyard.accelerators import cpu
from steelyard.accelerators.row import Reading, TelemetrySource
from steelyard.metrics import device_readings
from steelyard.record.run_facts import TelemetryColumns, TelemetrySeries
from steelyard.run import telemetry
from steelyard.run.clock import now
from steelyard.run.telemetry import DeviceReadings, TelemetrySampler

NEVER_S = 3600.0


def make_ticking_clock(step_s: float = 1.0) -> Callable[[], float]:
    """Return a clock that begins at 100 s and moves on by `step_s` with each call."""
    ticks: Iterator[int] = count()
    return lambda: 100.0 + step_s * next(ticks)


def make_series(**columns: list[Any]) -> TelemetrySeries:
    """Return a series of device cuda:0 with these columns."""
    return TelemetrySeries(
        device="cuda:0", period_s=0.2, baseline_processes=0, columns=TelemetryColumns(**columns)
    )


def collect_series(
    sampler: TelemetrySampler, host: str, severity: dict[str, str]
) -> list[TelemetrySeries]:
    """Return the series of each source with the rows that the sampler has read since the last
    call.
    """
    all_series = []
    period_s, rows = sampler.take_new_rows()
    for source, columns in zip(sampler.sources, rows, strict=True):
        readings_of_device = DeviceReadings(host, source.device, severity)
        readings_of_device.add(period_s, columns)
        all_series.append(readings_of_device.to_series())
    return all_series


def to_json_values(device_series: TelemetrySeries) -> dict[str, Any]:
    """Return a series as the JSON values of a record."""
    return device_series.model_dump(mode="json")


def test_first_and_last_sample_are_taken_at_start_and_stop() -> None:
    rows: list[Reading] = [{"memory_bytes": 5, "processes": 2}, {"memory_bytes": 6, "processes": 1}]
    next_rows = iter(rows)
    sampler = TelemetrySampler(
        [TelemetrySource("cuda:0", lambda _: next(next_rows))],
        origin_s=90.0,
        clock=make_ticking_clock(),
        period_s=NEVER_S,
    )
    sampler.start()
    sampler.stop()
    all_series = [
        to_json_values(device_series) for device_series in collect_series(sampler, "here", {})
    ]
    assert all_series == [
        {
            "device": "cuda:0",
            "host": "here",
            "period_s": NEVER_S,
            "baseline_processes": 2,
            "severity": {},
            "columns": {"t_s": [10.0, 11.0], "memory_bytes": [5, 6], "processes": [2, 1]},
        }
    ]
    assert json.loads(json.dumps(all_series)) == all_series


def test_the_thread_samples_until_stop() -> None:
    enough = Event()
    reads = count(1)

    def read(_: tuple[int, ...]) -> Reading:
        number = next(reads)
        if number == 5:
            enough.set()
        return {"memory_bytes": number}

    sampler = TelemetrySampler(
        [TelemetrySource("cpu", read)], origin_s=100.0, clock=make_ticking_clock(), period_s=0.001
    )
    sampler.start()
    assert enough.wait(300)
    sampler.stop()
    columns = to_json_values(collect_series(sampler, "here", {})[0])["columns"]
    rows = len(columns["t_s"])
    assert rows >= 6
    assert columns == {
        "t_s": [float(i) for i in range(rows)],
        "memory_bytes": list(range(1, rows + 1)),
    }


def test_watched_processes_are_read() -> None:
    def read(pids: tuple[int, ...]) -> Reading:
        return {"memory_bytes": sum(pids) if pids else None}

    sampler = TelemetrySampler([TelemetrySource("cpu", read)], origin_s=0.0, period_s=NEVER_S)
    sampler.start()
    sampler.watch((8, 3))
    sampler.stop()
    device_series = to_json_values(collect_series(sampler, "here", {})[0])
    assert device_series["columns"]["memory_bytes"] == [None, 11]
    assert device_series["baseline_processes"] is None


def test_error_of_a_source_is_raised_by_stop() -> None:
    reads = count()
    failed = Event()

    def read(_: tuple[int, ...]) -> Reading:
        if next(reads) == 0:
            return {"memory_bytes": 1}
        failed.set()
        raise ZeroDivisionError("the second reading")

    sampler = TelemetrySampler([TelemetrySource("cpu", read)], origin_s=0.0, period_s=0.001)
    sampler.start()
    assert failed.wait(300)
    with pytest.raises(ZeroDivisionError, match="the second reading"):
        sampler.stop()


def test_long_runs_are_thinned() -> None:
    """The buffer that receives the rows thins them; a longer period tells it when."""
    reads = count()

    def read(_: tuple[int, ...]) -> Reading:
        return {"power_w": float(next(reads))}

    sampler = TelemetrySampler(
        [TelemetrySource("a", read)],
        origin_s=100.0,
        clock=make_ticking_clock(),
        period_s=NEVER_S,
        max_rows=4,
    )
    buffer = DeviceReadings("here", "a", {})
    lengths = []
    for _ in range(12):
        sampler._sample()
        period_s, (rows,) = sampler.take_new_rows()
        buffer.add(period_s, rows)
        lengths.append(len(buffer.columns["t_s"]))
    assert lengths == [1, 2, 3, 4, 3, 4, 3, 4, 3, 4, 3, 4]
    assert buffer.columns["t_s"] == buffer.columns["power_w"] == [0.0, 8.0, 10.0, 11.0]
    assert buffer.period_s == sampler.period_s == 16 * NEVER_S


def test_rows_after_two_halvings_thin_the_earlier_ones() -> None:
    buffer = DeviceReadings("here", "a", {})
    buffer.add(0.2, {"t_s": [0.0, 1.0, 2.0, 3.0]})
    buffer.add(0.8, {"t_s": [4.0]})
    assert buffer.columns == {"t_s": [0.0, 4.0]}
    assert buffer.to_series(lambda t_s: t_s - 1).columns.t_s == [-1.0, 3.0]


def test_halving_keeps_peaks_and_all_reasons() -> None:
    assert telemetry.halve_rows(
        {
            "t_s": [0.0, 1.0, 2.0, 3.0, 4.0],
            "power_w": [10.0, 90.0, 20.0, 80.0, 30.0],
            "memory_bytes": [1, 9, None, 3, None],
            "processes": [1, 1, 1, 2, 1],
            "reasons": [["b"], ["a"], None, ["c"], []],
        }
    ) == {
        "t_s": [0.0, 2.0, 4.0],
        "power_w": [10.0, 20.0, 30.0],
        "memory_bytes": [9, 3, None],
        "processes": [1, 2, 1],
        "reasons": [["a", "b"], ["c"], []],
    }
    assert telemetry.halve_rows({"t_s": [0.0, 1.0], "memory_bytes": [1, 2]}) == {
        "t_s": [0.0],
        "memory_bytes": [2],
    }


def test_default_limit_is_4096_rows_at_five_a_second() -> None:
    assert (telemetry.MAX_ROWS, telemetry.PERIOD_S) == (4096, 0.2)


@pytest.mark.process
def test_memory_of_a_process_includes_its_children() -> None:
    sampler = TelemetrySampler([cpu.make_cpu_source()], now(), period_s=NEVER_S)
    sampler.start()
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        sampler.watch((os.getpid(),))
        sampler.stop()
        first, last = collect_series(sampler, "here", {})[0].columns.memory_bytes
        alone = cpu._read_resident_bytes(os.getpid())
        assert first is None
        assert alone is not None
        assert last is not None
        assert last > alone > 1 << 20  # includes its child
        assert child.pid in cpu.list_descendants((os.getpid(),))
    finally:
        child.kill()
        child.wait()
    assert cpu.make_cpu_source().read((child.pid,)) == {"memory_bytes": None}


def test_window_includes_both_ends() -> None:
    all_readings = make_series(t_s=[0.0, 1.0, 2.0, 3.0], power_w=[5.0, 6.0, None, 8.0])
    assert device_readings.select_readings(all_readings, 1.0, 2.0) == make_series(
        t_s=[1.0, 2.0], power_w=[6.0, None]
    )
    assert device_readings.select_readings(all_readings, 1.1, 1.9) == make_series(
        t_s=[], power_w=[]
    )
    assert all_readings.columns.t_s == [0.0, 1.0, 2.0, 3.0]


def test_peak_memory() -> None:
    assert (
        device_readings.find_peak_memory_bytes(
            make_series(t_s=[0.0, 1.0, 2.0], memory_bytes=[3, 7, None])
        )
        == 7
    )
    assert (
        device_readings.find_peak_memory_bytes(make_series(t_s=[0.0], memory_bytes=[None])) is None
    )
    assert device_readings.find_peak_memory_bytes(make_series(t_s=[0.0])) is None


ENERGY_SERIES = make_series(
    t_s=[0.0, 1.0, 2.0, 3.0, 5.0], energy_j=[100.0, 110.0, 130.0, 160.0, 180.0]
)


@pytest.mark.parametrize(
    ("start_s", "end_s", "expected"),
    [
        (1.0, 3.0, 50.0),
        (0.5, 2.5, 40.0),  # interpolated from 105 to 145 J
        (0.0, 5.0, 80.0),
        (1.75, 4.0, 45.0),  # from 125 to 170 J, over a gap of 2 s
        (0.5, 1.5, None),  # only one reading inside
        (3.1, 4.9, None),
        (-1.0, 3.0, None),  # begins before the first reading
        (1.0, 5.5, None),
    ],
)
def test_energy_is_interpolated_between_readings(
    start_s: float, end_s: float, expected: float | None
) -> None:
    assert device_readings.count_energy_j(ENERGY_SERIES, start_s, end_s) == expected


def test_no_energy_without_a_counter() -> None:
    assert device_readings.count_energy_j(make_series(t_s=[0.0, 1.0, 2.0]), 0.0, 2.0) is None
    assert (
        device_readings.count_energy_j(
            make_series(t_s=[0.0, 1.0, 2.0], energy_j=[None] * 3), 0.0, 2.0
        )
        is None
    )


def test_energy_over_a_missed_reading() -> None:
    assert (
        device_readings.count_energy_j(
            make_series(t_s=[0.0, 1.0, 2.0, 3.0], energy_j=[0.0, None, 20.0, 50.0]), 1.0, 3.0
        )
        == 40.0
    )


def test_slowdowns_are_shares_of_readings() -> None:
    device_series = make_series(
        t_s=[0.0, 1.0, 2.0, 3.0, 4.0, 5.0], reasons=[["x"], ["a"], ["a", "b"], [], ["a"], None]
    )
    assert device_readings.find_slowdown_shares(device_series, 1.0, 5.0) == {"a": 0.75, "b": 0.25}
    assert device_readings.find_slowdown_shares(device_series, 3.0, 3.0) == {}
    assert device_readings.find_slowdown_shares(device_series, 5.0, 6.0) == {}
    assert device_readings.find_slowdown_shares(make_series(t_s=[0.0]), 0.0, 1.0) == {}


def test_foreign_processes_are_detected() -> None:
    device_series = make_series(t_s=[0.0, 1.0, 2.0, 3.0, 4.0], processes=[2, 1, 1, 2, None])
    assert device_readings.has_foreign_processes(device_series, 0.5, 2.5) is False
    assert device_readings.has_foreign_processes(device_series, 0.5, 3.0) is True
    assert device_readings.has_foreign_processes(device_series, 0.5, 3.0, workers=2) is False
    assert device_readings.has_foreign_processes(device_series, 3.5, 4.5) is None
    assert (
        device_readings.has_foreign_processes(
            make_series(t_s=[0.0, 1.0], processes=[0, 0]), 0.0, 1.0
        )
        is None
    )
    assert device_readings.has_foreign_processes(make_series(t_s=[0.0, 1.0]), 0.0, 1.0) is None
