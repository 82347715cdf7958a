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


class CountingSummarizer:
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


def read_index(
    folder: Path, version: str = VERSION, file: Path | None = None
) -> tuple[dict[str, str], list[str], list[str]]:
    """Read the entries of a folder's records through an index; return ids by file name, the names
    of the files that were read, and the messages.
    """
    summarize = CountingSummarizer()
    entries_by_path, messages = index.summarize_records(
        sorted(folder.glob("?.json")), file or index_file(folder), version, summarize
    )
    return (
        {path.name: entry.id for path, entry in entries_by_path.items()},
        summarize.read,
        messages,
    )


def index_file(folder: Path) -> Path:
    """Return the path of the index for a folder, in a cache folder beside it."""
    cache_folder = folder.parent / f"{folder.name}-cache"
    cache_folder.mkdir(exist_ok=True)
    return cache_folder / index.INDEX_NAME


def edit_json(file: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Edit a JSON file in place."""
    document = json.loads(file.read_bytes())
    edit(document)
    file.write_text(json.dumps(document, separators=(",", ":")))


BOTH_IDS = {"a.json": "record a", "b.json": "record b"}


def test_a_record_is_read_once(folder: Path) -> None:
    assert read_index(folder) == (BOTH_IDS, ["a.json", "b.json"], [])
    assert read_index(folder) == (BOTH_IDS, [], [])


def test_only_changed_records_are_read_again(folder: Path) -> None:
    read_index(folder)
    (folder / "b.json").write_text("another")
    (folder / "c.json").write_text("third")
    assert read_index(folder) == (
        {"a.json": "record a", "b.json": "another", "c.json": "third"},
        ["b.json", "c.json"],
        [],
    )


def test_changed_content_of_equal_size_and_time_is_noticed(folder: Path) -> None:
    read_index(folder)
    before = (folder / "a.json").stat()
    (folder / "a.json").write_text("forged a")
    os.utime(folder / "a.json", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert read_index(folder)[:2] == ({"a.json": "forged a", "b.json": "record b"}, ["a.json"])


def test_equal_content_with_other_times_is_not_read_again(folder: Path) -> None:
    read_index(folder)
    os.utime(folder / "a.json", ns=(1, 1))
    assert read_index(folder) == (BOTH_IDS, [], [])


def test_removed_records_leave_the_index(folder: Path) -> None:
    read_index(folder)
    (folder / "b.json").unlink()
    read_index(folder)
    assert list(json.loads(index_file(folder).read_bytes())["rows"]) == [str(folder / "a.json")]


def test_files_of_other_folders_are_not_checked(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """They may be on a network file system that does not answer."""
    other = tmp_path_factory.mktemp("other")
    (other / "c.json").write_text("record c")
    read_index(other, file=index_file(folder))
    (other / "c.json").unlink()
    read_index(folder)
    assert str(other / "c.json") in json.loads(index_file(folder).read_bytes())["rows"]


def test_records_of_other_folders_stay_in_the_index(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tmp_path_factory.mktemp("other")
    (other / "c.json").write_text("record c")
    read_index(folder)
    assert read_index(other, file=index_file(folder))[1] == ["c.json"]
    assert read_index(folder)[1] == read_index(other, file=index_file(folder))[1] == []


def test_deleted_index_is_rebuilt(folder: Path) -> None:
    read_index(folder)
    index_file(folder).unlink()
    assert read_index(folder) == (BOTH_IDS, ["a.json", "b.json"], [])
    assert read_index(folder)[1] == []


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
    edit_json(file, lambda table: table.update(steelyard_index=99))


def more_keys(file: Path) -> None:
    """Add an unknown key to the index."""
    edit_json(file, lambda table: table.update(more=1))


def wrong_types(file: Path) -> None:
    """Replace values of the index's first row by nulls."""
    edit_json(file, lambda table: next(iter(table["rows"].values())).update(size=None, entry=None))


def writable(file: Path) -> None:
    """Let every user write the index."""
    file.chmod(0o666)


DAMAGES = (
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


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda one: one.__name__)
def test_damaged_index_is_rebuilt(damage, folder: Path) -> None:
    read_index(folder)
    damage(index_file(folder))
    ids, names_read, messages = read_index(folder)
    assert (ids, names_read) == (BOTH_IDS, ["a.json", "b.json"])
    assert len(messages) == 1
    assert messages[0].startswith(f"index {str(index_file(folder))!r} is ignored (")
    assert messages[0].endswith(") and rebuilt")
    assert read_index(folder) == (BOTH_IDS, [], [])


def test_linked_index_is_replaced_and_its_target_untouched(folder: Path) -> None:
    read_index(folder)
    linked(index_file(folder))
    before = index_file(folder).with_name("elsewhere").read_bytes()
    read_index(folder)
    assert not (index_file(folder)).is_symlink()
    assert index_file(folder).with_name("elsewhere").read_bytes() == before


def test_index_of_another_user_is_not_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_index(folder)
    monkeypatch.setattr(index.os, "geteuid", lambda: 12345)
    ids, names_read, messages = read_index(folder)
    assert (ids, names_read) == (BOTH_IDS, ["a.json", "b.json"])
    assert "another user owns it, or can write it" in messages[0]


def test_index_is_private_whatever_the_umask(folder: Path) -> None:
    before = os.umask(0)
    try:
        read_index(folder)
    finally:
        os.umask(before)
    assert index_file(folder).stat().st_mode & 0o777 == 0o600
    assert read_index(folder)[1:] == ([], [])


@pytest.mark.parametrize("key", ["sha256", "size", "mtime_ns", "ctime_ns"])
def test_index_row_of_another_file_is_not_used(key: str, folder: Path) -> None:
    """The file differs in at least one value from the one that the row was made of."""
    read_index(folder)
    false_row = {
        "sha256": "0" * 64,
        "entry": {"id": "a lie"},
        key: "0" * 64 if key == "sha256" else 1,
        "mtime_ns": 1,
    }
    edit_json(
        index_file(folder), lambda table: table["rows"][str(folder / "a.json")].update(false_row)
    )
    assert read_index(folder) == (BOTH_IDS, ["a.json"], [])


def test_index_beside_the_records_is_not_used(folder: Path) -> None:
    read_index(folder, file=folder / index.INDEX_NAME)
    edit_json(
        folder / index.INDEX_NAME,
        lambda table: table["rows"][str(folder / "a.json")].update(entry={"id": "a lie"}),
    )
    assert read_index(folder) == (BOTH_IDS, ["a.json", "b.json"], [])


def test_another_package_version_reads_again(folder: Path) -> None:
    read_index(folder)
    assert read_index(folder, "v2")[1] == ["a.json", "b.json"]


def test_unwritable_index_folder_works_without_an_index(folder: Path) -> None:
    """Nobody can create a file in /proc, not even root."""
    file = Path("/proc") / index.INDEX_NAME
    ids, names_read, messages = read_index(folder, file=file)
    assert (ids, names_read) == (BOTH_IDS, ["a.json", "b.json"])
    assert messages == [
        f"the index was not saved: {str(file)!r} cannot be written: No such file or directory"
    ]


def test_unwritable_index_is_reported_and_harmless(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_full_disk(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(index.os, "replace", raise_full_disk)
    ids, _, messages = read_index(folder)
    assert ids == BOTH_IDS
    assert messages == [
        f"the index was not saved: {str(index_file(folder))!r} cannot be written: No space left on"
        " device"
    ]
    assert list(index_file(folder).parent.iterdir()) == []


def test_no_index_is_written_without_a_file(folder: Path) -> None:
    summarize = CountingSummarizer()
    entries_by_path, messages = index.summarize_records(
        [folder / "a.json"], None, VERSION, summarize
    )
    assert (entries_by_path[folder / "a.json"].id, summarize.read, messages) == (
        "record a",
        ["a.json"],
        [],
    )


@pytest.mark.parametrize(
    "name", ['".json', "%.json", "\n.json", "é.json", os.fsdecode(b"\xff.json")]
)
def test_unusual_file_names_are_indexed(name: str, folder: Path) -> None:
    unusual = folder / name
    unusual.write_text("odd")
    assert read_index(folder)[0] == BOTH_IDS | {unusual.name: "odd"}
    assert read_index(folder)[1:] == ([], [])


def test_rows_beyond_the_size_limit_are_left_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_index(folder)
    monkeypatch.setattr(index, "MAX_BYTES", index_file(folder).stat().st_size)
    other = folder / "other"
    other.mkdir()
    (other / "c.json").write_text("record c")
    assert read_index(other, file=index_file(folder)) == ({"c.json": "record c"}, ["c.json"], [])
    assert list(json.loads(index_file(folder).read_bytes())["rows"]) == [str(other / "c.json")]
    monkeypatch.setattr(index, "MAX_BYTES", 10)
    ids, _, messages = read_index(folder)
    assert ids == BOTH_IDS
    assert messages[-1] == golden("no-index-is-kept-2-records")


def test_concurrent_writers_leave_one_whole_index(folder: Path) -> None:
    messages: list[str] = []
    threads = [Thread(target=lambda: messages.extend(read_index(folder)[2])) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert messages == []
    assert read_index(folder) == (BOTH_IDS, [], [])
    assert [path.name for path in index_file(folder).parent.iterdir()] == [index.INDEX_NAME]


def test_foreign_file_is_never_overwritten(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign_file = tmp_path / "theirs.json"
    foreign(foreign_file)
    before = foreign_file.read_bytes()
    with pytest.raises(RequestError) as caught:
        index.check_index_path(foreign_file)
    assert (
        str(caught.value)
        == f"--index {str(foreign_file)!r} exists and is not a steelyard index; name another file"
    )
    assert foreign_file.read_bytes() == before
    with pytest.raises(RequestError, match="no folder"):
        index.check_index_path(tmp_path / "none" / "index")
    assert index.check_index_path(tmp_path / "new") == tmp_path / "new"
    read_index(folder)
    monkeypatch.setattr(index.os, "geteuid", lambda: 12345)
    with pytest.raises(RequestError, match="is not a steelyard index; name another file"):
        index.check_index_path(index_file(folder))


def test_named_index_is_reused(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "all.index"
    assert read_index(folder, file=file)[1] == ["a.json", "b.json"]
    assert index.check_index_path(file) == file
    assert read_index(folder, file=file)[1] == []
