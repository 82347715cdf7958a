"""Comparisons of engines over made records: every number worked out by hand."""

from math import sqrt
from typing import Any

import pytest

from fixtures.engines import (
    INFER_WINDOW,
    make_record_with_tokens,
    make_scoring_record,
    make_trained_record,
)
from fixtures.report import WITHOUT_INTERVAL
from steelyard.metrics import engine_groups, ratio, standing, stats
from steelyard.metrics.engine_groups import AnswerDifferences, EngineGroup, StepDifference
from steelyard.metrics.estimates import Estimate
from steelyard.metrics.ratio import Ratio
from steelyard.record.record import Record
from steelyard.record.run_facts import Restart
from steelyard.tasks.task import Differences


def compare_engines(*records: Record) -> EngineGroup:
    """Return the only group of engines that the records make."""
    [comparison] = engine_groups.find_engine_groups(records)
    return comparison


def test_answers_are_compared_with_those_of_engine_torch() -> None:
    comparison = compare_engines(
        make_scoring_record("other", "ABCDABBA", rate=50.0, acc=0.25),
        make_scoring_record("torch", "ABCDABC?"),
    )
    assert [row.name for row in comparison.rows] == ["torch", "other"]
    assert comparison.base.answers is None
    # a question without an answer in one run is compared in neither
    assert comparison.rows[1].answers == AnswerDifferences(Differences(7, 1), None, None, 0.25)
    assert [row.quality for row in comparison.rows] == [0.5, 0.25]
    assert [row.rate for row in comparison.rows] == [
        Estimate(100.0, (99.0, 101.0)),
        Estimate(50.0, (49.5, 50.5)),
    ]
    assert [row.source for row in comparison.rows] == ["steps", "steps"]
    # the intervals are of steps inside single runs, so their ratio has none
    assert [row.ratio for row in comparison.rows] == [
        Ratio(1.0, None, "not tested"),
        Ratio(pytest.approx(0.5), None, "not tested"),
    ]
    assert (comparison.metric, comparison.unit, comparison.without) == ("acc", "tokens/s", ())


def test_without_engine_torch_the_first_is_the_base() -> None:
    comparison = compare_engines(
        make_scoring_record("b", "A" * 8), make_scoring_record("a", "B" * 8)
    )
    assert [(row.name, row.is_base) for row in comparison.rows] == [("b", True), ("a", False)]
    assert comparison.rows[1].answers == AnswerDifferences(Differences(8, 8), None, None, 0.0)


def test_of_several_runs_the_largest_difference_counts() -> None:
    runs = [
        make_scoring_record("torch", "AAAAAAAA", 100.0, 0.5),
        make_scoring_record("other", "AAAAAABB", 40.0, 0.25),
    ]
    runs += [
        make_scoring_record("torch", "AAAAAAAB", 104.0, 0.75),
        make_scoring_record(
            "other", "AAAAAAAA", 44.0, 0.75, metrics__mem={"value": 12.0, "unit": "GiB"}
        ),
    ]
    comparison = compare_engines(*runs)
    assert comparison.rows[0].answers == AnswerDifferences(Differences(8, 1), None, None, 0.25)
    assert comparison.rows[1].answers == AnswerDifferences(Differences(8, 2), None, None, 0.25)
    assert [row.quality for row in comparison.rows] == [0.625, 0.5]
    assert [row.mem for row in comparison.rows] == [10.0, 12.0]
    half = stats.student_t_95(1) * sqrt(8.0 / 2)
    assert comparison.rows[0].rate is not None
    assert comparison.rows[0].rate.value == 102.0
    assert comparison.rows[0].rate.interval == pytest.approx((102 - half, 102 + half))
    assert [row.source for row in comparison.rows] == ["runs", "runs"]
    assert comparison.rows[1].ratio == ratio.compare_values([100.0, 104.0], [40.0, 44.0])
    assert comparison.rows[1].ratio is not None
    assert comparison.rows[1].ratio.value == pytest.approx(sqrt(40 * 44 / (100 * 104)))
    assert comparison.rows[1].ratio.verdict == "significant"


