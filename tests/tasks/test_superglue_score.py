"""Test scoring of ReCoRD with values worked out by hand."""

from typing import Any

import pytest

from steelyard.data.cloze_samples import ClozeSample
from steelyard.tasks.superglue_record import score
from steelyard.tasks.superglue_record.task import TASK
from steelyard.tasks.task import Breakdown, Differences, Tally


def asked(texts: str, answers: str, right: tuple[int, ...]) -> ClozeSample:
    """Return a cloze sample with candidates and answers separated by `|` and the positions of the
    right candidates.
    """
    every = tuple(texts.split("|"))
    return ClozeSample(
        (1, 2, 3), 1, ((7,),) * len(every), right, every, tuple(answers.split("|")), "1-1"
    )


HELD = [
    asked("Bob Ray|the U.S.|Ray", "Ray|Bob Ray", (0, 2)),
    asked("a New York Times|York|The Bronx", "New York", ()),
    asked("one|two", "two", (1,)),
    asked("x|y|z", "x", (0,)),
]
COMMON = score.make_cloze_outputs(HELD)


def evaluation(step: int, *choices: tuple[int, int], samples: int | None = None) -> dict[str, Any]:
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
    "evaluations": [evaluation(0, (3, 1), (0, 1)), evaluation(5, (3, 0), (0, 2))],
}
RANK_1 = {
    "stopped": None,
    "evaluations": [evaluation(0, (1, 2), (2, 1)), evaluation(5, (1, 0), (2, 0))],
}
WHOLE = score.merge_cloze_outputs(COMMON, "train", [RANK_0, RANK_1])


def passes(found: score.ClozeOutputs) -> dict[str, Any]:
    """Return the outputs of each pass as they are written to a record."""
    table: dict[str, Any] = found.model_dump(mode="json")["passes"]
    return table


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
def test_texts_are_compared_as_record_does(text: str, answer: str, em: int, f1: float) -> None:
    assert score.match_exactly(text, answer) == em
    assert (
        score.compute_f1(text, answer)
        == score.compute_f1(answer, text)
        == pytest.approx(f1, rel=1e-12)
    )


def test_each_candidate_has_its_best_over_the_answers() -> None:
    assert COMMON.model_dump(mode="json") == {
        "items": 4,
        "right": [[0, 2], [], [1], [0]],
        "em": [[1, 0, 1], [0, 0, 0], [0, 1], [1, 0, 0]],
        "f1": [[1.0, 0.0, 1.0], [0.8, 0.666667, 0.0], [0.0, 1.0], [1.0, 0.0, 0.0]],
        "passes": {},
    }


