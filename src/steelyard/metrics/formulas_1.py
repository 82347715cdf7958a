"""Version 1 of the interval and steady-window formulas, for records that name no `formulas`
version.

Newer records use `stats.py`. These functions must not be improved: published numbers are verified
by them.
"""

from collections.abc import Sequence
from itertools import pairwise
from math import fsum

from steelyard.metrics.stats import MIN_STEPS, student_t_95
from steelyard.words import Message

# batch means (Schmeiser 1982); with 60 steps of autocorrelation 0.6 the interval contains the true
# rate in 84 % of runs, not 95 %
MAX_BATCHES = 20
MIN_STEPS_TO_CUT_V1 = 10  # steps; with fewer at most the first step is cut


def batch_means_interval(
    work: Sequence[float], time_s: Sequence[float]
) -> tuple[float, float] | None:
    """Return the 95 % interval (low, high) of total work over total time, in work per second, from
    the means of consecutive batches of steps (at most 20 batches, Student's t).

    `work` and `time_s` have one value for each step. The upper end is infinite if the error exceeds
    the mean. None for fewer than 5 steps, for no work or no time, or if a batch has no work.
    """
    steps = len(work)
    total_work, total_time = fsum(work), fsum(time_s)
    if steps < MIN_STEPS or total_work <= 0 or total_time <= 0:
        return None
    count = min(MAX_BATCHES, steps)
    edges = [steps * i // count for i in range(count + 1)]
    costs = []
    for a, b in pairwise(edges):
        batch_work = fsum(work[a:b])
        if batch_work <= 0:
            return None
        costs.append(fsum(time_s[a:b]) / batch_work)
    mean = fsum(costs) / count
    variance = fsum((cost - mean) ** 2 for cost in costs) / (count - 1)
    half = student_t_95(count - 1) * (variance / count) ** 0.5
    center = total_time / total_work
    if center == 0:  # the times are too short for a finite rate
        return None
    return 1 / (center + half), (1 / (center - half) if half < center else float("inf"))


def find_mser_cut(time_s: Sequence[float]) -> int:
    """Return how many steps to cut before a run is steady, by MSER-5 (White 1997): the multiple of
    5 steps, in the first half, that makes the standard error of the mean of the remaining steps
    smallest; of equal ones the least.

    `time_s` has one value for each step; a last group of fewer than 5 is ignored. 0 if no cut is
    better, or with fewer than 20 steps.
    """
    group_steps = 5
    means = [
        fsum(time_s[i : i + group_steps]) / group_steps
        for i in range(0, len(time_s) - group_steps + 1, group_steps)
    ]
    # so that equal steps are exactly 0; otherwise rounding would choose the cut
    means = [value - means[0] for value in means]
    best, best_score = 0, float("inf")
    for cut in range(max(1, len(means) // 2)):
        remaining = means[cut:]
        if len(remaining) < 2:
            break
        mean = fsum(remaining) / len(remaining)
        score = fsum((value - mean) ** 2 for value in remaining) / len(remaining) ** 2
        if score < best_score:
            best, best_score = cut, score
    return best * group_steps


def find_steady_start_v1(time_s: Sequence[float]) -> tuple[int, Message]:
    """Return (index of the first step of the steady window, message on how it was found), by
    version 1 of the formulas.

    `time_s` has one value for each step. MSER-5 (`find_mser_cut`) from 10 steps on; with 3 to 9
    steps only the first is cut, with fewer none.
    """
    if len(time_s) >= MIN_STEPS_TO_CUT_V1:
        return find_mser_cut(time_s), Message("steady.mser")
    if len(time_s) >= 3:
        return 1, Message("steady.first", {"fewest": MIN_STEPS_TO_CUT_V1})
    return 0, Message("steady.none")