def test_likeliest_tokens_are_compared_where_both_have_them() -> None:
    torch_run, other_run = (
        make_record_with_tokens("torch", "ABCDABCD", [90, 91]),
        make_record_with_tokens("other", "ABCDBBCD", [90, 92]),
    )
    comparison = compare_engines(torch_run, other_run, make_scoring_record("old", "ABCDABCD"))
    assert [row.answers and row.answers.chosen for row in comparison.rows] == [
        None,
        Differences(8, 1, tokens=2),  # one answer letter, and one other token
        Differences(8, 0),
    ]
    answers = engine_groups.merge_farthest(
        [
            engine_groups.compare_answers(torch_run, record, "acc")
            for record in (torch_run, other_run)
        ]
    )
    assert answers.chosen == Differences(8, 1, tokens=2)


def test_a_run_that_is_not_valid_has_answers_and_no_rate() -> None:
    comparison = compare_engines(
        make_scoring_record("torch", "AAAAAAAA"),
        make_scoring_record("other", "AAAAAAAB", status="invalid"),
    )
    other_row = comparison.rows[1]
    assert other_row.answers == AnswerDifferences(Differences(8, 1), None, None, 0.0)
    assert (
        other_row.rate,
        other_row.ratio,
        other_row.mfu,
        other_row.mem,
        other_row.uncounted_rate,
        other_row.counted,
        len(other_row.records),
    ) == (None, None, None, 10.0, 100.0, (), 1)
    mixed = compare_engines(
        make_scoring_record("torch", "A" * 8),
        make_scoring_record("other", "A" * 8, 50.0, status="invalid"),
        make_scoring_record("other", "A" * 8, 25.0),
    )
    row = mixed.rows[1]
    assert (row.rate, row.uncounted_rate, len(row.counted), len(row.records)) == (
        Estimate(25.0, (24.75, 25.25)),
        50.0,
        1,
        2,
    )
    invalid_base = compare_engines(
        make_scoring_record("torch", "A" * 8, status="invalid"),
        make_scoring_record("other", "B" * 8),
    )
    assert [row.ratio for row in invalid_base.rows] == [None, None]


def make_unproven_runs(engine: str, *rates: float) -> list[Record]:
    """Return one valid run without an interval for each rate."""
    return [make_scoring_record(engine, "A" * 8, rate, **WITHOUT_INTERVAL) for rate in rates]


def test_unproven_runs_have_answers_and_no_rate() -> None:
    comparison = compare_engines(
        make_scoring_record("torch", "A" * 8), *make_unproven_runs("other", 40.0, 44.0)
    )
    row = comparison.rows[1]
    assert row.answers == AnswerDifferences(Differences(8, 0), None, None, 0.0)
    assert (row.rate, row.source, row.ratio, row.mfu) == (None, None, None, None)
    assert (row.counted, row.uncounted_rate, len(row.records)) == ((), 42.0, 2)


def test_three_unproven_runs_of_an_engine_have_a_proven_rate() -> None:
    torch_runs = make_unproven_runs("torch", 99.5, 100.0, 100.5)
    comparison = compare_engines(*torch_runs, *make_unproven_runs("other", 49.75, 50.0, 50.25))
    half = 4.303 * 0.5 / sqrt(3)
    base, row = comparison.rows
    assert base.rate == Estimate(100.0, pytest.approx((100 - half, 100 + half)))
    assert [item.source for item in comparison.rows] == ["runs", "runs"]
    assert row.ratio == ratio.compare_values([99.5, 100.0, 100.5], [49.75, 50.0, 50.25])
    assert row.ratio is not None
    assert (row.ratio.value, row.ratio.verdict) == (pytest.approx(0.5), "significant")
    assert (len(row.counted), row.uncounted_rate, row.mfu) == (3, None, 0.25)
    assert {standing.find_status(record) for record in row.counted} == {"unproven"}


