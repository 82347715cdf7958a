"""The index of records: what it saves, and that it is never trusted over them."""

import os
import sqlite3
from pathlib import Path

import pytest

from steelyard.errors import RequestError
from steelyard.record import index
from steelyard.record.index import Entry, Seal

SEAL = Seal(b"k" * 32, "v1")


class Counting:
    """Says of each file what it holds, and remembers which were read."""

    def __init__(self) -> None:
        self.read: list[str] = []

    def __call__(self, path: Path) -> Entry:
        self.read.append(path.name)
        return Entry(id=path.read_text(), rate=float(len(path.read_text())))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in "ab":
        (tmp_path / f"{name}.json").write_text(f"record {name}")
    return tmp_path


def look(folder: Path, seal: Seal | None = SEAL, file: Path | None = None) -> tuple[dict[str, str], list[str], list[str]]:
    """Ids by name, the files that were read, and what was said."""
    summarize = Counting()
    found, notes = index.entries(sorted(folder.glob("*.json")), file or folder / index.NAME, seal, summarize)
    return {path.name: entry.id for path, entry in found.items()}, summarize.read, notes


BOTH = {"a.json": "record a", "b.json": "record b"}


def test_a_record_is_read_once(folder: Path) -> None:
    assert look(folder) == (BOTH, ["a.json", "b.json"], [])
    assert look(folder) == (BOTH, [], [])


def test_only_what_changed_is_read_again(folder: Path) -> None:
    look(folder)
    (folder / "b.json").write_text("another")
    (folder / "c.json").write_text("third")
    assert look(folder) == ({"a.json": "record a", "b.json": "another", "c.json": "third"}, ["b.json", "c.json"], [])


