"""Test reading JSON lines: values with their line numbers, size limits, and refusals in one
line.
"""

import gzip
from pathlib import Path

import pytest

from fixtures.golden import golden
from steelyard.data import jsonl
from steelyard.errors import RequestError

GZIP_ENDED_EARLY = "Compressed file ended before the end-of-stream marker was reached"
CONTENT = b'{"a": 1}\n[2]\r\n"three"'


def read_refusal(path: Path, most_line_bytes: int = 100, most_bytes: int | None = None) -> str:
    """Return the message with which reading `path` is refused, without the path it begins with,
    after checking that it is one line.
    """
    with pytest.raises(RequestError) as error:
        list(
            jsonl.read_json_lines(path, "a line is 1", most_line_bytes, most_bytes, "; it has 2 MB")
        )
    text = str(error.value)
    assert text.startswith(f"{path}: ")
    assert "\n" not in text
    return text.removeprefix(f"{path}: ")


@pytest.mark.parametrize("compressed", [False, True])
def test_lines_are_read_with_number_and_location(compressed: bool, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(gzip.compress(CONTENT, mtime=0) if compressed else CONTENT)
    progress: list[int] = []
    lines = list(jsonl.read_json_lines(path, "", 100, watch=progress.append))
    assert [(line.number, line.raw, line.value) for line in lines] == [
        (1, b'{"a": 1}', {"a": 1}),
        (2, b"[2]\r", [2]),
        (3, b'"three"', "three"),
    ]
    assert [line.location for line in lines] == [f"{path}: line {number}" for number in (1, 2, 3)]
    assert list(jsonl.parse_json_lines(jsonl.split_lines(CONTENT), path, "")) == lines
    assert progress == sorted(progress)
    assert progress[-1] == path.stat().st_size
    if not compressed:
        assert progress == [9, 14, 21]


def test_limits_of_line_and_file_size(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"12345\n12345")
    assert len(list(jsonl.read_json_lines(path, "", 5, 11))) == 2
    assert read_refusal(path, 4) == golden("line-1-has-more-than-4")
    assert read_refusal(path, 5, 10) == "larger than 10 bytes; it has 2 MB"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"1\n\n", "line 2 is not JSON in UTF-8: Expecting value (column 1); a line is 1"),
        (b"NaN", "line 1 is not JSON in UTF-8: NaN is not allowed in JSON; a line is 1"),
        (b'{"a": 1, "a": 1}', "line 1 is not JSON in UTF-8: a key is repeated; a line is 1"),
        (gzip.compress(b"1", mtime=0)[:-9], f"cannot be read: {GZIP_ENDED_EARLY}"),
        (b"\x1f\x8bnot gzip", "cannot be read: Unknown compression method"),
    ],
)
def test_invalid_lines_are_refused(content: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(content)
    assert read_refusal(path) == reason


def test_a_folder_or_missing_file_is_refused(tmp_path: Path) -> None:
    assert read_refusal(tmp_path) == "cannot be read: Is a directory"
    assert read_refusal(tmp_path / "x") == golden("cannot-be-read-no-such-file")


def test_an_unpaired_surrogate_is_refused() -> None:
    assert jsonl.require_text("", "line 1 is", "a text") == ""
    assert jsonl.require_text("naïve 🤖", "line 1 is", "a text") == "naïve 🤖"
    with pytest.raises(RequestError) as error:
        jsonl.require_text("half \ud83e", "line 1 is", "a text")
    assert str(error.value) == "line 1 is 'half \\ud83e'; a text must be valid Unicode"
    with pytest.raises(RequestError) as error:
        jsonl.require_text(1, "line 1 is", "a text")
    assert str(error.value) == "line 1 is 1; a text"
