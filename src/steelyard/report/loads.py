"""What pages say of the load of generation: its short name, the order of loads, and which runs
differ in nothing else.

Two loads are two questions with different keys. Pages show them as rows of one case, but never rank
one against the other.
"""

from typing import Any

from steelyard.metrics import estimates
from steelyard.record.record import Record
from steelyard.report.numbers import UNKNOWN
from steelyard.schema import to_canonical_json

STATISTICS = ("mean", "p50", "p90", "p99")  # ends of the names of latencies
LOAD_KEY = "question.load"  # the dotted key of the load in a case
# What runs of one load curve have in common beside the question without its load. How many requests
# were sent follows from the load.
_CURVE_PARTS = ("case", "division", "precision", "steps", "formulas")
_SERIES_PARTS = ("engine", "plan", "asked_tune", "weights", "devices", "formulas")
# open loops are placed by their rate, closed ones by their slots; the others have no place
_MODES = ("concurrency", "rate", "offline")


def format_load(record: Record) -> str:
    """Return the load under which requests were generated, such as `C16`; UNKNOWN for other kinds
    of work.
    """
    load = record.question.load
    return UNKNOWN if load is None else load.name


def is_load_key(key: str) -> bool:
    """Return whether a dotted key of a case is that of its load or of a part of it."""
    return key == LOAD_KEY or key.startswith(f"{LOAD_KEY}.")


def make_load_sort_key(record: Record) -> tuple[int, float, str]:
    """Return the sort key of a record's load: closed loops by their slots, open loops by their
    rate, then offline; equal for all runs of kinds of work without a load.
    """
    load = record.question.load
    if load is None:
        return -1, 0.0, ""
    return _MODES.index(load.mode), find_load_position(record) or 0.0, load.name


def find_load_position(record: Record) -> float | None:
    """Return the number by which a load is placed on an axis: requests in flight of a closed loop,
    requests per second of an open one. None for offline, the arrivals of a trace, and other kinds
    of work.
    """
    load = record.question.load
    if load is None:
        return None
    return load.rate if load.concurrency is None else float(load.concurrency)


def make_curve_key(record: Record) -> str:
    """Return a text that is equal for runs whose points may stand in one chart of loads: the same
    question but for its load, the same size and scope, and times by the same definitions.
    """
    parts = estimates.make_group_key(record, _CURVE_PARTS)
    return to_canonical_json([parts, _strip_load(record), record.scope.kind])


def make_series_key(record: Record) -> str:
    """Return a text that is equal for runs of one curve: the same engine, plan, settings, weights
    and devices.
    """
    return estimates.make_group_key(record, _SERIES_PARTS)


def make_loadless_key(record: Record) -> str:
    """Return a text that is equal for runs of one question but for its load."""
    return to_canonical_json(_strip_load(record))


def _strip_load(record: Record) -> dict[str, Any]:
    """Return the question that was hashed, without its load."""
    return {name: value for name, value in record.case.question.items() if name != "load"}


def has_load(record: Record) -> bool:
    """Return whether a record is of a kind of work with a load."""
    return record.question.load is not None


def is_latency(record: Record, metric_name: str) -> bool:
    """Return whether a metric of a record is the mean or a percentile of a time of its requests,
    which pages show in ms where it is below a second.
    """
    stored = record.metrics.get(metric_name)
    return stored is not None and is_latency_name(metric_name, stored.unit)


def is_latency_name(metric_name: str, unit: str) -> bool:
    """Return whether a metric of this unit is the mean or a percentile of a time, by its name."""
    return unit == "s" and metric_name.rpartition("_")[2] in STATISTICS
