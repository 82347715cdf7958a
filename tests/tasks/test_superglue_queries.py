"""Test reading SuperGLUE's ReCoRD files: texts and candidates worked out by hand, and refusals of
invalid files.
"""

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fixtures.golden import golden
from steelyard.errors import RequestError
from steelyard.tasks.superglue_record import queries as superglue
from steelyard.tasks.superglue_record.queries import Query

TEXT = "Ann met “Bob Ray” in Oslo.\n@highlight\nOslo – cold\n@highlight\nAnn’s ‘end’"
SHAPE = (
    'a line is {"passage": {"text": "…", "entities": [{"start": 0, "end": 4}]}, '
    '"qas": [{"query": "… @placeholder …", "answers": [{"text": "…"}]}]}'
)


def places(*found: tuple[Any, Any]) -> list[dict[str, Any]]:
    """Return entities of a ReCoRD line from (start, end) pairs."""
    return [{"start": start, "end": end} for start, end in found]


def row() -> dict[str, Any]:
    """Return a ReCoRD line with two queries; its entities are unsorted, one appears twice, and one
    has a curly quote.
    """
    return {
        "source": "CNN",
        "passage": {
            "text": TEXT,
            "entities": places((21, 24), (9, 15), (0, 2), (38, 41), (61, 65)),
        },
        "qas": [
            {
                "query": "In the end @placeholder’s won.",
                "answers": [{"text": "Oslo"}, {"text": "Bob Ray"}, {"text": "Oslo"}],
            },
            {
                "query": "“@placeholder” – who?",
                "answers": [{"start": 3, "end": 1, "text": "Ann’s"}],
                "idx": 5,
            },
        ],
        "idx": 4,
    }


PASSAGE = "Ann met \"Bob Ray\" in Oslo.\n- Oslo - cold\n- Ann's 'end'"
ENTITIES = ("Ann", "Ann's", "Bob Ray", "Oslo")
QUERIES = [
    Query(PASSAGE, "In the end @placeholder's won.", ENTITIES, ("Oslo", "Bob Ray"), "1-1"),
    Query(PASSAGE, '"@placeholder" - who?', ENTITIES, ("Ann's",), "1-2"),
]


def written(path: Path, *rows: Any) -> Path:
    """Write values as JSON lines and return the path."""
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return path


def refusal(path: Path) -> str:
    """Return the message with which reading `path` is refused, after checking that it is one line."""
    with pytest.raises(RequestError) as caught:
        superglue.read_queries(path)
    line = str(caught.value)
    assert "\n" not in line
    return line


def test_texts_and_candidates_by_hand(tmp_path: Path) -> None:
    assert (TEXT[21:25], TEXT[9:16], TEXT[0:3], TEXT[38:42], TEXT[61:66]) == (
        "Oslo",
        "Bob Ray",
        "Ann",
        "Oslo",
        "Ann’s",
    )
    assert superglue.read_queries(written(tmp_path / "x.jsonl", row())) == QUERIES


def test_names_are_lines_and_queries(tmp_path: Path) -> None:
    without = {**row(), "qas": []}
    found = superglue.read_queries(written(tmp_path / "x.jsonl", row(), without, row()))
    assert [one.name for one in found] == ["1-1", "1-2", "3-1", "3-2"]
    assert found[0].passage is found[1].passage


def test_only_what_glm_straightens_is_straightened() -> None:
    assert superglue.normalize_punctuation("“a” ‘b’ c–d e—f … \"'-") == "\"a\" 'b' c-d e—f … \"'-"


@pytest.mark.parametrize(
    "pack",
    [
        lambda content: content,
        lambda content: content[:-1],
        lambda content: content.replace(b"\n", b"\r\n"),
        lambda content: gzip.compress(content, mtime=0),
        lambda content: gzip.compress(content[:40], mtime=0) + gzip.compress(content[40:], mtime=0),
    ],
)
def test_every_layout_reads_the_same(pack: Callable[[bytes], bytes], tmp_path: Path) -> None:
    path = tmp_path / "any name"
    path.write_bytes(pack(json.dumps(row(), ensure_ascii=False).encode() + b"\n"))
    assert superglue.read_queries(path) == QUERIES


