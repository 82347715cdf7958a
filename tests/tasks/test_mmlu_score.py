"""Test scoring of MMLU with values worked out by hand: six questions, two subjects, tokens 10 to 13
for the letters, 99 for another token.
"""

from typing import Any

import pytest

from fixtures.golden import golden
from steelyard.tasks import choices as score
from steelyard.tasks.task import Breakdown, Differences, Selection, Tally

COMMON = score.make_choice_outputs(
    gold=[0, 1, 2, 3, 0, 1],
    subject_of=[0, 0, 1, 1, 1, 1],
    subjects=["one", "two"],
    index=[3, 5, 8, 9, 11, 12],
    letters=[10, 11, 12, 13],
)
RANK_0 = {"items": [0, 3, 5], "best": [10, 99, 11], "choice": [0, 3, 1], "finite": [1, 1, 1]}
RANK_1 = {"items": [4, 1, 2], "best": [11, 11, 10], "choice": [1, 1, 0], "finite": [1, 0, 1]}


def passes(found: score.ChoiceOutputs) -> dict[str, Any]:
    """Return the outputs of each pass as they are written to a record."""
    table: dict[str, Any] = found.model_dump(mode="json")["passes"]
    return table


def test_ranks_merge_in_the_order_of_the_questions() -> None:
    assert COMMON.gold == "ABCDAB"
    found = score.merge_choice_answers(COMMON, "infer", [RANK_0, RANK_1])
    answers = {
        "choices": "ABADBB",
        "hits": "110001",
        "not_finite": 1,
        "repeated": 0,
        "argmax": "ABA*BB",
        "others": [99],
    }
    assert passes(found) == {"infer": answers}
    assert score.list_likeliest_tokens(found, "infer") == [10, 11, 10, 99, 11, 11]
    assert score.merge_choice_answers(COMMON, "infer", [RANK_1, RANK_0]) == found
    assert COMMON.passes == {}
    both = score.merge_choice_answers(found, "val", [RANK_0])
    assert passes(both)["infer"] == passes(found)["infer"]


def test_scores_by_hand() -> None:
    found = score.merge_choice_answers(COMMON, "infer", [RANK_0, RANK_1])
    assert score.score_choice_answers(found, "infer") == {
        "acc": 3 / 6,
        "se": pytest.approx((0.5 * 0.5 / 6) ** 0.5, rel=1e-15),
        "macro": (2 / 2 + 1 / 4) / 2,
        "choice": 4 / 6,
    }
    assert score.compute_subject_accuracy(found, "infer") == {"one": 1.0, "two": 0.25}
    [page] = score.make_choice_breakdowns(
        score.merge_choice_answers(
            found, "val", [{name: column[:1] for name, column in RANK_0.items()}]
        )
    )
    assert page == Breakdown(
        ("Accuracy by subject", "各学科准确率"),
        (("Subject", "学科"), ("val", "val"), ("infer", "infer")),
        (("one", 1.0, 1.0), ("two", None, 0.25)),
    )


def test_missing_answers_are_no_wrong_answers() -> None:
    found = score.merge_choice_answers(
        COMMON, "val", [RANK_0, {"items": [], "best": [], "choice": [], "finite": []}]
    )
    answers = {
        "choices": "A??D?B",
        "hits": "1??0?1",
        "not_finite": 0,
        "repeated": 0,
        "argmax": "A??*?B",
        "others": [99],
    }
    assert passes(found)["val"] == answers
    assert score.list_likeliest_tokens(found, "val") == [10, None, None, 99, None, 11]
    assert score.score_choice_answers(found, "val") == {
        "acc": 2 / 3,
        "se": pytest.approx((2 / 3 * (1 / 3) / 3) ** 0.5, rel=1e-15),
        "macro": (1 / 1 + 1 / 2) / 2,
        "choice": 3 / 3,
    }
    assert score.score_choice_answers(found, "infer") == {}
    none = score.merge_choice_answers(COMMON, "val", [])
    assert passes(none)["val"]["hits"] == "??????"
    assert score.score_choice_answers(none, "val") == {}
    assert score.tally_choice_answers(found, "val") == Tally(6, 3, 0, 0)
    assert score.tally_choice_answers(none, "infer") is None
    assert score.make_choice_breakdowns(none) == []


def test_repeated_answers_are_counted() -> None:
    again = {"items": [5, 5, 4], "best": [12, 13, 10], "choice": [2, 3, 0], "finite": [0, 1, 0]}
    found = score.merge_choice_answers(COMMON, "val", [RANK_0, again])
    answers = {
        "choices": "A??DAD",
        "hits": "1??010",
        "not_finite": 2,
        "repeated": 2,
        "argmax": "A??*AD",
        "others": [99],
    }
    assert passes(found)["val"] == answers


