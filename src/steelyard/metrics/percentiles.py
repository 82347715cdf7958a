"""Percentiles over requests: order statistics, their 95 % intervals, and how many requests each
needs.

The least number is that of MLPerf LoadGen's early stopping (loadgen/early_stopping.cc): with fewer
requests not even the largest value bounds the percentile with 99 % confidence. By hand, because
LoadGen is a C++ extension and gives no intervals; a test compares both.
"""

from collections.abc import Sequence
from functools import cache
from math import ceil, exp, lgamma, log, sqrt
from statistics import stdev

import numpy as np
from numpy.typing import NDArray

from steelyard.metrics.stats import student_t_95

PERCENTILES = (50, 90, 99)
CONFIDENCE = 0.99  # of early stopping, as MLPerf Inference sets it; its tolerance is 0
INTERVAL_TAIL = 0.025  # on each side of a 95 % interval
MAX_FRACTION_TERMS = 10_000
QUEUE_BATCHES = 5  # stretches in which the requests of an open loop are compared
LEAST_QUEUED = 4 * QUEUE_BATCHES  # requests
NORMAL_95 = 1.959964  # two-sided 95 % of the normal distribution

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def compute_binomial_cdf(k: int, n: int, p: float) -> float:
    """Return the probability of at most k of n independent events of probability p, which lies
    strictly between 0 and 1.
    """
    if k < 0:
        return 0.0
    if k >= n:
        return 1.0
    a, b, x = n - k, k + 1, 1 - p  # it is the regularized incomplete beta function I_x(a, b)
    front = exp(lgamma(a + b) - lgamma(a) - lgamma(b) + a * log(x) + b * log(1 - x))
    if x < (a + 1) / (a + b + 2):
        return front * _compute_beta_fraction(a, b, x) / a
    return 1 - front * _compute_beta_fraction(b, a, 1 - x) / b


def _compute_beta_fraction(a: int, b: int, x: float) -> float:
    """Return the continued fraction of the incomplete beta function (Abramowitz and Stegun 26.5.8)
    by Lentz's method; it takes some square root of a + b terms.
    """
    c, d = 1.0, 1 / (1 - (a + b) * x / (a + 1))
    fraction = d
    for m in range(1, MAX_FRACTION_TERMS):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d, c = 1 / (1 + term * d), 1 + term / c
            fraction *= d * c
        if abs(d * c - 1) < 1e-14:
            break
    return fraction


@cache
def find_min_passing(over: int, percentile: int) -> int:
    """Return LoadGen's least number of requests below a bound, if `over` are above it, for the
    bound to hold for a percentile with 99 % confidence: the least h for which at most `over` of h +
    over requests exceed the true percentile with a probability of at most 1 %.
    """
    exceeding = 1 - percentile / 100

    def is_enough(passing: int) -> bool:
        """Return whether so many requests below the bound are enough."""
        return compute_binomial_cdf(over, passing + over, exceeding) <= 1 - CONFIDENCE

    high = 1
    while not is_enough(high):
        high *= 2
    low = high // 2  # too few, or 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def find_least_count(percentile: int) -> int:
    """Return how many requests a percentile needs by LoadGen's rule: 11 for the 50th, 64 for the
    90th, 662 for the 99th.
    """
    return find_min_passing(1, percentile) + 1


def estimate_by_early_stopping(sorted_values: Sequence[float], percentile: int) -> float | None:
    """Return LoadGen's early-stopping estimate of a percentile, a bound that holds with 99 %
    confidence: the t-th largest value, t being the most that may exceed it. None if there are too
    few values.
    """
    count = len(sorted_values)
    if count < find_least_count(percentile):
        return None
    low, high = 1, count  # the most that may exceed it lies in [low, high)
    while high - low > 1:
        middle = (low + high) // 2
        fits = find_min_passing(middle, percentile) + middle <= count
        low, high = (middle, high) if fits else (low, middle)
    return float(sorted_values[count - low])


def select_percentile(sorted_values: Floats, share: float) -> float:
    """Return the order statistic of a share (0 to 1) of sorted values: the smallest value that is
    at least as large as that share of all. No value is interpolated.
    """
    rank = min(len(sorted_values), max(1, ceil(share * len(sorted_values) - 1e-9)))
    return float(sorted_values[rank - 1])


