"""Engine `transformers`, generation: the library's continuous batching as it comes, and its plain
`generate` with a static cache for one request at a time.

Both run in a thread of their own, and tokens reach this port through a queue, where the loop stamps
them. The library does not tell its steps apart, so none are reported. The sharing of prefixes is
turned off.
"""

import gc
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import fsum
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.streamers import BaseStreamer

from steelyard.data.prompts import GenerationRequest, PromptRequests
from steelyard.engine.generation import RequestEnd, RequestSink
from steelyard.engine.job import Job, Part
from steelyard.engines.transformers.score import TransformersScorer
from steelyard.errors import RequestError
from steelyard.models.tensors import format_dtypes

THREAD_ENDED = "the library's thread ended"  # its error is in the worker's stderr
NO_END = -1  # the id of an end-of-text token that no token has
BLOCK_TOKENS = 256  # of the library's cache
STOP_S = 60.0  # for the library's thread to end
WARMUP_SLOTS = 64  # warm-up requests of a round, at most
WARMUP_TOKENS = 16  # output of a warm-up request with continuous batching, at most
MAX_CPU_SLOTS = 64  # requests that the cache on a CPU has room for


class TransformersGenerate:
    """The engine `transformers` for generation (a `GenerationEngine`): `generate` with a static
    cache at concurrency 1, else the manager of continuous batching, which `generate_batch` uses
    too. `prepare` loads the model, starts the library's thread and sends warm-up requests,
    `open_port` runs a pass with the same thread, `close` ends it.
    """

    def __init__(self, job: Job) -> None:
        """Store the job; the model is loaded by `prepare`. Raises RequestError for a kernel of
        attention that the library's paged cache does not have.
        """
        self.job = job
        self.inputs: PromptRequests = job.inputs
        if job.case.tune.attention not in ("auto", "sdpa"):
            raise RequestError(
                f"tune.attention={job.case.tune.attention!r}: engine transformers generates with"
                " sdpa alone; leave it out"
            )
        self._scorer: TransformersScorer | None = TransformersScorer(job)
        self._backend: _Manager | _OneByOne | None = None
        self._weights: dict[str, Any] = {}
        self._details: dict[str, Any] = {}
        load = job.case.question.load
        self.one_by_one = load is not None and load.concurrency == 1

    @property
    def weights(self) -> dict[str, Any]:
        """Return the source of the weights for the record; empty before `prepare`."""
        return self._weights

    def prepare(self, name: str, part: Part) -> None:
        """Load the model and start the library's thread before the first pass, and send
        `tune.warmup` rounds of warm-up requests, one for each slot.
        """
        if self._backend is None:
            with part("weights"):
                self._load()
            with part("engine_start"):
                self._backend = self._start()
        with part(f"warmup_{name}"):
            self._warm_up(self._backend)
            self.job.device.synchronize()

    def _load(self) -> None:
        """Load the model, and note the source, number and types of its weights."""
        scorer = self._get_scorer()
        self._weights = scorer.load()
        parameters = list(scorer.tensors())
        self._details = {
            "parameters": sum(tensor.numel() for tensor in parameters),
            "dtypes": {"parameters": format_dtypes(parameters)},
        }
        self.job.device.synchronize()

    def _start(self) -> "_Manager | _OneByOne":
        """Return the library's thread of continuous batching, or one that runs `generate`."""
        model: Any = self._get_scorer().model.model
        if self.one_by_one:
            return _OneByOne(model, self._make_config(), self.job)
        return _Manager(model, self._make_config(), self._make_batching_config())

    def _warm_up(self, backend: "_Manager | _OneByOne") -> None:
        """Send warm-up requests and wait for their ends. Raises RuntimeError if one failed."""
        load, rounds = self.job.case.question.load, self.job.case.tune.warmup
        slots = min((None if load is None else load.concurrency) or WARMUP_SLOTS, WARMUP_SLOTS)
        sink = _WarmupSink()
        port = QueuePort(backend, sink)
        for number in range(rounds * slots):
            request = self.inputs.make_warmup(number)
            if not self.one_by_one:  # a static cache is as long as the output that is asked for
                tokens = min(request.output_tokens, WARMUP_TOKENS)
                request = replace(request, output_tokens=tokens)
            port.submit(request)
        while sink.ended < rounds * slots:
            port.take(timeout_s=1.0)
        if sink.errors:
            raise RuntimeError(f"a warm-up request failed: {sink.errors[0]}")

    @contextmanager
    def open_port(self, name: str, sink: RequestSink, clock: Any) -> Iterator["QueuePort"]:
        """Open the port of a pass for its `sink`. Raises RuntimeError before `prepare`."""
        if self._backend is None:
            raise RuntimeError("open_port before prepare")
        port = QueuePort(self._backend, sink, clock)
        yield port
        self._details["library_stamps"] = port.compare_stamps()

    def _make_config(self) -> GenerationConfig:
        """Return the library's settings of greedy decoding; the end of a text is ignored unless
        lengths are natural.
        """
        tokenizer, exact = self.inputs.source.tokenizer, self.inputs.lengths == "exact"
        end = None if tokenizer is None or exact else tokenizer.end
        return GenerationConfig(  # type: ignore[no-untyped-call]
            do_sample=False, eos_token_id=NO_END if end is None else end, pad_token_id=0
        )

    def _make_batching_config(self) -> ContinuousBatchingConfig:
        """Return the library's settings of continuous batching: the tune's tokens of a step, no
        shared prefixes, and on a CPU, of which the library does not know the
        free memory, as many blocks as the load can fill. Nothing is compiled, as by the library's
        own default: at its lowest level an 8B model took over 150 s on an H200.
        """
        case = self.job.case
        options: dict[str, Any] = {
            "max_batch_tokens": case.tune.batch_tokens,
            "allow_block_sharing": False,
        }
        if self.job.device.torch_device.type == "cpu":
            options["num_blocks"] = self._count_blocks()
        return ContinuousBatchingConfig(**options)

    def _count_blocks(self) -> int:
        """Return how many blocks of the library's cache the load can fill: those of the longest
        requests, as many as are in flight, and some to spare.
        """
        load, count = self.job.case.question.load, self.inputs.count
        in_flight = None if load is None else load.concurrency or load.max_concurrency
        slots = min(in_flight or count, count, MAX_CPU_SLOTS)
        longest: int = max(sum(self.inputs.find_lengths(i)) for i in range(min(count, 1000)))
        return (slots + 1) * (longest // BLOCK_TOKENS + 2)

    def _get_scorer(self) -> TransformersScorer:
        """Return the loaded model's holder; raise RuntimeError after `close`."""
        if self._scorer is None:
            raise RuntimeError("the engine is closed")
        return self._scorer

    def close(self) -> None:
        """End the library's thread, let go of the model and give its memory back to the device."""
        if self._backend is not None:
            self._backend.stop()
        self._backend = self._scorer = None
        gc.collect()
        self.job.device.release_memory()

    def details(self) -> dict[str, Any]:
        """Return how requests are run (`scheduling`), whether the decode step is `compiled`, number
        and types of the weights, and, after a pass, how far the library's own stamps are from those
        of the loop (`library_stamps`).
        """
        scheduling = "generate, static cache" if self.one_by_one else "continuous batching"
        compiled = self.one_by_one and self.job.case.tune.compile
        return {
            "attention": "sdpa",
            "scheduling": scheduling,
            "compiled": compiled,
            **self._details,
        }


@dataclass(frozen=True)
class _Arrival:
    """What arrived of a request: new token `ids`, its `end` if it has ended, and then the seconds
    from its first to its last token by the library's own stamps (None: it has none).
    """

    number: int
    ids: list[int] = field(default_factory=list)
    end: RequestEnd | None = None
    library_span_s: float | None = None


class QueuePort:
    """The port of an engine whose thread leaves arrivals in a queue (a `RequestPort`): `wait` takes
    them out and reports them to `sink`. `compare_stamps` says how far the library's own stamps are
    from the clock's. Without a `clock` only `submit` and `take` may be used.
    """

    is_separate = False

    def __init__(
        self,
        backend: "_Manager | _OneByOne",
        sink: RequestSink,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._backend, self._sink, self._clock = backend, sink, clock
        self._first_s: dict[int, float] = {}  # of open requests: arrival of the first token
        self._differences_s: list[float] = []

    def submit(self, request: GenerationRequest) -> None:
        """Hand a request to the engine's thread."""
        self._backend.submit(request)

    def wait(self, until_s: float | None) -> None:
        """Report arrivals until the clock shows `until_s` or a request has ended; if that time has
        passed, those that are in the queue. Raises RuntimeError without a clock.
        """
        if self._clock is None:
            raise RuntimeError("a port without a clock cannot wait")
        while True:
            timeout_s = None if until_s is None else max(0.0, until_s - self._clock())
            arrival = self.take(timeout_s)
            is_over = timeout_s == 0 if arrival is None else arrival.end is not None
            if is_over:
                return

    def take(self, timeout_s: float | None) -> "_Arrival | None":
        """Take one arrival out of the queue, wait for it at most so long (None: without limit),
        report it and return it; None if there was none.
        """
        arrival = self._backend.take(timeout_s)
        if arrival is None:
            return None
        if arrival.ids:
            self._sink.add_chunk(arrival.number, len(arrival.ids), arrival.ids)
        self._note_stamps(arrival)
        if arrival.end is not None:
            self._sink.end_request(arrival.number, arrival.end)
        return arrival

    def _note_stamps(self, arrival: _Arrival) -> None:
        """Note when a request's first token arrived, and, at its end, by how much the time from its
        first to its last token differs from the library's.
        """
        if self._clock is None:
            return
        first_s = self._first_s.setdefault(arrival.number, self._clock())
        if arrival.end is not None:
            del self._first_s[arrival.number]
            if arrival.library_span_s is not None:
                span_s = self._clock() - first_s
                self._differences_s.append(abs(span_s - arrival.library_span_s))

    def compare_stamps(self) -> dict[str, float]:
        """Return of how many `requests` the library stamped the tokens, and the `largest_s` and
        `mean_s` difference of its time from first to last token and the clock's; empty without one.
        """
        if not self._differences_s:
            return {}
        return {
            "requests": len(self._differences_s),
            "largest_s": max(self._differences_s),
            "mean_s": fsum(self._differences_s) / len(self._differences_s),
        }


class _Manager:
    """The library's manager of continuous batching, started; requests stream their tokens."""

    def __init__(self, model: Any, config: GenerationConfig, batching: Any) -> None:
        """Start the library's thread."""
        self._manager = model.init_continuous_batching(
            generation_config=config, continuous_batching_config=batching
        )
        self._manager.start()
        self._seen: dict[int, int] = {}  # number of an open request → tokens reported so far

    def submit(self, request: GenerationRequest) -> None:
        """Add a request under its number."""
        self._seen[request.number] = 0
        self._manager.add_request(
            list(request.prompt),
            request_id=str(request.number),
            max_new_tokens=request.output_tokens,
            streaming=True,
            record_timestamps=True,
        )

    def take(self, timeout_s: float | None) -> _Arrival | None:
        """Return the next arrival, None if there is none in time. If the library's thread has
        ended, every open request has failed.
        """
        result = self._manager.get_result(timeout=timeout_s)
        if result is None:
            if self._seen and not self._manager.is_running():
                number = next(iter(self._seen))
                del self._seen[number]
                return _Arrival(number, end=RequestEnd("failed", THREAD_ENDED))
            return None
        number = int(result.request_id)
        ids = list(result.generated_tokens[self._seen.get(number, 0) :])
        if not result.is_finished():
            self._seen[number] = len(result.generated_tokens)
            return _Arrival(number, ids)
        self._seen.pop(number, None)
        end = RequestEnd() if result.error is None else RequestEnd("failed", str(result.error))
        stamps = result.timestamps or []
        return _Arrival(number, ids, end, stamps[-1] - stamps[0] if stamps else None)

    def stop(self) -> None:
        """End the library's thread and free its cache."""
        self._manager.stop(block=True, timeout=STOP_S)
        destroy = getattr(self._manager, "destroy", None)
        if destroy is not None:  # later versions have it
            destroy()


class _TokenStreamer(BaseStreamer):
    """Leaves the tokens of one request of `generate` in a queue as they come."""

    def __init__(self, number: int, arrivals: "queue.Queue[_Arrival]") -> None:
        self._number, self._arrivals, self._is_prompt = number, arrivals, True

    def put(self, value: torch.Tensor) -> None:
        """Take the tokens of a step; the first are the prompt."""
        if self._is_prompt:
            self._is_prompt = False
            return
        self._arrivals.put(_Arrival(self._number, value.flatten().tolist()))

    def end(self) -> None:
        """Do nothing: the thread reports the end."""


class _OneByOne:
    """A thread that runs `generate` with a static cache, one request after the other."""

    def __init__(self, model: Any, config: GenerationConfig, job: Job) -> None:
        """Start the thread."""
        self._model, self._config, self._job = model, config, job
        self._requests: queue.Queue[GenerationRequest | None] = queue.Queue()
        self._arrivals: queue.Queue[_Arrival] = queue.Queue()
        self._open: deque[int] = deque()  # numbers of requests, in the order of their ends
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(self, request: GenerationRequest) -> None:
        """Put a request behind those that wait."""
        self._open.append(request.number)
        self._requests.put(request)

    def take(self, timeout_s: float | None) -> _Arrival | None:
        """Return the next arrival, None if there is none in time. If the thread has ended, every
        open request has failed.
        """
        try:
            arrival = self._arrivals.get(timeout=timeout_s)
        except queue.Empty:
            if not self._open or self._thread.is_alive():
                return None
            arrival = _Arrival(self._open[0], end=RequestEnd("failed", THREAD_ENDED))
        if arrival.end is not None:
            self._open.popleft()
        return arrival

    def stop(self) -> None:
        """End the thread."""
        self._requests.put(None)
        self._thread.join(STOP_S)

    def _run(self) -> None:
        """Generate for each request in turn, until None comes. An error ends its request alone."""
        while (request := self._requests.get()) is not None:
            try:
                self._generate(request)
            except (RuntimeError, ValueError, TypeError) as error:
                end = RequestEnd("failed", " ".join(str(error).split())[:500])
            else:
                end = RequestEnd()
            self._arrivals.put(_Arrival(request.number, end=end))

    def _generate(self, request: GenerationRequest) -> None:
        """Run `generate` for one request; its tokens go to the queue as they come."""
        tune = self._job.case.tune
        prompt = torch.tensor([list(request.prompt)], device=self._job.device.torch_device)
        with torch.inference_mode():
            self._model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                generation_config=self._config,
                max_new_tokens=request.output_tokens,
                cache_implementation="static",
                disable_compile=not tune.compile,
                streamer=_TokenStreamer(request.number, self._arrivals),
            )


class _WarmupSink:
    """Takes what warm-up requests report, and keeps how many ended and their errors."""

    def __init__(self) -> None:
        self.ended, self.errors = 0, list[str]()

    def mark_sent(self, number: int) -> None:
        """Ignore when a warm-up request is sent."""

    def add_chunk(self, number: int, tokens: int, ids: Any = ()) -> None:
        """Ignore the tokens of a warm-up request."""

    def end_request(self, number: int, end: RequestEnd) -> None:
        """Count the end of a warm-up request, and keep its error."""
        self.ended += 1
        if end.outcome != "ok":
            self.errors.append(end.error or end.outcome)

    def add_step(self, work: Any) -> None:
        """Ignore a step."""
