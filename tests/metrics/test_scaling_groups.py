"""Speed-up and efficiency over made records: every number worked out by hand."""

from math import exp, log, sqrt
from typing import Any

import pytest

from fixtures.report import (
    ENVIRONMENT,
    WITHOUT_INTERVAL,
    make_narrow_interval,
    make_record,
    make_train_question,
)
from steelyard.case import resolve
from steelyard.metrics import estimates, scaling_groups, standing
from steelyard.metrics.estimates import Estimate
from steelyard.metrics.ratio import BASE_RATIO, Ratio, compare_values
from steelyard.record.record import Record

Interval = tuple[float, float] | None


def make_run(
    nodes: int,
    devices: int,
    tokens_per_device_s: float | None,
    interval: Interval = None,
    tp: int = 1,
    **changes: Any,
) -> Record:
    """Return a valid run in which each device does `tokens_per_device_s`; `interval` is that of
    this rate, 1 % on either side if None.
    """
    plan = {
        "nodes": nodes,
        "devices": devices,
        "tp": tp,
        "pp": 1,
        "dp": nodes * devices // tp,
        "launcher": "local",
    }
    metrics = {
        "tokens_per_device_s": {
            "value": tokens_per_device_s,
            "unit": "tokens/s/device",
            "interval": interval or make_narrow_interval(tokens_per_device_s),
        }
    }
    return make_record(plan=plan, metrics=metrics, **changes)


def list_scaling_rows(*records: Record) -> list[tuple[str, str, int, float, float, float]]:
    """Return the rows of the only scaling group: configuration, plan, number of runs, rate,
    speed-up and efficiency, the last two rounded to 12 digits.
    """
    [group] = scaling_groups.find_scaling_groups(records)
    return [
        (
            row.plan.config,
            str(row.plan),
            len(row.records),
            row.rate.value,
            round(row.speedup.value, 12),
            round(row.efficiency.value, 12),
        )
        for row in group.rows
    ]


def test_speed_up_and_efficiency_are_against_the_fewest_devices() -> None:
    assert list_scaling_rows(make_run(2, 8, 60.0), make_run(1, 2, 100.0), make_run(1, 8, 75.0)) == [
        ("1x2", "TP1PP1DP2", 1, 200.0, 1.0, 1.0),
        ("1x8", "TP1PP1DP8", 1, 600.0, 3.0, 0.75),
        ("2x8", "TP1PP1DP16", 1, 960.0, 4.8, 0.6),
    ]


def test_rate_is_that_of_all_devices_with_its_interval() -> None:
    assert estimates.estimate_rate(make_run(2, 4, 10.0, (9.0, 12.0))) == Estimate(
        80.0, (72.0, 96.0)
    )
    assert estimates.estimate_rate(make_run(1, 1, 10.0, **WITHOUT_INTERVAL)) == Estimate(10.0)
    assert estimates.estimate_rate(make_run(1, 1, None)) is None
    assert estimates.estimate_rate(make_run(1, 1, 0.0)) is None
    assert estimates.estimate_rate(make_record(metrics={})) is None


def test_division_open_counts_samples() -> None:
    metrics = {
        "tokens_per_device_s": {"value": 5.0, "unit": "tokens/s/device", "interval": (4.9, 5.1)},
        "samples_per_s": {"value": 30.0, "unit": "questions/s", "interval": (29.0, 31.0)},
    }
    plan = {"nodes": 1, "devices": 2, "tp": 1, "pp": 1, "dp": 2, "launcher": "local"}
    two_devices = make_record(case__division="open", metrics=metrics, plan=plan)
    assert estimates.estimate_rate(two_devices) == Estimate(30.0, (29.0, 31.0))
    one_device = make_record(
        case__division="open", metrics={"samples_per_s": {"value": 20.0, "unit": "questions/s"}}
    )
    [group] = scaling_groups.find_scaling_groups([two_devices, one_device])
    assert (group.unit, group.base.plan.config, group.rows[1].speedup) == (
        "questions/s",
        "1x1",
        Ratio(pytest.approx(1.5), None, "not tested"),
    )


def test_single_runs_have_a_speed_up_that_is_not_tested() -> None:
    [group] = scaling_groups.find_scaling_groups(
        [make_run(1, 1, 100.0, (97.0, 104.0)), make_run(1, 2, 80.0, (77.6, 84.0))]
    )
    base, row = group.rows
    assert (base.source, base.rate, base.speedup, base.efficiency, base.is_base) == (
        "steps",
        Estimate(100.0, (97.0, 104.0)),
        BASE_RATIO,
        BASE_RATIO,
        True,
    )
    assert (row.source, row.is_base) == ("steps", False)
    assert row.rate == Estimate(160.0, (155.2, 168.0))
    assert row.speedup == Ratio(pytest.approx(1.6), None, "not tested")
    assert row.efficiency == Ratio(pytest.approx(0.8), None, "not tested")


