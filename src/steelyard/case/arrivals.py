"""The times at which requests arrive under an open loop, which follow from the question alone."""

from collections.abc import Iterator, Sequence
from itertools import count

import numpy as np

from steelyard.case.load import Load
from steelyard.errors import RequestError


def draw_arrivals(load: Load, seed: int, trace: Sequence[float] | None = None) -> Iterator[float]:
    """Yield the times of arrival of an open loop in seconds, without end: Poisson arrivals are
    drawn from the case's `seed`, those of a `trace` (seconds) repeat behind its end. Raises
    RequestError if they are those of a trace and there is none.
    """
    rate = load.rate or 1.0
    if load.arrivals == "trace":
        if trace is None:
            raise RequestError(
                "load.arrivals 'trace' needs prompts of a trace: set question.data.source=trace"
            )
        # the first comes again one mean gap after the last
        period_s = trace[-1] + (trace[-1] / max(1, len(trace) - 1) or 1.0)
        yield from (trace[i % len(trace)] + period_s * (i // len(trace)) for i in count())
    elif load.arrivals == "constant":
        yield from (i / rate for i in count())
    generator, time_s = np.random.default_rng([seed, 5]), 0.0
    while True:
        time_s += float(generator.exponential(1 / rate))
        yield time_s
