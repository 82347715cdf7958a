"""Validity rules of generation: whether every request was answered, by a cold server and to a
client that kept up, and whether the run is steady. Those on the answers are in answer_rules.py.

`Kind.rules` names them. Limits on times are not applied at size smoke, which is not a measurement.
"""

from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np

from steelyard.case.arrivals import draw_arrivals
from steelyard.case.load import Load
from steelyard.data.request_outcomes import OUTCOMES
from steelyard.metrics import request_formulas
from steelyard.metrics.declared_hardware import is_hardware_declared, name_declared_hardware
from steelyard.metrics.passes import find_headline_pass, select_windows
from steelyard.metrics.request_trend import Trend, find_trend
from steelyard.metrics.request_window import (
    RequestWindow,
    find_headline_requests,
    find_record_window,
    is_long_enough,
)
from steelyard.metrics.result import Finding, make_check, make_failed_check, make_note
from steelyard.record.record import Record, Value
from steelyard.record.request_samples import Floats, Ints, RequestSamples, RequestTable
from steelyard.words import Message, MessageValues

MIN_SALT_DIGITS = 16  # hex digits: 64 bits
MAX_CACHED_SHARE = 0.01  # of the prompts' tokens, in division closed
MAX_SEND_DELAY_S, MAX_SEND_SHARE = 0.002, 0.01  # mean; the larger of seconds and a share of TTFT
# 99th percentile of how late the loop wakes up, or stamps a chunk; the larger of both again
MAX_LAG_S, MAX_LAG_SHARE = 0.01, 0.01
# Of one core: the loop is one thread, and waits for itself when it is busier than this.
MAX_CLIENT_CPU_SHARE = 0.8
US = 1e6
END_SLACK_S = 0.002  # by which a request may end after its pass, whose clock is read later
SLACK_S = 0.0001  # of times that follow from others, which are whole microseconds
OUTCOME_CODES: dict[str, str] = {name: f"outcome.{name}" for name in OUTCOMES}
EOS_WORDS = ("ignore_eos", "min_tokens", "unexpected", "422", "unknown field", "extra")
BURST_S = 5e-5  # chunks that are read together are stamped within this time
MAX_BURST_SHARE = 0.5


def _find_checked(record: Record) -> tuple[RequestSamples, RequestTable] | None:
    """Return the request samples of the headline pass and their table; None if the run failed
    before there were any, or there are none.
    """
    samples = find_headline_requests(record)
    return None if samples is None else (samples, samples.table)


def completed_requests(record: Record, metrics: dict[str, Value]) -> Iterable[Finding]:
    """Validity rule: return one check `completed_requests` (reason `requests`) that every request
    that was to be sent ended regularly; it names how many ended how, and the first error. `metrics`
    is not used.
    """
    pass_name, found = find_headline_pass(record), _find_checked(record)
    if pass_name is None or (found is None and record.failure is not None):
        return []
    if found is None:
        values: MessageValues = {"pass": pass_name}
        return [make_failed_check("completed_requests", "requests", "check.no_requests", values)]
    samples, table = found
    asked = record.scope.requests if record.scope.sample is None else record.scope.sample
    outcomes: Counter[str] = Counter(
        {OUTCOMES[code]: n for code, n in Counter(table.outcome.tolist()).items()}
    )
    outcomes["missing"] += max(0, (asked or 0) - len(table))
    outcomes["empty"] += int(((table.outcome == 0) & ~table.is_ok).sum())
    bad: dict[str, int] = {
        name: count for name, count in outcomes.items() if name != "ok" and count
    }
    if not bad:
        values = {"count": len(table)}
        return [make_check("completed_requests", True, "requests", "check.requests", values)]
    counts = tuple(
        Message("requests.outcome", {"count": count, "outcome": Message(OUTCOME_CODES[name])})
        for name, count in sorted(bad.items())
    )
    values = {
        "bad": sum(bad.values()),
        "count": max(len(table), asked or 0),
        "outcomes": counts,
        "error": _describe_first_error(samples, bad),
    }
    return [make_failed_check("completed_requests", "requests", "check.requests", values)]


