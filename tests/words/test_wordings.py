"""Versions of the wording: a record's notes follow its own version and no other. From version 3 on
they are messages of codes and values.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from fixtures.golden import golden
from fixtures.records import RUNS, changed, published
from metrics.test_table import made
from steelyard import words
from steelyard.errors import RequestError
from steelyard.metrics.verify import verify_record
from steelyard.record import record
from steelyard.words import Message, version_1

WRONG = ["the notes are not those that follow from the samples"]
CASE = "lambada-full-closed-bf16-torch"


def of_version(wording: int | None, folder: Path) -> Path:
    """Write a published record, which is of version 1, as the given version would have made it, and
    return its path.
    """
    return changed(published(CASE, folder), lambda table: table.update(wording=wording))


def notes(path: Path) -> list[Message | str]:
    """Return the notes of the record at `path`."""
    return record.read_record(path).notes


def resealed(path: Path, **changes: Any) -> Path:
    """Replace fields of the record at `path`, seal it again, and return the path."""
    found = record.read_record(path).model_copy(update=changes)
    path.write_bytes(record.to_canonical_bytes(record.record_to_json(record.seal_record(found))))
    return path


def test_a_new_record_stores_codes_and_values() -> None:
    found = made()
    told = {"device": "cuda:0", "reason": "sw_power_cap", "share": 2 / 3}
    assert (found.wording, found.notes[0]) == (3, Message("note.slowdown", told))
    assert record.record_to_json(found)["notes"][0] == {"code": "note.slowdown", "values": told}
    stored = [*found.notes, found.quality.note, *(one.detail for one in found.checks)]
    stored += [one.note for one in found.metrics.values() if one.note is not None]
    assert {type(one) for one in stored} == {Message}


def test_json_prints_sentences() -> None:
    table = record.record_to_english_json(made())
    said = "device cuda:0: sw_power_cap in 67% of the readings of a pass"
    assert table["notes"][0] == golden("normal-large-matmuls-reach-the-power", said)
    texts = [table["quality"]["note"], *(one["detail"] for one in table["checks"])]
    texts += [one["note"] for one in table["metrics"].values() if one["note"] is not None]
    assert {type(one) for one in texts} == {str}


def test_a_stored_message_is_read_as_it_was(tmp_path: Path) -> None:
    found = made()
    path = record.write_record(found, tmp_path)
    again = record.read_record(path)
    assert (again.notes, again.checks, again.quality) == (found.notes, found.checks, found.quality)
    assert again.metrics == found.metrics


def test_a_number_that_is_not_finite_is_stored_as_its_name() -> None:
    said = Message(
        "check.plausible.bad",
        {"rate": float("inf"), "what": Message("limit.matmul", {"margin": float("nan")})},
    )
    assert words.make_storable(said).values == {
        "rate": "inf",
        "what": Message("limit.matmul", {"margin": "nan"}),
    }
    assert words.render_text(words.make_storable(said)) == golden(
        "check-plausible-bad-inf-nan-times"
    )


def test_notes_are_verified_by_code_and_values(tmp_path: Path) -> None:
    path = of_version(3, tmp_path)
    assert verify_record(path) == []
    first, *rest = record.read_record(path).notes
    assert isinstance(first, Message)
    share = first.values["share"]
    assert isinstance(share, float)
    for code, value, wrong in (
        (first.code, share * (1 + 1e-12), []),
        (first.code, share / 2, WRONG),
        ("note.x", share, WRONG),
    ):
        said = Message(code, {**first.values, "share": value})
        assert verify_record(resealed(path, notes=[said, *rest])) == wrong
    assert verify_record(resealed(path, notes=[words.render_text(first), *rest])) == WRONG


@pytest.mark.parametrize(
    "told",
    [{"code": 1}, {"code": "a", "values": {"b": None}}, {"code": "a", "also": 1}, {"values": {}}],
)
def test_what_is_no_message_is_not_read(told: dict[str, Any], tmp_path: Path) -> None:
    path = of_version(3, tmp_path)
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


def test_a_published_record_says_none_and_keeps_its_notes(tmp_path: Path) -> None:
    path = published(CASE, tmp_path)
    assert "wording" not in json.loads(path.read_bytes())
    assert notes(of_version(None, tmp_path / "again")) == notes(path)
    assert golden("note-large-matmuls-run-at-the") in str(notes(path)[0])


@pytest.mark.parametrize("wording", [None, 2, 3])
def test_all_versions_verify(wording: int | None, tmp_path: Path) -> None:
    assert verify_record(of_version(wording, tmp_path)) == []


@pytest.mark.parametrize(("wording", "other"), [(None, 2), (2, None), (3, 2), (2, 3)])
def test_a_note_of_another_version_does_not_verify(
    wording: int | None, other: int | None, tmp_path: Path
) -> None:
    path, strange = of_version(wording, tmp_path), notes(of_version(other, tmp_path / "other"))
    assert len(strange) == len(notes(path)) > 0
    assert verify_record(resealed(path, notes=strange)) == WRONG
    assert verify_record(resealed(path, notes=strange, wording=other)) == []


def test_published_records_have_notes_of_version_1() -> None:
    """That they verify is tested with the docs; here, that there are notes to compare."""
    told = [json.loads(path.read_bytes()) for path in RUNS]
    assert sum(len(one["notes"]) for one in told if "wording" not in one) > 20


def test_a_version_that_is_not_known_is_not_read(tmp_path: Path) -> None:
    path = published(CASE, tmp_path)
    path.write_bytes(record.to_canonical_bytes(json.loads(path.read_bytes()) | {"wording": 4}))
    with pytest.raises(RequestError, match="not a record: wording"):
        record.read_record(path)
