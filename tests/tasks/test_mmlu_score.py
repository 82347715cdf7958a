"""MMLU scoring by hand, value by value."""

from typing import Any

import pytest

from steelyard.tasks.mmlu import score
from steelyard.tasks.task import Breakdown, Differences, Tally

COMMON = score.outputs(
    gold=[0, 1, 2, 3, 0, 1],
    subject_of=[0, 0, 1, 1, 1, 1],
    subjects=["one", "two"],
    index=[3, 5, 8, 9, 11, 12],
    letters=[10, 11, 12, 13],
)
RANK_0 = {"items": [0, 3, 5], "best": [10, 99, 11], "choice": [0, 3, 1], "finite": [1, 1, 1]}
RANK_1 = {"items": [4, 1, 2], "best": [11, 11, 10], "choice": [1, 1, 0], "finite": [1, 0, 1]}


def passes(found: score.MmluOutputs) -> dict[str, Any]:
    table: dict[str, Any] = found.model_dump(mode="json")["passes"]
    return table


def test_ranks_merge_in_the_order_of_the_questions() -> None:
    assert COMMON.gold == "ABCDAB"
    found = score.merge(COMMON, "infer", [RANK_0, RANK_1])
    assert passes(found) == {"infer": {"choices": "ABADBB", "hits": "110001", "not_finite": 1, "repeated": 0}}
    assert score.merge(COMMON, "infer", [RANK_1, RANK_0]) == found
    assert COMMON.passes == {}
    both = score.merge(found, "val", [RANK_0])
    assert passes(both)["infer"] == passes(found)["infer"]


def test_scores_by_hand() -> None:
    found = score.merge(COMMON, "infer", [RANK_0, RANK_1])
    assert score.score(found, "infer") == {
        "acc": 3 / 6,
        "se": pytest.approx((0.5 * 0.5 / 6) ** 0.5, rel=1e-15),
        "macro": (2 / 2 + 1 / 4) / 2,
        "choice": 4 / 6,
    }
    assert score.subject_accuracy(found, "infer") == {"one": 1.0, "two": 0.25}
    [page] = score.breakdowns(score.merge(found, "val", [{name: column[:1] for name, column in RANK_0.items()}]))
    assert page == Breakdown(
        ("Accuracy by subject", "各学科准确率"),
        (("Subject", "学科"), ("val", "val"), ("infer", "infer")),
        (("one", 1.0, 1.0), ("two", None, 0.25)),
    )


def test_missing_answers_are_no_wrong_answers() -> None:
    found = score.merge(COMMON, "val", [RANK_0, {"items": [], "best": [], "choice": [], "finite": []}])
    assert passes(found)["val"] == {"choices": "A??D?B", "hits": "1??0?1", "not_finite": 0, "repeated": 0}
    assert score.score(found, "val") == {
        "acc": 2 / 3,
        "se": pytest.approx((2 / 3 * (1 / 3) / 3) ** 0.5, rel=1e-15),
        "macro": (1 / 1 + 1 / 2) / 2,
        "choice": 3 / 3,
    }
    assert score.score(found, "infer") == {}
    none = score.merge(COMMON, "val", [])
    assert passes(none)["val"]["hits"] == "??????"
    assert score.score(none, "val") == {}
    assert score.tally(found, "val") == Tally(6, 3, 0, 0)
    assert score.tally(none, "infer") is None
    assert score.breakdowns(none) == []


def test_repeated_answers_are_counted() -> None:
    again = {"items": [5, 5, 4], "best": [12, 13, 10], "choice": [2, 3, 0], "finite": [0, 1, 0]}
    found = score.merge(COMMON, "val", [RANK_0, again])
    assert passes(found)["val"] == {"choices": "A??DAD", "hits": "1??010", "not_finite": 2, "repeated": 2}


def test_agreement_is_over_what_both_answered() -> None:
    found = score.merge(COMMON, "infer", [RANK_0, RANK_1])
    assert score.agreement(found, "infer", "val") is None
    other = {"items": [0, 1, 3, 4, 5], "best": [10, 11, 13, 12, 11], "choice": [0, 1, 3, 2, 1], "finite": [1] * 5}
    found = score.merge(found, "val", [other])
    assert passes(found)["val"]["choices"] == "AB?DCB"
    assert score.agreement(found, "infer", "val") == score.agreement(found, "val", "infer") == 4 / 5
    none = score.merge(found, "val", [])
    assert score.agreement(none, "infer", "val") is None


def test_differences_are_of_the_letters_that_both_chose() -> None:
    one = score.merge(COMMON, "infer", [RANK_0, RANK_1])  # ABADBB
    other = {"items": [0, 1, 3, 4, 5], "best": [10, 11, 13, 12, 11], "choice": [0, 3, 3, 2, 1], "finite": [1] * 5}  # AD?DCB
    theirs = score.merge(COMMON, "infer", [other])
    assert score.differences(one, theirs, "infer") == score.differences(theirs, one, "infer") == Differences(5, 2)
    assert score.differences(one, one, "infer") == Differences(6, 0)
    assert score.differences(one, theirs, "val") is None
    assert score.differences(one, theirs.model_copy(update={"index": [0, 1, 2, 3, 4, 5]}), "infer") is None  # other questions
