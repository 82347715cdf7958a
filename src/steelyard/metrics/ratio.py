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
from steelyard.metrics import stats
from steelyard.metrics.estimates import Estimate, Interval

Significance = Literal["significant", "not significant", "not tested"]
MIN_RUNS = 2  # of a side; one run has no spread
LOG_ROUNDING = 1e-12  # a smaller spread of logarithms is rounding


@dataclass(frozen=True)
class Ratio:
    """The ratio NEW / BASE (`value`) of two sides' geometric means, with its 95 % `interval` (low,
    high).

    `verdict` is "significant" if the interval does not contain 1, "not significant" if it does,
    "not tested" if a side has fewer than two runs or all runs are equal. The interval is that of
    the spread between runs; it is None if nothing was tested, because steps inside one run say
    nothing of that spread. `exceeds(threshold)` tells whether the value is farther than that from
    1, `scale(factor)` returns a multiple of it.
    """

    value: float
    interval: Interval | None
    verdict: Significance

    def exceeds(self, threshold: float) -> bool:
        """Return whether this ratio differs from 1, up or down, by more than `threshold` (a share,
        such as 0.01).
        """
        return abs(self.value - 1) > threshold

    def scale(self, factor: float) -> "Ratio":
        """Return a new ratio with value and interval of this one multiplied by `factor`, which must
        be positive, and the same verdict.
        """
        interval = self.interval
        scaled = None if interval is None else (interval[0] * factor, interval[1] * factor)
        return Ratio(self.value * factor, scaled, self.verdict)


BASE_RATIO = Ratio(1.0, None, "not tested")  # of a base to itself


def check_threshold(threshold: float) -> None:
    """Raise RequestError unless `threshold` is a share from 0 to below 1."""
    if not 0 <= threshold < 1:
        raise RequestError(
            f"--threshold {threshold:g}: must be a share from 0 to below 1; 0.01 is 1 %"
        )


def compare_rates(base: Sequence[Estimate], new: Sequence[Estimate]) -> Ratio | None:
    """Return the ratio new / base of the geometric means of two sides' rates, one estimate for each
    run, tested by Welch's t on logarithms (`compare_values`); None if a side is empty or a rate is
    not positive. The estimates' own intervals, of steps inside a run, are not used.
    """
    return compare_values(
        [estimate.value for estimate in base], [estimate.value for estimate in new]
    )


def compare_values(base: Sequence[float], new: Sequence[float]) -> Ratio | None:
    """Return the ratio new / base of the geometric means of plain numbers, one for each run, with
    its 95 % interval by Welch's t on logarithms; None if a side is empty or a number is not
    positive.

    "not tested", without an interval, if a side has fewer than two runs, or if the runs of each
    side are equal, as copies of one run are.
    """
    if not base or not new or min(*base, *new) <= 0:
        return None
    (base_mean, base_error), (new_mean, new_error) = (
        _log_mean_and_variance(base),
        _log_mean_and_variance(new),
    )
    log_ratio = new_mean - base_mean
    value = exp(log_ratio)
    variance = base_error + new_error
    # copies of one run do not show the spread between runs
    if min(len(base), len(new)) < MIN_RUNS or variance <= LOG_ROUNDING**2:
        return Ratio(value, None, "not tested")
    degrees_of_freedom = variance**2 / (
        base_error**2 / max(1, len(base) - 1) + new_error**2 / max(1, len(new) - 1)
    )
    half = stats.interpolate_student_t_95(degrees_of_freedom) * sqrt(variance)
    return Ratio(
        value,
        (exp(log_ratio - half), exp(min(log_ratio + half, _MAX_LOG))),
        "significant" if abs(log_ratio) > half else "not significant",
    )


_MAX_LOG = 700.0  # exp of more overflows


def _log_mean_and_variance(values: Sequence[float]) -> tuple[float, float]:
    """Return (mean of the natural logarithms of positive values, variance of that mean: the sample
    variance over their number, 0 for a single value).
    """
    logs = [log(value) for value in values]
    count = len(logs)
    mean = fsum(logs) / count
    variance = (
        fsum((log_value - mean) ** 2 for log_value in logs) / (count - 1) if count > 1 else 0.0
    )
    return mean, variance / count
