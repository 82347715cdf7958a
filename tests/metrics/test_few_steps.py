"""Runs with too few steps or batches for an interval of their rate: unproven from formulas version
5 on, valid with a note before.
"""

from pathlib import Path
from typing import Any

import pytest

from fixtures.golden import golden
from fixtures.records import copy_published_record, rewrite_record
from fixtures.report import make_failed_record, make_train_question, make_training_record
from fixtures.training import list_reason_codes
from metrics.test_metric_table import (
    make_mmlu_record,
    make_rank_file,
    make_run_facts,
    resolve_small_case,
)
from steelyard import words
from steelyard.metrics import standing, validity, verify
from steelyard.record.record import (
    Record,
    Status,
    read_record,
    record_to_json,
    seal_record,
    to_canonical_bytes,
)
from steelyard.run import assemble
from steelyard.words import Message

TODAY = {"formulas": 5, "wording": 3}  # fields of records that are written today


def make_trained_record(steps: int, ranks: int = 1, **changes: Any) -> Record:
    """Return a record of a training run of so many steps of 1 s, the first one of 2 s."""
    times = ((2.0, *[1.0] * (steps - 1)),) * ranks
    return make_training_record(times, **(TODAY | changes))


def make_scored_record(batches: int, code: str | None = None, **changes: Any) -> Record:
    """Return a record of a scoring run of 12 questions in so many batches of 1 s; `code` is that of
    a failure, `changes` are options of `resolve_small_case`.
    """
    rank_file = make_rank_file()
    kept = [sample for sample in rank_file["samples"] if sample["step"] < batches]
    for sample in kept:
        questions = 12 // batches + (sample["step"] < 12 % batches)
        sample["counts"] = sample["counts"] | {"tokens": 600 // batches, "samples": questions}
    seconds = {"val": 2.0, "infer": 1.0}
    windows = [
        window | {"wall_s": batches * seconds[window["pass"]]} for window in rank_file["windows"]
    ]
    rank_file |= {"samples": kept, "windows": windows}
    return make_mmlu_record(rank_file, resolved=resolve_small_case(**changes), code=code)


def list_interval_checks(record: Record) -> list[tuple[bool, str]]:
    """Return result and sentence of each check on the interval."""
    return [
        (check.ok, words.render_text(check.detail))
        for check in record.checks
        if check.name == "interval"
    ]


def write_record(record: Record, path: Path) -> Path:
    """Write a record to a file as a run does, and return its path."""
    path.write_bytes(to_canonical_bytes(record_to_json(record)))
    return path


# A training run's rate rests on the steps of its steady window, which lacks the first.
@pytest.mark.parametrize(("steps", "count"), [(3, 2), (4, 3), (5, 4)])
def test_training_steps_that_are_too_few_are_unproven(steps: int, count: int) -> None:
    record = make_trained_record(steps)
    text = golden("rate-rests-on-few-steps", count, 6)
    assert record.status == standing.find_status(record) == "unproven"
    assert list_reason_codes(record) == ["few_steps"]
    assert [words.render_text(reason.text) for reason in record.reasons] == [text]
    assert list_interval_checks(record) == [(False, text)]
    assert [note.code for note in record.notes if isinstance(note, Message)] == [
        "note.borders_unseen"  # these records have no node agent
    ]
    assert record.reasons[0].text == Message("check.few_steps.bad", {"count": count, "least": 6})
    assert words.render_text(record.reasons[0].text, "zh") == golden(
        "rate-rests-on-few-steps", count, 6, language="zh"
    )


@pytest.mark.parametrize("steps", [1, 2])
def test_steps_of_which_none_is_cut_are_counted_too(steps: int) -> None:
    record = make_trained_record(steps)
    assert (record.status, list_interval_checks(record)) == (
        "unproven",
        [(False, golden("rate-rests-on-few-steps", steps, 6))],
    )


@pytest.mark.parametrize("steps", [6, 7, 9, 10, 11])
def test_six_training_steps_always_have_an_interval(steps: int) -> None:
    record = make_trained_record(steps)
    assert (record.status, list_reason_codes(record)) == ("valid", [])
    assert [ok for ok, _ in list_interval_checks(record)] == [True]
    assert record.metrics["tokens_per_device_s"].interval is not None
    # even if half of ten or more steps are cut as warm-up
    slow_start = make_training_record(((*[9.0] * (steps // 2), *[1.0] * (steps - steps // 2)),))
    rate = slow_start.model_copy(update=TODAY)
    assert assemble.finish_record(rate, None).metrics["tokens_per_device_s"].interval is not None


def test_batches_of_scoring_that_are_too_few_are_unproven() -> None:
    record = make_scored_record(4)
    text = golden("rate-rests-on-few-steps", 4, 5)
    assert (record.formulas, record.status) == (5, "unproven")
    assert [(reason.code, words.render_text(reason.text)) for reason in record.reasons] == [
        ("few_steps", text)
    ]
    assert list_interval_checks(record) == [(False, text)]
    enough = make_scored_record(5)
    assert (enough.status, enough.reasons) == ("valid", [])
    assert [ok for ok, _ in list_interval_checks(enough)] == [True]


def test_size_smoke_is_exempt() -> None:
    for record in (
        make_trained_record(3, case__size="smoke"),
        make_scored_record(4, size="smoke"),
    ):
        assert (record.status, record.reasons, list_interval_checks(record)) == ("valid", [], [])
        assert record.metrics["tokens_per_device_s"].interval is None
        assert standing.find_status(record) == "valid"


def test_a_case_without_a_limit_of_the_interval_is_judged_too() -> None:
    short = make_trained_record(5, case__max_interval=None)
    assert (short.status, list_reason_codes(short)) == ("unproven", ["few_steps"])
    long = make_trained_record(6, case__max_interval=None)
    assert (long.status, list_interval_checks(long)) == ("valid", [])
    uneven = tuple(1.6 if step % 2 else 0.4 for step in range(20))
    wide = make_training_record((uneven,), case__max_interval=None, **TODAY)
    assert (wide.status, list_interval_checks(wide)) == ("valid", [])


@pytest.mark.parametrize("formulas", [None, 2, 3, 4])
def test_earlier_formulas_keep_their_note_and_status(formulas: int | None) -> None:
    record = make_trained_record(5, formulas=formulas)
    assert (record.status, record.reasons, list_interval_checks(record)) == ("valid", [], [])
    assert [words.render_text(note) for note in record.notes] == [
        "too few steps for an interval of the rate"
    ]
    assert standing.find_status(record) == "unproven"
    assert standing.list_reason_codes(record) == ["few_steps"]
    unlimited = make_trained_record(5, formulas=formulas, case__max_interval=None)
    assert (unlimited.status, unlimited.notes) == ("valid", [])


def test_another_reason_makes_a_short_run_invalid() -> None:
    record = make_trained_record(4, case__question=make_train_question(steps=5))
    assert (record.status, list_reason_codes(record)) == ("invalid", ["coverage", "few_steps"])


def test_every_step_of_the_slowest_rank_counts_and_not_those_of_all_ranks() -> None:
    """Two ranks of three steps are six steps, and still too few."""
    record = make_trained_record(3, ranks=2)
    assert (record.status, list_interval_checks(record)) == (
        "unproven",
        [(False, golden("rate-rests-on-few-steps", 2, 6))],
    )
    assert make_trained_record(6, ranks=2).status == "valid"


def test_a_failed_run_has_no_reason_few_steps() -> None:
    for record in (make_scored_record(4, code="killed"), make_scored_record(6, code="killed")):
        assert (record.status, list_reason_codes(record)) == ("failed", ["killed"])
    failure = make_failed_record().failure
    assert failure is not None
    trained = make_trained_record(3, failure=failure.model_dump())
    assert "few_steps" not in list_reason_codes(trained)


def test_a_rate_that_cannot_be_bounded_is_invalid() -> None:
    """With enough steps, an interval that is missing is one without an end."""
    resolved, facts = resolve_small_case(), make_run_facts()
    record = make_mmlu_record(resolved=resolved, facts=facts)
    endless = {
        name: value.model_copy(update={"interval": None}) for name, value in record.metrics.items()
    }
    _, reasons, _, _ = validity.judge_record(record, endless)
    assert [(reason.code, words.render_text(reason.text)) for reason in reasons] == [
        ("interval", "the 95 % interval of the rate has no upper end")
    ]


def rewrite_published(folder: Path, formulas: int, changes: dict[str, Any] | None = None) -> Path:
    """Write a copy of a published training run of four steps, as if it had been made with this
    version of the formulas, and return its path; `changes` are fields after that.
    """
    path = copy_published_record("123d6c07", folder)
    rewrite_record(path, lambda table: table.update(formulas=formulas, wording=3))
    changed = read_record(path).model_copy(update=changes or {})
    return write_record(seal_record(changed), path)


def test_an_unproven_record_verifies(tmp_path: Path) -> None:
    path = rewrite_published(tmp_path, 5)
    record = read_record(path)
    assert (record.status, standing.list_reason_codes(record)) == ("unproven", ["few_steps"])
    assert list_interval_checks(record) == [(False, golden("rate-rests-on-few-steps", 3, 6))]
    assert verify.verify_record(path) == []


def test_a_record_of_formulas_4_verifies_as_valid(tmp_path: Path) -> None:
    path = rewrite_published(tmp_path, 4)
    record = read_record(path)
    assert (record.status, standing.find_status(record)) == ("valid", "unproven")
    assert (record.reasons, verify.verify_record(path)) == ([], [])


@pytest.mark.parametrize("status", ["valid", "invalid", "failed"])
def test_a_short_run_with_another_status_does_not_verify(status: Status, tmp_path: Path) -> None:
    problem = f"the status is {status}; recomputed from the samples: unproven"
    path = rewrite_published(tmp_path, 5, {"status": status})
    assert verify.verify_record(path) == [problem]
    path = rewrite_published(tmp_path, 5, {"status": status, "reasons": []})
    assert verify.verify_record(path) == ["the reasons do not follow from the samples", problem]


def test_an_older_record_cannot_store_unproven(tmp_path: Path) -> None:
    path = rewrite_published(tmp_path, 5, {"formulas": 4})
    assert verify.verify_record(path) == [
        # version 5 also brought the check of the timed matmuls and a note on borders
        "check 'calibrated' does not follow from the samples",
        "check 'interval' does not follow from the samples",
        "the notes do not follow from the samples",
        "the reasons do not follow from the samples",
        "the status is unproven; recomputed from the samples: valid",
    ]
