"""Statistics of step times: the confidence interval of a rate, and where a run becomes steady.

They are the formulas of versions 2 and later; records of version 1 follow `formulas_1.py`. What
they detect and what they miss is in docs/metrics.md.
"""

from collections.abc import Callable, Iterable, Sequence
from math import exp, fsum
from statistics import fmean, median
from typing import TypeVar

import numpy as np

from steelyard.words import Message

Item = TypeVar("Item")
Key = TypeVar("Key")

# Student's t, two-sided 95 %, by degrees of freedom (any statistics handbook); beyond the table,
# the next smaller row.
T_95 = {
    1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306,
    9: 2.262, 10: 2.228, 11: 2.201, 12: 2.179, 13: 2.160, 14: 2.145, 15: 2.131, 16: 2.120,
    17: 2.110, 18: 2.101, 19: 2.093, 24: 2.064, 29: 2.045, 39: 2.023, 59: 2.001, 119: 1.980,
}  # fmt: skip

MIN_STEPS = 5  # steps for an interval
# steps that always leave so many in a steady window: with 3 to 9 steps the first is cut
MIN_STEPS_FOR_STEADY_INTERVAL = MIN_STEPS + 1
# fewest and most cosine terms: with fewer, t grows fast; more change it by at most 2 %
COSINE_TERMS = (4, 59)
MAX_LOG_HALF_WIDTH = 10.0  # of the logarithm of a rate; positive times stay below sqrt(8) t, 7.9

MIN_STEPS_TO_CUT = 10  # steps; with fewer nobody can tell which are unlike the others
GROUP_STEPS = 5  # steps
MIN_GROUPS = 6  # with fewer, steady steps would often be cut
OUTLIER_DEVIATIONS = 8.0  # robust standard deviations
MIN_RELATIVE_DIFFERENCE = (
    0.01  # share of a step's time; smaller differences of some steps do not matter for a rate
)
# the first cut whose score is within this factor of the best is taken; cutting half of a straight
# drift lowers the score 2 times, which is not enough
NEAR_BEST_FACTOR = 2.5


def student_t_95(degrees_of_freedom: int) -> float:
    """Return Student's t, two-sided 95 %, for a whole number of degrees of freedom of at least 1.

    Between rows of the table the next smaller row is used, so the value is never too small.
    """
    return T_95[max(row for row in T_95 if row <= degrees_of_freedom)]


def interpolate_student_t_95(degrees_of_freedom: float) -> float:
    """Return Student's t, two-sided 95 %, for fractional degrees of freedom, such as Welch's.

    It interpolates linearly in 1 / degrees between two rows of the table. Student's t is convex in
    that, so the value is never too small. Below the first row (1) the first applies, from the last
    row (119) on the last.
    """
    rows = sorted(T_95)
    if degrees_of_freedom <= rows[0] or degrees_of_freedom >= rows[-1]:
        return student_t_95(max(rows[0], int(degrees_of_freedom)))
    low = max(row for row in rows if row <= degrees_of_freedom)
    high = rows[rows.index(low) + 1]
    share = (1 / degrees_of_freedom - 1 / high) / (1 / low - 1 / high)
    return T_95[high] + share * (T_95[low] - T_95[high])


def estimate_rate_interval(
    rate: float, work: Sequence[float], time_s: Sequence[float]
) -> tuple[float, float] | None:
    """Return the 95 % interval (low, high) of `rate`, using the relative error of total work over
    total time of consecutive steps.

    `work` and `time_s` (seconds) have one value for each step; `rate` may be in another unit than
    their ratio. None for fewer than 5 steps, for no work or no time, or if an end would be over
    e^10 times off.

    The error of a ratio of totals is that of the sum of its residuals. Steps depend on one another,
    so their long-run variance is that of the lowest cosine terms, each an independent estimate of
    it: the equally weighted cosine estimator with Student's t (Lazarus, Lewis, Stock and Watson
    2018, "HAR Inference: Recommendations for Practice"). They advise 0.4 n^(2/3) terms; n^(2/3)/3
    are a little safer for 60 steps. The interval is symmetric in the logarithm of the rate, so that
    both ends are positive and finite however wide it is.
    """
    steps = len(work)
    total_work, total_time = fsum(work), fsum(time_s)
    if steps < MIN_STEPS or total_work <= 0 or total_time <= 0:
        return None
    residuals = np.asarray(time_s, float) - total_time / total_work * np.asarray(work, float)
    # 1e-9: the same number of terms where rounding differs
    terms = min(max(int(steps ** (2 / 3) / 3 + 1e-9), COSINE_TERMS[0]), COSINE_TERMS[1])
    angles = np.outer(np.arange(1, terms + 1), np.arange(steps) + 0.5) * np.pi / steps
    variance_of_sum = 2 * float(np.mean((np.cos(angles) @ residuals) ** 2))
    half_width = student_t_95(terms) * variance_of_sum**0.5 / total_time
    return (
        (rate * exp(-half_width), rate * exp(half_width))
        if half_width < MAX_LOG_HALF_WIDTH
        else None
    )


