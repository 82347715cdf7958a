"""Token files for pretraining, and the rows a model is trained on.

Read from the published layout (PaddleNLP's `create_pretraining_data.py`): `PREFIX_ids.npy` holds
the tokens of all documents end to end; `PREFIX_idx.npz` holds `lens`, the length of every sentence,
and `docs`, the number of sentences before every border of documents, from 0 to all of them. A
document is its sentences end to end.
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
MAX_HEADER_BYTES = 10_000  # of a .npy; numpy evaluates no longer ones
BLOCK_TOKENS = 16 << 20  # 64 MiB of int32
FEWEST = 3  # documents: one to train on, one to validate, one to test
AGAIN = "make the pair anew with steelyard data pack"


@dataclass(frozen=True)
class Corpus:
    """Documents end to end. From files, the tokens are mapped: none is read before it is asked for."""

    ids: NDArray[Any]
    ends: Ids  # where each document ends in ids
    name: str  # the last part of the prefix


def open_corpus(source: Path) -> Corpus:
    """A corpus from its prefix (`folder/name`), from one of its two files, or from the folder of
    one pair.
    """
    prefix, tokens, index = _pair(source)
    ids = _mapped(tokens)
    lens, docs = _index(index, len(ids))
    _check_index(index, lens, docs, len(ids))
    ends = np.cumsum(lens.astype(np.int64))[docs.astype(np.int64)[1:] - 1]
    return Corpus(ids, ends, prefix.name)


def check_files(source: Path) -> None:
    """Raise RequestError if there is no pair of token files, by their names, the header of the
    tokens and what the index holds. Neither tokens nor index are read."""
    _, tokens, index = _pair(source)
    _mapped(tokens)
    with _index_members(index):
        pass


def _pair(source: Path) -> tuple[Path, Path, Path]:
    """The prefix of a pair, and its two files."""
    prefix = _prefix(source)
    tokens, index = Path(f"{prefix}{IDS}"), Path(f"{prefix}{IDX}")
    for path in (tokens, index):
        if not path.is_file():
            raise RequestError(
                f"{path} is missing; a pair needs both files; copy it there, or {AGAIN}"
            )
    return prefix, tokens, index


def _prefix(source: Path) -> Path:
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
    """The length and type of a 1-D array of integers; nothing of it is read, and no memory is taken
    for it.
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
    """As numpy reads it, once its length is known to be within a limit."""
    length = file.read(2 if short else 4)
    size = int.from_bytes(length, "little")
    if size > MAX_HEADER_BYTES:
        raise ValueError(f"a header of {size} bytes; at most {MAX_HEADER_BYTES} are read")
    header = io.BytesIO(length + file.read(size))
    read = np.lib.format.read_array_header_1_0 if short else np.lib.format.read_array_header_2_0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy's advice on headers that Python 2 wrote
        return read(header)


def _index(path: Path, tokens: int) -> tuple[NDArray[Any], NDArray[Any]]:
    with _index_members(path) as (archive, lens, docs):
        return _member(archive, lens, path, tokens), _member(archive, docs, path, tokens + 1)


@contextmanager
def _index_members(
    path: Path,
) -> Iterator[tuple[zipfile.ZipFile, zipfile.ZipInfo, zipfile.ZipInfo]]:
    """An open index and its two members, of which nothing was read. What goes wrong inside the
    block is refused too."""
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
    # What a zip can go wrong with has no common name: an unknown compression, a password, a
    # checksum.
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
    where = f"{path}: {info.filename}"
    with archive.open(info) as file:
        count, dtype = _header(file, where)
        # A header is believed only where the archive's own directory agrees, and before anything is
        # unpacked.
        if count > most or info.file_size != file.tell() + count * dtype.itemsize:
            raise RequestError(
                f"{where}: {count} {dtype} in {info.file_size} bytes; allowed: at most {most},"
                f" whole; {AGAIN}"
            )
        return np.frombuffer(file.read(), dtype=dtype)


def _check_index(path: Path, lens: NDArray[Any], docs: NDArray[Any], tokens: int) -> None:
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
    """All tokens, in blocks, each with the place of its first."""
    for begin in range(0, len(corpus.ids), BLOCK_TOKENS):
        yield begin, np.asarray(corpus.ids[begin : begin + BLOCK_TOKENS])


