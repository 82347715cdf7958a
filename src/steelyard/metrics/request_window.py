"""The part of a generation run over which its rates and latencies are taken."""

from steelyard.metrics.passes import RateSpan
from steelyard.record.record import Record


def make_request_span(record: Record, pass_name: str) -> RateSpan | None:
    """Return the span of a pass of requests; None if it has none."""
    return None
