"""Test scoring of LAMBADA with values worked out by hand."""

from math import exp, inf, nan
from typing import Any

import pytest

from fixtures.golden import golden
from steelyard.tasks.lambada import score
from steelyard.tasks.lambada.task import TASK
from steelyard.tasks.task import Differences, Selection, Tally

COMMON = score.make_passage_outputs(targets=[4, 8, 2, 10], last=[1, 2, 1, 3], index=[3, 5, 8, 9])
RANK_0 = {"items": [3, 0], "nll": [20.0, 6.0], "last_nll": [1.5, 0.5], "hit": [0, 1]}
RANK_1 = {"items": [2, 1], "nll": [5.0, 4.0], "last_nll": [2.0, 1.0], "hit": [1, 1]}
WHOLE = score.merge_passage_answers(COMMON, "infer", [RANK_0, RANK_1])


def passes(found: score.LambadaOutputs) -> dict[str, Any]:
    """Return the outputs of each pass as they are written to a record."""
    table: dict[str, Any] = found.model_dump(mode="json")["passes"]
    return table


def table(**changes: Any) -> dict[str, Any]:
    """Return the answers of rank 0 with columns replaced."""
    return {**RANK_0, **changes}


def test_ranks_merge_in_the_order_of_the_passages() -> None:
    assert COMMON.model_dump(mode="json") == {
        "version": 2,
        "targets": [4, 8, 2, 10],
        "last": [1, 2, 1, 3],
        "index": [3, 5, 8, 9],
        "passes": {},
    }
    assert passes(WHOLE) == {
        "infer": {
            "nll": [6.0, 4.0, 5.0, 20.0],
            "last_nll": [0.5, 1.0, 2.0, 1.5],
            "hits": "1110",
            "not_finite": 0,
            "repeated": 0,
        }
    }
    assert score.merge_passage_answers(COMMON, "infer", [RANK_1, RANK_0]) == WHOLE
    both = score.merge_passage_answers(WHOLE, "val", [RANK_0])
    assert passes(both)["infer"] == passes(WHOLE)["infer"]
    assert list(passes(both)) == ["infer", "val"]


def test_scores_by_hand() -> None:
    assert score.score_passage_answers(WHOLE, "infer") == {
        "loss": (1.5 + 0.5 + 2.5 + 2.0) / 4,
        "loss_token": 35 / 24,
        "perplexity": exp(35 / 24),
        "perplexity_last": exp(5 / 4),
        "acc": 3 / 4,
        "se": (0.75 * 0.25 / 4) ** 0.5,
    }


def test_a_missing_answer_is_no_wrong_answer() -> None:
    found = score.merge_passage_answers(
        COMMON, "val", [RANK_0, {name: [] for name in score.ANSWER_COLUMNS}]
    )
    assert passes(found)["val"] == {
        "nll": [6.0, None, None, 20.0],
        "last_nll": [0.5, None, None, 1.5],
        "hits": "1??0",
        "not_finite": 0,
        "repeated": 0,
    }
    assert score.score_passage_answers(found, "val") == {
        "loss": (1.5 + 2.0) / 2,
        "loss_token": 26 / 14,
        "perplexity": exp(26 / 14),
        "perplexity_last": exp(1.0),
        "acc": 1 / 2,
        "se": (0.5 * 0.5 / 2) ** 0.5,
    }
    assert score.tally_passage_answers(found, "val") == Tally(4, 2, 0, 0)


def test_nothing_answered_is_no_score() -> None:
    none = score.merge_passage_answers(COMMON, "val", [])
    assert passes(none)["val"]["hits"] == "????"
    assert score.score_passage_answers(none, "val") == {}
    assert score.score_passage_answers(none, "infer") == {}
    assert score.score_passage_answers(COMMON, "infer") == {}
    assert (
        score.tally_passage_answers(none, "val"),
        score.tally_passage_answers(none, "infer"),
    ) == (Tally(4, 4, 0, 0), None)


@pytest.mark.parametrize("column", ["nll", "last_nll"])
def test_one_passage_that_is_not_finite_makes_the_losses_unknown(column: str) -> None:
    found = score.merge_passage_answers(COMMON, "infer", [table(**{column: [None, 1.0]}), RANK_1])
    assert passes(found)["infer"]["hits"] == "1110"
    assert passes(found)["infer"]["not_finite"] == 1
    assert score.score_passage_answers(found, "infer") == {
        "acc": 3 / 4,
        "se": (0.75 * 0.25 / 4) ** 0.5,
    }
    assert score.tally_passage_answers(found, "infer") == Tally(4, 0, 0, 1)


def test_what_no_float_holds_is_left_out() -> None:
    found = score.merge_passage_answers(
        COMMON, "infer", [table(nll=[8000.0, 6.0], last_nll=[1500.0, 0.5])]
    )
    names = {"loss", "loss_token", "acc", "se"}
    # perplexity exp(8006 / 14) fits a float, perplexity_last exp(750.25) overflows
    assert score.score_passage_answers(found, "infer").keys() == names | {"perplexity"}
    found = score.merge_passage_answers(COMMON, "infer", [table(nll=[1e5, 6.0])])
    assert score.score_passage_answers(found, "infer").keys() == names | {"perplexity_last"}
    found = score.merge_passage_answers(
        COMMON, "infer", [table(nll=[1.7e308, 1.7e308], last_nll=[1.7e308, 1.7e308])]
    )
    assert score.score_passage_answers(found, "infer").keys() == {"loss", "acc", "se"}


