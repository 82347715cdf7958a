"""Test scoring of LAMBADA with values worked out by hand."""

from math import exp, inf, nan
from typing import Any

import pytest

from fixtures.golden import golden
from steelyard.tasks.lambada import score
from steelyard.tasks.lambada.task import TASK
from steelyard.tasks.task import Differences, Selection, Tally

NO_PASSES = score.make_passage_outputs(targets=[4, 8, 2, 10], last=[1, 2, 1, 3], index=[3, 5, 8, 9])
RANK_0 = {"items": [3, 0], "nll": [20.0, 6.0], "last_nll": [1.5, 0.5], "hit": [0, 1]}
RANK_1 = {"items": [2, 1], "nll": [5.0, 4.0], "last_nll": [2.0, 1.0], "hit": [1, 1]}
ONE_PASS = score.merge_passage_answers(NO_PASSES, "infer", [RANK_0, RANK_1])


def dump_passes(outputs: score.LambadaOutputs) -> dict[str, Any]:
    """Return the outputs of each pass as they are written to a record."""
    passes_json: dict[str, Any] = outputs.model_dump(mode="json")["passes"]
    return passes_json


def change_rank_0(**changes: Any) -> dict[str, Any]:
    """Return the answers of rank 0 with columns replaced."""
    return {**RANK_0, **changes}


def test_ranks_merge_in_the_order_of_the_passages() -> None:
    assert NO_PASSES.model_dump(mode="json") == {
        "version": 2,
        "targets": [4, 8, 2, 10],
        "last": [1, 2, 1, 3],
        "index": [3, 5, 8, 9],
        "passes": {},
    }
    assert dump_passes(ONE_PASS) == {
        "infer": {
            "nll": [6.0, 4.0, 5.0, 20.0],
            "last_nll": [0.5, 1.0, 2.0, 1.5],
            "hits": "1110",
            "not_finite": 0,
            "repeated": 0,
        }
    }
    assert score.merge_passage_answers(NO_PASSES, "infer", [RANK_1, RANK_0]) == ONE_PASS
    two_passes = score.merge_passage_answers(ONE_PASS, "val", [RANK_0])
    assert dump_passes(two_passes)["infer"] == dump_passes(ONE_PASS)["infer"]
    assert list(dump_passes(two_passes)) == ["infer", "val"]


def test_scores_by_hand() -> None:
    assert score.score_passage_answers(ONE_PASS, "infer") == {
        "loss": (1.5 + 0.5 + 2.5 + 2.0) / 4,
        "loss_token": 35 / 24,
        "perplexity": exp(35 / 24),
        "perplexity_last": exp(5 / 4),
        "acc": 3 / 4,
        "se": (0.75 * 0.25 / 4) ** 0.5,
    }


def test_a_missing_answer_does_not_count_as_wrong() -> None:
    outputs = score.merge_passage_answers(
        NO_PASSES, "val", [RANK_0, {name: [] for name in score.ANSWER_COLUMNS}]
    )
    assert dump_passes(outputs)["val"] == {
        "nll": [6.0, None, None, 20.0],
        "last_nll": [0.5, None, None, 1.5],
        "hits": "1??0",
        "not_finite": 0,
        "repeated": 0,
    }
    assert score.score_passage_answers(outputs, "val") == {
        "loss": (1.5 + 2.0) / 2,
        "loss_token": 26 / 14,
        "perplexity": exp(26 / 14),
        "perplexity_last": exp(1.0),
        "acc": 1 / 2,
        "se": (0.5 * 0.5 / 2) ** 0.5,
    }
    assert score.tally_passage_answers(outputs, "val") == Tally(4, 2, 0, 0)


def test_a_pass_without_answers_has_no_score() -> None:
    unanswered = score.merge_passage_answers(NO_PASSES, "val", [])
    assert dump_passes(unanswered)["val"]["hits"] == "????"
    assert score.score_passage_answers(unanswered, "val") == {}
    assert score.score_passage_answers(unanswered, "infer") == {}
    assert score.score_passage_answers(NO_PASSES, "infer") == {}
    assert (
        score.tally_passage_answers(unanswered, "val"),
        score.tally_passage_answers(unanswered, "infer"),
    ) == (Tally(4, 4, 0, 0), None)


