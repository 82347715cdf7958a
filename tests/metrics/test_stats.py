"""Intervals and steady windows: by hand, and by simulated runs whose true rate is known."""

import random
from collections.abc import Callable
from math import cos, exp, log, pi, sqrt

import numpy as np
import pytest

from steelyard.metrics import stats
from steelyard.metrics.stats import (
    COSINE_TERMS,
    MAX_LOG_HALF_WIDTH,
    estimate_rate_interval,
    student_t_95,
)
from steelyard.words import Message

# Simulated runs per coverage estimate. Around a coverage of 95 % the estimate has a standard error
# of 0.5 %, so 19 of 20 seeds are within 1 %.
TRIALS = 2000


@pytest.mark.parametrize(
    ("freedom", "t"),
    [
        (1, 12.706),
        (4, 2.776),
        (9, 2.262),
        (19, 2.093),
        (20, 2.093),
        (23, 2.093),
        (24, 2.064),
        (119, 1.980),
        (10**6, 1.980),
    ],
)
def test_students_t(freedom: int, t: float) -> None:
    assert student_t_95(freedom) == t


def test_students_t_falls_with_freedom() -> None:
    values = [student_t_95(freedom) for freedom in range(1, 130)]
    assert values == sorted(values, reverse=True)
    assert min(values) > 1.96


def compute_log_half_width(work: list[float], times: list[float]) -> float:
    """Return half the width of the interval of the rate's logarithm, after checking that both ends
    are equally far away.
    """
    low, high = estimate_rate_interval(1.0, work, times) or (0, 0)
    assert low * high == pytest.approx(1.0, rel=1e-12)
    return log(high)


def test_five_steps_are_students_t_over_all_of_them() -> None:
    """Four cosine terms of five steps hold all their variance: steps of 1, 2, 3, 2 and 2 s have a
    variance of 0.5 and a mean of 2.
    """
    assert compute_log_half_width([1] * 5, [1, 2, 3, 2, 2]) == pytest.approx(
        2.776 * sqrt(0.5 / 5) / 2, rel=1e-12
    )


def test_the_interval_of_unequal_work_is_that_of_a_ratio_of_totals() -> None:
    """14 tokens take 24 s. The residual of a step is its time less its share by tokens: 20 - 10 *
    24/14 s, and 1 - 24/14 s for the others.
    """
    residuals = [20 - 240 / 14, *[1 - 24 / 14] * 4]
    variance = sum(residual**2 for residual in residuals) / 4
    assert compute_log_half_width([10, 1, 1, 1, 1], [20, 1, 1, 1, 1]) == pytest.approx(
        2.776 * sqrt(variance * 5) / 24, rel=1e-12
    )


def test_only_slow_variation_widens_the_interval_of_many_steps() -> None:
    """100 steps have 7 cosine terms. A wave of the third term counts in full, one of the eighth not
    at all: it averages out.
    """

    def wave(term: int) -> list[float]:
        return [1 + 0.1 * cos(pi * term * (step + 0.5) / 100) for step in range(100)]

    assert compute_log_half_width([1] * 100, wave(3)) == pytest.approx(
        2.365 * sqrt(2 / 7 * (0.1 * 50) ** 2) / 100, rel=1e-9
    )
    assert compute_log_half_width([1] * 100, wave(8)) == pytest.approx(0.0, abs=1e-12)


def test_time_proportional_to_work_leaves_no_uncertainty() -> None:
    """Steps that take longer because they do more leave nothing uncertain."""
    work = [float(1 + step % 7) for step in range(50)]
    assert compute_log_half_width(work, [0.25 * tokens for tokens in work]) == pytest.approx(
        0.0, abs=1e-12
    )


@pytest.mark.parametrize("time_s", [0.1, 0.3, 1.0, 1 / 3])
@pytest.mark.parametrize("steps", [5, 20, 300])
def test_equal_steps_have_no_width(time_s: float, steps: int) -> None:
    assert estimate_rate_interval(7.0, [1] * steps, [time_s] * steps) == (7.0, 7.0)