def _describe_first_error(samples: RequestSamples, bad: dict[str, int]) -> Message:
    """Return the message with the first error text of the requests, and with what to do if the
    server refuses to ignore the end of a text.
    """
    if not samples.errors:
        return Message("requests.no_error")
    first = samples.errors[0]
    is_on_end = any(word in first.lower() for word in EOS_WORDS)
    hints = "refused" in bad and samples.lengths == "exact" and is_on_end
    return Message("requests.refused_end" if hints else "requests.first_error", {"error": first})


def cold_cache(record: Record, metrics: dict[str, Value]) -> Iterator[Finding]:
    """Validity rule: yield in division closed a check `cold_cache` (reason `warm_cache`) that the
    server took at most 1 % of the prompts' tokens from a cache, by its own counter, or a note that
    it has none; and if prompts began with fewer than 64 bits of salt, a failed check `salted`.
    `metrics` is not used.
    """
    found = _find_checked(record)
    if found is None or record.case.division != "closed":
        return
    samples, table = found
    if len(samples.salt) < MIN_SALT_DIGITS:
        values: MessageValues = {"digits": len(samples.salt)}
        yield make_failed_check("salted", "warm_cache", "check.salted", values)
    cached = record.engine.details.model_dump().get("cached_tokens")
    total = int(table.prompt_tokens.sum())
    if isinstance(cached, int) and total:
        values = {"cached": cached, "share": cached / total, "most": MAX_CACHED_SHARE}
        ok = cached <= MAX_CACHED_SHARE * total
        yield make_check("cold_cache", ok, "warm_cache", "check.cold_cache", values)
    elif samples.client is not None and samples.client.cpu_share is not None:
        yield make_note(Message("note.cache_unknown"))


def unbound_client(record: Record, metrics: dict[str, Value]) -> Iterator[Finding]:
    """Validity rule: yield a check `unbound_client` (reason `client_bound`) that the client kept up
    with the load: it fails on the first of its limits that is exceeded. At size smoke that is a
    note. Another note if most chunks came in bursts, whose stamps say nothing of a token's time.
    `metrics` is not used.
    """
    found = _find_checked(record)
    if found is None or not found[1].is_ok.any():
        return
    samples, table = found
    if samples.client is None:
        yield make_note(Message("note.no_client_facts"))
        return
    found_window = find_record_window(record)
    chosen = np.arange(len(table)) if found_window is None else found_window[1].indices
    limits = list(_list_client_limits(samples, table, chosen))
    over = [message for is_over, message in limits if is_over]
    if found_window is not None:
        yield from _note_bursts(*found_window)
    if record.case.size == "smoke":
        yield from (make_note(Message("note.client_slow", {"what": over[0]})) for _ in over[:1])
        return
    # an engine in this process has no client of its own that could be measured
    if samples.client.cpu_share is not None and samples.client.mock_error_us is None:
        yield make_note(Message("note.client_not_measured"))
    values: MessageValues = {"what": over[0] if over else limits[0][1]}
    yield make_check("unbound_client", not over, "client_bound", "check.client", values)


def _note_bursts(table: RequestTable, window: RequestWindow) -> Iterator[Finding]:
    """Yield a note if more than half of the chunks of a window came at the same time as the one
    before them: held back by the server or on the way, or read late.
    """
    gaps, _ = request_formulas.list_chunk_gaps(table, window)
    share = float((gaps < BURST_S).mean()) if len(gaps) else 0.0
    if share > MAX_BURST_SHARE:
        yield make_note(Message("note.bursts", {"share": share, "gap": BURST_S}))