@pytest.mark.parametrize("column", ["nll", "last_nll"])
def test_one_passage_that_is_not_finite_makes_the_losses_unknown(column: str) -> None:
    outputs = score.merge_passage_answers(
        NO_PASSES, "infer", [change_rank_0(**{column: [None, 1.0]}), RANK_1]
    )
    assert dump_passes(outputs)["infer"]["hits"] == "1110"
    assert dump_passes(outputs)["infer"]["not_finite"] == 1
    assert score.score_passage_answers(outputs, "infer") == {
        "acc": 3 / 4,
        "se": (0.75 * 0.25 / 4) ** 0.5,
    }
    assert score.tally_passage_answers(outputs, "infer") == Tally(4, 0, 0, 1)


def test_scores_that_overflow_a_float_are_left_out() -> None:
    outputs = score.merge_passage_answers(
        NO_PASSES, "infer", [change_rank_0(nll=[8000.0, 6.0], last_nll=[1500.0, 0.5])]
    )
    always_present = {"loss", "loss_token", "acc", "se"}
    # perplexity exp(8006 / 14) fits a float, perplexity_last exp(750.25) overflows
    assert score.score_passage_answers(outputs, "infer").keys() == always_present | {"perplexity"}
    outputs = score.merge_passage_answers(NO_PASSES, "infer", [change_rank_0(nll=[1e5, 6.0])])
    assert score.score_passage_answers(outputs, "infer").keys() == always_present | {
        "perplexity_last"
    }
    outputs = score.merge_passage_answers(
        NO_PASSES, "infer", [change_rank_0(nll=[1.7e308, 1.7e308], last_nll=[1.7e308, 1.7e308])]
    )
    assert score.score_passage_answers(outputs, "infer").keys() == {"loss", "acc", "se"}


def test_sums_are_exactly_rounded_in_every_version_of_python() -> None:
    no_passes = score.make_passage_outputs([1] * 10, [1] * 10, list(range(10)))
    answers = {"items": list(range(10)), "nll": [0.1] * 10, "last_nll": [0.1] * 10, "hit": [0] * 10}
    scores = score.score_passage_answers(
        score.merge_passage_answers(no_passes, "val", [answers]), "val"
    )
    assert (scores["loss"], scores["loss_token"], scores["acc"], scores["se"]) == (
        0.1,
        0.1,
        0.0,
        0.0,
    )  # ten times 0.1, added one by one: 0.9999999999999999


def test_repeated_answers_are_counted() -> None:
    repeats = {
        "items": [0, 0, 1],
        "nll": [None, 7.0, None],
        "last_nll": [1.0, 2.0, None],
        "hit": [1, 0, 0],
    }
    outputs = score.merge_passage_answers(NO_PASSES, "val", [RANK_0, repeats])
    assert dump_passes(outputs)["val"] == {
        "nll": [7.0, None, None, 20.0],
        "last_nll": [2.0, None, None, 1.5],
        "hits": "00?0",
        "not_finite": 2,
        "repeated": 2,
    }
    assert score.tally_passage_answers(outputs, "val") == Tally(4, 1, 2, 2)


def test_agreement_is_over_passages_answered_in_both_passes() -> None:
    assert score.measure_passage_agreement(ONE_PASS, "infer", "val") is None
    val_answers = {"items": [0, 1, 3], "nll": [None] * 3, "last_nll": [None] * 3, "hit": [1, 0, 0]}
    outputs = score.merge_passage_answers(ONE_PASS, "val", [val_answers])
    assert (
        score.measure_passage_agreement(outputs, "infer", "val")
        == score.measure_passage_agreement(outputs, "val", "infer")
        == 2 / 3
    )
    assert (
        score.measure_passage_agreement(
            score.merge_passage_answers(ONE_PASS, "val", []), "infer", "val"
        )
        is None
    )


def test_lambada_has_no_breakdowns() -> None:
    assert TASK.breakdowns(ONE_PASS) == []


def test_valid_answers_pass_and_values_that_are_not_finite_become_none() -> None:
    assert score.check_passage_answers(RANK_0, NO_PASSES) == RANK_0
    empty: dict[str, Any] = {name: [] for name in score.ANSWER_COLUMNS}
    assert score.check_passage_answers(empty, NO_PASSES) == empty
    with_infinities = {
        "items": [0, 1, 2, 3],
        "nll": [nan, None, -1e-4, inf],
        "last_nll": [0.0, -inf, 2.0, 1e300],
        "hit": [0, 1, 1, 0],
    }
    assert score.check_passage_answers({**with_infinities, "more": "is not read"}, NO_PASSES) == {
        "items": [0, 1, 2, 3],
        "nll": [None, None, -1e-4, None],
        "last_nll": [0.0, None, 2.0, 1e300],
        "hit": [0, 1, 1, 0],
    }