def changed(at: tuple[str | int, ...], value: Any) -> dict[str, Any]:
    """Return the line of make_line with the value at a path of keys replaced, or removed if the
    value is `...`.
    """
    out = json.loads(json.dumps(row()))
    inner = out
    for key in at[:-1]:
        inner = inner[key]
    inner[at[-1]] = value
    if value is ...:
        del inner[at[-1]]
    assert isinstance(out, dict)
    return out


SPAN = (
    f"allowed: 0 to {len(TEXT) - 1}, the last character of the passage, and no end before its start"
)
ENTITY = 'an entity is {"start": 0, "end": 4}, two integers'
FIRST = ("passage", "entities", 1)
QUERY = ("qas", 1, "query")
ANSWERS = ("qas", 1, "answers")


@pytest.mark.parametrize(
    ("at", "value", "reason"),
    [
        (("passage",), ..., " is {'idx': 4, 'qas': [{'answers': [{'text': 'Oslo'}, "),
        (("passage",), "text", " is {"),
        (("qas",), ..., " is {"),
        (("qas",), {"query": "x"}, " is {"),
        (("passage", "text"), ..., f": the passage's text is None; {SHAPE}"),
        (("passage", "text"), 7, f": the passage's text is 7; {SHAPE}"),
        (("passage", "text"), " \n", f": the passage's text is ' \\n'; {SHAPE}"),
        (
            ("passage", "text"),
            "half \ud83e",
            ": the passage's text is 'half \\ud83e'; a text must be valid Unicode",
        ),
        (("passage", "entities"), ..., f": the passage's entities are None; {SHAPE}"),
        (
            ("passage", "entities"),
            {"start": 0},
            f": the passage's entities are {{'start': 0}}; {SHAPE}",
        ),
        (
            ("passage", "entities"),
            [],
            ": the passage has no entities, and its queries no candidates; allowed: 1 or more",
        ),
        (FIRST, [9, 15], f": entity 2 is [9, 15]; {ENTITY}"),
        (FIRST, {"start": 9}, f": entity 2 is {{'start': 9}}; {ENTITY}"),
        (FIRST, {"start": True, "end": 5}, f": entity 2 is {{'end': 5, 'start': True}}; {ENTITY}"),
        (FIRST, {"start": 9.0, "end": 15}, f": entity 2 is {{'end': 15, 'start': 9.0}}; {ENTITY}"),
        (FIRST, {"start": "9", "end": 15}, f": entity 2 is {{'end': 15, 'start': '9'}}; {ENTITY}"),
        (FIRST, {"start": -1, "end": 2}, f": entity 2 is from -1 to 2; {SPAN}"),
        (FIRST, {"start": -3, "end": -1}, f": entity 2 is from -3 to -1; {SPAN}"),
        (FIRST, {"start": 9, "end": 8}, f": entity 2 is from 9 to 8; {SPAN}"),
        (FIRST, {"start": 60, "end": len(TEXT)}, f": entity 2 is from 60 to {len(TEXT)}; {SPAN}"),
        (FIRST, {"start": 5000, "end": 5004}, f": entity 2 is from 5000 to 5004; {SPAN}"),
        (("qas", 1), "x", f": query 2 is 'x'; {SHAPE}"),
        (QUERY, ..., f": query 2 is None; {SHAPE}"),
        (QUERY, ["@placeholder"], f": query 2 is ['@placeholder']; {SHAPE}"),
        (QUERY, "none at all", ": query 2 has 0 @placeholder in 'none at all'; allowed: one"),
        (
            QUERY,
            "@placeholder, @placeholder",
            ": query 2 has 2 @placeholder in '@placeholder, @placeholder'; allowed: one",
        ),
        (
            ANSWERS,
            ...,
            (
                ": query 2 has no answers; the sets of training and evaluation have some, the test"
                " set none"
            ),
        ),
        (
            ANSWERS,
            [],
            (
                ": query 2 has no answers; the sets of training and evaluation have some, the test"
                " set none"
            ),
        ),
        (ANSWERS, {"text": "Ann"}, f": the answers of query 2 are {{'text': 'Ann'}}; {SHAPE}"),
        (ANSWERS, "", f": the answers of query 2 are ''; {SHAPE}"),
        (ANSWERS, ["Ann"], f": answer 1 of query 2 is 'Ann'; {SHAPE}"),
        (
            ANSWERS,
            [{"text": "Ann"}, {"start": 0}],
            f": the text of answer 2 of query 2 is None; {SHAPE}",
        ),
        (ANSWERS, [{"text": " "}], f": the text of answer 1 of query 2 is ' '; {SHAPE}"),
    ],
)
def test_a_row_that_is_none(
    at: tuple[str | int, ...], value: Any, reason: str, tmp_path: Path
) -> None:
    path = written(tmp_path / "x.jsonl", row(), changed(at, value), row())
    found = refusal(path)
    assert found == f"{path}: line 2{reason}" or (
        reason.startswith(" is {") and found.startswith(f"{path}: line 2{reason}")
    )
    assert not reason.startswith(" is {") or found.endswith(f"; {SHAPE}")


