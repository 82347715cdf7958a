"""Formulas of the metric table that only generation has: latencies, percentiles, goodput and the
window.

All are taken over the requests of the window (request_window.py) that ended regularly. Each takes a
record and returns a `Result`: a value, or None with the reason. Definitions are those of
`record.request_samples.DEFINITIONS`; samples of another definition have no value.
"""

from collections.abc import Callable
from typing import Literal

import numpy as np

from steelyard.case.load import Slo
from steelyard.metrics import energy, percentiles, stats
from steelyard.metrics.passes import find_rate_span
from steelyard.metrics.rates import headline_rate, make_missing_headline_result
from steelyard.metrics.request_window import (
    RequestWindow,
    find_headline_requests,
    find_record_window,
)
from steelyard.metrics.result import Result
from steelyard.record.record import Record
from steelyard.record.request_samples import (
    DEFINITIONS,
    UNNAMED_DEFINITIONS,
    Floats,
    Ints,
    RequestSamples,
    RequestTable,
)
from steelyard.words import Message

LatencyName = Literal["ttft", "ttft_sent", "tpot", "e2e", "queue_delay"]


def _subtract(later_s: Floats, earlier_s: Floats) -> Floats:
    """Return the seconds between stamps, which are whole microseconds, without the rounding of
    their difference.
    """
    return np.round(later_s - earlier_s, 6)


def _compute_tpot(table: RequestTable) -> Floats:
    """Return the mean seconds of an output token after the first; NaN with fewer than two tokens,
    or if all came in one chunk, which says nothing of the time between them.
    """
    gaps = np.where(table.output_tokens >= 2, table.output_tokens - 1, 1)
    times: Floats = _subtract(table.last_s, table.first_s) / gaps
    is_timed = (table.output_tokens >= 2) & (np.diff(table.chunk_starts) >= 2)
    return np.where(is_timed, times, np.nan)


# Seconds of each request of a table; NaN where a request has no such time.
LATENCIES: dict[str, Callable[[RequestTable], Floats]] = {
    "ttft": lambda table: _subtract(table.first_s, table.scheduled_s),
    "ttft_sent": lambda table: _subtract(table.first_s, table.sent_s),
    "tpot": _compute_tpot,
    "e2e": lambda table: _subtract(table.end_s, table.scheduled_s),
    "queue_delay": lambda table: _subtract(table.sent_s, table.scheduled_s),
}
PERCENTILE_DEFINITIONS = (UNNAMED_DEFINITIONS["percentile"], DEFINITIONS["percentile"])
# offline all requests are issued at once: how long one waits is a matter of its place in the queue
QUEUED_OFFLINE = ("ttft", "ttft_sent", "e2e", "queue_delay")


def select_latencies(table: RequestTable, window: RequestWindow, name: LatencyName) -> Floats:
    """Return a latency of the requests of a window that ended regularly and have it, in the order
    in which they were issued.
    """
    indices = window.indices[table.is_ok[window.indices]]
    values = LATENCIES[name](table)[indices]
    return values[np.isfinite(values)]


def _explain_other_definition(samples: RequestSamples, *names: str) -> Result | None:
    """Return a result without a value if samples state another definition of one of these names
    than this version has, else None.
    """
    for name in names:
        stated, known = samples.all_definitions.get(name), DEFINITIONS[name]
        if stated != known:
            values = {"stated": str(stated), "known": known}
            return Result(None, Message("metric.other_definition", values))
    return None


def _find_known_window(record: Record, *names: str) -> tuple[RequestTable, RequestWindow] | Result:
    """Return the request table and window of a record, or a result without a value that says why
    what these names define cannot be taken from it.
    """
    samples, found = find_headline_requests(record), find_record_window(record)
    problem = None if samples is None else _explain_other_definition(samples, "window", *names)
    if problem is not None:
        return problem
    return make_missing_headline_result(record) if samples is None or found is None else found


def request_rate(record: Record, key: Literal["output_tokens", "tokens"]) -> Result:
    """Return the tokens that arrive in the window per second of it, of all devices together, with
    the 95 % interval: those of outputs, or those of prompts and outputs.
    """
    found = _find_known_window(record, f"{key}_per_s")
    return found if isinstance(found, Result) else headline_rate(record, key)


