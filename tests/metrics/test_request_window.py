"""The window of a run of requests, what is counted in it, and whether it is steady: every number
worked out by hand, and what is random simulated.
"""

from math import inf, sqrt

import numpy as np
import pytest

from fixtures.requests import PROMPT, Timing, make_even_loop, make_generation_record, make_samples
from steelyard.case.load import Load
from steelyard.data import prompt_batches
from steelyard.metrics import passes, plausibility
from steelyard.metrics.request_trend import MIN_TREND_REQUESTS, find_trend
from steelyard.metrics.request_window import (
    find_request_window,
    list_arrivals,
    make_rate_slices,
    make_request_span,
)
from steelyard.record.request_samples import RequestSamples

CLOSED = Load(mode="concurrency", concurrency=2)
# Two slots; each request takes 1 s to its first token and 0.5 s for each of the two others, but the
# second one 2 s to its first.
STAGGERED = [
    Timing(0.0, [1.0, 1.5, 2.0]),
    Timing(0.0, [2.0, 2.5, 3.0]),
    *(Timing(t, [t + 1.0, t + 1.5, t + 2.0]) for t in (2.0, 3.0, 4.0, 5.0, 6.0)),
]


def test_closed_loop_window_is_between_the_first_wave_and_the_last_issue():
    window = find_request_window(make_samples(STAGGERED).table, CLOSED)
    assert window is not None
    # the second request ends at 3 s; the last one is issued at 6 s and ends at 8 s
    assert (window.begin_s, window.end_s, window.wall_s) == (3.0, 6.0, 3.0)
    assert window.indices.tolist() == [3, 4, 5]
    assert (window.ramp_s, window.drain_s, window.turn_requests) == (3.0, 2.0, 2)
    assert window.note.values["first"] == 3
    assert window.note.code == "window.concurrency"


def test_counts_of_the_window_are_what_arrives_in_it():
    record = make_generation_record(make_samples(STAGGERED))
    span = make_request_span(record, "generate")
    assert span is not None
    # at 3 s the third token of request 1 and the first of 2, at 3.5 s the second of 2, and so on
    assert span.counts == {
        "output_tokens": 9,
        "prompt_tokens": 3 * PROMPT,
        "tokens": 9 + 3 * PROMPT,
        "samples": 3,
    }
    assert (span.wall_s, span.bounds, span.compute_s, span.steps) == (
        3.0,
        {0: (13.0, 16.0)},
        None,
        {},
    )
    # three prompts, three second tokens behind 49 tokens and three third ones behind 50
    assert span.computed == {
        "tokens": 3 * PROMPT + 6,
        "logits": 9,
        "pairs": 3 * 48 * 49 // 2 + 3 * 49 + 3 * 50,
        "square": 3 * 48 * 48 + 3 * 49 + 3 * 50,
        "samples": 3,
    }
    assert passes.find_rate_span(record) is not None


def test_a_chunk_of_several_tokens_is_computed_like_as_many_chunks():
    apart = make_samples([Timing(0.0, [1.0, 2.0, 3.0, 4.0])])
    together = make_samples([Timing(0.0, [1.0, 4.0], tokens=[2, 2])])
    counts = [list_arrivals(s.table, None).count_computed(-inf, inf) for s in (apart, together)]
    assert counts[0] == counts[1]
    # one row of 48 + 4 - 1 tokens
    assert counts[0]["tokens"] == 51
    assert counts[0]["pairs"] == prompt_batches.count_causal_pairs(51, None)


@pytest.mark.parametrize("seen", [10, 48, 50])
def test_pairs_follow_the_attention_window(seen):
    samples = make_samples([Timing(0.0, [1.0, 2.0, 3.0, 4.0])])
    counts = list_arrivals(samples.table, seen).count_computed(-inf, inf)
    assert counts["pairs"] == prompt_batches.count_causal_pairs(51, seen)


def test_what_failed_is_not_counted():
    failed = Timing(7.0, [7.5, 8.0], outcome="cut")
    arrivals = list_arrivals(make_samples([*STAGGERED, failed]).table, None)
    assert arrivals.count(-inf, inf)["output_tokens"] == 21


def test_open_loop_window_begins_after_the_first_mean_time():
    # arrivals every second; each takes 0.5 s to its only token, the first two 2 s
    timings = [Timing(float(t), [t + (2.0 if t < 2 else 0.5)]) for t in range(8)]
    window = find_request_window(make_samples(timings).table, Load(mode="rate", rate=1.0))
    assert window is not None
    mean_s = (2 * 2.0 + 6 * 0.5) / 8
    assert (window.begin_s, window.end_s) == (mean_s, 7.0)
    assert window.indices.tolist() == [1, 2, 3, 4, 5, 6]
    assert (window.ramp_s, window.drain_s) == (mean_s, 0.5)
    assert window.turn_requests == 1


