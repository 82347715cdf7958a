"""Test scoring of MMLU with values worked out by hand: six questions, two subjects, tokens 10 to 13
for the letters, 99 for another token.
"""

from typing import Any

import pytest

from fixtures.golden import golden
from steelyard.tasks import choices as score
from steelyard.tasks.task import Breakdown, Differences, Selection, Tally

NO_PASSES = score.make_choice_outputs(
    gold=[0, 1, 2, 3, 0, 1],
    subject_of=[0, 0, 1, 1, 1, 1],
    subjects=["one", "two"],
    index=[3, 5, 8, 9, 11, 12],
    letters=[10, 11, 12, 13],
)
RANK_0 = {"items": [0, 3, 5], "best": [10, 99, 11], "choice": [0, 3, 1], "finite": [1, 1, 1]}
RANK_1 = {"items": [4, 1, 2], "best": [11, 11, 10], "choice": [1, 1, 0], "finite": [1, 0, 1]}


def dump_passes(outputs: score.ChoiceOutputs) -> dict[str, Any]:
    """Return the outputs of each pass as they are written to a record."""
    passes_json: dict[str, Any] = outputs.model_dump(mode="json")["passes"]
    return passes_json


def test_ranks_merge_in_the_order_of_the_questions() -> None:
    assert NO_PASSES.gold == "ABCDAB"
    outputs = score.merge_choice_answers(NO_PASSES, "infer", [RANK_0, RANK_1])
    answers = {
        "choices": "ABADBB",
        "hits": "110001",
        "not_finite": 1,
        "repeated": 0,
        "argmax": "ABA*BB",
        "others": [99],
    }
    assert dump_passes(outputs) == {"infer": answers}
    assert score.list_likeliest_tokens(outputs, "infer") == [10, 11, 10, 99, 11, 11]
    assert score.merge_choice_answers(NO_PASSES, "infer", [RANK_1, RANK_0]) == outputs
    assert NO_PASSES.passes == {}
    two_passes = score.merge_choice_answers(outputs, "val", [RANK_0])
    assert dump_passes(two_passes)["infer"] == dump_passes(outputs)["infer"]


def test_scores_by_hand() -> None:
    outputs = score.merge_choice_answers(NO_PASSES, "infer", [RANK_0, RANK_1])
    assert score.score_choice_answers(outputs, "infer") == {
        "acc": 3 / 6,
        "se": pytest.approx((0.5 * 0.5 / 6) ** 0.5, rel=1e-15),
        "macro": (2 / 2 + 1 / 4) / 2,
        "choice": 4 / 6,
    }
    assert score.compute_subject_accuracy(outputs, "infer") == {"one": 1.0, "two": 0.25}
    [breakdown] = score.make_choice_breakdowns(
        score.merge_choice_answers(
            outputs, "val", [{name: column[:1] for name, column in RANK_0.items()}]
        )
    )
    assert breakdown == Breakdown(
        ("Accuracy by subject", "各学科准确率"),
        (("Subject", "学科"), ("val", "val"), ("infer", "infer")),
        (("one", 1.0, 1.0), ("two", None, 0.25)),
    )


def test_missing_answers_do_not_count_as_wrong() -> None:
    outputs = score.merge_choice_answers(
        NO_PASSES, "val", [RANK_0, {"items": [], "best": [], "choice": [], "finite": []}]
    )
    answers = {
        "choices": "A??D?B",
        "hits": "1??0?1",
        "not_finite": 0,
        "repeated": 0,
        "argmax": "A??*?B",
        "others": [99],
    }
    assert dump_passes(outputs)["val"] == answers
    assert score.list_likeliest_tokens(outputs, "val") == [10, None, None, 99, None, 11]
    assert score.score_choice_answers(outputs, "val") == {
        "acc": 2 / 3,
        "se": pytest.approx((2 / 3 * (1 / 3) / 3) ** 0.5, rel=1e-15),
        "macro": (1 / 1 + 1 / 2) / 2,
        "choice": 3 / 3,
    }
    assert score.score_choice_answers(outputs, "infer") == {}
    unanswered = score.merge_choice_answers(NO_PASSES, "val", [])
    assert dump_passes(unanswered)["val"]["hits"] == "??????"
    assert score.score_choice_answers(unanswered, "val") == {}
    assert score.tally_choice_answers(outputs, "val") == Tally(6, 3, 0, 0)
    assert score.tally_choice_answers(unanswered, "infer") is None
    assert score.make_choice_breakdowns(unanswered) == []


def test_repeated_answers_are_counted() -> None:
    repeats = {"items": [5, 5, 4], "best": [12, 13, 10], "choice": [2, 3, 0], "finite": [0, 1, 0]}
    outputs = score.merge_choice_answers(NO_PASSES, "val", [RANK_0, repeats])
    answers = {
        "choices": "A??DAD",
        "hits": "1??010",
        "not_finite": 2,
        "repeated": 2,
        "argmax": "A??*AD",
        "others": [99],
    }
    assert dump_passes(outputs)["val"] == answers


