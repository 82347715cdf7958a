"""Runs of a case side by side: exact values of made-up records."""

from math import sqrt

import pytest

from fixtures.report import make_rated_record, make_records_of_two_accelerators
from steelyard.metrics import overview
from steelyard.metrics.estimates import Estimate, estimate_rate


def test_repeats_are_one_row_with_the_spread_between_them() -> None:
    [row] = overview.make_overview_rows(
        [
            make_rated_record(1, 100.0),
            make_rated_record(2, 104.0),
            make_rated_record(3, 999.0, status="invalid"),
        ]
    )
    half = 12.706204736 * sqrt(8) / sqrt(2)
    assert (len(row.records), row.valid_count, row.status, row.mem) == (3, 2, "valid", 22.0)
    assert row.rate is not None
    assert row.rate.value == 102.0
    assert row.rate.interval == pytest.approx((102 - half, 102 + half), rel=1e-3)


def test_one_run_has_the_interval_of_its_steps_for_rate_and_mfu() -> None:
    plan = {"nodes": 1, "devices": 2, "tp": 1, "pp": 1, "dp": 2, "launcher": "local"}
    [row] = overview.make_overview_rows(
        [make_rated_record(1, 40000.0, (39000.0, 41000.0), plan=plan)]
    )
    assert row.rate == Estimate(40000.0, (39000.0, 41000.0))  # the rate of one device, not of two
    assert row.mfu == Estimate(0.4, (pytest.approx(0.39), pytest.approx(0.41)))
    assert row.energy == Estimate(0.015)


def test_a_row_without_a_valid_run_shows_the_finished_ones() -> None:
    [row] = overview.make_overview_rows([make_rated_record(1, 100.0, status="invalid")])
    assert (row.status, row.valid_count, row.rate) == ("invalid", 0, Estimate(100.0))
    [row] = overview.make_overview_rows([make_rated_record(1, None, status="failed")])
    assert (row.status, row.rate, row.mem) == ("failed", None, None)


def test_the_best_of_each_division_is_valid() -> None:
    rows = overview.make_overview_rows(
        [*make_records_of_two_accelerators(), make_rated_record(6, None, case__division="open")]
    )
    best = overview.find_best_rows(rows)
    assert list(best) == ["closed"]
    assert best["closed"].first_record.id.startswith("00000002")


def test_accelerators_are_compared_on_one_question() -> None:
    [comparison] = overview.compare_accelerators(
        overview.make_overview_rows(make_records_of_two_accelerators())
    )
    assert (comparison.top.accelerator, comparison.base.accelerator) == (
        "NVIDIA H200",
        "NVIDIA A100",
    )
    assert comparison.ratio.value == 2.0
    error = sqrt((1 / 42) ** 2 + (0.5 / 21) ** 2)
    assert comparison.ratio.interval == pytest.approx((2 * (1 - error), 2 * (1 + error)))


def test_accelerators_on_different_questions_are_not_compared() -> None:
    first, *_, last = make_records_of_two_accelerators()
    other = last.model_copy(update={"case": last.case.model_copy(update={"key": "another"})})
    assert overview.compare_accelerators(overview.make_overview_rows([first, other])) == []
    assert overview.compare_accelerators(overview.make_overview_rows([first])) == []


def test_a_rate_of_an_unknown_count_is_refused() -> None:
    record = make_rated_record(1, 100.0)
    with pytest.raises(ValueError, match="count_name 'token' is not known; allowed: tokens, sam"):
        estimate_rate(record, "token")  # type: ignore[arg-type]