def test_the_interval_scales_with_the_given_rate() -> None:
    low, high = estimate_rate_interval(1.0, [1] * 6, [1, 2, 3, 2, 2, 1]) or (0, 0)
    assert estimate_rate_interval(50.0, [1] * 6, [1, 2, 3, 2, 2, 1]) == (50 * low, 50 * high)
    assert 0 < low < 1 < high


def test_when_there_is_no_interval() -> None:
    assert estimate_rate_interval(1.0, [], []) is None
    assert estimate_rate_interval(1.0, [1] * 4, [1, 2, 1, 2]) is None
    assert estimate_rate_interval(1.0, [0] * 6, [1] * 6) is None
    assert estimate_rate_interval(1.0, [1] * 6, [0] * 6) is None
    # times that are negative in part, as no clock gives them
    assert estimate_rate_interval(1.0, [1] * 6, [1e6, -1e6, 1e6, -1e6, 1e6, 1 - 1e6]) is None


@pytest.mark.parametrize("steps", [5, 6, 10, 20, 60, 2000])
def test_the_interval_of_wild_steps_is_finite_and_contains_the_rate(steps: int) -> None:
    rng = random.Random(steps)
    wild = [
        [0.0] * (steps - 1) + [1.0],
        [1.0] + [0.0] * (steps - 1),
        [10 ** rng.uniform(-9, 9) for _ in range(steps)],
    ]
    for times in wild:
        for work in ([1.0] * steps, [10 ** rng.uniform(0, 9) for _ in range(steps)]):
            low, high = estimate_rate_interval(3.0, work, times) or (0, 0)
            assert (
                0
                < low
                < 3.0
                < high
                < 3.0 * exp(sqrt(8) * student_t_95(COSINE_TERMS[0]))
                < 3.0 * exp(MAX_LOG_HALF_WIDTH)
            )


def make_autocorrelated(rng: np.random.Generator, phi: float, steps: int) -> np.ndarray:
    """Return AR(1) noise with mean 0 and variance 1 in its stationary state, one row per trial."""
    series = rng.standard_normal((TRIALS, steps))
    for step in range(1, steps):
        series[:, step] = phi * series[:, step - 1] + sqrt(1 - phi**2) * series[:, step]
    return series


def measure_coverage(times: np.ndarray, work: np.ndarray, truth: float) -> float:
    """Return the share of trials whose interval contains the true rate."""
    covered = 0
    for trial_work, trial_times in zip(work, times, strict=True):
        rate = trial_work.sum() / trial_times.sum()
        low, high = estimate_rate_interval(rate, trial_work.tolist(), trial_times.tolist()) or (
            0,
            0,
        )
        covered += low <= truth <= high
    return covered / len(times)


@pytest.mark.parametrize("steps", [60, 300])
@pytest.mark.parametrize("phi", [0.0, 0.3, 0.6])
def test_intervals_cover_the_true_rate_in_19_of_20_runs(phi: float, steps: int) -> None:
    rng = np.random.default_rng([steps, round(10 * phi)])
    times = 1 + 0.05 * make_autocorrelated(rng, phi, steps)
    assert 0.93 <= measure_coverage(times, np.ones_like(times), 1.0) <= 0.97


@pytest.mark.parametrize("phi", [0.0, 0.6])
def test_intervals_of_steps_with_different_work_cover_the_true_rate(phi: float) -> None:
    rng = np.random.default_rng(round(10 * phi))
    work = rng.uniform(500, 1500, (TRIALS, 60))
    times = work * 0.001 + 0.05 * make_autocorrelated(rng, phi, 60)  # true rate: 1000 a second
    assert 0.93 <= measure_coverage(times, work, 1000.0) <= 0.97


@pytest.mark.parametrize(
    ("steps", "phi", "least"),
    [(5, 0.0, 0.93), (10, 0.0, 0.93), (20, 0.0, 0.93), (20, 0.3, 0.92), (20, 0.6, 0.88)],
)
def test_intervals_of_few_steps_cover_the_true_rate(steps: int, phi: float, least: float) -> None:
    """Independent steps are covered however few they are; the correlation of 20 steps cannot be
    estimated well.
    """
    rng = np.random.default_rng([steps, round(10 * phi)])
    times = 1 + 0.05 * make_autocorrelated(rng, phi, steps)
    assert least <= measure_coverage(times, np.ones_like(times), 1.0) <= 0.97


