"""The ratio of two series of runs: numbers worked out by hand, and how often chance alone is called
significant.
"""

import random
from math import exp, sqrt

import pytest

from steelyard.metrics import ratio, stats
from steelyard.metrics.estimates import Estimate
from steelyard.metrics.ratio import Ratio

DRAWS = 2000
SPREAD = 0.01


def count_significant(runs: int, change: float, seed: int = 1) -> int:
    """Return how many of DRAWS simulated comparisons are called significant.

    Each side has `runs` runs with a relative spread of SPREAD; the new side's mean is higher by
    `change`.
    """
    draw = random.Random(seed)

    def series(mean: float) -> list[float]:
        return [mean * (1 + SPREAD * draw.gauss(0, 1)) for _ in range(runs)]

    pairs = ((series(1000.0), series(1000.0 * (1 + change))) for _ in range(DRAWS))
    results = [ratio.compare_values(base, new) for base, new in pairs]
    return sum(result is not None and result.verdict == "significant" for result in results)


@pytest.mark.parametrize("runs", [5, 3, 2])
def test_equal_series_are_rarely_called_different(runs: int) -> None:
    most = DRAWS * 0.05 + 2 * sqrt(DRAWS * 0.05 * 0.95)
    assert 0 < count_significant(runs, 0.0) <= most


def test_a_change_of_three_percent_is_significant() -> None:
    assert count_significant(5, 0.03) >= 0.9 * DRAWS
    assert count_significant(5, -0.03) >= 0.9 * DRAWS


def test_an_interval_covers_the_true_ratio() -> None:
    draw = random.Random(3)
    hits = 0
    for _ in range(DRAWS):
        base, new = (
            [m * (1 + SPREAD * draw.gauss(0, 1)) for _ in range(4)] for m in (1000.0, 1030.0)
        )
        result = ratio.compare_values(base, new)
        assert result is not None
        assert result.interval is not None
        hits += result.interval[0] <= 1.03 <= result.interval[1]
    assert hits >= DRAWS * 0.95 - 2 * sqrt(DRAWS * 0.05 * 0.95)


def test_ratio_and_welch_interval_by_hand() -> None:
    """Logarithms 0 and 2 on one side, 4 and 6 on the other: means 1 and 5, each with the variance 2
    / 2; equal spreads, so two degrees of freedom.
    """
    result = ratio.compare_values([1.0, exp(2)], [exp(4), exp(6)])
    half = 4.303 * sqrt(2)
    assert result is not None
    assert result.value == pytest.approx(exp(4))
    assert result.interval == pytest.approx((exp(4 - half), exp(4 + half)))
    assert result.verdict == "not significant"
    sure = ratio.compare_values([1.0, exp(0.2)], [exp(4), exp(4.2)])
    assert sure is not None
    assert sure.verdict == "significant"


def test_a_side_without_spread_takes_the_degrees_of_freedom_of_the_other() -> None:
    result = ratio.compare_values([1.0, 1.0, 1.0], [exp(0.1), exp(0.3)])
    half = 12.706 * sqrt(0.02 / 2)
    assert result is not None
    assert result.interval == pytest.approx((exp(0.2 - half), exp(0.2 + half)))


def test_swapping_the_sides_inverts_the_ratio() -> None:
    base, new = [100.0, 104.0, 99.0], [90.0, 95.0]
    new_over_base, base_over_new = ratio.compare_values(base, new), ratio.compare_values(new, base)
    assert new_over_base is not None
    assert base_over_new is not None
    assert new_over_base.value == pytest.approx(1 / base_over_new.value)
    assert new_over_base.interval is not None
    assert base_over_new.interval is not None
    assert new_over_base.interval == pytest.approx(
        (1 / base_over_new.interval[1], 1 / base_over_new.interval[0])
    )


@pytest.mark.parametrize("freedom", [1.0, 2.0, 8.0, 119.0])
def test_students_t_of_whole_numbers_is_the_tables(freedom: float) -> None:
    assert stats.interpolate_student_t_95(freedom) == stats.T_95[int(freedom)]


# Between the rows: the exact quantiles by numerical integration of the density.
@pytest.mark.parametrize(
    ("freedom", "exact", "most"), [(1.5, 6.0166, 7.2), (4.5, 2.6589, 2.67), (21.5, 2.0767, 2.08)]
)
def test_between_rows_students_t_is_never_too_small(
    freedom: float, exact: float, most: float
) -> None:
    assert exact <= stats.interpolate_student_t_95(freedom) <= most


def test_beyond_the_table_the_last_row_holds() -> None:
    assert stats.interpolate_student_t_95(10_000.0) == 1.98
    assert stats.interpolate_student_t_95(0.5) == 12.706


def test_one_run_is_not_tested_and_has_no_interval() -> None:
    """The intervals of its steps say nothing of the spread between runs."""
    one = [Estimate(100.0, (97.0, 103.0))]
    new = [Estimate(110.0, (105.6, 114.4)), Estimate(112.0, (105.6, 114.4))]
    assert ratio.compare_rates(one, new[:1]) == Ratio(pytest.approx(1.1), None, "not tested")
    several = Ratio(pytest.approx(sqrt(110 * 112) / 100), None, "not tested")
    assert ratio.compare_rates(one, new) == several
    assert ratio.compare_rates([Estimate(100.0)], [Estimate(50.0)]) == Ratio(
        pytest.approx(0.5), None, "not tested"
    )


def test_rates_are_compared_by_their_values_alone() -> None:
    base, new = [100.0, 104.0, 99.0], [90.0, 95.0]
    assert ratio.compare_rates(
        [Estimate(value, (1.0, 1000.0)) for value in base], [Estimate(value) for value in new]
    ) == ratio.compare_values(base, new)


def test_a_multiple_of_a_ratio_keeps_its_verdict() -> None:
    tested = Ratio(3.0, (2.0, 4.0), "significant")
    assert tested.scale(0.25) == Ratio(0.75, (0.5, 1.0), "significant")
    assert Ratio(3.0, None, "not tested").scale(0.5) == Ratio(1.5, None, "not tested")
    assert Ratio(1.0, None, "not tested") == ratio.BASE_RATIO


def test_copies_of_a_run_test_nothing() -> None:
    assert ratio.compare_values([2.0, 2.0], [4.0, 4.0]) == Ratio(
        pytest.approx(2.0), None, "not tested"
    )
    result = ratio.compare_rates([Estimate(2.0, (1.0, 3.0))] * 2, [Estimate(4.0, (3.0, 5.0))] * 2)
    assert result == Ratio(pytest.approx(2.0), None, "not tested")


def test_values_without_a_logarithm_have_no_ratio() -> None:
    assert ratio.compare_values([0.0, 1.0], [1.0, 1.0]) is None
    assert ratio.compare_values([], [1.0]) is None
    assert ratio.compare_rates([], [Estimate(1.0)]) is None


def test_extreme_values_do_not_overflow() -> None:
    result = ratio.compare_values([1e-29, 1e29], [1e-29, 1e29])
    assert result is not None
    assert result.verdict == "not significant"