def test_an_answer_may_be_no_entity(tmp_path: Path) -> None:
    path = written(
        tmp_path / "x.jsonl", changed(ANSWERS, [{"text": "Eve", "start": 900, "end": -1}])
    )
    assert superglue.read_queries(path)[1].answers == ("Eve",)
    assert superglue.read_queries(path)[1].entities == ENTITIES


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"", "Expecting value (column 1)"),
        (b"{", "Expecting property name enclosed in double quotes (column 2)"),
        (
            b'{"passage": "Oslo \xe9"}',
            "'utf-8' codec can't decode byte 0xe9 in position 18: invalid continuation byte",
        ),
        (b'{"idx": 1, "idx": 1}', "a key stands twice"),
        (b'{"idx": NaN}', "NaN is no number"),
        (
            b'{"idx": ' + b"9" * 5000 + b"}",
            "Exceeds the limit (4300 digits) for integer string conversion",
        ),
        (b"[" * 100_000, "maximum recursion depth exceeded"),
        (b'{"passage": ' + b'{"text": ' * 100_000, "maximum recursion depth exceeded"),
    ],
)
def test_a_line_that_cannot_be_read(line: bytes, reason: str, tmp_path: Path) -> None:
    path = written(tmp_path / "x.jsonl", row())
    path.write_bytes(path.read_bytes() + line + b"\n")
    found = refusal(path)
    assert found.startswith(f"{path}: line 2 is not JSON in UTF-8: {reason}")
    assert found.endswith(f"; {SHAPE}")


