"""The twenty known errors of tools that measure servers, a test each, by number: with that
fault our numbers are right, or the run is invalid with its reason.

A scripted server has exact times (fixtures/scripted_port.py); faults of streams are those of the
mock server, by counts and never by times.
"""

import json
from typing import Any

import numpy as np
import pytest

from fixtures.requests import make_generation_record
from fixtures.scripted_port import (
    ScriptedDevice,
    ScriptedRun,
    answer,
    make_requests,
    run_requests,
    serve_in_turn,
)
from fixtures.serving import CHAT, IDS, TEXT, RecordingSink, make_request, open_client, send
from steelyard import plugins
from steelyard.case.load import Load
from steelyard.data.prompts import PromptRequests, PromptSource
from steelyard.data.request_outcomes import OUTCOMES
from steelyard.engine.generation import RequestEnd
from steelyard.engines.http.answer import Answer
from steelyard.engines.http.client import RequestFormat
from steelyard.engines.http.mock_server import Script
from steelyard.metrics.passes import find_rate_span
from steelyard.metrics.request_formulas import (
    chunk_gap_percentile,
    latency_mean,
    latency_percentile,
)
from steelyard.metrics.request_window import find_record_window
from steelyard.record.record import Record
from steelyard.record.request_samples import RequestSamples
from steelyard.run.requests import RequestLoop
from steelyard.tasks.kind import GENERATE


def closed(concurrency: int) -> Load:
    """Return a closed loop of so many slots."""
    return Load(mode="concurrency", concurrency=concurrency)


def open_loop(rate: float, most: int | None = None) -> Load:
    """Return an open loop of a constant rate, with at most `most` requests in flight."""
    return Load(mode="rate", rate=rate, arrivals="constant", max_concurrency=most)


def make_record(run: ScriptedRun, load: Load, **changes: Any) -> Record:
    """Return the record of a run under a load, by a server whose weights nobody knows; `changes`
    are other fields of it.
    """
    wall_s = run.trace.steps.wall_s
    changes = {"weights": {"source": "unknown"}} | changes
    return make_generation_record(
        run.trace.samples, load.model_dump(mode="json"), wall_s=wall_s, **changes
    )


def find_reasons(record: Record) -> set[str]:
    """Return the reasons that make a record of generation invalid, by the rules of its kind."""
    rules = [plugins.load_reference(rule) for rule in GENERATE.rules]
    found = [finding for rule in rules for finding in rule(record, {})]
    return {item.code for item in found if item.check is not None and not item.check.ok}


def run_over_http(
    script: Script,
    form: RequestFormat = IDS,
    load: Load | None = None,
    count: int = 6,
    **client: Any,
) -> RequestSamples:
    """Return the samples of requests of eight tokens that the mock server answered."""
    with open_client(script, **client) as opened:
        clock = opened.loop.time
        loop = RequestLoop(make_texts(count), load or closed(3), ScriptedDevice(clock), clock)
        loop.plan()
        port = opened.make_port(loop, clock, form)
        try:
            trace = loop.run(port)
        finally:
            port.close()
        return loop.make_trace(trace, "generate").samples


class Letters:
    """A tokenizer of single letters, which begins each text with id 1; a text that `merged` is a
    part of has fewer tokens.
    """

    source, vocab, sha256, end = "letters", 512, "", 0

    def __init__(self, merged: str = "") -> None:
        self.merged = merged

    def encode(self, texts: list[str]) -> list[list[int]]:
        return [
            [1, *(ord(letter) % 512 for letter in self._merge(text))] for text in texts
        ]  # fmt: skip

    def _merge(self, text: str) -> str:
        return text.replace(self.merged, "#") if self.merged else text

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(number) for number in ids if number > 1)


def make_texts(count: int, output_tokens: int = 8, merged: str = "") -> PromptRequests:
    """Return requests whose prompts have a text."""
    source = PromptSource((np.full(200, ord("q")),), Letters(merged))
    return make_requests(count, output_tokens, source=source)


