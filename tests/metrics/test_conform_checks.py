"""The rows of `steelyard conform` that compare two records: what is compared, and how closely."""

from typing import Any

import pytest

from fixtures import report
from steelyard.metrics.conform_checks import (
    ConformCheck,
    check_answers_again,
    check_conformity,
    has_variety,
)
from steelyard.record.record import Reason, Record
from steelyard.record.run_facts import EngineDetails, WeightsFacts


def failed_comparisons(ours: Record, theirs: Record) -> list[ConformCheck]:
    """Return the comparisons of two records that failed."""
    return [row for row in check_conformity(ours, theirs) if row.ok is False]


def change_step(record: Record, step: int, **values: float) -> Record:
    """Return the record with these values changed in a training step, counted from 0."""
    samples = list(record.samples)
    samples[step] = samples[step].model_copy(update={"values": samples[step].values | values})
    return record.model_copy(update={"samples": samples})


def make_training_record(**values: float) -> Record:
    """Return a valid fp32 training record with these values in its first step; loss is 10 and
    grad_norm 4 by default.
    """
    record = report.make_training_record().model_copy(update={"status": "valid", "reasons": []})
    question = record.case.question | {
        "precision": record.case.question["precision"] | {"matmul": "fp32"}
    }
    record = record.model_copy(
        update={"case": record.case.model_copy(update={"question": question})}
    )
    return change_step(record, 0, **({"loss": 10.0, "grad_norm": 4.0} | values))


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({}, []),
        ({"loss": 10.0009, "grad_norm": 4.0039}, []),
        ({"loss": 10.0011}, ["step 1 loss"]),
        ({"grad_norm": 3.9959}, ["step 1 grad_norm"]),
    ],
)
def test_first_step_must_agree_within_its_tolerance(
    values: dict[str, float], names: list[str]
) -> None:
    assert [
        row.what
        for row in failed_comparisons(make_training_record(), make_training_record(**values))
    ] == names


def test_counts_must_be_equal() -> None:
    ours = make_training_record()
    first, *rest = ours.samples
    first_with_more_pairs = first.model_copy(
        update={"counts": first.counts | {"pairs": first.counts["pairs"] + 1}}
    )
    assert [
        row.what
        for row in failed_comparisons(
            ours, ours.model_copy(update={"samples": [first_with_more_pairs, *rest]})
        )
    ] == ["train counts"]


def test_invalid_run_does_not_conform() -> None:
    ours = make_training_record()
    assert [
        row.what for row in failed_comparisons(ours, ours.model_copy(update={"status": "invalid"}))
    ] == ["status"]


def test_every_step_must_agree() -> None:
    ours = make_training_record()
    theirs = change_step(ours, 1, loss=8.001)
    assert [row.what for row in failed_comparisons(ours, theirs)] == ["step 2 loss"]
    shorter = ours.model_copy(update={"samples": ours.samples[:3]})
    assert [row.what for row in failed_comparisons(ours, shorter)] == [
        "train counts",
        "step 4 loss",
        "step 4 grad_norm",
    ]


def test_run_that_is_too_short_for_an_interval_conforms() -> None:
    ours = make_training_record()
    theirs = ours.model_copy(
        update={"status": "unproven", "reasons": [Reason(code="few_steps", text="few")]}
    )
    assert failed_comparisons(ours, theirs) == []
    status = check_conformity(ours, theirs)[0]
    assert (status.what, status.theirs, status.ok) == ("status", "unproven few_steps", True)


def find_row(ours: Record, theirs: Record, what: str) -> ConformCheck:
    """Return the row on this quantity."""
    [row] = [row for row in check_conformity(ours, theirs) if row.what == what]
    return row


@pytest.mark.parametrize(
    ("weights", "shown", "ok"),
    [
        ({"source": "random", "seed": 0}, "random 0", True),
        ({"source": "random"}, "random", True),
        ({"source": "random", "seed": 1}, "random 1", False),
        ({"source": "huggingface", "header_sha256": "0" * 64}, "huggingface", False),
        ({"source": None}, "", False),
    ],
)
def test_weights_must_be_those_that_were_asked_for(
    weights: dict[str, Any], shown: str, ok: bool
) -> None:
    ours = make_training_record()
    theirs = ours.model_copy(update={"weights": WeightsFacts(**weights)})
    row = find_row(ours, theirs, "weights")
    assert (row.theirs, row.apart, row.ok) == (shown, 0.0 if ok else 1.0, ok)


# of `report.make_train_question`: two layers of 4 · 8² + 3 · 8 · 16, five norms of 8, and two
# tables of 32 rows of 8
PARAMETERS = 1280 + 40 + 512


@pytest.mark.parametrize(
    ("details", "expected", "ok"),
    [
        ({"parameters": PARAMETERS}, PARAMETERS, True),
        ({"parameters": PARAMETERS + 1}, PARAMETERS, False),
        ({"parameters": 2 * PARAMETERS}, PARAMETERS, False),
        ({"parameters": "many"}, PARAMETERS, False),
        ({}, PARAMETERS, None),
        ({"parameters": PARAMETERS + 1536, "padded_vocab": 128}, PARAMETERS + 1536, True),
        ({"parameters": PARAMETERS, "padded_vocab": 128}, PARAMETERS + 1536, False),
        ({"parameters": PARAMETERS, "padded_vocab": 1057}, PARAMETERS, True),
    ],
)
def test_parameters_must_be_those_of_the_model(
    details: dict[str, Any], expected: int, ok: bool | None
) -> None:
    """A padded vocabulary counts with its padding, up to 1024 rows."""
    ours = make_training_record()
    engine = ours.engine.model_copy(update={"details": EngineDetails.model_validate(details)})
    row = find_row(ours, ours.model_copy(update={"engine": engine}), "parameters")
    assert (row.ours, row.ok) == (str(expected), ok)
    assert (row.untested is None) == (ok is not None)


def test_condition_is_named_behind_each_quantity() -> None:
    ours = make_training_record()
    theirs = ours.model_copy(update={"status": "invalid"})
    assert [(row.what, row.ok) for row in check_answers_again(ours, theirs, "in the dark")] == [
        ("status, in the dark", False),
        ("train counts, in the dark", True),
        ("loss, in the dark", True),
        ("loss_before, in the dark", True),
    ]


def make_answered_record(choices: str) -> Record:
    """Return a valid record of questions with these letters as the answers of one pass."""
    count = len(choices)
    answers = {"choices": choices, "hits": "0" * count, "not_finite": 0, "repeated": 0}
    outputs = {
        "gold": "A" * count,
        "subjects": ["one"],
        "subject_of": [0] * count,
        "index": list(range(count)),
        "letters": [1, 2, 3, 4],
        "passes": {"infer": answers},
    }
    return report.make_record(outputs=outputs)


@pytest.mark.parametrize(
    ("choices", "variety"),
    [("AAAA", 0.0), ("AABB", 0.5), ("ABCD", 0.75), ("AA??", 0.0), ("????", None), ("", None)],
)
def test_variety_is_the_probability_of_two_different_answers(
    choices: str, variety: float | None
) -> None:
    record = make_answered_record(choices)
    assert record.task.variety is not None
    outputs = record.task.outputs.model_validate(record.outputs)
    assert record.task.variety(outputs, "infer") == variety
    assert record.task.variety(outputs, "val") is None
    assert has_variety(record) is (variety is not None and variety >= 0.3)


def test_equal_answers_to_different_rows_test_nothing() -> None:
    """Answers kept by position are wrong only if those of the rows differ."""

    def judge(ours: str, theirs: str) -> bool | None:
        rows = check_answers_again(make_answered_record(ours), make_answered_record(theirs), "x")
        [answers] = [row for row in rows if row.what == "infer answers, x"]
        return answers.ok

    assert judge("ABAB", "ABAB") is True
    assert judge("AAAA", "AAAA") is None
    assert judge("AAAA", "AABB") is False


def test_answers_that_are_numbers_always_vary() -> None:
    assert has_variety(make_training_record())
