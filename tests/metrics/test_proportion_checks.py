"""The rows of `steelyard conform` on CPU time: a line through runs of three sizes, and what is
judged from its slope.
"""

from math import inf
from typing import Any

import pytest

from fixtures import report
from steelyard.metrics import proportion_checks
from steelyard.metrics.conform_checks import ConformCheck
from steelyard.metrics.proportion_checks import (
    SAVING_NAME,
    SLOPE_NAME,
    TimedRun,
    check_proportion,
    fit_costs,
)
from steelyard.plan import flops
from steelyard.record.record import Record

QUESTION = report.make_record().question
# model FLOPs of a token without attention and logits
TOKEN_FLOPS = 2 * flops.count_layer_parameters(QUESTION.model)
START_S = 3.0  # CPU seconds of a run before its first pass
RATE = TOKEN_FLOPS * 1000.0  # of a matmul: a thousand tokens in a CPU second


def make_timed_record(
    cpu_s: float,
    tokens: dict[str, int],
    others: float = 0.0,
    accelerator: str = "cpu",
    **changes: Any,
) -> Record:
    """Return a record whose processes used `START_S + cpu_s` seconds of CPU time, of two cores,
    besides 0.5 s of its agent, with so many tokens in each pass; other processes took the share
    `others` of the cores.
    """
    own_s = START_S + cpu_s + 0.5
    load = {
        "allowed": 2,
        "t_s": [0.0, 50.0],
        "own_s": [1.0, 1.0 + own_s],
        "agent_s": [0.0, 0.5],
        "busy_s": [0.0, own_s + 100 * others],
    }
    counts = {"samples": 1, "logits": 0, "pairs": 0, "square": 0}
    sample = report.make_samples(count=1)[0]
    window = {"rank": 0, "start_s": 5.0, "wall_s": 1.0, "allocated_bytes": 0, "reserved_bytes": 0}
    fields: dict[str, Any] = {
        "environment__hardware__accelerator": accelerator,
        "hosts": [{"name": "here", "ranks": [0], "load": load}],
        "ranks": [{"rank": 0, "matmul_cpu_rates": {"before": [0.9 * RATE], "after": [RATE]}}],
        "passes": [window | {"pass": name} for name in tokens],
        "samples": [
            sample | {"pass": name, "counts": counts | {"tokens": count}}
            for name, count in tokens.items()
        ],
    }
    return report.make_record(**(fields | changes))


# (tokens of each pass, CPU seconds of an engine that takes 1.5 ms for a token)
SERIES: list[tuple[dict[str, int], float]] = [
    ({"infer": 500}, 0.75),
    ({"val": 2000}, 3.0),
    ({"val": 1000, "infer": 1000}, 3.0),
    ({"infer": 1000}, 1.5),
    ({"infer": 2000}, 3.0),
    ({"val": 500}, 0.75),
    ({"infer": 1000, "val": 1000}, 3.0),
]
NOISE_S = (0.01, -0.01, 0.01, 0.0, -0.01, 0.01, -0.01)


def judge_series(
    costs_s: list[float] | None = None, noise: float = 1.0, **changes: Any
) -> dict[str, ConformCheck]:
    """Return the rows of the series by name: with these CPU seconds instead of those of an honest
    engine, a multiple of the usual noise, and changed records.
    """
    honest_s = [cpu_s for _, cpu_s in SERIES]
    timed = [
        make_timed_record(cpu_s + noise * error_s, tokens, **changes)
        for (tokens, _), cpu_s, error_s in zip(SERIES, costs_s or honest_s, NOISE_S, strict=True)
    ]
    return {row.what: row for row in check_proportion(timed, timed[:2])}


def test_fit_returns_the_line_of_exact_costs() -> None:
    """3 s, and 2 s for each of the FLOPs; the repeated ones take 0.5 s less."""
    runs = [TimedRun(3 + 2 * work, work, 0.0) for work in (1.0, 2.0, 4.0, 4.0)]
    slope, deficit = fit_costs(runs)
    assert (slope.value, slope.half_width) == pytest.approx((2.0, 0.0))
    assert deficit is None
    repeated = TimedRun(3 + 2 * 4.0 - 0.5 * 2.0, 4.0, 2.0)
    slope, deficit = fit_costs([*runs, repeated])
    assert deficit is not None
    assert (slope.value, deficit.value) == pytest.approx((2.0, 0.5))


