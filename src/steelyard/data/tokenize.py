"""Token files made from texts (JSON lines, gzip or not), and what a pair of them holds."""

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
from steelyard.data.corpus import FEWEST, IDS, IDX, Corpus, blocks, fingerprint, splits
from steelyard.data.tokenizer import Tokenizer, end_of
from steelyard.errors import LostError, RequestError

MAX_LINE_BYTES = 64 << 20
BATCH_TEXTS, BATCH_CHARACTERS = 512, 1 << 20
HEADER_BYTES = 128
ROW = 2048

ByteWatch = Callable[[int, int], None]  # bytes of the input read, and all


@dataclass(frozen=True)
class TokenFiles:
    """A pair of token files that was written."""

    documents: int
    tokens: int
    skipped: int  # documents without a word
    files: list[tuple[str, int]]
    fingerprint: str


@dataclass(frozen=True)
class Split:
    documents: int
    tokens: int


@dataclass(frozen=True)
class CorpusInspection:
    name: str
    documents: int
    tokens: int
    dtype: str
    shortest: int
    longest: int
    mean: float
    highest: int
    # of 2048 tokens, whole ones of one epoch; None where there are too few documents to split
    rows: int | None
    splits: dict[str, Split] | None
    fingerprint: str


def inspect(corpus: Corpus) -> CorpusInspection:
    """What a corpus holds; all its tokens are read."""
    lens = np.diff(corpus.ends, prepend=0)
    parts = None
    if len(lens) >= FEWEST:
        named = zip(("train", "valid", "test"), splits(len(lens)), strict=True)
        parts = {
            name: Split(len(part), int(lens[part.start : part.stop].sum())) for name, part in named
        }
    return CorpusInspection(
        name=corpus.name,
        documents=len(lens),
        tokens=len(corpus.ids),
        dtype=corpus.ids.dtype.name,
        shortest=int(lens.min()),
        longest=int(lens.max()),
        mean=float(lens.mean()),
        highest=max(int(block.max()) for _, block in blocks(corpus)),
        rows=None if parts is None else parts["train"].tokens // ROW,
        splits=parts,
        fingerprint=fingerprint(corpus, None),
    )


def tokenize(
    inputs: list[Path],
    tokenizer: Tokenizer,
    prefix: Path,
    key: str = "text",
    append_end: bool = True,
    force: bool = False,
    watch: ByteWatch | None = None,
) -> TokenFiles:
    """Tokenise the text of every line into a pair of token files, one sentence a document; both
    appear whole, or neither.

    A document is what begins a sequence for the tokenizer, its text, and the token that ends one.
    """
    end = end_of(tokenizer, "leave the end out with --no-append-end") if append_end else None
    total = _check(inputs, prefix, force)
    skipped = 0

    def documents() -> Iterator[list[list[int]]]:
        nonlocal skipped
        for texts, done in _batches(inputs, key):
            full = [text for text in texts if text.strip()]
            skipped += len(texts) - len(full)
            yield [
                ids if end is None or ids[-1:] == [end] else [*ids, end]
                for ids in tokenizer.encode(full)
            ]
            if watch is not None:
                watch(done, total)

    with _pair(prefix) as (tokens, index):
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
        mark = fingerprint(Corpus(written, ends, prefix.name), None)
    pair = [Path(f"{prefix}{suffix}") for suffix in (IDS, IDX)]
    return TokenFiles(
        len(lens), int(ends[-1]), skipped, [(path.name, path.stat().st_size) for path in pair], mark
    )


def _check(inputs: list[Path], prefix: Path, force: bool) -> int:
    """The bytes of the input, if all is there and the output may be written."""
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
    for suffix in (IDS, IDX):
        if not force and Path(f"{prefix}{suffix}").exists():
            raise RequestError(
                f"{prefix}{suffix} exists; choose another --out, or overwrite it with --force"
            )
    return sum(path.stat().st_size for path in inputs)


def _batches(inputs: list[Path], key: str) -> Iterator[tuple[list[str], int]]:
    """Texts, enough for a tokenizer to share among cores, with the bytes of the input read so far."""
    texts: list[str] = []
    characters = before = done = 0
    for path in inputs:
        for text, at in _texts(path, key):
            texts.append(text)
            characters += len(text)
            done = before + at
            if len(texts) == BATCH_TEXTS or characters >= BATCH_CHARACTERS:
                yield texts, done
                texts, characters = [], 0
        before += path.stat().st_size
    if texts:
        yield texts, before


def _texts(path: Path, key: str) -> Iterator[tuple[str, int]]:
    """The texts of a file, each with how far in it was read."""
    at = 0

    def watch(read: int) -> None:
        nonlocal at
        at = read

    for line in jsonl.read(path, _form(key), MAX_LINE_BYTES, watch=watch):
        yield _text(line, key), at


def _form(key: str) -> str:
    return f'a line is {{"{key}": "…"}}'


def _text(line: jsonl.Line, key: str) -> str:
    text = line.value.get(key) if isinstance(line.value, dict) else None
    if not isinstance(text, str):
        raise RequestError(
            f"{line.where} is {shown(line.value)}; {_form(key)}; name another key with --key"
        )
    return jsonl.text(text, f"{line.where} has the text", _form(key))


def _write_ids(
    file: IO[bytes], batches: Iterator[list[list[int]]], dtype: np.dtype[np.generic]
) -> NDArray[np.int32]:
    """Write tokens as they come, and before them a header for as many as came; the lengths of the
    documents.
    """
    lens = array("i")
    file.seek(HEADER_BYTES)
    for batch in batches:
        for ids in batch:
            lens.append(len(ids))
            file.write(np.array(ids, dtype=dtype).data)
    table = f"{{'descr': '{dtype.str}', 'fortran_order': False, 'shape': ({sum(lens)},), }}"
    magic = b"\x93NUMPY\x01\x00" + (HEADER_BYTES - 10).to_bytes(2, "little")
    file.seek(0)
    file.write(magic + table.encode().ljust(HEADER_BYTES - 11) + b"\n")
    return np.array(lens, dtype=np.int32)


@contextmanager
def _pair(prefix: Path) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """Two files to write beside their places, which they take together once both are written and
    synced.
    """
    places = [Path(f"{prefix}{suffix}") for suffix in (IDS, IDX)]
    mark = secrets.token_hex(4)
    made = [place.with_name(f".{place.name}.{mark}{files.PART}") for place in places]
    try:
        with made[0].open("x+b") as tokens, made[1].open("xb") as index:
            yield tokens, index
            for file in (tokens, index):
                files.synced(file)
        _place(made, places)
    except OSError as error:
        raise LostError(
            f"{prefix}: cannot be written: {error.strerror or error}; free some space or choose"
            " another --out"
        ) from error
    finally:
        for path in made:
            path.unlink(missing_ok=True)


def _place(made: list[Path], places: list[Path]) -> None:
    # Tokens without an index are refused when they are read; with that of older tokens they would
    # not always be.
    places[1].unlink(missing_ok=True)
    try:
        for path, place in zip(made, places, strict=True):
            files.place(path, place)
    except BaseException:
        for place in places:
            place.unlink(missing_ok=True)
        raise
