"""Test scoring of ReCoRD with values worked out by hand."""

from typing import Any

import pytest

from steelyard.data.cloze_samples import ClozeSample
from steelyard.tasks.superglue_record import score
from steelyard.tasks.superglue_record.task import TASK
from steelyard.tasks.task import Breakdown, Differences, Tally


def make_sample(texts: str, answers: str, right: tuple[int, ...]) -> ClozeSample:
    """Return a cloze sample with candidates and answers separated by `|` and the positions of the
    right candidates.
    """
    candidates = tuple(texts.split("|"))
    return ClozeSample(
        (1, 2, 3), 1, ((7,),) * len(candidates), right, candidates, tuple(answers.split("|")), "1-1"
    )


HELD_OUT = [
    make_sample("Bob Ray|the U.S.|Ray", "Ray|Bob Ray", (0, 2)),
    make_sample("a New York Times|York|The Bronx", "New York", ()),
    make_sample("one|two", "two", (1,)),
    make_sample("x|y|z", "x", (0,)),
]
NO_PASSES = score.make_cloze_outputs(HELD_OUT)


def make_evaluation(
    step: int, *choices: tuple[int, int], samples: int | None = None
) -> dict[str, Any]:
    """Return one evaluation as an engine reports it: its step, the samples trained on (8 per step
    unless given), and (question, candidate) pairs.
    """
    return {
        "step": step,
        "samples": 8 * step if samples is None else samples,
        "choices": [list(pair) for pair in choices],
    }


RANK_0 = {
    "stopped": None,
    "evaluations": [make_evaluation(0, (3, 1), (0, 1)), make_evaluation(5, (3, 0), (0, 2))],
}
RANK_1 = {
    "stopped": None,
    "evaluations": [make_evaluation(0, (1, 2), (2, 1)), make_evaluation(5, (1, 0), (2, 0))],
}
ONE_PASS = score.merge_cloze_outputs(NO_PASSES, "train", [RANK_0, RANK_1])


def dump_passes(outputs: score.ClozeOutputs) -> dict[str, Any]:
    """Return the outputs of each pass as they are written to a record."""
    passes_json: dict[str, Any] = outputs.model_dump(mode="json")["passes"]
    return passes_json


@pytest.mark.parametrize(
    ("text", "answer", "em", "f1"),
    [
        ("Bob Ray", "bob  RAY", 1, 1.0),
        ("The U.S.", "us", 1, 1.0),
        ("O'Brien-Smith", "obriensmith", 1, 1.0),
        ("an apple a day", "the apple day", 1, 1.0),
        ("theory", "ory", 0, 0.0),
        ("Bob Ray", "Ray", 0, 2 * 1 * 0.5 / 1.5),
        ("Ray Ray Bob", "Ray Bob Eve Ann", 0, 2 * (2 / 3) * (2 / 4) / (2 / 3 + 2 / 4)),
        ("Ray Ray Bob", "Ray Ann Ray", 0, 2 / 3),
        ("Ray Ray", "Ray", 0, 2 * 0.5 * 1 / 1.5),
        ("Ray", "Bob", 0, 0.0),
        ("the", "a", 1, 0.0),  # both are articles: nothing is left to compare
        ("“Ray”", "Ray", 0, 0.0),  # only ASCII punctuation is removed
    ],
)
def test_exact_match_and_f1_follow_the_record_evaluation_script(
    text: str, answer: str, em: int, f1: float
) -> None:
    assert score.match_exactly(text, answer) == em
    assert (
        score.compute_f1(text, answer)
        == score.compute_f1(answer, text)
        == pytest.approx(f1, rel=1e-12)
    )


def test_a_candidate_has_its_best_score_over_the_answers() -> None:
    assert NO_PASSES.model_dump(mode="json") == {
        "items": 4,
        "right": [[0, 2], [], [1], [0]],
        "em": [[1, 0, 1], [0, 0, 0], [0, 1], [1, 0, 0]],
        "f1": [[1.0, 0.0, 1.0], [0.8, 0.666667, 0.0], [0.0, 1.0], [1.0, 0.0, 0.0]],
        "passes": {},
    }


