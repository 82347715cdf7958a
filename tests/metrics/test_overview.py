"""Runs of a case side by side: exact values of made-up records."""

from math import sqrt
from typing import Any

import pytest

from fixtures.report import (
    A100_ENVIRONMENT,
    WITHOUT_INTERVAL,
    make_rated_record,
    make_records_of_two_accelerators,
)
from steelyard.metrics import overview, ratio
from steelyard.metrics.estimates import Estimate, estimate_rate
from steelyard.metrics.ratio import Ratio
from steelyard.record.record import Record


def test_repeats_are_one_row_with_the_spread_between_them() -> None:
    [row] = overview.make_overview_rows(
        [
            make_rated_record(1, 100.0),
            make_rated_record(2, 104.0),
            make_rated_record(3, 999.0, status="invalid"),
        ]
    )
    half = 12.706204736 * sqrt(8) / sqrt(2)
    assert (len(row.records), len(row.counted), row.status, row.mem) == (3, 2, "valid", 22.0)
    assert row.is_proven
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
    assert (row.status, row.counted, row.is_proven) == ("invalid", (), False)
    assert row.rate == Estimate(100.0, (99.0, 101.0))
    [row] = overview.make_overview_rows([make_rated_record(1, None, status="failed")])
    assert (row.status, row.rate, row.mem) == ("failed", None, None)


def test_the_best_of_each_division_is_valid() -> None:
    rows = overview.make_overview_rows(
        [*make_records_of_two_accelerators(), make_rated_record(6, None, case__division="open")]
    )
    [best] = overview.find_best_rows(rows)
    assert best.first_record.case.division == "closed"
    assert best.first_record.id.startswith("00000002")


def list_best_numbers(*records: Record) -> list[int]:
    """Return the numbers of the runs that begin the best rows of these records, in order."""
    rows = overview.find_best_rows(overview.make_overview_rows(records))
    return [int(row.first_record.id[:8], 16) for row in rows]


WINDOW = {"scope": {"kind": "window", "steps": 30}}


def test_a_faster_window_is_the_best_after_the_whole_run() -> None:
    whole, slower = make_rated_record(1, 100.0), make_rated_record(2, 90.0, engine__name="x")
    fast, slow = (make_rated_record(n, rate, **WINDOW) for n, rate in ((3, 120.0), (4, 80.0)))
    slow = slow.model_copy(update={"scope": slow.scope.model_copy(update={"steps": 40})})
    assert list_best_numbers(fast, slow, slower, whole) == [1, 3]
    assert list_best_numbers(slow, slower, whole) == [1]  # a slower window is not named
    assert list_best_numbers(slow, fast) == [3]
    open_run = make_rated_record(
        5, 1.0, case__division="open", metrics__samples_per_s={"value": 9.0, "unit": "questions/s"}
    )
    assert list_best_numbers(open_run, fast, whole) == [1, 3, 5]


def test_an_unproven_rate_is_shown_and_never_the_best() -> None:
    fast = make_rated_record(2, 150.0, **WITHOUT_INTERVAL)
    assert list_best_numbers(fast, make_rated_record(1, 100.0, engine__name="x")) == [1]
    assert list_best_numbers(fast) == []
    [row] = overview.make_overview_rows([fast])
    assert (row.status, row.is_proven, row.counted) == ("unproven", False, ())
    assert row.rate == Estimate(150.0)
    # the unproven runs are shown, not those that are invalid
    [row] = overview.make_overview_rows([fast, make_rated_record(3, 900.0, status="invalid")])
    assert (row.status, row.rate) == ("unproven", Estimate(150.0))


def test_three_unproven_repeats_are_a_proven_row() -> None:
    runs = [
        make_rated_record(n, rate, **WITHOUT_INTERVAL)
        for n, rate in enumerate((99.5, 100.0, 100.5), 1)
    ]
    [row] = overview.make_overview_rows(runs)
    half = 4.303 * 0.5 / sqrt(3)
    assert (row.status, row.is_proven, len(row.counted)) == ("valid", True, 3)
    assert row.rate == Estimate(100.0, pytest.approx((100 - half, 100 + half)))
    assert list_best_numbers(*runs) == [1]
    assert list_best_numbers(*runs[:2]) == []
    [two] = overview.make_overview_rows(runs[:2])
    assert (two.status, two.is_proven, two.counted) == ("unproven", False, ())
    # an interval of two runs that prove nothing would look like a proof
    assert two.rate == Estimate(99.75)


