"""Write token files from texts (JSON lines, gzipped or not), and describe what a pair of token
files holds.

This is behind `steelyard data pack` and `steelyard data inspect`; `data/corpus.py` reads the files.
"""

import os
import secrets
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as shown
from typing import IO

import numpy as np
from numpy.typing import NDArray

from steelyard import files
from steelyard.data import jsonl
from steelyard.data.corpus import (
    IDS_SUFFIX,
    INDEX_SUFFIX,
    MIN_DOCUMENTS,
    Corpus,
    fingerprint_corpus,
    iterate_chunks,
    split_documents,
)
from steelyard.data.tokenizer import Tokenizer, require_end_token
from steelyard.errors import LostError, RequestError

MAX_LINE_BYTES = 64 << 20
BATCH_TEXTS, BATCH_CHARACTERS = 512, 1 << 20
HEADER_BYTES = 128
ROW_TOKENS = 2048

ByteWatch = Callable[[int, int], None]  # bytes of the input read so far, and in all


@dataclass(frozen=True)
class TokenFiles:
    """What `write_token_files` wrote as a pair of token files: `documents` and `tokens` (their
    numbers), `skipped` (texts of white space only, left out), `files` ((name, size in bytes) of
    PREFIX_ids.npy and PREFIX_idx.npz), and `fingerprint`, the SHA-256 of the corpus without a
    tokenizer.
    """

    documents: int
    tokens: int
    skipped: int  # documents of white space only
    files: list[tuple[str, int]]
    fingerprint: str


@dataclass(frozen=True)
class CorpusSplit:
    """One split of a corpus (train, valid or test): its number of `documents` and of `tokens`."""

    documents: int
    tokens: int


@dataclass(frozen=True)
class CorpusInspection:
    """What a corpus holds, for `data inspect`, made by `inspect_corpus`: `name` (of the prefix),
    numbers of `documents` and `tokens`, `dtype` (integer type of the tokens), `shortest`, `longest`
    and `mean` document in tokens, `highest` token id, and `fingerprint` (SHA-256).

    `splits` maps `train`, `valid` and `test` to a `CorpusSplit`; `rows` are whole rows of 2048
    tokens in the training split. Both are None if there are too few documents to split.
    """

    name: str
    documents: int
    tokens: int
    dtype: str
    shortest: int
    longest: int
    mean: float
    highest: int
    # whole rows of 2048 tokens in one epoch; None if there are too few documents to split
    rows: int | None
    splits: dict[str, CorpusSplit] | None
    fingerprint: str


def inspect_corpus(corpus: Corpus) -> CorpusInspection:
    """Return the counts, document lengths, splits and fingerprint of a corpus. Reads all tokens.
    `splits` and `rows` are None if there are fewer than three documents.
    """
    lens = np.diff(corpus.ends, prepend=0)
    corpus_splits = None
    if len(lens) >= MIN_DOCUMENTS:
        named_splits = zip(("train", "valid", "test"), split_documents(len(lens)), strict=True)
        corpus_splits = {
            name: CorpusSplit(len(part), int(lens[part.start : part.stop].sum()))
            for name, part in named_splits
        }
    return CorpusInspection(
        name=corpus.name,
        documents=len(lens),
        tokens=len(corpus.ids),
        dtype=corpus.ids.dtype.name,
        shortest=int(lens.min()),
        longest=int(lens.max()),
        mean=float(lens.mean()),
        highest=max(int(block.max()) for _, block in iterate_chunks(corpus)),
        rows=None if corpus_splits is None else corpus_splits["train"].tokens // ROW_TOKENS,
        splits=corpus_splits,
        fingerprint=fingerprint_corpus(corpus, None),
    )


