"""Tests of the index of records: which reads it saves, and that it is never trusted over the
records.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from fixtures.golden import golden
from steelyard.errors import RequestError
from steelyard.record import index
from steelyard.record.index import RecordSummary

VERSION = "v1"


class Counting:
    """A summarizer of records that makes an entry from a file's text and stores the names of the
    files it read.
    """

    def __init__(self) -> None:
        self.read: list[str] = []

    def __call__(self, path: Path) -> RecordSummary:
        self.read.append(path.name)
        return RecordSummary(id=path.read_text(), rate=float(len(path.read_text())))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with the two records a.json and b.json."""
    for name in "ab":
        (tmp_path / f"{name}.json").write_text(f"record {name}")
    return tmp_path


def look(
    folder: Path, version: str = VERSION, file: Path | None = None
) -> tuple[dict[str, str], list[str], list[str]]:
    """Read the entries of a folder's records through an index; return ids by file name, the names
    of the files that were read, and the messages.
    """
    summarize = Counting()
    found, notes = index.summarize_records(
        sorted(folder.glob("?.json")), file or cache(folder), version, summarize
    )
    return {path.name: entry.id for path, entry in found.items()}, summarize.read, notes


def cache(folder: Path) -> Path:
    """Return the path of the index for a folder, in a cache folder beside it."""
    place = folder.parent / f"{folder.name}-cache"
    place.mkdir(exist_ok=True)
    return place / index.INDEX_NAME