def test_ranks_merge_in_the_order_of_the_questions() -> None:
    assert passes(WHOLE) == {
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
    assert score.merge_cloze_outputs(COMMON, "train", [RANK_1, RANK_0]) == WHOLE
    assert COMMON.passes == {}
    after = score.merge_cloze_outputs(WHOLE, "after", [{"evaluations": [evaluation(5, (2, 1))]}])
    assert passes(after)["train"] == passes(WHOLE)["train"]
    assert passes(after)["after"] == {
        "evaluations": [{"step": 5, "samples": 40, "choices": [[2, 1]], "repeated": 0}]
    }


def test_scores_by_hand_are_of_the_last_evaluation() -> None:
    assert score.score_cloze_outputs(WHOLE, "train") == {
        "acc": 2 / 4,
        "em": 2 / 4,
        "f1": pytest.approx((1 + 0.8 + 0 + 1) / 4, rel=1e-12),
        "se": (0.5 * 0.5 / 4) ** 0.5,
    }
    assert score.list_accuracies(WHOLE, "train") == [(0, 0, 1 / 4), (5, 40, 2 / 4)]
    assert score.tally_cloze_answers(WHOLE, "train") == Tally(4, 0, 0, 0)
    assert TASK.agreement is None
    assert score.make_cloze_breakdowns(
        score.merge_cloze_outputs(WHOLE, "after", [{"evaluations": [evaluation(6)]}])
    ) == [
        Breakdown(
            ("Evaluations", "评估过程"),
            (("after step", "步数之后"), ("samples trained on", "已训练样本数"), ("acc", "acc")),
            ((0, 0, 1 / 4), (5, 40, 2 / 4), (6, 48, None)),
        )
    ]


def test_a_missing_answer_is_no_wrong_answer() -> None:
    found = score.merge_cloze_outputs(COMMON, "train", [RANK_0])
    assert score.score_cloze_outputs(found, "train") == {
        "acc": 1.0,
        "em": 1.0,
        "f1": 1.0,
        "se": 0.0,
    }
    assert [acc for *_, acc in score.list_accuracies(found, "train")] == [0.0, 1.0]
    assert score.tally_cloze_answers(found, "train") == Tally(4, 2, 0, 0)


def test_an_evaluation_that_one_rank_lacks_is_not_lost() -> None:
    short = {**RANK_1, "evaluations": RANK_1["evaluations"][:1]}
    found = score.merge_cloze_outputs(COMMON, "train", [short, RANK_0])
    assert [one["choices"] for one in passes(found)["train"]["evaluations"]] == [
        [[0, 1], [1, 2], [2, 1], [3, 1]],
        [[0, 2], [3, 0]],
    ]
    assert score.tally_cloze_answers(found, "train") == Tally(4, 2, 0, 0)


def test_scores_that_are_not_finite_are_no_hits() -> None:
    found = score.merge_cloze_outputs(
        COMMON, "before", [{"evaluations": [evaluation(0, (0, -1), (1, -1), (2, 1), (3, 1))]}]
    )
    assert score.score_cloze_outputs(found, "before") == {
        "acc": 1 / 4,
        "em": 1 / 4,
        "f1": 1 / 4,
        "se": pytest.approx((0.25 * 0.75 / 4) ** 0.5, rel=1e-15),
    }
    assert score.tally_cloze_answers(found, "before") == Tally(4, 0, 0, 2)


def test_repeated_answers_are_counted_and_the_last_one_stands() -> None:
    again = {"evaluations": [evaluation(0, (2, 1), (2, 0), (3, 2))]}
    found = score.merge_cloze_outputs(
        COMMON, "after", [{"evaluations": [evaluation(0, (3, 0))]}, again]
    )
    assert passes(found)["after"]["evaluations"][0]["choices"] == [[2, 0], [3, 2]]
    assert score.tally_cloze_answers(found, "after") == Tally(4, 2, 2, 0)


@pytest.mark.parametrize(
    "found",
    [
        score.make_cloze_outputs([]),
        COMMON,
        score.merge_cloze_outputs(COMMON, "train", []),
        score.merge_cloze_outputs(COMMON, "train", [{"stopped": None, "evaluations": []}]),
    ],
)
def test_no_evaluation_is_no_score(found: score.ClozeOutputs) -> None:
    assert score.score_cloze_outputs(found, "train") == {}
    assert score.list_accuracies(found, "train") == []
    assert score.tally_cloze_answers(found, "train") is None
    assert score.make_cloze_breakdowns(found) == []


def test_an_evaluation_without_answers_is_no_score() -> None:
    found = score.merge_cloze_outputs(
        COMMON, "train", [{"stopped": None, "evaluations": [evaluation(3)]}]
    )
    assert score.score_cloze_outputs(found, "train") == {}
    assert score.list_accuracies(found, "train") == [(3, 24, None)]
    assert score.tally_cloze_answers(found, "train") == Tally(4, 4, 0, 0)


def test_the_earliest_stop_stands() -> None:
    stops = [None, {"step": 9, "why": "nan"}, {"step": 7, "why": "target"}]
    tables = [{"stopped": stopped, "evaluations": []} for stopped in stops]
    assert passes(score.merge_cloze_outputs(COMMON, "train", tables))["train"]["stopped"] == {
        "step": 7,
        "why": "target",
    }


@pytest.mark.parametrize(
    "table",
    [
        RANK_0,
        {"stopped": {"step": 5, "why": "target", "value": 0.9}, "evaluations": []},
        {"evaluations": [evaluation(0, (0, -1), (1, 2))]},
        {"evaluations": [evaluation(0)]},
    ],
)
def test_good_outputs_pass_as_they_are(table: dict[str, Any]) -> None:
    found = score.check_cloze_outputs(table, COMMON)
    assert found == table
    assert found["evaluations"] is not table["evaluations"]


def test_pairs_may_be_tuples_and_become_lists() -> None:
    table = {"evaluations": [{"step": 0, "samples": 0, "choices": [(0, 1)]}]}
    assert score.check_cloze_outputs(table, COMMON)["evaluations"][0]["choices"] == [[0, 1]]


KINDS = (
    "the engine's outputs must be `stopped` and `evaluations` of the steps, or `evaluations` alone"
)
TABLES = "the engine's outputs must be tables as evaluations: choices, samples, step"
PAIRS = "the engine's outputs must be a list of pairs of integers: choices of an evaluation"
RANGE = "the engine's outputs name a question beyond 0 to 3, or a candidate that it does not have"
STOPPED = "the engine's outputs must be None or a table with a step: stopped"


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        (None, KINDS),
        ([], KINDS),
        ({}, KINDS),
        ({"stopped": None}, KINDS),
        ({"evaluations": [], "more": 1}, KINDS),
        ({"evaluations": {}}, "the engine's outputs must be a list: evaluations"),
        ({"evaluations": [7]}, TABLES),
        ({"evaluations": [{"step": 0, "choices": []}]}, TABLES),
        ({"evaluations": [{**evaluation(0), "loss": 1.0}]}, TABLES),
        *(
            (
                {"evaluations": [{**evaluation(0), name: value}]},
                f"the engine's outputs must be an integer from 0 on: {name} of",
            )
            for name in ("step", "samples")
            for value in (-1, 1.0, True, None)
        ),
        *(
            ({"evaluations": [{**evaluation(0), "choices": value}]}, PAIRS)
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
        ({"stopped": 5, "evaluations": []}, STOPPED),
        ({"stopped": {"why": "nan"}, "evaluations": []}, STOPPED),
        ({"stopped": {"step": 5.0}, "evaluations": []}, STOPPED),
    ],
)
def test_outputs_of_another_kind_are_refused(table: Any, reason: str) -> None:
    with pytest.raises(TypeError) as caught:
        score.check_cloze_outputs(table, COMMON)
    assert str(caught.value).startswith(reason)


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        (
            {"evaluations": []},
            "the engine's outputs have 0 evaluations; a pass without steps has one",
        ),
        (
            {"evaluations": [evaluation(0), evaluation(1)]},
            "the engine's outputs have 2 evaluations; a pass without steps has one",
        ),
        ({"evaluations": [evaluation(0, (4, 0))]}, RANGE),
        ({"evaluations": [evaluation(0, (-1, 0))]}, RANGE),
        ({"evaluations": [evaluation(0, (0, 0), (2, 2))]}, RANGE),
        ({"evaluations": [evaluation(0, (0, -2))]}, RANGE),
        (
            {"stopped": None, "evaluations": [evaluation(5), evaluation(5)]},
            (
                "the engine's outputs have evaluations at the steps [5, 5]; each is later than the"
                " one before"
            ),
        ),
        (
            {"stopped": None, "evaluations": [evaluation(5), evaluation(4)]},
            (
                "the engine's outputs have evaluations at the steps [5, 4]; each is later than the"
                " one before"
            ),
        ),
    ],
)
def test_outputs_that_cannot_be_are_refused(table: Any, reason: str) -> None:
    with pytest.raises(ValueError) as caught:
        score.check_cloze_outputs(table, COMMON)
    assert str(caught.value) == reason


def test_differences_are_of_the_last_evaluation_after_as_many_steps() -> None:
    theirs = score.merge_cloze_outputs(
        COMMON, "train", [{"stopped": None, "evaluations": [evaluation(5, (0, 2), (1, 1), (2, 1))]}]
    )
    # of questions 0, 1 and 2, questions 1 and 2 have another candidate
    assert score.compare_cloze_outputs(WHOLE, theirs, "train") == Differences(3, 2)
    later = score.merge_cloze_outputs(
        COMMON, "train", [{"stopped": None, "evaluations": [evaluation(6, (0, 2))]}]
    )
    assert score.compare_cloze_outputs(WHOLE, later, "train") is None
    assert score.compare_cloze_outputs(WHOLE, COMMON, "train") is None
    assert TASK.differences is score.compare_cloze_outputs