def find_steady_start(times: list[float]) -> tuple[int, Message]:
    """Return where the steady window of steps with equal work starts, and how it was found."""
    return stats.find_steady_start(times, [1.0] * len(times))


def make_noisy_times(
    seed: int, steps: int, level: Callable[[int], float], share: float = 0.01
) -> list[float]:
    """Return step times of `level(step)` with relative Gaussian noise of `share`."""
    rng = random.Random(seed)
    return [level(step) * rng.gauss(1.0, share) for step in range(steps)]


def find_steady_starts(steps: int, level: Callable[[int], float]) -> list[int]:
    """Return the sorted starts of the steady windows of 200 runs with 1 % of noise."""
    return sorted(find_steady_start(make_noisy_times(seed, steps, level))[0] for seed in range(200))


@pytest.mark.parametrize("time_s", [0.1, 0.3, 0.7, 1.0, 1.1, 0.123, 1 / 3])
def test_a_flat_run_is_steady_from_its_start(time_s: float) -> None:
    assert [find_steady_start([time_s] * steps)[0] for steps in range(10, 310, 3)] == [0] * 100


@pytest.mark.parametrize(
    ("steps", "kept"), [(10, 180), (20, 196), (30, 176), (60, 192), (300, 199)]
)
def test_noise_is_not_cut_as_warm_up(steps: int, kept: int) -> None:
    """Formulas 1 cut about 70 of these 200 runs."""
    assert find_steady_starts(steps, lambda step: 1.0).count(0) >= kept


WARM_UPS = {
    "first step": ([30.0], 1),
    "a second one later": ([30.0, 1.0, 1.0, 12.0], 4),
    "ever fewer": ([30.0, 8.0, 3.0, 1.5], 4),
    "shapes that come one by one": ([9.0, 1.0, 9.0, 1.0, 9.0, 1.0, 1.0, 9.0], 8),
    "slow after compiling": ([30.0, *[2.0] * 12], 13),
}


@pytest.mark.parametrize("shape", WARM_UPS)
@pytest.mark.parametrize("steps", [26, 30, 100])
def test_compilation_at_the_start_is_cut_exactly(shape: str, steps: int) -> None:
    slow, cut = WARM_UPS[shape]
    times = slow + [1.0] * (steps - len(slow))
    assert find_steady_start(times)[0] == cut
    starts = find_steady_starts(steps, lambda step: times[step])
    assert (starts[0], starts[150]) == (cut, cut)  # noise moves the cut in few runs


@pytest.mark.parametrize("steps", range(10, 20))
def test_compilation_is_cut_in_short_runs_too(steps: int) -> None:
    assert find_steady_start([30.0] + [1.0] * (steps - 1)) == (1, Message("steady.found"))


@pytest.mark.parametrize("end", [1, 4, 5, 6, 11, 13, 25, 49, 50])
@pytest.mark.parametrize("before", [0.7, 1.1, 2.0])
def test_a_level_change_in_the_first_half_is_cut_exactly(before: float, end: int) -> None:
    assert find_steady_start([before] * end + [1.0] * (100 - end))[0] == end


def test_a_small_level_change_in_noise_is_cut_within_a_few_steps() -> None:
    """3 % at step 30 of 100, three times the noise: no single step shows it."""
    starts = find_steady_starts(100, lambda step: 1.03 if step < 30 else 1.0)
    assert [25 <= cut <= 35 for cut in starts].count(True) >= 180
    assert starts[10] >= 20
    assert starts[-1] <= 45


@pytest.mark.parametrize("begin", [55, 70, 99])
@pytest.mark.parametrize("after", [0.8, 1.2, 3.0])
def test_a_level_change_in_the_second_half_is_not_cut(after: float, begin: int) -> None:
    assert find_steady_start([1.0] * begin + [after] * (100 - begin))[0] == 0


@pytest.mark.parametrize("at", [5, 20, 40, 49, 60, 99])
@pytest.mark.parametrize("height", [1.5, 5.0, 100.0])
def test_a_spike_is_not_cut_as_warm_up(height: float, at: int) -> None:
    """Formulas 1 cut everything up to a spike in the first half."""
    assert find_steady_start([height if step == at else 1.0 for step in range(100)])[0] == 0
    assert find_steady_starts(100, lambda step: height if step == at else 1.0).count(0) >= 190


