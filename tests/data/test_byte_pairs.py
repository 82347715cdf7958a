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
from fixtures.vocabularies import TEXTS, get_load_error, load_gpt2
from steelyard.data import tokenizer
from steelyard.data.tokenizer import BytePairTokenizer, JsonTokenizer

BYTES = sorted(ByteLevel.alphabet())
PIECES = [*BYTES, "ab", "Ġab", "</s>"]
MERGES = "#version: 0.2\na b\nĠ ab\n"


def write_bpe_folder(
    folder: Path, pieces: Any = PIECES, merges: str | None = MERGES, special: str | None = None
) -> Path:
    """Write vocab.json, merges.txt and special_tokens.txt to a folder and return it; a file whose
    content is None is not written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = (
        {piece: token for token, piece in enumerate(pieces)} if isinstance(pieces, list) else pieces
    )
    for name, text in (
        ("vocab.json", json.dumps(vocabulary)),
        ("merges.txt", merges),
        ("special_tokens.txt", special),
    ):
        if text is not None:
            (folder / name).write_bytes(text.encode())
    return folder


def test_byte_level_bpe_by_hand(tmp_path: Path) -> None:
    loaded = tokenizer.load_tokenizer([write_bpe_folder(tmp_path, special="[X]\r\n[CLS]\n")])
    assert isinstance(loaded, BytePairTokenizer)
    assert (loaded.source, loaded.vocab, loaded.end) == ("vocab.json", 261, 258)
    a_id, space_id = BYTES.index("a"), BYTES.index("Ġ")
    assert loaded.encode(["ab ab a b", "", " "]) == [
        [260, 256, 257, space_id, a_id, space_id, BYTES.index("b")],
        [260],
        [260, space_id],
    ]
    assert (
        loaded.sha256 == hashlib.sha256(json.dumps([*PIECES, "[X]", "[CLS]"]).encode()).hexdigest()
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
def test_begin_and_end_tokens_of_byte_level_bpe(
    more: list[str], special: str | None, begin: list[int], end: int | None, tmp_path: Path
) -> None:
    loaded = tokenizer.load_tokenizer([write_bpe_folder(tmp_path, [*BYTES, *more], "", special)])
    assert loaded.encode([""]) == [begin]
    assert loaded.end == end


def test_the_aquila_tokenizer_gives_the_published_ids(data_dir: Path) -> None:
    folder = data_dir / "tokenizers" / "aquila"
    loaded = tokenizer.load_tokenizer([folder])
    assert isinstance(loaded, BytePairTokenizer)
    assert (loaded.source, loaded.vocab, loaded.end) == ("vocab.json", 100008, 100007)
    assert loaded.sha256 == "312061798430e4d1e665aeb7223e6dd943fcd21966938b6a12df62bca4dd39ef"
    assert loaded.encode(["Hello world 你好，世界"]) == [
        [100006, 22299, 3117, 221, 34856, 261, 1996]
    ]
    assert loaded.encode(["</s>", "[CLS]"]) == [[100006, 1780, 83, 30], [100006, 59, 6450, 51, 61]]
    assert tokenizer.load_tokenizer([folder / "vocab.json"]).sha256 == loaded.sha256
    tokenizer.check_vocabulary_size(loaded, 100008)


def test_gpt2_is_the_same_from_vocab_json_and_tokenizer_json(
    data_dir: Path, tmp_path: Path
) -> None:
    load_gpt2(data_dir).save(str(tmp_path / "tokenizer.json"))
    from_vocab_json, from_tokenizer_json = (
        tokenizer.load_tokenizer([data_dir / "tokenizers" / "gpt2"]),
        tokenizer.load_tokenizer([tmp_path]),
    )
    assert isinstance(from_vocab_json, BytePairTokenizer)
    assert isinstance(from_tokenizer_json, JsonTokenizer)
    assert (from_vocab_json.vocab, from_vocab_json.sha256) == (
        from_tokenizer_json.vocab,
        from_tokenizer_json.sha256,
    )
    assert from_vocab_json.encode(TEXTS) == from_tokenizer_json.encode(TEXTS)
    assert (from_vocab_json.end, from_vocab_json.encode(["<|endoftext|>"])) == (
        50256,
        [[27, 91, 437, 1659, 5239, 91, 29]],
    )


def test_vocab_json_is_tried_after_the_other_tokenizer_files(
    data_dir: Path, tmp_path: Path
) -> None:
    model = (data_dir / "tokenizers" / "llama" / "tokenizer.model").read_bytes()
    nested = write_bpe_folder(tmp_path / "nested" / "tokenizer").parent
    assert (
        tokenizer.load_tokenizer([nested]).vocab
        == tokenizer.load_tokenizer([nested / "tokenizer" / "vocab.json"]).vocab
        == 259
    )
    (nested / "tokenizer" / "tokenizer.model").write_bytes(model)
    assert tokenizer.load_tokenizer([nested]).vocab == 32000
    assert tokenizer.load_tokenizer([nested / "tokenizer" / "vocab.json"]).vocab == 259
    load_gpt2(data_dir).save(str(nested / "tokenizer" / "tokenizer.json"))
    assert tokenizer.load_tokenizer([nested]).vocab == 50257
    write_bpe_folder(nested)
    assert tokenizer.load_tokenizer([nested]).vocab == 259


def change_ids(**changes: Any) -> dict[str, Any]:
    """Return the ids of PIECES with some changed or added."""
    return {**{piece: token for token, piece in enumerate(PIECES)}, **changes}


@pytest.mark.parametrize(
    ("pieces", "reason"),
    [
        (3, "not a vocabulary; allowed: a table of pieces and their ids, which are integers"),
        (
            change_ids(ab="256"),
            "not a vocabulary; allowed: a table of pieces and their ids, which are integers",
        ),
        (
            change_ids(ab=True),
            "not a vocabulary; allowed: a table of pieces and their ids, which are integers",
        ),
        (
            change_ids(ab=256.0),
            "not a vocabulary; allowed: a table of pieces and their ids, which are integers",
        ),
        ({}, "no piece '!'; a byte-level vocabulary has one for each of the 256 bytes"),
        (change_ids(x=300, ab=300), "'x' and 'ab' have the id 300; each id belongs to one piece"),
        (change_ids(ab=300), "no piece has the id 256; the ids of 259 pieces are 0 to 258"),
        (change_ids(ab=-1), "no piece has the id 256; the ids of 259 pieces are 0 to 258"),
    ],
)
def test_an_invalid_vocabulary_is_refused(pieces: Any, reason: str, tmp_path: Path) -> None:
    assert (
        get_load_error(write_bpe_folder(tmp_path, pieces)) == f"{tmp_path / 'vocab.json'}: {reason}"
    )


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not JSON: Expecting value: line 1 column 1 (char 0)"),
        (b'{"a": 0, "a": 1}', "not JSON: a key is repeated"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not JSON: Exceeds the limit"),
        (
            b"\xff",
            "not UTF-8: 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte",
        ),
        (b"[" * 100_000, "not JSON: maximum recursion depth exceeded"),
    ],
)
def test_a_vocabulary_that_is_not_json_is_refused(
    content: bytes, reason: str, tmp_path: Path
) -> None:
    path = write_bpe_folder(tmp_path) / "vocab.json"
    path.write_bytes(content)
    assert get_load_error(tmp_path).startswith(f"{path}: {reason}")


@pytest.mark.parametrize("line", ["a", "a b c", "a c", "a unknown", "", " a b"])
def test_an_invalid_merge_is_refused(line: str, tmp_path: Path) -> None:
    write_bpe_folder(tmp_path, merges=f"#version: 0.2\na b\n{line}\nĠ ab\n")
    assert (
        get_load_error(tmp_path)
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
def test_an_invalid_special_token_is_refused(
    special: str, number: int, shown: str, tmp_path: Path
) -> None:
    write_bpe_folder(tmp_path, special=special)
    assert (
        get_load_error(tmp_path)
        == f"{tmp_path / 'special_tokens.txt'}: line {number} is {shown!r}; allowed: one token a"
        " line, with no space around it, each once"
    )


def test_byte_level_bpe_needs_its_merges(tmp_path: Path) -> None:
    path = write_bpe_folder(tmp_path, merges=None) / "vocab.json"
    assert (
        get_load_error(path)
        == get_load_error(tmp_path)
        == (golden("no-merges-txt-beside-it-put", path))
    )


@pytest.mark.parametrize("name", ["merges.txt", "special_tokens.txt"])
def test_files_beside_a_vocabulary_have_limits_too(name: str, tmp_path: Path) -> None:
    path = write_bpe_folder(tmp_path) / name
    with path.open("wb") as file:
        file.truncate((256 << 20) + 1)
    assert get_load_error(tmp_path) == f"{path}: 268435457 bytes; the limit is 268435456"
    path.write_bytes(b"\xff")
    assert get_load_error(tmp_path).startswith(f"{path}: not UTF-8: ")
