"""Versions of the wording: a record's notes follow its own version and no other. From version 3 on
they are messages of codes and values.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from fixtures.golden import golden
from fixtures.records import RUNS, copy_published_record, rewrite_record
from metrics.test_metric_table import make_mmlu_record
from steelyard import words
from steelyard.errors import RequestError
from steelyard.metrics.verify import verify_record
from steelyard.record import record
from steelyard.words import Message, Text, version_1

WRONG_NOTES = ["the notes do not follow from the samples"]
CASE = "lambada-full-closed-bf16-torch"


def make_record_of_version(wording: int | None, folder: Path) -> Path:
    """Write a published record, which is of version 1, as the given version would have made it, and
    return its path.
    """
    return rewrite_record(
        copy_published_record(CASE, folder), lambda table: table.update(wording=wording)
    )


def read_notes(path: Path) -> list[Message | str]:
    """Return the notes of the record at `path`."""
    return record.read_record(path).notes


def reseal(path: Path, **changes: Any) -> Path:
    """Replace fields of the record at `path`, seal it again, and return the path."""
    changed_record = record.read_record(path).model_copy(update=changes)
    path.write_bytes(
        record.to_canonical_bytes(record.record_to_json(record.seal_record(changed_record)))
    )
    return path


def test_a_new_record_stores_codes_and_values() -> None:
    run_record = make_mmlu_record()
    values = {"device": "cuda:0", "reason": "sw_power_cap", "share": 2 / 3}
    assert (run_record.wording, run_record.notes[0]) == (3, Message("note.slowdown", values))
    assert record.record_to_json(run_record)["notes"][0] == {
        "code": "note.slowdown",
        "values": values,
    }
    stored = [
        *run_record.notes,
        run_record.quality.note,
        *(item.detail for item in run_record.checks),
    ]
    stored += [item.note for item in run_record.metrics.values() if item.note is not None]
    assert {type(item) for item in stored} == {Message}


def test_json_prints_sentences() -> None:
    table = record.record_to_english_json(make_mmlu_record())
    sentence = "device cuda:0: sw_power_cap in 67% of the readings of a pass"
    assert table["notes"][0] == golden("normal-large-matmuls-reach-the-power", sentence)
    texts = [table["quality"]["note"], *(item["detail"] for item in table["checks"])]
    texts += [item["note"] for item in table["metrics"].values() if item["note"] is not None]
    assert {type(item) for item in texts} == {str}


def test_a_stored_message_is_read_as_it_was(tmp_path: Path) -> None:
    run_record = make_mmlu_record()
    path = record.write_record(run_record, tmp_path)
    reread = record.read_record(path)
    assert (reread.notes, reread.checks, reread.quality) == (
        run_record.notes,
        run_record.checks,
        run_record.quality,
    )
    assert reread.metrics == run_record.metrics


def test_a_number_that_is_not_finite_is_stored_as_its_name() -> None:
    message = Message(
        "check.plausible.bad",
        {"rate": float("inf"), "what": Message("limit.matmul", {"margin": float("nan")})},
    )
    assert words.make_storable(message).values == {
        "rate": "inf",
        "what": Message("limit.matmul", {"margin": "nan"}),
    }
    assert words.render_text(words.make_storable(message)) == golden(
        "check-plausible-bad-inf-nan-times"
    )


def test_notes_are_verified_by_code_and_values(tmp_path: Path) -> None:
    path = make_record_of_version(3, tmp_path)
    assert verify_record(path) == []
    first, *others = record.read_record(path).notes
    assert isinstance(first, Message)
    share = first.values["share"]
    assert isinstance(share, float)
    for code, value, wrong in (
        (first.code, share * (1 + 1e-12), []),
        (first.code, share / 2, WRONG_NOTES),
        ("note.x", share, WRONG_NOTES),
    ):
        message = Message(code, {**first.values, "share": value})
        assert verify_record(reseal(path, notes=[message, *others])) == wrong
    assert verify_record(reseal(path, notes=[words.render_text(first), *others])) == WRONG_NOTES


@pytest.mark.parametrize(
    "told",
    [{"code": 1}, {"code": "a", "values": {"b": None}}, {"code": "a", "also": 1}, {"values": {}}],
)
def test_malformed_messages_are_not_read(told: dict[str, Any], tmp_path: Path) -> None:
    path = make_record_of_version(3, tmp_path)
    path.write_bytes(record.to_canonical_bytes(json.loads(path.read_bytes()) | {"notes": [told]}))
    with pytest.raises(RequestError, match="not a record: notes"):
        record.read_record(path)


def test_sentences_of_wording_2_are_frozen() -> None:
    """Records of wording 2 are verified by the English notes of its time. If you change one of
    those, keep the old template in `words/version_1.py` as one of wording 2.
    """
    codes = sorted(
        {
            *version_1.NOTES,
            "note.stepped_down",
            "note.emulated",
            "note.selected",
            "note.own_case",
            "note.counted",
        }
    )
    texts = "\n".join(words.load_texts()[code].en for code in codes)
    assert hashlib.sha256(texts.encode()).hexdigest()[:16] == "d5881283ad1442c7"


def test_a_published_record_has_no_wording_and_keeps_its_notes(tmp_path: Path) -> None:
    path = copy_published_record(CASE, tmp_path)
    assert "wording" not in json.loads(path.read_bytes())
    assert read_notes(make_record_of_version(None, tmp_path / "again")) == read_notes(path)
    assert golden("note-large-matmuls-run-at-the") in str(read_notes(path)[0])


@pytest.mark.parametrize("wording", [None, 2, 3])
def test_all_versions_verify(wording: int | None, tmp_path: Path) -> None:
    assert verify_record(make_record_of_version(wording, tmp_path)) == []


@pytest.mark.parametrize(("wording", "other"), [(None, 2), (2, None), (3, 2), (2, 3)])
def test_a_note_of_another_version_does_not_verify(
    wording: int | None, other: int | None, tmp_path: Path
) -> None:
    path, strange = (
        make_record_of_version(wording, tmp_path),
        read_notes(make_record_of_version(other, tmp_path / "other")),
    )
    assert len(strange) == len(read_notes(path)) > 0
    assert verify_record(reseal(path, notes=strange)) == WRONG_NOTES
    assert verify_record(reseal(path, notes=strange, wording=other)) == []


def test_published_records_have_notes_of_version_1() -> None:
    """That they verify is tested with the docs; here, that there are notes to compare."""
    tables = [json.loads(path.read_bytes()) for path in RUNS]
    assert sum(len(table["notes"]) for table in tables if "wording" not in table) > 20


def test_an_unknown_version_is_not_read(tmp_path: Path) -> None:
    path = copy_published_record(CASE, tmp_path)
    path.write_bytes(record.to_canonical_bytes(json.loads(path.read_bytes()) | {"wording": 4}))
    with pytest.raises(RequestError, match="not a record: wording"):
        record.read_record(path)


def test_a_text_in_an_unknown_language_is_refused() -> None:
    with pytest.raises(ValueError, match="language 'de' is not known; allowed: en, zh"):
        Text("code", "one", "二").in_language("de")  # type: ignore[arg-type]
