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
LINE_FORMAT = (
    'a line is {"passage": {"text": "…", "entities": [{"start": 0, "end": 4}]}, '
    '"qas": [{"query": "… @placeholder …", "answers": [{"text": "…"}]}]}'
)


def make_spans(*spans: tuple[Any, Any]) -> list[dict[str, Any]]:
    """Return entities of a ReCoRD line from (start, end) pairs."""
    return [{"start": start, "end": end} for start, end in spans]


def make_line() -> dict[str, Any]:
    """Return a ReCoRD line with two queries; its entities are unsorted, one appears twice, and one
    has a curly quote.
    """
    return {
        "source": "CNN",
        "passage": {
            "text": TEXT,
            "entities": make_spans((21, 24), (9, 15), (0, 2), (38, 41), (61, 65)),
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


def write_lines(path: Path, *lines: Any) -> Path:
    """Write values as JSON lines and return the path."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def read_refusal(path: Path) -> str:
    """Return the message with which reading `path` is refused, after checking that it is one
    line.
    """
    with pytest.raises(RequestError) as error:
        superglue.read_queries(path)
    line = str(error.value)
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
    assert superglue.read_queries(write_lines(tmp_path / "x.jsonl", make_line())) == QUERIES


def test_a_query_is_named_by_its_line_and_position(tmp_path: Path) -> None:
    without_queries = {**make_line(), "qas": []}
    queries = superglue.read_queries(
        write_lines(tmp_path / "x.jsonl", make_line(), without_queries, make_line())
    )
    assert [query.name for query in queries] == ["1-1", "1-2", "3-1", "3-2"]
    assert queries[0].passage is queries[1].passage


def test_only_the_quotes_and_dashes_that_glm_replaces_are_replaced() -> None:
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
def test_every_file_layout_gives_the_same_queries(
    pack: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    path = tmp_path / "any name"
    path.write_bytes(pack(json.dumps(make_line(), ensure_ascii=False).encode() + b"\n"))
    assert superglue.read_queries(path) == QUERIES


def change_line(path: tuple[str | int, ...], value: Any) -> dict[str, Any]:
    """Return the line of make_line with the value at a path of keys replaced, or removed if the
    value is `...`.
    """
    line = json.loads(json.dumps(make_line()))
    inner = line
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    if value is ...:
        del inner[path[-1]]
    assert isinstance(line, dict)
    return line


ALLOWED_SPAN = (
    f"allowed: 0 to {len(TEXT) - 1}, the last character of the passage, and no end before its start"
)
ENTITY_FORMAT = 'an entity is {"start": 0, "end": 4}, two integers'
SECOND_ENTITY = ("passage", "entities", 1)
SECOND_QUERY = ("qas", 1, "query")
SECOND_ANSWERS = ("qas", 1, "answers")


@pytest.mark.parametrize(
    ("at", "value", "reason"),
    [
        (("passage",), ..., " is {'idx': 4, 'qas': [{'answers': [{'text': 'Oslo'}, "),
        (("passage",), "text", " is {"),
        (("qas",), ..., " is {"),
        (("qas",), {"query": "x"}, " is {"),
        (("passage", "text"), ..., f": the passage's text is None; {LINE_FORMAT}"),
        (("passage", "text"), 7, f": the passage's text is 7; {LINE_FORMAT}"),
        (("passage", "text"), " \n", f": the passage's text is ' \\n'; {LINE_FORMAT}"),
        (
            ("passage", "text"),
            "half \ud83e",
            ": the passage's text is 'half \\ud83e'; a text must be valid Unicode",
        ),
        (("passage", "entities"), ..., f": the passage's entities are None; {LINE_FORMAT}"),
        (
            ("passage", "entities"),
            {"start": 0},
            f": the passage's entities are {{'start': 0}}; {LINE_FORMAT}",
        ),
        (
            ("passage", "entities"),
            [],
            ": the passage has no entities, and its queries no candidates; allowed: 1 or more",
        ),
        (SECOND_ENTITY, [9, 15], f": entity 2 is [9, 15]; {ENTITY_FORMAT}"),
        (SECOND_ENTITY, {"start": 9}, f": entity 2 is {{'start': 9}}; {ENTITY_FORMAT}"),
        (
            SECOND_ENTITY,
            {"start": True, "end": 5},
            f": entity 2 is {{'end': 5, 'start': True}}; {ENTITY_FORMAT}",
        ),
        (
            SECOND_ENTITY,
            {"start": 9.0, "end": 15},
            f": entity 2 is {{'end': 15, 'start': 9.0}}; {ENTITY_FORMAT}",
        ),
        (
            SECOND_ENTITY,
            {"start": "9", "end": 15},
            f": entity 2 is {{'end': 15, 'start': '9'}}; {ENTITY_FORMAT}",
        ),
        (SECOND_ENTITY, {"start": -1, "end": 2}, f": entity 2 is from -1 to 2; {ALLOWED_SPAN}"),
        (SECOND_ENTITY, {"start": -3, "end": -1}, f": entity 2 is from -3 to -1; {ALLOWED_SPAN}"),
        (SECOND_ENTITY, {"start": 9, "end": 8}, f": entity 2 is from 9 to 8; {ALLOWED_SPAN}"),
        (
            SECOND_ENTITY,
            {"start": 60, "end": len(TEXT)},
            f": entity 2 is from 60 to {len(TEXT)}; {ALLOWED_SPAN}",
        ),
        (
            SECOND_ENTITY,
            {"start": 5000, "end": 5004},
            f": entity 2 is from 5000 to 5004; {ALLOWED_SPAN}",
        ),
        (("qas", 1), "x", f": query 2 is 'x'; {LINE_FORMAT}"),
        (SECOND_QUERY, ..., f": query 2 is None; {LINE_FORMAT}"),
        (SECOND_QUERY, ["@placeholder"], f": query 2 is ['@placeholder']; {LINE_FORMAT}"),
        (
            SECOND_QUERY,
            "none at all",
            ": query 2 has 0 @placeholder in 'none at all'; allowed: one",
        ),
        (
            SECOND_QUERY,
            "@placeholder, @placeholder",
            ": query 2 has 2 @placeholder in '@placeholder, @placeholder'; allowed: one",
        ),
        (
            SECOND_ANSWERS,
            ...,
            (
                ": query 2 has no answers; the sets of training and evaluation have some, the test"
                " set none"
            ),
        ),
        (
            SECOND_ANSWERS,
            [],
            (
                ": query 2 has no answers; the sets of training and evaluation have some, the test"
                " set none"
            ),
        ),
        (
            SECOND_ANSWERS,
            {"text": "Ann"},
            f": the answers of query 2 are {{'text': 'Ann'}}; {LINE_FORMAT}",
        ),
        (SECOND_ANSWERS, "", f": the answers of query 2 are ''; {LINE_FORMAT}"),
        (SECOND_ANSWERS, ["Ann"], f": answer 1 of query 2 is 'Ann'; {LINE_FORMAT}"),
        (
            SECOND_ANSWERS,
            [{"text": "Ann"}, {"start": 0}],
            f": the text of answer 2 of query 2 is None; {LINE_FORMAT}",
        ),
        (
            SECOND_ANSWERS,
            [{"text": " "}],
            f": the text of answer 1 of query 2 is ' '; {LINE_FORMAT}",
        ),
    ],
)
def test_an_invalid_line_is_refused(
    at: tuple[str | int, ...], value: Any, reason: str, tmp_path: Path
) -> None:
    path = write_lines(tmp_path / "x.jsonl", make_line(), change_line(at, value), make_line())
    error_line = read_refusal(path)
    assert error_line == f"{path}: line 2{reason}" or (
        reason.startswith(" is {") and error_line.startswith(f"{path}: line 2{reason}")
    )
    assert not reason.startswith(" is {") or error_line.endswith(f"; {LINE_FORMAT}")


def test_an_answer_that_is_not_an_entity_is_read(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "x.jsonl",
        change_line(SECOND_ANSWERS, [{"text": "Eve", "start": 900, "end": -1}]),
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
        (b'{"idx": 1, "idx": 1}', "a key is repeated"),
        (b'{"idx": NaN}', "NaN is not allowed in JSON"),
        (
            b'{"idx": ' + b"9" * 5000 + b"}",
            "Exceeds the limit (4300 digits) for integer string conversion",
        ),
        (b"[" * 100_000, "maximum recursion depth exceeded"),
        (b'{"passage": ' + b'{"text": ' * 100_000, "maximum recursion depth exceeded"),
    ],
)
def test_a_line_that_is_not_json_is_refused(line: bytes, reason: str, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl", make_line())
    path.write_bytes(path.read_bytes() + line + b"\n")
    error_line = read_refusal(path)
    assert error_line.startswith(f"{path}: line 2 is not JSON in UTF-8: {reason}")
    assert error_line.endswith(f"; {LINE_FORMAT}")


@pytest.mark.parametrize("line", [b"[1, 2]", b"7", b'"text"', b"null", b"[" * 900 + b"]" * 900])
def test_a_line_that_is_not_an_object_is_refused(line: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(line)
    assert re.fullmatch(
        re.escape(f"{path}: line 1 is ") + r".{1,40}" + re.escape(f"; {LINE_FORMAT}"),
        read_refusal(path),
    )


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", f"no queries; {LINE_FORMAT}"),
        (gzip.compress(b"", mtime=0), f"no queries; {LINE_FORMAT}"),
        (json.dumps({**make_line(), "qas": []}).encode(), f"no queries; {LINE_FORMAT}"),
        (
            gzip.compress(json.dumps(make_line()).encode(), mtime=0)[:-9],
            "cannot be read: Compressed file ended before",
        ),
        (b"\x1f\x8bnot gzip", "cannot be read: Unknown compression method"),
        (
            b"\x1f\x8b\x08\x00" + b"\xff" * 40,
            "cannot be read: Error -3 while decompressing data: invalid block type",
        ),
    ],
)
def test_invalid_files_are_refused(content: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(content)
    assert read_refusal(path).startswith(f"{path}: {reason}")


def test_a_folder_or_missing_file_is_refused(tmp_path: Path) -> None:
    assert read_refusal(tmp_path).startswith(f"{tmp_path}: cannot be read: ")
    assert read_refusal(tmp_path / "x").startswith(f"{tmp_path / 'x'}: cannot be read: ")


@pytest.mark.parametrize("packed", [False, True])
def test_lines_and_files_have_limits(
    packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_lines(tmp_path / "x.jsonl", make_line(), make_line())
    size = path.stat().st_size
    if packed:
        path.write_bytes(gzip.compress(path.read_bytes(), mtime=0))
    monkeypatch.setattr(superglue, "MAX_FILE_BYTES", size)
    monkeypatch.setattr(superglue, "MAX_LINE_BYTES", size // 2 - 1)  # without the newline
    assert len(superglue.read_queries(path)) == 4
    monkeypatch.setattr(superglue, "MAX_FILE_BYTES", size - 1)
    assert read_refusal(path) == golden("larger-than-bytes-which-file-of", path, size - 1)
    monkeypatch.setattr(superglue, "MAX_LINE_BYTES", size // 2 - 2)
    assert (
        read_refusal(path)
        == f"{path}: line 1 has more than {size // 2 - 2} bytes, the limit for a line;"
        f" {LINE_FORMAT}"
    )


def test_a_line_over_the_limit_is_not_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # a sparse file of 1 TiB: reading it would take all memory
    assert (
        read_refusal(path)
        == f"{path}: line 1 has more than {1 << 20} bytes, the limit for a line; {LINE_FORMAT}"
    )


def test_training_and_validation_files_are_found(tmp_path: Path) -> None:
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


def test_a_folder_without_training_and_validation_files_is_refused(tmp_path: Path) -> None:
    def find_refusal(folder: Path) -> str:
        """Return the message with which finding the files of a folder is refused."""
        with pytest.raises(RequestError) as error:
            superglue.find_query_files(folder)
        return str(error.value)

    advice = "give a folder with train.jsonl and val.jsonl with --data"
    folder_advice = "give the folder that holds ReCoRD's train.jsonl and val.jsonl with --data"
    assert (
        find_refusal(tmp_path / "no")
        == f"data {str(tmp_path / 'no')!r} does not exist; {folder_advice}"
    )
    assert find_refusal(tmp_path) == f"{tmp_path}: no train.jsonl (.gz) in it; {advice}"
    (tmp_path / "train.jsonl").touch()
    (tmp_path / "val.jsonl").mkdir()
    assert find_refusal(tmp_path) == f"{tmp_path}: no val.jsonl (.gz) in it; {advice}"
    assert (
        find_refusal(tmp_path / "train.jsonl")
        == f"data {str(tmp_path / 'train.jsonl')!r} is not a folder; {folder_advice}"
    )


@pytest.mark.parametrize(
    ("name", "queries", "answers", "entities", "most"),
    [("train32", 32, 44, 397, 23), ("dev32", 32, 46, 369, 25), ("explorer123", 123, 193, 1317, 23)],
)
def test_real_lines_have_the_known_counts(
    name: str, queries: int, answers: int, entities: int, most: int, data_dir: Path
) -> None:
    examples = superglue.read_queries(data_dir / "record" / f"record_{name}.jsonl")
    assert (len(examples), sum(len(example.answers) for example in examples)) == (queries, answers)
    assert (
        sum(len(example.entities) for example in examples),
        max(len(example.entities) for example in examples),
    ) == (entities, most)
    assert all(set(example.answers) <= set(example.entities) for example in examples)
    assert not any(
        mark in example.passage for example in examples for mark in ("@highlight", "“", "’", "–")
    )
    # An entity is a slice of the passage; only changed white space or a highlight could break this.
    assert all(entity in example.passage for example in examples for entity in example.entities)


def test_real_lines_of_another_format_are_refused(data_dir: Path) -> None:
    path = data_dir / "record" / "record_metaicl.jsonl"
    assert read_refusal(path).startswith(f"{path}: line 1 is {{'input': ")