def test_the_same_size_and_time_do_not_hide_another_content(folder: Path) -> None:
    look(folder)
    before = (folder / "a.json").stat()
    (folder / "a.json").write_text("forged a")
    os.utime(folder / "a.json", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert look(folder)[:2] == ({"a.json": "forged a", "b.json": "record b"}, ["a.json"])


def test_the_same_content_with_other_times_is_not_read_again(folder: Path) -> None:
    look(folder)
    os.utime(folder / "a.json", ns=(1, 1))
    assert look(folder) == (BOTH, [], [])


def test_what_is_gone_is_forgotten(folder: Path) -> None:
    look(folder)
    (folder / "b.json").unlink()
    look(folder)
    with sqlite3.connect(folder / index.NAME) as opened:
        assert opened.execute("SELECT path FROM records").fetchall() == [("a.json",)]


def test_a_deleted_index_is_made_again(folder: Path) -> None:
    look(folder)
    (folder / index.NAME).unlink()
    assert look(folder) == (BOTH, ["a.json", "b.json"], [])
    assert look(folder)[1] == []


def corrupt(file: Path) -> None:
    raw = bytearray(file.read_bytes())
    raw[200:4000] = b"\xff" * 3800
    file.write_bytes(raw)


def truncated(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def empty(file: Path) -> None:
    file.write_bytes(b"")


def foreign(file: Path) -> None:
    file.unlink()
    with sqlite3.connect(file) as made:
        made.execute("CREATE TABLE mine (x)")


def text(file: Path) -> None:
    file.write_text("not a database at all " * 100)


def linked(file: Path) -> None:
    target = file.with_name("elsewhere")
    target.write_bytes(file.read_bytes())
    file.unlink()
    file.symlink_to(target)


def view(file: Path) -> None:
    """What would run for ever when it is read."""
    with sqlite3.connect(file) as made:
        made.execute("DROP TABLE records")
        made.execute(
            "CREATE VIEW records AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i AS path, "
            "1 AS size, 1 AS mtime_ns, 1 AS ctime_ns, 'x' AS sha256, 'x' AS entry, 'x' AS seal FROM n"
        )


def trigger(file: Path) -> None:
    with sqlite3.connect(file) as made:
        made.execute("CREATE TRIGGER t AFTER INSERT ON records BEGIN DELETE FROM records; END")


def later_schema(file: Path) -> None:
    with sqlite3.connect(file) as made:
        made.execute("PRAGMA user_version = 99")


def other_application(file: Path) -> None:
    with sqlite3.connect(file) as made:
        made.execute("PRAGMA application_id = 7")


WRONG = (corrupt, truncated, empty, foreign, text, linked, view, trigger, later_schema, other_application)


@pytest.mark.parametrize("damage", WRONG, ids=lambda one: one.__name__)
def test_whatever_is_wrong_with_it_it_is_made_anew(damage, folder: Path) -> None:
    look(folder)
    damage(folder / index.NAME)
    found, read, notes = look(folder)
    assert (found, read) == (BOTH, ["a.json", "b.json"])
    assert len(notes) == 1
    assert notes[0].startswith(f"index {str(folder / index.NAME)!r} is not used (")
    assert notes[0].endswith(") and is made anew")
    assert look(folder) == (BOTH, [], [])


def test_a_link_is_replaced_and_what_it_led_to_is_untouched(folder: Path) -> None:
    look(folder)
    linked(folder / index.NAME)
    before = (folder / "elsewhere").read_bytes()
    look(folder)
    assert not (folder / index.NAME).is_symlink()
    assert (folder / "elsewhere").read_bytes() == before


@pytest.mark.parametrize("column", ["entry", "sha256", "seal", "path"])
def test_a_row_that_somebody_changed_is_not_believed(column: str, folder: Path) -> None:
    look(folder)
    lie = {"entry": '{"id":"a lie"}', "sha256": "0" * 64, "seal": "0" * 64, "path": "b.json' OR '1'='1"}[column]
    with sqlite3.connect(folder / index.NAME) as opened:
        opened.execute(f"UPDATE records SET {column} = ? WHERE path = 'a.json'", (lie,))
    assert look(folder) == (BOTH, ["a.json"], [])


def test_an_index_that_came_with_somebodys_records_says_nothing(folder: Path) -> None:
    look(folder, Seal(b"s" * 32, "v1"))
    assert look(folder)[:2] == (BOTH, ["a.json", "b.json"])


def test_another_version_of_the_package_reads_again(folder: Path) -> None:
    look(folder)
    assert look(folder, Seal(SEAL.key, "v2"))[1] == ["a.json", "b.json"]


def test_rows_of_wrong_types_are_not_believed(folder: Path) -> None:
    look(folder)
    with sqlite3.connect(folder / index.NAME) as opened:
        opened.execute("UPDATE records SET size = x'00ff', entry = NULL, seal = NULL WHERE path = 'a.json'")
    assert look(folder)[0] == BOTH


def test_a_folder_that_cannot_be_written_works_without(folder: Path) -> None:
    """Nobody can make a file in /proc, not even root."""
    file = Path("/proc") / index.NAME
    found, read, notes = look(folder, file=file)
    assert (found, read) == (BOTH, ["a.json", "b.json"])
    assert notes == [f"no index is kept: {str(file)!r} cannot be written: unable to open database file"]


def test_an_index_that_cannot_be_written_is_said_and_harms_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(index.os, "replace", full)
    found, _, notes = look(folder)
    assert found == BOTH
    assert notes == [f"no index is kept: {str(folder / index.NAME)!r} cannot be written: No space left on device"]
    assert sorted(path.name for path in folder.iterdir()) == ["a.json", "b.json"]


def test_without_a_seal_there_is_no_index(folder: Path) -> None:
    assert look(folder, None) == (BOTH, ["a.json", "b.json"], [])
    assert not (folder / index.NAME).exists()


def test_names_of_files_are_values_and_no_sql(folder: Path) -> None:
    odd = folder / "x'); DROP TABLE records; --.json"
    odd.write_text("odd")
    assert look(folder)[0] == BOTH | {odd.name: "odd"}
    assert look(folder)[1:] == ([], [])


def test_a_file_of_somebody_else_is_never_overwritten(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs.sqlite"
    theirs.touch()
    foreign(theirs)
    before = theirs.read_bytes()
    with pytest.raises(RequestError) as caught:
        index.named(theirs)
    assert str(caught.value) == f"--index {str(theirs)!r} exists and is not a steelyard index; name another file"
    assert theirs.read_bytes() == before
    with pytest.raises(RequestError, match="no folder"):
        index.named(tmp_path / "none" / "index")
    assert index.named(tmp_path / "new") == tmp_path / "new"


def test_a_named_index_holds_for_several_folders(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "all.sqlite"
    assert look(folder, file=file)[1] == ["a.json", "b.json"]
    assert index.named(file) == file
    assert look(folder, file=file)[1] == []


def test_the_key_is_made_once_and_ones_own(tmp_path: Path) -> None:
    first = index.secret(tmp_path)
    assert len(first) == 32
    assert index.secret(tmp_path) == first
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    (tmp_path / "key").write_bytes(b"short")
    assert len(index.secret(tmp_path)) == 32
