"""Tests of the loop of requests with an injected clock and a scripted server, value by value."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from fixtures.scripted_port import (
    ScriptedClock,
    ScriptedDevice,
    ScriptedPort,
    answer,
    make_requests,
    run_requests,
    serve_in_turn,
)
from steelyard.case.load import Load
from steelyard.data.prompts import PromptRequests, PromptSource
from steelyard.data.request_outcomes import OUTCOMES
from steelyard.engine.generation import RequestEnd
from steelyard.engine.work import Work
from steelyard.errors import RequestError
from steelyard.run import arrivals
from steelyard.run import requests as loops
from steelyard.run.arrivals import plan_arrivals
from steelyard.run.requests import RequestLoop

COUNTS = ("tokens", "samples", "logits", "pairs", "square", "sequences", "context_tokens")
OFFLINE = Load(mode="offline")
TRACE = Load(mode="rate", arrivals="trace")
TRACE_SOURCE = PromptSource(
    prompt_lens=(32, 40, 48), output_lens=(2, 3, 4), arrivals_s=(0.0, 0.5, 2.0)
)


def closed(concurrency: int) -> Load:
    """Return a closed loop of so many slots."""
    return Load(mode="concurrency", concurrency=concurrency)


def open_loop(rate: float, kind: str = "constant", most: int | None = None) -> Load:
    """Return an open loop of so many requests per second, of which at most `most` are open."""
    return Load(mode="rate", rate=rate, arrivals=kind, max_concurrency=most)


def find_outcomes(run) -> list[str]:
    """Return the outcome of each request of a run."""
    return [OUTCOMES[code] for code in run.table.outcome]


# When requests are scheduled, due and sent.


def test_offline_requests_are_all_scheduled_at_once():
    run = run_requests(OFFLINE, make_requests(3), serve_in_turn(1.0))
    assert run.table.scheduled_s.tolist() == run.table.due_s.tolist() == [0, 0, 0]
    assert run.table.sent_s.tolist() == [0, 0, 0]
    assert run.table.first_s.tolist() == [0.25, 1.25, 2.25]
    assert run.table.last_s.tolist() == run.table.end_s.tolist() == [1, 2, 3]
    assert run.trace.steps.wall_s == 3.0
    assert run.port.most_open == 3


def test_a_request_of_a_closed_loop_is_scheduled_the_moment_its_slot_is_free():
    def script(request, now_s):
        return [(0.25, 4), (1.0 if request.number % 2 else 1.5, RequestEnd())]

    run = run_requests(closed(2), make_requests(5), script)
    # 0 and 2 end at 1.5 and 2.5, 1 and 3 at 1 and 2.5 (the third request is the first slot's)
    assert run.table.scheduled_s.tolist() == [0, 0, 1, 1.5, 2.5]
    assert run.table.due_s.tolist() == run.table.sent_s.tolist() == [0, 0, 1, 1.5, 2.5]
    assert run.table.end_s.tolist() == [1.5, 1, 2.5, 2.5, 4]
    assert run.port.most_open == 2


def test_time_between_the_schedule_and_the_sending_is_kept():
    """A loop that is busy for 0.125 s after each request sends the next one late, and says so."""
    run = run_requests(closed(3), make_requests(3), answer(1.0, 0.0), submit_s=0.125)
    assert run.table.scheduled_s.tolist() == run.table.due_s.tolist() == [0, 0, 0]
    assert run.table.sent_s.tolist() == [0, 0.125, 0.25]
    # the server begins when it has the request
    assert run.table.first_s.tolist() == [1.125, 1.25, 1.375]


class SlowPort(ScriptedPort):
    """A port that hands each request to the socket when it waits next, half a second later; it
    says so again behind the first chunk, and behind the end.
    """

    unsent: tuple[int, ...] = ()

    def submit(self, request):
        super().submit(request)
        self.unsent = (*self.unsent, request.number)

    def wait(self, until_s):
        for number in self.unsent:
            self.clock.now_s += 0.5
            self.sink.mark_sent(number)
        self.unsent = ()
        super().wait(until_s)

    def _report(self, number, what):
        is_end = super()._report(number, what)
        self.sink.mark_sent(number)
        return is_end


def run_slowly(script, load=OFFLINE, count=3):
    """Return the table of requests that a slow port sent."""
    clock = ScriptedClock()
    loop = RequestLoop(make_requests(count), load, ScriptedDevice(clock), clock)
    port = SlowPort(clock, loop, script)
    loop.plan()
    return loop.make_trace(loop.run(port), "generate").samples.table


def test_a_request_is_sent_when_the_port_hands_it_to_the_socket():
    table = run_slowly(answer(4.0, 0.0))
    assert table.scheduled_s.tolist() == table.due_s.tolist() == [0, 0, 0]
    assert table.sent_s.tolist() == [0.5, 1.0, 1.5]
    assert table.first_s.tolist() == [4, 4, 4]
    # a request that ends without a chunk: what comes behind the end moves nothing
    table = run_slowly(lambda request, now_s: [(2.0, RequestEnd("cut", "it was cut"))])
    assert table.sent_s.tolist() == [0.5, 1.0, 1.5]
    assert table.end_s.tolist() == [2, 2, 2]


def test_no_request_is_sent_before_it_is_due_or_behind_its_first_chunk():
    clock = ScriptedClock()
    loop = RequestLoop(make_requests(1), OFFLINE, ScriptedDevice(clock), clock)

    class EagerPort(ScriptedPort):
        def submit(self, request):
            clock.now_s -= 0.25  # a clock that goes back
            self.sink.mark_sent(request.number)
            clock.now_s += 0.25
            super().submit(request)

    port = EagerPort(clock, loop, answer(1.0, 0.0))
    loop.plan()
    table = loop.make_trace(loop.run(port), "generate").samples.table
    assert (table.due_s.tolist(), table.sent_s.tolist(), table.first_s.tolist()) == ([0], [0], [1])


def test_constant_arrivals_wait_for_nothing():
    run = run_requests(open_loop(4), make_requests(5), answer(10.0, 1.0))
    assert run.table.scheduled_s.tolist() == [0, 0.25, 0.5, 0.75, 1]
    assert run.table.sent_s.tolist() == run.table.due_s.tolist() == [0, 0.25, 0.5, 0.75, 1]
    assert run.table.first_s.tolist() == [10, 10.25, 10.5, 10.75, 11]
    assert run.port.most_open == 5


def test_poisson_arrivals_are_those_of_the_seed():
    requests = make_requests(2000)
    times = plan_arrivals(open_loop(8, "poisson"), requests, None)
    generator = np.random.default_rng([1, 5])
    gaps = [float(generator.exponential(1 / 8)) for _ in range(2000)]
    assert times == pytest.approx(np.cumsum(gaps).tolist(), abs=1e-9)
    assert times == plan_arrivals(open_loop(8, "poisson"), requests, None)
    assert times != plan_arrivals(open_loop(8, "poisson"), replace(requests, seed=2), None)
    # exponential gaps of a mean of 1/8: their deviation is as large, and 1 in e is above the mean
    assert np.mean(gaps) == pytest.approx(1 / 8, rel=0.1)
    assert np.std(gaps) == pytest.approx(1 / 8, rel=0.1)
    assert np.mean(np.array(gaps) > 1 / 8) == pytest.approx(np.exp(-1), rel=0.1)


def test_a_constant_rate_does_not_drift():
    assert plan_arrivals(open_loop(3), make_requests(30_001), None)[-1] == 10_000.0


def test_arrivals_of_a_trace_repeat_one_mean_gap_behind_its_end():
    requests = make_requests(5, "data", source=TRACE_SOURCE, prompt_rule="data")
    assert plan_arrivals(TRACE, requests, None) == [0, 0.5, 2, 3, 3.5]
    run = run_requests(TRACE, requests, answer(0.125, 0.0))
    assert run.table.sent_s.tolist() == [0, 0.5, 2, 3, 3.5]
    assert run.table.prompt_tokens.tolist() == [32, 40, 48, 32, 40]
    assert run.table.asked_tokens.tolist() == [2, 3, 4, 2, 3]


def test_a_trace_of_one_arrival_repeats_every_second():
    source = PromptSource(prompt_lens=(32,), output_lens=(2,), arrivals_s=(0.0,))
    requests = make_requests(3, "data", source=source, prompt_rule="data")
    assert plan_arrivals(TRACE, requests, None) == [0, 1, 2]


def test_arrivals_of_a_trace_need_a_trace():
    with pytest.raises(RequestError, match=r"question\.data\.source=trace"):
        plan_arrivals(TRACE, make_requests(5), None)


def test_a_wait_for_a_slot_counts_from_the_schedule():
    """Ten requests a second, one at a time, half a second each: the true time to the first token
    grows to seconds.
    """
    run = run_requests(open_loop(10, most=1), make_requests(10), answer(0.5, 0.0))
    assert run.table.scheduled_s.tolist() == pytest.approx([i / 10 for i in range(10)])
    assert run.table.due_s.tolist() == pytest.approx([i / 2 for i in range(10)])
    assert run.table.sent_s.tolist() == run.table.due_s.tolist()
    ttft_s = run.table.first_s - run.table.scheduled_s
    assert ttft_s.tolist() == pytest.approx([0.5 + 0.4 * i for i in range(10)])
    assert run.port.most_open == 1


def test_slots_are_taken_in_the_order_in_which_they_became_free():
    def script(request, now_s):
        return [(0.0, 4), ((0.75, 0.25, 0.5)[request.number % 3], RequestEnd())]

    run = run_requests(open_loop(100, most=3), make_requests(6), script)
    assert run.table.due_s.tolist() == pytest.approx([0, 0.01, 0.02, 0.26, 0.52, 0.75])
    assert (run.table.due_s >= run.table.scheduled_s).all()


def test_slots_that_became_free_one_after_the_other_are_taken_in_this_order(monkeypatch):
    """While a request is handed in others end; each is reported a moment after the one before."""
    monkeypatch.setattr(loops, "BURST", 1)
    clock = ScriptedClock()

    def take_time(done: int) -> None:
        clock.now_s += 0.125

    loop = RequestLoop(
        make_requests(12), closed(3), ScriptedDevice(clock), clock, request_done=take_time
    )
    port = ScriptedPort(clock, loop, answer(0.25, 0.0), submit_s=1.0)
    loop.plan()
    table = loop.make_trace(loop.run(port), "generate").samples.table
    assert (np.diff(table.scheduled_s) >= 0).all()
    free_s = np.sort(table.end_s)
    assert table.scheduled_s.tolist() == [0, 0, 0, *free_s[:9]]


def test_requests_arrive_until_the_least_time_is_over():
    assert len(plan_arrivals(open_loop(4), make_requests(3), 2.0)) == 9  # that at 2 s is the last
    assert len(plan_arrivals(open_loop(4), make_requests(30), 2.0)) == 30
    run = run_requests(open_loop(4), make_requests(3), answer(0.125, 0.0), min_time_s=2.0)
    assert run.table.scheduled_s.tolist() == [i / 4 for i in range(9)]


def test_a_closed_loop_sends_until_the_least_time_is_over():
    run = run_requests(closed(2), make_requests(3), answer(0.5, 0.0), min_time_s=2.0)
    assert run.table.scheduled_s.tolist() == [0, 0, 0.5, 0.5, 1, 1, 1.5, 1.5]
    assert find_outcomes(run) == ["ok"] * 8
    run = run_requests(closed(2), make_requests(12), answer(0.5, 0.0), min_time_s=2.0)
    assert len(run.table) == 12
    run = run_requests(closed(8), make_requests(3), answer(0.5, 0.0), min_time_s=1.0)
    assert run.port.most_open == 8  # more are sent than were asked for, so all slots are used


def test_requests_are_the_same_in_every_run_and_numbered_as_they_are_sent():
    run = run_requests(closed(3), make_requests(7), answer(0.25, 0.0))
    assert [number for _, number in run.port.submitted] == list(range(7))
    sent = [state.request for state in run.trace.states]
    assert sent == [make_requests(7).make(number) for number in range(7)]


def test_more_arrivals_than_a_record_has_room_for_are_refused(monkeypatch):
    monkeypatch.setattr(arrivals, "MAX_REQUESTS", 100)
    with pytest.raises(RequestError, match=r"min_time_s=30\.0: more than 100 requests arrive"):
        plan_arrivals(open_loop(4), make_requests(3), 30.0)
    assert len(plan_arrivals(open_loop(4), make_requests(100), None)) == 100


def test_more_output_than_a_record_has_room_for_is_refused_before_the_run(monkeypatch):
    monkeypatch.setattr(loops, "MAX_OUTPUT_TOKENS", 40)
    clock = ScriptedClock()
    RequestLoop(make_requests(10), OFFLINE, ScriptedDevice(clock), clock).plan()
    loop = RequestLoop(make_requests(11), OFFLINE, ScriptedDevice(clock), clock)
    with pytest.raises(RequestError, match=r"11 requests: a record has room for .*, and for 40"):
        loop.plan()
    monkeypatch.setattr(loops, "MAX_REQUESTS", 9)
    loop = RequestLoop(make_requests(10), OFFLINE, ScriptedDevice(clock), clock)
    with pytest.raises(RequestError, match=r"10 requests: a record has room for 9"):
        loop.plan()


def test_a_closed_loop_ends_where_a_record_is_full(monkeypatch):
    monkeypatch.setattr(loops, "MAX_OUTPUT_TOKENS", 40)
    run = run_requests(closed(1), make_requests(2), answer(0.5, 0.0), min_time_s=1000.0)
    assert find_outcomes(run) == ["ok"] * 10


# Chunks and ends.


def test_every_chunk_is_stamped_when_it_arrives():
    run = run_requests(closed(1), make_requests(2, 7), lambda request, now_s: [
        (0.25, 1), (0.5, [3, 4]), (1.0, 0), (1.25, 4), (1.5, RequestEnd(counted_by="usage")),
    ])  # fmt: skip
    assert run.table.chunk_starts.tolist() == [0, 3, 6]
    assert run.table.chunk_s.tolist() == [0.25, 0.5, 1.25, 1.75, 2, 2.75]
    assert run.table.chunk_tokens.tolist() == [1, 2, 4] * 2
    assert run.table.output_tokens.tolist() == [7, 7]
    assert run.table.first_s.tolist() == [0.25, 1.75]
    assert run.table.last_s.tolist() == [1.25, 2.75]
    assert run.table.end_s.tolist() == [1.5, 3]
    assert run.trace.samples.counted_by == "usage"


def test_a_chunk_without_tokens_is_not_the_first():
    run = run_requests(
        closed(1), make_requests(1), lambda *_: [(0.25, 0), (2.0, 4), (2.5, RequestEnd())]
    )
    assert run.table.first_s.tolist() == [2.0]


def test_what_comes_behind_the_end_is_ignored():
    def script(request, now_s):
        failed = RequestEnd("failed", "too late")
        return [(0.5, 4), (1.0, RequestEnd()), (1.5, 8), (1.75, failed), (2.0, 3)]

    run = run_requests(closed(1), make_requests(3), script)
    assert run.table.end_s.tolist() == [1, 2, 3]
    assert run.table.output_tokens.tolist() == [4, 4, 4]
    assert find_outcomes(run) == ["ok"] * 3
    assert run.port.most_open == 1  # a second end frees no second slot
    assert run.trace.samples.errors == []


def test_an_end_without_a_token_is_no_answer():
    run = run_requests(closed(1), make_requests(2), lambda *_: [(0.5, 0), (1.0, RequestEnd())])
    assert find_outcomes(run) == ["empty", "empty"]
    assert np.isnan(run.table.first_s).all()
    assert not run.table.is_ok.any()
    assert run.table.end_s.tolist() == [1, 2]
    assert run.trace.samples.errors == ["a regular end without any token"]


def test_failures_keep_their_outcome_tokens_and_text():
    ends = [RequestEnd("cut", "gone"), RequestEnd(), RequestEnd("refused", "x" * 900)]
    run = run_requests(
        closed(1), make_requests(3), lambda request, _: [(0.5, 2), (1.0, ends[request.number])]
    )
    assert find_outcomes(run) == ["cut", "ok", "refused"]
    assert run.table.output_tokens.tolist() == [2, 2, 2]
    assert run.trace.samples.errors == ["gone", "x" * 500]
    assert run.table.is_ok.tolist() == [False, True, False]


def test_at_most_twenty_different_errors_are_kept():
    run = run_requests(
        OFFLINE,
        make_requests(50),
        lambda request, _: [(0.5, RequestEnd("failed", f"number {request.number // 2}"))],
    )
    assert run.trace.samples.errors == [f"number {number}" for number in range(20)]


@pytest.mark.parametrize(
    ("load", "sent"), [(OFFLINE, 100), (closed(4), 67), (open_loop(8), 100), (closed(100), 100)]
)
def test_after_many_failures_in_a_row_nothing_more_is_sent(load, sent):
    """Those that were not sent are missing, in the order of the schedule."""
    run = run_requests(
        load, make_requests(100), lambda *_: [(0.03125, RequestEnd("unreachable", "nobody"))]
    )
    if load.mode == "rate":  # one every 0.125 s: each fails before the next
        sent = 64
    assert len(run.port.submitted) == sent
    assert find_outcomes(run) == ["unreachable"] * sent + ["missing"] * (100 - sent)
    assert run.table.asked_tokens.tolist() == [4] * 100
    assert run.table.prompt_tokens.tolist() == [32] * 100
    wall_s = run.trace.steps.wall_s
    assert run.table.scheduled_s[sent:].tolist() == pytest.approx([wall_s] * (100 - sent))
    assert run.table.end_s[sent:].tolist() == pytest.approx([wall_s] * (100 - sent))


def test_one_good_answer_ends_a_row_of_failures():
    def script(request, now_s):
        is_good = request.number % 63 == 62
        return [(0.5, 4), (1.0, RequestEnd() if is_good else RequestEnd("failed"))]

    run = run_requests(closed(1), make_requests(200), script)
    assert len(run.port.submitted) == 200
    assert "missing" not in find_outcomes(run)


def test_a_late_good_answer_does_not_begin_the_run_again():
    def script(request, now_s):
        if request.number == 0:
            return [(0.5, 4), (100.0, RequestEnd())]
        return [(0.25, RequestEnd("refused"))]

    run = run_requests(closed(2), make_requests(90), script)
    assert find_outcomes(run) == ["ok"] + ["refused"] * 64 + ["missing"] * 25


def test_impossible_usage_is_no_answer():
    for usage in (-1, 10**30, True, 1 << 25, 4.0):
        for end in (RequestEnd(output_tokens=usage), RequestEnd(prompt_tokens=usage)):
            run = run_requests(
                closed(1), make_requests(1), lambda *_, end=end: [(0.5, 4), (1.0, end)]
            )
            assert find_outcomes(run) == ["garbage"], end
            assert run.table.usage_prompt_tokens.tolist() == [-1]


def test_token_ids_that_the_model_does_not_have_are_no_answer():
    for ids in ([512], [-1], [3, 10**30]):
        run = run_requests(
            closed(1),
            make_requests(1),
            lambda *_, ids=ids: [(0.25, [511]), (0.5, ids), (0.75, [3]), (1.0, RequestEnd())],
        )
        assert find_outcomes(run) == ["garbage"]
        assert run.table.output_tokens.tolist() == [1]
        assert run.trace.get_output_ids(0, make_requests(1)) is None


def test_a_flood_of_tokens_is_cut_off():
    def script(request, now_s):
        return [*((0.001 * i, [1] * 4) for i in range(1000)), (2.0, RequestEnd())]

    run = run_requests(closed(1), make_requests(2), script)
    assert find_outcomes(run) == ["flooded", "flooded"]
    # twice what was asked, and 64 more
    assert run.table.output_tokens.tolist() == [72, 72]
    assert run.table.end_s.tolist() == [2, 4]
    run = run_requests(closed(1), make_requests(1), lambda *_: [(0.5, 10**12), (1.0, RequestEnd())])
    assert find_outcomes(run) == ["flooded"]


def test_chunks_beyond_the_room_of_a_record_are_cut_off(monkeypatch):
    monkeypatch.setattr(loops, "MAX_CHUNKS", 6)
    run = run_requests(closed(1), make_requests(3), answer(0.5, 0.125))
    assert find_outcomes(run) == ["ok", "flooded", "flooded"]
    assert run.table.output_tokens.tolist() == [4, 2, 0]


def test_usage_corrects_the_tokens_of_chunks_and_no_times():
    def spread(chunks: int, usage: int | None, counted_by: str = "usage") -> tuple[list, list]:
        end = RequestEnd(output_tokens=usage, counted_by=counted_by)
        script = [*((float(i), 1) for i in range(1, chunks + 1)), (9.0, end)]
        run = run_requests(closed(1), make_requests(1, 64), lambda *_: script)
        assert run.table.output_tokens.sum() == run.table.chunk_tokens.sum()
        assert run.table.end_s.tolist() == [9]
        return run.table.chunk_tokens.tolist(), run.table.chunk_s.tolist()

    assert spread(4, 16) == ([4, 4, 4, 4], [1, 2, 3, 4])
    assert spread(4, 7) == ([1, 2, 2, 2], [1, 2, 3, 4])
    assert spread(1, 64) == ([64], [1])
    assert spread(3, 3) == ([1, 1, 1], [1, 2, 3])
    # fewer tokens than chunks: the first and the last keep theirs, so that no time moves
    assert spread(5, 2) == ([1, 1], [1, 5])
    assert spread(6, 4) == ([1, 1, 1, 1], [1, 3, 5, 6])
    assert spread(5, 1) == ([1], [1])
    # nothing is said, or ids were counted, or no tokens although some came
    assert spread(3, None) == ([1, 1, 1], [1, 2, 3])
    assert spread(3, 12, "ids") == ([1, 1, 1], [1, 2, 3])
    assert spread(3, 0) == ([1, 1, 1], [1, 2, 3])


def test_usage_without_any_chunk_is_no_answer():
    run = run_requests(closed(1), make_requests(1), lambda *_: [(1.0, RequestEnd(output_tokens=4))])
    assert find_outcomes(run) == ["empty"]
    assert run.table.output_tokens.tolist() == [0]


@pytest.mark.parametrize(
    ("ways", "counted_by"),
    [
        (("ids", "ids"), "ids"),
        (("ids", "usage"), "usage"),
        (("usage", "chunks"), "chunks"),
        (("ids", "chunks"), "chunks"),
    ],
)
def test_the_weakest_way_of_counting_is_that_of_the_run(ways, counted_by):
    run = run_requests(
        closed(1),
        make_requests(2),
        lambda request, _: [(0.5, 4), (1.0, RequestEnd(counted_by=ways[request.number]))],
    )
    assert run.trace.samples.counted_by == counted_by


def test_a_failed_request_does_not_say_how_tokens_were_counted():
    ends = [RequestEnd(counted_by="usage"), RequestEnd("cut", counted_by="chunks")]
    run = run_requests(
        closed(1), make_requests(2), lambda request, _: [(0.5, 4), (1.0, ends[request.number])]
    )
    assert run.trace.samples.counted_by == "usage"


def test_the_prompt_tokens_of_the_server_are_kept_beside_ours():
    run = run_requests(
        closed(1),
        make_requests(2),
        lambda request, _: [
            (0.5, 4),
            (1.0, RequestEnd(prompt_tokens=None if request.number else 35)),
        ],
    )
    assert run.table.prompt_tokens.tolist() == [32, 32]
    assert run.table.usage_prompt_tokens.tolist() == [35, -1]
    assert run.table.retokenized_tokens.tolist() == [-1, -1]


# What was generated.


class Letters:
    """A tokenizer of single letters: ids are their codes, behind a 1."""

    source, vocab, sha256, end = "letters", 512, "", 0

    def encode(self, texts: list[str]) -> list[list[int]]:
        return [[1, *map(ord, text)] for text in texts]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(number) for number in ids if number != 1)


def test_output_ids_are_those_reported_else_those_of_the_text():
    source = PromptSource(tokenizer=Letters())
    requests = make_requests(6, 3, source=source)
    answers = [
        [(0.5, [7, 8, 9]), (1.0, RequestEnd(text="xyz"))],  # ids count before text
        [(0.5, 3), (1.0, RequestEnd(text="abc", counted_by="chunks"))],
        [(0.5, [7]), (0.6, 2), (1.0, RequestEnd(text="abc"))],  # ids of one token of three
        [(0.5, 3), (1.0, RequestEnd())],  # neither
        [(0.5, [7, 8, 9]), (1.0, RequestEnd("cut"))],  # failed
        [(0.5, [7, 8, 9, 10]), (1.0, RequestEnd())],  # more than were asked for
    ]
    run = run_requests(closed(1), requests, lambda request, _: answers[request.number])
    ids = [run.trace.get_output_ids(number, requests) for number in range(6)]
    abc = [97, 98, 99]
    assert ids == [[7, 8, 9], abc, abc, None, None, [7, 8, 9]]
    assert run.table.retokenized_tokens.tolist() == [3, 3, 3, -1, -1, -1]


def test_ids_of_a_text_that_the_model_does_not_have_are_unknown():
    requests = make_requests(1, 3, source=PromptSource(tokenizer=Letters()))
    end = RequestEnd(text="ab\u4e2d", counted_by="chunks")
    run = run_requests(closed(1), requests, lambda *_: [(0.5, 3), (1.0, end)])
    assert run.trace.get_output_ids(0, requests) is None


@pytest.mark.parametrize(
    ("text", "lengths", "ids"),
    [
        ("abc", "exact", [97, 98, 99]),
        ("ab", "exact", None),  # other tokens than were counted
        ("abcd", "exact", None),
        ("ab", "natural", [97, 98]),  # and one that ended it
        ("a", "natural", None),
        ("ab\ufffd", "exact", None),  # a part of a character
    ],
)
def test_a_text_is_tokenized_again_only_to_as_many_tokens_as_were_counted(text, lengths, ids):
    plain = make_requests(1, 3, source=PromptSource(tokenizer=Letters()))
    requests = replace(plain, lengths=lengths, vocab=1 << 17)
    end = RequestEnd(text=text, counted_by="usage", output_tokens=3)
    run = run_requests(closed(1), requests, lambda *_: [(0.5, 3), (1.0, end)])
    assert run.trace.get_output_ids(0, requests) == ids


# How well the loop keeps up.


def test_late_wake_ups_are_noted():
    run = run_requests(open_loop(4), make_requests(3), answer(0.0, 0.0), late_s=0.003)
    client = run.trace.samples.client
    assert (client.lag_p99_us, client.lag_max_us) == (3000, 3000)
    assert client.cpu_share is None
    # 0.25 s are five waits of at most 0.05 s, of which the last is for the request
    assert run.table.scheduled_s.tolist() == [0, 0.25, 0.5]
    assert run.table.sent_s.tolist() == pytest.approx([0, 0.253, 0.503])


def test_a_loop_in_time_has_no_lag():
    run = run_requests(open_loop(4), make_requests(3), answer(0.01, 0.01))
    assert run.trace.samples.client.lag_max_us == 0


def test_cpu_time_is_the_client_s_only_if_the_engine_works_elsewhere():
    for is_separate, share in ((True, 0.5), (False, None)):
        clock = ScriptedClock()
        loop = RequestLoop(
            make_requests(2), closed(1), ScriptedDevice(clock), clock,
            busy=lambda clock=clock: clock.now_s / 2,
        )  # fmt: skip
        port = ScriptedPort(clock, loop, answer(1.0, 0.0), is_separate=is_separate)
        loop.plan()
        trace = loop.run(port)
        assert trace.cpu_s == 1.0
        assert loop.make_trace(trace, "generate").samples.client.cpu_share == share


def test_steps_of_an_engine_become_samples():
    clock = ScriptedClock()
    loop = RequestLoop(make_requests(1), closed(1), ScriptedDevice(clock), clock)
    port = ScriptedPort(clock, loop, answer(1.0, 0.0))
    loop.plan()
    inner = port.wait

    def wait(until_s):
        inner(until_s)
        loop.add_step(Work(dict.fromkeys(COUNTS, 2)))

    port.wait = wait
    steps = loop.run(port).make_samples("generate")
    assert [step.end_s for step in steps[:2]] == pytest.approx([0.05, 0.1])
    assert steps[-1].end_s == 1.0
    assert all(step.counts == dict.fromkeys(COUNTS, 2) for step in steps)


# What the loop costs: counts, not times.


def count_chunk_reads(requests: int, tokens: int) -> tuple[int, int]:
    """Return how often the clock is read in an offline run, and how often the port waits."""
    run = run_requests(OFFLINE, make_requests(requests, tokens), serve_in_turn(0.001))
    assert run.table.output_tokens.sum() == requests * tokens
    return run.clock.reads, run.port.waits


def test_a_chunk_costs_one_reading_of_the_clock():
    few_reads, few_waits = count_chunk_reads(100, 5)
    many_reads, many_waits = count_chunk_reads(100, 25)
    assert many_reads - few_reads == 100 * 20
    assert many_waits == few_waits


def test_a_request_costs_the_same_however_many_are_in_flight():
    reads = [count_chunk_reads(count, 2)[0] / count for count in (200, 400, 4000)]
    assert max(reads) - min(reads) < 0.2


def test_ten_thousand_requests_in_flight_are_sent_in_bursts():
    """The port works between bursts, so that what arrives meanwhile is stamped."""
    run = run_requests(OFFLINE, make_requests(10_000, 1), answer(1.0, 0.0))
    assert run.port.most_open == 10_000
    # ends, bursts, and ticks up to 1 s
    assert run.port.waits == 10_000 + 10_000 // 64 + 20
    assert find_outcomes(run) == ["ok"] * 10_000


def test_chunks_that_arrive_while_requests_are_sent_are_stamped_in_between():
    run = run_requests(OFFLINE, make_requests(1000, 1), answer(0.0, 0.0), submit_s=0.001)
    late_s = run.table.first_s - run.table.sent_s
    assert late_s.max() <= 0.0645  # a burst of 64 requests of 1 ms, not the second that all take


class CountedRequests(PromptRequests):
    """Requests that note at which time of the clock each was made."""

    def make(self, number):
        self.source.made.append((self.source.clock.now_s, number))
        return super().make(number)


class CountedSource:
    """A source of drawn ids that keeps what was made."""

    documents, tokenizer = (), None
    prompt_lens = output_lens = arrivals_s = None

    def __init__(self) -> None:
        self.clock, self.made = ScriptedClock(), list[tuple[float, int]]()


def run_counted(load: Load, count: int, **options) -> tuple[list[tuple[float, int]], ScriptedPort]:
    """Return when the requests of a run were made, and the port they went to."""
    source, plain = CountedSource(), make_requests(count)
    fields = {name: getattr(plain, name) for name in plain.__dataclass_fields__}
    requests = CountedRequests(**(fields | {"source": source}))
    loop = RequestLoop(requests, load, ScriptedDevice(source.clock), source.clock, **options)
    port = ScriptedPort(source.clock, loop, answer(0.5, 0.0))
    loop.plan()
    source.clock.now_s += 10.0
    loop.run(port)
    return source.made, port


@pytest.mark.parametrize("load", [OFFLINE, open_loop(100), closed(4)])
def test_prompts_are_made_before_the_clock_starts(load):
    made, port = run_counted(load, 300)
    assert made == [(1000.0, number) for number in range(300)]
    assert len(port.submitted) == 300


def test_prompts_that_do_not_fit_into_memory_are_made_while_the_loop_waits(monkeypatch):
    monkeypatch.setattr(loops, "MAX_PREPARED_TOKENS", 32 * 70)
    made, port = run_counted(open_loop(10), 300)
    assert [number for _, number in made] == list(range(300))
    assert sum(time_s == 1000.0 for time_s, _ in made) == 70
    sent = {number: time_s for time_s, number in port.submitted}
    assert all(time_s < sent[number] - 1.0 for time_s, number in made)  # long before its time


def test_a_closed_loop_of_a_least_time_makes_prompts_before_a_slot_is_free():
    made, port = run_counted(closed(4), 8, min_time_s=300.0)
    sent = {number: time_s for time_s, number in port.submitted}
    assert len(sent) == 4 * 600
    assert all(time_s < sent[number] for time_s, number in made if number in sent)
    numbers = [number for _, number in made]
    assert numbers == list(range(len(numbers)))
    assert len(numbers) <= len(sent) + loops.RESERVE
    assert [time_s for time_s, _ in made].count(1000.0) == loops.RESERVE


def test_only_one_prompt_is_made_between_two_looks_at_what_arrived(monkeypatch):
    monkeypatch.setattr(loops, "MAX_PREPARED_TOKENS", 32)
    source = CountedSource()
    plain = make_requests(100)
    fields = {name: getattr(plain, name) for name in plain.__dataclass_fields__}
    requests = CountedRequests(**(fields | {"source": source}))
    loop = RequestLoop(requests, open_loop(1), ScriptedDevice(source.clock), source.clock)
    port, made_before = ScriptedPort(source.clock, loop, answer(0.5, 0.0)), []
    inner = port.wait

    def wait(until_s):
        made_before.append(len(source.made))
        inner(until_s)

    port.wait = wait
    loop.plan()
    loop.run(port)
    assert all(after - before <= 1 for before, after in pairwise(made_before))
    assert source.made[-1][1] == 99


def test_progress_is_reported_for_each_end():
    clock, done = ScriptedClock(), []
    loop = RequestLoop(
        make_requests(5), closed(2), ScriptedDevice(clock), clock, request_done=done.append
    )
    port = ScriptedPort(clock, loop, answer(0.5, 0.1))
    loop.plan()
    loop.run(port)
    assert done == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("load", "min_time_s", "count"),
    [
        (OFFLINE, None, 256),
        (closed(1), None, 80),
        (closed(16), None, 160),
        (open_loop(8), None, 80),
        (open_loop(8), 60.0, 481),
        (TRACE, 60.0, 80),
        (open_loop(1e6), 1e6, 1_000_000),
    ],
)
def test_the_number_of_requests_that_nobody_named(load, min_time_s, count):
    assert load.count_default_requests(min_time_s) == count