@pytest.mark.parametrize("line", [b"[1, 2]", b"7", b'"text"', b"null", b"[" * 900 + b"]" * 900])
def test_a_line_of_another_kind(line: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(line)
    assert re.fullmatch(
        re.escape(f"{path}: line 1 is ") + r".{1,40}" + re.escape(f"; {SHAPE}"), refusal(path)
    )


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", f"no queries; {SHAPE}"),
        (gzip.compress(b"", mtime=0), f"no queries; {SHAPE}"),
        (json.dumps({**row(), "qas": []}).encode(), f"no queries; {SHAPE}"),
        (
            gzip.compress(json.dumps(row()).encode(), mtime=0)[:-9],
            "cannot be read: Compressed file ended before",
        ),
        (b"\x1f\x8bnot gzip", "cannot be read: Unknown compression method"),
        (
            b"\x1f\x8b\x08\x00" + b"\xff" * 40,
            "cannot be read: Error -3 while decompressing data: invalid block type",
        ),
    ],
)
def test_files_that_are_none(content: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(content)
    assert refusal(path).startswith(f"{path}: {reason}")


def test_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    assert refusal(tmp_path).startswith(f"{tmp_path}: cannot be read: ")
    assert refusal(tmp_path / "x").startswith(f"{tmp_path / 'x'}: cannot be read: ")


@pytest.mark.parametrize("packed", [False, True])
def test_lines_and_files_have_limits(
    packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "x.jsonl", row(), row())
    size = path.stat().st_size
    if packed:
        path.write_bytes(gzip.compress(path.read_bytes(), mtime=0))
    monkeypatch.setattr(superglue, "MAX_FILE_BYTES", size)
    monkeypatch.setattr(superglue, "MAX_LINE_BYTES", size // 2 - 1)  # without the newline
    assert len(superglue.read_queries(path)) == 4
    monkeypatch.setattr(superglue, "MAX_FILE_BYTES", size - 1)
    assert refusal(path) == golden("larger-than-bytes-which-file-of", path, size - 1)
    monkeypatch.setattr(superglue, "MAX_LINE_BYTES", size // 2 - 2)
    assert (
        refusal(path)
        == f"{path}: line 1 has more than {size // 2 - 2} bytes, the limit for a line; {SHAPE}"
    )


def test_an_endless_line_is_not_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # a sparse file of 1 TiB: reading it would take all memory
    assert (
        refusal(path)
        == f"{path}: line 1 has more than {1 << 20} bytes, the limit for a line; {SHAPE}"
    )


def test_both_files_are_found(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl.gz").touch()
    (tmp_path / "val.jsonl").touch()
    assert superglue.find_query_files(tmp_path) == (
        tmp_path / "train.jsonl.gz",
        tmp_path / "val.jsonl",
    )
    (tmp_path / "train.jsonl").touch()
    assert superglue.find_query_files(tmp_path) == (
        tmp_path / "train.jsonl",
        tmp_path / "val.jsonl",
    )


def test_a_folder_without_them(tmp_path: Path) -> None:
    def missing(place: Path) -> str:
        """Return the message with which finding the files of a folder is refused."""
        with pytest.raises(RequestError) as caught:
            superglue.find_query_files(place)
        return str(caught.value)

    advice = "give a folder with train.jsonl and val.jsonl with --data"
    whole = "give the folder that holds ReCoRD's train.jsonl and val.jsonl with --data"
    assert missing(tmp_path / "no") == f"data {str(tmp_path / 'no')!r} does not exist; {whole}"
    assert missing(tmp_path) == f"{tmp_path}: no train.jsonl (.gz) in it; {advice}"
    (tmp_path / "train.jsonl").touch()
    (tmp_path / "val.jsonl").mkdir()
    assert missing(tmp_path) == f"{tmp_path}: no val.jsonl (.gz) in it; {advice}"
    assert (
        missing(tmp_path / "train.jsonl")
        == f"data {str(tmp_path / 'train.jsonl')!r} is not a folder; {whole}"
    )


@pytest.mark.parametrize(
    ("name", "queries", "answers", "entities", "most"),
    [("train32", 32, 44, 397, 23), ("dev32", 32, 46, 369, 25), ("explorer123", 123, 193, 1317, 23)],
)
def test_real_rows(
    name: str, queries: int, answers: int, entities: int, most: int, data_dir: Path
) -> None:
    found = superglue.read_queries(data_dir / "record" / f"record_{name}.jsonl")
    assert (len(found), sum(len(one.answers) for one in found)) == (queries, answers)
    assert (sum(len(one.entities) for one in found), max(len(one.entities) for one in found)) == (
        entities,
        most,
    )
    assert all(set(one.answers) <= set(one.entities) for one in found)
    assert not any(mark in one.passage for one in found for mark in ("@highlight", "“", "’", "–"))
    # An entity is a slice of the passage; only changed white space or a highlight could break this.
    assert all(entity in one.passage for one in found for entity in one.entities)


def test_real_rows_of_another_format_are_refused(data_dir: Path) -> None:
    path = data_dir / "record" / "record_metaicl.jsonl"
    assert refusal(path).startswith(f"{path}: line 1 is {{'input': ")
