"""Which status a record has today, and which runs together have a proven rate."""

from typing import Any

import pytest

from fixtures.report import WITHOUT_INTERVAL, make_failed_record, make_rated_record, make_record
from steelyard.metrics import standing
from steelyard.metrics.estimates import Estimate
from steelyard.metrics.standing import RunEvidence
from steelyard.record.record import Record

# changes of a made-up record, by the status that it has with them today
CHANGES: dict[str, dict[str, Any]] = {
    "valid": {},
    "unproven": WITHOUT_INTERVAL,
    "invalid": {"status": "invalid", "reasons": [{"code": "clock", "text": "x"}]},
    "failed": {"status": "failed", "reasons": [{"code": "oom", "text": "x"}]},
}


def make_runs(*statuses: str) -> list[Record]:
    """Return one run for each status, at 100 tokens/s and more."""
    return [
        make_rated_record(number, 100.0 + number / 10, **CHANGES[status])
        for number, status in enumerate(statuses)
    ]


@pytest.mark.parametrize(
    ("has_failed", "codes", "status"),
    [
        (False, [], "valid"),
        (False, ["few_steps"], "unproven"),
        (False, ["few_steps", "few_steps"], "unproven"),
        (False, ["interval"], "invalid"),
        (False, ["few_steps", "clock"], "invalid"),
        (False, ["clock", "few_steps"], "invalid"),
        (True, [], "failed"),
        (True, ["few_steps"], "failed"),
        (True, ["clock"], "failed"),
    ],
)
def test_the_status_follows_from_failure_and_reasons(
    has_failed: bool, codes: list[str], status: str
) -> None:
    assert standing.derive_status(has_failed, iter(codes)) == status


@pytest.mark.parametrize("status", CHANGES)
def test_a_valid_record_without_an_interval_is_unproven_today(status: str) -> None:
    [record] = make_runs(status)
    assert standing.find_status(record) == status
    assert record.status == ("valid" if status == "unproven" else status)  # the stored one stays
    assert standing.is_valid(record) == (status == "valid")
    assert standing.is_answer_right(record) == (status in ("valid", "unproven"))


def test_only_a_valid_record_becomes_unproven() -> None:
    for status in ("invalid", "failed"):
        [record] = make_runs(status)
        without = record.model_copy(update={"metrics": make_runs("unproven")[0].metrics})
        assert without.metrics["tokens_per_device_s"].interval is None
        assert standing.find_status(without) == status


def test_a_stored_status_unproven_stays() -> None:
    reasons = [{"code": "few_steps", "text": {"code": "check.few_steps.bad", "values": {}}}]
    stored = {"formulas": 5, "wording": 3, "status": "unproven", "reasons": reasons}
    record = make_rated_record(1, 100.0, **stored, **WITHOUT_INTERVAL)
    assert standing.find_status(record) == "unproven"
    assert standing.list_reason_codes(record) == ["few_steps"]


@pytest.mark.parametrize(
    "changes",
    [
        {"case__size": "smoke", **WITHOUT_INTERVAL},
        {"metrics": {}},
        {"metrics": {"tokens_per_device_s": {"value": None, "unit": "tokens/s/device"}}},
    ],
    ids=["smoke", "no metric", "no rate"],
)
def test_size_smoke_and_records_without_a_rate_have_nothing_to_prove(
    changes: dict[str, Any],
) -> None:
    record = make_record(**changes)
    assert (standing.find_status(record), standing.list_reason_codes(record)) == ("valid", [])


def test_is_proven_asks_for_an_interval_of_a_rate() -> None:
    assert standing.is_proven("full", 100.0, (99.0, 101.0))
    assert not standing.is_proven("full", 100.0, None)
    assert not standing.is_proven("another size", 100.0, None)
    assert standing.is_proven("full", None, None)
    assert standing.is_proven("smoke", 100.0, None)


