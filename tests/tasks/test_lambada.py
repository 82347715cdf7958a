"""Test LAMBADA: reading every file layout, rows and last words worked out by hand, and refusals of
invalid files.
"""

import gzip
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from fixtures.golden import golden
from steelyard.data.seeded_draws import choose_items
from steelyard.data.tokenizer import WordHashTokenizer
from steelyard.errors import RequestError
from steelyard.tasks.lambada import data as lambada
from steelyard.tasks.lambada.task import GeneratedPassagesConfig, LambadaData

TEXTS = [
    "The stone was blue.\n\n“Blue,” he said",
    " Two  spaces and a\nline",
    'He cried, "Naïve',
    "a b",
]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
DATA = LambadaData(kind="lambada", rows=4)

IDS_BY_PIECE = {
    "the": 10,
    " cat": 11,
    " saw": 12,
    " a": 13,
    " dog": 14,
    " dogs": 15,
    "-": 16,
    "house": 17,
    "s": 18,
}


@dataclass(frozen=True)
class HandTokenizer:
    """A tokenizer that can be followed by hand: token 1 begins, token 2 ends, and the pieces are
    those of IDS_BY_PIECE.
    """

    end: int | None = 2
    closes: bool = False  # whether encode appends the end token, as some tokenizer.json do
    source: str = "words"
    vocab: int = 20
    sha256: str = "0" * 64

    def encode(self, texts: list[str]) -> list[list[int]]:
        encoded = []
        for text in texts:
            ids = [1]
            while text:
                piece = max((piece for piece in IDS_BY_PIECE if text.startswith(piece)), key=len)
                ids.append(IDS_BY_PIECE[piece])
                text = text.removeprefix(piece)
            encoded.append([*ids, 2] if self.closes else ids)
        return encoded


def load_refusal(source: Path, data: LambadaData = DATA) -> str:
    """Return the message with which loading `source` is refused, after checking that it is one
    line.
    """
    with pytest.raises(RequestError) as error:
        lambada.load_passages(data, source)
    line = str(error.value)
    assert "\n" not in line
    return line


def test_every_file_layout_gives_the_same_passages(tmp_path: Path) -> None:
    files = {
        "one/lambada_test.jsonl": LINES,
        "two/lambada_test_bak.jsonl": LINES[:-1],
        "three/data/lambada_test_bak.jsonl": LINES.replace(b"\n", b"\r\n"),
        "four/lambada_test.jsonl.gz": gzip.compress(LINES, mtime=0),
        "five/mine": gzip.compress(LINES, mtime=0),
        "six/utf-8.jsonl": (
            "".join(
                json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in TEXTS
            ).encode()
        ),
        "seven/more.jsonl": (
            "".join(
                json.dumps({"id": [1], "text": text, "x": None}) + "\n" for text in TEXTS
            ).encode()
        ),
    }
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_bytes(content)
        assert lambada.read_passages(path) == TEXTS, name
        assert lambada.load_passages(DATA, path) == (TEXTS, path.name)
        if path.name.startswith("lambada"):
            assert lambada.load_passages(DATA, tmp_path / name.partition("/")[0]) == (
                TEXTS,
                path.name,
            )


