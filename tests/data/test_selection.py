"""Test the ids that a user selects: read within limits, normalized, and resolved to items."""

import gzip
from pathlib import Path

import pytest

from fixtures.golden import golden
from steelyard.data import selection
from steelyard.data.seeded_draws import choose_items
from steelyard.errors import RequestError

GROUPS = {"anatomy": range(4), "astronomy": range(4, 7), "college_physics": range(7, 12)}
LINE_FORMAT = (
    "a line is an id, such as 12, or a range, such as 12-20; for a set with groups also NAME/12"
)


def write_ids(folder: Path, content: bytes) -> Path:
    """Write a file of ids and return its path."""
    path = folder / "ids.txt"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("content", "ids"),
    [
        (b"7\n", ("7",)),
        (b"# mine\n\n 5 \n3\r\n4\n", ("3-5",)),
        (b"12-20\n21\n0", ("0", "12-21")),
        (b"b/2\na/7\na/8-9\n1", ("1", "a/7-9", "b/2")),
        (b"007\n", ("7",)),
        (gzip.compress(b"1\n2\n", mtime=0), ("1-2",)),
    ],
)
def test_equal_selections_are_normalized_to_equal_ids(
    content: bytes, ids: tuple[str, ...], tmp_path: Path
) -> None:
    assert selection.read_ids(write_ids(tmp_path, content)) == ids
    assert tuple(selection.normalize_id(spelled) for spelled in ids) == ids


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"", f": no ids; {LINE_FORMAT}"),
        (b"# nothing\n", f": no ids; {LINE_FORMAT}"),
        (b"1\n-2\n", f": line 2 is '-2'; {LINE_FORMAT}"),
        (b"1 2", f": line 1 is '1 2'; {LINE_FORMAT}"),
        (b"a/b/3", f": line 1 is 'a/b/3'; {LINE_FORMAT}"),
        (b"1234567890", f": line 1 is '1234567890'; {LINE_FORMAT}"),
        (b"5-3", ": line 1 is '5-3'; a range ends where it begins, or later"),
        (b"9\n3\n1-4\n", ": line 3 names 3 again, after line 2; name it once"),
        (b"a/1\n1\na/1", ": line 3 names a/1 again, after line 1; name it once"),
        (b"\xff\n", f": line 1 is not UTF-8; {LINE_FORMAT}"),
        (b"1" * 513, f": line 1 has more than 512 bytes; {LINE_FORMAT}"),
        (b"0-10000000\n", ": its ranges name more than 10000000 ids, the limit"),
    ],
)
def test_an_invalid_file_is_refused_in_one_line(content: bytes, line: str, tmp_path: Path) -> None:
    path = write_ids(tmp_path, content)
    with pytest.raises(RequestError) as error:
        selection.read_ids(path)
    assert str(error.value) == f"{path}{line}"


def test_a_file_of_ids_has_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_ids(tmp_path, b"1\n3\n5\n")
    monkeypatch.setattr(selection, "MAX_LINES", 3)
    assert selection.read_ids(path) == ("1", "3", "5")
    monkeypatch.setattr(selection, "MAX_LINES", 2)
    with pytest.raises(
        RequestError,
        match="more than 2 lines, the limit for a file of ids; use ranges such as 0-99",
    ):
        selection.read_ids(path)
    monkeypatch.setattr(selection, "MAX_FILE_BYTES", 5)
    with pytest.raises(RequestError, match="larger than 5 bytes, the limit for a file of ids"):
        selection.read_ids(path)
    with pytest.raises(RequestError, match="cannot be read: No such file or directory"):
        selection.read_ids(tmp_path / "none")


def test_ids_are_positions_in_the_set_or_in_a_group() -> None:
    assert selection.find_positions(("11", "2", "5-6"), 12, "question") == [2, 5, 6, 11]
    assert selection.find_positions(
        ("0", "astronomy/0-1", "college_physics/4"), 12, "question", GROUPS
    ) == [0, 4, 5, 11]
    assert selection.count_ids(("0", "astronomy/0-1", "5-9")) == 8


@pytest.mark.parametrize(
    ("ids", "groups", "line"),
    [
        (("12",), None, "--rows: no passage 12; the data has 12 passages; allowed: 0 to 11"),
        (("3-12",), GROUPS, "--rows: no passage 3-12; the data has 12 passages; allowed: 0 to 11"),
        (
            ("anatomy/4",),
            GROUPS,
            "--rows: no passage anatomy/4; anatomy has 4 passages; allowed: anatomy/0 to anatomy/3",
        ),
        (
            ("anatomy/0",),
            None,
            (
                "--rows: anatomy/0: the data has no groups; allowed: places counted from 0, such as"
                " 12 or 12-20"
            ),
        ),
        (("anatomi/0",), GROUPS, "--rows: anatomi/0: no such subject; nearest: anatomy"),
        (
            ("1-3", "anatomy/2"),
            GROUPS,
            "--rows: anatomy/2 and 1-3 name the same passage; name it once",
        ),
    ],
)
def test_ids_without_an_item_are_refused(
    ids: tuple[str, ...], groups: dict[str, range] | None, line: str
) -> None:
    with pytest.raises(RequestError) as error:
        selection.find_positions(ids, 12, "passage", groups)
    assert str(error.value) == line


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("anatomi", "nearest: anatomy"),
        ("college physics", "nearest: college_physics"),
        ("physics", "nearest: college_physics"),
        ("law", "known: anatomy, astronomy, college_physics"),
        ("stronomy", "nearest: astronomy"),
    ],
)
def test_an_unknown_subject_is_refused_with_the_nearest_names(name: str, hint: str) -> None:
    assert selection.find_group_positions(["college_physics", "anatomy"], GROUPS) == [
        0,
        1,
        2,
        3,
        7,
        8,
        9,
        10,
        11,
    ]
    with pytest.raises(RequestError) as error:
        selection.find_group_positions(["anatomy", name], GROUPS)
    assert str(error.value) == f"--subjects {name!r}: no such subject; {hint}"


def test_subjects_are_parsed_from_the_command_line() -> None:
    assert selection.parse_subjects("virology, anatomy") == ("anatomy", "virology")
    for text in ("", "a,,b", " "):
        with pytest.raises(RequestError, match="names subjects with commas between"):
            selection.parse_subjects(text)
    with pytest.raises(RequestError, match="b is there twice; name each once"):
        selection.parse_subjects("b,a,b")


def test_a_sample_is_drawn_from_the_selection() -> None:
    pool = [3, 5, 8, 9, 30]
    sample = choose_items(40, 3, 7, pool=pool)
    assert len(sample) == 3
    assert set(sample) < set(pool)
    assert sample == sorted(sample)
    assert sample == [pool[i] for i in choose_items(5, 3, 7)]  # as of any five
    assert choose_items(40, None, 7, pool=pool) == pool
    with pytest.raises(RequestError) as error:
        choose_items(40, 6, 7, pool=pool)
    assert str(error.value) == golden("sample-6-of-those-chosen-there")
