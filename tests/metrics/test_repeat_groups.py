"""Repeats over made records: every number worked out by hand."""

from math import sqrt
from typing import Any

import pytest

from fixtures.report import (
    WITHOUT_INTERVAL,
    make_narrow_interval,
    make_record,
    make_training_record,
)
from steelyard.metrics import repeat_groups, standing
from steelyard.metrics.estimates import Estimate
from steelyard.metrics.repeat_groups import MetricSpread, RepeatGroup
from steelyard.record.record import Record, Restart

TOO_WIDE = {"status": "invalid", "reasons": [{"code": "interval", "text": "too wide"}]}
TOO_LOW = {
    "status": "invalid",
    "reasons": [{"code": "interval", "text": "too wide"}, {"code": "quality", "text": "too low"}],
}
FAILED = {
    "status": "failed",
    "reasons": [{"code": "hang", "text": "no sign of life"}],
    "case__key": "unknown",
    "weights": {"source": None},
}


def make_run(
    rate: float | None,
    acc: float = 0.5,
    interval: tuple[float, float] | None = None,
    **changes: Any,
) -> Record:
    """Return a run with this rate and accuracy; `interval` is that of the rate, 1 % on either side
    if None, and `changes` replaces fields.
    """
    metrics = {
        "tokens_per_device_s": {
            "value": rate,
            "unit": "tokens/s/device",
            "interval": interval or make_narrow_interval(rate),
        },
        "acc": {"value": acc, "unit": "fraction"},
        "mfu": {"value": None if rate is None else rate / 400, "unit": "fraction"},
        "mem": {"value": 10.0, "unit": "GiB"},
        "energy_per_token": {"value": None, "unit": "J/token", "note": "no counter"},
    }
    return make_record(**({"metrics": metrics} | changes))


def group_repeats(*records: Record) -> RepeatGroup:
    """Return the only group of repeats among the records."""
    [repeated_runs] = repeat_groups.find_repeat_groups(records)
    return repeated_runs


def index_spreads_by_name(repeated_runs: RepeatGroup) -> dict[str, MetricSpread]:
    """Return the spread of each metric by the metric's name."""
    return {spread.name: spread for spread in repeated_runs.metrics}


def test_mean_spread_and_interval_between_runs() -> None:
    """98, 100 and 102: a deviation of 2, and Student's t of two degrees of freedom. Their own
    intervals are not used.
    """
    repeated_runs = group_repeats(
        *(
            make_run(rate, acc, (1.0, 1000.0))
            for rate, acc in ((98.0, 0.4), (100.0, 0.5), (102.0, 0.6))
        )
    )
    half = 4.303 * 2 / sqrt(3)
    spreads = index_spreads_by_name(repeated_runs)
    assert list(spreads) == ["rate", "mfu", "mem", "acc"]  # energy is unknown
    rate = spreads["rate"]
    assert (rate.unit, rate.runs, rate.mean.value, rate.source) == ("tokens/s", 3, 100.0, "runs")
    assert rate.mean.interval == pytest.approx((100 - half, 100 + half), rel=1e-12)
    assert (rate.deviation, rate.lowest, rate.highest) == (pytest.approx(0.02), 98.0, 102.0)
    assert spreads["mfu"].mean.value == pytest.approx(0.25)
    assert spreads["mfu"].deviation == pytest.approx(0.02)
    assert spreads["mem"] == MetricSpread(
        "mem", "GiB", 3, Estimate(10.0, (10.0, 10.0)), "runs", 0.0, 10.0, 10.0
    )
    assert spreads["acc"].mean.value == pytest.approx(0.5)
    assert spreads["acc"].deviation == pytest.approx(0.2)


def test_the_rate_is_that_of_all_devices() -> None:
    plan = {"nodes": 1, "devices": 4, "tp": 1, "pp": 1, "dp": 4, "launcher": "local"}
    assert index_spreads_by_name(
        group_repeats(make_run(100.0, plan=plan), make_run(100.0, plan=plan))
    )["rate"].mean == Estimate(400.0, (400.0, 400.0))