def test_agreement_is_over_what_both_answered() -> None:
    found = score.merge_choice_answers(COMMON, "infer", [RANK_0, RANK_1])
    assert score.measure_choice_agreement(found, "infer", "val") is None
    other = {
        "items": [0, 1, 3, 4, 5],
        "best": [10, 11, 13, 12, 11],
        "choice": [0, 1, 3, 2, 1],
        "finite": [1] * 5,
    }
    found = score.merge_choice_answers(found, "val", [other])
    assert passes(found)["val"]["choices"] == "AB?DCB"
    assert (
        score.measure_choice_agreement(found, "infer", "val")
        == score.measure_choice_agreement(found, "val", "infer")
        == 4 / 5
    )
    none = score.merge_choice_answers(found, "val", [])
    assert score.measure_choice_agreement(none, "infer", "val") is None


def test_differences_are_of_the_letters_that_both_chose() -> None:
    one = score.merge_choice_answers(COMMON, "infer", [RANK_0, RANK_1])  # choices ABADBB
    # choices AD?DCB: five in common, B/D and B/C differ
    other = {
        "items": [0, 1, 3, 4, 5],
        "best": [10, 11, 13, 12, 11],
        "choice": [0, 3, 3, 2, 1],
        "finite": [1] * 5,
    }
    theirs = score.merge_choice_answers(COMMON, "infer", [other])
    assert (
        score.compare_choice_outputs(one, theirs, "infer")
        == score.compare_choice_outputs(theirs, one, "infer")
        == Differences(5, 2, tokens=2)
    )
    assert score.compare_choice_outputs(one, one, "infer") == Differences(6, 0, tokens=0)
    # outputs of version 1 have no argmax, so no tokens are compared
    assert score.compare_choice_outputs(one, old(theirs), "infer") == Differences(5, 2)
    assert score.compare_choice_outputs(one, theirs, "val") is None
    # outputs of other questions cannot be compared
    assert (
        score.compare_choice_outputs(
            one, theirs.model_copy(update={"index": [0, 1, 2, 3, 4, 5]}), "infer"
        )
        is None
    )


def old(found: score.ChoiceOutputs) -> score.ChoiceOutputs:
    """Return the outputs as a record of version 1 has them: without a version and without the
    likeliest tokens.
    """
    table = found.model_dump(mode="json")
    del table["version"]
    for answers in table["passes"].values():
        del answers["argmax"], answers["others"]
    made = score.ChoiceOutputs.model_validate(table)
    assert made.model_dump(mode="json") == table  # version 1 is dumped without new fields
    return made


def test_answers_of_version_1_stay_readable() -> None:
    found = score.merge_choice_answers(COMMON, "infer", [RANK_0, RANK_1])
    assert found.version == 2
    before = old(found)
    assert (before.version, score.list_likeliest_tokens(before, "infer")) == (None, None)
    assert score.score_choice_answers(before, "infer") == score.score_choice_answers(found, "infer")


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"argmax": "ABA*B"}, "argmax and others are not those of 6 questions"),
        ({"others": None}, "argmax and others are not those of 6 questions"),
        ({"others": []}, "others are not the tokens of those questions whose argmax is no letter"),
        (
            {"others": [13]},
            "others are not the tokens of those questions whose argmax is no letter",
        ),
        ({"argmax": "ABA*BA"}, "hits are not those of argmax"),
        ({"argmax": "ABA*B?"}, "hits are not those of argmax"),
    ],
)
def test_tokens_that_are_not_those_of_the_hits_are_no_answers(
    change: dict[str, Any], line: str
) -> None:
    table = score.merge_choice_answers(COMMON, "infer", [RANK_0, RANK_1]).model_dump(mode="json")
    table["passes"]["infer"] |= change
    with pytest.raises(ValueError, match=line):
        score.ChoiceOutputs.model_validate(table)


def test_a_token_that_no_vocabulary_has_is_no_answer() -> None:
    for token in (-1, 1 << 31):
        with pytest.raises(ValueError, match="a token in best beyond 0 to 2147483647"):
            score.check_choice_answers({**RANK_0, "best": [10, token, 11]}, COMMON)


def test_answers_are_those_of_the_scope_or_not() -> None:
    assert score.explain_choice_mismatch(COMMON, Selection()) is None
    assert score.explain_choice_mismatch(COMMON, Selection(subjects=("one", "two"))) is None
    assert score.explain_choice_mismatch(COMMON, Selection(subjects=("one",))) == "subjects two"
    assert (
        score.explain_choice_mismatch(COMMON, Selection(subjects=("one", "three", "two")))
        == "subjects three"
    )
    # a sample of six may hold no question of subject three
    assert (
        score.explain_choice_mismatch(COMMON, Selection(subjects=("one", "three", "two"), sample=6))
        is None
    )
    assert score.explain_choice_mismatch(COMMON, Selection(rows=("3", "5", "8-9", "11-12"))) is None
    assert score.explain_choice_mismatch(COMMON, Selection(rows=("one/0-1", "two/0-3"))) is None
    for rows in (
        ("3", "5", "8-9", "11", "13"),
        ("3", "5", "8-9"),
        ("0-999999999",),
        ("one/0-2", "two/0-2"),
        ("one/0-5",),
    ):
        assert score.explain_choice_mismatch(COMMON, Selection(rows=rows)) == golden(
            "6-questions-which-are-not-the"
        )
