"""Compare two series of runs: the ratio of their means, its 95 % interval, and whether it is
significant.

The test is Welch's t (Biometrika 34, 1947, pages 28 to 35), which does not assume equal variances,
with the degrees of freedom of Welch and Satterthwaite. It is made on logarithms: the ratio is that
of geometric means and does not depend on which side is the base (Fleming and Wallace,
Communications of the ACM 29, 1986, pages 218 to 221). The interval is that of the difference of the
logarithms, as a ratio; a ratio is significant if its interval does not contain 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, fsum, log, sqrt
from typing import Literal

from steelyard.errors import RequestError
from steelyard.metrics import runs, stats
from steelyard.metrics.runs import Estimate, Interval, Source

Verdict = Literal["significant", "not significant", "not tested"]
FEWEST = 2  # of a side; one run has no spread
SAME = 1e-12  # a smaller spread of logarithms is rounding


@dataclass(frozen=True)
class Ratio:
    """The ratio NEW / BASE of two sides' geometric means.

    `verdict` is "not tested" if a side has fewer than two runs or all runs are equal. `source` says
    where the interval comes from: "runs" is the spread between runs; "steps" means that nothing was
    tested, and the interval is only that of steps inside a run, which says nothing of the spread
    between runs. `interval` and `source` are None if unknown.
    """

    value: float
    interval: Interval | None
    source: Source | None
    verdict: Verdict

    def beyond(self, threshold: float) -> bool:
        """Return whether the value differs from 1, up or down, by more than `threshold` (a share,
        such as 0.01).
        """
        return abs(self.value - 1) > threshold


def check_threshold(threshold: float) -> None:
    """Raise RequestError unless `threshold` is a share from 0 to below 1."""
    if not 0 <= threshold < 1:
        raise RequestError(
            f"--threshold {threshold:g}: must be a share from 0 to below 1; 0.01 is 1 %"
        )


def of_rates(base: Sequence[Estimate], new: Sequence[Estimate]) -> Ratio | None:
    """Return the ratio new / base of two sides' rates, one estimate for each run; None if a side is
    empty or a rate is not positive.

    If a side has only one run, nothing is tested and the interval comes from the runs' own steps.
    """
    if not base or not new:
        return None
    tested = of_values([one.value for one in base], [one.value for one in new])
    if tested is None or tested.verdict != "not tested":
        return tested
    rough = runs.ratio(runs.over_runs(new)[0], runs.over_runs(base)[0])
    few = min(len(base), len(new)) < FEWEST
    interval = rough.interval if few else None
    return Ratio(tested.value, interval, None if interval is None else "steps", "not tested")


def of_values(base: Sequence[float], new: Sequence[float]) -> Ratio | None:
    """Return the ratio new / base of plain numbers, one for each run; None if a side is empty or a
    number is not positive.

    Without an interval ("not tested") if a side has fewer than two runs, or all are equal, as
    copies of one run are.
    """
    if not base or not new or min(*base, *new) <= 0:
        return None
    (our_mean, our_error), (their_mean, their_error) = _logs(base), _logs(new)
    apart = their_mean - our_mean
    value = exp(apart)
    error = our_error + their_error
    # copies of one run do not show the spread between runs
    if min(len(base), len(new)) < FEWEST or error <= SAME**2:
        return Ratio(value, None, None, "not tested")
    freedom = error**2 / (
        our_error**2 / max(1, len(base) - 1) + their_error**2 / max(1, len(new) - 1)
    )
    half = stats.t_95_between(freedom) * sqrt(error)
    return Ratio(
        value,
        (exp(apart - half), exp(min(apart + half, _MOST))),
        "runs",
        "significant" if abs(apart) > half else "not significant",
    )


_MOST = 700.0  # exp of more overflows


def _logs(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean of the natural logarithms, and the variance of that mean (0 for a single
    value).
    """
    logs = [log(value) for value in values]
    count = len(logs)
    mean = fsum(logs) / count
    variance = fsum((one - mean) ** 2 for one in logs) / (count - 1) if count > 1 else 0.0
    return mean, variance / count
