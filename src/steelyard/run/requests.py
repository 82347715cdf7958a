"""The one loop that drives every engine's requests: it holds the schedule and the clock.

Requests are handed to the engine's port when they are due, and every chunk is stamped the moment
the port reports it. In an open loop the times of arrival are fixed before the first request and
wait for nothing; in a closed loop a request is scheduled the moment a slot is free. Called by
run/generation_pass.py, with the clock of `measure`.

The loop costs the same for each request and each chunk however many there are: a chunk is one
reading of the clock and two numbers in arrays. Prompts are made before the clock starts; what does
not fit into memory, or is sent for as long as the run lasts, is made one at a time while the loop
waits, never between a request's time and its sending.
"""

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from steelyard.accelerators.events import Clock, Timeline, get_clock_name
from steelyard.case.load import Load
from steelyard.data.prompts import GenerationRequest, PromptRequests
from steelyard.data.request_outcomes import CountedBy
from steelyard.engine.generation import RequestEnd, RequestPort
from steelyard.engine.work import Work
from steelyard.errors import RequestError
from steelyard.record.request_samples import (
    MAX_CHUNKS,
    MAX_REQUESTS,
    ClientFacts,
    RequestSamples,
    make_request_samples,
)
from steelyard.run.arrivals import plan_arrivals
from steelyard.run.clock import now
from steelyard.run.measure import Mark, PassTrace
from steelyard.run.request_columns import (
    RequestState,
    append_unsent,
    make_columns,
    settle_tokens,
    to_us,
)

TICK_S = 0.05  # the loop wakes up at least so often, and so knows how late it wakes up
# failures in a row after which no more requests are sent: nobody is there to answer
MAX_FAILURES = 64
MAX_ERRORS = 20  # texts of failures that are kept
MAX_ERROR_CHARS = 500
BURST = 64  # requests that are handed in before the port may work again
MAX_PREPARED_TOKENS = 1 << 26  # of prompts in memory before the clock starts
RESERVE = 64  # prompts that are kept ready during the run, at least; one for each slot
MAX_OUTPUT_TOKENS = 15_000_000  # of all requests together; below MAX_CHUNKS of a record
# An answer beyond so many times the tokens that were asked for, and some, is cut off.
FLOOD_FACTOR, FLOOD_TOKENS = 2, 64
PARTIAL_CHARACTER = "\ufffd"  # what stands in a text for bytes that are no whole character


@dataclass(frozen=True)
class RequestTrace:
    """A measured pass of requests: `steps`, the trace of the engine's own steps and the borders of
    the pass; `samples`, the request samples; `states`, what was generated, in the order of the
    schedule. `get_output_ids(number)` returns the generated ids of a request.
    """

    steps: PassTrace
    samples: RequestSamples
    states: Sequence[RequestState]

    def get_output_ids(self, number: int, requests: PromptRequests) -> list[int] | None:
        """Return the token ids that a request generated, at most as many as were asked for: those
        that were reported, if each token has one, else those of its text by the tokenizer. None if
        neither is known, one is not in the model's vocabulary, or it did not end regularly.
        """
        state = self.states[number]
        if state.end.outcome != "ok":
            return None
        ids: list[int] | None = list(state.ids)
        if len(state.ids) != state.output_tokens:
            ids = _encode_answer(state, requests)
        if ids is None or max(ids, default=0) >= requests.vocab:
            return None
        return ids[: state.request.output_tokens]