def make_unproven_runs(devices: int, *rates: float) -> list[Record]:
    """Return one run without an interval for each rate per device."""
    return [make_run(1, devices, rate, **WITHOUT_INTERVAL) for rate in rates]


def test_unproven_runs_are_in_no_group_unless_three_repeats_prove_their_rate() -> None:
    one, two = make_unproven_runs(1, 99.5, 100.0, 100.5), make_unproven_runs(2, 79.5, 80.0, 80.5)
    assert scaling_groups.find_scaling_groups([*one[:2], *two]) == []
    assert scaling_groups.find_scaling_groups([make_run(1, 1, 100.0), *two[1:]]) == []
    [group] = scaling_groups.find_scaling_groups([*one, *two])
    assert [len(row.records) for row in group.rows] == [3, 3]
    assert [row.source for row in group.rows] == ["runs", "runs"]
    half = 4.303 * 1 / sqrt(3)
    assert group.rows[1].rate == Estimate(160.0, pytest.approx((160 - half, 160 + half)))
    assert group.rows[1].speedup == compare_values([99.5, 100.0, 100.5], [159.0, 160.0, 161.0])
    assert {standing.find_status(record) for record in group.records} == {"unproven"}
    # a valid run counts alone beside one that is too short; with two of these, all count
    [mixed] = scaling_groups.find_scaling_groups([make_run(1, 1, 100.0), one[0], *two])
    assert [len(row.records) for row in mixed.rows] == [1, 3]
    [mixed] = scaling_groups.find_scaling_groups([make_run(1, 1, 100.0), *one[:2], *two])
    assert [len(row.records) for row in mixed.rows] == [3, 3]


def test_runs_of_different_lengths_prove_nothing_together() -> None:
    """Three unproven runs of 3, 4 and 5 steps are no repeats."""

    def make_window(devices: int, steps: int, **changes: Any) -> Record:
        return make_run(1, devices, 80.0, scope={"kind": "window", "steps": steps}, **changes)

    two = [make_window(2, steps, **WITHOUT_INTERVAL) for steps in (3, 4, 5)]
    assert scaling_groups.find_scaling_groups([make_window(1, 30), *two]) == []
    assert scaling_groups.find_scaling_groups([make_window(1, 30), make_window(2, 30)]) != []


def test_several_runs_are_one_mean_with_the_spread_between_them() -> None:
    three = [make_run(1, 1, value, (1.0, 1000.0)) for value in (98.0, 100.0, 102.0)]
    two = [make_run(1, 2, value, (1.0, 1000.0)) for value in (89.0, 91.0)]
    [group] = scaling_groups.find_scaling_groups([*three, *two])
    base, row = group.rows
    # Student's t of two degrees of freedom, standard error of three runs
    half = 4.303 * sqrt(4.0 / 3)
    assert (len(base.records), base.source, base.rate.value) == (3, "runs", 100.0)
    assert base.rate.interval == pytest.approx((100 - half, 100 + half), rel=1e-12)
    tested = compare_values([98.0, 100.0, 102.0], [178.0, 182.0])
    assert tested is not None
    assert tested.interval is not None
    assert row.speedup == tested
    assert (tested.value, tested.verdict) == (
        pytest.approx(sqrt(178 * 182) / (98 * 100 * 102) ** (1 / 3)),
        "significant",
    )
    low, high = tested.interval
    assert row.efficiency == Ratio(tested.value / 2, (low / 2, high / 2), "significant")


def test_two_runs_far_apart_have_an_interval_that_ends_at_zero() -> None:
    [group] = scaling_groups.find_scaling_groups(
        [make_run(1, 1, 50.0), make_run(1, 1, 150.0), make_run(1, 2, 60.0), make_run(1, 2, 60.0)]
    )
    base, row = group.rows
    half = 12.706 * sqrt(5000.0 / 2)
    assert base.rate.interval == pytest.approx((0.0, 100 + half))
    assert row.rate == Estimate(120.0, (120.0, 120.0))
    # the interval of a ratio is one of logarithms, so it ends above zero
    spread = exp(12.706 * log(3) / 2)
    middle = 120 / sqrt(50 * 150)
    assert row.speedup.interval == pytest.approx((middle / spread, middle * spread))
    assert row.speedup.verdict == "not significant"