def test_a_wait_for_a_slot_moves_no_request_out_of_the_window():
    # one slot and arrivals every second, 0.5 s of service: waiting requests are sent later
    timings = [Timing(float(t), [t + 1.5], due_s=t + 1.0) for t in range(8)]
    load = Load(mode="rate", rate=1.0, max_concurrency=1)
    window = find_request_window(make_samples(timings).table, load)
    assert window is not None
    assert window.indices.tolist() == [2, 3, 4, 5, 6]  # by their schedule from 1.5 to 7 s


def test_offline_window_is_the_whole_pass():
    # two run at a time, 1 s each, a token in the middle and one at the end
    timings = [Timing(0.0, [n // 2 + 0.5, n // 2 + 1.0], sent_s=0.25) for n in range(8)]
    record = make_generation_record(make_samples(timings), {"mode": "offline"})
    samples = record.requests[0]
    window = find_request_window(samples.table, Load(mode="offline"))
    assert window is not None
    assert window.is_whole
    assert (window.begin_s, window.end_s, len(window.indices)) == (0.0, 4.0, 8)
    # the first two end at 1 s; the last two get their first token at 3.5 s
    assert (window.ramp_s, window.drain_s, window.steady_s) == (1.0, 0.5, (1.0, 3.5))
    span = make_request_span(record, "generate")
    # the last token lies at the very end, and counts
    assert span is not None
    assert span.counts["output_tokens"] == 16
    assert span.wall_s == 4.0


def test_offline_without_a_refill_has_no_steady_part():
    timings = [Timing(0.0, [1.0, 2.0]) for _ in range(8)]
    samples = make_samples(timings)
    window = find_request_window(samples.table, Load(mode="offline"))
    assert window is not None
    assert window.steady_s is None
    assert make_rate_slices(samples.table, window, list_arrivals(samples.table, None)).count == 0


def test_beyond_capacity_the_later_half_of_the_arrivals_is_the_window():
    """Requests that take longer than arrivals last still show how long they waited."""
    samples = make_samples([Timing(float(t), [t + 60.0]) for t in range(21)])
    window = find_request_window(samples.table, Load(mode="rate", rate=1.0))
    assert window is not None
    assert (window.begin_s, window.end_s, window.ramp_s) == (10.0, 20.0, 10.0)
    assert window.indices.tolist() == list(range(10, 20))


@pytest.mark.parametrize(
    ("timings", "load"),
    [
        ([], CLOSED),
        (STAGGERED[:2], CLOSED),
        (STAGGERED[:6], CLOSED),  # two requests are left
        ([Timing(0.0, [], asked=3, outcome="failed")] * 9, CLOSED),
    ],
)
def test_too_few_requests_have_no_window(timings: list[Timing], load: Load):
    samples = make_samples(timings)
    assert find_request_window(samples.table, load) is None
    record = make_generation_record(samples, load.model_dump(exclude_none=True))
    assert make_request_span(record, "generate") is None


def test_slices_are_turns_of_the_load():
    timings = make_even_loop(2, 23)
    samples = make_samples(timings)
    window = find_request_window(samples.table, CLOSED)
    assert window is not None
    slices = make_rate_slices(samples.table, window, list_arrivals(samples.table, None))
    assert slices.count == len(window.indices) // 2 == 9
    assert sum(slices.time_s["tokens"]) == pytest.approx(window.wall_s)
    span = make_request_span(make_generation_record(samples), "generate")
    assert span is not None
    for name in ("tokens", "output_tokens", "prompt_tokens", "samples"):
        assert sum(slices.work[name]) == span.counts[name]


def test_slices_of_an_open_loop_compare_with_what_was_offered():
    timings = [
        Timing(float(t * t), [t * t + (0.5 if t else 0.25)], prompt=50 + t) for t in range(12)
    ]
    samples = make_samples(timings)
    window = find_request_window(samples.table, Load(mode="rate", rate=1.0))
    assert window is not None
    slices = make_rate_slices(samples.table, window, list_arrivals(samples.table, None))
    # each request is answered before the next arrives, so that all that is offered is served,
    # although the times between arrivals differ tenfold
    assert slices.work["tokens"] == slices.time_s["tokens"]
    assert slices.estimate_interval(5.0, "tokens") == (5.0, 5.0)


def test_division_open_does_not_say_what_was_computed():
    record = make_generation_record(make_samples(STAGGERED), case__division="open")
    span = make_request_span(record, "generate")
    assert span is not None
    assert span.computed == {}
    closed = make_generation_record(make_samples(STAGGERED))
    assert plausibility._count_pass_work(record, "generate") == {}
    assert plausibility._count_pass_work(closed, "generate")["logits"] == 21


def make_random_loop(
    generator: np.random.Generator, slots: int, count: int, correlation: float
) -> RequestSamples:
    """Return a closed loop of requests whose times are those of one server: it is faster and slower
    by turns, an AR(1) process over the requests, and all that run together feel it.
    """
    noise, value = [], generator.normal()
    for _ in range(count):
        value = correlation * value + sqrt(1 - correlation**2) * generator.normal()
        noise.append(float(np.exp(0.05 * value + 0.05 * generator.normal())))
    return make_samples(make_even_loop(slots, count, tokens=4, noise=noise))


def measure_coverage(runs: int, slots: int, count: int, correlation: float) -> float:
    """Return the share of simulated runs whose 95 % interval of the rate holds the mean over all
    runs.
    """
    generator = np.random.default_rng(30)
    load = Load(mode="concurrency", concurrency=slots)
    results = []
    for _ in range(runs):
        table = make_random_loop(generator, slots, count, correlation).table
        window = find_request_window(table, load)
        assert window is not None
        arrivals = list_arrivals(table, None)
        rate = arrivals.count(window.begin_s, window.end_s)["output_tokens"] / window.wall_s
        slices = make_rate_slices(table, window, arrivals)
        results.append((rate, slices.estimate_interval(rate, "output_tokens")))
    true_rate = float(np.mean([rate for rate, _ in results]))
    held = [ends is not None and ends[0] <= true_rate <= ends[1] for _, ends in results]
    return sum(held) / len(held)


@pytest.mark.parametrize(("slots", "count"), [(1, 64), (8, 80)])
def test_interval_of_a_closed_loop_covers_between_runs(slots, count):
    # 400 runs: the Monte Carlo error is 1.1 % of 95 %
    assert 0.91 <= measure_coverage(400, slots, count, 0.5) <= 0.99


@pytest.mark.long
@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.8])
@pytest.mark.parametrize(("slots", "count"), [(1, 64), (4, 64), (16, 160), (16, 640)])
def test_interval_of_a_closed_loop_covers_in_many_runs(slots, count, correlation):
    assert 0.90 <= measure_coverage(1500, slots, count, correlation) <= 0.99


def make_queue(generator: np.random.Generator, count: int, share: float) -> np.ndarray:
    """Return the waits and services of requests at a server with one queue that is busy this share
    of the time (beyond 1: it falls behind), from its steady state if it has one.
    """
    warm = 1000 if share < 1 else 0
    gaps = generator.exponential(1.0, count + warm)
    services = generator.exponential(share, count + warm)
    times, wait = np.empty(count + warm), 0.0
    for i in range(count + warm):
        times[i] = wait + services[i]
        wait = max(0.0, wait + services[i] - gaps[i])
    return times[warm:]


def count_drifts(runs: int, count: int, share: float) -> int:
    """Return in how many simulated runs the latencies are found to drift."""
    generator = np.random.default_rng(31)
    trends = [find_trend(make_queue(generator, count, share)) for _ in range(runs)]
    return sum(trend is not None and trend.is_drift for trend in trends)


def test_a_steady_queue_drifts_in_few_runs_and_one_beyond_capacity_in_nearly_all():
    assert count_drifts(200, 100, 0.7) <= 4
    assert count_drifts(100, 100, 2.0) >= 90


@pytest.mark.long
@pytest.mark.parametrize(("share", "most"), [(0.5, 0.01), (0.7, 0.01), (0.8, 0.02), (0.9, 0.05)])
def test_share_of_steady_runs_found_to_drift(share, most):
    for count in (MIN_TREND_REQUESTS, 200, 600):
        assert count_drifts(1000, count, share) <= 1000 * most


def test_a_trend_needs_requests_and_a_large_change():
    rising = np.linspace(1.0, 2.0, MIN_TREND_REQUESTS)
    assert find_trend(rising[:-1]) is None
    trend = find_trend(rising)
    assert trend is not None
    assert trend.is_drift
    assert trend.t > 0
    falling = find_trend(rising[::-1])
    assert falling is not None
    assert falling.is_drift
    assert falling.t < 0
    # certain, and too small to matter
    small = find_trend(np.linspace(1.0, 1.2, MIN_TREND_REQUESTS))
    assert small is not None
    assert small.t > 8
    assert not small.is_drift
    equal = find_trend(np.ones(MIN_TREND_REQUESTS))
    assert equal is not None
    assert equal.t == 0
    assert not equal.is_drift


def test_one_slow_request_is_no_trend():
    values = np.random.default_rng(0).normal(1.0, 0.1, 100)
    values[-1] = 1e6
    trend = find_trend(values)
    assert trend is not None
    assert not trend.is_drift
