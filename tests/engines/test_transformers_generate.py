"""Engine transformers generates: tokens of the loop equal those of the library's own `generate`, in
every way of running requests.
"""

import threading
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from fixtures.generation_jobs import REQUESTS, make_job, make_loop, run_pass
from steelyard.engine import engine_rows
from steelyard.engine.generation import RequestEnd
from steelyard.engines.transformers import generate
from steelyard.errors import RequestError
from steelyard.run.clock import now

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def engines() -> Iterator[list[Any]]:
    """Yield a list for engines, which are closed at the end."""
    opened: list[Any] = []
    yield opened
    for engine in opened:
        engine.close()


LOADS = {
    "one by one, static cache": ("load.concurrency=1",),
    "closed loop": ("load.concurrency=4",),
    "offline": ("load.mode=offline",),
    "open loop": ("load.rate=1000",),
    "a step of few tokens, so that prompts are cut": ("tune.batch_tokens=24",),
    "another number of key heads": ("question.model.kv_heads=4", "load.concurrency=3"),
}


@pytest.mark.parametrize("settings", LOADS.values(), ids=LOADS)
def test_tokens_are_those_of_generate(settings: tuple[str, ...], engines: list[Any]) -> None:
    job = make_job(*settings)
    engine = engine_rows.load_engine("transformers", "generate")(job)
    engines.append(engine)
    trace = run_pass(engine, job)
    model = engine._get_scorer().model.model
    model.set_attn_implementation("sdpa")
    assert [state.end.outcome for state in trace.states] == ["ok"] * REQUESTS
    for number, state in enumerate(trace.states):
        prompt = torch.tensor([list(state.request.prompt)])
        expected = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=state.request.output_tokens,
            eos_token_id=-1,
            pad_token_id=0,
        )[0, prompt.shape[1] :].tolist()
        assert trace.get_output_ids(number, job.inputs) == expected
        assert len(expected) == state.request.output_tokens == sum(state.tokens)
    assert trace.samples.counted_by == "ids"


def test_warm_up_is_not_in_the_pass_and_one_thread_serves_both(engines: list[Any]) -> None:
    job = make_job("load.concurrency=2")
    engine = engine_rows.load_engine("transformers", "generate")(job)
    engines.append(engine)
    first = run_pass(engine, job)
    backend = engine._backend
    second = run_pass(engine, job)
    assert engine._backend is backend
    assert [state.request.number for state in second.states] == list(range(REQUESTS))
    assert [first.get_output_ids(i, job.inputs) for i in range(REQUESTS)] == [
        second.get_output_ids(i, job.inputs) for i in range(REQUESTS)
    ]
    stamps = engine.details()["library_stamps"]
    assert stamps["requests"] == REQUESTS
    assert 0 <= stamps["mean_s"] <= stamps["largest_s"]


def test_requests_fail_when_the_thread_of_the_library_ends(engines: list[Any]) -> None:
    """Every request has an end, also if nobody computes it any more."""
    job = make_job("load.mode=offline")
    engine = engine_rows.load_engine("transformers", "generate")(job)
    engines.append(engine)
    engine.prepare("generate", lambda name: nullcontext())
    engine._backend._manager.stop(block=True, timeout=60)
    loop = make_loop(job)
    with engine.open_port("generate", loop, now) as port:
        trace = loop.make_trace(loop.run(port), "generate")
    assert [state.end.outcome for state in trace.states] == ["failed"] * REQUESTS


def test_other_kernels_of_attention_are_refused() -> None:
    with pytest.raises(RequestError, match="generates with sdpa alone"):
        engine_rows.load_engine("transformers", "generate")(make_job("tune.attention=flash"))


class QueuedBackend:
    """Has arrivals ready, and notes how long it was waited for."""

    def __init__(self, *arrivals: Any) -> None:
        self.arrivals, self.timeouts_s = list(arrivals), list[float | None]()

    def take(self, timeout_s: float | None) -> Any:
        self.timeouts_s.append(timeout_s)
        return self.arrivals.pop(0) if self.arrivals else None


class NotingSink:
    """Notes the chunks and ends that are reported."""

    def __init__(self) -> None:
        self.chunks, self.ends = list[tuple[int, int]](), list[int]()

    def add_chunk(self, number: int, tokens: int, ids: Any = ()) -> None:
        self.chunks.append((number, tokens))

    def end_request(self, number: int, end: Any) -> None:
        self.ends.append(number)


def test_a_wait_whose_time_has_passed_reports_what_is_there_up_to_an_end() -> None:
    def arrive(number: int, end: RequestEnd | None = None) -> generate._Arrival:
        return generate._Arrival(number, [7], end)

    backend, sink = QueuedBackend(arrive(0), arrive(1), arrive(2, RequestEnd())), NotingSink()
    backend.arrivals.append(arrive(3))
    port = generate.QueuePort(backend, sink, lambda: 5.0)  # type: ignore[arg-type]
    port.wait(4.0)
    assert sink.chunks == [(0, 1), (1, 1), (2, 1)]
    assert sink.ends == [2]
    port.wait(4.0)
    assert sink.chunks[3:] == [(3, 1)]
    assert set(backend.timeouts_s) == {0.0}


def test_requests_one_by_one_fail_when_their_thread_dies(
    engines: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error that is no error of one request ends the thread, and with it all open requests."""
    job = make_job("load.concurrency=1")
    engine = engine_rows.load_engine("transformers", "generate")(job)
    engines.append(engine)
    engine.prepare("generate", lambda name: nullcontext())
    died = list[Any]()
    monkeypatch.setattr(threading, "excepthook", died.append)

    def break_down(request: Any) -> None:
        raise AssertionError("a defect of the library")

    monkeypatch.setattr(engine._backend, "_generate", break_down)
    loop = make_loop(job)
    with engine.open_port("generate", loop, now) as port:
        trace = loop.make_trace(loop.run(port), "generate")
    assert [state.end.outcome for state in trace.states] == ["failed"] * REQUESTS
    assert trace.states[0].end.error == generate.THREAD_ENDED
    assert str(died[0].exc_value) == "a defect of the library"
