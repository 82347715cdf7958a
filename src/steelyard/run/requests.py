"""The one loop that drives every engine's requests: it holds the schedule and the clock.

Requests are handed to the engine's port when they are due, and every chunk is stamped the moment
the port reports it. In an open loop the times of arrival are fixed before the first request and
wait for nothing; in a closed loop a request is scheduled the moment a slot is free. Called by
run/worker.py beside `measure`, with the same clock.
"""

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from steelyard.accelerators.events import Clock, Timeline, get_clock_name
from steelyard.case.load import Load
from steelyard.data.prompts import GenerationRequest, PromptRequests
from steelyard.data.request_outcomes import OUTCOMES, CountedBy
from steelyard.engine.generation import RequestEnd, RequestPort
from steelyard.engine.work import Work
from steelyard.record.request_samples import (
    PER_CHUNK,
    PER_REQUEST,
    US,
    ClientFacts,
    RequestSamples,
    make_request_samples,
)
from steelyard.run.clock import now
from steelyard.run.measure import Mark, PassTrace

TICK_S = 0.05  # the loop wakes up at least so often, and so knows how late it wakes up
# failures in a row after which no more requests are sent: nobody is there to answer
MAX_FAILURES = 64
MAX_ERRORS = 20  # texts of failures that are kept
MAX_ERROR_CHARS = 500