def test_an_engine_whose_runs_all_failed_is_named() -> None:
    failed = make_scoring_record(
        "lost", "A" * 8, status="failed", case__key="0" * 16, passes=[], outputs={}, metrics={}
    )
    comparison = compare_engines(
        make_scoring_record("torch", "A" * 8), failed, make_scoring_record("other", "A" * 8)
    )
    assert (comparison.without, len(comparison.records)) == (("lost",), 2)
    failed_other = make_scoring_record(
        "other", "A" * 8, status="failed", passes=[], outputs={}, metrics={}
    )
    assert (
        compare_engines(
            make_scoring_record("torch", "A" * 8),
            failed_other,
            make_scoring_record("other", "A" * 8),
        ).without
        == ()
    )
    assert engine_groups.find_engine_groups([make_scoring_record("torch", "A" * 8), failed]) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"case__key": "0" * 16},
        {"case__precision": "fp16"},
        {"case__division": "open"},
        {"scope": {"kind": "window", "sample": 4}},
        {"scope": {"kind": "window", "steps": 4}},
        {"tune__batch_tokens": 7},
        {"weights": {"source": "random", "seed": 1}},
        {"plan": {"nodes": 1, "devices": 2, "tp": 1, "pp": 1, "dp": 2, "launcher": "local"}},
        {"passes": [INFER_WINDOW | {"pass": "val"}]},
        {"environment__hardware__devices": [{"name": "another"}]},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_records_that_differ_in_more_than_the_engine_are_not_compared(
    changes: dict[str, Any],
) -> None:
    assert (
        engine_groups.find_engine_groups(
            [
                make_scoring_record("torch", "A" * 8),
                make_scoring_record("other", "A" * 8, **changes),
            ]
        )
        == []
    )


def test_one_engine_makes_no_comparison() -> None:
    assert (
        engine_groups.find_engine_groups(
            [make_scoring_record("torch", "A" * 8), make_scoring_record("torch", "B" * 8)]
        )
        == []
    )
    assert engine_groups.find_engine_groups([]) == []


def replace_norms(record: Record, norms: list[float | None]) -> Record:
    """Return a copy of the record with these gradient norms, one for each sample."""
    pairs = zip(record.samples, norms, strict=True)
    return record.model_copy(
        update={
            "samples": [
                s.model_copy(update={"values": s.values | {"grad_norm": n}}) for s, n in pairs
            ]
        }
    )


def test_training_is_compared_step_by_step() -> None:
    torch_run = make_trained_record("torch", [9.0, 8.0, 7.0, 6.0])
    other_run = replace_norms(
        make_trained_record("other", [9.0, 8.25, 6.5, 6.0]), [1.0, 2.0, 3.0, 2.0]
    )
    comparison = compare_engines(other_run, torch_run)
    answers = comparison.rows[1].answers
    # equal held-out losses: a difference of 0.0
    assert answers == AnswerDifferences(None, StepDifference(0.5, 2), StepDifference(2.0, 3), 0.0)
    assert comparison.metric == "loss_after"
    assert [row.quality for row in comparison.rows] == [6.0, 6.0]


def test_a_value_that_is_not_finite_makes_a_difference_unknown() -> None:
    torch_run = make_trained_record("torch", [9.0, 8.0, 7.0, 6.0])
    other_run = replace_norms(
        make_trained_record("other", [9.0, 8.0, 7.0, 6.0]), [1.0, None, 3.0, 4.0]
    )
    answers = (
        compare_engines(torch_run, other_run, make_trained_record("other", [9.0, 8.0, 7.0, 6.5]))
        .rows[1]
        .answers
    )
    assert answers == AnswerDifferences(
        None, StepDifference(0.5, 3), None, 0.0
    )  # of one of two runs, so of both


def test_without_held_out_passes_quality_is_the_loss_of_the_last_steps() -> None:
    outputs = {"held_out": 4, "passes": {"train": {"stopped": None}}}
    comparison = compare_engines(
        make_trained_record("torch", [9.0, 8.0, 7.0, 6.0], outputs=outputs),
        make_trained_record("other", [9.0, 8.0, 7.0, 6.5], outputs=outputs),
    )
    assert (comparison.metric, [row.quality for row in comparison.rows]) == ("loss", [6.0, 6.5])
    assert comparison.rows[1].answers == AnswerDifferences(
        None, StepDifference(0.5, 3), StepDifference(0.0, 0), 0.5
    )


def test_norms_of_a_resumed_run_are_not_compared() -> None:
    restart = Restart(record="ab" * 16, step=1, plan="TP1PP1DP1", losses=[9.5])
    torch_run = make_trained_record("torch", [9.0, 8.0, 7.0, 6.0])
    other_run = make_trained_record("other", [8.0, 7.0, 6.0, 5.0]).model_copy(
        update={"restarts": [restart]}
    )
    assert compare_engines(torch_run, other_run).rows[1].answers == AnswerDifferences(
        None, StepDifference(0.5, 0), None, 0.0
    )