def _find_percentile_definition(record: Record) -> str:
    """Return the id of the definition of a percentile that a record's samples have."""
    samples = find_headline_requests(record)
    return "" if samples is None else str(samples.all_definitions.get("percentile"))


def latency_percentile(record: Record, name: LatencyName, percentile: int) -> Result:
    """Return a percentile of a latency in seconds with its 95 % interval; without a value if the
    window has fewer requests than LoadGen's rule asks for. Offline a wait follows from a place in
    the queue, and has no interval; in an open loop it follows from those before. Samples older than
    this definition of a percentile have the interval of independent requests.
    """
    found = _find_known_window(record, name)
    if isinstance(found, Result):
        return found
    values = select_latencies(*found, name)
    if name == "tpot" and not len(values) and len(found[1].indices):
        return Result(None, Message("phase.chunks"))
    problem = _explain_few(len(values), percentile)
    if problem is not None:
        return problem
    definition = _find_percentile_definition(record)
    if definition not in PERCENTILE_DEFINITIONS:
        stated = {"stated": definition, "known": DEFINITIONS["percentile"]}
        return Result(None, Message("metric.other_definition", stated))
    ordered = np.sort(values)
    interval = percentiles.find_percentile_interval(ordered, percentile)
    if definition == DEFINITIONS["percentile"]:
        if found[1].mode == "rate":
            interval = percentiles.find_percentile_interval_of_queue(values, percentile)
        elif found[1].is_whole and name in QUEUED_OFFLINE:
            interval = None
    return Result(
        percentiles.select_percentile(ordered, percentile / 100),
        _describe_percentile(ordered, len(values), percentile),
        interval,
    )


def _explain_few(count: int, percentile: int) -> Result | None:
    """Return a result without a value if so few requests do not carry a percentile, else None."""
    least = percentiles.find_least_count(percentile)
    if count >= least:
        return None
    return Result(None, Message("percentile.few", {"least": least, "count": count}))


def _describe_percentile(values: Floats, count: int, percentile: int) -> Message:
    """Return the note of a percentile: over how many requests it was taken, and the bound that
    LoadGen's early stopping estimates from the same sorted values.
    """
    bound = percentiles.estimate_by_early_stopping(values.tolist(), percentile)
    return Message("percentile.of", {"count": count, "bound": 0.0 if bound is None else bound})


def latency_mean(record: Record, name: LatencyName) -> Result:
    """Return the mean of a latency in seconds, with a 95 % interval that covers between runs: from
    the totals of turns of the load, because requests that run together wait for the same things; of
    an open loop, whose queue remembers for longer, from the means of long stretches.
    """
    found = _find_known_window(record, name)
    if isinstance(found, Result):
        return found
    table, window = found
    values = select_latencies(table, window, name)
    if not len(values):
        return Result(None, Message("metric.no_tokens_after_first"))
    mean = float(values.mean())
    interval = None
    if window.mode == "rate":
        interval = percentiles.find_mean_interval_of_queue(values)
    elif not (window.is_whole and name in QUEUED_OFFLINE):
        interval = estimate_mean_interval(values, window.turn_requests)
    return Result(mean, Message("mean.of", {"count": len(values)}), interval)


def estimate_mean_interval(values: Floats, turn_requests: int) -> tuple[float, float] | None:
    """Return the 95 % interval of the mean of values of consecutive requests, of which
    `turn_requests` run together; None with fewer than 5 such turns.

    The total over each turn is one observation of the estimator of rates, which allows for turns
    that depend on one another.
    """
    turns = len(values) // max(1, turn_requests)
    if not turns:
        return None
    edges = np.rint(np.arange(turns + 1) * len(values) / turns).astype(np.int64)
    totals = np.add.reduceat(values, edges[:-1])
    counts = np.diff(edges).astype(float)
    return stats.estimate_rate_interval(float(values.mean()), counts.tolist(), totals.tolist())


def interactivity(record: Record) -> Result:
    """Return the output tokens per second that a user sees after the first: 1 over the mean time of
    an output token, with its interval.
    """
    found, tpot = _find_known_window(record, "interactivity"), latency_mean(record, "tpot")
    if isinstance(found, Result):
        return found
    if not tpot.value:
        return Result(None, tpot.note)
    interval = tpot.interval
    ends = None if interval is None or not interval[0] else (1 / interval[1], 1 / interval[0])
    return Result(1 / tpot.value, tpot.note, ends)


