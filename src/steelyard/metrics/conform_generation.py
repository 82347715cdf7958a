"""Compare what an engine generates with what engine `torch` finds likeliest after the same tokens,
and with what it generates itself under another load.

Behind `steelyard conform`, for kinds of work whose answers a reference engine scores again in a
pass of the same run (`Kind.check_passes`). `torch` generates nothing by itself, so its column holds
what a right engine gives.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from steelyard.metrics.answer_rules import ANSWER_TOLERANCE_NATS
from steelyard.metrics.conform_checks import (
    ANSWER_TOLERANCE,
    MIN_VARIETY,
    ConformCheck,
    check_conformity,
)
from steelyard.metrics.proportion_checks import SLOPE_NAME
from steelyard.record.record import Record
from steelyard.tasks.generate.answers import GeneratedTokens

UNTIMED = "work of generation is not timed: all of its answers are checked"


def check_generation(answered: Record, again: Record) -> list[ConformCheck]:
    """Return one row for each compared quantity of a run of the engine under test, in this order:
    status, weights, parameters, requests that were checked, tokens that are the likeliest, the
    largest distance of one; then the tokens of `again`, a run of the same requests under another
    load. Nothing is raised if they differ.
    """
    rows = [row for row in check_conformity(answered, answered) if not row.what.endswith("counts")]
    rows = [replace(row, ours=None) if row.what == "status" else row for row in rows]
    return [*rows, *_check_tokens(answered), *_check_again(answered, again)]


def has_different_answers(record: Record) -> bool:
    """Return whether the answers of a run differ so much from request to request that one given to
    the wrong request is likely to be seen.
    """
    answers = Counter(tuple(tokens) for tokens in _list_answers(record))
    count = answers.total()
    if count == 0:
        return False
    return 1 - sum(n * n for n in answers.values()) / count**2 >= MIN_VARIETY


def _list_answers(record: Record) -> list[list[int]]:
    """Return the generated tokens that a record kept, one list for each request."""
    outputs = record.task.outputs.model_validate(record.outputs)
    return [
        tokens
        for answers in getattr(outputs, "passes", {}).values()
        if isinstance(answers, GeneratedTokens)
        for tokens in answers.tokens
    ]


def _check_tokens(record: Record) -> Iterator[ConformCheck]:
    """Yield the rows on how the reference engine finds the answers: all requests must have been
    checked, and tokens may differ from the likeliest ones where these are nearly as likely.
    """
    precision, name = record.question.precision.matmul, record.case.name
    checked, exact, distance = (
        _read_metric(record, metric)
        for metric in ("checked_requests", "exact_tokens", "answer_distance")
    )
    asked = record.scope.requests
    yield ConformCheck(
        name,
        "checked requests",
        asked,
        checked,
        None if checked is None or asked is None else abs(checked - asked) / asked,
        0.0,
    )
    yield ConformCheck(
        name,
        "likeliest tokens",
        1.0,
        exact,
        None if exact is None else 1 - exact,
        ANSWER_TOLERANCE.get(precision, 0.0),
    )
    yield ConformCheck(
        name,
        "distance in nats",
        0.0,
        distance,
        distance,
        ANSWER_TOLERANCE_NATS.get(precision, 0.0),
    )


def _check_again(answered: Record, again: Record) -> Iterator[ConformCheck]:
    """Yield the row on the same requests under another load, whose answers must not depend on what
    else is computed with them; not tested if answers hardly differ from request to request. Then
    the row that says that no time is compared.
    """
    precision, name = answered.question.precision.matmul, answered.case.name
    compare = answered.task.differences
    differences = None
    if compare is not None:
        ours, theirs = (
            record.task.outputs.model_validate(record.outputs) for record in (answered, again)
        )
        differences = compare(ours, theirs, answered.task.kind_row.headline[0])
    share = None
    if differences is not None and differences.items:
        share = 1 - differences.other / differences.items
    alike = None if has_different_answers(answered) else "answers to different requests are alike"
    yield ConformCheck(
        name,
        "same answers, under another load",
        1.0,
        share,
        None if share is None else 1 - share,
        ANSWER_TOLERANCE.get(precision, 0.0),
        alike if share == 1.0 else None,
    )
    yield ConformCheck(name, SLOPE_NAME, None, None, None, 0.0, UNTIMED)


def _read_metric(record: Record, name: str) -> float | None:
    """Return the value of a metric of a record, None if it has none."""
    metric = record.metrics.get(name)
    return None if metric is None else metric.value
