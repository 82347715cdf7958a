"""Find the part of a generation run over which its rates and latencies are taken, from the request
samples.

A request is *issued* when it is scheduled: in a closed loop the moment its slot is free, in an open
loop at its arrival. So neither a slow client nor a wait for `max_concurrency` moves a request out
of the window. The requests of the window are those issued in it; its tokens are those that arrive
in it, whichever request they belong to; the tokens of a prompt arrive with its first output token.
docs/metrics.md defines the window of each load.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import ceil, inf

import numpy as np

from steelyard.case.load import Load
from steelyard.metrics import stats
from steelyard.metrics.passes import RateSlices, RateSpan, select_windows
from steelyard.record.record import Record
from steelyard.record.request_samples import (
    DEFINITIONS,
    US,
    Floats,
    Ints,
    RequestSamples,
    RequestTable,
)
from steelyard.words import Message

MIN_WINDOW_REQUESTS = 3  # with fewer nothing is said about a run
MAX_RAMP_SHARE = 0.5  # of the arrivals of an open loop
COUNTS = ("tokens", "output_tokens", "prompt_tokens")  # of what arrives, beside `samples`
COMPUTED = ("tokens", "logits", "pairs", "square", "samples")  # from which FLOPs follow

NOTE_CODES = {
    "concurrency": "window.concurrency",
    "rate": "window.rate",
    "offline": "window.offline",
}


@dataclass(frozen=True, eq=False)
class RequestWindow:
    """The window of a pass of requests, in seconds since the start of the pass: from `begin_s` to
    before `end_s`; `indices` are the requests issued in it, in the order of the schedule.

    `ramp_s` is the time from the first request to the steady part, `drain_s` from its end to the
    last end of a request; offline both lie inside the window, which is then the whole pass
    (`is_whole`). `steady_s` are begin and end of the steady part (None: there is none).
    `turn_requests` is how many requests the load has in flight, which make one turn of it. `mode`
    is that of the load.
    """

    begin_s: float
    end_s: float
    indices: Ints
    mode: str
    ramp_s: float
    drain_s: float
    steady_s: tuple[float, float] | None
    turn_requests: int

    @property
    def is_whole(self) -> bool:
        """Whether the window is the whole pass, to its last token."""
        return self.mode == "offline"

    @property
    def wall_s(self) -> float:
        """The length of the window in seconds."""
        return self.end_s - self.begin_s

    @property
    def note(self) -> Message:
        """The message that says where the window lies and how it was found."""
        return Message(
            NOTE_CODES[self.mode],
            {
                "first": int(self.indices[0]),
                "last": int(self.indices[-1]),
                "count": len(self.indices),
                "begin": self.begin_s,
                "end": self.end_s,
                "ramp": self.ramp_s,
                "drain": self.drain_s,
            },
        )


def find_request_samples(record: Record, pass_name: str) -> RequestSamples | None:
    """Return the request samples of a pass, of the lowest rank that has any; None if there are
    none.
    """
    found = [samples for samples in record.requests if samples.pass_name == pass_name]
    return min(found, key=lambda samples: samples.rank, default=None)


def find_headline_requests(record: Record) -> RequestSamples | None:
    """Return the request samples of the pass that rates are taken from; None if there are none."""
    names = [name for name in record.task.kind_row.headline if name]
    return next(
        (found for name in names if (found := find_request_samples(record, name)) is not None), None
    )


def find_record_window(record: Record) -> tuple[RequestTable, RequestWindow] | None:
    """Return the request table of the headline pass and its window; None if there is no such pass,
    or no window in it.
    """
    samples = find_headline_requests(record)
    window = _find_samples_window(samples, record.question.load)
    return None if samples is None or window is None else (samples.table, window)


def _find_samples_window(samples: RequestSamples | None, load: Load | None) -> RequestWindow | None:
    """Return the window of request samples; None if they have none, if there are no samples or no
    load, or if the samples define the window in another way than this version.
    """
    if samples is None or load is None:
        return None
    if samples.all_definitions.get("window") != DEFINITIONS["window"]:
        return None
    return find_request_window(samples.table, load)


def is_long_enough(table: RequestTable, load: Load) -> bool:
    """Return whether a closed loop had requests enough for a steady window with an interval. False
    for other loads.
    """
    return load.mode == "concurrency" and len(table) >= count_least_requests(load)


def count_least_requests(load: Load) -> int:
    """Return how many requests of a load have a steady window with an interval, if none of them
    takes long: those of the first wave and of the last, and five turns between them.
    """
    return (stats.MIN_STEPS + 2) * (load.concurrency or load.max_concurrency or 1)


@lru_cache(maxsize=4)
def find_request_window(table: RequestTable, load: Load) -> RequestWindow | None:
    """Return the window of a table of requests under a load; None if it has fewer than
    `MIN_WINDOW_REQUESTS` requests, or no time passes in it.
    """
    if len(table) < MIN_WINDOW_REQUESTS or not table.is_ok.any():
        return None
    window = FINDERS[load.mode](table, load)
    is_long = len(window.indices) >= MIN_WINDOW_REQUESTS and window.wall_s > 0
    return window if is_long else None


def _find_closed_window(table: RequestTable, load: Load) -> RequestWindow:
    """Return the window of a closed loop of C slots: from when every request of the first C has
    ended, so that the common start is over, until the last request is issued.
    """
    slots = load.concurrency or 1
    begin_s = float(_round_us(table.end_s[:slots]).max())
    return _make_window(table, load, begin_s, float(table.scheduled_s[-1]), slots)


def _find_open_window(table: RequestTable, load: Load) -> RequestWindow:
    """Return the window of an open loop: from when the first mean time of a request has passed, in
    which the number in flight grows from zero, until the last arrival. Beyond capacity that time
    may be longer than requests arrive: the window is then the later half of the arrivals, whose
    latencies show how long requests waited.
    """
    ok = table.is_ok
    mean_s = float((table.end_s - table.scheduled_s)[ok].mean())
    end_s = float(table.scheduled_s[-1])
    span_s = max(end_s - float(table.scheduled_s[0]), 1 / US)
    begin_s = float(table.scheduled_s[0]) + min(mean_s, MAX_RAMP_SHARE * span_s)
    in_flight = min(len(table), max(1, ceil(mean_s * (len(table) - 1) / span_s)))
    return _make_window(table, load, begin_s, end_s, in_flight)


def _make_window(
    table: RequestTable, load: Load, begin_s: float, end_s: float, turn_requests: int
) -> RequestWindow:
    """Return the window between two times; the steady part is all of it."""
    issued = table.scheduled_s
    return RequestWindow(
        begin_s=begin_s,
        end_s=end_s,
        indices=np.flatnonzero((issued >= begin_s) & (issued < end_s)),
        mode=load.mode,
        ramp_s=begin_s - float(issued[0]),
        drain_s=float(table.end_s.max()) - end_s,
        steady_s=(begin_s, end_s),
        turn_requests=turn_requests,
    )


def _find_offline_window(table: RequestTable, load: Load) -> RequestWindow:
    """Return the whole pass, from the first request to the last token. The ramp-up ends when the
    first request has ended; the drain begins when the last request has got its first token. Between
    them slots are filled again as they become free; there is no such part if all requests run at
    the same time.
    """
    ok = table.is_ok
    begin_s, end_s = float(table.scheduled_s[0]), float(table.last_s[ok].max())
    first_end_s = float(_round_us(table.end_s[ok]).min())
    last_start_s = float(table.first_s[ok].max())
    is_refilled = first_end_s < last_start_s
    running = 1.0
    if is_refilled:
        overlap = np.minimum(table.end_s[ok], last_start_s) - np.maximum(
            table.first_s[ok], first_end_s
        )
        running = float(overlap.clip(min=0).sum()) / (last_start_s - first_end_s)
    return RequestWindow(
        begin_s=begin_s,
        end_s=end_s,
        indices=np.arange(len(table)),
        mode=load.mode,
        ramp_s=first_end_s - begin_s,
        drain_s=end_s - last_start_s,
        steady_s=(first_end_s, last_start_s) if is_refilled else None,
        turn_requests=max(1, ceil(running)),
    )


FINDERS: dict[str, Callable[[RequestTable, Load], RequestWindow]] = {
    "concurrency": _find_closed_window,
    "rate": _find_open_window,
    "offline": _find_offline_window,
}


def _round_us(times_s: Floats) -> Floats:
    """Return times rounded to whole microseconds, so that equal times are equal numbers."""
    return np.rint(times_s * US) / US


@dataclass(frozen=True, eq=False)
class Arrivals:
    """What arrives from the requests that ended regularly, in the order of time: `times_s` of the
    chunks, and running totals by name of a count, each with a 0 in front.

    `totals` has `COUNTS`; `computed` has `COMPUTED`, the work behind these tokens: a prompt and
    each output token but the last go through the model, so that an answer of n tokens to a prompt
    of p computes p + n − 1.
    """

    times_s: Floats
    totals: dict[str, Ints]
    computed: dict[str, Ints]

    def count(self, begin_s: float, end_s: float) -> dict[str, int]:
        """Return the counts of what arrives from `begin_s` to before `end_s`."""
        return self._subtract(self.totals, begin_s, end_s)

    def count_computed(self, begin_s: float, end_s: float) -> dict[str, int]:
        """Return the counts of the work behind the tokens that arrive in that time."""
        return self._subtract(self.computed, begin_s, end_s)

    def _subtract(self, totals: dict[str, Ints], begin_s: float, end_s: float) -> dict[str, int]:
        """Return the differences of running totals between two times, by name."""
        begin, end = np.searchsorted(self.times_s, (begin_s, end_s), side="left")
        return {name: int(total[end] - total[begin]) for name, total in totals.items()}


@lru_cache(maxsize=4)
def list_arrivals(table: RequestTable, attention_window: int | None) -> Arrivals:
    """Return what arrives from a table of requests; `attention_window` is the model's (None: full
    attention).
    """
    owner = np.repeat(np.arange(len(table)), np.diff(table.chunk_starts))
    before_all = np.concatenate((np.zeros(1, np.int64), np.cumsum(table.chunk_tokens)))
    before = before_all[:-1] - before_all[table.chunk_starts[owner]]
    after = before + table.chunk_tokens
    is_first = np.arange(len(owner)) == table.chunk_starts[owner]
    prompt = table.prompt_tokens[owner]
    # the last of n output tokens is never computed with: it is only the answer's end
    depth_before = np.where(is_first, 0, prompt + before - 1)
    depth_after = prompt + after - 1
    prompt_arrives = np.where(is_first, prompt, 0)
    columns = {
        "tokens": table.chunk_tokens + prompt_arrives,
        "output_tokens": table.chunk_tokens,
        "prompt_tokens": prompt_arrives,
    }
    computed = {
        "tokens": depth_after - depth_before,
        "logits": table.chunk_tokens,
        "pairs": _count_pairs(depth_after, attention_window)
        - _count_pairs(depth_before, attention_window),
        "square": np.where(is_first, prompt**2, 0)
        + _count_pairs(depth_after, None)
        - _count_pairs(np.where(is_first, prompt, depth_before), None),
        "samples": is_first.astype(np.int64),
    }
    order = np.argsort(table.chunk_s, kind="stable")
    order = order[table.is_ok[owner][order]]
    return Arrivals(
        table.chunk_s[order],
        {name: _add_up(values[order]) for name, values in columns.items()},
        {name: _add_up(values[order]) for name, values in computed.items()},
    )


def _add_up(values: Ints) -> Ints:
    """Return the running totals of values, with a 0 in front."""
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(values)))


def _count_pairs(lengths: Ints, attention_window: int | None) -> Ints:
    """Return the query-key pairs of causal rows of these lengths
    (`prompt_batches.count_causal_pairs`, for an array).
    """
    seen = lengths if attention_window is None else np.minimum(lengths, attention_window)
    return seen * (seen + 1) // 2 + (lengths - seen) * seen


def count_pass_work(record: Record, pass_name: str) -> dict[str, int] | None:
    """Return the counts of all work that a whole pass of requests computed (`COMPUTED`); None if
    they are unknown: there are no samples, or in division open, where an engine may compute
    anything that gives the same tokens.
    """
    samples = find_request_samples(record, pass_name)
    if samples is None or record.case.division != "closed":
        return None
    arrivals = list_arrivals(samples.table, _get_attention_window(record))
    return arrivals.count_computed(-inf, inf)


def _get_attention_window(record: Record) -> int | None:
    """Return the attention window of the record's model; None if it sees all."""
    window: int | None = getattr(record.question.model, "window", None)
    return window