def _list_client_limits(
    samples: RequestSamples, table: RequestTable, chosen: Ints
) -> Iterator[tuple[bool, Message]]:
    """Yield (whether it is exceeded, what was measured) for each limit on the client: sends later
    than they were due, on the mean of the requests with the indices `chosen` (those of the window,
    since the first ones wait for their connections), a wait for `max_concurrency` not counted; the
    loop's lag; the error of its stamps on the mock server; and its CPU time.
    """
    ok, client = table.is_ok, samples.client
    ttft_s = float((table.first_s - table.scheduled_s)[ok].mean())
    late_s = float((table.sent_s - table.due_s)[chosen].mean())
    most_s = max(MAX_SEND_DELAY_S, MAX_SEND_SHARE * ttft_s)
    yield late_s > most_s, Message("client.late", {"late": 1e3 * late_s, "most": 1e3 * most_s})
    if client is None:
        return
    lag_s, most_lag_s = client.lag_p99_us / US, max(MAX_LAG_S, MAX_LAG_SHARE * ttft_s)
    yield lag_s > most_lag_s, Message("client.lag", {"lag": 1e3 * lag_s, "most": 1e3 * most_lag_s})
    if client.mock_error_us is not None:
        error_s = client.mock_error_us[1] / US
        values: MessageValues = {"error": 1e3 * error_s, "most": 1e3 * most_lag_s}
        yield error_s > most_lag_s, Message("client.mock", values)
    if client.cpu_share is not None:
        values = {"share": client.cpu_share, "most": MAX_CLIENT_CPU_SHARE}
        yield client.cpu_share > MAX_CLIENT_CPU_SHARE, Message("client.cpu", values)


def steady_window(record: Record, metrics: dict[str, Value]) -> Iterator[Finding]:
    """Validity rule: yield a check `steady_window` (reason `unsteady`) that neither the time to the
    first token nor the time per token drifts through the window, or through all requests if an
    open loop has no window; it fails for a closed loop with enough requests that has no window.
    Nothing at size smoke, offline, and with fewer requests than a trend needs; a trace is as steady
    as it is, and gets a note. `metrics` is not used.
    """
    found, load = _find_checked(record), record.question.load
    if found is None or load is None or load.mode == "offline" or record.case.size == "smoke":
        return
    if load.arrivals == "trace":
        yield make_note(Message("note.trace"))
        return
    if find_record_window(record) is None and is_long_enough(found[1], load):
        values: MessageValues = {"count": len(found[1]), "slots": load.concurrency or 1}
        yield make_failed_check("steady_window", "unsteady", "check.no_steady_window", values)
        return
    trends = _find_trends(record, found[1], load)
    if not trends:
        return
    name, trend = max(trends, key=lambda item: (item[1].is_drift, abs(item[1].t)))
    values = {"name": name, "first": trend.first, "last": trend.last}
    yield make_check("steady_window", not trend.is_drift, "unsteady", "check.steady", values)


def _find_trends(record: Record, table: RequestTable, load: Load) -> list[tuple[str, Trend]]:
    """Return the trends of both latencies by name, through the window or, in an open loop without
    one that is long enough, through all requests; those that are too few are left out.
    """
    found = find_record_window(record)
    windows = [] if found is None else [found[1]]
    # beyond capacity so much time goes by until the first end that little is left as a window
    if load.mode == "rate":
        windows.append(_make_whole_window(table))
    for window in windows:
        trends = [
            (name, trend)
            for name in ("ttft", "tpot")
            if (trend := find_trend(request_formulas.select_latencies(table, window, name)))
            is not None
        ]
        if trends:
            return trends
    return []


def _make_whole_window(table: RequestTable) -> RequestWindow:
    """Return a window of all requests of a table."""
    begin_s, end_s = float(table.scheduled_s[0]), float(table.end_s.max())
    return RequestWindow(begin_s, end_s, np.arange(len(table)), "rate", 0.0, 0.0, None, 1)


