"""Verify records: bytes match their hashes, and metrics, checks and status follow again from the
raw samples.

Behind `steelyard verify`; pages and comparisons read records only through `read_verified_record`.
"""

from collections.abc import Iterator
from math import isclose
from pathlib import Path

from steelyard import words
from steelyard.case import resolve
from steelyard.case.key import key_of
from steelyard.case.precision import name_of, presets
from steelyard.errors import RequestError
from steelyard.metrics import evidence, shipped, stats, table, validity
from steelyard.record import record
from steelyard.record.record import Check, Reason, Record, Value


def read(path: Path) -> Record:
    """Read a record and verify it; raise RequestError with the first problem if it is none or does
    not verify.
    """
    found = record.read(path)
    for problem in _wrong(path, found):
        raise RequestError(f"{path}: does not verify: {problem}; see steelyard verify")
    return found


def verify(path: Path) -> list[str]:
    """Return what is wrong with a record, as sentences; empty if it is sound. Raises RequestError
    if the file is not a record.
    """
    return list(_wrong(path, record.read(path)))


def remarks(path: Path) -> list[str]:
    """Return remarks on a record that are no errors: that its question is not that of the shipped
    case of its name, and why; empty if it is.

    Raises RequestError if the file is not a record.
    """
    found = record.read(path)
    case = found.case
    if case.name not in resolve.names():
        return [f"no case {case.name!r} comes with this version"]
    try:
        now = resolve.resolve(case.name, case.size, case.precision, case.division).case.key(
            found.fingerprint
        )
    except RequestError as error:
        return [f"the shipped case {case.name} has no such question: {error}"]
    if now == case.key:
        return []
    later = ", ".join(shipped.later(found))
    if later:
        return [
            f"the key is {case.key}, of {case.name} as it was before {later}: the shipped case has"
            " another question now"
        ]
    return [f"the key is {case.key}; that of the shipped case {case.name} with these data is {now}"]


def _wrong(path: Path, found: Record) -> Iterator[str]:
    """Yield what is wrong with a record, as sentences: bytes, question, metrics, checks, notes,
    quality, status, and contradictions in its evidence.

    Everything is derived again, by the record's version of the formulas.
    """
    values = table.derive(found)
    checks, reasons, notes, quality = validity.judge(found, values)
    yield from (*record.integrity(path), *_question(found), *_metrics(found, values))
    again = _by_name(checks)
    for name, every in _by_name(found.checks).items():
        if again.get(name) != every:
            yield f"check {name!r} does not follow from the samples"
    if not words.all_among(found.notes, notes):
        yield "the notes are not those that follow from the samples"
    if (found.quality.value, found.quality.evaluated) != (quality.value, quality.evaluated):
        yield (
            f"the quality is {found.quality.value}; recomputed: {quality.value}, evaluated:"
            f" {quality.evaluated}"
        )
    yield from (*_status(found, reasons), *evidence.contradictions(found))


def _by_name(checks: list[Check]) -> dict[str, list[bool]]:
    """Return whether checks passed, in lists by name, because a check that is made for every rank
    occurs several times.
    """
    return {
        name: [one.ok for one in every]
        for name, every in stats.grouped(checks, lambda one: one.name).items()
    }


def _metrics(found: Record, values: dict[str, Value]) -> Iterator[str]:
    """Yield the metrics of a record that do not follow from its samples, or that cannot be derived
    at all. Metrics that an older record lacks are no problem.
    """
    # a record may be older than a metric, or than the text of a note
    for name, told in found.metrics.items():
        if name not in values:
            yield f"metric {name!r} is not one that can be derived"
        elif not _same(told, values[name]):
            yield (
                f"metric {name} is {told.value}; recomputed from the samples: {values[name].value}"
            )


def _same(told: Value, again: Value) -> bool:
    """Return whether two values are equal, numbers to a relative 1e-9; units must be equal, notes
    may differ.
    """
    if told.unit != again.unit or (told.interval is None) != (again.interval is None):
        return False
    pairs = [
        (told.value, again.value),
        *zip(told.interval or (), again.interval or (), strict=True),
    ]
    return all(
        a is b or (a is not None and b is not None and isclose(a, b, rel_tol=1e-9))
        for a, b in pairs
    )


def _status(found: Record, reasons: list[Reason]) -> Iterator[str]:
    """Yield a sentence if the reasons' codes or the status do not follow from the samples. A failed
    run's first reason is its failure and is not derived.
    """
    own = found.reasons[1:] if found.failure else found.reasons
    status = "failed" if found.failure else "invalid" if reasons else "valid"
    if [one.code for one in own] != [one.code for one in reasons] or (
        found.failure and not found.reasons
    ):
        yield "the reasons are not those that follow from the samples"
    if found.status != status:
        yield f"the status is {found.status}; it follows from the samples that it is {status}"


def _question(found: Record) -> Iterator[str]:
    """Yield a sentence if the key is not that of the question, or names of division or precision do
    not match it.
    """
    case = found.case
    if key_of(case.question, found.fingerprint) != case.key:
        yield "the key is not that of the question"
    if (found.question.division, found.question.precision.name) != (case.division, case.precision):
        yield "the division or the precision is not that of the question"
    precision = found.question.precision
    named = name_of(found.question.kind, precision.model_dump())
    if precision.name in presets()[found.question.kind] and precision.name != named:
        yield f"the precision is called {precision.name}, and is {named}"