def plan_arrivals(load: Load, requests: PromptRequests, min_time_s: float | None) -> list[float]:
    """Return the times of arrival of an open loop in seconds since its start, all fixed before the
    first request: as many as `requests.count`, and more until `min_time_s` is over. Poisson
    arrivals are drawn from the case's seed; those of a trace repeat behind its end.
    """
    trace = requests.source.arrivals_s
    if load.arrivals == "trace":
        if trace is None:
            raise ValueError("load.arrivals 'trace' needs prompts of source 'trace'")
        period = trace[-1] + (trace[-1] / max(1, len(trace) - 1) or 1.0)
        draw = (trace[i % len(trace)] + period * (i // len(trace)) for i in range(10**9))
    else:
        draw = _draw_arrivals(load, requests.seed)
    times: list[float] = []
    for time_s in draw:
        if len(times) >= requests.count and (min_time_s is None or time_s > min_time_s):
            return times
        times.append(time_s)
    return times


def _draw_arrivals(load: Load, seed: int) -> Any:
    """Yield the times of arrival of a Poisson process, or of a constant rate, without end."""
    generator, time_s = np.random.default_rng([seed, 5]), 0.0
    rate = load.rate or 1.0
    while True:
        if load.arrivals != "constant":
            time_s += float(generator.exponential(1 / rate))
        yield time_s
        if load.arrivals == "constant":
            time_s += 1 / rate


@dataclass
class _RequestState:
    """What the loop knows of one request; times in seconds since the start of the pass. `times_s`
    and `tokens` have one value for each chunk, `ids` one for each token whose id is known.
    """

    request: GenerationRequest
    scheduled_s: float
    due_s: float
    sent_s: float
    times_s: "array[float]" = field(default_factory=lambda: array("d"))
    tokens: "array[int]" = field(default_factory=lambda: array("q"))
    ids: "array[int]" = field(default_factory=lambda: array("q"))
    end_s: float | None = None
    end: RequestEnd = RequestEnd("missing")


@dataclass(frozen=True)
class RequestTrace:
    """A measured pass of requests: `steps`, the trace of the engine's own steps and the borders of
    the pass; `samples`, the request samples; `states`, what was generated, in the order of the
    schedule. `get_output_ids(number)` returns the generated ids of a request.
    """

    steps: PassTrace
    samples: RequestSamples
    states: Sequence[_RequestState]

    def get_output_ids(self, number: int, requests: PromptRequests) -> list[int] | None:
        """Return the token ids that a request generated: those that were reported, else those of
        its text by the tokenizer; None if neither is known, or it did not end regularly.
        """
        state = self.states[number]
        if state.end.outcome != "ok":
            return None
        if state.ids:
            return list(state.ids)
        return None if state.end.text is None else requests.encode_output(state.end.text)


class RequestLoop:
    """Drives the requests of one pass; a `RequestSink` to the engine's port. `plan` fixes the
    schedule, `run` sends the requests, `make_trace` returns what was measured.

    `load` and `requests` say what is sent and when, `min_time_s` for how long at least (None: as
    many as there are). `request_done` is called with the number of requests that have ended, `busy`
    reads the CPU time of this process in seconds.
    """

    def __init__(
        self,
        requests: PromptRequests,
        load: Load,
        device: Timeline,
        clock: Clock = now,
        min_time_s: float | None = None,
        request_done: Callable[[int], None] | None = None,
        busy: Clock | None = None,
    ) -> None:
        self._requests, self._load, self._device = requests, load, device
        self._clock, self._min_time_s = clock, min_time_s
        self._request_done, self._busy = request_done, busy
        self._states: list[_RequestState] = []
        self._marks: list[Mark] = []
        self._lags_s: "array[float]" = array("d")
        self._open = self._ended = self._failures = 0
        self._start = 0.0
        self._client_cpu_s: float | None = None  # None: the engine worked in the same process
        self._arrivals: deque[float] = deque()
        self._free_slots: deque[float] = deque()  # when each free slot became free
        self._prepared: deque[GenerationRequest] = deque()

    def run(self, port: RequestPort) -> PassTrace:
        """Send all planned requests through a port, wait until each has ended, and return the
        borders of the pass with the engine's own steps. The device is waited for before and after.
        """
        self._device.synchronize()
        busy_s = None if self._busy is None else self._busy()
        self._start = self._clock()
        first = self._device.event()
        while self._submit_due(port) or self._open:
            self._wait(port)
        last = self._device.event()
        self._device.synchronize()
        wall_s = self._clock() - self._start
        cpu_s = None if self._busy is None or busy_s is None else self._busy() - busy_s
        self._client_cpu_s = cpu_s if port.is_separate else None
        clock_name = get_clock_name(last)
        device_s = first.elapsed_s(last) if clock_name == "device" else None
        return PassTrace(self._start, wall_s, device_s, cpu_s, clock_name, first, self._marks)

    def plan(self) -> None:
        """Fix the schedule, and make all requests that are known to be sent, before the clock
        starts. Called once, before `run`.
        """
        count, load = self._requests.count, self._load
        if load.mode == "rate":
            self._arrivals.extend(plan_arrivals(load, self._requests, self._min_time_s))
            count = len(self._arrivals)
            self._free_slots.extend([0.0] * (load.max_concurrency or count))
        elif load.mode == "offline":
            self._arrivals.extend([0.0] * count)
            self._free_slots.extend([0.0] * count)
        else:
            self._free_slots.extend([0.0] * min(load.concurrency or 1, count))
        self._prepared.extend(self._requests.make(number) for number in range(count))

    def _submit_due(self, port: RequestPort) -> bool:
        """Hand in every request that is due, and return whether any are still to come."""
        while self._has_more():
            now_s = self._clock() - self._start
            if not self._free_slots or (self._arrivals and self._arrivals[0] > now_s):
                return True
            free_s = self._free_slots.popleft()
            scheduled_s = self._arrivals.popleft() if self._arrivals else free_s
            number = len(self._states)
            request = self._prepared.popleft() if self._prepared else self._requests.make(number)
            sent_s = self._clock() - self._start
            self._states.append(
                _RequestState(request, scheduled_s, max(scheduled_s, free_s), sent_s)
            )
            self._open += 1
            port.submit(request)
        return False

    def _has_more(self) -> bool:
        """Return whether requests are still to be sent: arrivals are left, or a closed loop has
        neither sent all nor run for its least time. False once too many failed in a row.
        """
        if self._failures >= MAX_FAILURES:
            return False
        if self._load.mode != "concurrency":
            return bool(self._arrivals)
        if len(self._states) < self._requests.count:
            return True
        is_early = self._clock() - self._start < (self._min_time_s or 0.0)
        return self._min_time_s is not None and is_early

    def _wait(self, port: RequestPort) -> None:
        """Let the port work until the next request is due, at most `TICK_S`, and note how late it
        returned.
        """
        until_s = self._clock() + TICK_S
        if self._arrivals and self._free_slots:
            until_s = min(until_s, self._start + self._arrivals[0])
        port.wait(until_s)
        late_s = self._clock() - until_s
        if late_s >= 0:
            self._lags_s.append(late_s)

    def add_chunk(self, number: int, tokens: int, ids: Sequence[int] = ()) -> None:
        """Stamp a chunk of a request, as `RequestSink` says. A chunk without tokens is ignored."""
        at_s = self._clock() - self._start
        state = self._states[number]
        if tokens > 0 and state.end_s is None:
            state.times_s.append(at_s)
            state.tokens.append(tokens)
            state.ids.extend(ids)

    def end_request(self, number: int, end: RequestEnd) -> None:
        """Stamp the end of a request and free its slot, as `RequestSink` says. Only the first end
        counts.
        """
        state = self._states[number]
        if state.end_s is not None:
            return
        state.end_s, state.end = self._clock() - self._start, end
        if end.outcome == "ok" and not state.times_s:
            state.end = RequestEnd("empty", "a regular end without any token")
        self._failures = 0 if state.end.outcome == "ok" else self._failures + 1
        self._open -= 1
        self._ended += 1
        self._free_slots.append(state.end_s)
        if self._request_done is not None:
            self._request_done(self._ended)

    def add_step(self, work: Work) -> None:
        """Stamp the end of a step of an engine in this process, as `RequestSink` says."""
        self._marks.append((work, self._clock() - self._start, self._device.event()))

    def make_trace(self, steps: PassTrace, pass_name: str, rank: int = 0) -> RequestTrace:
        """Return what was measured in a finished pass: `steps`, as `run` returned it, and the
        request samples, with those that were planned and never sent as `missing`.
        """
        wall_s, client_cpu_s = steps.wall_s, self._client_cpu_s
        for state in self._states:
            _settle_tokens(state)
        unsent = [*self._prepared] if self._failures >= MAX_FAILURES else []
        states = [
            *self._states,
            *(_RequestState(request, wall_s, wall_s, wall_s) for request in unsent),
        ]
        errors = dict.fromkeys(
            state.end.error[:MAX_ERROR_CHARS] for state in states if state.end.error
        )
        counted: set[CountedBy] = {state.end.counted_by for state in self._states}
        lags_us = sorted(_to_us(lag_s) for lag_s in self._lags_s) or [0]
        samples = make_request_samples(
            _make_columns(states, wall_s, self._requests),
            pass_name=pass_name,
            rank=rank,
            counted_by=next((how for how in ("chunks", "usage") if how in counted), "ids"),
            lengths=self._requests.lengths,
            salt=self._requests.salt,
            errors=[*errors][:MAX_ERRORS],
            client=ClientFacts(
                lag_p99_us=lags_us[min(len(lags_us) - 1, int(0.99 * len(lags_us)))],
                lag_max_us=lags_us[-1],
                cpu_share=None if client_cpu_s is None else client_cpu_s / max(wall_s, 1e-9),
            ),
        )
        return RequestTrace(steps, samples, self._states)


def _settle_tokens(state: _RequestState) -> None:
    """Make the tokens of a request's chunks add up to what the server's usage says, in place, if
    they were not counted by ids: spread evenly, the first chunk with at least one.
    """
    total, chunks = state.end.output_tokens, len(state.tokens)
    if total is None or state.end.counted_by == "ids" or not chunks or sum(state.tokens) == total:
        return
    state.tokens = array(
        "q",
        (-(-(i + 1) * total // chunks) - -(-i * total // chunks) for i in range(chunks)),
    )


def _to_us(time_s: float) -> int:
    """Return seconds as whole microseconds."""
    return round(time_s * US)


def _make_columns(
    states: Sequence[_RequestState], wall_s: float, requests: PromptRequests
) -> dict[str, list[int]]:
    """Return the columns of request samples (record/request_samples.py) as lists of integers, times
    as differences in microseconds. A request without an end ended with the pass.
    """
    columns: dict[str, list[int]] = {name: [] for name in (*PER_REQUEST, *PER_CHUNK)}
    previous_us = 0
    for state in states:
        scheduled, due, sent = map(_to_us, (state.scheduled_s, state.due_s, state.sent_s))
        stamps = [sent, *map(_to_us, state.times_s)]
        end = _to_us(wall_s if state.end_s is None else state.end_s)
        text = state.end.text
        again = None if text is None else requests.encode_output(text)
        values = {
            "scheduled_us": scheduled - previous_us,
            "due_us": due - scheduled,
            "sent_us": sent - due,
            "chunk_count": len(state.times_s),
            "end_us": end - stamps[-1],
            "prompt_tokens": len(state.request.prompt),
            "asked_tokens": state.request.output_tokens,
            "output_tokens": sum(state.tokens),
            "usage_prompt_tokens": -1
            if state.end.prompt_tokens is None
            else state.end.prompt_tokens,
            "retokenized_tokens": -1 if again is None else len(again),
            "outcome": OUTCOMES.index(state.end.outcome),
        }
        for name, value in values.items():
            columns[name].append(value)
        columns["chunk_us"] += [b - a for a, b in zip(stamps, stamps[1:], strict=False)]
        columns["chunk_tokens"] += state.tokens
        previous_us = scheduled
    return columns
