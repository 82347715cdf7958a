"""Energy from made readings, worked out by hand: counters, integrated power, gaps, and devices that
several ranks share.
"""

from typing import Any

import pytest

from metrics.test_table import facts, made, rank_file, series
from steelyard.metrics import energy, metric_table
from steelyard.metrics.energy import DeviceEnergy, measure_device_energy
from steelyard.record.record import Record
from steelyard.record.run_facts import TelemetryColumns, TelemetrySeries
from steelyard.words import Message

T_S = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
POWER = [100.0, 100.0, 200.0, 400.0, 200.0, 100.0]


def device(period_s: float = 1.0, **columns: list[Any]) -> TelemetrySeries:
    """Return the readings of device cuda:0 at seconds 0 to 5; `columns` gives their values."""
    return TelemetrySeries(
        device="cuda:0", period_s=period_s, columns=TelemetryColumns(**{"t_s": T_S, **columns})
    )


def test_a_counter_comes_before_power() -> None:
    counter = [0.0, 10.0, 20.0, 30.0, 40.0, 50.0]
    assert measure_device_energy(device(energy_j=counter, power_w=POWER), 1.0, 4.0) == DeviceEnergy(
        30.0
    )


@pytest.mark.parametrize(
    ("begin_s", "end_s", "joules", "readings"),
    [
        (1.0, 4.0, 150.0 + 300.0 + 300.0, 2),  # two readings inside, one at each end
        # both ends lie between readings: 100 W and 150 W there
        (0.5, 4.5, 50.0 + 150.0 + 300.0 + 300.0 + 87.5, 4),
        (1.5, 3.5, 87.5 + 300.0 + 175.0, 2),
    ],
)
def test_power_is_integrated_by_trapezoids(
    begin_s: float, end_s: float, joules: float, readings: int
) -> None:
    assert measure_device_energy(device(power_w=POWER), begin_s, end_s) == DeviceEnergy(
        joules, readings
    )


def test_a_counter_that_was_set_back_tells_nothing() -> None:
    counter = [90.0, 95.0, 0.0, 5.0, 10.0, 15.0]
    assert measure_device_energy(device(energy_j=counter), 1.0, 4.0).joules is None
    assert measure_device_energy(device(energy_j=counter, power_w=POWER), 1.0, 4.0) == DeviceEnergy(
        750.0, 2
    )


def test_a_short_pass_that_no_counter_reading_falls_into() -> None:
    """The counter is read at the ends only, power at every reading."""
    counter = [0.0, None, None, None, None, 500.0]
    assert measure_device_energy(device(energy_j=counter, power_w=POWER), 1.0, 4.0) == DeviceEnergy(
        750.0, 2
    )


def test_gaps() -> None:
    missed = [100.0, 100.0, None, None, 200.0, 100.0]
    # a gap of 3 s is three periods of 1 s, the most that is allowed
    assert measure_device_energy(device(power_w=missed), 0.5, 4.5) == DeviceEnergy(
        50.0 + 450.0 + 87.5, 2
    )
    found = measure_device_energy(device(period_s=0.9, power_w=missed), 0.5, 4.5)
    assert found == DeviceEnergy(
        None, why=Message("energy.gap", {"gap": 3.0, "periods": 3.0, "most": 0.9 * 3})
    )
    around = [None, None, 200.0, 400.0, 200.0, None]  # no reading before the window
    assert measure_device_energy(device(power_w=around), 1.0, 3.5).why == Message(
        "energy.no_border"
    )
    assert measure_device_energy(device(power_w=around), 2.0, 4.5).why == Message(
        "energy.no_border"
    )


def test_too_few_readings_and_none() -> None:
    assert measure_device_energy(device(power_w=POWER), 1.5, 2.5).why == Message(
        "energy.few", {"readings": 1, "time": 1.0}
    )
    assert measure_device_energy(device(), 1.0, 4.0).why == Message("energy.nothing")
    assert measure_device_energy(device(power_w=[None] * 6), 1.0, 4.0).why == Message(
        "energy.nothing"
    )


def integrated() -> TelemetrySeries:
    """Return readings of 100 W every 2 s; the headline pass lasts from 30 s to 36 s."""
    times = [float(t) for t in range(0, 52, 2)]
    return TelemetrySeries(
        device="cuda:0",
        period_s=2.0,
        columns=TelemetryColumns(t_s=times, power_w=[100.0] * len(times)),
    )


def test_the_note_says_that_it_was_integrated() -> None:
    found = made(facts=facts(telemetry=[integrated()]))
    value = found.metrics["energy"]
    assert (value.value, value.note) == (
        600.0,
        Message("energy.integrated", {"readings": 2, "devices": 1}),
    )
    assert found.metrics["tokens_per_joule"].value == 1.0
    assert found.metrics["energy_per_token"].note == value.note


def test_records_of_before_keep_their_formula() -> None:
    found = made(facts=facts(telemetry=[integrated()])).model_copy(update={"formulas": None})
    assert metric_table.derive_metrics(found)["energy"].value is None
    assert metric_table.derive_metrics(found)["energy"].note == energy.NO_COUNTER
    counted = made().model_copy(update={"formulas": None})
    assert (
        metric_table.derive_metrics(counted)["energy"].value
        == made().metrics["energy"].value
        == 600.0
    )


def two_ranks(*devices: str) -> Record:
    """Return a record of two ranks on the named devices, which may be the same."""
    ranks = [rank_file(rank, device=name) for rank, name in enumerate(devices)]
    told = [series(name) for name in dict.fromkeys(devices)]
    return made(*ranks, facts=facts(2, telemetry=told))


def test_a_device_that_ranks_share_is_counted_once() -> None:
    assert two_ranks("cuda:0", "cuda:1").metrics["energy"].value == 1200.0
    shared = two_ranks("cuda:0", "cuda:0")
    assert shared.metrics["energy"].value == 600.0
    assert (
        metric_table.derive_metrics(shared.model_copy(update={"formulas": None}))["energy"].value
        == 1200.0
    )


def test_a_rank_whose_device_was_not_read() -> None:
    found = made(rank_file(), rank_file(1), facts=facts(2, telemetry=[series()]))
    assert found.metrics["energy"].note == Message("energy.no_device", {"rank": 1})
