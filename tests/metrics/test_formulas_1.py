"""Intervals and steady windows of records that name no version of their formulas, by hand and by
simulation.
"""

import random

import pytest

from steelyard.metrics.formulas_1 import batch_means_interval, find_mser_cut, find_steady_start_v1


def test_interval_by_hand() -> None:
    """Costs of 1, 2, 3, 2 and 2 s a token: mean 2, variance (1 + 0 + 1 + 0 + 0) / 4, Student's t of
    4 degrees of freedom.
    """
    half = 2.776 * (0.5 / 5) ** 0.5
    assert half == pytest.approx(0.877848278, abs=1e-9)
    low, high = batch_means_interval([1, 1, 1, 1, 1], [1, 2, 3, 2, 2]) or (0, 0)
    assert low == pytest.approx(1 / (2 + half), rel=1e-12)
    assert high == pytest.approx(1 / (2 - half), rel=1e-12)


def test_interval_is_about_total_over_total() -> None:
    """Work differs: 10 tokens at 2 s each and four single tokens at 1 s. The center is 24/14; the
    mean cost of 1.2 is used for the width only.
    """
    half = 2.776 * (((2 - 1.2) ** 2 + 4 * (1 - 1.2) ** 2) / 4 / 5) ** 0.5
    low, high = batch_means_interval([10, 1, 1, 1, 1], [20, 1, 1, 1, 1]) or (0, 0)
    assert low == pytest.approx(1 / (24 / 14 + half), rel=1e-12)
    assert high == pytest.approx(1 / (24 / 14 - half), rel=1e-12)


def test_forty_steps_are_twenty_batches_of_two() -> None:
    """Pairs of 1 s and 3 s are all alike, so nothing is uncertain; shifted by one step, they are
    not.
    """
    assert batch_means_interval([1] * 40, [1, 3] * 20) == (0.5, 0.5)
    low, high = batch_means_interval([1] * 40, [3, 3, *[1, 1, 3, 3] * 9, 1, 1]) or (0, 0)
    half = 2.093 * (20 / 19 / 20) ** 0.5
    assert low == pytest.approx(1 / (2 + half), rel=1e-12)
    assert high == pytest.approx(1 / (2 - half), rel=1e-12)


def test_every_step_is_in_a_batch() -> None:
    """Of 41 steps, the last of 20 batches has three. Only its last step is slow, and it must
    count.
    """
    assert batch_means_interval([1] * 41, [1.0] * 41) == (1.0, 1.0)
    low, high = batch_means_interval([1] * 41, [1.0] * 40 + [4.0]) or (0, 0)
    assert low < 41 / 44 < high


def test_when_there_is_no_interval() -> None:
    assert batch_means_interval([], []) is None
    assert batch_means_interval([1] * 4, [1, 2, 1, 2]) is None
    assert batch_means_interval([0] * 6, [1] * 6) is None
    assert batch_means_interval([1] * 6, [0] * 6) is None
    # a batch without work has no cost
    assert batch_means_interval([1, 1, 0, 1, 1], [1, 1, 1, 1, 1]) is None


def test_an_interval_without_upper_end() -> None:
    low, high = batch_means_interval([1] * 5, [1, 1, 1, 1, 96]) or (0, 0)
    assert high == float("inf")
    assert 0 < low < 5 / 100


@pytest.mark.parametrize("steps", [7, 20, 100])
def test_the_interval_covers_the_true_rate_as_often_as_it_claims(steps: int) -> None:
    rng = random.Random(f"coverage:{steps}")
    covered = 0
    for _ in range(400):
        work = [rng.uniform(900, 1100) for _ in range(steps)]
        times = [
            tokens * 0.001 * rng.gauss(1.0, 0.1) for tokens in work
        ]  # true rate: 1000 a second
        low, high = batch_means_interval(work, times) or (0, 0)
        covered += low <= 1000 <= high
    assert 0.90 * 400 <= covered <= 0.99 * 400


def test_batches_are_safe_against_correlated_steps() -> None:
    """With slow spells of ten steps, an interval from single steps would cover the true rate in far
    fewer than 90 % of the trials.
    """
    rng = random.Random("spells")
    covered = covered_by_single_steps = 0
    for _ in range(400):
        times = [spell for _ in range(40) for spell in [rng.gauss(1.0, 0.1)] * 10]
        low, high = batch_means_interval([1] * 400, times) or (0, 0)
        covered += low <= 1.0 <= high
        mean = sum(times) / 400
        half = 1.966 * (sum((time_s - mean) ** 2 for time_s in times) / 399 / 400) ** 0.5
        covered_by_single_steps += mean - half <= 1.0 <= mean + half
    assert 0.90 * 400 <= covered <= 0.99 * 400
    assert covered_by_single_steps < 0.6 * 400


@pytest.mark.parametrize("slow", [5, 10, 25, 40])
def test_a_planted_warm_up_is_found(slow: int) -> None:
    rng = random.Random(slow)
    times = [3.0] * slow + [rng.gauss(1.0, 0.001) for _ in range(150)]
    first = find_mser_cut(times)
    assert slow <= first <= slow + 50
    assert first % 5 == 0


def test_a_warm_up_is_cut_exactly_where_the_rest_is_flat() -> None:
    assert find_mser_cut([9.0, 4.0, 2.0] + [1.0] * 97) == 5
    assert find_mser_cut([2.0] * 10 + [1.0] * 90) == 10
    assert find_mser_cut([2.0] * 11 + [1.0] * 89) == 15


def test_a_slow_end_is_no_warm_up() -> None:
    assert find_mser_cut([1.0] * 90 + [2.0] * 10) == 0


@pytest.mark.parametrize("time_s", [0.1, 0.3, 0.7, 1.0, 1.1, 0.123, 1 / 3])
def test_a_flat_run_is_steady_from_its_start(time_s: float) -> None:
    assert [find_mser_cut([time_s] * steps) for steps in range(0, 300, 3)] == [0] * 100


@pytest.mark.parametrize(("steps", "first"), [(1, 0), (2, 0), (3, 1), (9, 1), (10, 0)])
def test_warm_up_of_short_runs(steps: int, first: int) -> None:
    assert find_steady_start_v1([5.0] + [1.0] * (steps - 1))[0] == first