def check_ids(corpus: Corpus, vocab: int) -> None:
    """Every token is one of the vocabulary; this reads all of them once."""
    for begin, block in blocks(corpus):
        if int(block.max()) >= vocab or int(block.min()) < 0:
            at = int(np.flatnonzero((block >= vocab) | (block < 0))[0])
            raise RequestError(
                f"{getattr(corpus.ids, 'filename', None) or corpus.name}: token {begin + at}"
                f" (counted from 0) is {block[at]}; allowed: 0 to {vocab - 1}, the vocabulary; pack"
                " the texts with the model's own tokenizer"
            )


def fingerprint(corpus: Corpus, tokenizer_sha256: str | None) -> str:
    """The hash of all tokens and borders of documents, however the tokens are stored, and of the
    vocabulary if known.
    """
    digest = hashlib.sha256((tokenizer_sha256 or "").encode())
    for _, block in blocks(corpus):
        digest.update(block.astype("<i4").data)
    digest.update(corpus.ends.astype("<i8").data)
    return digest.hexdigest()


def splits(documents: int) -> tuple[range, range, range]:
    """The documents to train on, to validate and to test, 998 : 1 : 1 by place, rounded as the
    reference does; none empty.
    """
    if documents < FEWEST:
        raise RequestError(
            f"{documents} documents; allowed: {FEWEST} or more, for training, validation and test"
        )
    few = max(1, round(documents / 1000))
    train, valid = documents - 2 * few, documents - few
    return range(train), range(train, valid), range(valid, documents)


# of a document: where it begins and stops in ids, and where the document ends
_Piece = tuple[int, int, int]


@dataclass(frozen=True)
class _Stream:
    """Documents in some order, end to end."""

    order: Ids
    ends: Ids  # where each ends in the stream


class CorpusRows:
    """Rows of `length` tokens from the training documents; implements `Rows`.

    An epoch is all of them in an order drawn from (seed, epoch), end to end, and the epochs follow
    each other without a gap: row k is the tokens k*length to (k+1)*length of that endless stream,
    and the batch of a step the next `batch` rows. So nothing depends on how many ranks share them,
    and any row is found without those before it.

    A piece of a document is a segment, and does not see what stood in the row before. The target of
    its last token is the document's next one where that continues in the next row; at a document's
    end there is none. Held out are the first whole rows of the validation documents in the order of
    the file, or one padded row where they do not fill one.
    """

    def __init__(
        self, corpus: Corpus, length: int, batch: int, seed: int, held_out_rows: int
    ) -> None:
        self._corpus, self._length, self._batch, self._seed = corpus, length, batch, seed
        train, valid, _ = splits(len(corpus.ends))
        self._train = len(train)
        self._tokens = int(corpus.ends[train[-1]])
        self._lens = np.diff(corpus.ends, prepend=0)
        self._valid = self._stream(np.arange(valid.start, valid.stop))
        self._held_out = min(held_out_rows, max(1, int(self._valid.ends[-1]) // length))
        self._epoch = lru_cache(maxsize=2)(self._draw)

    def batch(self, step: int) -> list[Key]:
        return list(range(step * self._batch, (step + 1) * self._batch))

    def documents(self) -> Iterator[NDArray[Any]]:
        """The training documents in the order of the file, for a program that draws rows of them
        itself.
        """
        begin = 0
        for end in map(int, self._corpus.ends[: self._train]):
            yield np.asarray(self._corpus.ids[begin:end])
            begin = end

    def held_out(self) -> list[Key]:
        return [("valid", k) for k in range(self._held_out)]

    def row(self, key: Key) -> Row:
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
        # Raw draws, for these are the same in every version of numpy, as its permutations need not
        # be.
        draws = np.random.PCG64((self._seed, epoch)).random_raw(self._train)
        return self._stream(np.argsort(draws, kind="stable"))

    def _stream(self, order: Ids) -> _Stream:
        return _Stream(order, np.cumsum(self._lens[order]))

    def _pieces(self, stream: _Stream, begin: int, end: int) -> Iterator[_Piece]:
        """What of which documents lies between two places of a stream."""
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