def find_rank_interval(count: int, percentile: int) -> tuple[int, int] | None:
    """Return the ranks (from 1) of two order statistics of `count` values between which the true
    percentile lies with a probability of at least 95 %, 2.5 % at most on each side; None if so few
    values have no such ranks.
    """
    share = percentile / 100
    centre, spread = count * share, sqrt(count * share * (1 - share))
    # P(X_(r) > true) = P(at most r - 1 values below it)
    low = max(0, int(centre - 3 * spread) - 2)
    while low < count and compute_binomial_cdf(low, count, share) <= INTERVAL_TAIL:
        low += 1
    high = min(count, int(centre + 3 * spread) + 3)
    if 1 - compute_binomial_cdf(high - 1, count, share) > INTERVAL_TAIL:
        return None
    while high > 1 and 1 - compute_binomial_cdf(high - 2, count, share) <= INTERVAL_TAIL:
        high -= 1
    return (low, high) if low >= 1 else None


def find_percentile_interval(sorted_values: Floats, percentile: int) -> tuple[float, float] | None:
    """Return the 95 % interval of a percentile of independent values, between two of them; None if
    there are too few.
    """
    ranks = find_rank_interval(len(sorted_values), percentile)
    if ranks is None:
        return None
    return float(sorted_values[ranks[0] - 1]), float(sorted_values[ranks[1] - 1])


def find_clustered_interval(
    values: Floats, owner: Ints, percentile: int
) -> tuple[float, float] | None:
    """Return the 95 % interval of a percentile of values that belong to requests (`owner`, the
    index of each), of which only the requests are independent; None if a side has no bound.

    Woodruff 1952: the share of values up to the percentile has a standard error, that of a ratio of
    totals over requests; the interval lies between the order statistics of the share less and plus
    1.96 times it.
    """
    share = percentile / 100
    ordered = np.sort(values)
    numbers, position = np.unique(owner, return_inverse=True)
    requests = len(numbers)
    if requests < 2:
        return None
    sizes = np.bincount(position, minlength=requests)
    below = np.bincount(position, values <= select_percentile(ordered, share), minlength=requests)
    if below.sum() == sizes.sum():  # nothing lies above: the error cannot be told
        return None
    residuals = below - sizes * (below.sum() / sizes.sum())
    variance = requests / (requests - 1) * float((residuals**2).sum()) / float(sizes.sum()) ** 2
    half = NORMAL_95 * sqrt(variance)
    if share <= half or share + half >= 1:
        return None
    return select_percentile(ordered, share - half), select_percentile(ordered, share + half)


def find_mean_interval_of_queue(values: Floats) -> tuple[float, float] | None:
    """Return the 95 % interval of the mean of values of consecutive requests of an open loop; None
    with too few of them.

    A queue remembers for long, so the means of `QUEUE_BATCHES` long stretches are compared, by
    Student's t; turns of the load, which are short, would seem independent (docs/metrics.md).
    """
    if len(values) < LEAST_QUEUED:
        return None
    means = [float(part.mean()) for part in np.array_split(values, QUEUE_BATCHES)]
    half = _find_half_width(means)
    return float(values.mean()) - half, float(values.mean()) + half


def find_percentile_interval_of_queue(
    values: Floats, percentile: int
) -> tuple[float, float] | None:
    """Return the 95 % interval of a percentile of values of consecutive requests of an open loop,
    between two order statistics; None with too few of them, or if a side has no bound.

    As `find_clustered_interval`, with the share of values up to the percentile in each of
    `QUEUE_BATCHES` stretches; its error is never taken for smaller than that of independent values.
    """
    if len(values) < LEAST_QUEUED:
        return None
    share, ordered = percentile / 100, np.sort(values)
    below = values <= select_percentile(ordered, share)
    shares = [float(part.mean()) for part in np.array_split(below, QUEUE_BATCHES)]
    least = NORMAL_95 * sqrt(share * (1 - share) / len(values))
    half = max(least, _find_half_width(shares))
    if share <= half or share + half >= 1:
        return None
    return select_percentile(ordered, share - half), select_percentile(ordered, share + half)


def _find_half_width(means: Sequence[float]) -> float:
    """Return half the width of the 95 % interval of the mean of these, by Student's t."""
    return student_t_95(len(means) - 1) * stdev(means) / sqrt(len(means))
