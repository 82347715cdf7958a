"""Statistics of measured samples: the interval of a rate, and where a run becomes steady. What they
find and what they cannot is in docs/metrics.md; older records follow `formulas_1`."""

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
    1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228,
    11: 2.201, 12: 2.179, 13: 2.160, 14: 2.145, 15: 2.131, 16: 2.120, 17: 2.110, 18: 2.101, 19: 2.093, 24: 2.064,
    29: 2.045, 39: 2.023, 59: 2.001, 119: 1.980,
}  # fmt: skip

FEWEST = 5  # steps of an interval
# cosine terms, fewest and most: with fewer t grows fast, and more change it by 2 % at most
TERMS = (4, 59)
WIDEST = 10.0  # of the logarithm of a rate; steps that take time stay below sqrt(8) t, 7.9

FEWEST_CUT = 10  # steps; of fewer it cannot be told which are unlike the others
GROUP = 5  # steps
FEWEST_GROUPS = 6  # fewer make a cut of steady steps likely
UNLIKE = 8.0  # standard deviations
FAINT = 0.01  # of a step's time: a smaller difference of some steps changes nothing in a rate
# times, that a cut must lower the variance of the mean; a straight drift does 2 times, where half
# is cut
SURER = 2.5


def t_95(freedom: int) -> float:
    return T_95[max(row for row in T_95 if row <= freedom)]


def t_95_between(freedom: float) -> float:
    """The same for degrees of freedom that are no whole number, as Welch's are: a straight line
    over 1 / freedom between two rows. Student's t is convex in that, so the line is never below it.
    """
    rows = sorted(T_95)
    if freedom <= rows[0] or freedom >= rows[-1]:
        return t_95(max(rows[0], int(freedom)))
    low = max(row for row in rows if row <= freedom)
    high = rows[rows.index(low) + 1]
    share = (1 / freedom - 1 / high) / (1 / low - 1 / high)
    return T_95[high] + share * (T_95[low] - T_95[high])


def rate_interval(
    rate: float, work: Sequence[float], time_s: Sequence[float]
) -> tuple[float, float] | None:
    """95 % interval of a rate whose relative error is that of total work over total time of these
    consecutive steps. None for too few of them.

    The error of a ratio of totals is that of the sum of its residuals. Steps depend on one another,
    so their long-run variance is that of the lowest cosine terms, each an independent estimate of
    it: the equally weighted cosine estimator with Student's t (Lazarus, Lewis, Stock and Watson
    2018, "HAR Inference: Recommendations for Practice"). They advise 0.4 n^(2/3) terms; n^(2/3)/3
    are a little safer for 60 steps. The interval is symmetric in the logarithm of the rate, so that
    both ends are positive and finite however wide it is.
    """
    steps = len(work)
    total_work, total_time = fsum(work), fsum(time_s)
    if steps < FEWEST or total_work <= 0 or total_time <= 0:
        return None
    residuals = np.asarray(time_s, float) - total_time / total_work * np.asarray(work, float)
    # the same where rounding differs
    terms = min(max(int(steps ** (2 / 3) / 3 + 1e-9), TERMS[0]), TERMS[1])
    angles = np.outer(np.arange(1, terms + 1), np.arange(steps) + 0.5) * np.pi / steps
    variance_of_sum = 2 * float(np.mean((np.cos(angles) @ residuals) ** 2))
    half = t_95(terms) * variance_of_sum**0.5 / total_time
    return (rate * exp(-half), rate * exp(half)) if half < WIDEST else None


def steady(time_s: Sequence[float], work: Sequence[float]) -> tuple[int, Message]:
    """The step at which the steady window of a run begins, and how it was found."""
    if len(time_s) >= FEWEST_CUT:
        steps = _evener(time_s, work)
        most = len(steps) // 2
        cut = _unlike_start(steps, most)
        gradual = _gradual_start(steps[cut:], most - cut)
        if gradual:  # the later steps are evener without it
            cut += gradual
            cut += _unlike_start(steps[cut:], most - cut)
        return cut, Message("steady.found")
    if len(time_s) >= 3:
        return 1, Message("steady.first", {"fewest": FEWEST_CUT})
    return 0, Message("steady.none")


def _evener(time_s: Sequence[float], work: Sequence[float]) -> Sequence[float]:
    """Times, or times per work where those of the second half vary less: work may differ from step
    to step, and be padded or not."""
    if min(work) <= 0:
        return time_s
    costs = [one / done for one, done in zip(time_s, work, strict=True)]
    late = len(time_s) // 2
    return min(
        (time_s, costs),
        key=lambda steps: _deviation(steps[late:]) / abs(median(steps[late:]) or 1.0),
    )


def _deviation(values: Sequence[float]) -> float:
    """The standard deviation, from the median deviation of a normal distribution: outliers do not
    change it.
    """
    usual = median(values)
    return 1.4826 * median(abs(one - usual) for one in values)


def _unlike_start(time_s: Sequence[float], most: int) -> int:
    """Behind the steps at the start that are clearly unlike the others: compilation, allocation,
    another level. Gaps of fewer than five steps between them are cut too."""
    others = time_s[GROUP:]
    usual = median(others)
    band = max(UNLIKE * _deviation(others), FAINT * usual)
    cut = 0
    for step in range(most):
        if step - cut >= GROUP:
            break
        if abs(time_s[step] - usual) > band:
            cut = step + 1
    return cut


def _gradual_start(time_s: Sequence[float], most: int) -> int:
    """Behind a change that is too small or too slow to be seen step by step: MSER-5 (White 1997)
    over medians of five steps instead of means, for which a lone slow step is none. Of the cuts it
    takes the first that is nearly the best: the best itself cuts a third of all steady runs."""
    medians = [median(time_s[i : i + GROUP]) for i in range(0, len(time_s) - GROUP + 1, GROUP)]
    if len(medians) < FEWEST_GROUPS:
        return 0
    scores = _scores(medians)[: min(len(medians) // 2, most // GROUP + 1)]
    best = min(scores)
    return GROUP * next(cut for cut, score in enumerate(scores) if score <= SURER * best)


def _scores(values: Sequence[float]) -> list[float]:
    """Of each value and those after it the squared standard error of the mean, but for a factor. In
    one pass from the end (Welford 1962): a run may have 100,000 steps, and equal values give
    exactly 0."""
    mean = squares = 0.0
    out = []
    for count, value in enumerate(reversed(values), 1):
        away = value - mean
        mean += away / count
        squares += away * (value - mean)
        out.append(squares / count**2)
    return out[::-1]


def mean_of_known(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are known; None if none is."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def mean_of_all(values: Sequence[float | None]) -> float | None:
    """Return the mean of the values; None if there are none, or one is not known."""
    return None if None in values else mean_of_known(values)


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Return items by their key, both in the order in which they come."""
    out: dict[Key, list[Item]] = {}
    for item in items:
        out.setdefault(key(item), []).append(item)
    return out
