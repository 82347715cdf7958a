"""Version 1 of the formulas: what the intervals and steady windows of older records follow. New
records use `stats`.

A record that names no version in `formulas` is verified by these. They are not to be mended: their
numbers are published.
"""

from collections.abc import Sequence
from itertools import pairwise
from math import fsum

from steelyard.metrics.stats import FEWEST, t_95
from steelyard.words import Message

# batch means (Schmeiser 1982); with 60 steps of autocorrelation 0.6 they hold the truth in 84 % of
# runs, not 95
BATCHES = 20
FEWEST_CUT = 10  # steps


def rate_interval(work: Sequence[float], time_s: Sequence[float]) -> tuple[float, float] | None:
    """95 % interval of a rate, total work over total time, from consecutive steps cut into batches.
    None for too few steps.
    """
    steps = len(work)
    total_work, total_time = fsum(work), fsum(time_s)
    if steps < FEWEST or total_work <= 0 or total_time <= 0:
        return None
    count = min(BATCHES, steps)
    edges = [steps * i // count for i in range(count + 1)]
    costs = []
    for a, b in pairwise(edges):
        done = fsum(work[a:b])
        if done <= 0:
            return None
        costs.append(fsum(time_s[a:b]) / done)
    mean = fsum(costs) / count
    variance = fsum((cost - mean) ** 2 for cost in costs) / (count - 1)
    half = t_95(count - 1) * (variance / count) ** 0.5
    center = total_time / total_work
    if center == 0:  # times too short for a number
        return None
    return 1 / (center + half), (1 / (center - half) if half < center else float("inf"))


def steady_start(time_s: Sequence[float]) -> int:
    """The step at which a run becomes steady: the cut that makes the mean of the rest surest
    (MSER-5, White 1997), looked for in the first half. 0 where nothing is gained by a cut."""
    group = 5
    means = [fsum(time_s[i : i + group]) / group for i in range(0, len(time_s) - group + 1, group)]
    # equal steps are exactly 0, or rounding would choose the cut
    means = [value - means[0] for value in means]
    best, best_score = 0, float("inf")
    for cut in range(max(1, len(means) // 2)):
        rest = means[cut:]
        if len(rest) < 2:
            break
        mean = fsum(rest) / len(rest)
        score = fsum((value - mean) ** 2 for value in rest) / len(rest) ** 2
        if score < best_score:
            best, best_score = cut, score
    return best * group


def steady(time_s: Sequence[float]) -> tuple[int, Message]:
    """The step at which the steady window of a run begins, and how it was found."""
    if len(time_s) >= FEWEST_CUT:
        return steady_start(time_s), Message("steady.mser")
    if len(time_s) >= 3:
        return 1, Message("steady.first", {"fewest": FEWEST_CUT})
    return 0, Message("steady.none")
