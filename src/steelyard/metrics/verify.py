"""Verify records: bytes match their hashes, and metrics, checks and status follow again from the
raw samples.

Behind `steelyard verify`; pages and comparisons read records only through `read_verified_record`.
"""

from collections.abc import Iterable, Iterator
from math import isclose
from pathlib import Path

from steelyard import words
from steelyard.case import resolve
from steelyard.case.key import compute_question_key
from steelyard.case.precision import load_presets, name_precision
from steelyard.errors import RequestError
from steelyard.metrics import (
    evidence,
    metric_table,
    missing_evidence,
    shipped_cases,
    shipped_peaks,
    stats,
    validity,
)
from steelyard.metrics.result import CheckResult
from steelyard.metrics.standing import derive_status
from steelyard.metrics.validity import Judgement
from steelyard.record import record
from steelyard.record.record import Check, Record, Value


def read_verified_record(path: Path) -> Record:
    """Read the record file at `path`, verify it and return the record; raise RequestError if it is
    no record, or, with the first problem that `_find_problems` finds, if it does not verify.
    """
    run_record = record.read_record(path)
    for problem in _find_problems(path, run_record, *_derive(run_record)):
        raise RequestError(f"{path}: does not verify: {problem}; see steelyard verify")
    return run_record


def verify_record(path: Path) -> list[str]:
    """Return everything that is wrong with the record file at `path`, as sentences
    (`_find_problems`: hashes, question, metrics, checks, notes, quality, status, reasons,
    contradictions); empty if it is sound. Raises RequestError if the file is not a record.
    """
    return verify_with_remarks(path)[0]


def list_remarks(path: Path) -> list[str]:
    """Return remarks on the record file at `path` that are no errors, as sentences: what of its
    question, its datasheet peak and its evidence differs from what comes with this version. At
    most one is on the case (`_remark_on_case`), then `shipped_peaks.list_peak_remarks` and
    `missing_evidence.list_missing_evidence`. Empty if there is nothing to say.

    Raises RequestError if the file is not a record.
    """
    return verify_with_remarks(path)[1]


def verify_with_remarks(path: Path) -> tuple[list[str], list[str]]:
    """Return what `verify_record` and `list_remarks` return for the record file at `path`, as a
    pair; it is read, and everything derived again, only once. Raises RequestError if the file is
    not a record.
    """
    run_record = record.read_record(path)
    metrics, judgement = _derive(run_record)
    remarks = [
        *_remark_on_case(run_record),
        *shipped_peaks.list_peak_remarks(run_record.environment.hardware),
        *missing_evidence.list_missing_evidence(run_record, judgement),
    ]
    return list(_find_problems(path, run_record, metrics, judgement)), remarks


def _derive(run_record: Record) -> tuple[dict[str, Value], Judgement]:
    """Return the metrics of a record and what its evidence says, both derived again by its version
    of the formulas.
    """
    metrics = metric_table.derive_metrics(run_record)
    return metrics, validity.judge_as_messages(run_record, metrics)


def _remark_on_case(run_record: Record) -> list[str]:
    """Return at most one remark: that no case of the record's name is shipped, that the shipped
    case has no such question, or that its key is not the shipped case's, with the fields that came
    later if these explain it. Empty if the keys are equal.
    """
    case = run_record.case
    if case.name not in resolve.list_shipped_cases():
        return [f"no case {case.name!r} comes with this version"]
    try:
        shipped_key = resolve.resolve_case(
            case.name, case.size, case.precision, case.division, _list_load_settings(run_record)
        ).case.compute_key(run_record.fingerprint)
    except RequestError as error:
        return [f"the shipped case {case.name} has no such question: {error}"]
    if shipped_key == case.key:
        return []
    later = ", ".join(shipped_cases.list_later_fields(run_record))
    if later:
        return [
            f"the key is {case.key}, of {case.name} as it was before {later}: the shipped case has"
            " another question now"
        ]
    return [
        f"the question is not that of the shipped case {case.name}: the key is {case.key}, that of"
        f" the shipped case with these data {shipped_key}"
    ]


def _list_load_settings(run_record: Record) -> list[str]:
    """Return the load of a record as `--set` would give it, because every load of a shipped case is
    shown by name; empty for kinds of work without one.
    """
    load = run_record.question.load
    facts = {} if load is None else load.model_dump(mode="json", exclude_none=True)
    return [f"load.{name}={value}" for name, value in facts.items()]