def make_request_span(record: Record, pass_name: str) -> RateSpan | None:
    """Return the span of a pass of requests: its window, with the counts of what arrives in it
    (`tokens` of prompts and outputs together, `output_tokens`, `prompt_tokens`) and `samples`, the
    requests issued in it; None if it has no window. `Kind.span` names this function.

    `bounds` are those of every rank that ran the pass. Engine steps are not part of the span: what
    is measured is what a client sees.
    """
    samples, load = find_request_samples(record, pass_name), record.question.load
    window = _find_samples_window(samples, load)
    if samples is None or window is None:
        return None
    arrivals = list_arrivals(samples.table, _get_attention_window(record))
    end_s = inf if window.is_whole else window.end_s
    is_closed = record.case.division == "closed"
    return RateSpan(
        counts={**arrivals.count(window.begin_s, end_s), "samples": len(window.indices)},
        wall_s=window.wall_s,
        compute_s=None,
        bounds={
            item.rank: (item.start_s + window.begin_s, item.start_s + window.end_s)
            for item in select_windows(record, pass_name)
        },
        steps={},
        slowest_rank=samples.rank,
        note=window.note,
        computed=arrivals.count_computed(window.begin_s, end_s) if is_closed else {},
        slices=make_rate_slices(samples.table, window, arrivals),
    )