def test_ranks_merge_in_the_order_of_the_questions() -> None:
    assert dump_passes(ONE_PASS) == {
        "train": {
            "evaluations": [
                {
                    "step": 0,
                    "samples": 0,
                    "choices": [[0, 1], [1, 2], [2, 1], [3, 1]],
                    "repeated": 0,
                },
                {
                    "step": 5,
                    "samples": 40,
                    "choices": [[0, 2], [1, 0], [2, 0], [3, 0]],
                    "repeated": 0,
                },
            ],
            "stopped": None,
        }
    }
    assert score.merge_cloze_outputs(NO_PASSES, "train", [RANK_1, RANK_0]) == ONE_PASS
    assert NO_PASSES.passes == {}
    two_passes = score.merge_cloze_outputs(
        ONE_PASS, "after", [{"evaluations": [make_evaluation(5, (2, 1))]}]
    )
    assert dump_passes(two_passes)["train"] == dump_passes(ONE_PASS)["train"]
    assert dump_passes(two_passes)["after"] == {
        "evaluations": [{"step": 5, "samples": 40, "choices": [[2, 1]], "repeated": 0}]
    }


def test_scores_of_the_last_evaluation_by_hand() -> None:
    assert score.score_cloze_outputs(ONE_PASS, "train") == {
        "acc": 2 / 4,
        "em": 2 / 4,
        "f1": pytest.approx((1 + 0.8 + 0 + 1) / 4, rel=1e-12),
        "se": (0.5 * 0.5 / 4) ** 0.5,
    }
    assert score.list_accuracies(ONE_PASS, "train") == [(0, 0, 1 / 4), (5, 40, 2 / 4)]
    assert score.tally_cloze_answers(ONE_PASS, "train") == Tally(4, 0, 0, 0)
    assert TASK.agreement is None
    assert score.make_cloze_breakdowns(
        score.merge_cloze_outputs(ONE_PASS, "after", [{"evaluations": [make_evaluation(6)]}])
    ) == [
        Breakdown(
            ("Evaluations", "评估过程"),
            (("after step", "步数之后"), ("samples trained on", "已训练样本数"), ("acc", "acc")),
            ((0, 0, 1 / 4), (5, 40, 2 / 4), (6, 48, None)),
        )
    ]


def test_a_missing_answer_does_not_count_as_wrong() -> None:
    outputs = score.merge_cloze_outputs(NO_PASSES, "train", [RANK_0])
    assert score.score_cloze_outputs(outputs, "train") == {
        "acc": 1.0,
        "em": 1.0,
        "f1": 1.0,
        "se": 0.0,
    }
    assert [acc for *_, acc in score.list_accuracies(outputs, "train")] == [0.0, 1.0]
    assert score.tally_cloze_answers(outputs, "train") == Tally(4, 2, 0, 0)


def test_an_evaluation_that_one_rank_lacks_is_not_lost() -> None:
    one_evaluation = {**RANK_1, "evaluations": RANK_1["evaluations"][:1]}
    outputs = score.merge_cloze_outputs(NO_PASSES, "train", [one_evaluation, RANK_0])
    assert [
        evaluation_json["choices"]
        for evaluation_json in dump_passes(outputs)["train"]["evaluations"]
    ] == [[[0, 1], [1, 2], [2, 1], [3, 1]], [[0, 2], [3, 0]]]
    assert score.tally_cloze_answers(outputs, "train") == Tally(4, 2, 0, 0)


def test_scores_that_are_not_finite_count_as_wrong() -> None:
    outputs = score.merge_cloze_outputs(
        NO_PASSES,
        "before",
        [{"evaluations": [make_evaluation(0, (0, -1), (1, -1), (2, 1), (3, 1))]}],
    )
    assert score.score_cloze_outputs(outputs, "before") == {
        "acc": 1 / 4,
        "em": 1 / 4,
        "f1": 1 / 4,
        "se": pytest.approx((0.25 * 0.75 / 4) ** 0.5, rel=1e-15),
    }
    assert score.tally_cloze_answers(outputs, "before") == Tally(4, 0, 0, 2)