def test_interval_of_the_slope_is_that_of_students_t() -> None:
    """Residuals of ±0.1 at 1, 1, 2, 2: a standard error of 0.1 and two degrees of freedom."""
    runs = [TimedRun(y, x, 0.0) for x, y in ((1, 0.9), (1, 1.1), (2, 1.9), (2, 2.1))]
    slope, _ = fit_costs(runs)
    error = (0.04 / 2) ** 0.5 / 1.0  # the squared distances of x from their mean add up to 1
    assert (slope.value, slope.half_width) == pytest.approx((1.0, 4.303 * error))
    assert fit_costs(runs[1:3])[0].half_width == inf


def test_honest_engine_conforms() -> None:
    rows = judge_series()
    assert {name: row.ok for name, row in rows.items()} == {
        "status, timed runs": True,
        SLOPE_NAME: True,
        SAVING_NAME: True,
    }
    tera_tokens = 1e12 / TOKEN_FLOPS
    # 1.1 times the fastest matmul; 1.5 ms for a token
    assert rows[SLOPE_NAME].ours == f"at least {tera_tokens / 1.1e3:.3g}"
    assert str(rows[SLOPE_NAME].theirs).startswith(f"{tera_tokens * 1.49e-3:.3g} ± ")


@pytest.mark.parametrize(
    ("share", "ok"), [(0.0, False), (0.3, False), (0.55, False), (0.65, True), (1.0, True)]
)
def test_engine_that_takes_less_time_than_a_matmul_does_not_conform(share: float, ok: bool) -> None:
    """1.5 ms for a token; a matmul of 1.1 times the measured rate takes 0.91 ms, 0.61 of it."""
    rows = judge_series([share * cpu_s for _, cpu_s in SERIES])
    assert rows[SLOPE_NAME].ok is ok


@pytest.mark.parametrize(("replayed", "ok"), [(1.0, False), (0.5, False), (0.33, False), (0, True)])
def test_engine_that_replays_answers_does_not_conform(replayed: float, ok: bool) -> None:
    """It answers a share of the rows of a second pass from the first, whatever the order."""
    costs_s = [cpu_s * (1 - replayed / 2 if len(tokens) > 1 else 1.0) for tokens, cpu_s in SERIES]
    row = judge_series(costs_s)[SAVING_NAME]
    assert row.ok is ok
    assert float(str(row.theirs).split()[0]) == pytest.approx(replayed, abs=0.02)


def test_second_pass_may_cost_a_little_less() -> None:
    costs_s = [cpu_s * (0.96 if len(tokens) > 1 else 1.0) for tokens, cpu_s in SERIES]
    assert judge_series(costs_s)[SAVING_NAME].ok is True


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"others": 0.35}, "other processes took 35% of the cores; allowed: 10%"),
        ({"accelerator": "cuda"}, "the time of this device is not read from outside"),
        ({"hosts": [{"name": "here", "ranks": [0]}]}, "this host does not count CPU time"),
        ({"status": "failed"}, "a run failed"),
        ({"ranks": []}, "no matmul was timed"),
    ],
)
def test_time_that_says_nothing_is_not_tested(changes: dict[str, Any], why: str) -> None:
    rows = judge_series([0.0] * len(SERIES), **changes)
    assert (rows[SLOPE_NAME].ok, rows[SLOPE_NAME].untested) == (None, why)
    assert SAVING_NAME not in rows


def test_wide_intervals_are_not_tested() -> None:
    rows = judge_series(noise=50)
    assert {name: row.untested for name, row in rows.items()} == {
        "status, timed runs": None,
        SLOPE_NAME: "the interval is too wide",
        SAVING_NAME: "the interval is too wide",
    }


def test_without_timed_runs_the_compared_ones_say_why() -> None:
    compared = make_timed_record(1.0, {"val": 500}, others=0.5)
    [row] = check_proportion([], [compared, compared])
    assert (row.what, row.untested) == (
        SLOPE_NAME,
        "other processes took 50% of the cores; allowed: 10%",
    )


def test_invalid_timed_run_does_not_conform() -> None:
    reasons = [{"code": "implausible", "text": "too fast"}]
    row = judge_series(status="invalid", reasons=reasons)["status, timed runs"]
    assert (row.theirs, row.ok) == ("invalid implausible", False)


def test_cpu_time_is_that_of_all_processes_but_the_agent() -> None:
    record = make_timed_record(2.0, {"val": 1000, "infer": 3000})
    assert proportion_checks.time_run(record) == TimedRun(
        START_S + 2.0, 4000.0 * TOKEN_FLOPS, 3000.0 * TOKEN_FLOPS
    )