def make_rate_slices(table: RequestTable, window: RequestWindow, arrivals: Arrivals) -> RateSlices:
    """Return the slices of the steady part of a window, one for each turn of the load: as many
    requests as it has in flight, by their issue, offline by their ends.

    In a closed loop and offline a rate is work over time, and `time_s` are the lengths of the
    slices. In an open loop arrivals are part of the question, the same in every run, and say
    nothing of the machine: there the work that arrived is compared with the work that was offered
    in the slice.
    """
    edges = _find_slice_edges(table, window)
    counted = [arrivals.count(a, b) for a, b in pairwise(edges.tolist())]
    work = {name: tuple(float(item[name]) for item in counted) for name in COUNTS}
    issued = np.searchsorted(table.scheduled_s, edges, side="left")
    per_slice = np.diff(issued).astype(float)
    work["samples"] = tuple(per_slice.tolist())
    if window.mode == "rate":
        return RateSlices(work, _count_offered(table, issued))
    lengths = tuple(np.diff(edges).tolist())
    if window.is_whole:  # all were issued at once; their ends are what takes turns
        ended = np.searchsorted(np.sort(_round_us(table.end_s)), edges, side="left")
        work["samples"] = tuple(np.diff(ended).astype(float).tolist())
    return RateSlices(work, dict.fromkeys(work, lengths))


def _count_offered(table: RequestTable, edges: Ints) -> dict[str, tuple[float, ...]]:
    """Return by name of a count what the requests between indices `edges` bring with them."""
    prompts, outputs = _add_up(table.prompt_tokens), _add_up(table.output_tokens)
    totals = {
        "tokens": prompts + outputs,
        "output_tokens": outputs,
        "prompt_tokens": prompts,
        "samples": np.arange(len(table) + 1),
    }
    return {
        name: tuple(np.diff(total[edges]).astype(float).tolist()) for name, total in totals.items()
    }


def _find_slice_edges(table: RequestTable, window: RequestWindow) -> Floats:
    """Return the times between which the slices of a window lie; empty if it has no steady part,
    or not even one turn of the load.
    """
    if window.steady_s is None:
        return np.zeros(0)
    begin_s, end_s = window.steady_s
    times = np.sort(_round_us(table.end_s)) if window.is_whole else table.scheduled_s
    inside = times[(times >= begin_s) & (times < end_s)]
    slices = len(inside) // window.turn_requests
    if not slices:
        return np.zeros(0)
    starts = np.rint(np.arange(slices) * len(inside) / slices).astype(np.int64)
    return np.concatenate(([begin_s], inside[starts[1:]], [end_s]))