@pytest.mark.parametrize(
    ("statuses", "counted", "status"),
    [
        (["valid"], [0], "valid"),
        (["unproven"], [], "unproven"),
        (["invalid"], [], "invalid"),
        (["failed"], [], "failed"),
        (["valid", "unproven"], [0], "valid"),
        (["unproven", "unproven"], [], "unproven"),
        (["unproven", "unproven", "unproven"], [0, 1, 2], "valid"),
        (["unproven", "valid", "unproven"], [0, 1, 2], "valid"),
        (["unproven", "valid", "valid"], [0, 1, 2], "valid"),
        (["unproven", "unproven", "invalid"], [], "unproven"),
        (["failed", "invalid", "invalid"], [], "invalid"),
        (["failed", "unproven", "invalid"], [], "unproven"),
        (["unproven", "invalid", "valid", "failed"], [2], "valid"),
        (["unproven", "invalid", "unproven", "unproven"], [0, 2, 3], "valid"),
        (["failed", "unproven", "unproven", "valid"], [1, 2, 3], "valid"),
        (["unproven"] * 4, [0, 1, 2, 3], "valid"),
    ],
)
def test_three_runs_prove_together_what_one_cannot(
    statuses: list[str], counted: list[int], status: str
) -> None:
    records = make_runs(*statuses)
    assert standing.select_proven(records) == [records[number] for number in counted]
    assert standing.select_not_proven(records) == [
        record for number, record in enumerate(records) if number not in counted
    ]
    assert standing.find_group_status(records) == status
    # being in a group changes no status of a run
    assert [standing.find_status(record) for record in records] == statuses


def test_items_are_selected_by_any_status() -> None:
    items = [("a", "unproven"), ("b", "invalid"), ("c", "valid"), ("d", "unproven")]

    def describe(item: tuple[str, str]) -> RunEvidence:
        return RunEvidence(item[1])

    assert standing.select_proven_items(items, describe) == [
        ("a", "unproven"),
        ("c", "valid"),
        ("d", "unproven"),
    ]
    assert standing.select_proven_items(items[:3], describe) == [("c", "valid")]
    assert standing.select_proven_items([], describe) == []
    assert standing.select_proven([]) == standing.select_not_proven([]) == []


@pytest.mark.parametrize(
    ("rates", "max_interval", "counted"),
    [
        # Student's t of two degrees of freedom: 4.303 · 1 / √3 to each side of 100
        ((99.0, 100.0, 101.0), 0.0497, 3),
        ((99.0, 100.0, 101.0), 0.0496, 0),
        ((100.0, 200.0, 300.0), 0.05, 0),
        ((100.0, 200.0, 300.0), None, 3),
        ((100.0, 200.0, None), 0.05, 0),
    ],
)
def test_repeats_prove_a_rate_only_if_they_agree(
    rates: tuple[float | None, ...], max_interval: float | None, counted: int
) -> None:
    """No run becomes valid by being shorter: together they must be as exact as one long run."""
    runs = [
        RunEvidence("unproven", None if rate is None else Estimate(rate), max_interval)
        for rate in rates
    ]
    assert len(standing.select_proven_items(runs, lambda run: run)) == counted
    # a valid one among them counts in any case, and valid ones alone need not agree
    mixed = [RunEvidence("valid", runs[0].rate, max_interval), *runs[1:]]
    assert len(standing.select_proven_items(mixed, lambda run: run)) == (counted or 1)
    valid = [RunEvidence("valid", run.rate, max_interval) for run in runs]
    assert len(standing.select_proven_items(valid, lambda run: run)) == 3


def test_equal_records_are_told_apart() -> None:
    """Two equal records, of which one counts: neither stands for the other."""
    twins = [*make_runs("valid"), *make_runs("valid")]
    assert twins[0] == twins[1]
    assert len(standing.select_proven(twins)) == 2
    assert standing.select_not_proven(twins) == []


def test_codes_name_few_steps_once() -> None:
    assert standing.list_reason_codes(make_runs("valid")[0]) == []
    assert standing.list_reason_codes(make_runs("unproven")[0]) == ["few_steps"]
    twice = [{"code": code, "text": "x"} for code in ("quality", "clock", "quality")]
    invalid = make_record(status="invalid", reasons=twice, **WITHOUT_INTERVAL)
    assert standing.list_reason_codes(invalid) == ["quality", "clock"]
    assert standing.list_reason_codes(make_failed_record()) == ["oom"]


def test_statuses_are_in_order_from_best_to_worst() -> None:
    assert standing.STATUS_ORDER == ("valid", "unproven", "invalid", "failed")
    assert standing.STATUS_ORDER[:2] == standing.RIGHT_STATUSES
