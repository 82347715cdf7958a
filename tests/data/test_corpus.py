"""Test token files and the training rows cut from them, on corpora small enough to work out by
hand.
"""

import hashlib
import io
import json
import struct
import subprocess
import sys
import zipfile
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from steelyard.data.corpus import (
    Corpus,
    CorpusRows,
    check_ids,
    fingerprint_corpus,
    open_corpus,
    split_documents,
)
from steelyard.data.training_rows import IGNORED, TrainingRow
from steelyard.errors import RequestError

X = IGNORED


def make_corpus(*documents: list[int], dtype: str = "uint16") -> Corpus:
    """Return a corpus of documents in memory."""
    ids = np.array([token for document in documents for token in document], dtype=dtype)
    return Corpus(ids, np.cumsum([len(document) for document in documents], dtype=np.int64), "hand")


def write_pair(prefix: Path, ids: Any, lens: Any, docs: Any) -> Path:
    """Write a pair of token files and return its prefix."""
    np.save(f"{prefix}_ids.npy", ids)
    np.savez(f"{prefix}_idx.npz", lens=lens, docs=docs)
    return prefix


def write_small_pair(prefix: Path, dtype: str = "uint16") -> Path:
    """Write a pair with three documents and return its prefix: 1 2 3 (two sentences), 4 5, and
    6.
    """
    return write_pair(
        prefix,
        np.arange(1, 7, dtype=dtype),
        np.array([2, 1, 2, 1], dtype=np.int32),
        np.array([0, 2, 3, 4], dtype=np.int64),
    )


def convert_to_tuple(row: TrainingRow) -> tuple[list[int], list[int], tuple[int, ...], int, int]:
    """Return a row as (tokens, targets, lens, real, samples) with arrays as lists."""
    return row.tokens.tolist(), row.targets.tolist(), row.lens, row.real, row.samples


def read_epoch_order(corpus_read: Corpus, seed: int, epoch: int) -> list[int]:
    """Return the first token of each training document in the order of an epoch, read from a row as
    long as an epoch.
    """
    train_tokens = int(corpus_read.ends[split_documents(len(corpus_read.ends))[0][-1]])
    row = CorpusRows(corpus_read, train_tokens, 1, seed, 1).row(epoch)
    return [int(row.tokens[start]) for start in accumulate((0, *row.lens[:-1]))]


@pytest.mark.parametrize("dtype", ["uint16", "int32", "uint32", "int64", ">u2", ">i4"])
def test_a_document_is_the_tokens_of_its_sentences(tmp_path: Path, dtype: str) -> None:
    opened = open_corpus(write_small_pair(tmp_path / "c", dtype))
    assert opened.ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert opened.ends.tolist() == [3, 5, 6]
    assert opened.ends.dtype == np.int64
    assert opened.name == "c"


def test_indexes_may_be_compressed_and_of_any_integer_type(tmp_path: Path) -> None:
    prefix = write_pair(
        tmp_path / "c", np.arange(6, dtype=np.uint16), np.array([3, 2, 1]), np.arange(4)
    )
    assert open_corpus(prefix).ends.tolist() == [3, 5, 6]
    np.savez_compressed(
        f"{prefix}_idx.npz",
        lens=np.array([3, 2, 1], np.uint64),
        docs=np.arange(4, dtype=np.uint8),
        sents=[0.5],
    )
    assert open_corpus(prefix).ends.tolist() == [3, 5, 6]


def test_a_corpus_is_opened_by_prefix_file_or_folder(tmp_path: Path) -> None:
    write_small_pair(tmp_path / "one.two")
    for source in ("one.two", "one.two_ids.npy", "one.two_idx.npz", ""):
        assert open_corpus(tmp_path / source).name == "one.two"
    (tmp_path / "one.two").mkdir()
    assert open_corpus(tmp_path / "one.two").name == "one.two"
    write_small_pair(tmp_path / "three")
    assert open_corpus(tmp_path / "three").name == "three"
    with pytest.raises(
        RequestError, match=r"2 pairs in it \(one.two, three\); name one, such as .*one.two$"
    ):
        open_corpus(tmp_path)


