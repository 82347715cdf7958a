"""The port of engine `torch`: plans steps, launches them, and reports their tokens.

All runs in the thread of the loop of requests, which gets control back when it asked for it: the
port never waits for a step longer than until then. While a device computes a step the next one is
launched behind it; on a CPU a thread computes one step at a time.
"""

import threading
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_futures
from dataclasses import dataclass
from typing import Any

import torch

from steelyard.data.prompts import GenerationRequest, PromptRequests
from steelyard.engine.generation import RequestEnd, RequestSink
from steelyard.engine.work import Work
from steelyard.engines.torch.generate.generator import Generator, SampledTokens, make_work
from steelyard.engines.torch.generate.scheduler import Scheduler, Step
from steelyard.engines.torch.tensor_parallel import TensorParallelGroup
from steelyard.errors import RequestError

PASS_IS_OVER = -1  # in place of a number of new requests
POLL_S = 5e-5  # between two looks at a device


def _sleep(time_s: float) -> None:
    """Let so many seconds pass."""
    threading.Event().wait(time_s)


class StepMessages:
    """Messages from the first rank of a tensor-parallel group to the others, one before each step
    that it plans: the numbers of new requests and how many steps it has reported, or that the pass
    is over. All ranks plan the same steps from them. A group of one sends nothing.
    """

    def __init__(self, group: TensorParallelGroup, device: torch.device) -> None:
        self._group, self._device = group, device

    def send(self, reported: int, numbers: Sequence[int]) -> None:
        """Send the numbers of the requests that are new in this step."""
        self._broadcast([len(numbers), reported])
        if numbers:
            self._broadcast(numbers)

    def end(self) -> None:
        """Send that the pass is over."""
        self._broadcast([PASS_IS_OVER, 0])

    def receive(self) -> tuple[int, list[int]] | None:
        """Wait for the next message and return what `send` was given; None: the pass is over."""
        count, reported = self._broadcast([0, 0])
        if count == PASS_IS_OVER:
            return None
        return reported, self._broadcast([0] * count) if count else []

    def _broadcast(self, numbers: Sequence[int]) -> list[int]:
        """Return the first rank's numbers; those of the others are only as many."""
        if self._group.share.count == 1:
            return [*numbers]
        content = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        return [*map(int, self._group.broadcast(content).tolist())]


@dataclass
class LaunchedStep:
    """A step that is being computed: on a device it was launched, and `sampled` is known; on a CPU
    a thread computes it (`future`). `work` is the mark of a step that was not marked yet.
    """

    sampled: SampledTokens | None = None
    future: "Future[SampledTokens] | None" = None
    work: Work | None = None

    def wait(self, timeout_s: float | None, clock: Callable[[], float] | None = None) -> bool:
        """Wait for the tokens at most so long by the clock (None: without limit), and return
        whether they have arrived.
        """
        if self.future is not None:
            return bool(wait_for_futures([self.future], timeout_s).done)
        arrived = None if self.sampled is None else self.sampled.arrived
        if arrived is None or timeout_s is None or clock is None:
            return True  # reading them waits
        end_s = clock() + timeout_s
        while not arrived.query():
            if clock() >= end_s:
                return False
            _sleep(POLL_S)
        return True

    def read(self) -> SampledTokens:
        """Return what the step sampled; raises what its thread raised."""
        if self.future is not None:
            return self.future.result()
        if self.sampled is None:
            raise RuntimeError("a step that was never launched")
        return self.sampled


