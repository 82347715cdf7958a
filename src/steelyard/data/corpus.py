"""Read token files for pretraining, and cut them into training rows.

The layout is that of PaddleNLP's `create_pretraining_data.py`: `PREFIX_ids.npy` holds the tokens of
all documents end to end. `PREFIX_idx.npz` holds `lens`, the length of every sentence, and `docs`,
the number of sentences before each document, from 0 up to the number of all sentences. A document
is its sentences end to end. `data/token_files.py` writes such pairs; `tasks/openwebtext` trains on
them.
"""

import hashlib
import io
import lzma
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from tokenize import TokenError
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from steelyard import files
from steelyard.data.rows import IGNORED, Ids, Key, Row
from steelyard.errors import RequestError

IDS, IDX = "_ids.npy", "_idx.npz"
DTYPES = ("uint16", "int32", "uint32", "int64")
MAX_INDEX_BYTES = 4 << 30
MAX_HEADER_BYTES = 10_000  # of a .npy header; numpy refuses longer ones too
BLOCK_TOKENS = 16 << 20  # 64 MiB of int32
FEWEST = 3  # documents: one to train on, one to validate, one to test
AGAIN = "make the pair anew with steelyard data pack"


@dataclass(frozen=True)
class Corpus:
    """The tokens of all documents end to end. Those of a file are memory-mapped, and read only when
    they are used.
    """

    ids: NDArray[Any]
    ends: Ids  # index in ids behind the last token of each document
    name: str  # the last part of the prefix


def open_corpus(source: Path) -> Corpus:
    """Open a pair of token files by its prefix (`folder/name`), by one of the two files, or by a
    folder that holds exactly one pair.

    The index is read and checked, tokens are memory-mapped and not read. Raises RequestError if a
    file is missing, unreadable or of another type, or if the two files do not belong together.
    """
    prefix, tokens, index = _pair(source)
    ids = _mapped(tokens)
    lens, docs = _index(index, len(ids))
    _check_index(index, lens, docs, len(ids))
    ends = np.cumsum(lens.astype(np.int64))[docs.astype(np.int64)[1:] - 1]
    return Corpus(ids, ends, prefix.name)


def check_files(source: Path) -> None:
    """Raise RequestError if there is no pair of token files at this path.

    Checks the names, the header and size of the token file, and that the index is a zip with `lens`
    and `docs`; reads neither tokens nor index arrays.
    """
    _, tokens, index = _pair(source)
    _mapped(tokens)
    with _index_members(index):
        pass


def _pair(source: Path) -> tuple[Path, Path, Path]:
    """Return the prefix, the token file and the index file of a pair. Raises RequestError if one of
    the files is missing.
    """
    prefix = _prefix(source)
    tokens, index = Path(f"{prefix}{IDS}"), Path(f"{prefix}{IDX}")
    for path in (tokens, index):
        if not path.is_file():
            raise RequestError(
                f"{path} is missing; a pair needs both files; copy it there, or {AGAIN}"
            )
    return prefix, tokens, index


def _prefix(source: Path) -> Path:
    """Return the prefix of a pair, given the prefix, one of its files or the folder of exactly one
    pair. Raises RequestError if there is none, or more than one.
    """
    if any(Path(f"{source}{suffix}").is_file() for suffix in (IDS, IDX)):
        return source
    if source.is_file():
        for suffix in (IDS, IDX):
            if source.name.endswith(suffix):
                return source.with_name(source.name.removesuffix(suffix))
        raise RequestError(
            f"{source}: not a token file; allowed: NAME{IDS} or NAME{IDX}; make them with steelyard"
            " data pack"
        )
    if not source.is_dir():
        raise RequestError(
            f"data {str(source)!r} does not exist; give the prefix or the folder of NAME{IDS} and"
            f" NAME{IDX}"
        )
    found = sorted(
        {p.name.removesuffix(s) for s in (IDS, IDX) for p in source.glob(f"*{s}") if p.name != s}
    )
    if not found:
        raise RequestError(
            f"{source}: no *{IDS} in it; give the folder of a pair, or make one with steelyard data"
            " pack"
        )
    if len(found) > 1:
        raise RequestError(
            f"{source}: {len(found)} pairs in it ({', '.join(found[:4])}); name one, such as"
            f" {source / found[0]}"
        )
    return source / found[0]