def write_token_files(
    inputs: list[Path],
    tokenizer: Tokenizer,
    prefix: Path,
    key: str = "text",
    append_end: bool = True,
    force: bool = False,
    watch: ByteWatch | None = None,
) -> TokenFiles:
    """Tokenize the text in field `key` of every line of the JSON-lines files `inputs` (gzipped or
    not) into PREFIX_ids.npy and PREFIX_idx.npz, one document per line; return what was written.

    A document is whatever the tokenizer begins a sequence with, its text and, with `append_end`,
    the end token, once. Texts of white space only are skipped. Ids are uint16 if the vocabulary
    allows, else int32. The files get their names only when both are complete (`_open_pair`).
    `watch` is called with bytes read and total bytes. Raises RequestError for bad inputs or output
    path, existing outputs without `force`, no documents, or with `append_end` a tokenizer without
    end token; LostError if the files cannot be written.
    """
    end = (
        require_end_token(tokenizer, "leave the end out with --no-append-end")
        if append_end
        else None
    )
    total = _check_paths(inputs, prefix, force)
    skipped = 0

    def documents() -> Iterator[list[list[int]]]:
        """Yield the token ids of the documents batch by batch, each with the end token behind it
        unless it already ends in that, or `append_end` is False. Texts of white space only are left
        out and counted in `skipped`. Calls `watch`, if given, after each batch.
        """
        nonlocal skipped
        for texts, bytes_read in _batch_texts(inputs, key):
            non_empty = [text for text in texts if text.strip()]
            skipped += len(texts) - len(non_empty)
            yield [
                ids if end is None or ids[-1:] == [end] else [*ids, end]
                for ids in tokenizer.encode(non_empty)
            ]
            if watch is not None:
                watch(bytes_read, total)

    with _open_pair(prefix) as (tokens, index):
        dtype = np.dtype("<u2" if tokenizer.vocab <= 1 << 16 else "<i4")
        lens = _write_ids(tokens, documents(), dtype)
        if not len(lens):
            names = ", ".join(str(path) for path in inputs[:4])
            raise RequestError(
                f"{names}: no documents; give at least one line with a text that is not empty"
            )
        np.savez(index, lens=lens, docs=np.arange(len(lens) + 1, dtype=np.int64))
        ends = np.cumsum(lens, dtype=np.int64)
        tokens.flush()
        written = np.memmap(
            tokens.name, dtype=dtype, mode="r", offset=HEADER_BYTES, shape=(int(ends[-1]),)
        )
        digest = fingerprint_corpus(Corpus(written, ends, prefix.name), None)
    pair = [Path(f"{prefix}{suffix}") for suffix in (IDS_SUFFIX, INDEX_SUFFIX)]
    return TokenFiles(
        len(lens),
        int(ends[-1]),
        skipped,
        [(path.name, path.stat().st_size) for path in pair],
        digest,
    )


def _check_paths(inputs: list[Path], prefix: Path, force: bool) -> int:
    """Return the total size of the inputs in bytes. Raises RequestError if an input is no file,
    `prefix` is a folder, its folder is missing or not writable, or one of the output files exists
    (unless `force`).
    """
    for path in inputs:
        if not path.is_file():
            raise RequestError(f"{str(path)!r} is not a file; give .jsonl or .jsonl.gz files")
    if prefix.is_dir():
        raise RequestError(
            f"--out {prefix}: a folder; add a name for the pair, such as {prefix / 'corpus'}"
        )
    if not prefix.parent.is_dir():
        raise RequestError(
            f"--out {prefix}: no folder {str(prefix.parent)!r}; make it, or choose another"
        )
    if not os.access(prefix.parent, os.W_OK | os.X_OK):
        raise RequestError(
            f"--out {prefix}: folder {str(prefix.parent)!r} cannot be written; choose another"
        )
    for suffix in (IDS_SUFFIX, INDEX_SUFFIX):
        if not force and Path(f"{prefix}{suffix}").exists():
            raise RequestError(
                f"{prefix}{suffix} exists; choose another --out, or overwrite it with --force"
            )
    return sum(path.stat().st_size for path in inputs)


def _batch_texts(inputs: list[Path], key: str) -> Iterator[tuple[list[str], int]]:
    """Yield (texts, bytes of all inputs read so far): batches of up to 512 texts or about 1 Mi
    characters, large enough for a tokenizer to share among cores. Raises RequestError if a file or
    line is bad (`_read_texts`).
    """
    texts: list[str] = []
    characters = earlier_bytes = bytes_read = 0
    for path in inputs:
        for text, offset in _read_texts(path, key):
            texts.append(text)
            characters += len(text)
            bytes_read = earlier_bytes + offset
            if len(texts) == BATCH_TEXTS or characters >= BATCH_CHARACTERS:
                yield texts, bytes_read
                texts, characters = [], 0
        earlier_bytes += path.stat().st_size
    if texts:
        yield texts, earlier_bytes


