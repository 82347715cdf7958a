"""Validity rules of generation."""

from collections.abc import Iterable

from steelyard.metrics.result import Finding
from steelyard.record.record import Record, Value


def completed_requests(record: Record, metrics: dict[str, Value]) -> Iterable[Finding]:
    """Validity rule."""
    return ()


asked_lengths = agreeing_tokens = cold_cache = unbound_client = completed_requests
steady_window = plausible_requests = right_answers = declared_device = completed_requests