def test_plans_with_equal_numbers_of_devices_are_separate_rows() -> None:
    tp2, dp2, spread = (
        make_run(1, 2, 70.0, tp=2, tune__parallel="TP"),
        make_run(1, 2, 90.0),
        make_run(2, 1, 80.0),
    )
    assert list_scaling_rows(make_run(1, 1, 100.0), spread, tp2, dp2) == [
        ("1x1", "TP1PP1DP1", 1, 100.0, 1.0, 1.0),
        ("1x2", "TP1PP1DP2", 1, 180.0, 1.8, 0.9),
        ("1x2", "TP2PP1DP1", 1, 140.0, 1.4, 0.7),
        ("2x1", "TP1PP1DP2", 1, 160.0, 1.6, 0.8),
    ]
    # Of several plans on the fewest devices the fastest is the base, and the others are below it.
    assert [row[4] for row in list_scaling_rows(tp2, dp2, make_run(1, 4, 90.0))] == [
        1.0,
        round(140 / 180, 12),
        2.0,
    ]
    assert scaling_groups.find_scaling_groups([spread, tp2, dp2]) == []


INCOMPARABLE: dict[str, dict[str, Any]] = {
    "key": {"case__key": "another"},
    "division": {"case__division": "open"},
    "precision": {"case__precision": "fp16"},
    "engine": {"engine__name": "transformers"},
    "tune": {"tune__batch_tokens": 7},
    "scope": {"scope": {"kind": "window", "steps": 4}},
    "device": {
        "environment__hardware": ENVIRONMENT["hardware"] | {"devices": [{"name": "Abacus"}]}
    },
    "host": {"hosts": [{"name": "a", "ranks": [0], "devices": [{"name": "Abacus"}]}]},
    "invalid": {"status": "invalid"},
    "failed": {"status": "failed"},
    "unproven": WITHOUT_INTERVAL,
}


@pytest.mark.parametrize("what", INCOMPARABLE)
def test_incomparable_runs_are_in_no_group(what: str) -> None:
    changes = INCOMPARABLE[what]
    other = make_run(1, 2, 90.0, **changes)
    if what == "division":
        other = make_record(
            **changes,
            plan=other.plan.model_dump(),
            metrics={"samples_per_s": {"value": 1.0, "unit": "questions/s"}},
        )
    assert scaling_groups.find_scaling_groups([make_run(1, 1, 100.0), make_run(1, 2, 90.0)]) != []
    assert scaling_groups.find_scaling_groups([make_run(1, 1, 100.0), other]) == []


def test_runs_are_grouped_by_sample_size_and_not_by_steps() -> None:
    def window(devices: int, **scope: int) -> Record:
        return make_run(1, devices, 10.0, scope={"kind": "window"} | scope)

    assert scaling_groups.find_scaling_groups([window(1, sample=8), window(2, sample=16)]) == []
    assert [
        len(group.rows)
        for group in scaling_groups.find_scaling_groups(
            [window(1, sample=8, steps=4), window(2, sample=8, steps=9)]
        )
    ] == [2]


def test_groups_come_in_the_order_of_their_records() -> None:
    small, large = {"tune__batch_tokens": 8}, {"tune__batch_tokens": 16}
    records = [
        make_run(1, 1, 2.0, **large),
        make_run(1, 1, 1.0, **small),
        make_run(1, 2, 1.0, **small),
        make_run(1, 2, 2.0, **large),
    ]
    groups = scaling_groups.find_scaling_groups(records)
    assert [group.records[0].tune.batch_tokens for group in groups] == [16, 8]
    assert [[row.speedup.value for row in group.rows] for group in groups] == [
        [1.0, pytest.approx(2.0)],
        [1.0, pytest.approx(2.0)],
    ]


def test_training_counts_tokens_and_a_cloze_counts_samples() -> None:
    metrics = {
        "tokens_per_device_s": {"value": 7.0, "unit": "tokens/s/device"},
        "samples_per_s": {"value": 3.0, "unit": "x"},
    }
    cloze = resolve.resolve_case("glm-large-record").case.question.model_dump(mode="json")
    assert estimates.estimate_rate(
        make_record(case__question=make_train_question(), metrics=metrics)
    ) == Estimate(7.0)
    assert estimates.estimate_rate(make_record(case__question=cloze, metrics=metrics)) == Estimate(
        3.0
    )


@pytest.mark.parametrize("value", [1e300, 1e-300])
def test_extreme_rates_are_unknown(value: float) -> None:
    assert scaling_groups.find_scaling_groups([make_run(1, 1, value), make_run(1, 2, value)]) == []