def test_sums_do_not_depend_on_the_version_of_python() -> None:
    common = score.make_passage_outputs([1] * 10, [1] * 10, list(range(10)))
    answers = {"items": list(range(10)), "nll": [0.1] * 10, "last_nll": [0.1] * 10, "hit": [0] * 10}
    found = score.score_passage_answers(
        score.merge_passage_answers(common, "val", [answers]), "val"
    )
    assert (found["loss"], found["loss_token"], found["acc"], found["se"]) == (
        0.1,
        0.1,
        0.0,
        0.0,
    )  # ten times 0.1, added one by one: 0.9999999999999999


def test_repeated_answers_are_counted() -> None:
    again = {
        "items": [0, 0, 1],
        "nll": [None, 7.0, None],
        "last_nll": [1.0, 2.0, None],
        "hit": [1, 0, 0],
    }
    found = score.merge_passage_answers(COMMON, "val", [RANK_0, again])
    assert passes(found)["val"] == {
        "nll": [7.0, None, None, 20.0],
        "last_nll": [2.0, None, None, 1.5],
        "hits": "00?0",
        "not_finite": 2,
        "repeated": 2,
    }
    assert score.tally_passage_answers(found, "val") == Tally(4, 1, 2, 2)


def test_agreement_is_over_what_both_answered() -> None:
    assert score.measure_passage_agreement(WHOLE, "infer", "val") is None
    other = {"items": [0, 1, 3], "nll": [None] * 3, "last_nll": [None] * 3, "hit": [1, 0, 0]}
    found = score.merge_passage_answers(WHOLE, "val", [other])
    assert (
        score.measure_passage_agreement(found, "infer", "val")
        == score.measure_passage_agreement(found, "val", "infer")
        == 2 / 3
    )
    assert (
        score.measure_passage_agreement(
            score.merge_passage_answers(WHOLE, "val", []), "infer", "val"
        )
        is None
    )


def test_passages_have_no_parts() -> None:
    assert TASK.breakdowns(WHOLE) == []


def test_good_answers_pass_and_what_is_not_finite_becomes_none() -> None:
    assert score.check_passage_answers(RANK_0, COMMON) == RANK_0
    empty: dict[str, Any] = {name: [] for name in score.ANSWER_COLUMNS}
    assert score.check_passage_answers(empty, COMMON) == empty
    odd = {
        "items": [0, 1, 2, 3],
        "nll": [nan, None, -1e-4, inf],
        "last_nll": [0.0, -inf, 2.0, 1e300],
        "hit": [0, 1, 1, 0],
    }
    assert score.check_passage_answers({**odd, "more": "is not read"}, COMMON) == {
        "items": [0, 1, 2, 3],
        "nll": [None, None, -1e-4, None],
        "last_nll": [0.0, None, 2.0, 1e300],
        "hit": [0, 1, 1, 0],
    }


LISTS = "the engine's outputs must be lists: items, nll, last_nll, hit"
INTEGERS = "the engine's outputs must be lists of integers: items, hit"
FLOATS = "the engine's outputs must be lists of floats (or None): nll, last_nll"
LENGTH = "the engine's outputs must be lists of one length"
RANGE = "the engine's outputs name a passage beyond 0 to 3, or a hit that is not 0 or 1"


@pytest.mark.parametrize(
    ("answers", "kind", "line"),
    [
        (None, TypeError, LISTS),
        ([RANK_0], TypeError, LISTS),
        ({}, TypeError, LISTS),
        (table(nll=(1.0, 2.0)), TypeError, LISTS),
        (table(hit=None), TypeError, LISTS),
        (table(items=[0.0, 1.0]), TypeError, INTEGERS),
        (table(items=[0, None]), TypeError, INTEGERS),
        (table(hit=["1", "0"]), TypeError, INTEGERS),
        (table(nll=[1.0, "2"]), TypeError, FLOATS),
        (table(nll=[1.0, 10**400]), TypeError, FLOATS),
        (table(last_nll=[1.0, True]), TypeError, FLOATS),
        (table(items=[0]), ValueError, LENGTH),
        (table(last_nll=[1.0, 2.0, 3.0]), ValueError, LENGTH),
        (table(items=[0, 4]), ValueError, RANGE),
        (table(items=[-1, 0]), ValueError, RANGE),
        (table(hit=[0, 2]), ValueError, RANGE),
        (table(hit=[-1, 1]), ValueError, RANGE),
        (
            table(nll=[5.0, -0.5]),
            ValueError,
            "the engine's outputs have a negative log-likelihood of -0.5; it is not below 0",
        ),
        (
            table(last_nll=[-0.01, 1.0]),
            ValueError,
            "the engine's outputs have a negative log-likelihood of -0.01; it is not below 0",
        ),
    ],
)
def test_answers_no_record_can_be_made_of(answers: Any, kind: type[Exception], line: str) -> None:
    with pytest.raises(kind) as caught:
        score.check_passage_answers(answers, COMMON)
    assert type(caught.value) is kind
    assert str(caught.value) == line