def test_one_valid_run_has_its_own_interval() -> None:
    repeated_runs = group_repeats(
        make_run(100.0, 0.5, (95.0, 105.0)), make_run(50.0, 0.1, **TOO_LOW)
    )
    spreads = index_spreads_by_name(repeated_runs)
    assert spreads["rate"] == MetricSpread(
        "rate", "tokens/s", 1, Estimate(100.0, (95.0, 105.0)), "steps", None, 100.0, 100.0
    )
    assert spreads["acc"] == MetricSpread("acc", "fraction", 1, Estimate(0.5), None, None, 0.5, 0.5)


def test_runs_that_are_not_valid_are_counted_and_not_averaged() -> None:
    records = [
        make_run(100.0),
        make_run(1.0, **TOO_WIDE),
        make_run(100.0),
        make_run(1.0, **TOO_LOW),
        make_run(100.0),
        make_run(None, **FAILED),
    ]
    repeated_runs = group_repeats(*records)
    assert repeated_runs.records == tuple(records)
    assert repeated_runs.counted == tuple(records[::2])
    assert repeated_runs.not_counted == tuple(records[1::2])
    assert repeated_runs.interval_only == 1
    assert index_spreads_by_name(repeated_runs)["rate"].mean == Estimate(100.0, (100.0, 100.0))


def test_a_run_with_an_interval_too_wide_stays_invalid_among_repeats_that_agree() -> None:
    repeated_runs = group_repeats(*(make_run(100.0) for _ in range(5)), make_run(100.0, **TOO_WIDE))
    assert (index_spreads_by_name(repeated_runs)["rate"].runs, repeated_runs.interval_only) == (
        5,
        1,
    )


def test_without_a_valid_run_there_are_no_metrics() -> None:
    repeated_runs = group_repeats(make_run(None, **FAILED), make_run(None, **FAILED))
    assert (repeated_runs.metrics, repeated_runs.counted) == ((), ())
    assert len(repeated_runs.not_counted) == 2
    assert group_repeats(make_run(1.0, **TOO_WIDE), make_run(None, **FAILED)).interval_only == 1


def test_three_unproven_runs_have_a_proven_rate_together() -> None:
    """Their spread between runs proves the rate; each of them stays unproven."""
    records = [make_run(rate, **WITHOUT_INTERVAL) for rate in (99.5, 100.0, 100.5)]
    repeated_runs = group_repeats(*records)
    assert (repeated_runs.counted, repeated_runs.not_counted) == (tuple(records), ())
    half = 4.303 * 0.5 / sqrt(3)
    assert index_spreads_by_name(repeated_runs)["rate"] == MetricSpread(
        "rate",
        "tokens/s",
        3,
        Estimate(100.0, pytest.approx((100 - half, 100 + half))),
        "runs",
        pytest.approx(0.005),
        99.5,
        100.5,
    )
    assert [standing.find_status(record) for record in repeated_runs.counted] == ["unproven"] * 3


def test_two_unproven_runs_prove_nothing() -> None:
    unproven = [make_run(rate, **WITHOUT_INTERVAL) for rate in (99.5, 100.5)]
    pair = group_repeats(*unproven)
    assert (pair.metrics, pair.counted, pair.not_counted) == ((), (), tuple(unproven))
    assert pair.interval_only == 0
    valid, bad = make_run(100.0), make_run(1.0, **TOO_LOW)
    mixed = group_repeats(unproven[0], valid, bad)
    assert (mixed.counted, mixed.not_counted) == ((valid,), (unproven[0], bad))
    assert index_spreads_by_name(mixed)["rate"].source == "steps"
    three = group_repeats(unproven[0], valid, bad, unproven[1])
    assert (three.counted, three.not_counted) == ((unproven[0], valid, unproven[1]), (bad,))
    assert index_spreads_by_name(three)["rate"].mean.value == 100.0


def test_a_metric_is_averaged_over_the_runs_that_have_it() -> None:
    spreads = index_spreads_by_name(group_repeats(make_run(None), make_run(100.0), make_run(104.0)))
    assert (spreads["rate"].runs, spreads["rate"].mean.value, spreads["mem"].runs) == (2, 102.0, 3)
    # values beyond any machine count as unknown
    assert list(index_spreads_by_name(group_repeats(make_run(1e200), make_run(1e200)))) == [
        "mem",
        "acc",
    ]


def test_a_quality_below_zero_has_an_interval_around_it() -> None:
    spread = index_spreads_by_name(group_repeats(make_run(1.0, -1.0), make_run(1.0, -3.0)))["acc"]
    assert spread.mean.value == -2.0
    assert spread.mean.interval == pytest.approx((-2 - 12.706, -2 + 12.706))
    assert spread.deviation == pytest.approx(sqrt(2) / 2)
    # a mean of 0 has no relative deviation
    assert (
        index_spreads_by_name(group_repeats(make_run(1.0, -1.0), make_run(1.0, 1.0)))[
            "acc"
        ].deviation
        is None
    )


def test_training_without_held_out_passes_has_its_loss() -> None:
    outputs = {"held_out": 4, "passes": {"train": {"stopped": None}}}
    times = ((2.0, *[1.0] * 5),)
    repeated_runs = group_repeats(
        make_training_record(times, outputs=outputs), make_training_record(times, outputs=outputs)
    )
    assert [spread.name for spread in repeated_runs.metrics] == [
        "rate",
        "mfu",
        "mem",
        "energy_per_token",
        "loss",
    ]


DIFFERENT_SETTINGS: dict[str, dict[str, Any]] = {
    "case": {"case__name": "another"},
    "size": {"case__size": "smoke"},
    "key": {"case__key": "another"},
    "precision": {"case__precision": "fp16"},
    "limit": {"case__max_interval": 0.1},
    "gate": {"case__gate": None},
    "engine": {"engine__name": "transformers"},
    "tune": {"tune__batch_tokens": 7},
    "scope": {"scope": {"kind": "window", "steps": 4}},
    "sample": {"scope": {"kind": "window", "sample": 4}},
    "plan": {"plan": {"nodes": 1, "devices": 2, "tp": 1, "pp": 1, "dp": 2, "launcher": "local"}},
    "weights": {"weights": {"source": "random", "seed": 1}},
    "device": {"environment__hardware__devices": [{"name": "Abacus"}]},
    "formulas": {"formulas": 2},
    "pass": {
        "passes": [
            {
                "pass": "val",
                "rank": 0,
                "start_s": 0.0,
                "wall_s": 1.0,
                "allocated_bytes": 1,
                "reserved_bytes": 1,
            }
        ]
    },
    "restarts": {
        "restarts": [
            Restart(record="ab" * 16, step=1, plan="TP1PP1DP1", losses=[9.5]).model_dump(
                mode="json"
            )
        ]
    },
}


@pytest.mark.parametrize("what", DIFFERENT_SETTINGS)
def test_runs_with_different_settings_are_no_repeats(what: str) -> None:
    assert (
        repeat_groups.find_repeat_groups([make_run(1.0), make_run(1.0, **DIFFERENT_SETTINGS[what])])
        == []
    )
    assert [
        len(repeated.records)
        for repeated in repeat_groups.find_repeat_groups(
            [
                make_run(1.0, **DIFFERENT_SETTINGS[what]),
                make_run(1.0),
                make_run(1.0, **DIFFERENT_SETTINGS[what]),
            ]
        )
    ] == [2]


def test_groups_come_in_the_order_of_their_first_runs() -> None:
    small, large = {"tune__batch_tokens": 8}, {"tune__batch_tokens": 16}
    records = [
        make_run(2.0, **large),
        make_run(1.0, **small),
        make_run(None, **FAILED, **large),
        make_run(1.0, **small),
        make_run(1.0),
    ]
    groups = repeat_groups.find_repeat_groups(records)
    assert [[record.tune.batch_tokens for record in group.records] for group in groups] == [
        [16, 16],
        [8, 8],
    ]
    assert repeat_groups.find_repeat_groups([]) == []