def find_steady_start(time_s: Sequence[float], work: Sequence[float]) -> tuple[int, Message]:
    """Return (index of the first step of the steady window, message on how it was found).

    `time_s` and `work` (tokens) have one value for each step. From 10 steps on, steps at the start
    that are unlike the others, singly or as a gradual change, are cut, at most half of all; with 3
    to 9 steps only the first is cut, with fewer none.
    """
    if len(time_s) >= MIN_STEPS_TO_CUT:
        steps = _choose_steadier(time_s, work)
        max_cut = len(steps) // 2
        cut = _cut_unlike_start(steps, max_cut)
        gradual = _cut_gradual_start(steps[cut:], max_cut - cut)
        if gradual:  # without it, more steps may stand out
            cut += gradual
            cut += _cut_unlike_start(steps[cut:], max_cut - cut)
        return cut, Message("steady.found")
    if len(time_s) >= 3:
        return 1, Message("steady.first", {"fewest": MIN_STEPS_TO_CUT})
    return 0, Message("steady.none")


def _choose_steadier(time_s: Sequence[float], work: Sequence[float]) -> Sequence[float]:
    """Return the step times as they are, or the times per unit of work of each step if those vary
    less (robust deviation relative to the median, over the second half of the steps).

    Which is steadier depends on whether steps are padded to one size. Returns the times if a step
    has no work, or both vary equally.
    """
    if min(work) <= 0:
        return time_s
    costs = [step_s / step_work for step_s, step_work in zip(time_s, work, strict=True)]
    late = len(time_s) // 2
    return min(
        (time_s, costs),
        key=lambda steps: _robust_deviation(steps[late:]) / abs(median(steps[late:]) or 1.0),
    )


def _robust_deviation(values: Sequence[float]) -> float:
    """Return a robust standard deviation: 1.4826 times the median absolute deviation, which
    outliers do not change.
    """
    usual = median(values)
    return 1.4826 * median(abs(value - usual) for value in values)


def _cut_unlike_start(time_s: Sequence[float], max_cut: int) -> int:
    """Return how many steps to cut at the start because single steps are clearly unlike the others,
    as in compilation or allocation; 0 if none is, at most `max_cut`.

    A step is unlike if it is more than 8 robust deviations, and more than 1 %, from the median of
    all steps but the first five. The cut ends after the last unlike step; typical steps before it
    are cut too, but the search ends at five typical ones in a row.
    """
    others = time_s[GROUP_STEPS:]
    usual = median(others)
    max_difference = max(
        OUTLIER_DEVIATIONS * _robust_deviation(others), MIN_RELATIVE_DIFFERENCE * usual
    )
    cut = 0
    for step in range(max_cut):
        if step - cut >= GROUP_STEPS:
            break
        if abs(time_s[step] - usual) > max_difference:
            cut = step + 1
    return cut


def _cut_gradual_start(time_s: Sequence[float], max_cut: int) -> int:
    """Return how many steps to cut at the start because of a change too small or too slow to show
    in single steps: a multiple of 5, at most `max_cut`; 0 if there is none, or fewer than 30 steps.

    MSER-5 (White 1997) over medians of five steps instead of means, so that a lone slow step does
    not count. Of all cuts it takes the first whose score is at most 2.5 times the best, because the
    best itself cuts a third of all steady runs.
    """
    medians = [
        median(time_s[i : i + GROUP_STEPS])
        for i in range(0, len(time_s) - GROUP_STEPS + 1, GROUP_STEPS)
    ]
    if len(medians) < MIN_GROUPS:
        return 0
    scores = _compute_mser_scores(medians)[: min(len(medians) // 2, max_cut // GROUP_STEPS + 1)]
    best = min(scores)
    return GROUP_STEPS * next(
        cut for cut, score in enumerate(scores) if score <= NEAR_BEST_FACTOR * best
    )


def _compute_mser_scores(values: Sequence[float]) -> list[float]:
    """Return for each index the MSER score of the values from there to the end: the sum of squared
    deviations from their mean over the square of their number, which is their squared standard
    error up to a factor.

    Computed in one pass from the end (Welford 1962): a run may have 100,000 steps, and equal values
    must give exactly 0.
    """
    mean = squares = 0.0
    scores = []
    for count, value in enumerate(reversed(values), 1):
        difference = value - mean
        mean += difference / count
        squares += difference * (value - mean)
        scores.append(squares / count**2)
    return scores[::-1]


def mean_of_known(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are not None; None if there are none."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def mean_of_all(values: Sequence[float | None]) -> float | None:
    """Return the mean of the values; None if the sequence is empty or any value is None."""
    return None if None in values else mean_of_known(values)


def group_by(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Return the items in lists by key; keys and items keep the order in which they come."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups
