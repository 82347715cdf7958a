"""Rows of `steelyard conform` on generation: which quantities are compared, and what is wrong."""

from typing import Any

import pytest

from fixtures.load_records import make_generation_record
from steelyard.metrics.conform_checks import ConformCheck
from steelyard.metrics.conform_generation import (
    UNTIMED,
    check_generation,
    has_different_answers,
)
from steelyard.record.record import Record

TOKENS = [[1, 2, 3], [4, 5, 6], [7, 8, 9], [1, 1, 1]]
LIKELIEST, AGAIN = "likeliest tokens", "same answers, under another load"


def make_record(
    tokens: list[list[int]] = TOKENS,
    exact: float = 1.0,
    distance: float = 0.0,
    checked: float = 4.0,
) -> Record:
    """Return a record in fp32 with these answers of four requests, and what their check found."""
    record = make_generation_record()
    precision = record.case.question["precision"] | {"matmul": "fp32"}
    question = record.case.question | {"precision": precision}
    found = {"exact_tokens": exact, "answer_distance": distance, "checked_requests": checked}
    metrics = record.metrics | {
        name: record.metrics[name].model_copy(update={"value": value})
        for name, value in found.items()
    }
    answers: dict[str, Any] = {"numbers": list(range(len(tokens))), "tokens": tokens}
    return record.model_copy(
        update={
            "case": record.case.model_copy(update={"question": question}),
            "metrics": metrics,
            "outputs": {"passes": {"generate": answers}},
            "scope": record.scope.model_copy(update={"requests": 4}),
        }
    )


def find_row(rows: list[ConformCheck], what: str) -> ConformCheck:
    """Return the row of this quantity."""
    return next(row for row in rows if row.what == what)


def test_right_answers_conform() -> None:
    rows = check_generation(make_record(), make_record())
    assert [row.what for row in rows] == [
        *("status", "weights", "parameters", "checked requests", LIKELIEST),
        *("distance in nats", AGAIN, "CPU s per TFLOP"),
    ]
    assert [find_row(rows, what).ok for what in ("checked requests", LIKELIEST, AGAIN)] == [
        True
    ] * 3
    assert find_row(rows, "CPU s per TFLOP").untested == UNTIMED
    assert find_row(rows, "status").ours is None


@pytest.mark.parametrize(
    ("changes", "what", "apart"),
    [
        ({"exact": 0.75}, LIKELIEST, 0.25),
        ({"distance": 0.5}, "distance in nats", 0.5),
        ({"checked": 3.0}, "checked requests", 0.25),
    ],
    ids=["tokens", "distance", "checked"],
)
def test_wrong_answers_do_not_conform(changes: dict[str, float], what: str, apart: float) -> None:
    row = find_row(check_generation(make_record(**changes), make_record()), what)
    assert (row.ok, row.apart) == (False, apart)


def test_answers_that_depend_on_the_load_do_not_conform() -> None:
    again = make_record([*TOKENS[:3], [1, 1, 2]])
    row = find_row(check_generation(make_record(), again), AGAIN)
    assert (row.ok, row.theirs, row.apart) == (False, 0.75, 0.25)


def test_a_run_without_answers_does_not_conform() -> None:
    nothing = make_record().model_copy(update={"outputs": {"passes": {}}, "metrics": {}})
    rows = check_generation(nothing, make_record())
    whats = ("checked requests", LIKELIEST, "distance in nats", AGAIN)
    assert [find_row(rows, what).ok for what in whats] == [False] * 4


def test_equal_answers_to_all_requests_say_nothing() -> None:
    alike = make_record([[1, 2, 3]] * 4)
    assert not has_different_answers(alike)
    assert has_different_answers(make_record())
    assert find_row(check_generation(alike, alike), AGAIN).ok is None
    differs = make_record([[1, 2, 3]] * 3 + [[1, 2, 4]])
    assert find_row(check_generation(alike, differs), AGAIN).ok is False
