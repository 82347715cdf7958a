"""Training whose program reports the times of its steps: rates are taken from them, and they are
compared with the times at which its output lines arrive.
"""

from typing import Any

import pytest

from fixtures.golden import golden
from fixtures.report import GIB, rank_samples, training
from fixtures.training import ONE, TWO, codes, value
from steelyard.record.record import Record, record_to_json


def reported(told: list[float], seen: list[float], **changes: Any) -> Record:
    """Return a record of one rank whose program reported `reported_s` for its steps while its
    output lines arrived `observed_s` apart.
    """
    rows = rank_samples(0, told, [9.0 - step for step in range(len(told))], {})
    at = 0.0
    for row, time_s in zip(rows, seen, strict=True):
        row |= {"host_start_s": at, "host_end_s": at + time_s, "phases": {}}
        at += time_s
    window = {
        "pass": "train",
        "start_s": 20.0,
        "rank": 0,
        "wall_s": at,
        "allocated_bytes": None,
        "reserved_bytes": None,
    }
    return training([told], samples=rows, passes=[window], clock="reported", **changes)


SEEN = [2.0, *[1.0] * 40]


def test_times_that_a_program_reports_are_what_rates_are_taken_from():
    found = reported([2.0, *[0.99] * 40], SEEN)
    assert (found.status, codes(found)) == ("valid", [])
    assert value(found, "tokens_per_device_s") == pytest.approx(100 / 0.99)
    assert value(found, "p_whole") == 4100 / 42.0  # by Steelyard's clock: 42 s
    note = "the engine does not separate compute time"
    assert [(value(found, name), found.metrics[name].note) for name in ("p_core", "mfu_core")] == [
        (None, note)
    ] * 2
    assert golden("times-of-steps-are-the-program") in found.notes


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
def test_times_that_a_program_reports_are_compared_with_ours(told: list[float], ok: bool):
    found = reported(told, SEEN, case__max_interval=None)
    assert codes(found) == ([] if ok else ["reported"]), found.reasons


def test_what_is_compared_is_said():
    found = reported([2.0, *[0.5] * 40], SEEN)
    said = (
        "all steps: the program reports 20.000 s for 40 steps, but its output lines are 40.000 s"
        " apart; they may differ by 2%"
    )
    assert [reason.text for reason in found.reasons] == [said]


def test_a_device_that_nobody_used_shows_that_nothing_was_done():
    def device(processes: int | None) -> dict[str, Any]:
        t_s = [float(t) for t in range(70)]
        columns = {"t_s": t_s, "memory_bytes": [GIB] * 70, "processes": [processes] * 70}
        return {"device": "cuda:0", "period_s": 1.0, "baseline_processes": 0, "columns": columns}

    assert (
        codes(reported(SEEN, SEEN, telemetry=[device(None)]))
        == codes(reported(SEEN, SEEN, telemetry=[device(1)]))
        == []
    )
    assert codes(reported(SEEN, SEEN, telemetry=[device(0)])) == ["reported"]


def test_energy_of_a_program_is_that_of_all_its_devices():
    ranks = [
        {"rank": rank, "device": f"cuda:{rank}", "matmul_flops_per_s": None} for rank in (0, 1)
    ]
    devices = training(TWO).telemetry
    told = {"ranks": ranks, "telemetry": [one.model_dump() for one in devices]}
    found = reported(SEEN, SEEN, plan=(2, 1, 1), plan__devices=2, **told)
    one, both = value(reported(SEEN, SEEN), "energy"), value(found, "energy")
    assert one is not None
    assert both == pytest.approx(2 * one)


def test_records_without_a_clock_stay_as_they_were():
    found = training(ONE)
    assert found.clock is None
    assert "clock" not in record_to_json(found)
    assert record_to_json(reported(SEEN, SEEN))["clock"] == "reported"
