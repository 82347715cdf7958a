"""Test BERT's word pieces from a vocab.txt: ids by hand and with the real vocabulary, and refusals
of invalid files.
"""

import hashlib
import json
from pathlib import Path

import pytest
import tokenizers

from fixtures.golden import golden
from steelyard.data import tokenizer
from steelyard.data.tokenizer import BytePairTokenizer, JsonTokenizer, WordPieceTokenizer
from steelyard.errors import RequestError
from steelyard.tasks.superglue_record import queries as superglue

PIECES = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[MASK]",
    "os",
    "##lo",
    "cafe",
    "[",
    "]",
    "mask",
    "cls",
    ".",
    "a",
]
REAL_SHA256 = "862782a2264648a2a9f2fe0ffedb5b702c097f03e4e1fb97cb88380302342c2e"


def write_vocabulary(folder: Path, *pieces: str, name: str = "vocab.txt") -> Path:
    """Write a vocabulary, PIECES unless given, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("".join(f"{piece}\n" for piece in pieces or PIECES))
    return folder / name


def load_refusal(path: Path) -> str:
    """Return the message with which loading a tokenizer is refused, after checking that it is one
    line.
    """
    with pytest.raises(RequestError) as error:
        tokenizer.load_tokenizer([path])
    line = str(error.value)
    assert "\n" not in line
    return line


def test_word_pieces_by_hand(tmp_path: Path) -> None:
    loaded = WordPieceTokenizer(write_vocabulary(tmp_path))
    assert (loaded.source, loaded.vocab, loaded.end) == ("vocab.txt", 13, None)
    assert (loaded.pad, loaded.cls, loaded.mask) == (0, 2, 3)
    assert loaded.sha256 == hashlib.sha256(json.dumps(PIECES).encode()).hexdigest()
    texts = [
        "Oslo.",
        " OSLO\n oslo",
        "Café",
        "lo oslolo xos",
        "",
        "[MASK][CLS]",
        "a\u200ba",
        "a" * 101,
    ]
    assert loaded.encode(texts) == [
        [4, 5, 11],
        [4, 5, 4, 5],
        [6],
        [1, 4, 5, 5, 1],
        [],
        [7, 9, 8, 7, 10, 8],
        [1],  # the zero-width space is removed, and "aa" is no piece
        [1],
    ]


def test_ids_are_line_numbers_with_unix_and_dos_line_ends(tmp_path: Path) -> None:
    loaded = WordPieceTokenizer(write_vocabulary(tmp_path / "one", *reversed(PIECES)))
    assert (loaded.pad, loaded.cls, loaded.mask, loaded.encode(["oslo"])) == (12, 10, 9, [[8, 7]])
    dos_file = write_vocabulary(tmp_path / "two", *reversed(PIECES))
    dos_file.write_bytes(dos_file.read_bytes().replace(b"\n", b"\r\n")[:-2])
    assert WordPieceTokenizer(dos_file).sha256 == loaded.sha256


@pytest.mark.parametrize("name", ["[PAD]", "[UNK]", "[CLS]", "[MASK]"])
def test_a_vocabulary_needs_its_special_pieces(name: str, tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path, *(piece for piece in PIECES if piece != name))
    assert load_refusal(tmp_path) == (golden("no-piece-bert-vocab-txt-has", path, name))


@pytest.mark.parametrize(
    ("piece", "shown"),
    [("", "''"), (" os", "' os'"), ("two words ", "'two words '"), ("os", "'os'")],
)
def test_an_invalid_piece_is_refused(piece: str, shown: str, tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path, piece, *PIECES)
    assert load_refusal(path) == (golden("line-1-is-allowed-one-piece", path, shown))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "no piece [PAD]; "),
        (
            b"[PAD]\n\xff\n",
            "not UTF-8: 'utf-8' codec can't decode byte 0xff in position 6: invalid start byte",
        ),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:07ec\nsize 231508\n",
            "no piece [PAD]; ",
        ),
    ],
)
def test_an_invalid_vocabulary_file_is_refused(content: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "vocab.txt"
    path.write_bytes(content)
    assert load_refusal(tmp_path).startswith(f"{path}: {reason}")


def test_a_huge_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "vocab.txt"
    with path.open("wb") as file:
        file.truncate((256 << 20) + 1)
    assert load_refusal(tmp_path) == f"{path}: 268435457 bytes; the limit is 268435456"


def test_vocab_txt_is_tried_after_the_other_tokenizer_files(data_dir: Path, tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path)
    named_file = write_vocabulary(tmp_path / "own", name="my-own.txt")
    assert isinstance(tokenizer.load_tokenizer([tmp_path]), WordPieceTokenizer)
    assert tokenizer.load_tokenizer([named_file]).source == "my-own.txt"
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / name).write_bytes((data_dir / "tokenizers" / "gpt2" / name).read_bytes())
    assert isinstance(tokenizer.load_tokenizer([tmp_path]), BytePairTokenizer)
    assert isinstance(tokenizer.load_tokenizer([path]), WordPieceTokenizer)


def test_word_pieces_are_loaded_beside_a_tokenizer_json(tmp_path: Path) -> None:
    """A Hugging Face folder of BERT holds both files."""
    path = write_vocabulary(tmp_path / "tokenizer")
    json_tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordPiece({piece: token for token, piece in enumerate(PIECES)})
    )
    json_tokenizer.save(str(path.with_name("tokenizer.json")))
    assert isinstance(tokenizer.load_tokenizer([tmp_path]), JsonTokenizer)
    loaded = tokenizer.load_word_pieces([tmp_path / "absent", tmp_path])
    assert (loaded.source, loaded.cls) == ("vocab.txt", 2)
    path.unlink()
    with pytest.raises(RequestError) as error:
        tokenizer.load_word_pieces([tmp_path])
    assert str(error.value) == (golden("no-tokenizer-found-looked-in-put", tmp_path))


def test_the_bert_vocabulary_gives_the_published_ids(data_dir: Path) -> None:
    loaded = tokenizer.load_word_pieces([data_dir / "tokenizers" / "bert-large-uncased"])
    assert (loaded.vocab, loaded.pad, loaded.cls, loaded.mask, loaded.sha256) == (
        30522,
        0,
        101,
        103,
        REAL_SHA256,
    )
    assert loaded.encode(["Hello world", "[CLS] naïve"]) == [
        [7592, 2088],
        [1031, 18856, 2015, 1033, 15743],
    ]


def test_real_texts_are_encoded_as_by_the_tokenizers_library(data_dir: Path) -> None:
    folder = data_dir / "tokenizers" / "bert-large-uncased"
    library_tokenizer = tokenizers.BertWordPieceTokenizer(str(folder / "vocab.txt"), lowercase=True)
    queries = superglue.read_queries(data_dir / "record" / "record_dev32.jsonl")
    texts = [text for item in queries for text in (item.passage, *item.entities)]
    encoded = tokenizer.load_word_pieces([folder]).encode(texts)
    assert encoded == [
        item.ids for item in library_tokenizer.encode_batch(texts, add_special_tokens=False)
    ]
    assert (len(encoded), sum(map(len, encoded))) == (401, 7587)
