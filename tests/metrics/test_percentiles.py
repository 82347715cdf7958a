"""Percentiles over requests: the published table of least numbers, order statistics and their
intervals against exact binomial probabilities, and LoadGen itself.
"""

import json
import re
import subprocess
from math import comb
from pathlib import Path

import numpy as np
import pytest

from fixtures.serving import install_tool
from steelyard.metrics import percentiles

# A program that lets LoadGen measure so many queries of random length, one after another.
LOADGEN_PROGRAM = """
import random, sys, time
import mlperf_loadgen as loadgen
count, percentile, folder = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
generator = random.Random(3)
def issue(samples):
    for sample in samples:
        end = time.perf_counter() + generator.expovariate(1e5)
        while time.perf_counter() < end:
            pass
        loadgen.QuerySamplesComplete([loadgen.QuerySampleResponse(sample.id, 0, 0)])
settings = loadgen.TestSettings()
settings.scenario = loadgen.TestScenario.SingleStream
settings.mode = loadgen.TestMode.PerformanceOnly
settings.single_stream_target_latency_percentile = percentile / 100
settings.min_query_count = settings.max_query_count = count
settings.min_duration_ms = 0
logs = loadgen.LogSettings()
logs.log_output.outdir = folder
logs.log_output.copy_summary_to_stdout = False
logs.enable_trace = True
loadgen.StartTestWithLogSettings(
    loadgen.ConstructSUT(issue, lambda: None),
    loadgen.ConstructQSL(16, 16, lambda x: None, lambda x: None),
    settings,
    logs,
)
"""


def sum_binomial(k: int, n: int, p: float) -> float:
    """Return the probability of at most k of n events, term by term."""
    return sum(comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k + 1))


# docs/early_stopping.md of MLPerf Endpoints
@pytest.mark.parametrize(
    ("percentile", "least"), [(50, 11), (90, 64), (95, 130), (97, 219), (99, 662)]
)
def test_least_numbers_are_those_that_loadgen_publishes(percentile, least):
    assert percentiles.find_least_count(percentile) == least