MUST_BE_LISTS = "the engine's outputs must be lists: items, nll, last_nll, hit"
MUST_BE_INTEGERS = "the engine's outputs must be lists of integers: items, hit"
MUST_BE_FLOATS = "the engine's outputs must be lists of floats (or None): nll, last_nll"
MUST_HAVE_ONE_LENGTH = "the engine's outputs must be lists of one length"
OUT_OF_RANGE = "the engine's outputs name a passage outside 0 to 3, or a hit that is not 0 or 1"


@pytest.mark.parametrize(
    ("answers", "kind", "line"),
    [
        (None, TypeError, MUST_BE_LISTS),
        ([RANK_0], TypeError, MUST_BE_LISTS),
        ({}, TypeError, MUST_BE_LISTS),
        (change_rank_0(nll=(1.0, 2.0)), TypeError, MUST_BE_LISTS),
        (change_rank_0(hit=None), TypeError, MUST_BE_LISTS),
        (change_rank_0(items=[0.0, 1.0]), TypeError, MUST_BE_INTEGERS),
        (change_rank_0(items=[0, None]), TypeError, MUST_BE_INTEGERS),
        (change_rank_0(hit=["1", "0"]), TypeError, MUST_BE_INTEGERS),
        (change_rank_0(nll=[1.0, "2"]), TypeError, MUST_BE_FLOATS),
        (change_rank_0(nll=[1.0, 10**400]), TypeError, MUST_BE_FLOATS),
        (change_rank_0(last_nll=[1.0, True]), TypeError, MUST_BE_FLOATS),
        (change_rank_0(items=[0]), ValueError, MUST_HAVE_ONE_LENGTH),
        (change_rank_0(last_nll=[1.0, 2.0, 3.0]), ValueError, MUST_HAVE_ONE_LENGTH),
        (change_rank_0(items=[0, 4]), ValueError, OUT_OF_RANGE),
        (change_rank_0(items=[-1, 0]), ValueError, OUT_OF_RANGE),
        (change_rank_0(hit=[0, 2]), ValueError, OUT_OF_RANGE),
        (change_rank_0(hit=[-1, 1]), ValueError, OUT_OF_RANGE),
        (
            change_rank_0(nll=[5.0, -0.5]),
            ValueError,
            "the engine's outputs have a negative log-likelihood of -0.5; it is not below 0",
        ),
        (
            change_rank_0(last_nll=[-0.01, 1.0]),
            ValueError,
            "the engine's outputs have a negative log-likelihood of -0.01; it is not below 0",
        ),
    ],
)
def test_malformed_answers_are_refused(answers: Any, kind: type[Exception], line: str) -> None:
    with pytest.raises(kind) as error:
        score.check_passage_answers(answers, NO_PASSES)
    assert type(error.value) is kind
    assert str(error.value) == line


def test_differences_count_last_words_and_losses_per_token() -> None:
    other_answers = {
        "items": [0, 1, 2],
        "nll": [7.0, 4.0, 4.0],
        "last_nll": [0.5, 1.0, 2.0],
        "hit": [1, 0, 0],
    }
    other_outputs = score.merge_passage_answers(NO_PASSES, "infer", [other_answers])
    # Passages of 4, 8 and 2 targets differ by 1 / 4, 0 and 1 / 2 per token; two hits of three do.
    assert (
        score.compare_passage_outputs(ONE_PASS, other_outputs, "infer")
        == score.compare_passage_outputs(other_outputs, ONE_PASS, "infer")
        == Differences(3, 2, 0.5)
    )
    assert score.compare_passage_outputs(ONE_PASS, ONE_PASS, "infer") == Differences(4, 0, 0.0)
    assert score.compare_passage_outputs(ONE_PASS, other_outputs, "val") is None
    assert (
        score.compare_passage_outputs(
            ONE_PASS, other_outputs.model_copy(update={"index": [0, 1, 2, 3]}), "infer"
        )
        is None
    )
    not_finite = score.merge_passage_answers(
        NO_PASSES,
        "infer",
        [score.check_passage_answers(other_answers | {"nll": [nan, nan, nan]}, NO_PASSES)],
    )
    assert score.compare_passage_outputs(ONE_PASS, not_finite, "infer") == Differences(3, 2, None)
    assert TASK.differences is score.compare_passage_outputs


RANK_0_WITH_TOKENS = RANK_0 | {"argmax": [[7, 8, 9], [5]]}  # last words of passages 3 and 0
RANK_1_WITH_TOKENS = RANK_1 | {"argmax": [[6], [3, 4]]}