class StepPort:
    """The port of engine `torch` (a `RequestPort`): `submit` puts a request behind those that wait,
    `wait` computes steps and reports their tokens to the sink. `follow` computes the same steps on
    the other ranks of a tensor-parallel group, and `run_out` those of all requests that are there.

    `end_token` ends a text before its limit, None: nothing does.
    """

    is_separate = False

    def __init__(
        self,
        generator: Generator,
        scheduler: Scheduler,
        sink: RequestSink,
        messages: StepMessages,
        clock: Callable[[], float] | None = None,
        end_token: int | None = None,
    ) -> None:
        """Start with an empty cache. `clock` is that of `wait`, which no other method needs."""
        self._generator, self._scheduler, self._sink = generator, scheduler, sink
        self._messages, self._clock, self._end_token = messages, clock, end_token
        self._new: list[int] = []  # numbers of requests that no other rank knows yet
        self._prompts: dict[int, array[int]] = {}  # of requests that were never admitted
        self._outputs: dict[int, int] = {}  # tokens of open requests that were reported
        self._launched: deque[LaunchedStep] = deque()
        self._reported_steps = 0
        on_cpu = generator.device.type == "cpu"
        self._thread = ThreadPoolExecutor(1) if on_cpu else None
        self._depth = 1 if on_cpu else 2  # steps that are computed or wait for it

    @property
    def preemptions(self) -> int:
        """The number of times that a sequence gave up its blocks and was computed again."""
        return self._scheduler.preemptions

    def submit(self, request: GenerationRequest) -> None:
        """Add a request; one that the cache has no room for ends at once."""
        try:
            self.add(request, request.output_tokens)
        except RequestError as error:
            self._sink.end_request(request.number, RequestEnd("refused", str(error)))

    def add(self, request: GenerationRequest, output_tokens: int) -> None:
        """Put a request behind those that wait. Raises RequestError if the cache has no room."""
        self._scheduler.add(request.number, len(request.prompt), output_tokens)
        self._new.append(request.number)
        self._prompts[request.number] = request.prompt
        self._outputs[request.number] = 0

    def wait(self, until_s: float | None) -> None:
        """Compute steps until the clock shows `until_s` or a request has ended; with nothing to
        compute, sleep until then. Raises RuntimeError without a clock.
        """
        clock = self._clock
        if clock is None:
            raise RuntimeError("a port without a clock cannot wait")
        open_requests = len(self._outputs)
        while len(self._outputs) == open_requests:
            self._launch_ahead()
            timeout_s = None if until_s is None else max(0.0, until_s - clock())
            if not self._launched:
                _sleep(timeout_s or 0.0)
                return
            if not self._launched[0].wait(timeout_s, clock):
                return
            self._report_step()

    def run_out(self) -> None:
        """Compute steps until all requests have ended, without telling other ranks: they have the
        same requests.
        """
        while self._outputs:
            self._launch(self._scheduler.plan_step())
            self._report_step()

    def follow(self, requests: PromptRequests) -> None:
        """Compute the steps that the group's first rank plans, until its pass is over. `requests`
        makes the requests that it names.
        """
        while (message := self._messages.receive()) is not None:
            reported_steps, numbers = message
            while self._reported_steps < reported_steps:
                self._report_step()
            for number in numbers:
                request = requests.make(number)
                self.add(request, request.output_tokens)
            self._launch(self._scheduler.plan_step())
            if self._launched[-1].future is not None:
                # the thread's collectives must be over before the next message is one
                self._launched[-1].wait(None)
        while self._launched:
            self._report_step()

    def close(self) -> None:
        """End the thread, if there is one."""
        if self._thread is not None:
            self._thread.shutdown()

    def _launch_ahead(self) -> None:
        """Plan and launch steps until as many as may be are on their way, or nothing is left."""
        while len(self._launched) < self._depth and self._scheduler.has_work:
            self._messages.send(self._reported_steps, self._new)
            self._new = []
            self._launch(self._scheduler.plan_step())

    def _launch(self, step: Step | None) -> None:
        """Launch a step on the device, where its mark is that of the stream, or give it to the
        thread. Raises RuntimeError without a step: requests are left, and none can go on.
        """
        if step is None:
            raise RuntimeError("no step can be planned, though requests are open")
        for chunk in step.chunks:
            prompt = self._prompts.pop(chunk.sequence.number, None)
            if prompt is not None:
                self._generator.write_prompt(chunk.sequence, prompt)
        work = make_work(step, self._generator.window)
        if self._thread is not None:
            future = self._thread.submit(self._generator.run, step)
            self._launched.append(LaunchedStep(future=future, work=work))
            return
        sampled = self._generator.run(step)
        self._sink.add_step(work)
        self._launched.append(LaunchedStep(sampled))

    def _report_step(self) -> None:
        """Wait for the oldest step on its way, and report its tokens and the ends of requests. A
        token behind the end of its text, launched before that was known, is dropped.
        """
        step = self._launched.popleft()
        sampled = step.read()
        ids = sampled.read()
        if step.work is not None:
            self._sink.add_step(step.work)
        self._reported_steps += 1
        for sequence, token in zip(sampled.sequences, ids, strict=True):
            number = sequence.number
            if number not in self._outputs:
                continue
            self._sink.add_chunk(number, 1, (token,))
            self._outputs[number] += 1
            limit = sequence.limit - sequence.prompt_tokens
            if token == self._end_token or self._outputs[number] == limit:
                del self._outputs[number]
                self._scheduler.finish(sequence)
                self._sink.end_request(number, RequestEnd())


class NoSink:
    """Takes what warm-up requests report, and keeps nothing (a `RequestSink`)."""

    def mark_sent(self, number: int) -> None:
        """Ignore when a request is sent."""

    def add_chunk(self, number: int, tokens: int, ids: Any = ()) -> None:
        """Ignore tokens."""

    def end_request(self, number: int, end: RequestEnd) -> None:
        """Ignore the end of a request."""

    def add_step(self, work: Work) -> None:
        """Ignore a step."""