def test_differences_are_of_last_words_and_of_losses_a_token() -> None:
    other = {
        "items": [0, 1, 2],
        "nll": [7.0, 4.0, 4.0],
        "last_nll": [0.5, 1.0, 2.0],
        "hit": [1, 0, 0],
    }
    theirs = score.merge_passage_answers(COMMON, "infer", [other])
    # Passages of 4, 8 and 2 targets differ by 1 / 4, 0 and 1 / 2 per token; two hits of three do.
    assert (
        score.compare_passage_outputs(WHOLE, theirs, "infer")
        == score.compare_passage_outputs(theirs, WHOLE, "infer")
        == Differences(3, 2, 0.5)
    )
    assert score.compare_passage_outputs(WHOLE, WHOLE, "infer") == Differences(4, 0, 0.0)
    assert score.compare_passage_outputs(WHOLE, theirs, "val") is None
    assert (
        score.compare_passage_outputs(
            WHOLE, theirs.model_copy(update={"index": [0, 1, 2, 3]}), "infer"
        )
        is None
    )
    wild = score.merge_passage_answers(
        COMMON, "infer", [score.check_passage_answers(other | {"nll": [nan, nan, nan]}, COMMON)]
    )
    assert score.compare_passage_outputs(WHOLE, wild, "infer") == Differences(3, 2, None)
    assert TASK.differences is score.compare_passage_outputs


WORDS_0 = RANK_0 | {"argmax": [[7, 8, 9], [5]]}  # last words of passages 3 and 0
WORDS_1 = RANK_1 | {"argmax": [[6], [3, 4]]}


def test_the_likeliest_last_words_are_kept_in_one_list() -> None:
    found = score.merge_passage_answers(
        COMMON, "infer", [score.check_passage_answers(one, COMMON) for one in (WORDS_0, WORDS_1)]
    )
    assert passes(found)["infer"]["argmax"] == [5, 3, 4, 6, 7, 8, 9]
    assert score.list_likeliest_words(found, "infer") == [(5,), (3, 4), (6,), (7, 8, 9)]
    part = score.merge_passage_answers(COMMON, "infer", [WORDS_0])
    assert passes(part)["infer"]["argmax"] == [5, -1, -1, -1, 7, 8, 9]
    assert score.LambadaOutputs.model_validate(found.model_dump(mode="json")) == found
    # If one rank has no argmax, the merged outputs have none; nor have records of version 1.
    assert (
        "argmax"
        not in passes(score.merge_passage_answers(COMMON, "infer", [WORDS_0, RANK_1]))["infer"]
    )
    assert score.list_likeliest_words(WHOLE, "infer") is None


def test_last_words_are_compared_where_both_have_them() -> None:
    found = score.merge_passage_answers(COMMON, "infer", [WORDS_0, WORDS_1])
    other = WORDS_1 | {"argmax": [[6], [3, 5]]}  # the same hits, another word
    theirs = score.merge_passage_answers(COMMON, "infer", [WORDS_0, other])
    assert score.compare_passage_outputs(found, theirs, "infer") == Differences(4, 1, 0.0, 1)
    assert score.compare_passage_outputs(found, WHOLE, "infer") == Differences(4, 0, 0.0)
    both = found.model_copy(
        update={"passes": {"infer": found.passes["infer"], "val": theirs.passes["infer"]}}
    )
    assert score.measure_passage_agreement(both, "infer", "val") == 3 / 4
    old = found.model_copy(
        update={"passes": {"infer": WHOLE.passes["infer"], "val": theirs.passes["infer"]}}
    )
    assert score.measure_passage_agreement(old, "infer", "val") == 1.0


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
def test_last_words_no_record_can_be_made_of(argmax: Any, kind: type[Exception], line: str) -> None:
    with pytest.raises(kind, match=line):
        score.check_passage_answers(RANK_0 | {"argmax": argmax}, COMMON)


def test_a_record_has_as_many_tokens_as_last_words_have() -> None:
    table = score.merge_passage_answers(COMMON, "infer", [WORDS_0, WORDS_1]).model_dump(mode="json")
    table["passes"]["infer"]["argmax"].pop()
    with pytest.raises(ValueError, match="argmax are not those of 7 tokens of last words"):
        score.LambadaOutputs.model_validate(table)


def test_passages_are_those_of_the_scope_or_not() -> None:
    assert score.explain_passage_mismatch(COMMON, Selection(rows=("3", "5", "8-9"))) is None
    for rows in (("3", "5", "8", "10"), ("3-5",), ("0-999999999",)):
        assert score.explain_passage_mismatch(COMMON, Selection(rows=rows)) == golden(
            "4-passages-which-are-not-the"
        )
