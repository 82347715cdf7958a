"""Repeats over made records: every number worked out by hand."""

from math import sqrt
from typing import Any

import pytest

from fixtures.report import make, training
from steelyard.metrics import repeat_groups
from steelyard.metrics.estimates import Estimate
from steelyard.metrics.repeat_groups import MetricSpread, RepeatGroup
from steelyard.record.record import Record, Restart

INTERVAL = {"status": "invalid", "reasons": [{"code": "interval", "text": "too wide"}]}
QUALITY = {
    "status": "invalid",
    "reasons": [{"code": "interval", "text": "too wide"}, {"code": "quality", "text": "too low"}],
}
FAILED = {
    "status": "failed",
    "reasons": [{"code": "hang", "text": "no sign of life"}],
    "case__key": "unknown",
    "weights": {"source": None},
}


def run(
    rate: float | None, acc: float = 0.5, ends: tuple[float, float] | None = None, **changes: Any
) -> Record:
    """Return a run with this rate and accuracy; `interval` is that of the rate and `changes`
    replaces fields.
    """
    metrics = {
        "tokens_per_device_s": {"value": rate, "unit": "tokens/s/device", "interval": ends},
        "acc": {"value": acc, "unit": "fraction"},
        "mfu": {"value": None if rate is None else rate / 400, "unit": "fraction"},
        "mem": {"value": 10.0, "unit": "GiB"},
        "energy_per_token": {"value": None, "unit": "J/token", "note": "no counter"},
    }
    return make(**({"metrics": metrics} | changes))


def group(*records: Record) -> RepeatGroup:
    """Return the only group of repeats among the records."""
    [found] = repeat_groups.find_repeat_groups(records)
    return found


def by_name(found: RepeatGroup) -> dict[str, MetricSpread]:
    """Return the spread of each metric by the metric's name."""
    return {one.name: one for one in found.metrics}


def test_mean_spread_and_interval_between_runs() -> None:
    """98, 100 and 102: a deviation of 2, and Student's t of two degrees of freedom. Their own
    intervals are not used.
    """
    found = group(
        *(run(rate, acc, (1.0, 1000.0)) for rate, acc in ((98.0, 0.4), (100.0, 0.5), (102.0, 0.6)))
    )
    half = 4.303 * 2 / sqrt(3)
    told = by_name(found)
    assert list(told) == ["rate", "mfu", "mem", "acc"]  # energy is unknown
    rate = told["rate"]
    assert (rate.unit, rate.runs, rate.mean.value, rate.source) == ("tokens/s", 3, 100.0, "runs")
    assert rate.mean.interval == pytest.approx((100 - half, 100 + half), rel=1e-12)
    assert (rate.deviation, rate.lowest, rate.highest) == (pytest.approx(0.02), 98.0, 102.0)
    assert told["mfu"].mean.value == pytest.approx(0.25)
    assert told["mfu"].deviation == pytest.approx(0.02)
    assert told["mem"] == MetricSpread(
        "mem", "GiB", 3, Estimate(10.0, (10.0, 10.0)), "runs", 0.0, 10.0, 10.0
    )
    assert told["acc"].mean.value == pytest.approx(0.5)
    assert told["acc"].deviation == pytest.approx(0.2)


def test_the_rate_is_that_of_all_devices() -> None:
    plan = {"nodes": 1, "devices": 4, "tp": 1, "pp": 1, "dp": 4, "launcher": "local"}
    assert by_name(group(run(100.0, plan=plan), run(100.0, plan=plan)))["rate"].mean == Estimate(
        400.0, (400.0, 400.0)
    )


def test_one_valid_run_has_its_own_interval() -> None:
    found = group(run(100.0, 0.5, (95.0, 105.0)), run(50.0, 0.1, **QUALITY))
    told = by_name(found)
    assert told["rate"] == MetricSpread(
        "rate", "tokens/s", 1, Estimate(100.0, (95.0, 105.0)), "steps", None, 100.0, 100.0
    )
    assert told["acc"] == MetricSpread("acc", "fraction", 1, Estimate(0.5), None, None, 0.5, 0.5)


def test_runs_that_are_not_valid_are_counted_and_not_averaged() -> None:
    records = [
        run(100.0),
        run(1.0, **INTERVAL),
        run(100.0),
        run(1.0, **QUALITY),
        run(100.0),
        run(None, **FAILED),
    ]
    found = group(*records)
    assert found.records == tuple(records)
    assert (len(found.valid), len(found.not_valid), found.interval_only) == (3, 3, 1)
    assert by_name(found)["rate"].mean == Estimate(100.0, (100.0, 100.0))


def test_a_run_with_an_interval_too_wide_stays_invalid_among_repeats_that_agree() -> None:
    found = group(*(run(100.0) for _ in range(5)), run(100.0, **INTERVAL))
    assert (by_name(found)["rate"].runs, found.interval_only) == (5, 1)


def test_no_valid_run_has_no_numbers() -> None:
    found = group(run(None, **FAILED), run(None, **FAILED))
    assert (found.metrics, found.valid, len(found.not_valid)) == ((), (), 2)
    assert group(run(1.0, **INTERVAL), run(None, **FAILED)).interval_only == 1


def test_a_metric_that_some_runs_lack_is_that_of_the_others() -> None:
    told = by_name(group(run(None), run(100.0), run(104.0)))
    assert (told["rate"].runs, told["rate"].mean.value, told["mem"].runs) == (2, 102.0, 3)
    # values beyond any machine count as unknown
    assert list(by_name(group(run(1e200), run(1e200)))) == ["mem", "acc"]


def test_a_quality_below_zero_has_an_interval_around_it() -> None:
    told = by_name(group(run(1.0, -1.0), run(1.0, -3.0)))["acc"]
    assert told.mean.value == -2.0
    assert told.mean.interval == pytest.approx((-2 - 12.706, -2 + 12.706))
    assert told.deviation == pytest.approx(sqrt(2) / 2)
    # a mean of 0 has no relative deviation
    assert by_name(group(run(1.0, -1.0), run(1.0, 1.0)))["acc"].deviation is None


def test_training_without_held_out_passes_has_its_loss() -> None:
    outputs = {"held_out": 4, "passes": {"train": {"stopped": None}}}
    found = group(training(outputs=outputs), training(outputs=outputs))
    assert [one.name for one in found.metrics] == ["rate", "mfu", "mem", "energy_per_token", "loss"]


OTHERS: dict[str, dict[str, Any]] = {
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


@pytest.mark.parametrize("what", OTHERS)
def test_runs_that_were_asked_something_else_are_no_repeats(what: str) -> None:
    assert repeat_groups.find_repeat_groups([run(1.0), run(1.0, **OTHERS[what])]) == []
    assert [
        len(one.records)
        for one in repeat_groups.find_repeat_groups(
            [run(1.0, **OTHERS[what]), run(1.0), run(1.0, **OTHERS[what])]
        )
    ] == [2]


def test_groups_come_in_the_order_of_their_first_runs() -> None:
    one, other = {"tune__batch_tokens": 8}, {"tune__batch_tokens": 16}
    records = [
        run(2.0, **other),
        run(1.0, **one),
        run(None, **FAILED, **other),
        run(1.0, **one),
        run(1.0),
    ]
    found = repeat_groups.find_repeat_groups(records)
    assert [[record.tune.batch_tokens for record in group.records] for group in found] == [
        [16, 16],
        [8, 8],
    ]
    assert repeat_groups.find_repeat_groups([]) == []
