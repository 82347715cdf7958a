"""The ratio of two series of runs: its 95 % interval, and whether it is significant.

The test is Welch's t (Biometrika 34, 1947, pages 28 to 35), which takes no equal variances, with
the degrees of freedom of Welch and Satterthwaite. It is made of logarithms: their means are those
of geometric means, whose ratio does not depend on which side is the base (Fleming and Wallace,
Communications of the ACM 29, 1986, pages 218 to 221). The interval is that of the difference of the
logarithms, as a ratio; a ratio is significant where it leaves out 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, fsum, log, sqrt
from typing import Literal

from steelyard.errors import RequestError
from steelyard.metrics import runs, stats
from steelyard.metrics.runs import Estimate, Interval, Source

Verdict = Literal["significant", "not significant", "not tested"]
FEWEST = 2  # runs of a side: of fewer there is no spread between runs
SAME = 1e-12  # of logarithms: a spread or a difference below it is rounding


@dataclass(frozen=True)
class Ratio:
    """NEW / BASE. `source` says what the interval comes from: the spread between runs, or, where
    nothing was tested, at least on one side the steps of one run, which say nothing of the spread
    between runs."""

    value: float
    interval: Interval | None
    source: Source | None
    verdict: Verdict

    def beyond(self, threshold: float) -> bool:
        """Whether it is far enough from 1 to matter."""
        return abs(self.value - 1) > threshold


def check_threshold(threshold: float) -> None:
    if not 0 <= threshold < 1:
        raise RequestError(
            f"--threshold {threshold:g}: must be a share from 0 to below 1; 0.01 is 1 %"
        )


def of_rates(base: Sequence[Estimate], new: Sequence[Estimate]) -> Ratio | None:
    """The ratio of two sides' rates, each with the interval of its own steps; None where a side has
    none.
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
    """The same of bare numbers. None where a side has none, or where one is not positive and so has
    no logarithm.
    """
    if not base or not new or min(*base, *new) <= 0:
        return None
    (our_mean, our_error), (their_mean, their_error) = _logs(base), _logs(new)
    apart = their_mean - our_mean
    value = exp(apart)
    error = our_error + their_error
    # copies of one run say nothing of the next
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


_MOST = 700.0  # of a logarithm: exp of more is no number


def _logs(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean of the logarithms, and the variance of that mean."""
    logs = [log(value) for value in values]
    count = len(logs)
    mean = fsum(logs) / count
    variance = fsum((one - mean) ** 2 for one in logs) / (count - 1) if count > 1 else 0.0
    return mean, variance / count