def change(file: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Edit a JSON file in place."""
    table = json.loads(file.read_bytes())
    edit(table)
    file.write_text(json.dumps(table, separators=(",", ":")))


BOTH = {"a.json": "record a", "b.json": "record b"}


def test_a_record_is_read_once(folder: Path) -> None:
    assert look(folder) == (BOTH, ["a.json", "b.json"], [])
    assert look(folder) == (BOTH, [], [])


def test_only_what_changed_is_read_again(folder: Path) -> None:
    look(folder)
    (folder / "b.json").write_text("another")
    (folder / "c.json").write_text("third")
    assert look(folder) == (
        {"a.json": "record a", "b.json": "another", "c.json": "third"},
        ["b.json", "c.json"],
        [],
    )


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
    assert list(json.loads(cache(folder).read_bytes())["rows"]) == [str(folder / "a.json")]


def test_files_of_other_folders_are_not_looked_for(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """They may be on a network file system that does not answer."""
    other = tmp_path_factory.mktemp("other")
    (other / "c.json").write_text("record c")
    look(other, file=cache(folder))
    (other / "c.json").unlink()
    look(folder)
    assert str(other / "c.json") in json.loads(cache(folder).read_bytes())["rows"]


def test_records_of_other_folders_are_kept(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tmp_path_factory.mktemp("other")
    (other / "c.json").write_text("record c")
    look(folder)
    assert look(other, file=cache(folder))[1] == ["c.json"]
    assert look(folder)[1] == look(other, file=cache(folder))[1] == []


def test_a_deleted_index_is_made_again(folder: Path) -> None:
    look(folder)
    cache(folder).unlink()
    assert look(folder) == (BOTH, ["a.json", "b.json"], [])
    assert look(folder)[1] == []


def corrupt(file: Path) -> None:
    """Overwrite 200 bytes in the index."""
    raw = bytearray(file.read_bytes())
    raw[200:400] = b"\xff" * 200
    file.write_bytes(raw)


def truncated(file: Path) -> None:
    """Cut the index in half."""
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def empty(file: Path) -> None:
    """Make the index an empty file."""
    file.write_bytes(b"")


def foreign(file: Path) -> None:
    """Replace the index by JSON of another program."""
    file.write_text('{"mine": 1}')


def text(file: Path) -> None:
    """Replace the index by plain text."""
    file.write_text("not an index at all " * 100)


def linked(file: Path) -> None:
    """Replace the index by a link to a copy of it."""
    target = file.with_name("elsewhere")
    target.write_bytes(file.read_bytes())
    file.unlink()
    file.symlink_to(target)


def waiting(file: Path) -> None:
    """Replace the index by a named pipe, on which a reader would wait for ever."""
    file.unlink()
    os.mkfifo(file)


def deep(file: Path) -> None:
    """Replace the index by deeply nested JSON."""
    file.write_bytes(index.INDEX_MAGIC + b"[" * 100_000)


def huge(file: Path) -> None:
    """Make the index larger than the limit."""
    with file.open("r+b") as opened:
        opened.truncate(index.MAX_BYTES + 1)


def later_schema(file: Path) -> None:
    """Give the index an unknown version."""
    change(file, lambda table: table.update(steelyard_index=99))


def more_keys(file: Path) -> None:
    """Add an unknown key to the index."""
    change(file, lambda table: table.update(more=1))


def wrong_types(file: Path) -> None:
    """Replace values of the index's first row by nulls."""
    change(file, lambda table: next(iter(table["rows"].values())).update(size=None, entry=None))


def writable(file: Path) -> None:
    """Let every user write the index."""
    file.chmod(0o666)


WRONG = (
    corrupt,
    truncated,
    empty,
    foreign,
    text,
    linked,
    waiting,
    deep,
    huge,
    later_schema,
    more_keys,
    wrong_types,
    writable,
)


@pytest.mark.parametrize("damage", WRONG, ids=lambda one: one.__name__)
def test_whatever_is_wrong_with_it_it_is_made_anew(damage, folder: Path) -> None:
    look(folder)
    damage(cache(folder))
    found, read, notes = look(folder)
    assert (found, read) == (BOTH, ["a.json", "b.json"])
    assert len(notes) == 1
    assert notes[0].startswith(f"index {str(cache(folder))!r} is not used (")
    assert notes[0].endswith(") and is made anew")
    assert look(folder) == (BOTH, [], [])


def test_a_link_is_replaced_and_what_it_led_to_is_untouched(folder: Path) -> None:
    look(folder)
    linked(cache(folder))
    before = cache(folder).with_name("elsewhere").read_bytes()
    look(folder)
    assert not (cache(folder)).is_symlink()
    assert cache(folder).with_name("elsewhere").read_bytes() == before


def test_an_index_of_another_user_is_not_believed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look(folder)
    monkeypatch.setattr(index.os, "geteuid", lambda: 12345)
    found, read, notes = look(folder)
    assert (found, read) == (BOTH, ["a.json", "b.json"])
    assert "another user owns it, or can write it" in notes[0]


def test_only_its_user_can_write_it_whatever_the_umask(folder: Path) -> None:
    before = os.umask(0)
    try:
        look(folder)
    finally:
        os.umask(before)
    assert cache(folder).stat().st_mode & 0o777 == 0o600
    assert look(folder)[1:] == ([], [])


@pytest.mark.parametrize("key", ["sha256", "size", "mtime_ns", "ctime_ns"])
def test_a_row_of_another_file_is_not_believed(key: str, folder: Path) -> None:
    """The file differs in at least one value from the one that the row was made of."""
    look(folder)
    lie = {
        "sha256": "0" * 64,
        "entry": {"id": "a lie"},
        key: "0" * 64 if key == "sha256" else 1,
        "mtime_ns": 1,
    }
    change(cache(folder), lambda table: table["rows"][str(folder / "a.json")].update(lie))
    assert look(folder) == (BOTH, ["a.json"], [])


def test_an_index_that_came_with_somebodys_records_says_nothing(folder: Path) -> None:
    look(folder, file=folder / index.INDEX_NAME)
    change(
        folder / index.INDEX_NAME,
        lambda table: table["rows"][str(folder / "a.json")].update(entry={"id": "a lie"}),
    )
    assert look(folder) == (BOTH, ["a.json", "b.json"], [])


def test_another_version_of_the_package_reads_again(folder: Path) -> None:
    look(folder)
    assert look(folder, "v2")[1] == ["a.json", "b.json"]


def test_a_folder_that_cannot_be_written_works_without(folder: Path) -> None:
    """Nobody can create a file in /proc, not even root."""
    file = Path("/proc") / index.INDEX_NAME
    found, read, notes = look(folder, file=file)
    assert (found, read) == (BOTH, ["a.json", "b.json"])
    assert notes == [
        f"no index is kept: {str(file)!r} cannot be written: No such file or directory"
    ]


def test_an_index_that_cannot_be_written_is_said_and_harms_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(index.os, "replace", full)
    found, _, notes = look(folder)
    assert found == BOTH
    assert notes == [
        f"no index is kept: {str(cache(folder))!r} cannot be written: No space left on device"
    ]
    assert list(cache(folder).parent.iterdir()) == []


def test_without_a_file_there_is_no_index(folder: Path) -> None:
    summarize = Counting()
    found, notes = index.summarize_records([folder / "a.json"], None, VERSION, summarize)
    assert (found[folder / "a.json"].id, summarize.read, notes) == ("record a", ["a.json"], [])


@pytest.mark.parametrize(
    "name", ['".json', "%.json", "\n.json", "é.json", os.fsdecode(b"\xff.json")]
)
def test_any_name_of_a_file_will_do(name: str, folder: Path) -> None:
    odd = folder / name
    odd.write_text("odd")
    assert look(folder)[0] == BOTH | {odd.name: "odd"}
    assert look(folder)[1:] == ([], [])


def test_more_than_fits_is_left_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    look(folder)
    monkeypatch.setattr(index, "MAX_BYTES", cache(folder).stat().st_size)
    other = folder / "other"
    other.mkdir()
    (other / "c.json").write_text("record c")
    assert look(other, file=cache(folder)) == ({"c.json": "record c"}, ["c.json"], [])
    assert list(json.loads(cache(folder).read_bytes())["rows"]) == [str(other / "c.json")]
    monkeypatch.setattr(index, "MAX_BYTES", 10)
    found, _, notes = look(folder)
    assert found == BOTH
    assert notes[-1] == golden("no-index-is-kept-2-records")


def test_writers_at_the_same_time_leave_one_whole_index(folder: Path) -> None:
    said: list[str] = []
    threads = [Thread(target=lambda: said.extend(look(folder)[2])) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert said == []
    assert look(folder) == (BOTH, [], [])
    assert [path.name for path in cache(folder).parent.iterdir()] == [index.INDEX_NAME]


def test_a_file_of_somebody_else_is_never_overwritten(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = tmp_path / "theirs.json"
    foreign(theirs)
    before = theirs.read_bytes()
    with pytest.raises(RequestError) as caught:
        index.check_index_path(theirs)
    assert (
        str(caught.value)
        == f"--index {str(theirs)!r} exists and is not a steelyard index; name another file"
    )
    assert theirs.read_bytes() == before
    with pytest.raises(RequestError, match="no folder"):
        index.check_index_path(tmp_path / "none" / "index")
    assert index.check_index_path(tmp_path / "new") == tmp_path / "new"
    look(folder)
    monkeypatch.setattr(index.os, "geteuid", lambda: 12345)
    with pytest.raises(RequestError, match="is not a steelyard index; name another file"):
        index.check_index_path(cache(folder))


def test_a_named_index_holds_for_several_folders(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "all.index"
    assert look(folder, file=file)[1] == ["a.json", "b.json"]
    assert index.check_index_path(file) == file
    assert look(folder, file=file)[1] == []