def _read_texts(path: Path, key: str) -> Iterator[tuple[str, int]]:
    """Yield each text of a JSON-lines file with the number of bytes read so far of the file as on
    disk. Raises RequestError if the file is unreadable, or a line is malformed, has no text under
    `key`, or more than 64 MiB.
    """
    offset = 0

    def note_offset(read: int) -> None:
        """Store the byte offset that the reader reports in `offset` of `_read_texts`."""
        nonlocal offset
        offset = read

    for line in jsonl.read_json_lines(path, _line_format(key), MAX_LINE_BYTES, watch=note_offset):
        yield _require_line_text(line, key), offset


def _line_format(key: str) -> str:
    """Return what a line looks like, for error messages."""
    return f'a line is {{"{key}": "…"}}'


def _require_line_text(line: jsonl.JsonLine, key: str) -> str:
    """Return the text under `key` of a JSON line. Raises RequestError if the line is no object, has
    no string there, or one that is not valid Unicode.
    """
    text = line.value.get(key) if isinstance(line.value, dict) else None
    if not isinstance(text, str):
        raise RequestError(
            f"{line.location} is {shown(line.value)}; {_line_format(key)}; name another key with"
            " --key"
        )
    return jsonl.require_text(text, f"{line.location} has the text", _line_format(key))


def _write_ids(
    file: IO[bytes], batches: Iterator[list[list[int]]], dtype: np.dtype[np.generic]
) -> NDArray[np.int32]:
    """Write the tokens of all documents as `dtype` and then, at the beginning of the file, the .npy
    header of 128 bytes for as many as came; return the documents' lengths in tokens.
    """
    lens = array("i")
    file.seek(HEADER_BYTES)
    for batch in batches:
        for ids in batch:
            lens.append(len(ids))
            file.write(np.array(ids, dtype=dtype).data)
    header = f"{{'descr': '{dtype.str}', 'fortran_order': False, 'shape': ({sum(lens)},), }}"
    magic = b"\x93NUMPY\x01\x00" + (HEADER_BYTES - 10).to_bytes(2, "little")
    file.seek(0)
    file.write(magic + header.encode().ljust(HEADER_BYTES - 11) + b"\n")
    return np.array(lens, dtype=np.int32)


@contextmanager
def _open_pair(prefix: Path) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """As a context manager, yield two temporary files beside `prefix`, for tokens and index, open
    for writing; if the block succeeds, sync both and rename them to PREFIX_ids.npy and
    PREFIX_idx.npz.

    Old files of these names are replaced, the index removed first; if a rename fails, neither old
    nor new files are left. If the block fails, old files stay as they are. Raises LostError for any
    OSError, also one of the block; other errors pass through. The temporary files are always
    removed.
    """
    paths = [Path(f"{prefix}{suffix}") for suffix in (IDS_SUFFIX, INDEX_SUFFIX)]
    unique_part = secrets.token_hex(4)
    temporaries = [
        final.with_name(f".{final.name}.{unique_part}{files.PART_SUFFIX}") for final in paths
    ]
    try:
        with temporaries[0].open("x+b") as tokens, temporaries[1].open("xb") as index:
            yield tokens, index
            for file in (tokens, index):
                files.sync_file(file)
        _rename_pair(temporaries, paths)
    except OSError as error:
        raise LostError(
            f"{prefix}: cannot be written: {error.strerror or error}; free some space or choose"
            " another --out"
        ) from error
    finally:
        for path in temporaries:
            path.unlink(missing_ok=True)


def _rename_pair(temporaries: list[Path], paths: list[Path]) -> None:
    """Rename the two finished files, tokens and index, to their final names, over old ones; an old
    index is removed first. If a rename fails, remove both final files and raise its error.
    """
    # The old index goes first: a reader refuses tokens without index, but might accept new tokens
    # with an old index.
    paths[1].unlink(missing_ok=True)
    try:
        for path, final in zip(temporaries, paths, strict=True):
            files.move_into_place(path, final)
    except BaseException:
        for final in paths:
            final.unlink(missing_ok=True)
        raise