@pytest.mark.parametrize("p", [0.01, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("n", [1, 7, 64, 200])
def test_binomial_probabilities_are_exact(n, p):
    for k in (-1, 0, n // 3, n // 2, n - 1, n):
        expected = sum_binomial(k, n, p)
        assert percentiles.compute_binomial_cdf(k, n, p) == pytest.approx(expected, abs=1e-12)


def test_least_passing_number_is_the_first_that_is_enough():
    for over in (1, 2, 10, 51):
        passing = percentiles.find_min_passing(over, 90)
        probabilities = [sum_binomial(over, h + over, 0.1) for h in (passing - 1, passing)]
        assert probabilities[0] > 0.01 >= probabilities[1]


def test_a_percentile_is_an_order_statistic():
    values = np.arange(1.0, 101.0)
    assert [percentiles.select_percentile(values, p / 100) for p in (50, 90, 99)] == [50, 90, 99]
    assert percentiles.select_percentile(values[:11], 0.5) == 6.0
    assert percentiles.select_percentile(values[:1], 0.99) == 1.0
    # 0.07 * 100 is 7.000000000000001 as a float
    assert percentiles.select_percentile(values, 0.07) == 7.0


@pytest.mark.parametrize("percentile", [50, 90, 99])
@pytest.mark.parametrize("count", [11, 64, 100, 662, 5000])
def test_ranks_hold_the_percentile_with_95_percent_and_no_narrower_ones_do(count, percentile):
    p = percentile / 100
    ranks = percentiles.find_rank_interval(count, percentile)
    cdf = [percentiles.compute_binomial_cdf(k, count, p) for k in range(count + 1)]
    if ranks is None:
        # not even the smallest, or the largest, bounds a side
        assert cdf[0] > 0.025 or 1 - cdf[count - 1] > 0.025
        return
    low, high = ranks
    # the percentile is below the value of rank r if at most r - 1 values are below it
    assert cdf[low - 1] <= 0.025 < cdf[low]
    assert 1 - cdf[high - 1] <= 0.025 < 1 - cdf[high - 2]


def test_too_few_values_have_no_interval():
    assert percentiles.find_rank_interval(5, 50) is None
    assert percentiles.find_rank_interval(6, 50) == (1, 6)
    assert percentiles.find_rank_interval(367, 99) is None
    assert percentiles.find_rank_interval(368, 99) is not None
    values = np.arange(1.0, 101.0)
    assert percentiles.find_percentile_interval(values, 50) == (40.0, 61.0)
    assert percentiles.find_percentile_interval(values, 99) is None


@pytest.mark.parametrize("percentile", [50, 90])
def test_intervals_cover(percentile):
    generator = np.random.default_rng(11)
    exact = -np.log(1 - percentile / 100)
    draws = np.sort(generator.exponential(size=(600, 100)), axis=1)
    held = [
        ends is not None and ends[0] <= exact <= ends[1]
        for ends in (percentiles.find_percentile_interval(row, percentile) for row in draws)
    ]
    assert 0.93 <= sum(held) / len(held) <= 0.99


@pytest.mark.parametrize("percentile", [50, 90])
def test_intervals_over_chunks_go_by_requests(percentile):
    generator = np.random.default_rng(12)
    owner = np.repeat(np.arange(100), 30)
    exact = 1 + 0.2 * float(np.quantile(generator.normal(size=10**6), percentile / 100))
    held, naive = 0, 0
    for _ in range(300):
        # all gaps of a request are alike, so that there are 100 values, not 3,000
        gaps = np.repeat(1 + 0.2 * generator.normal(size=100), 30)
        ends = percentiles.find_clustered_interval(gaps, owner, percentile)
        plain = percentiles.find_percentile_interval(np.sort(gaps), percentile)
        assert ends is not None
        assert plain is not None
        held += ends[0] <= exact <= ends[1]
        naive += plain[0] <= exact <= plain[1]
    assert held >= 0.9 * 300
    assert naive <= 0.5 * 300


def draw_waits(generator: np.random.Generator, count: int, busy: float) -> np.ndarray:
    """Return the waits for the first token of consecutive requests at a server with one queue
    (M/M/1) that is busy this share of the time, from its steady state.
    """
    warm = 300
    gaps = generator.exponential(1.0, count + warm)
    services = generator.exponential(busy, count + warm)
    waits, wait = np.empty(count + warm), 0.0
    for i in range(count + warm):
        waits[i] = wait + 0.1 * services[i]
        wait = max(0.0, wait + services[i] - gaps[i])
    return waits[warm:]


def measure_queue_coverage(runs: int, count: int, busy: float) -> tuple[float, float, float]:
    """Return how often the intervals of the mean, the median and the 90th percentile of waits hold
    the value over all runs; of those that have one.
    """
    generator = np.random.default_rng(17)
    rows = [draw_waits(generator, count, busy) for _ in range(runs)]
    find = percentiles.find_percentile_interval_of_queue
    true = [np.mean([row.mean() for row in rows])]
    true += [np.mean([np.quantile(row, share) for row in rows]) for share in (0.5, 0.9)]
    ends = [[percentiles.find_mean_interval_of_queue(row) for row in rows]]
    ends += [[find(row, percentile) for row in rows] for percentile in (50, 90)]
    shares = [
        np.mean([one[0] <= value <= one[1] for one in found if one is not None])
        for value, found in zip(true, ends, strict=True)
    ]
    return shares[0], shares[1], shares[2]


def test_intervals_of_an_open_loop_cover_at_half_its_capacity():
    mean, median, _ = measure_queue_coverage(200, 400, 0.5)
    assert mean >= 0.85
    assert median >= 0.9
    generator = np.random.default_rng(5)
    rows = [draw_waits(generator, 400, 0.5) for _ in range(200)]
    exact = np.mean([np.median(row) for row in rows])
    plain = [percentiles.find_percentile_interval(np.sort(row), 50) for row in rows]
    assert np.mean([ends[0] <= exact <= ends[1] for ends in plain if ends is not None]) <= 0.8


@pytest.mark.long
@pytest.mark.parametrize(("busy", "least"), [(0.3, 0.9), (0.5, 0.88), (0.7, 0.8), (0.8, 0.75)])
def test_intervals_of_an_open_loop_cover_in_many_runs(busy, least):
    coverage = measure_queue_coverage(1000, 700, busy)
    print(f"{busy:.0%} busy, 700 requests: mean {coverage[0]:.1%}, p50 {coverage[1]:.1%}")
    assert min(coverage[:2]) >= least


def test_few_requests_of_an_open_loop_have_no_interval():
    values = np.arange(19.0)
    assert percentiles.find_mean_interval_of_queue(values) is None
    assert percentiles.find_percentile_interval_of_queue(values, 50) is None
    # a queue that grows from stretch to stretch: nothing is known of its median
    assert percentiles.find_percentile_interval_of_queue(np.arange(100.0), 50) is None
    alike = np.tile(np.arange(20.0), 5)
    assert percentiles.find_mean_interval_of_queue(alike) == (9.5, 9.5)
    assert percentiles.find_percentile_interval_of_queue(alike, 50) == (8.0, 11.0)


def test_chunks_of_too_few_requests_have_no_interval():
    gaps = np.arange(10.0)
    assert percentiles.find_clustered_interval(gaps, np.zeros(10, np.int64), 50) is None
    assert percentiles.find_clustered_interval(gaps, np.arange(10) // 5, 99) is None


def test_early_stopping_takes_the_value_that_so_many_may_exceed():
    values = [float(i) for i in range(700)]
    # 693 queries are enough for 51 above the bound, 704 for 52
    assert percentiles.estimate_by_early_stopping(values, 90) == 700 - 51
    assert percentiles.estimate_by_early_stopping(values, 99) == 699
    assert percentiles.estimate_by_early_stopping(values[:661], 99) is None
    assert percentiles.estimate_by_early_stopping(values[:662], 99) == 661


@pytest.mark.long
@pytest.mark.parametrize(("count", "percentile"), [(64, 90), (700, 90), (3000, 99), (500, 50)])
def test_loadgen_estimates_the_same_from_the_same_latencies(tmp_path: Path, count, percentile):
    python = install_tool("loadgen", "mlcommons-loadgen==6.0.17", "numpy") / "python"
    program = [python, "-c", LOADGEN_PROGRAM, str(count), str(percentile), str(tmp_path)]
    subprocess.run(program, check=True, timeout=300)
    trace = (tmp_path / "mlperf_log_trace.json").read_text()  # whose last lines are no JSON
    latencies = sorted(int(text) for text in re.findall(r'"complete_ns":(\d+)', trace))
    lines = (tmp_path / "mlperf_log_detail.txt").read_text().splitlines()
    told = [json.loads(line.split(" ", 1)[1]) for line in lines if line.startswith(":::MLLOG")]
    theirs = next(item["value"] for item in told if item["key"] == "early_stopping_latency_ss")
    assert len(latencies) == count
    assert percentiles.estimate_by_early_stopping(latencies, percentile) == theirs