def test_the_preferred_file_of_a_folder_is_read(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for name, text in (
        ("data/lambada_test.jsonl", "from data"),
        ("lambada_test_bak.jsonl", "a bak"),
    ):
        (tmp_path / name).write_text(json.dumps({"text": text}))
    assert lambada.read_passages(tmp_path) == ["a bak"]
    (tmp_path / "lambada_test.jsonl").write_text(json.dumps({"text": "the test"}))
    assert lambada.read_passages(tmp_path) == ["the test"]


NOT_JSON = 'is not JSON in UTF-8: {}; a line is {{"text": "…"}}'
WRONG_SHAPE = 'is {!r}; a line is {{"text": "…"}}'
TOO_FEW_WORDS = "has the text {!r}; it needs two words with a space between, and to end in one"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"", NOT_JSON.format("Expecting value (column 1)")),
        (b"   ", NOT_JSON.format("Expecting value (column 4)")),
        (b'{"text": "a b"', NOT_JSON.format("Expecting ',' delimiter (column 15)")),
        (b'{"text": "a b"} {}', NOT_JSON.format("Extra data (column 17)")),
        (b'{"text": "a\tb"}', NOT_JSON.format("Invalid control character at (column 12)")),
        (
            b'\xef\xbb\xbf{"text": "a b"}',
            NOT_JSON.format("Unexpected UTF-8 BOM (decode using utf-8-sig) (column 1)"),
        ),
        (
            b'{"text": "a \xe9"}',
            NOT_JSON.format(
                "'utf-8' codec can't decode byte 0xe9 in position 12: invalid continuation byte"
            ),
        ),
        (b'{"text": "a b", "x": NaN}', NOT_JSON.format("NaN is not allowed in JSON")),
        (b'{"text": "a b", "x": -Infinity}', NOT_JSON.format("-Infinity is not allowed in JSON")),
        (b'{"text": "a b", "text": "a c"}', NOT_JSON.format("a key is repeated")),
        (b'{"text": "a b", "x": {"y": 1, "y": 1}}', NOT_JSON.format("a key is repeated")),
        (b'"a b"', WRONG_SHAPE.format('"a b"')),
        (b"[]", WRONG_SHAPE.format("[]")),
        (b"null", WRONG_SHAPE.format("null")),
        (b"{}", WRONG_SHAPE.format("{}")),
        (b'{"Text": "a b"}', WRONG_SHAPE.format('{"Text": "a b"}')),
        (b'{"text": 5}', WRONG_SHAPE.format('{"text": 5}')),
        (b'{"text": ["a b"]}', WRONG_SHAPE.format('{"text": ["a b"]}')),
        (
            b'{"text": ["' + b"x" * 90 + b'"]}',
            'is \'{"text": ["' + "x" * 85 + '...; a line is {"text": "…"}',
        ),
        (b'{"text": ""}', TOO_FEW_WORDS.format("")),
        (b'{"text": "  "}', TOO_FEW_WORDS.format("  ")),
        (b'{"text": "word"}', TOO_FEW_WORDS.format("word")),
        (b'{"text": " word"}', TOO_FEW_WORDS.format(" word")),
        (b'{"text": "two\\nlines"}', TOO_FEW_WORDS.format("two\nlines")),
        (b'{"text": "ends in one "}', TOO_FEW_WORDS.format("ends in one ")),
        (b'{"text": "ends in a\\n"}', TOO_FEW_WORDS.format("ends in a\n")),
        (b'{"text": "half \\ud83e"}', "has the text 'half \\ud83e'; a text must be valid Unicode"),
    ],
)
def test_a_line_that_is_not_a_passage_is_refused(line: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "lambada_test.jsonl"
    path.write_bytes(b'{"text": "a b"}\n' + line + b'\n{"text": "a b"}\n')
    assert load_refusal(tmp_path) == f"{path}: line 2 {reason}"


@pytest.mark.parametrize(
    "line",
    [b"[" * 100_000, b'{"text": "a b", "x": ' + b"[" * 500_000, b'{"x": ' + b"9" * 5000 + b"}"],
)
def test_huge_and_deeply_nested_lines_are_refused_in_one_line(line: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(line)
    assert load_refusal(path).startswith(f"{path}: line 1 is not JSON in UTF-8: ")


@pytest.mark.parametrize("depth", range(900, 1000, 10))
def test_a_line_near_the_recursion_limit_is_shown_in_the_refusal(
    depth: int, tmp_path: Path
) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"[" * depth + b"]" * depth)
    assert load_refusal(path).startswith(f"{path}: line 1 is ")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "no lines; LAMBADA's test set has 5153"),
        (b"\n", 'line 1 is not JSON in UTF-8: Expecting value (column 1); a line is {"text": "…"}'),
        (
            LINES + b"\n",
            'line 5 is not JSON in UTF-8: Expecting value (column 1); a line is {"text": "…"}',
        ),
        (gzip.compress(b"", mtime=0), "no lines; LAMBADA's test set has 5153"),
        (
            gzip.compress(LINES, mtime=0)[:-9],
            "cannot be read: Compressed file ended before the end-of-stream marker was reached",
        ),
        (
            b"\x1f\x8b\x08\x00" + b"\xff" * 40,
            "cannot be read: Error -3 while decompressing data: invalid block type",
        ),
        (b"\x1f\x8bnot gzip", "cannot be read: Unknown compression method"),
    ],
)
def test_invalid_files_are_refused(content: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(content)
    assert load_refusal(path) == f"{path}: {reason}"


def test_missing_data_is_refused(tmp_path: Path) -> None:
    missing = tmp_path / "nowhere"
    assert (
        load_refusal(missing)
        == f"data {str(missing)!r} does not exist; give lambada_test.jsonl or the folder that holds"
        " it with --data"
    )
    assert load_refusal(tmp_path) == (golden("no-lambada_test-jsonl-in-it-nor", tmp_path))
    with pytest.raises(RequestError) as error:
        lambada.load_passages(DATA, None)
    assert str(error.value) == (golden("this-size-needs-lambada-give-lambada_test"))


def test_another_number_of_passages_than_the_case_has_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "lambada_test.jsonl"
    path.write_bytes(LINES)
    full_set = LambadaData(kind="lambada")
    assert load_refusal(path, full_set) == (golden("4-passages-the-case-has-5153-2", path))
    generated_set = full_set.model_copy(update={"made": GeneratedPassagesConfig(passages=3)})
    assert load_refusal(path, generated_set) == golden("4-passages-the-case-has-5153", path)


@pytest.mark.parametrize("packed", [False, True])
def test_a_huge_file_is_refused(packed: bool, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    if packed:
        path.write_bytes(gzip.compress(b" " * ((64 << 20) + 1), 1, mtime=0))
        assert path.stat().st_size < 1 << 20
    else:
        with path.open("wb") as file:
            file.truncate((64 << 20) + 1)
    assert load_refusal(path) == golden("larger-than-67108864-bytes-lambada-test", path)


def test_number_and_length_of_lines_have_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(LINES)
    longest = max(map(len, LINES.split(b"\n")))
    monkeypatch.setattr(lambada, "MAX_LINES", 4)
    monkeypatch.setattr(lambada, "MAX_LINE_BYTES", longest)
    assert lambada.read_passages(path) == TEXTS
    monkeypatch.setattr(lambada, "MAX_LINE_BYTES", longest - 1)
    assert (
        load_refusal(path) == f"{path}: line 1 has {longest} bytes; allowed: at most {longest - 1}"
    )
    monkeypatch.setattr(lambada, "MAX_LINES", 3)
    assert load_refusal(path) == golden("more-than-3-lines-lambada-test", path)


def test_rows_and_last_words_by_hand() -> None:
    texts = ["the cat saw a dog", "the dog saw dogs", "the cat saw a dog-house", "the cat"]
    passages = lambada.encode_passages(texts, HandTokenizer(), 9, None, 0)
    assert passages.rows == [
        [1, 10, 11, 12, 13, 14, 2],
        [1, 10, 14, 12, 15, 2],
        [1, 10, 11, 12, 13, 14, 16, 17, 2],
        [1, 10, 11, 2],
    ]
    assert passages.last == [1, 1, 3, 1]
    assert passages.groups == passages.index == [0, 1, 2, 3]


def test_an_end_token_that_the_tokenizer_adds_is_not_added_twice() -> None:
    texts = ["the cat saw a dog", "the cat saw a dog-house"]
    assert lambada.encode_passages(
        texts, HandTokenizer(closes=True), 9, None, 0
    ) == lambada.encode_passages(texts, HandTokenizer(), 9, None, 0)


def test_a_last_word_begins_at_the_first_token_that_differs() -> None:
    class MergingTokenizer(HandTokenizer):
        def encode(self, texts: list[str]) -> list[list[int]]:
            return [[9, 5] if text == "the cat" else [9, 6, 7] for text in texts]

    # the context alone is [9, 5], with the last word it is [9, 6, 7]: they differ from 6 on
    assert lambada.encode_passages(["the cat saw"], MergingTokenizer(), 9, None, 0).last == [2]


@pytest.mark.parametrize("ids", [[[1, 10, 11]], [[1, 10]]])
def test_a_last_word_without_tokens_is_refused(ids: list[list[int]]) -> None:
    class SilentTokenizer(HandTokenizer):
        def encode(self, texts: list[str]) -> list[list[int]]:
            return [[1, 10, 11]] if texts == ["the cat"] else ids

    with pytest.raises(RequestError) as error:
        lambada.encode_passages(["the cat saw"], SilentTokenizer(), 9, None, 0)
    assert str(error.value) == golden("tokenizer-words-the-last-word-of")


def test_a_row_longer_than_the_context_is_refused() -> None:
    texts = ["the cat", "the cat saw a dog"]
    assert [
        len(row) for row in lambada.encode_passages(texts, HandTokenizer(), 7, None, 0).rows
    ] == [4, 7]
    with pytest.raises(RequestError) as error:
        lambada.encode_passages(texts, HandTokenizer(), 6, None, 0)
    assert str(error.value) == golden("passage-2-its-line-has-7")


def test_a_tokenizer_without_an_end_token_is_refused() -> None:
    with pytest.raises(RequestError) as error:
        lambada.encode_passages(["the cat"], HandTokenizer(end=None), 9, None, 0)
    assert str(error.value) == (golden("tokenizer-words-does-not-say-which"))


def test_a_sample_has_the_rows_of_the_full_set() -> None:
    tokenizer, texts = (
        WordHashTokenizer(512),
        lambada.generate_passages(GeneratedPassagesConfig(passages=30)),
    )
    full_set, sample = (
        lambada.encode_passages(texts, tokenizer, 128, None, 0),
        lambada.encode_passages(texts, tokenizer, 128, 11, 5),
    )
    assert sample.index == choose_items(30, 11, 5)
    assert sample.rows == [full_set.rows[i] for i in sample.index]
    assert sample.last == [full_set.last[i] for i in sample.index]
    assert sample.groups == list(range(11))


def test_only_sampled_passages_are_encoded() -> None:
    index = choose_items(3, 1, 0)
    texts = ["the cat" if i in index else "not in the table" for i in range(3)]
    assert lambada.encode_passages(texts, HandTokenizer(), 4, 1, 0).rows == [[1, 10, 11, 2]]


def test_a_sample_larger_than_the_set_is_refused() -> None:
    with pytest.raises(RequestError) as error:
        lambada.encode_passages(["the cat"], HandTokenizer(), 9, 2, 0)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith("--sample 2: the data has 1 ")


def test_a_fingerprint_depends_on_texts_order_and_vocabulary() -> None:
    expected = hashlib.sha256(b"0" * 64 + '["a b","né ü"]'.encode()).hexdigest()
    assert lambada.fingerprint_passages(["a b", "né ü"], HandTokenizer()) == expected
    assert (
        len(
            {
                expected,
                lambada.fingerprint_passages(["né ü", "a b"], HandTokenizer()),
                lambada.fingerprint_passages(["a b"], HandTokenizer()),
                lambada.fingerprint_passages(["a b", "né ü"], HandTokenizer(sha256="1" * 64)),
            }
        )
        == 4
    )


def test_generated_passages_are_seeded_and_repeat_their_last_word() -> None:
    settings = GeneratedPassagesConfig(passages=600, seed=2)
    texts = lambada.generate_passages(settings)
    assert texts == lambada.generate_passages(settings)
    assert texts[:200] == lambada.generate_passages(GeneratedPassagesConfig(passages=200, seed=2))
    assert not set(texts) & set(
        lambada.generate_passages(GeneratedPassagesConfig(passages=600, seed=3))
    )
    assert len(set(texts)) == len(texts) == 600
    sizes = [len(text.split()) for text in texts]
    assert (min(sizes), max(sizes)) == (15, 59)
    assert len(set(sizes)) > 30
    for text in texts:
        beginning, _, last_word = text.rpartition(" ")
        assert f" the {last_word} to the " in beginning
        assert last_word.replace("-", "").isalpha()
        assert ". " in beginning


def test_generated_passages_are_encoded_with_the_word_hash_tokenizer() -> None:
    data = DATA.model_copy(update={"made": GeneratedPassagesConfig(passages=40)})
    texts, label = lambada.load_passages(data, None)
    assert (texts, label) == (
        lambada.generate_passages(GeneratedPassagesConfig(passages=40)),
        "made",
    )
    passages = lambada.encode_passages(texts, WordHashTokenizer(512), 80, None, 0)
    assert all(
        row[0] == 1 and row[-1] == 0 and all(6 <= token < 512 for token in row[1:-1])
        for row in passages.rows
    )
    assert [2 * text.rpartition(" ")[2].count("-") + 1 for text in texts] == passages.last
    assert set(passages.last) == {1, 3}


def test_generated_passages_can_be_written_and_read(tmp_path: Path) -> None:
    texts = lambada.generate_passages(GeneratedPassagesConfig(passages=20))
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    assert lambada.read_passages(path) == texts