def _find_problems(
    path: Path, run_record: Record, metrics: dict[str, Value], judgement: Judgement
) -> Iterator[str]:
    """Yield what is wrong with a record, as sentences: bytes that do not match hashes; a key that
    is not that of question and data, or another division or precision; metrics, checks, notes,
    quality, status and reasons that do not follow from its samples; and contradictions in its
    evidence.

    `metrics` and `judgement` are what follows from the record now (`_derive`). Checks, metrics and
    notes of them that the record lacks are no problem (`missing_evidence` remarks on some), nor
    are other texts of checks and reasons: checks are compared by name and result, reasons by code.
    """
    yield from (
        *record.find_record_damage(path),
        *_check_question(run_record),
        *_check_metrics(run_record, metrics),
    )
    derived_checks = _group_results(judgement.checks)
    for name, stored_results in _group_results(run_record.checks).items():
        if derived_checks.get(name) != stored_results:
            yield f"check {name!r} does not follow from the samples"
    notes = [words.to_stored_form(note, run_record.wording) for note in judgement.notes]
    if not words.are_all_among(run_record.notes, notes):
        yield "the notes do not follow from the samples"
    quality, reason_codes = judgement.quality, [code for code, _ in judgement.reasons]
    if (run_record.quality.value, run_record.quality.evaluated) != (
        quality.value,
        quality.evaluated,
    ):
        yield (
            f"the quality is {run_record.quality.value}; recomputed: {quality.value}, evaluated:"
            f" {quality.evaluated}"
        )
    yield from (*_check_status(run_record, reason_codes), *evidence.find_contradictions(run_record))


def _group_results(checks: Iterable[Check | CheckResult]) -> dict[str, list[bool]]:
    """Return, by name of a check, whether each check of that name passed, in order; a check that is
    made for every rank occurs several times.
    """
    return {
        name: [check.ok for check in group]
        for name, group in stats.group_by(checks, lambda check: check.name).items()
    }


def _check_metrics(run_record: Record, derived: dict[str, Value]) -> Iterator[str]:
    """Yield a sentence for each stored metric that differs from the derived one (value, interval or
    unit), or that this version cannot derive. Metrics that an older record lacks are no problem,
    nor is another note.
    """
    # a record may be older than a metric, or than the text of a note
    for name, stored in run_record.metrics.items():
        if name not in derived:
            yield f"metric {name!r} cannot be derived: no formula has this name"
        elif not _is_same_value(stored, derived[name]):
            yield (
                f"metric {name} is {stored.value}; recomputed from the samples:"
                f" {derived[name].value}"
            )


def _is_same_value(stored: Value, derived: Value) -> bool:
    """Return whether two values of a metric are equal: units exactly, value and both ends of the
    interval to a relative 1e-9, None only to None. Notes may differ.
    """
    if stored.unit != derived.unit or (stored.interval is None) != (derived.interval is None):
        return False
    pairs = [
        (stored.value, derived.value),
        *zip(stored.interval or (), derived.interval or (), strict=True),
    ]
    return all(
        a is b or (a is not None and b is not None and isclose(a, b, rel_tol=1e-9))
        for a, b in pairs
    )


def _check_status(run_record: Record, derived_codes: list[str]) -> Iterator[str]:
    """Yield a sentence if the codes of the reasons, in order, are not the derived ones or a failed
    run has none, and one if the status does not follow from them (`derive_status`). A failed run's
    first reason is its failure and is not derived.
    """
    stored_reasons = run_record.reasons[1:] if run_record.failure else run_record.reasons
    status = derive_status(bool(run_record.failure), derived_codes)
    if [reason.code for reason in stored_reasons] != derived_codes or (
        run_record.failure and not run_record.reasons
    ):
        yield "the reasons do not follow from the samples"
    if run_record.status != status:
        yield f"the status is {run_record.status}; recomputed from the samples: {status}"


def _check_question(run_record: Record) -> Iterator[str]:
    """Yield a sentence for each of: a key that is not the hash of the question, a division or
    precision of the case that is not the question's, and a precision that bears the name of a
    preset and has other values.
    """
    case = run_record.case
    if compute_question_key(case.question, run_record.fingerprint) != case.key:
        yield "the key does not follow from the question and the data"
    if (run_record.question.division, run_record.question.precision.name) != (
        case.division,
        case.precision,
    ):
        yield "the division or the precision is not that of the question"
    precision = run_record.question.precision
    actual_name = name_precision(run_record.question.kind, precision.model_dump())
    if precision.name in load_presets()[run_record.question.kind] and precision.name != actual_name:
        yield (f"the precision is named {precision.name}, but its settings are {actual_name}")