def test_a_missing_or_incomplete_pair_is_refused(tmp_path: Path) -> None:
    write_small_pair(tmp_path / "c")
    (tmp_path / "other.npy").write_bytes(b"")
    (tmp_path / "empty").mkdir()
    for source, reason in (
        ("none", "does not exist; give the prefix or the folder"),
        ("other.npy", "not a token file; allowed: NAME_ids.npy or NAME_idx.npz"),
        ("empty", r"no \*_ids.npy in it"),
    ):
        with pytest.raises(RequestError, match=reason):
            open_corpus(tmp_path / source)
    moved = (tmp_path / "c_ids.npy").rename(tmp_path / "away")
    for source in ("c", "c_idx.npz", ""):
        with pytest.raises(RequestError, match=r"c_ids.npy is missing; a pair needs both files"):
            open_corpus(tmp_path / source)
    moved.rename(tmp_path / "c_ids.npy")
    (tmp_path / "c_idx.npz").unlink()
    for source in ("c", "c_ids.npy", ""):
        with pytest.raises(RequestError, match=r"c_idx.npz is missing; a pair needs both files"):
            open_corpus(tmp_path / source)


def format_npy(array: Any, **options: Any) -> bytes:
    """Return an array as the bytes of a .npy file."""
    buffer = io.BytesIO()
    np.save(buffer, array, **options)
    return buffer.getvalue()


VALID_NPY = format_npy(np.arange(6, dtype=np.uint16))
NPY_HEADER = b"\x93NUMPY\x01\x00"


@pytest.mark.parametrize(
    "content, reason",
    [
        (b"", "not a .npy array"),
        (b"PK\x03\x04 and no array at all", "not a .npy array"),
        (VALID_NPY[:40], "not a .npy array"),
        (b"\x93NUMPY\x09\x00" + VALID_NPY[8:], "version 9.0 of .npy"),
        (NPY_HEADER + b"\x20\x00" + b"__import__('os').system('true') \n", "not a .npy array"),
        (NPY_HEADER + b"\xff\xff" + b"(" * 65535, "not a .npy array"),
        (VALID_NPY[:-1], "139 bytes instead of 140 for 6 tokens"),
        (VALID_NPY + b"\x00", "141 bytes instead of 140 for 6 tokens"),
        (
            VALID_NPY.replace(b"(6,), }", b"(10000000000000,), }")[: len(VALID_NPY)],
            "not a .npy array|bytes instead of",
        ),
        (format_npy(np.array([{}, []], dtype=object), allow_pickle=True), "object of shape"),
        (format_npy(np.zeros((3, 2), np.uint16)), r"uint16 of shape \(3, 2\)"),
        (format_npy(np.zeros((), np.uint16)), r"uint16 of shape \(\)"),
        (format_npy(np.zeros(6, np.float32)), "float32 of shape"),
        (format_npy(np.zeros(6, bool)), "bool of shape"),
        (format_npy(np.zeros(6, np.uint8)), "tokens of type uint8; allowed: uint16, int32"),
        (format_npy(np.zeros(0, np.uint16)), "no tokens"),
    ],
)
def test_invalid_token_arrays_are_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    write_small_pair(tmp_path / "c")
    (tmp_path / "c_ids.npy").write_bytes(content)
    with pytest.raises(RequestError, match=reason) as error:
        open_corpus(tmp_path / "c")
    assert str(error.value).startswith(str(tmp_path / "c_ids.npy"))
    assert "\n" not in str(error.value)