def find_outcomes(samples: RequestSamples) -> set[str]:
    """Return the outcomes of all requests."""
    return {OUTCOMES[code] for code in samples.table.outcome}


def test_01_the_client_s_own_queue_is_part_of_the_latency():
    """Half a second of service, ten requests a second, one at a time: the time to the first token
    grows to seconds, and the run says that it is not steady.
    """
    load = open_loop(10, most=1)
    run = run_requests(load, make_requests(64, 2), serve_in_turn(0.5))
    ttft_s = run.table.first_s - run.table.scheduled_s
    assert ttft_s.tolist() == pytest.approx([0.25 + 0.4 * i for i in range(64)], abs=2e-6)
    ends_s = run.table.end_s - run.table.scheduled_s
    assert ends_s.tolist() == pytest.approx([0.5 + 0.4 * i for i in range(64)], abs=2e-6)
    record = make_record(run, load)
    assert "unsteady" in find_reasons(record)
    # far beyond capacity the window is the later half of the arrivals
    window = find_record_window(record)[1]
    assert window.indices.tolist() == list(range(32, 63))
    by_hand_s = [0.25 + 0.4 * number for number in window.indices]
    assert latency_mean(record, "ttft").value == pytest.approx(np.mean(by_hand_s), abs=1e-5)
    assert np.mean(by_hand_s) > 19
    # at 1.5 times what the server can do there is a window, and its requests have waited
    run = run_requests(load, make_requests(200, 2), serve_in_turn(0.15))
    record = make_record(run, load)
    window = find_record_window(record)[1]
    by_hand_s = [0.075 + 0.05 * number for number in window.indices]
    assert latency_mean(record, "ttft").value == pytest.approx(np.mean(by_hand_s), abs=1e-5)
    assert np.mean(by_hand_s) > 5
    assert latency_mean(record, "ttft_sent").value == pytest.approx(0.075, abs=1e-5)
    assert "unsteady" in find_reasons(record)


