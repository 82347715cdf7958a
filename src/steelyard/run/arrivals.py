"""The times at which the requests of an open loop arrive, all fixed before the first one is sent.

Called by run/requests.py.
"""

from collections.abc import Iterator
from itertools import count

import numpy as np

from steelyard.case.load import Load
from steelyard.data.prompts import PromptRequests
from steelyard.errors import RequestError
from steelyard.record.request_samples import MAX_REQUESTS


def plan_arrivals(load: Load, requests: PromptRequests, min_time_s: float | None) -> list[float]:
    """Return the times of arrival of an open loop in seconds since its start, all fixed before the
    first request: as many as `requests.count`, and more until `min_time_s` is over. Poisson
    arrivals are drawn from the case's seed; those of a trace repeat behind its end. Raises
    RequestError if these are more requests than a record has room for.
    """
    times: list[float] = []
    for time_s in _draw_arrivals(load, requests):
        if len(times) >= requests.count and (min_time_s is None or time_s > min_time_s):
            break
        if len(times) == MAX_REQUESTS:
            raise RequestError(
                f"min_time_s={min_time_s}: more than {MAX_REQUESTS:,} requests arrive until then;"
                " ask for less time or a lower load.rate"
            )
        times.append(time_s)
    return times


def _draw_arrivals(load: Load, requests: PromptRequests) -> Iterator[float]:
    """Yield the times of arrival of an open loop in seconds, without end. Raises RequestError if
    they are those of a trace and there is none.
    """
    trace, rate = requests.source.arrivals_s, load.rate or 1.0
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
    generator, time_s = np.random.default_rng([requests.seed, 5]), 0.0
    while True:
        time_s += float(generator.exponential(1 / rate))
        yield time_s
