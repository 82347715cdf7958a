"""Energy from made readings, worked out by hand: counters, integrated power, gaps, and devices that
several ranks share.
"""

from typing import Any

import pytest

from metrics.test_metric_table import (
    make_mmlu_record,
    make_rank_file,
    make_run_facts,
    make_telemetry,
)
from steelyard.metrics import energy, metric_table
from steelyard.metrics.energy import DeviceEnergy, measure_device_energy
from steelyard.record.record import Record
from steelyard.record.run_facts import TelemetryColumns, TelemetrySeries
from steelyard.words import Message

T_S = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
POWER = [100.0, 100.0, 200.0, 400.0, 200.0, 100.0]


def make_readings(period_s: float = 1.0, **columns: list[Any]) -> TelemetrySeries:
    """Return the readings of device cuda:0 at seconds 0 to 5; `columns` gives their values."""
    return TelemetrySeries(
        device="cuda:0", period_s=period_s, columns=TelemetryColumns(**{"t_s": T_S, **columns})
    )


def test_a_counter_comes_before_power() -> None:
    counter = [0.0, 10.0, 20.0, 30.0, 40.0, 50.0]
    assert measure_device_energy(
        make_readings(energy_j=counter, power_w=POWER), 1.0, 4.0
    ) == DeviceEnergy(30.0)


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
    assert measure_device_energy(make_readings(power_w=POWER), begin_s, end_s) == DeviceEnergy(
        joules, readings
    )


def test_a_counter_that_was_reset_is_not_used() -> None:
    counter = [90.0, 95.0, 0.0, 5.0, 10.0, 15.0]
    assert measure_device_energy(make_readings(energy_j=counter), 1.0, 4.0).joules is None
    assert measure_device_energy(
        make_readings(energy_j=counter, power_w=POWER), 1.0, 4.0
    ) == DeviceEnergy(750.0, 2)


def test_a_pass_between_counter_readings_uses_power() -> None:
    """The counter is read at the ends only, power at every reading."""
    counter = [0.0, None, None, None, None, 500.0]
    assert measure_device_energy(
        make_readings(energy_j=counter, power_w=POWER), 1.0, 4.0
    ) == DeviceEnergy(750.0, 2)


def test_gaps_in_power_readings() -> None:
    missed = [100.0, 100.0, None, None, 200.0, 100.0]
    # a gap of 3 s is three periods of 1 s, the most that is allowed
    assert measure_device_energy(make_readings(power_w=missed), 0.5, 4.5) == DeviceEnergy(
        50.0 + 450.0 + 87.5, 2
    )
    used = measure_device_energy(make_readings(period_s=0.9, power_w=missed), 0.5, 4.5)
    assert used == DeviceEnergy(
        None, why=Message("energy.gap", {"gap": 3.0, "periods": 3.0, "most": 0.9 * 3})
    )
    around = [None, None, 200.0, 400.0, 200.0, None]  # no reading before the window
    assert measure_device_energy(make_readings(power_w=around), 1.0, 3.5).why == Message(
        "energy.no_border"
    )
    assert measure_device_energy(make_readings(power_w=around), 2.0, 4.5).why == Message(
        "energy.no_border"
    )


def test_energy_is_unknown_with_too_few_readings() -> None:
    assert measure_device_energy(make_readings(power_w=POWER), 1.5, 2.5).why == Message(
        "energy.few", {"readings": 1, "time": 1.0}
    )
    assert measure_device_energy(make_readings(), 1.0, 4.0).why == Message("energy.nothing")
    assert measure_device_energy(make_readings(power_w=[None] * 6), 1.0, 4.0).why == Message(
        "energy.nothing"
    )


def make_power_readings() -> TelemetrySeries:
    """Return readings of 100 W every 2 s; the headline pass lasts from 30 s to 36 s."""
    times = [float(t) for t in range(0, 52, 2)]
    return TelemetrySeries(
        device="cuda:0",
        period_s=2.0,
        columns=TelemetryColumns(t_s=times, power_w=[100.0] * len(times)),
    )


def test_integrated_energy_is_noted() -> None:
    record = make_mmlu_record(facts=make_run_facts(telemetry=[make_power_readings()]))
    metric = record.metrics["energy"]
    assert (metric.value, metric.note) == (
        600.0,
        Message("energy.integrated", {"readings": 2, "devices": 1}),
    )
    assert record.metrics["tokens_per_joule"].value == 1.0
    assert record.metrics["energy_per_token"].note == metric.note


def test_older_records_keep_their_formula() -> None:
    record = make_mmlu_record(facts=make_run_facts(telemetry=[make_power_readings()])).model_copy(
        update={"formulas": None}
    )
    assert metric_table.derive_metrics(record)["energy"].value is None
    assert metric_table.derive_metrics(record)["energy"].note == energy.NO_COUNTER
    counted = make_mmlu_record().model_copy(update={"formulas": None})
    assert (
        metric_table.derive_metrics(counted)["energy"].value
        == make_mmlu_record().metrics["energy"].value
        == 600.0
    )


def make_two_rank_record(*devices: str) -> Record:
    """Return a record of two ranks on the named devices, which may be the same."""
    ranks = [make_rank_file(rank, device=name) for rank, name in enumerate(devices)]
    telemetry = [make_telemetry(name) for name in dict.fromkeys(devices)]
    return make_mmlu_record(*ranks, facts=make_run_facts(2, telemetry=telemetry))


def test_a_device_that_ranks_share_is_counted_once() -> None:
    assert make_two_rank_record("cuda:0", "cuda:1").metrics["energy"].value == 1200.0
    shared = make_two_rank_record("cuda:0", "cuda:0")
    assert shared.metrics["energy"].value == 600.0
    assert (
        metric_table.derive_metrics(shared.model_copy(update={"formulas": None}))["energy"].value
        == 1200.0
    )


def test_energy_is_unknown_for_a_rank_without_readings() -> None:
    record = make_mmlu_record(
        make_rank_file(), make_rank_file(1), facts=make_run_facts(2, telemetry=[make_telemetry()])
    )
    assert record.metrics["energy"].note == Message("energy.no_device", {"rank": 1})