def plausible_requests(record: Record, metrics: dict[str, Value]) -> Iterator[Finding]:
    """Validity rule: yield a check `possible_requests` (reason `implausible`) that the times of the
    requests can be true together, and are those of the question's load; it fails on the first thing
    that cannot. `metrics` is not used.
    """
    found, load = _find_checked(record), record.question.load
    if found is None or load is None or not len(found[1]):
        return
    problem = next(_find_impossible(record, found[0], found[1], load), None)
    values: MessageValues = {} if problem is None else {"problem": problem}
    yield make_check(
        "possible_requests", problem is None, "implausible", "check.possible_requests", values
    )


def _find_impossible(
    record: Record, samples: RequestSamples, table: RequestTable, load: Load
) -> Iterator[Message]:
    """Yield a message for each thing that cannot be true of request samples: an end after that of
    the pass, more requests in flight than the load has, a schedule that is not the load's, or a
    request that was due later than a slot was free for it.
    """
    windows = select_windows(record, samples.pass_name)
    wall_s = max((window.wall_s for window in windows), default=0.0)
    last_s = float(table.end_s.max())
    if last_s > wall_s + END_SLACK_S:
        yield Message("possible.end", {"last": last_s, "wall": wall_s})
    slots = load.concurrency or load.max_concurrency
    if slots is not None:
        most = count_in_flight(table)
        if most > slots:
            yield Message("possible.in_flight", {"most": most, "slots": slots})
    sent = table.outcome != OUTCOMES.index("missing")
    expected = _find_expected_schedule(record, table, load)
    scheduled_s, due_s = table.scheduled_s[sent], table.due_s[sent]
    asked_s = scheduled_s if expected is None else expected[sent]
    off = np.flatnonzero(np.abs(scheduled_s - asked_s) > SLACK_S)
    if len(off):
        first = int(off[0])
        values: MessageValues = {
            "first": first,
            "stated": float(scheduled_s[first]),
            "asked": float(asked_s[first]),
        }
        yield Message("possible.schedule", values)
    free_s = _find_free_times(table, slots)[sent]
    late = np.flatnonzero(due_s > np.maximum(scheduled_s, free_s) + SLACK_S)
    if len(late):
        yield Message("possible.due", {"first": int(late[0]), "due": float(due_s[late[0]])})


def _find_free_times(table: RequestTable, slots: int | None) -> Floats:
    """Return when a slot became free for each request in the order of the schedule: at once for the
    first ones, then at the ends of earlier requests, one by one.
    """
    free_s = np.zeros(len(table))
    if slots is not None:
        free_s[slots:] = np.sort(table.end_s)[: max(0, len(table) - slots)]
    return free_s


def _find_expected_schedule(record: Record, table: RequestTable, load: Load) -> Floats | None:
    """Return when each request must have been scheduled by the load of the question: in a closed
    loop when a slot became free, offline at once, in an open loop as its arrivals are drawn. None
    for a trace, whose arrivals are not in a record.
    """
    if load.mode != "rate":
        return _find_free_times(table, load.concurrency)
    if load.arrivals == "trace":
        return None
    arrivals = draw_arrivals(load, record.question.seed)
    return np.fromiter(arrivals, float, len(table))


def count_in_flight(table: RequestTable) -> int:
    """Return the largest number of requests that were in flight at the same time."""
    sent, ended = (np.rint(column * US).astype(np.int64) for column in (table.sent_s, table.end_s))
    times = np.concatenate((ended, sent))
    changes = np.concatenate((np.full(len(ended), -1), np.ones(len(sent), np.int64)))
    order = np.lexsort((changes, times))  # at the same time an end frees the slot first
    # a request that ends as it is sent would be ended first
    return max(0, int(np.cumsum(changes[order]).max()))


def declared_device(record: Record, metrics: dict[str, Value]) -> Iterator[Finding]:
    """Validity rule: yield a note if the server's hardware is only declared, and no check.
    `metrics` is not used.
    """
    if is_hardware_declared(record):
        device = name_declared_hardware(record)
        yield make_note(
            Message("note.declared", {"device": device}) if device else Message("note.undeclared")
        )
