"""Test byte-level BPE from vocab.json and merges.txt: ids by hand and as published, the order of
search, and refusals of invalid files.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers.pre_tokenizers import ByteLevel

from fixtures.golden import golden
from fixtures.vocabularies import TEXTS, gpt2, refusal
from steelyard.data import tokenizer
from steelyard.data.tokenizer import BytePairTokenizer, JsonTokenizer

BYTES = sorted(ByteLevel.alphabet())
PIECES = [*BYTES, "ab", "Ġab", "</s>"]
MERGES = "#version: 0.2\na b\nĠ ab\n"


def bpe_folder(
    folder: Path, pieces: Any = PIECES, merges: str | None = MERGES, special: str | None = None
) -> Path:
    """Write vocab.json, merges.txt and special_tokens.txt to a folder and return it; a file whose
    content is None is not written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    table = {piece: i for i, piece in enumerate(pieces)} if isinstance(pieces, list) else pieces
    for name, text in (
        ("vocab.json", json.dumps(table)),
        ("merges.txt", merges),
        ("special_tokens.txt", special),
    ):
        if text is not None:
            (folder / name).write_bytes(text.encode())
    return folder


def test_byte_level_bpe_by_hand(tmp_path: Path) -> None:
    found = tokenizer.load_tokenizer([bpe_folder(tmp_path, special="[X]\r\n[CLS]\n")])
    assert isinstance(found, BytePairTokenizer)
    assert (found.source, found.vocab, found.end) == ("vocab.json", 261, 258)
    a, space = BYTES.index("a"), BYTES.index("Ġ")
    assert found.encode(["ab ab a b", "", " "]) == [
        [260, 256, 257, space, a, space, BYTES.index("b")],
        [260],
        [260, space],
    ]
    assert (
        found.sha256 == hashlib.sha256(json.dumps([*PIECES, "[X]", "[CLS]"]).encode()).hexdigest()
    )


@pytest.mark.parametrize(
    ("more", "special", "begin", "end"),
    [
        ([], None, [], None),
        (["<|endoftext|>"], None, [], 256),
        (["<|endoftext|>"], "</s>\n[CLS]", [258], 257),
        (["</s>", "<|endoftext|>"], "[CLS]\n", [258], 256),
        (["[CLS]"], "", [], None),
    ],
)
def test_what_begins_and_ends_byte_level_bpe(
    more: list[str], special: str | None, begin: list[int], end: int | None, tmp_path: Path
) -> None:
    found = tokenizer.load_tokenizer([bpe_folder(tmp_path, [*BYTES, *more], "", special)])
    assert found.encode([""]) == [begin]
    assert found.end == end


def test_aquila(data_dir: Path) -> None:
    folder = data_dir / "tokenizers" / "aquila"
    found = tokenizer.load_tokenizer([folder])
    assert isinstance(found, BytePairTokenizer)
    assert (found.source, found.vocab, found.end) == ("vocab.json", 100008, 100007)
    assert found.sha256 == "312061798430e4d1e665aeb7223e6dd943fcd21966938b6a12df62bca4dd39ef"
    assert found.encode(["Hello world 你好，世界"]) == [
        [100006, 22299, 3117, 221, 34856, 261, 1996]
    ]
    assert found.encode(["</s>", "[CLS]"]) == [[100006, 1780, 83, 30], [100006, 59, 6450, 51, 61]]
    assert tokenizer.load_tokenizer([folder / "vocab.json"]).sha256 == found.sha256
    tokenizer.check_vocabulary_size(found, 100008)


def test_gpt2_from_two_files_and_from_one(data_dir: Path, tmp_path: Path) -> None:
    gpt2(data_dir).save(str(tmp_path / "tokenizer.json"))
    found, other = (
        tokenizer.load_tokenizer([data_dir / "tokenizers" / "gpt2"]),
        tokenizer.load_tokenizer([tmp_path]),
    )
    assert isinstance(found, BytePairTokenizer)
    assert isinstance(other, JsonTokenizer)
    assert (found.vocab, found.sha256) == (other.vocab, other.sha256)
    assert found.encode(TEXTS) == other.encode(TEXTS)
    assert (found.end, found.encode(["<|endoftext|>"])) == (
        50256,
        [[27, 91, 437, 1659, 5239, 91, 29]],
    )


