"""Versions of the wording: a record's notes are those of its own version, and of no other."""

import json
from pathlib import Path
from typing import Any

import pytest

from fixtures.records import RUNS, changed, published
from metrics.test_table import made
from steelyard.errors import RequestError
from steelyard.metrics.verify import verify
from steelyard.record import record

WRONG = ["the notes are not those that follow from the samples"]
CASE = "lambada-full-closed-bf16-torch"


def of_version(wording: int | None, folder: Path) -> Path:
    """A published record, which is of version 1, or the same as a later version would have made it."""
    return changed(published(CASE, folder), lambda table: table.update(wording=wording))


def notes(path: Path) -> list[str]:
    told: list[str] = json.loads(path.read_bytes())["notes"]
    return told


def resealed(path: Path, **changes: Any) -> Path:
    found = record.read(path).model_copy(update=changes)
    path.write_bytes(record.canonical_bytes(record.to_table(record.seal(found))))
    return path


def test_a_new_record_says_its_version() -> None:
    found = made()
    assert found.wording == 2
    said = "device cuda:0: sw_power_cap in 67% of the readings of a pass"
    assert found.notes[0] == f"{said}; normal: large matmuls reach the power limit"


def test_a_published_record_says_none_and_keeps_its_notes(tmp_path: Path) -> None:
    path = published(CASE, tmp_path)
    assert "wording" not in json.loads(path.read_bytes())
    assert notes(of_version(None, tmp_path / "again")) == notes(path)
    assert "(a note: large matmuls run at the power limit)" in notes(path)[0]


@pytest.mark.parametrize("wording", [None, 2])
def test_both_versions_verify(wording: int | None, tmp_path: Path) -> None:
    assert verify(of_version(wording, tmp_path)) == []


@pytest.mark.parametrize(("wording", "other"), [(None, 2), (2, None)])
def test_a_note_of_another_version_does_not_verify(wording: int | None, other: int | None, tmp_path: Path) -> None:
    path, strange = of_version(wording, tmp_path), notes(of_version(other, tmp_path / "other"))
    assert len(strange) == len(notes(path)) > 0
    assert verify(resealed(path, notes=strange)) == WRONG
    assert verify(resealed(path, notes=strange, wording=other)) == []


def test_published_records_have_notes_of_version_1() -> None:
    """That they verify is a test of the docs; here, that there are notes to compare."""
    told = [json.loads(path.read_bytes()) for path in RUNS]
    assert sum(len(one["notes"]) for one in told if "wording" not in one) > 20


def test_a_version_that_is_not_known_is_not_read(tmp_path: Path) -> None:
    path = published(CASE, tmp_path)
    path.write_bytes(record.canonical_bytes(json.loads(path.read_bytes()) | {"wording": 3}))
    with pytest.raises(RequestError, match="not a record: wording"):
        record.read(path)
