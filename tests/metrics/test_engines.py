"""Comparisons of engines over made records: every number worked out by hand."""

from math import sqrt
from typing import Any

import pytest

from fixtures.engines import WINDOW, scored, trained, with_tokens
from steelyard.metrics import engine_groups, stats
from steelyard.metrics.engine_groups import AnswerDifferences, EngineGroup, StepDifference
from steelyard.metrics.estimates import Estimate
from steelyard.record.record import Record
from steelyard.record.run_facts import Restart
from steelyard.tasks.task import Differences


def group(*records: Record) -> EngineGroup:
    """Return the only group of engines that the records make."""
    [found] = engine_groups.find_engine_groups(records)
    return found


def test_answers_are_compared_with_engine_torchs() -> None:
    found = group(scored("other", "ABCDABBA", rate=50.0, acc=0.25), scored("torch", "ABCDABC?"))
    assert [row.name for row in found.rows] == ["torch", "other"]
    assert found.base.answers is None
    # a question without an answer in one run is compared in neither
    assert found.rows[1].answers == AnswerDifferences(Differences(7, 1), None, None, 0.25)
    assert [row.quality for row in found.rows] == [0.5, 0.25]
    assert [row.rate for row in found.rows] == [Estimate(100.0), Estimate(50.0)]
    assert [row.ratio for row in found.rows] == [Estimate(1.0), Estimate(0.5)]
    assert (found.metric, found.unit, found.without) == ("acc", "tokens/s", ())


def test_without_engine_torch_the_first_is_the_base() -> None:
    found = group(scored("b", "A" * 8), scored("a", "B" * 8))
    assert [(row.name, row.is_base) for row in found.rows] == [("b", True), ("a", False)]
    assert found.rows[1].answers == AnswerDifferences(Differences(8, 8), None, None, 0.0)


def test_of_several_runs_the_farthest_counts_and_the_bases_own_show_what_chance_does() -> None:
    runs = [scored("torch", "AAAAAAAA", 100.0, 0.5), scored("other", "AAAAAABB", 40.0, 0.25)]
    runs += [
        scored("torch", "AAAAAAAB", 104.0, 0.75),
        scored("other", "AAAAAAAA", 44.0, 0.75, metrics__mem={"value": 12.0, "unit": "GiB"}),
    ]
    found = group(*runs)
    assert found.rows[0].answers == AnswerDifferences(Differences(8, 1), None, None, 0.25)
    assert found.rows[1].answers == AnswerDifferences(Differences(8, 2), None, None, 0.25)
    assert [row.quality for row in found.rows] == [0.625, 0.5]
    assert [row.mem for row in found.rows] == [10.0, 12.0]
    half = stats.student_t_95(1) * sqrt(8.0 / 2)
    assert found.rows[0].rate is not None
    assert found.rows[0].rate.value == 102.0
    assert found.rows[0].rate.interval == pytest.approx((102 - half, 102 + half))
    assert [row.source for row in found.rows] == ["runs", "runs"]
    assert found.rows[1].ratio is not None
    assert found.rows[1].ratio.value == 42 / 102


def test_likeliest_tokens_are_compared_where_both_have_them() -> None:
    one, other = (
        with_tokens("torch", "ABCDABCD", [90, 91]),
        with_tokens("other", "ABCDBBCD", [90, 92]),
    )
    found = group(one, other, scored("old", "ABCDABCD"))
    assert [row.answers and row.answers.chosen for row in found.rows] == [
        None,
        Differences(8, 1, tokens=2),  # one answer letter, and one other token
        Differences(8, 0),
    ]
    both = engine_groups.merge_farthest(
        [engine_groups.compare_answers(one, record, "acc") for record in (one, other)]
    )
    assert both.chosen == Differences(8, 1, tokens=2)


