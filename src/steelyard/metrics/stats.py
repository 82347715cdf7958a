"""Statistics of measured samples: intervals by batch means, and where a run becomes steady."""

from collections.abc import Sequence
from itertools import pairwise
from math import fsum

# Student's t, two-sided 95 %, by degrees of freedom (any statistics handbook); beyond the table, the next smaller row.
T_95 = {
    1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228,
    11: 2.201, 12: 2.179, 13: 2.160, 14: 2.145, 15: 2.131, 16: 2.120, 17: 2.110, 18: 2.101, 19: 2.093, 24: 2.064,
    29: 2.045, 39: 2.023, 59: 2.001, 119: 1.980,
}  # fmt: skip

BATCHES = 20  # batch means; Schmeiser 1982: 10 to 30 batches lose little, and are safe against correlated steps
FEWEST = 5
FEWEST_CUT = 10  # steps; fewer are not two groups of MSER-5, and nothing can be told of them


def t_95(freedom: int) -> float:
    return T_95[max(row for row in T_95 if row <= freedom)]


def t_95_between(freedom: float) -> float:
    """The same for degrees of freedom that are no whole number, as Welch's are: a straight line over 1 / freedom between two
    rows. Student's t is convex in that, so the line is never below it."""
    rows = sorted(T_95)
    if freedom <= rows[0] or freedom >= rows[-1]:
        return t_95(max(rows[0], int(freedom)))
    low = max(row for row in rows if row <= freedom)
    high = rows[rows.index(low) + 1]
    share = (1 / freedom - 1 / high) / (1 / low - 1 / high)
    return T_95[high] + share * (T_95[low] - T_95[high])


def rate_interval(work: Sequence[float], time_s: Sequence[float]) -> tuple[float, float] | None:
    """95 % interval of a rate, total work over total time, from consecutive steps cut into batches. None for too few steps."""
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
    """The step at which a run becomes steady: the cut that makes the mean of the rest surest (MSER-5, White 1997), looked
    for in the first half. 0 where nothing is gained by a cut."""
    group = 5
    means = [fsum(time_s[i : i + group]) / group for i in range(0, len(time_s) - group + 1, group)]
    means = [value - means[0] for value in means]  # equal steps are exactly 0, or rounding would choose the cut
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


def steady(time_s: Sequence[float]) -> tuple[int, str]:
    """The step at which the steady window of a run begins, and how it was found."""
    if len(time_s) >= FEWEST_CUT:
        return steady_start(time_s), "found by MSER-5"
    if len(time_s) >= 3:
        return 1, f"fewer than {FEWEST_CUT} steps: the first is taken for warm-up"
    return 0, "fewer than 3 steps: none is cut"