def list_chunk_gaps(table: RequestTable, window: RequestWindow) -> tuple[Floats, Ints]:
    """Return the seconds between consecutive chunks of each request of a window that ended
    regularly, and the index of the request that each belongs to.
    """
    is_in = np.zeros(len(table), np.bool_)
    is_in[window.indices] = True
    is_in &= table.is_ok
    owner = np.repeat(np.arange(len(table)), np.diff(table.chunk_starts))
    is_later = (np.arange(len(owner)) != table.chunk_starts[owner]) & is_in[owner]
    later = np.flatnonzero(is_later)
    return _subtract(table.chunk_s[later], table.chunk_s[later - 1]), owner[later]


def chunk_gap_percentile(record: Record, percentile: int) -> Result:
    """Return a percentile of the seconds between chunks, over all of the window's requests. How
    many it needs, and its 95 % interval, go by requests, because chunks of one depend on one
    another.
    """
    found = _find_known_window(record, "chunk_gap")
    if isinstance(found, Result):
        return found
    gaps, owner = list_chunk_gaps(*found)
    requests = len(np.unique(owner))
    problem = _explain_few(requests, percentile)
    if problem is not None:
        return problem
    return Result(
        percentiles.select_percentile(np.sort(gaps), percentile / 100),
        Message("percentile.of_chunks", {"count": requests, "chunks": len(gaps)}),
        percentiles.find_clustered_interval(gaps, owner, percentile),
    )


def goodput(record: Record) -> Result:
    """Return the requests of the window that keep all limits of the case (`slo`), per second of the
    window. Those that failed, or are shorter than asked with exact lengths, keep none. Without a
    value if the case has no limits.
    """
    slo, samples = record.case.slo, find_headline_requests(record)
    if slo is None:
        return Result(None, Message("metric.no_slo"))
    limited = [name for name, limit_s in _list_limits(slo) if limit_s is not None]
    found = _find_known_window(record, "goodput", *limited)
    if isinstance(found, Result) or samples is None:
        return found if isinstance(found, Result) else make_missing_headline_result(record)
    table, window = found
    kept = _keeps_limits(table, slo)
    if samples.lengths == "exact":
        kept &= table.output_tokens == table.asked_tokens
    good = int(kept[window.indices].sum())
    values = {"good": good, "count": len(window.indices)}
    return Result(good / window.wall_s, Message("goodput.of", values))


def _list_limits(slo: Slo) -> tuple[tuple[LatencyName, float | None], ...]:
    """Return the limits of a case on latencies in seconds, by name; None where there is none."""
    return ("ttft", slo.ttft_s), ("tpot", slo.tpot_s)


def _keeps_limits(table: RequestTable, slo: Slo) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
    """Return whether each request ended regularly and kept the limits on its latencies. One without
    a second token has no time per token that could break a limit; one whose tokens came in one
    chunk has a time per token that nobody knows, and keeps none.
    """
    kept = table.is_ok.copy()
    for name, limit_s in _list_limits(slo):
        if limit_s is not None:
            kept &= ~(LATENCIES[name](table) > limit_s)
    if slo.tpot_s is not None:
        kept &= (table.output_tokens < 2) | (np.diff(table.chunk_starts) >= 2)
    return kept


def count_window_requests(record: Record) -> Result:
    """Return the number of requests of the window."""
    found = find_record_window(record)
    if found is None:
        return make_missing_headline_result(record)
    return Result(float(len(found[1].indices)), found[1].note)


def window_time(record: Record, part: Literal["ramp_s", "drain_s"]) -> Result:
    """Return the seconds of the ramp-up before the steady part of a pass, or of the drain behind
    it.
    """
    found = find_record_window(record)
    if found is None:
        return make_missing_headline_result(record)
    return Result(getattr(found[1], part), found[1].note)


def energy_per_output_token(record: Record) -> Result:
    """Return the joules of all devices in the window for each output token that arrives in it."""
    found = _find_known_window(record, "energy_per_output_token")
    if isinstance(found, Result):
        return found
    used, rate_span = energy.energy(record), find_rate_span(record)
    if used.value is None or rate_span is None:
        return used
    count = rate_span.counts.get("output_tokens")
    if not count:
        return make_missing_headline_result(record)
    return Result(used.value / count, used.note)