def test_agreement_is_over_questions_answered_in_both_passes() -> None:
    outputs = score.merge_choice_answers(NO_PASSES, "infer", [RANK_0, RANK_1])
    assert score.measure_choice_agreement(outputs, "infer", "val") is None
    val_answers = {
        "items": [0, 1, 3, 4, 5],
        "best": [10, 11, 13, 12, 11],
        "choice": [0, 1, 3, 2, 1],
        "finite": [1] * 5,
    }
    outputs = score.merge_choice_answers(outputs, "val", [val_answers])
    assert dump_passes(outputs)["val"]["choices"] == "AB?DCB"
    assert (
        score.measure_choice_agreement(outputs, "infer", "val")
        == score.measure_choice_agreement(outputs, "val", "infer")
        == 4 / 5
    )
    val_unanswered = score.merge_choice_answers(outputs, "val", [])
    assert score.measure_choice_agreement(val_unanswered, "infer", "val") is None


def test_differences_are_over_questions_answered_in_both_records() -> None:
    outputs = score.merge_choice_answers(NO_PASSES, "infer", [RANK_0, RANK_1])  # choices ABADBB
    # choices AD?DCB: five in common, B/D and B/C differ
    other_answers = {
        "items": [0, 1, 3, 4, 5],
        "best": [10, 11, 13, 12, 11],
        "choice": [0, 3, 3, 2, 1],
        "finite": [1] * 5,
    }
    other_outputs = score.merge_choice_answers(NO_PASSES, "infer", [other_answers])
    assert (
        score.compare_choice_outputs(outputs, other_outputs, "infer")
        == score.compare_choice_outputs(other_outputs, outputs, "infer")
        == Differences(5, 2, tokens=2)
    )
    assert score.compare_choice_outputs(outputs, outputs, "infer") == Differences(6, 0, tokens=0)
    # outputs of version 1 have no argmax, so no tokens are compared
    assert score.compare_choice_outputs(
        outputs, convert_to_version_1(other_outputs), "infer"
    ) == Differences(5, 2)
    assert score.compare_choice_outputs(outputs, other_outputs, "val") is None
    # outputs of other questions cannot be compared
    assert (
        score.compare_choice_outputs(
            outputs, other_outputs.model_copy(update={"index": [0, 1, 2, 3, 4, 5]}), "infer"
        )
        is None
    )


def convert_to_version_1(outputs: score.ChoiceOutputs) -> score.ChoiceOutputs:
    """Return the outputs as a record of version 1 has them: without a version and without the
    likeliest tokens.
    """
    dumped = outputs.model_dump(mode="json")
    del dumped["version"]
    for answers in dumped["passes"].values():
        del answers["argmax"], answers["others"]
    version_1 = score.ChoiceOutputs.model_validate(dumped)
    assert version_1.model_dump(mode="json") == dumped  # version 1 is dumped without new fields
    return version_1


def test_answers_of_version_1_stay_readable() -> None:
    outputs = score.merge_choice_answers(NO_PASSES, "infer", [RANK_0, RANK_1])
    assert outputs.version == 2
    version_1 = convert_to_version_1(outputs)
    assert (version_1.version, score.list_likeliest_tokens(version_1, "infer")) == (None, None)
    assert score.score_choice_answers(version_1, "infer") == score.score_choice_answers(
        outputs, "infer"
    )


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
def test_outputs_whose_tokens_contradict_their_hits_are_refused(
    change: dict[str, Any], line: str
) -> None:
    dumped = score.merge_choice_answers(NO_PASSES, "infer", [RANK_0, RANK_1]).model_dump(
        mode="json"
    )
    dumped["passes"]["infer"] |= change
    with pytest.raises(ValueError, match=line):
        score.ChoiceOutputs.model_validate(dumped)


def test_a_token_id_out_of_range_is_refused() -> None:
    for token in (-1, 1 << 31):
        with pytest.raises(ValueError, match="a token in best outside 0 to 2147483647"):
            score.check_choice_answers({**RANK_0, "best": [10, token, 11]}, NO_PASSES)


def test_outputs_are_compared_with_the_scope() -> None:
    assert score.explain_choice_mismatch(NO_PASSES, Selection()) is None
    assert score.explain_choice_mismatch(NO_PASSES, Selection(subjects=("one", "two"))) is None
    assert score.explain_choice_mismatch(NO_PASSES, Selection(subjects=("one",))) == "subjects two"
    assert (
        score.explain_choice_mismatch(NO_PASSES, Selection(subjects=("one", "three", "two")))
        == "subjects three"
    )
    # a sample of six may hold no question of subject three
    assert (
        score.explain_choice_mismatch(
            NO_PASSES, Selection(subjects=("one", "three", "two"), sample=6)
        )
        is None
    )
    assert (
        score.explain_choice_mismatch(NO_PASSES, Selection(rows=("3", "5", "8-9", "11-12"))) is None
    )
    assert score.explain_choice_mismatch(NO_PASSES, Selection(rows=("one/0-1", "two/0-3"))) is None
    for rows in (
        ("3", "5", "8-9", "11", "13"),
        ("3", "5", "8-9"),
        ("0-999999999",),
        ("one/0-2", "two/0-2"),
        ("one/0-5",),
    ):
        assert score.explain_choice_mismatch(NO_PASSES, Selection(rows=rows)) == golden(
            "6-questions-which-are-not-the"
        )