def test_repeated_answers_are_counted_and_the_last_one_counts() -> None:
    repeats = {"evaluations": [make_evaluation(0, (2, 1), (2, 0), (3, 2))]}
    outputs = score.merge_cloze_outputs(
        NO_PASSES, "after", [{"evaluations": [make_evaluation(0, (3, 0))]}, repeats]
    )
    assert dump_passes(outputs)["after"]["evaluations"][0]["choices"] == [[2, 0], [3, 2]]
    assert score.tally_cloze_answers(outputs, "after") == Tally(4, 2, 2, 0)


@pytest.mark.parametrize(
    "found",
    [
        score.make_cloze_outputs([]),
        NO_PASSES,
        score.merge_cloze_outputs(NO_PASSES, "train", []),
        score.merge_cloze_outputs(NO_PASSES, "train", [{"stopped": None, "evaluations": []}]),
    ],
)
def test_a_pass_without_evaluations_has_no_score(found: score.ClozeOutputs) -> None:
    assert score.score_cloze_outputs(found, "train") == {}
    assert score.list_accuracies(found, "train") == []
    assert score.tally_cloze_answers(found, "train") is None
    assert score.make_cloze_breakdowns(found) == []


def test_an_evaluation_without_answers_has_no_score() -> None:
    outputs = score.merge_cloze_outputs(
        NO_PASSES, "train", [{"stopped": None, "evaluations": [make_evaluation(3)]}]
    )
    assert score.score_cloze_outputs(outputs, "train") == {}
    assert score.list_accuracies(outputs, "train") == [(3, 24, None)]
    assert score.tally_cloze_answers(outputs, "train") == Tally(4, 4, 0, 0)


def test_the_earliest_stop_of_all_ranks_is_recorded() -> None:
    stops = [None, {"step": 9, "why": "nan"}, {"step": 7, "why": "target"}]
    rank_outputs = [{"stopped": stop, "evaluations": []} for stop in stops]
    assert dump_passes(score.merge_cloze_outputs(NO_PASSES, "train", rank_outputs))["train"][
        "stopped"
    ] == {"step": 7, "why": "target"}


@pytest.mark.parametrize(
    "table",
    [
        RANK_0,
        {"stopped": {"step": 5, "why": "target", "value": 0.9}, "evaluations": []},
        {"evaluations": [make_evaluation(0, (0, -1), (1, 2))]},
        {"evaluations": [make_evaluation(0)]},
    ],
)
def test_valid_outputs_are_copied_unchanged(table: dict[str, Any]) -> None:
    checked = score.check_cloze_outputs(table, NO_PASSES)
    assert checked == table
    assert checked["evaluations"] is not table["evaluations"]


def test_pairs_may_be_tuples_and_become_lists() -> None:
    rank_outputs = {"evaluations": [{"step": 0, "samples": 0, "choices": [(0, 1)]}]}
    assert score.check_cloze_outputs(rank_outputs, NO_PASSES)["evaluations"][0]["choices"] == [
        [0, 1]
    ]