def test_a_run_that_is_not_valid_has_answers_and_no_rate() -> None:
    found = group(scored("torch", "AAAAAAAA"), scored("other", "AAAAAAAB", status="invalid"))
    other = found.rows[1]
    assert other.answers == AnswerDifferences(Differences(8, 1), None, None, 0.0)
    assert (
        other.rate,
        other.ratio,
        other.mfu,
        other.mem,
        other.valid_count,
        len(other.records),
    ) == (
        None,
        None,
        None,
        10.0,
        0,
        1,
    )
    both = group(
        scored("torch", "A" * 8),
        scored("other", "A" * 8, 50.0, status="invalid"),
        scored("other", "A" * 8, 25.0),
    )
    assert (both.rows[1].rate, both.rows[1].valid_count, len(both.rows[1].records)) == (
        Estimate(25.0),
        1,
        2,
    )
    base = group(scored("torch", "A" * 8, status="invalid"), scored("other", "B" * 8))
    assert [row.ratio for row in base.rows] == [None, None]


def test_an_engine_whose_runs_all_failed_is_named() -> None:
    failed = scored(
        "lost", "A" * 8, status="failed", case__key="0" * 16, passes=[], outputs={}, metrics={}
    )
    found = group(scored("torch", "A" * 8), failed, scored("other", "A" * 8))
    assert (found.without, len(found.records)) == (("lost",), 2)
    again = scored("other", "A" * 8, status="failed", passes=[], outputs={}, metrics={})
    assert group(scored("torch", "A" * 8), again, scored("other", "A" * 8)).without == ()
    assert engine_groups.find_engine_groups([scored("torch", "A" * 8), failed]) == []


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
        {"passes": [WINDOW | {"pass": "val"}]},
        {"environment__hardware__devices": [{"name": "another"}]},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_records_that_differ_in_more_than_the_engine_are_not_compared(
    changes: dict[str, Any],
) -> None:
    assert (
        engine_groups.find_engine_groups(
            [scored("torch", "A" * 8), scored("other", "A" * 8, **changes)]
        )
        == []
    )


def test_one_engine_is_none_to_compare() -> None:
    assert (
        engine_groups.find_engine_groups([scored("torch", "A" * 8), scored("torch", "B" * 8)]) == []
    )
    assert engine_groups.find_engine_groups([]) == []


def with_norms(record: Record, norms: list[float | None]) -> Record:
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
    ours = trained("torch", [9.0, 8.0, 7.0, 6.0])
    theirs = with_norms(trained("other", [9.0, 8.25, 6.5, 6.0]), [1.0, 2.0, 3.0, 2.0])
    found = group(theirs, ours)
    answers = found.rows[1].answers
    # equal held-out losses: a difference of 0.0
    assert answers == AnswerDifferences(None, StepDifference(0.5, 2), StepDifference(2.0, 3), 0.0)
    assert found.metric == "loss_after"
    assert [row.quality for row in found.rows] == [6.0, 6.0]


def test_a_value_that_is_not_finite_makes_a_difference_unknown() -> None:
    ours = trained("torch", [9.0, 8.0, 7.0, 6.0])
    theirs = with_norms(trained("other", [9.0, 8.0, 7.0, 6.0]), [1.0, None, 3.0, 4.0])
    found = group(ours, theirs, trained("other", [9.0, 8.0, 7.0, 6.5])).rows[1].answers
    assert found == AnswerDifferences(
        None, StepDifference(0.5, 3), None, 0.0
    )  # of one of two runs, so of both


def test_without_held_out_passes_the_loss_of_the_last_steps_stands_for_quality() -> None:
    outputs = {"held_out": 4, "passes": {"train": {"stopped": None}}}
    found = group(
        trained("torch", [9.0, 8.0, 7.0, 6.0], outputs=outputs),
        trained("other", [9.0, 8.0, 7.0, 6.5], outputs=outputs),
    )
    assert (found.metric, [row.quality for row in found.rows]) == ("loss", [6.0, 6.5])
    assert found.rows[1].answers == AnswerDifferences(
        None, StepDifference(0.5, 3), StepDifference(0.0, 0), 0.5
    )


def test_norms_of_a_run_that_goes_on_are_not_those_of_its_first_steps() -> None:
    restart = Restart(record="ab" * 16, step=1, plan="TP1PP1DP1", losses=[9.5])
    ours = trained("torch", [9.0, 8.0, 7.0, 6.0])
    theirs = trained("other", [8.0, 7.0, 6.0, 5.0]).model_copy(update={"restarts": [restart]})
    assert group(ours, theirs).rows[1].answers == AnswerDifferences(
        None, StepDifference(0.5, 0), None, 0.0
    )