def test_byte_level_bpe_is_looked_for_last(data_dir: Path, tmp_path: Path) -> None:
    model = (data_dir / "tokenizers" / "llama" / "tokenizer.model").read_bytes()
    nested = bpe_folder(tmp_path / "nested" / "tokenizer").parent
    assert (
        tokenizer.load_tokenizer([nested]).vocab
        == tokenizer.load_tokenizer([nested / "tokenizer" / "vocab.json"]).vocab
        == 259
    )
    (nested / "tokenizer" / "tokenizer.model").write_bytes(model)
    assert tokenizer.load_tokenizer([nested]).vocab == 32000
    assert tokenizer.load_tokenizer([nested / "tokenizer" / "vocab.json"]).vocab == 259
    gpt2(data_dir).save(str(nested / "tokenizer" / "tokenizer.json"))
    assert tokenizer.load_tokenizer([nested]).vocab == 50257
    bpe_folder(nested)
    assert tokenizer.load_tokenizer([nested]).vocab == 259


def ids(**changes: Any) -> dict[str, Any]:
    """Return the ids of PIECES with some changed or added."""
    return {**{piece: i for i, piece in enumerate(PIECES)}, **changes}


@pytest.mark.parametrize(
    ("pieces", "reason"),
    [
        (3, "not a vocabulary; allowed: a table of pieces and their ids, which are integers"),
        (
            ids(ab="256"),
            "not a vocabulary; allowed: a table of pieces and their ids, which are integers",
        ),
        (
            ids(ab=True),
            "not a vocabulary; allowed: a table of pieces and their ids, which are integers",
        ),
        (
            ids(ab=256.0),
            "not a vocabulary; allowed: a table of pieces and their ids, which are integers",
        ),
        ({}, "no piece '!'; a byte-level vocabulary has one for each of the 256 bytes"),
        (ids(x=300, ab=300), "'x' and 'ab' have the id 300; an id is one piece's"),
        (ids(ab=300), "no piece has the id 256; the ids of 259 pieces are 0 to 258"),
        (ids(ab=-1), "no piece has the id 256; the ids of 259 pieces are 0 to 258"),
    ],
)
def test_a_vocabulary_that_is_none(pieces: Any, reason: str, tmp_path: Path) -> None:
    assert refusal(bpe_folder(tmp_path, pieces)) == f"{tmp_path / 'vocab.json'}: {reason}"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not JSON: Expecting value: line 1 column 1 (char 0)"),
        (b'{"a": 0, "a": 1}', "not JSON: a key stands twice"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not JSON: Exceeds the limit"),
        (
            b"\xff",
            "not UTF-8: 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte",
        ),
        (b"[" * 100_000, "not JSON: maximum recursion depth exceeded"),
    ],
)
def test_a_vocabulary_that_is_no_json(content: bytes, reason: str, tmp_path: Path) -> None:
    path = bpe_folder(tmp_path) / "vocab.json"
    path.write_bytes(content)
    assert refusal(tmp_path).startswith(f"{path}: {reason}")


@pytest.mark.parametrize("line", ["a", "a b c", "a c", "a unknown", "", " a b"])
def test_a_merge_that_is_none(line: str, tmp_path: Path) -> None:
    bpe_folder(tmp_path, merges=f"#version: 0.2\na b\n{line}\nĠ ab\n")
    assert (
        refusal(tmp_path)
        == f"{tmp_path / 'merges.txt'}: line 3 is {line!r}; a merge is two pieces of vocab.json, a"
        " space between them, that are a third one together"
    )


@pytest.mark.parametrize(
    ("special", "number", "shown"),
    [
        ("[CLS]\n\n</t>\n", 2, ""),
        ("[CLS] \n", 1, "[CLS] "),
        ("<x>\n<y>\n<x>\n", 3, "<x>"),
        ("[CLS]\nab", 2, "ab"),
    ],
)
def test_a_special_token_that_is_none(
    special: str, number: int, shown: str, tmp_path: Path
) -> None:
    bpe_folder(tmp_path, special=special)
    assert (
        refusal(tmp_path)
        == f"{tmp_path / 'special_tokens.txt'}: line {number} is {shown!r}; allowed: one token a"
        " line, with no space around it, each once"
    )


def test_byte_level_bpe_needs_its_merges(tmp_path: Path) -> None:
    path = bpe_folder(tmp_path, merges=None) / "vocab.json"
    assert refusal(path) == refusal(tmp_path) == (golden("no-merges-txt-beside-it-put", path))


@pytest.mark.parametrize("name", ["merges.txt", "special_tokens.txt"])
def test_files_beside_a_vocabulary_have_limits_too(name: str, tmp_path: Path) -> None:
    path = bpe_folder(tmp_path) / name
    with path.open("wb") as file:
        file.truncate((256 << 20) + 1)
    assert refusal(tmp_path) == f"{path}: 268435457 bytes; the limit is 268435456"
    path.write_bytes(b"\xff")
    assert refusal(tmp_path).startswith(f"{path}: not UTF-8: ")