def test_02_no_prompt_is_warm_in_a_cache_and_a_warm_cache_makes_the_run_invalid():
    """Prompts of two runs of one seed, and of a run and its warm-up, share no first tokens; a
    server whose counter says that it took prompts from a cache is found out.
    """
    first, second = make_requests(64), make_requests(64, salt="77" * 16)
    beginnings = [
        tuple(request.prompt[:8])
        for requests in (first, second)
        for make in (requests.make, requests.make_warmup)
        for request in map(make, range(64))
    ]
    assert len(set(beginnings)) == 256
    assert len({beginning[:3] for beginning in beginnings}) == 256
    assert first.make(0).prompt[8:] == second.make(0).prompt[8:]  # the question is the same
    run = run_requests(closed(4), first, answer(0.25, 0.125))
    for cached, reasons in ((0, set()), (20, set()), (32 * 64 // 2, {"warm_cache"})):
        engine = {"name": "http", "details": {"cached_tokens": cached}}
        assert find_reasons(make_record(run, closed(4), engine=engine)) == reasons
    samples = run.trace.samples.model_copy(update={"salt": ""})
    assert "warm_cache" in find_reasons(make_generation_record(samples, closed(4).model_dump()))


@pytest.mark.parametrize(
    ("slow", "reasons"),
    [
        ({}, set()),
        ({"submit_s": 0.03}, {"client_bound"}),  # 30 ms of the client for each request
        ({"late_s": 0.02}, {"client_bound"}),  # it wakes up 20 ms late
    ],
)
def test_03_a_client_that_is_the_bottleneck_makes_the_run_invalid(slow, reasons):
    load = open_loop(40)
    run = run_requests(load, make_requests(200), answer(0.25, 0.125), **slow)
    assert find_reasons(make_record(run, load)) == reasons


def test_03_a_busy_client_makes_the_run_invalid():
    run = run_requests(closed(4), make_requests(64), answer(0.25, 0.125))
    for share, error_us, reasons in (
        (0.5, 900, set()),
        (0.97, 900, {"client_bound"}),  # of one core
        (0.5, 40_000, {"client_bound"}),  # by which stamps on the mock server were late
    ):
        facts = {"cpu_share": share, "mock_error_us": (100, error_us, error_us)}
        client = run.trace.samples.client.model_copy(update=facts)
        samples = run.trace.samples.model_copy(update={"client": client})
        record = make_record(run, closed(4), requests=[samples])
        assert find_reasons(record) == reasons


def serve_in_chunks(request, now_s):
    """Answer with a token after 100 ms and four more every 40 ms, as with speculative decoding; the
    server says how many there were at the end.
    """
    chunks = [(0.1, 1), *((0.1 + 0.04 * i, 1) for i in range(1, 4))]
    return [*chunks, (0.22, RequestEnd(output_tokens=16, counted_by="usage"))]


def test_04_time_per_token_is_not_time_per_chunk():
    run = run_requests(closed(4), make_requests(64, 16), serve_in_chunks)
    record = make_record(run, closed(4))
    assert latency_mean(record, "tpot").value == pytest.approx(0.12 / 15)
    assert chunk_gap_percentile(record, 50).value == pytest.approx(0.04)
    assert find_reasons(record) == set()


def test_05_throughput_counts_tokens_and_not_chunks():
    run = run_requests(closed(4), make_requests(64, 16), serve_in_chunks)
    record = make_record(run, closed(4))
    span = find_rate_span(record)
    assert span is not None
    # four slots, 16 tokens in 0.22 s each; the chunks are a quarter of it
    assert span.counts["output_tokens"] / span.wall_s == pytest.approx(4 * 16 / 0.22)
    assert len(run.table.chunk_s) == 64 * 4


def test_06_what_begins_a_text_is_not_counted_in_every_chunk():
    """The tokenizer adds a token to whatever text it encodes. Tokens are those that the server
    counted; the text is a cross-check, encoded once and without that token.
    """
    requests = make_texts(64, 8)
    end = RequestEnd(output_tokens=8, counted_by="usage", text="abcdefgh")
    run = run_requests(
        closed(4), requests, lambda *_: [*((0.1 * i, 1) for i in range(1, 9)), (0.8, end)]
    )
    assert set(run.table.output_tokens) == {8}
    assert set(run.table.retokenized_tokens) == {8}
    record = make_record(run, closed(4), weights={"source": "huggingface"})
    assert latency_mean(record, "tpot").value == pytest.approx(0.1)
    assert "token_counts" not in find_reasons(record)


@pytest.mark.parametrize(
    ("weights", "reasons"), [("random", set()), ("huggingface", {"token_counts"})]
)
def test_07_encoded_text_is_no_count_of_tokens(weights, reasons):
    """A text that encodes to half the tokens that were generated: of random weights anything may
    come, of trained ones something is wrong.
    """
    end = RequestEnd(output_tokens=8, counted_by="usage", text="abababab")
    run = run_requests(
        closed(4),
        make_texts(64, 8, merged="ab"),
        lambda *_: [*((0.1 * i, 1) for i in range(1, 9)), (0.8, end)],
    )
    assert (set(run.table.output_tokens), set(run.table.retokenized_tokens)) == ({8}, {4})
    record = make_record(run, closed(4), weights={"source": weights})
    assert find_reasons(record) & {"token_counts"} == reasons


def test_08_tokens_are_those_that_came_and_not_those_asked_for():
    """Usage comes in a chunk of its own without text; the server generated three tokens fewer."""
    samples = run_over_http(Script(early=3, ids=0), TEXT)
    assert samples.counted_by == "usage"
    assert set(samples.table.asked_tokens) == {8}
    assert set(samples.table.output_tokens) == {5}
    assert "short_output" in find_reasons(make_generation_record(samples, closed(3).model_dump()))


@pytest.mark.parametrize("usage", ["own", "same"])
def test_09_usage_is_found_beside_the_last_text_too(usage):
    samples = run_over_http(Script(usage=usage, ids=0, chunk_tokens=3), TEXT)
    assert (samples.counted_by, find_outcomes(samples)) == ("usage", {"ok"})
    assert samples.table.output_tokens.tolist() == [8] * 6
    assert set(np.diff(samples.table.chunk_starts)) == {3}


def make_event(**delta: Any) -> bytes:
    """Return an event of a chat's stream."""
    return b"data: " + json.dumps({"choices": [{"index": 0, "delta": delta}]}).encode() + b"\n\n"


def test_10_a_chunk_that_only_names_a_role_is_not_the_first_token():
    stream = Answer(asked_tokens=8, prompt_tokens=32)
    assert stream.feed(make_event(role="assistant")) == []
    assert stream.feed(make_event(role="assistant", content="")) == []
    assert [chunk.tokens for chunk in stream.feed(make_event(content="the"))] == [1]
    with open_client(Script()) as client:
        sink = send(client, [make_request(0)], CHAT)
    assert sink.chunks == {0: [(1, ())] * 5}  # the role comes first, and is none of them
    # the loop takes no stamp of a chunk without tokens either
    script = [(0.01, 0), (2.0, 4), (2.5, RequestEnd())]
    assert run_requests(closed(1), make_requests(3), lambda *_: script).table.first_s[0] == 2.0


@pytest.mark.parametrize("channel", ["content", "reasoning_content", "reasoning"])
def test_11_tokens_of_reasoning_are_tokens(channel):
    stream = Answer(asked_tokens=8, prompt_tokens=32)
    assert [chunk.tokens for chunk in stream.feed(make_event(**{channel: "hm"}))] == [1]
    samples = run_over_http(Script(channel=channel), CHAT)
    assert samples.table.output_tokens.tolist() == [8] * 6
    assert np.isfinite(samples.table.first_s).all()
    assert samples.counted_by == "usage"


def test_12_answers_shorter_than_asked_make_the_run_invalid():
    run = run_requests(closed(4), make_requests(64, 8), answer(0.25, 0.125, tokens=7))
    record = make_record(run, closed(4))
    assert "short_output" in find_reasons(record)
    # with natural lengths they are what was asked for
    requests = make_requests(64, 8, lengths="natural")
    run = run_requests(closed(4), requests, answer(0.25, 0.125, tokens=7))
    assert find_reasons(make_record(run, closed(4))) == set()


def test_12_a_server_that_refuses_to_ignore_the_end_is_told_apart():
    samples = run_over_http(Script(rejects="ignore_eos"), IDS)
    assert find_outcomes(samples) == {"refused"}
    assert "Unexpected fields: ['ignore_eos']" in samples.errors[0]
    record = make_generation_record(samples, closed(3).model_dump())
    assert "requests" in find_reasons(record)


def test_13_a_run_whose_requests_all_failed_has_no_rate():
    samples = run_over_http(Script(fault="status", status=422), IDS, count=16)
    record = make_generation_record(samples, closed(3).model_dump())
    assert find_outcomes(samples) == {"refused"}
    assert "requests" in find_reasons(record)
    assert find_rate_span(record) is None
    assert latency_mean(record, "ttft").value is None


@pytest.mark.parametrize(("theirs", "reasons"), [(33, set()), (40, {"token_counts"})])
def test_14_a_server_with_another_tokenizer_is_found_out(theirs, reasons):
    """Prompts of 32 tokens: one more is what begins a text, eight more are another tokenizer."""
    end = RequestEnd(prompt_tokens=theirs)
    run = run_requests(closed(4), make_requests(64), answer(0.25, 0.125, end=end))
    assert set(run.table.prompt_tokens) == {32}  # ours are what is counted
    assert find_reasons(make_record(run, closed(4))) == reasons


def test_15_a_percentile_that_the_requests_do_not_carry_has_no_value():
    run = run_requests(closed(4), make_requests(100), answer(0.25, 0.125))
    record = make_record(run, closed(4))
    assert latency_percentile(record, "ttft", 50).value == pytest.approx(0.25)
    assert latency_percentile(record, "ttft", 90).value == pytest.approx(0.25)
    missing = latency_percentile(record, "ttft", 99)
    assert (missing.value, missing.note.code) == (None, "percentile.few")
    assert missing.note.values["least"] == 662
    # 700 gaps between chunks are those of 100 requests
    assert chunk_gap_percentile(record, 99).value is None


def test_16_a_burst_after_a_wait_for_slots_is_no_higher_rate():
    """The first requests take four seconds and hold all slots; those that had to wait are sent at
    once when they are free. They keep their arrivals, and their wait counts.
    """
    load = open_loop(4, most=2)

    def script(request, now_s):
        service_s = 4.0 if request.number < 2 else 0.125
        return [(service_s, [1, 2, 3, 4]), (service_s, RequestEnd())]

    run = run_requests(load, make_requests(80), script)
    table = run.table
    assert table.scheduled_s.tolist() == [i / 4 for i in range(80)]
    sends_s = table.sent_s[(table.sent_s >= 4.0) & (table.sent_s < 5.0)]
    assert len(sends_s) > 8  # above the rate of four in a second
    assert (table.first_s - table.sent_s)[2:].tolist() == pytest.approx([0.125] * 78, abs=2e-6)
    ttft_s = table.first_s - table.scheduled_s
    assert ttft_s[2] == pytest.approx(4.0 - 0.5 + 0.125)
    assert table.sent_s.tolist() == table.due_s.tolist()  # which is no fault of the client
    assert find_reasons(make_record(run, load)) & {"client_bound", "implausible"} == set()


def test_17_ramp_up_and_drain_are_not_in_the_throughput():
    """Four slots of 1 s and 8 tokens are 32 tokens a second; one last request of 20 s, and a first
    wave of 5 s, would make it 10.
    """

    def script(request, now_s):
        service_s = {0: 5.0, 1: 5.0, 2: 5.0, 3: 5.0, 79: 20.0}.get(request.number, 1.0)
        return [*((service_s * (i + 1) / 8, [1]) for i in range(8)), (service_s, RequestEnd())]

    run = run_requests(closed(4), make_requests(80, 8), script)
    record = make_record(run, closed(4))
    span = find_rate_span(record)
    assert span is not None
    assert span.counts["output_tokens"] / span.wall_s == pytest.approx(32)
    assert 80 * 8 / run.trace.steps.wall_s < 15


@pytest.mark.parametrize("count", [24, 240])
def test_18_the_number_of_requests_does_not_change_the_latency(count):
    """The first wave, whose prompts all come at once, has ten times the time to the first token of
    those after it.
    """

    def script(request, now_s):
        first_s = 1.0 if request.number < 8 else 0.1
        return [(first_s, [1]), (first_s + 0.3, [2, 3, 4]), (first_s + 0.3, RequestEnd())]

    run = run_requests(closed(8), make_requests(count), script)
    assert latency_mean(make_record(run, closed(8)), "ttft").value == pytest.approx(0.1)
    assert closed(8).count_default_requests(None) == 80  # ten for each slot, if nobody says


def test_19_an_answer_without_any_token_is_no_success():
    samples = run_over_http(Script(fault="empty"), CHAT)
    assert find_outcomes(samples) == {"empty"}
    assert np.isnan(samples.table.first_s).all()
    record = make_generation_record(samples, closed(3).model_dump())
    assert "requests" in find_reasons(record)
    assert latency_mean(record, "ttft").value is None


def test_20_requests_share_connections():
    """Eight rounds of three requests at a time take three connections."""
    with open_client(Script()) as client:
        connections = []
        make = client.loop.create_connection

        async def count(*arguments, **options):
            connections.append(1)
            return await make(*arguments, **options)

        client.loop.create_connection = count
        sink = RecordingSink()
        for number in range(8):
            ends = send(client, [make_request(3 * number + i) for i in range(3)]).ends
            sink.ends.update(ends)
    assert {end.outcome for end in sink.ends.values()} == {"ok"}
    assert (len(sink.ends), len(connections)) == (24, 3)