def format_npz(compression: int = zipfile.ZIP_STORED, **members: bytes) -> bytes:
    """Return the bytes of an .npz file with these .npy members."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as file:
        for name, content in members.items():
            file.writestr(f"{name}.npy", content)
    return buffer.getvalue()


LENS, DOCS = np.array([2, 1, 2, 1], np.int32), np.array([0, 2, 3, 4])
VALID_NPZ = format_npz(lens=format_npy(LENS), docs=format_npy(DOCS))
TOO_SHORT_LENS = format_npy(LENS).replace(b"(4,), }", b"(9,), }")


@pytest.mark.parametrize(
    "content, reason",
    [
        (b"", "not a readable .npz"),
        (b"no zip", "not a readable .npz"),
        (VALID_NPZ[:-30], "not a readable .npz"),
        (
            VALID_NPZ.replace(format_npy(LENS)[-16:], bytes([3]) + format_npy(LENS)[-15:]),
            "not a readable .npz: Bad CRC-32",
        ),
        (format_npz(lens=format_npy(LENS)), "no docs in it"),
        (format_npz(docs=format_npy(DOCS)), "no lens in it"),
        (format_npz(lens=b"no array", docs=format_npy(DOCS)), "lens.npy: not a .npy array"),
        (
            format_npz(
                lens=format_npy(LENS),
                docs=format_npy(np.array([0, "a"], object), allow_pickle=True),
            ),
            "docs.npy: object of shape",
        ),
        (
            format_npz(lens=format_npy(LENS.reshape(2, 2)), docs=format_npy(DOCS)),
            r"lens.npy: int32 of shape \(2, 2\)",
        ),
        (
            format_npz(lens=format_npy(LENS.astype(float)), docs=format_npy(DOCS)),
            "lens.npy: float64 of shape",
        ),
        (format_npz(lens=TOO_SHORT_LENS, docs=format_npy(DOCS)), "lens.npy: 9 int32 in 144 bytes"),
        (
            format_npz(lens=format_npy(np.ones(7, np.int32)), docs=format_npy(DOCS)),
            "7 int32 in 156 bytes; allowed: at most 6",
        ),
        (
            format_npz(lens=format_npy(LENS[:0]), docs=format_npy(DOCS)),
            "0 lens and 4 docs; allowed: 1 or more",
        ),
        (
            format_npz(lens=format_npy(LENS), docs=format_npy(DOCS[:0])),
            "4 lens and 0 docs; allowed: 1 or more",
        ),
        (
            format_npz(lens=format_npy(np.array([7, -1])), docs=format_npy(DOCS)),
            "a sentence has the length -1; allowed: 1 to 6",
        ),
        (
            format_npz(lens=format_npy(np.array([6, 0])), docs=format_npy(DOCS)),
            "a sentence has the length 0; allowed: 1 to 6",
        ),
        (
            format_npz(lens=format_npy(np.array([1 << 62] * 4)), docs=format_npy(DOCS)),
            "a sentence has the length 4611686018427387904; allowed: 1 to 6",
        ),
        (
            format_npz(lens=format_npy(np.array([2, 2, 1])), docs=format_npy(DOCS)),
            "lens adds up to 5; the tokens are 6; the two files are not a pair",
        ),
        (
            format_npz(lens=format_npy(LENS), docs=format_npy(np.array([1, 2, 4]))),
            "docs goes from 1 to 4; allowed: increasing from 0 to 4",
        ),
        (
            format_npz(lens=format_npy(LENS), docs=format_npy(np.array([0, 2, 3]))),
            "docs goes from 0 to 3; allowed: increasing from 0 to 4",
        ),
        (
            format_npz(lens=format_npy(LENS), docs=format_npy(np.array([0, 3, 3, 4]))),
            "docs goes from 0 to 4; allowed: increasing",
        ),
        (
            format_npz(lens=format_npy(LENS), docs=format_npy(np.array([0, -3, 4]))),
            "docs goes from 0 to 4; allowed: increasing",
        ),
        (
            format_npz(lens=format_npy(LENS), docs=format_npy(np.array([0, 3, 2, 4], np.uint64))),
            "docs goes from 0 to 4; allowed: increasing",
        ),
    ],
)
def test_invalid_indexes_are_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    write_small_pair(tmp_path / "c")
    (tmp_path / "c_idx.npz").write_bytes(content)
    with pytest.raises(RequestError, match=reason) as error:
        open_corpus(tmp_path / "c")
    assert str(error.value).startswith(str(tmp_path / "c_idx.npz"))
    assert "\n" not in str(error.value)


def test_an_index_that_unpacks_to_more_than_the_limit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_small_pair(tmp_path / "c")
    bomb = format_npz(
        zipfile.ZIP_DEFLATED, lens=format_npy(np.ones(40 << 20, np.uint8)), docs=format_npy(DOCS)
    )
    assert len(bomb) < 100_000
    (tmp_path / "c_idx.npz").write_bytes(bomb)
    with pytest.raises(RequestError, match="41943040 uint8 in 41943168 bytes; allowed: at most 6"):
        open_corpus(tmp_path / "c")
    monkeypatch.setattr("steelyard.data.corpus.MAX_INDEX_BYTES", 40 << 20)
    with pytest.raises(
        RequestError, match="lens and docs are 41943328 bytes; allowed: at most 41943040 in all"
    ):
        open_corpus(tmp_path / "c")


@pytest.mark.process
def test_opening_a_corpus_does_not_load_its_tokens(tmp_path: Path) -> None:
    ids = np.lib.format.open_memmap(tmp_path / "c_ids.npy", "w+", np.uint16, (100 << 20,))
    ids[-3:] = 7
    ids.flush()
    np.savez(tmp_path / "c_idx.npz", lens=np.full(100, 1 << 20, np.int32), docs=np.arange(101))
    code = (
        "import psutil, sys; from pathlib import Path; from steelyard.data.corpus import"
        " CorpusRows, open_corpus\nbefore = psutil.Process().memory_info().rss\nfound ="
        " open_corpus(Path(sys.argv[1])); row = CorpusRows(found, 2048, 4, 0,"
        " 2).row(5)\nprint(psutil.Process().memory_info().rss - before, len(found.ids))"
    )
    process = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "c"], capture_output=True, text=True, check=True
    )
    growth_bytes, tokens = map(int, process.stdout.split())
    assert tokens == 100 << 20
    assert growth_bytes < 32 << 20


def test_ids_beyond_the_vocabulary_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("steelyard.data.corpus.CHUNK_TOKENS", 4)
    opened = open_corpus(write_small_pair(tmp_path / "c"))
    check_ids(opened, 7)
    check_ids(opened, 1 << 17)
    with pytest.raises(
        RequestError,
        match=r"c_ids.npy: token 5 \(counted from 0\) is 6; allowed: 0 to 5, the vocabulary",
    ):
        check_ids(opened, 6)
    with pytest.raises(
        RequestError, match=r"hand: token 1 \(counted from 0\) is -2; allowed: 0 to 9"
    ):
        check_ids(make_corpus([1, -2, 3], dtype="int32"), 10)


def test_a_fingerprint_depends_on_tokens_and_document_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = fingerprint_corpus(open_corpus(write_small_pair(tmp_path / "c")), None)
    assert expected == hashlib.sha256(struct.pack("<6i3q", 1, 2, 3, 4, 5, 6, 3, 5, 6)).hexdigest()
    for dtype in ("int32", "int64", ">u2"):
        assert (
            fingerprint_corpus(open_corpus(write_small_pair(tmp_path / "c", dtype)), None)
            == expected
        )
    monkeypatch.setattr("steelyard.data.corpus.CHUNK_TOKENS", 4)
    assert fingerprint_corpus(make_corpus([1, 2, 3], [4, 5], [6]), None) == expected
    changed = {
        fingerprint_corpus(make_corpus([1, 2, 3], [4, 5], [6]), "vocabulary"),
        fingerprint_corpus(make_corpus([1, 2], [3, 4, 5], [6]), None),
        fingerprint_corpus(make_corpus([1, 2, 3], [4, 5], [7]), None),
    }
    assert len(changed) == 3
    assert expected not in changed


@pytest.mark.parametrize(
    "documents, train, valid, test",
    [
        (3, 1, 1, 1),
        (4, 2, 1, 1),
        (500, 498, 1, 1),
        (1000, 998, 1, 1),
        (1500, 1496, 2, 2),
        (100_000, 99_800, 100, 100),
    ],
)
def test_documents_are_split_into_train_valid_and_test(
    documents: int, train: int, valid: int, test: int
) -> None:
    parts = split_documents(documents)
    assert [len(part) for part in parts] == [train, valid, test]
    assert [document for part in parts for document in part] == list(range(documents))


@pytest.mark.parametrize("documents", [1, 2])
def test_too_few_documents_are_refused(documents: int) -> None:
    with pytest.raises(RequestError, match=f"^{documents} documents; allowed: 3 or more"):
        CorpusRows(make_corpus(*[[1, 2]] * documents), 2, 1, 0, 1)


def test_rows_by_hand() -> None:
    """There is one training document, so every epoch is 1 2 3 4 5."""
    rows = CorpusRows(make_corpus([1, 2, 3, 4, 5], [7, 8, 9], [6]), 3, 2, 0, 1)
    assert convert_to_tuple(rows.row(0)) == ([1, 2, 3], [2, 3, 4], (3,), 3, 1)
    assert convert_to_tuple(rows.row(1)) == ([4, 5, 1], [5, X, 2], (2, 1), 3, 1)
    assert convert_to_tuple(rows.row(2)) == ([2, 3, 4], [3, 4, 5], (3,), 3, 1)
    assert convert_to_tuple(rows.row(3)) == ([5, 1, 2], [X, 2, 3], (1, 2), 3, 1)
    assert convert_to_tuple(rows.row(4)) == ([3, 4, 5], [4, 5, X], (3,), 3, 1)
    assert convert_to_tuple(rows.row(5)) == convert_to_tuple(rows.row(0))
    assert rows.row(0).tokens.dtype == rows.row(0).targets.dtype == np.int64
    assert [rows.batch(step) for step in range(3)] == [[0, 1], [2, 3], [4, 5]]


def test_a_row_may_hold_several_epochs() -> None:
    rows = CorpusRows(make_corpus([1, 2], [7], [6]), 5, 1, 0, 1)
    assert convert_to_tuple(rows.row(0)) == ([1, 2, 1, 2, 1], [2, X, 2, X, 2], (2, 2, 1), 5, 1)
    assert convert_to_tuple(rows.row(1)) == ([2, 1, 2, 1, 2], [X, 2, X, 2, X], (1, 2, 2), 5, 1)


def test_rows_of_several_documents() -> None:
    documents = [[10, 11, 12], [20, 21], [30, 31, 32, 33], [7], [6]]
    rows = CorpusRows(make_corpus(*documents), 4, 1, 5, 1)
    document_by_first_token = {document[0]: document for document in documents}
    stream = [
        document_by_first_token[token]
        for epoch in range(4)
        for token in read_epoch_order(make_corpus(*documents), 5, epoch)
    ]
    tokens = [token for document in stream for token in document]
    targets = [token for document in stream for token in (*document[1:], X)]
    document_ends = {0, *accumulate(map(len, stream))}
    for number in range(9):
        cuts = sorted(
            {
                4 * number,
                *(end for end in document_ends if 4 * number < end < 4 * number + 4),
                4 * number + 4,
            }
        )
        lens = tuple(end - start for start, end in pairwise(cuts))
        assert convert_to_tuple(rows.row(number)) == (
            tokens[4 * number : 4 * number + 4],
            targets[4 * number : 4 * number + 4],
            lens,
            4,
            1,
        )


def test_held_out_rows_are_whole_rows_of_the_validation_documents() -> None:
    train_documents = [[token] for token in range(100, 2096)]
    documents = make_corpus(*train_documents, [1, 2, 3, 4, 5], [7, 8], [60], [61])
    assert [len(split) for split in split_documents(len(documents.ends))] == [1996, 2, 2]
    rows = CorpusRows(documents, 3, 1, 0, 9)
    assert rows.held_out() == [("valid", 0), ("valid", 1)] == rows.held_out()
    assert [convert_to_tuple(rows.row(key)) for key in rows.held_out()] == [
        ([1, 2, 3], [2, 3, 4], (3,), 3, 1),
        ([4, 5, 7], [5, X, 8], (2, 1), 3, 1),
    ]
    assert CorpusRows(documents, 3, 1, 0, 1).held_out() == [("valid", 0)]
    assert CorpusRows(documents, 3, 1, 0, 0).held_out() == []
    one_row = CorpusRows(documents, 10, 1, 0, 4)
    assert one_row.held_out() == [("valid", 0)]
    tokens = [1, 2, 3, 4, 5, 7, 8, 0, 0, 0]
    assert convert_to_tuple(one_row.row(("valid", 0))) == (
        tokens,
        [2, 3, 4, 5, X, 8, X, X, X, X],
        (5, 2, 3),
        7,
        1,
    )


FORTY_DOCUMENTS = make_corpus(*[[i] * (1 + i % 7) for i in range(40)])


def test_every_training_token_is_seen_once_an_epoch() -> None:
    tokens = int(FORTY_DOCUMENTS.ends[37])
    rows = CorpusRows(FORTY_DOCUMENTS, 1, 1, 3, 1)
    for epoch in range(3):
        row_tokens = [
            int(rows.row(number).tokens[0])
            for number in range(epoch * tokens, (epoch + 1) * tokens)
        ]
        assert sorted(row_tokens) == FORTY_DOCUMENTS.ids[:tokens].tolist()


def test_the_order_depends_on_epoch_and_seed() -> None:
    orders = [read_epoch_order(FORTY_DOCUMENTS, seed, epoch) for seed in (3, 4) for epoch in (0, 1)]
    assert all(sorted(epoch_order) == list(range(38)) for epoch_order in orders)
    assert len({tuple(epoch_order) for epoch_order in orders}) == 4
    # Drawn once and written down: every version of numpy must draw the same order.
    assert read_epoch_order(make_corpus(*[[token] for token in range(12)]), 3, 0) == [
        0,
        4,
        9,
        7,
        1,
        5,
        6,
        3,
        8,
        2,
    ]


@pytest.mark.process
def test_another_process_reads_the_same_rows() -> None:
    code = (
        "import json, numpy as np; from steelyard.data.corpus import Corpus, CorpusRows\ndocuments"
        " = [[i] * (1 + i % 7) for i in range(40)]\nends = np.cumsum([len(one) for one in"
        " documents], dtype=np.int64)\nrows = CorpusRows(Corpus(np.array(sum(documents, []),"
        " np.uint16), ends, 'x'), 16, 2, 3, 1)\nprint(json.dumps([rows.row(k).tokens.tolist() for k"
        " in (90, 3, 41)]))"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    rows = CorpusRows(FORTY_DOCUMENTS, 16, 2, 3, 1)
    assert json.loads(process.stdout) == [
        rows.row(number).tokens.tolist() for number in (90, 3, 41)
    ]


def test_random_access_gives_the_rows_of_sequential_access() -> None:
    sequential_rows, random_rows = (
        CorpusRows(FORTY_DOCUMENTS, 16, 2, 3, 1),
        CorpusRows(FORTY_DOCUMENTS, 16, 2, 3, 1),
    )
    expected = {number: convert_to_tuple(sequential_rows.row(number)) for number in range(60)}
    for number in np.random.default_rng(0).permutation(60):
        assert convert_to_tuple(random_rows.row(int(number))) == expected[int(number)]
        assert sum(expected[int(number)][2]) == 16
        assert 0 not in expected[int(number)][2]