def _mapped(path: Path) -> NDArray[Any]:
    """Return the tokens of a .npy file as a read-only memory map. Raises RequestError if it is
    unreadable, empty, has another size than its header says, or a type that is not in `DTYPES`.
    """
    try:
        with files.open_regular(path) as file:
            count, dtype = _header(file, str(path))
            begin = file.tell()
        size = path.stat().st_size
    except OSError as error:
        raise RequestError(f"{path}: cannot be read: {error.strerror}") from error
    if dtype.newbyteorder("=").name not in DTYPES:
        raise RequestError(f"{path}: tokens of type {dtype}; allowed: {', '.join(DTYPES)}; {AGAIN}")
    if size != begin + count * dtype.itemsize:
        whole = begin + count * dtype.itemsize
        raise RequestError(
            f"{path}: {size} bytes instead of {whole} for {count} tokens; copy it again, or {AGAIN}"
        )
    if not count:
        raise RequestError(f"{path}: no tokens; {AGAIN}")
    return np.memmap(path, dtype=dtype, mode="r", offset=begin, shape=(count,))


def _header(file: IO[bytes], where: str) -> tuple[int, np.dtype[Any]]:
    """Read the header of a .npy file of integers in one dimension, and return its length and type;
    the file is left at the first element. Raises RequestError, which begins with `location`, for
    anything else. Nothing is allocated for the array.
    """
    try:
        version = np.lib.format.read_magic(file)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"version {version[0]}.{version[1]} of .npy")
        shape, _, dtype = _array_header(file, version == (1, 0))
    except (
        ValueError,
        EOFError,
        OverflowError,
        RecursionError,
        MemoryError,
        SyntaxError,
        TypeError,
        TokenError,
    ) as error:
        reason = str(error).partition("\n")[0]
        raise RequestError(
            f"{where}: not a .npy array: {reason}; copy it again, or {AGAIN}"
        ) from error
    if dtype.kind not in "iu" or len(shape) != 1 or shape[0] < 0:
        raise RequestError(
            f"{where}: {dtype} of shape {shape}; allowed: integers in one dimension; {AGAIN}"
        )
    return int(shape[0]), dtype


def _array_header(file: IO[bytes], short: bool) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Read a .npy header (shape, Fortran order, type) with numpy, after its length was checked:
    ValueError beyond `MAX_HEADER_BYTES`. `short` means format 1.0, whose length field has two
    bytes.
    """
    length = file.read(2 if short else 4)
    size = int.from_bytes(length, "little")
    if size > MAX_HEADER_BYTES:
        raise ValueError(f"a header of {size} bytes; at most {MAX_HEADER_BYTES} are read")
    header = io.BytesIO(length + file.read(size))
    read = np.lib.format.read_array_header_1_0 if short else np.lib.format.read_array_header_2_0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy warns of headers that Python 2 wrote
        return read(header)


def _index(path: Path, tokens: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Read `lens` and `docs` of an index file. Raises RequestError if it cannot be read, or has
    more entries than `tokens` tokens allow.
    """
    with _index_members(path) as (archive, lens, docs):
        return _member(archive, lens, path, tokens), _member(archive, docs, path, tokens + 1)


@contextmanager
def _index_members(
    path: Path,
) -> Iterator[tuple[zipfile.ZipFile, zipfile.ZipInfo, zipfile.ZipInfo]]:
    """Open an index file and yield the zip archive with its members `lens` and `docs`, unread.

    Raises RequestError if a member is missing, both are too large, or the archive cannot be read;
    that includes read errors inside the `with` block.
    """
    try:
        with files.open_regular(path) as raw, zipfile.ZipFile(raw) as archive:
            infos = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            lacking = [name for name in ("lens", "docs") if name not in infos]
            if lacking:
                raise RequestError(
                    f"{path}: no {lacking[0]} in it; an index holds lens and docs; {AGAIN}"
                )
            size = infos["lens"].file_size + infos["docs"].file_size
            if size > MAX_INDEX_BYTES:
                raise RequestError(
                    f"{path}: lens and docs are {size} bytes; allowed: at most {MAX_INDEX_BYTES}"
                    " in all"
                )
            yield archive, infos["lens"], infos["docs"]
    # Errors of a zip have no common base class: unknown compression, password, wrong checksum.
    except (
        zipfile.BadZipFile,
        OSError,
        EOFError,
        zlib.error,
        lzma.LZMAError,
        ValueError,
        RuntimeError,
    ) as error:
        raise RequestError(
            f"{path}: not a readable .npz: {error}; copy it again, or {AGAIN}"
        ) from error