def test_recurring_spikes_are_not_cut() -> None:
    assert find_steady_start([4.0 if step % 10 == 9 else 1.0 for step in range(100)])[0] == 0


@pytest.mark.parametrize("slope", [-0.002, 0.0005, 0.002, 0.01])
def test_a_drift_through_the_whole_run_is_not_cut_and_widens_the_interval(slope: float) -> None:
    """There is no steady part. The interval shows that: it reaches from one end of the drift to
    beyond its middle.
    """
    times = [1 + slope * step for step in range(100)]
    assert find_steady_start(times)[0] == 0
    starts = find_steady_starts(100, lambda step: 1 + slope * step)
    assert starts[100] == 0
    assert starts[-1] < 50
    # the same steps in shuffled order, without drift
    flat = compute_log_half_width([1] * 100, [times[step * 37 % 100] for step in range(100)])
    assert compute_log_half_width([1] * 100, times) > 4 * flat


def test_a_decay_is_cut_where_it_is_over() -> None:
    """20 % that fade with a time constant of 10 steps: below the noise of 1 % after 30."""
    starts = find_steady_starts(100, lambda step: 1 + 0.2 * exp(-step / 10))
    assert [14 <= cut <= 35 for cut in starts].count(True) >= 185
    assert starts[0] >= 14


def test_a_slow_spell_in_the_first_half_counts_as_warm_up() -> None:
    assert find_steady_start([1.5 if 20 <= step < 30 else 1.0 for step in range(100)])[0] == 30
    assert find_steady_start([1.5 if 70 <= step < 80 else 1.0 for step in range(100)])[0] == 0


@pytest.mark.parametrize(("steps", "first"), [(0, 0), (1, 0), (2, 0), (3, 1), (9, 1)])
def test_runs_too_short_to_find_a_steady_window(steps: int, first: int) -> None:
    start, reason = find_steady_start([1.0] * steps)
    assert start == first
    assert reason == (Message("steady.first", {"fewest": 10}) if first else Message("steady.none"))


def test_different_work_neither_fakes_nor_hides_warm_up() -> None:
    """Steps of 1000 to 2000 tokens at 1 ms each, with 0.5 % of noise; the first two, and one after
    them, take 20 % longer.
    """
    rng = random.Random("tokens")
    work = [rng.uniform(1000, 2000) for _ in range(60)]
    times = [
        tokens * 0.001 * rng.gauss(1.2 if step in (0, 1, 5) else 1.0, 0.005)
        for step, tokens in enumerate(work)
    ]
    assert stats.find_steady_start(times, work)[0] == 6
    assert find_steady_start(times)[0] == 0


def test_work_that_does_not_explain_time_is_ignored() -> None:
    """Rows are padded to equal length, so neither the time of a step nor its steadiness depends on
    its tokens.
    """
    rng = random.Random("padded")
    work = [rng.uniform(1000, 2000) for _ in range(60)]
    times = [rng.gauss(1.2 if step in (0, 1, 5) else 1.0, 0.005) for step in range(60)]
    assert stats.find_steady_start(times, work)[0] == 6
    assert stats.find_steady_start(times, [0.0] * 60)[0] == 6


@pytest.mark.parametrize("steps", [60, 300])
@pytest.mark.parametrize("phi", [0.0, 0.3, 0.6])
def test_intervals_of_the_steady_window_still_cover_the_true_rate(phi: float, steps: int) -> None:
    """Runs begin with three slow steps. The coverage is 1 % lower than without a search, which
    sometimes cuts steps that differ by noise alone.
    """
    rng = np.random.default_rng([steps, round(10 * phi), 1])
    times = 1 + 0.02 * make_autocorrelated(rng, phi, steps)
    times[:, :3] += 10
    covered = 0
    for trial_times in times[:1000].tolist():
        window = trial_times[find_steady_start(trial_times)[0] :]
        low, high = estimate_rate_interval(
            len(window) / sum(window), [1] * len(window), window
        ) or (0, 0)
        covered += low <= 1.0 <= high
    assert 0.92 <= covered / 1000 <= 0.97
