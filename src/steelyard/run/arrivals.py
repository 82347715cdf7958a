"""The times at which the requests of an open loop arrive, all fixed before the first one is sent.

Called by run/requests.py.
"""

from steelyard.case.arrivals import draw_arrivals
from steelyard.case.load import Load
from steelyard.data.prompts import PromptRequests
from steelyard.errors import RequestError
from steelyard.record.request_samples import MAX_REQUESTS


def plan_arrivals(load: Load, requests: PromptRequests, min_time_s: float | None) -> list[float]:
    """Return the times of arrival of an open loop in seconds since its start, all fixed before the
    first request: as many as `requests.count`, and more until `min_time_s` is over. Poisson
    arrivals are drawn from the case's seed; those of a trace repeat behind its end. Raises
    RequestError if these are more requests than a record has room for, or there is no trace.
    """
    times: list[float] = []
    for time_s in draw_arrivals(load, requests.seed, requests.source.arrivals_s):
        if len(times) >= requests.count and (min_time_s is None or time_s > min_time_s):
            break
        if len(times) == MAX_REQUESTS:
            raise RequestError(
                f"min_time_s={min_time_s}: more than {MAX_REQUESTS:,} requests arrive until then;"
                " ask for less time or a lower load.rate"
            )
        times.append(time_s)
    return times