def test_quality_of_a_row_is_that_of_the_runs_that_count() -> None:
    quality = make_rated_record(1, 1.0).quality.model_dump() | {"evaluated": False}
    runs = [
        make_rated_record(1, 100.0),
        make_rated_record(2, 99.0, status="invalid", quality=quality),
    ]
    [row] = overview.make_overview_rows(runs)
    assert row.is_evaluated
    [row] = overview.make_overview_rows([*runs, make_rated_record(3, 98.0, quality=quality)])
    assert not row.is_evaluated
    assert [
        overview.make_overview_rows([make_rated_record(1, 1.0, **scope)])[0].is_whole
        for scope in ({}, WINDOW)
    ] == [True, False]


def test_accelerators_are_compared_on_one_question() -> None:
    [comparison] = overview.compare_accelerators(
        overview.make_overview_rows(make_records_of_two_accelerators())
    )
    assert (comparison.top.accelerator, comparison.base.accelerator) == (
        "NVIDIA H200",
        "NVIDIA A100",
    )
    # single runs: the intervals of their steps do not test the ratio
    assert comparison.ratio == Ratio(pytest.approx(2.0), None, "not tested")


def make_runs_of_two_accelerators(
    h200: tuple[float, ...], a100: tuple[float, ...], **changes: Any
) -> list[Record]:
    """Return one run for each rate on both accelerators."""
    return [
        *(make_rated_record(n, rate, **changes) for n, rate in enumerate(h200)),
        *(
            make_rated_record(100 + n, rate, environment=A100_ENVIRONMENT, **changes)
            for n, rate in enumerate(a100)
        ),
    ]


def test_repeats_on_two_accelerators_are_tested() -> None:
    rates = ((200.0, 204.0), (100.0, 101.0))
    [comparison] = overview.compare_accelerators(
        overview.make_overview_rows(make_runs_of_two_accelerators(*rates))
    )
    assert comparison.ratio == ratio.compare_values(rates[1], rates[0])
    assert comparison.ratio.verdict == "significant"
    assert comparison.ratio.interval == pytest.approx((1.85378, 2.17912), abs=1e-5)


def test_three_unproven_repeats_are_compared_and_two_are_not() -> None:
    rates = ((200.0, 204.0, 202.0), (100.0, 101.0, 102.0))
    runs = make_runs_of_two_accelerators(*rates, **WITHOUT_INTERVAL)
    [comparison] = overview.compare_accelerators(overview.make_overview_rows(runs))
    assert comparison.ratio == ratio.compare_values(rates[1], rates[0])
    assert overview.compare_accelerators(overview.make_overview_rows(runs[1:])) == []


def test_smoke_runs_say_nothing_of_an_accelerator() -> None:
    runs = make_runs_of_two_accelerators((200.0, 204.0), (100.0, 101.0), case__size="smoke")
    assert overview.compare_accelerators(overview.make_overview_rows(runs)) == []


def test_accelerators_on_different_questions_are_not_compared() -> None:
    first, *_, last = make_records_of_two_accelerators()
    other = last.model_copy(update={"case": last.case.model_copy(update={"key": "another"})})
    assert overview.compare_accelerators(overview.make_overview_rows([first, other])) == []
    assert overview.compare_accelerators(overview.make_overview_rows([first])) == []


def test_a_rate_of_an_unknown_count_is_refused() -> None:
    record = make_rated_record(1, 100.0)
    with pytest.raises(ValueError, match="count_name 'token' is not known; allowed: tokens, sam"):
        estimate_rate(record, "token")  # type: ignore[arg-type]


def test_an_engine_that_does_not_conform_is_never_the_best() -> None:
    honest = make_rated_record(1, 100.0)
    other = make_rated_record(2, 120.0, engine__name="x", engine__conforms=False)
    assert list_best_numbers(honest, other) == [1]
