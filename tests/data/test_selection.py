"""Test the ids that a user selects: read within limits, normalized, and resolved to items."""

import gzip
from pathlib import Path

import pytest

from fixtures.golden import golden
from steelyard.data import selection
from steelyard.data.seeded_draws import choose_items
from steelyard.errors import RequestError

GROUPS = {"anatomy": range(4), "astronomy": range(4, 7), "college_physics": range(7, 12)}
FORM = "a line is an id, such as 12, or a range, such as 12-20; for a set with groups also NAME/12"


def written(folder: Path, content: bytes) -> Path:
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
def test_one_selection_has_one_spelling(
    content: bytes, ids: tuple[str, ...], tmp_path: Path
) -> None:
    assert selection.read_ids(written(tmp_path, content)) == ids
    assert tuple(selection.normalize_id(one) for one in ids) == ids


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"", f": no ids; {FORM}"),
        (b"# nothing\n", f": no ids; {FORM}"),
        (b"1\n-2\n", f": line 2 is '-2'; {FORM}"),
        (b"1 2", f": line 1 is '1 2'; {FORM}"),
        (b"a/b/3", f": line 1 is 'a/b/3'; {FORM}"),
        (b"1234567890", f": line 1 is '1234567890'; {FORM}"),
        (b"5-3", ": line 1 is '5-3'; a range ends where it begins, or later"),
        (b"9\n3\n1-4\n", ": line 3 names 3 again, after line 2; name it once"),
        (b"a/1\n1\na/1", ": line 3 names a/1 again, after line 1; name it once"),
        (b"\xff\n", f": line 1 is not UTF-8; {FORM}"),
        (b"1" * 513, f": line 1 has more than 512 bytes; {FORM}"),
        (b"0-10000000\n", ": its ranges name more than 10000000 ids, the limit"),
    ],
)
def test_a_bad_file_is_one_line(content: bytes, line: str, tmp_path: Path) -> None:
    path = written(tmp_path, content)
    with pytest.raises(RequestError) as caught:
        selection.read_ids(path)
    assert str(caught.value) == f"{path}{line}"


def test_a_file_has_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, b"1\n3\n5\n")
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


def test_ids_are_places_of_the_set_or_of_a_group() -> None:
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
def test_ids_that_name_nothing(
    ids: tuple[str, ...], groups: dict[str, range] | None, line: str
) -> None:
    with pytest.raises(RequestError) as caught:
        selection.find_positions(ids, 12, "passage", groups)
    assert str(caught.value) == line


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
def test_an_unknown_subject_has_the_nearest_beside_it(name: str, hint: str) -> None:
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
    with pytest.raises(RequestError) as caught:
        selection.find_group_positions(["anatomy", name], GROUPS)
    assert str(caught.value) == f"--subjects {name!r}: no such subject; {hint}"


def test_names_of_the_command_line() -> None:
    assert selection.parse_subjects("virology, anatomy") == ("anatomy", "virology")
    for text in ("", "a,,b", " "):
        with pytest.raises(RequestError, match="names subjects with commas between"):
            selection.parse_subjects(text)
    with pytest.raises(RequestError, match="b is there twice; name each once"):
        selection.parse_subjects("b,a,b")


def test_a_sample_of_a_selection_is_of_it() -> None:
    pool = [3, 5, 8, 9, 30]
    part = choose_items(40, 3, 7, pool=pool)
    assert len(part) == 3
    assert set(part) < set(pool)
    assert part == sorted(part)
    assert part == [pool[i] for i in choose_items(5, 3, 7)]  # as of any five
    assert choose_items(40, None, 7, pool=pool) == pool
    with pytest.raises(RequestError) as caught:
        choose_items(40, 6, 7, pool=pool)
    assert str(caught.value) == golden("sample-6-of-those-chosen-there")