def _member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, path: Path, most: int) -> NDArray[Any]:
    """Read one integer array of the index. Raises RequestError if it has more than `max_entries`
    entries, or its header disagrees with the zip directory's size; both are checked before
    unpacking.
    """
    where = f"{path}: {info.filename}"
    with archive.open(info) as file:
        count, dtype = _header(file, where)
        # The header must agree with the zip's directory; checked before anything is unpacked.
        if count > most or info.file_size != file.tell() + count * dtype.itemsize:
            raise RequestError(
                f"{where}: {count} {dtype} in {info.file_size} bytes; allowed: at most {most},"
                f" whole; {AGAIN}"
            )
        return np.frombuffer(file.read(), dtype=dtype)


def _check_index(path: Path, lens: NDArray[Any], docs: NDArray[Any], tokens: int) -> None:
    """Raise RequestError unless sentence lengths are 1 or more and add up to `tokens`, and document
    boundaries increase strictly from 0 to the number of sentences.
    """
    if not len(lens) or not len(docs):
        raise RequestError(
            f"{path}: {len(lens)} lens and {len(docs)} docs; allowed: 1 or more; {AGAIN}"
        )
    low, high, total = int(lens.min()), int(lens.max()), int(lens.sum(dtype=np.int64))
    if low < 1 or high > tokens:
        raise RequestError(
            f"{path}: lens holds {low if low < 1 else high}; allowed: 1 to {tokens}, all tokens;"
            f" {AGAIN}"
        )
    if total != tokens:
        raise RequestError(
            f"{path}: lens adds up to {total}; the tokens are {tokens}; the two files are not a"
            f" pair; {AGAIN}"
        )
    borders = int(docs[0]), int(docs[-1])
    if borders != (0, len(lens)) or not bool((docs[1:] > docs[:-1]).all()):
        found = f"docs goes from {borders[0]} to {borders[1]}"
        raise RequestError(
            f"{path}: {found}; allowed: increasing from 0 to {len(lens)}, all sentences; {AGAIN}"
        )


def blocks(corpus: Corpus) -> Iterator[tuple[int, NDArray[Any]]]:
    """Yield all tokens in chunks of `CHUNK_TOKENS`, each with the position of its first token."""
    for begin in range(0, len(corpus.ids), BLOCK_TOKENS):
        yield begin, np.asarray(corpus.ids[begin : begin + BLOCK_TOKENS])


def check_ids(corpus: Corpus, vocab: int) -> None:
    """Raise RequestError, which names the first bad token, if a token is negative or not below
    `vocab`. Reads all tokens once.
    """
    for begin, block in blocks(corpus):
        if int(block.max()) >= vocab or int(block.min()) < 0:
            at = int(np.flatnonzero((block >= vocab) | (block < 0))[0])
            raise RequestError(
                f"{getattr(corpus.ids, 'filename', None) or corpus.name}: token {begin + at}"
                f" (counted from 0) is {block[at]}; allowed: 0 to {vocab - 1}, the vocabulary; pack"
                " the texts with the model's own tokenizer"
            )


def fingerprint(corpus: Corpus, tokenizer_sha256: str | None) -> str:
    """Return the SHA-256 (hex) of all tokens and document ends, whatever integer type stores them,
    and of the tokenizer's hash if given. Reads all tokens.
    """
    digest = hashlib.sha256((tokenizer_sha256 or "").encode())
    for _, block in blocks(corpus):
        digest.update(block.astype("<i4").data)
    digest.update(corpus.ends.astype("<i8").data)
    return digest.hexdigest()


def splits(documents: int) -> tuple[range, range, range]:
    """Return the document numbers to train on, to validate and to test on, as three ranges in file
    order.

    The split is 998 : 1 : 1: validation and test get a thousandth of the documents each, rounded as
    in the reference, and at least one. Raises RequestError if there are fewer than three documents.
    """
    if documents < FEWEST:
        raise RequestError(
            f"{documents} documents; allowed: {FEWEST} or more, for training, validation and test"
        )
    few = max(1, round(documents / 1000))
    train, valid = documents - 2 * few, documents - few
    return range(train), range(train, valid), range(valid, documents)


# part of a document: its begin and stop in ids, and the end of the whole document
_Piece = tuple[int, int, int]


@dataclass(frozen=True)
class _Stream:
    """Documents in some order, laid end to end."""

    order: Ids
    ends: Ids  # position in the stream behind each document's last token