def test_likeliest_last_words_are_stored_as_one_list_of_tokens() -> None:
    outputs = score.merge_passage_answers(
        NO_PASSES,
        "infer",
        [
            score.check_passage_answers(answers, NO_PASSES)
            for answers in (RANK_0_WITH_TOKENS, RANK_1_WITH_TOKENS)
        ],
    )
    assert dump_passes(outputs)["infer"]["argmax"] == [5, 3, 4, 6, 7, 8, 9]
    assert score.list_likeliest_words(outputs, "infer") == [(5,), (3, 4), (6,), (7, 8, 9)]
    rank_0_only = score.merge_passage_answers(NO_PASSES, "infer", [RANK_0_WITH_TOKENS])
    assert dump_passes(rank_0_only)["infer"]["argmax"] == [5, -1, -1, -1, 7, 8, 9]
    assert score.LambadaOutputs.model_validate(outputs.model_dump(mode="json")) == outputs
    # If one rank has no argmax, the merged outputs have none; nor have records of version 1.
    assert (
        "argmax"
        not in dump_passes(
            score.merge_passage_answers(NO_PASSES, "infer", [RANK_0_WITH_TOKENS, RANK_1])
        )["infer"]
    )
    assert score.list_likeliest_words(ONE_PASS, "infer") is None


def test_last_words_are_compared_where_both_records_have_them() -> None:
    outputs = score.merge_passage_answers(
        NO_PASSES, "infer", [RANK_0_WITH_TOKENS, RANK_1_WITH_TOKENS]
    )
    other_answers = RANK_1_WITH_TOKENS | {"argmax": [[6], [3, 5]]}  # the same hits, another word
    other_outputs = score.merge_passage_answers(
        NO_PASSES, "infer", [RANK_0_WITH_TOKENS, other_answers]
    )
    assert score.compare_passage_outputs(outputs, other_outputs, "infer") == Differences(
        4, 1, 0.0, 1
    )
    assert score.compare_passage_outputs(outputs, ONE_PASS, "infer") == Differences(4, 0, 0.0)
    two_passes = outputs.model_copy(
        update={"passes": {"infer": outputs.passes["infer"], "val": other_outputs.passes["infer"]}}
    )
    assert score.measure_passage_agreement(two_passes, "infer", "val") == 3 / 4
    without_infer_tokens = outputs.model_copy(
        update={"passes": {"infer": ONE_PASS.passes["infer"], "val": other_outputs.passes["infer"]}}
    )
    assert score.measure_passage_agreement(without_infer_tokens, "infer", "val") == 1.0


@pytest.mark.parametrize(
    ("argmax", "kind", "line"),
    [
        (
            [7, 8],
            TypeError,
            "the engine's outputs must have a list of tokens for each item: argmax",
        ),
        ("78", TypeError, "the engine's outputs must have a list of tokens for each item: argmax"),
        ([[7, 8], [5]], ValueError, "as many tokens as the last word of each item has: argmax"),
        ([[7, 8, 9]], ValueError, "as many tokens as the last word of each item has: argmax"),
        (
            [[7, 8, -1], [5]],
            ValueError,
            "a token in argmax that is not an integer from 0 to 2147483647",
        ),
        (
            [[7, 8, 9.0], [5]],
            ValueError,
            "a token in argmax that is not an integer from 0 to 2147483647",
        ),
    ],
)
def test_malformed_last_words_are_refused(argmax: Any, kind: type[Exception], line: str) -> None:
    with pytest.raises(kind, match=line):
        score.check_passage_answers(RANK_0 | {"argmax": argmax}, NO_PASSES)


def test_outputs_with_too_few_last_word_tokens_are_refused() -> None:
    dumped = score.merge_passage_answers(
        NO_PASSES, "infer", [RANK_0_WITH_TOKENS, RANK_1_WITH_TOKENS]
    ).model_dump(mode="json")
    dumped["passes"]["infer"]["argmax"].pop()
    with pytest.raises(ValueError, match="argmax are not those of 7 tokens of last words"):
        score.LambadaOutputs.model_validate(dumped)


def test_outputs_are_compared_with_the_rows_of_the_scope() -> None:
    assert score.explain_passage_mismatch(NO_PASSES, Selection(rows=("3", "5", "8-9"))) is None
    for rows in (("3", "5", "8", "10"), ("3-5",), ("0-999999999",)):
        assert score.explain_passage_mismatch(NO_PASSES, Selection(rows=rows)) == golden(
            "4-passages-which-are-not-the"
        )
