"""The rule that a run has the kind of weights that were asked for."""

from typing import Any

import pytest

from fixtures import report
from steelyard.metrics.weights_check import check_asked_weights
from steelyard.record import record as records


@pytest.mark.parametrize(
    ("asked", "source", "ok"),
    [
        ("random", "random", True),
        ("random", "huggingface", False),
        ("checkpoint", "huggingface", True),
        ("checkpoint", "random", False),
    ],
)
def test_weights_must_be_of_the_kind_that_was_asked_for(asked: str, source: str, ok: bool) -> None:
    record = report.make_record(formulas=5, asked_weights=asked, weights={"source": source})
    [finding] = check_asked_weights(record, {})
    assert finding.check is not None
    assert (finding.check.name, finding.check.ok, finding.code) == ("weights", ok, "weights")
    assert finding.check.message.code == f"check.weights_{asked}.{'ok' if ok else 'bad'}"
    assert finding.check.message.values == {"source": source}


@pytest.mark.parametrize(
    "changes",
    [
        {"formulas": 4, "asked_weights": "random"},
        {"formulas": 5},
        {"formulas": 5, "asked_weights": "random", "weights": {"source": None}},
    ],
    ids=["earlier formulas", "not stated", "ended before"],
)
def test_other_records_are_not_judged(changes: dict[str, Any]) -> None:
    record = report.make_record(**({"weights": {"source": "huggingface"}} | changes))
    assert check_asked_weights(record, {}) == []


def test_field_is_left_out_where_it_is_unknown() -> None:
    assert "asked_weights" not in records.record_to_json(report.make_record())
    asked = report.make_record(asked_weights="random")
    assert records.record_to_json(asked)["asked_weights"] == "random"
