"""Training whose program reports the times of its steps: rates are taken from them, and they are
compared with the times at which its output lines arrive.
"""

from typing import Any

import pytest

from fixtures.golden import golden
from fixtures.report import GIB, make_rank_samples, make_training_record
from fixtures.training import ONE_RANK_TIMES, TWO_RANK_TIMES, get_metric_value, list_reason_codes
from steelyard.record.record import Record, record_to_json


def make_reported_record(
    reported_s: list[float], observed_s: list[float], **changes: Any
) -> Record:
    """Return a record of one rank whose program reported `reported_s` for its steps while its
    output lines arrived `observed_s` apart.
    """
    rows = make_rank_samples(0, reported_s, [9.0 - step for step in range(len(reported_s))], {})
    start_s = 0.0
    for row, time_s in zip(rows, observed_s, strict=True):
        row |= {"host_start_s": start_s, "host_end_s": start_s + time_s, "phases": {}}
        start_s += time_s
    window = {
        "pass": "train",
        "start_s": 20.0,
        "rank": 0,
        "wall_s": start_s,
        "allocated_bytes": None,
        "reserved_bytes": None,
    }
    return make_training_record(
        [reported_s], samples=rows, passes=[window], clock="reported", **changes
    )


OBSERVED_S = [2.0, *[1.0] * 40]


def test_rates_are_taken_from_reported_step_times():
    record = make_reported_record([2.0, *[0.99] * 40], OBSERVED_S)
    assert (record.status, list_reason_codes(record)) == ("valid", [])
    assert get_metric_value(record, "tokens_per_device_s") == pytest.approx(100 / 0.99)
    assert get_metric_value(record, "p_whole") == 4100 / 42.0  # by Steelyard's clock: 42 s
    note = "the engine does not separate compute time"
    assert [
        (get_metric_value(record, name), record.metrics[name].note)
        for name in ("p_core", "mfu_core")
    ] == [(None, note)] * 2
    assert golden("times-of-steps-are-the-program") in record.notes


@pytest.mark.parametrize(
    ("told", "ok"),
    [
        ([2.0, *[0.98] * 40], True),  # 0.8 s less than 40 s: 2 %
        ([2.0, *[0.975] * 40], False),  # 1 s, where 0.8 + 0.1 + 40 × 0.00005 is allowed
        ([2.0, *[1.025] * 40], False),
        ([9.0, *[1.0] * 40], True),  # the first step's start is unknown
        ([2.0, *[1.5] * 20, *[0.5] * 20], False),  # right in total only
    ],
)
def test_reported_step_times_are_compared_with_observed_ones(told: list[float], ok: bool):
    record = make_reported_record(told, OBSERVED_S, case__max_interval=None)
    assert list_reason_codes(record) == ([] if ok else ["reported"]), record.reasons


def test_a_difference_of_reported_times_is_explained():
    record = make_reported_record([2.0, *[0.5] * 40], OBSERVED_S)
    message = (
        "all steps: the program reports 20.000 s for 40 steps, but its output lines are 40.000 s"
        " apart; they may differ by 2%"
    )
    assert [reason.text for reason in record.reasons] == [message]


def test_a_device_without_processes_invalidates_reported_times():
    def device(processes: int | None) -> dict[str, Any]:
        t_s = [float(t) for t in range(70)]
        columns = {"t_s": t_s, "memory_bytes": [GIB] * 70, "processes": [processes] * 70}
        return {"device": "cuda:0", "period_s": 1.0, "baseline_processes": 0, "columns": columns}

    assert (
        list_reason_codes(make_reported_record(OBSERVED_S, OBSERVED_S, telemetry=[device(None)]))
        == list_reason_codes(make_reported_record(OBSERVED_S, OBSERVED_S, telemetry=[device(1)]))
        == []
    )
    assert list_reason_codes(
        make_reported_record(OBSERVED_S, OBSERVED_S, telemetry=[device(0)])
    ) == ["reported"]


def test_energy_of_a_program_is_that_of_all_its_devices():
    ranks = [
        {"rank": rank, "device": f"cuda:{rank}", "matmul_flops_per_s": None} for rank in (0, 1)
    ]
    devices = make_training_record(TWO_RANK_TIMES).telemetry
    changes = {"ranks": ranks, "telemetry": [one.model_dump() for one in devices]}
    record = make_reported_record(
        OBSERVED_S, OBSERVED_S, plan=(2, 1, 1), plan__devices=2, **changes
    )
    one, both_devices = (
        get_metric_value(make_reported_record(OBSERVED_S, OBSERVED_S), "energy"),
        get_metric_value(record, "energy"),
    )
    assert one is not None
    assert both_devices == pytest.approx(2 * one)


def test_records_without_a_clock_field_are_unchanged():
    record = make_training_record(ONE_RANK_TIMES)
    assert record.clock is None
    assert "clock" not in record_to_json(record)
    assert record_to_json(make_reported_record(OBSERVED_S, OBSERVED_S))["clock"] == "reported"