def _encode_answer(state: RequestState, requests: PromptRequests) -> list[int] | None:
    """Return the token ids of an answer's text. None if there is no text, or its tokens cannot be
    those that were generated: they are not as many, or the text has a part of a character. With
    natural lengths the token that ends an answer is counted and is no text.
    """
    text = state.end.text
    if text is None or PARTIAL_CHARACTER in text:
        return None
    ids = requests.encode_output(text, state.request.text)
    if ids is None:
        return None
    spare = 1 if requests.lengths == "natural" else 0
    return ids if state.output_tokens - spare <= len(ids) <= state.output_tokens else None


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
        self._states: list[RequestState] = []
        self._marks: list[Mark] = []
        self._lags_s: array[float] = array("d")
        self._open = self._ended = self._failures = self._chunks = self._asked_tokens = 0
        self._planned = self._reserve = 0
        self._is_timed = load.mode == "concurrency" and min_time_s is not None
        self._has_failed = False  # too many requests failed in a row: no more are sent
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
        """Fix the schedule, and make the requests that are known to be sent, as far as memory
        allows, before the clock starts. Called once, before `run`. Raises RequestError if the
        answers are longer than a record has room for.
        """
        planned, load = self._requests.count, self._load
        if load.mode == "rate":
            self._arrivals.extend(plan_arrivals(load, self._requests, self._min_time_s))
            planned = len(self._arrivals)
            self._free_slots.extend([0.0] * (load.max_concurrency or planned))
        elif load.mode == "offline":
            self._arrivals.extend([0.0] * planned)
            self._free_slots.extend([0.0] * planned)
        else:
            slots = load.concurrency or 1
            self._free_slots.extend([0.0] * (slots if self._is_timed else min(slots, planned)))
        lengths = map(self._requests.find_lengths, range(planned))
        if planned > MAX_REQUESTS or sum(output for _, output in lengths) > MAX_OUTPUT_TOKENS:
            raise RequestError(
                f"{planned:,} requests: a record has room for {MAX_REQUESTS:,}, and for"
                f" {MAX_OUTPUT_TOKENS:,} tokens of all answers; send fewer (--set requests=N)"
            )
        self._planned = planned
        self._reserve = max(RESERVE, load.concurrency or 0)
        prompt_tokens, ready = 0, max(planned, self._reserve if self._is_timed else 0)
        while len(self._prepared) < ready and prompt_tokens < MAX_PREPARED_TOKENS:
            prompt_tokens += len(self._prepare_next().prompt)

    def _prepare_next(self) -> GenerationRequest:
        """Make the request behind those that are ready, add it to them and return it."""
        request = self._requests.make(len(self._states) + len(self._prepared))
        self._prepared.append(request)
        return request

    def _needs_prompts(self) -> bool:
        """Return whether fewer requests are ready than the reserve, and more may be sent."""
        ready = len(self._prepared)
        is_short = self._is_timed or len(self._states) + ready < self._planned
        return ready < self._reserve and is_short and self._has_more()

    def _submit_due(self, port: RequestPort) -> bool:
        """Hand in the requests that are due, at most `BURST`, and return whether any are still to
        come.
        """
        for _ in range(BURST):
            if not self._has_more():
                return False
            # added up as in `_wait`, or rounding could leave a request due and never sent
            is_early = bool(self._arrivals) and self._start + self._arrivals[0] > self._clock()
            if is_early or not self._free_slots:
                return True
            free_s = self._free_slots.popleft()
            scheduled_s = self._arrivals.popleft() if self._arrivals else free_s
            if not self._prepared:
                self._prepare_next()
            request = self._prepared.popleft()
            due_s = max(scheduled_s, free_s)
            sent_s = max(due_s, self._clock() - self._start)
            self._states.append(RequestState(request, scheduled_s, due_s, sent_s))
            self._open += 1
            self._asked_tokens += request.output_tokens
            port.submit(request)
        return self._has_more()

    def _has_more(self) -> bool:
        """Return whether requests are still to be sent: arrivals are left, or a closed loop has
        neither sent all nor run for its least time, and a record has room for more. False once too
        many failed in a row.
        """
        if self._has_failed:
            return False
        if self._load.mode != "concurrency":
            return bool(self._arrivals)
        if len(self._states) < self._planned:
            return True
        if self._min_time_s is None or self._clock() - self._start >= self._min_time_s:
            return False
        return len(self._states) < MAX_REQUESTS and self._asked_tokens < MAX_OUTPUT_TOKENS

    def _wait(self, port: RequestPort) -> None:
        """Let the port work until the next request is due, at most `TICK_S`, and note how late it
        returned. If requests are due already or prompts are short (one is then made first), the
        port reports no more than what has arrived, and all that takes counts as being late.
        """
        begin_s = self._clock()
        until_s, ended = begin_s + TICK_S, self._ended
        if self._needs_prompts():
            self._prepare_next()
            until_s = begin_s
        elif self._free_slots and self._has_more():
            due_s = self._start + self._arrivals[0] if self._arrivals else begin_s
            until_s = max(begin_s, min(until_s, due_s))
        port.wait(until_s)
        while until_s == begin_s and self._ended > ended:  # a port returns at every end
            ended = self._ended
            port.wait(until_s)
        late_s = self._clock() - until_s
        if late_s >= 0:
            self._lags_s.append(late_s)

    def mark_sent(self, number: int) -> None:
        """Stamp the sending of a request, as `RequestSink` says: it replaces the time at which the
        request was handed in, unless a chunk or the end has come, and is never before it.
        """
        at_s = self._clock() - self._start
        state = self._states[number]
        if not state.times_s and state.end_s is None:
            state.sent_s = max(state.sent_s, at_s)

    def add_chunk(self, number: int, tokens: int, ids: Sequence[int] = ()) -> None:
        """Stamp a chunk of a request, as `RequestSink` says. A chunk without tokens is ignored, and
        so is what comes behind the end, or behind a fault: ids that the model does not have, or
        many more tokens than were asked for.
        """
        at_s = self._clock() - self._start
        state = self._states[number]
        if tokens <= 0 or state.end_s is not None or state.fault is not None:
            return
        most = FLOOD_FACTOR * state.request.output_tokens + FLOOD_TOKENS
        if state.output_tokens + tokens > most or self._chunks >= MAX_CHUNKS:
            state.fault = RequestEnd("flooded", f"more than {most} tokens")
        elif ids and not (min(ids) >= 0 and max(ids) < self._requests.vocab):
            state.fault = RequestEnd("garbage", "a token id that the model does not have")
        else:
            state.times_s.append(at_s)
            state.tokens.append(tokens)
            state.ids.extend(ids)
            state.output_tokens += tokens
            self._chunks += 1

    def end_request(self, number: int, end: RequestEnd) -> None:
        """Stamp the end of a request and free its slot, as `RequestSink` says. Only the first end
        counts. A regular end is none if a chunk had a fault, no token came, or the server's usage
        is an impossible number.
        """
        at_s = self._clock() - self._start
        state = self._states[number]
        if state.end_s is not None:
            return
        state.end_s, state.end = at_s, end
        if not (_is_count(end.output_tokens) and _is_count(end.prompt_tokens)):
            state.end = RequestEnd("garbage", "the server's usage is an impossible number")
        elif end.outcome == "ok" and state.fault is not None:
            state.end = state.fault
        elif end.outcome == "ok" and not state.times_s:
            state.end = RequestEnd("empty", "a regular end without any token")
        self._failures = 0 if state.end.outcome == "ok" else self._failures + 1
        self._has_failed |= self._failures >= MAX_FAILURES
        self._open -= 1
        self._ended += 1
        self._free_slots.append(at_s)
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
            settle_tokens(state)
        columns = make_columns(self._states, wall_s, self._requests)
        if self._has_failed:
            append_unsent(columns, range(len(self._states), self._planned), wall_s, self._requests)
        ends = [state.end for state in self._states]
        errors = dict.fromkeys(end.error[:MAX_ERROR_CHARS] for end in ends if end.error)
        regular = [end for end in ends if end.outcome == "ok"] or ends
        counted: set[CountedBy] = {end.counted_by for end in regular}
        lags_us = sorted(to_us(lag_s) for lag_s in self._lags_s) or [0]
        samples = make_request_samples(
            columns,
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


def _is_count(number: int | None) -> bool:
    """Return whether a number that a server stated can be one of tokens; None, not stated, can."""
    return number is None or (type(number) is int and 0 <= number <= MAX_CHUNKS)