MUST_BE_PASS_OUTPUTS = (
    "the engine's outputs must be `stopped` and `evaluations` of the steps, or `evaluations` alone"
)
MUST_BE_EVALUATIONS = "the engine's outputs must be tables as evaluations: choices, samples, step"
MUST_BE_PAIRS = "the engine's outputs must be a list of pairs of integers: choices of an evaluation"
OUT_OF_RANGE = (
    "the engine's outputs name a question outside 0 to 3, or a candidate that it does not have"
)
MUST_BE_STOP = "the engine's outputs must be None or a table with a step: stopped"


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        (None, MUST_BE_PASS_OUTPUTS),
        ([], MUST_BE_PASS_OUTPUTS),
        ({}, MUST_BE_PASS_OUTPUTS),
        ({"stopped": None}, MUST_BE_PASS_OUTPUTS),
        ({"evaluations": [], "more": 1}, MUST_BE_PASS_OUTPUTS),
        ({"evaluations": {}}, "the engine's outputs must be a list: evaluations"),
        ({"evaluations": [7]}, MUST_BE_EVALUATIONS),
        ({"evaluations": [{"step": 0, "choices": []}]}, MUST_BE_EVALUATIONS),
        ({"evaluations": [{**make_evaluation(0), "loss": 1.0}]}, MUST_BE_EVALUATIONS),
        *(
            (
                {"evaluations": [{**make_evaluation(0), name: value}]},
                f"the engine's outputs must be an integer from 0 on: {name} of",
            )
            for name in ("step", "samples")
            for value in (-1, 1.0, True, None)
        ),
        *(
            ({"evaluations": [{**make_evaluation(0), "choices": value}]}, MUST_BE_PAIRS)
            for value in (
                None,
                ((0, 1),),
                [0, 1],
                [[0]],
                [[0, 1, 2]],
                [[0, 1.0]],
                [[True, 1]],
                ["01"],
                [[0, None]],
            )
        ),
        ({"stopped": 5, "evaluations": []}, MUST_BE_STOP),
        ({"stopped": {"why": "nan"}, "evaluations": []}, MUST_BE_STOP),
        ({"stopped": {"step": 5.0}, "evaluations": []}, MUST_BE_STOP),
    ],
)
def test_outputs_of_the_wrong_type_are_refused(table: Any, reason: str) -> None:
    with pytest.raises(TypeError) as error:
        score.check_cloze_outputs(table, NO_PASSES)
    assert str(error.value).startswith(reason)


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        (
            {"evaluations": []},
            "the engine's outputs have 0 evaluations; a pass without steps has one",
        ),
        (
            {"evaluations": [make_evaluation(0), make_evaluation(1)]},
            "the engine's outputs have 2 evaluations; a pass without steps has one",
        ),
        ({"evaluations": [make_evaluation(0, (4, 0))]}, OUT_OF_RANGE),
        ({"evaluations": [make_evaluation(0, (-1, 0))]}, OUT_OF_RANGE),
        ({"evaluations": [make_evaluation(0, (0, 0), (2, 2))]}, OUT_OF_RANGE),
        ({"evaluations": [make_evaluation(0, (0, -2))]}, OUT_OF_RANGE),
        (
            {"stopped": None, "evaluations": [make_evaluation(5), make_evaluation(5)]},
            (
                "the engine's outputs have evaluations at the steps [5, 5]; each is later than the"
                " one before"
            ),
        ),
        (
            {"stopped": None, "evaluations": [make_evaluation(5), make_evaluation(4)]},
            (
                "the engine's outputs have evaluations at the steps [5, 4]; each is later than the"
                " one before"
            ),
        ),
    ],
)
def test_impossible_outputs_are_refused(table: Any, reason: str) -> None:
    with pytest.raises(ValueError) as error:
        score.check_cloze_outputs(table, NO_PASSES)
    assert str(error.value) == reason


def test_differences_compare_last_evaluations_after_the_same_step() -> None:
    other_outputs = score.merge_cloze_outputs(
        NO_PASSES,
        "train",
        [{"stopped": None, "evaluations": [make_evaluation(5, (0, 2), (1, 1), (2, 1))]}],
    )
    # of questions 0, 1 and 2, questions 1 and 2 have another candidate
    assert score.compare_cloze_outputs(ONE_PASS, other_outputs, "train") == Differences(3, 2)
    later_step = score.merge_cloze_outputs(
        NO_PASSES, "train", [{"stopped": None, "evaluations": [make_evaluation(6, (0, 2))]}]
    )
    assert score.compare_cloze_outputs(ONE_PASS, later_step, "train") is None
    assert score.compare_cloze_outputs(ONE_PASS, NO_PASSES, "train") is None
    assert TASK.differences is score.compare_cloze_outputs
