"""Test whether latencies drift through a window, so that no part of it is steady.

The test is on ranks, so that single slow requests do not count, and its error is that of the lowest
frequencies beside the trend, so that requests may depend on one another (the orthonormal-series
test of Sun 2011 with `SERIES_TERMS` terms). A drift counts only if it is also large.
"""

from dataclasses import dataclass

import numpy as np

from steelyard.record.request_samples import Floats

MIN_TREND_REQUESTS = 60  # a shorter run shows no trend that could be told from chance
# few terms, because a queue near its capacity changes slowly
SERIES_TERMS = 4
# Two-sided 0.1 % of Student's t with 4 degrees of freedom. docs/metrics.md has the simulated share
# of steady runs that are found to drift.
T_LIMIT = 8.610
MIN_CHANGE = 0.2  # between the medians of the first and the last third, as a share of the larger


@dataclass(frozen=True)
class Trend:
    """The trend of values through a window: `t`, Student's t of the slope of their ranks, `first`
    and `last`, the medians of the first and the last third.
    """

    t: float
    first: float
    last: float

    @property
    def is_drift(self) -> bool:
        """Whether the values drift: the slope is no chance, and the change is large."""
        largest = max(abs(self.first), abs(self.last))
        return abs(self.t) > T_LIMIT and abs(self.last - self.first) > MIN_CHANGE * largest


def find_trend(values: Floats) -> Trend | None:
    """Return the trend of consecutive values; None if there are fewer than `MIN_TREND_REQUESTS`."""
    count = len(values)
    if count < MIN_TREND_REQUESTS:
        return None
    ranks = _rank(values)
    place = (np.arange(count) + 0.5) / count
    slope = place - 0.5
    slope /= np.linalg.norm(slope)
    # the first cosine is nearly the trend itself, and left out
    basis = np.cos(np.pi * np.outer(np.arange(2, SERIES_TERMS + 2), place))
    columns = np.column_stack((slope, basis.T))
    orthonormal = np.linalg.qr(columns)[0]
    scores = orthonormal.T @ (ranks - ranks.mean())
    error = float(np.sqrt(np.mean(scores[1:] ** 2)))
    # qr may turn the sign of a column
    size = float(scores[0]) * float(np.sign(orthonormal[:, 0] @ slope))
    third = count // 3
    return Trend(
        0.0 if size == 0 else size / max(error, 1e-12),
        float(np.median(values[:third])),
        float(np.median(values[-third:])),
    )


def _rank(values: Floats) -> Floats:
    """Return the ranks of values, equal ones with their mean rank."""
    _, position, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    ranks: Floats = (ends - (counts - 1) / 2)[position]
    return ranks