class CorpusRows:
    """Rows of `length` tokens cut from the training documents; implements `TrainingRows`.

    An epoch is all training documents, end to end, in an order drawn from (seed, epoch), and epochs
    follow each other without a gap. Row k is tokens k*length to (k+1)*length of that endless
    stream, and the batch of a step the next `batch_rows` rows. So rows do not depend on how many
    ranks share them, and any row is found without computing those before it.

    A piece of a document is a segment of the row and does not attend to the segments before it. The
    target of its last token is the document's next token if the document continues in the next row;
    at a document's end there is none. Held out are the first whole rows of the validation documents
    in file order, at most `held_out_rows`, or one padded row if they do not fill one. The key of a
    training row is its number, that of a held-out row is ("valid", number).
    """

    def __init__(
        self, corpus: Corpus, length: int, batch: int, seed: int, held_out_rows: int
    ) -> None:
        """Split the documents. Raises RequestError if there are fewer than three."""
        self._corpus, self._length, self._batch, self._seed = corpus, length, batch, seed
        train, valid, _ = splits(len(corpus.ends))
        self._train = len(train)
        self._tokens = int(corpus.ends[train[-1]])
        self._lens = np.diff(corpus.ends, prepend=0)
        self._valid = self._stream(np.arange(valid.start, valid.stop))
        self._held_out = min(held_out_rows, max(1, int(self._valid.ends[-1]) // length))
        self._epoch = lru_cache(maxsize=2)(self._draw)

    def batch(self, step: int) -> list[Key]:
        """Return the row numbers of the global batch of a step, counted from 0."""
        return list(range(step * self._batch, (step + 1) * self._batch))

    def documents(self) -> Iterator[NDArray[Any]]:
        """Yield the tokens of each training document in file order, for a program that draws rows
        itself.
        """
        begin = 0
        for end in map(int, self._corpus.ends[: self._train]):
            yield np.asarray(self._corpus.ids[begin:end])
            begin = end

    def held_out(self) -> list[Key]:
        """Return the keys of the held-out rows."""
        return [("valid", k) for k in range(self._held_out)]

    def row(self, key: Key) -> Row:
        """Return the tokens and targets of the row with this key. Orders of the last two epochs are
        cached.
        """
        if isinstance(key, tuple):
            begin = key[1] * self._length
            return self._row(list(self._pieces(self._valid, begin, begin + self._length)))
        pieces: list[_Piece] = []
        at, stop = key * self._length, (key + 1) * self._length
        while at < stop:
            epoch, begin = divmod(at, self._tokens)
            end = min(self._tokens, begin + stop - at)
            pieces += self._pieces(self._epoch(epoch), begin, end)
            at += end - begin
        return self._row(pieces)

    def _draw(self, epoch: int) -> _Stream:
        """Return the training documents in the order of an epoch, drawn from seed and epoch."""
        # Raw draws are the same in every version of numpy; its permutations need not be.
        draws = np.random.PCG64((self._seed, epoch)).random_raw(self._train)
        return self._stream(np.argsort(draws, kind="stable"))

    def _stream(self, order: Ids) -> _Stream:
        """Lay documents (by number) end to end in this order."""
        return _Stream(order, np.cumsum(self._lens[order]))

    def _pieces(self, stream: _Stream, begin: int, end: int) -> Iterator[_Piece]:
        """Yield the pieces of documents that lie between two token positions of a stream, each as
        (begin, stop, end of its document) in the corpus's tokens.
        """
        place = int(np.searchsorted(stream.ends, begin, side="right"))
        while begin < end and place < len(stream.order):
            border, document_end = (
                int(stream.ends[place]),
                int(self._corpus.ends[stream.order[place]]),
            )
            stop, ahead = min(end, border), document_end - border
            yield begin + ahead, stop + ahead, document_end
            begin, place = stop, place + 1

    def _row(self, pieces: list[_Piece]) -> Row:
        """Build a row from pieces of documents: tokens, next-token targets and segment lengths.
        What the pieces do not fill is zeros with ignored targets, as a last segment; the row counts
        as one sample.
        """
        tokens = np.zeros(self._length, dtype=np.int64)
        targets = np.full(self._length, IGNORED, dtype=np.int64)
        at = 0
        for begin, stop, end in pieces:
            tokens[at : at + stop - begin] = self._corpus.ids[begin:stop]
            follow = self._corpus.ids[begin + 1 : min(stop + 1, end)]
            targets[at : at + len(follow)] = follow
            at += stop - begin
        padding = (self._length - at,) if at < self._length else ()
        return Row(tokens, targets, (*(stop - begin for begin, stop, _ in pieces), *padding), at, 1)
