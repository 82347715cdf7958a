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
from steelyard.data.training_rows import IGNORED, Ids, RowKey, TrainingRow
from steelyard.errors import RequestError

IDS_SUFFIX, INDEX_SUFFIX = "_ids.npy", "_idx.npz"
DTYPES = ("uint16", "int32", "uint32", "int64")
MAX_INDEX_BYTES = 4 << 30
MAX_HEADER_BYTES = 10_000  # of a .npy header; numpy refuses longer ones too
CHUNK_TOKENS = 16 << 20  # 64 MiB of int32
MIN_DOCUMENTS = 3  # documents: one to train on, one to validate, one to test
PACK_AGAIN = "make both files again with steelyard data pack"


@dataclass(frozen=True)
class Corpus:
    """The tokens of all documents end to end (`ids`, an integer array), from a pair of token files
    or generated. Those of a file are memory-mapped, and read only when they are used. `ends` has,
    for each document, the index in `ids` behind its last token; `name` is the last part of the
    prefix.
    """

    ids: NDArray[Any]
    ends: Ids  # index in ids behind the last token of each document
    name: str  # the last part of the prefix


def open_corpus(source: Path) -> Corpus:
    """Open a pair of token files by its prefix (`folder/name`), by one of the two files, or by a
    folder that holds exactly one pair; return it as a corpus named like the prefix.

    The index is read and checked, tokens are memory-mapped and not read. Raises RequestError if a
    file is missing, unreadable, malformed or of another type, or if the two files do not belong
    together.
    """
    prefix, tokens, index = _find_pair(source)
    ids = _map_tokens(tokens)
    lens, docs = _read_index(index, len(ids))
    _check_index(index, lens, docs, len(ids))
    ends = np.cumsum(lens.astype(np.int64))[docs.astype(np.int64)[1:] - 1]
    return Corpus(ids, ends, prefix.name)


def check_token_files(source: Path) -> None:
    """Raise RequestError if there is no pair of token files at this path. `source` is the pair's
    prefix, one of its two files (PREFIX_ids.npy, PREFIX_idx.npz), or a folder with exactly one
    pair, as for `open_corpus`.

    Checks that both files exist, type, header and size of the token file (an empty one is refused),
    and that the index is a zip with `lens` and `docs`; reads neither tokens nor index arrays.
    """
    _, tokens, index = _find_pair(source)
    _map_tokens(tokens)
    with _open_index(index):
        pass


def _find_pair(source: Path) -> tuple[Path, Path, Path]:
    """Return the prefix, the token file (PREFIX_ids.npy) and the index file (PREFIX_idx.npz) of a
    pair. `source` is the prefix, one of the files, or a folder with exactly one pair. Raises
    RequestError if no pair is found, several are, or one of its files is missing.
    """
    prefix = _find_prefix(source)
    tokens, index = Path(f"{prefix}{IDS_SUFFIX}"), Path(f"{prefix}{INDEX_SUFFIX}")
    for path in (tokens, index):
        if not path.is_file():
            raise RequestError(
                f"{path} is missing; a pair needs both files; copy it there, or {PACK_AGAIN}"
            )
    return prefix, tokens, index


def _find_prefix(source: Path) -> Path:
    """Return the prefix of a pair of token files (PREFIX_ids.npy, PREFIX_idx.npz), given the
    prefix, one of the files, or a folder with files of exactly one prefix; that the other file
    exists is not checked. Raises RequestError if the path does not exist, is another file, or is a
    folder of no pair or several.
    """
    if any(Path(f"{source}{suffix}").is_file() for suffix in (IDS_SUFFIX, INDEX_SUFFIX)):
        return source
    if source.is_file():
        for suffix in (IDS_SUFFIX, INDEX_SUFFIX):
            if source.name.endswith(suffix):
                return source.with_name(source.name.removesuffix(suffix))
        raise RequestError(
            f"{source}: not a token file; allowed: NAME{IDS_SUFFIX} or NAME{INDEX_SUFFIX}; make"
            " them with steelyard"
            " data pack"
        )
    if not source.is_dir():
        raise RequestError(
            f"data {str(source)!r} does not exist; give the prefix or the folder of"
            f" NAME{IDS_SUFFIX} and"
            f" NAME{INDEX_SUFFIX}"
        )
    names = sorted(
        {
            p.name.removesuffix(s)
            for s in (IDS_SUFFIX, INDEX_SUFFIX)
            for p in source.glob(f"*{s}")
            if p.name != s
        }
    )
    if not names:
        raise RequestError(
            f"{source}: no *{IDS_SUFFIX} in it; give the folder of a pair, or make one with"
            " steelyard data"
            " pack"
        )
    if len(names) > 1:
        raise RequestError(
            f"{source}: {len(names)} pairs in it ({', '.join(names[:4])}); name one, such as"
            f" {source / names[0]}"
        )
    return source / names[0]


def _map_tokens(path: Path) -> NDArray[Any]:
    """Return the tokens of a .npy file as a read-only memory map of one dimension, in the file's
    own integer type. Raises RequestError if it is unreadable, no such array, empty, of another size
    than its header says, or of a type that is not in `DTYPES`.
    """
    try:
        with files.open_regular(path) as file:
            count, dtype = _read_header(file, str(path))
            offset = file.tell()
        size = path.stat().st_size
    except OSError as error:
        raise RequestError(f"{path}: cannot be read: {error.strerror}") from error
    if dtype.newbyteorder("=").name not in DTYPES:
        raise RequestError(
            f"{path}: tokens of type {dtype}; allowed: {', '.join(DTYPES)}; {PACK_AGAIN}"
        )
    if size != offset + count * dtype.itemsize:
        expected_size = offset + count * dtype.itemsize
        raise RequestError(
            f"{path}: {size} bytes instead of {expected_size} for {count} tokens; copy it again,"
            f" or {PACK_AGAIN}"
        )
    if not count:
        raise RequestError(f"{path}: no tokens; {PACK_AGAIN}")
    return np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=(count,))


def _read_header(file: IO[bytes], location: str) -> tuple[int, np.dtype[Any]]:
    """Read the header of a .npy file of integers in one dimension, and return (number of elements,
    dtype); the file is left at the first element. Raises RequestError, which begins with
    `location`, for anything else, and for versions but 1.0 and 2.0. Nothing is allocated for the
    array.
    """
    try:
        version = np.lib.format.read_magic(file)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"version {version[0]}.{version[1]} of .npy")
        shape, _, dtype = _read_array_header(file, version == (1, 0))
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
            f"{location}: not a .npy array: {reason}; copy it again, or {PACK_AGAIN}"
        ) from error
    if dtype.kind not in "iu" or len(shape) != 1 or shape[0] < 0:
        raise RequestError(
            f"{location}: {dtype} of shape {shape}; allowed: integers in one dimension;"
            f" {PACK_AGAIN}"
        )
    return int(shape[0]), dtype


def _read_array_header(file: IO[bytes], short: bool) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Read the rest of a .npy header behind its version with numpy, and return (shape, Fortran
    order, dtype); numpy's warnings are suppressed. `short` means format 1.0, whose length field has
    two bytes instead of four. Raises ValueError beyond `MAX_HEADER_BYTES`, and whatever numpy
    raises.
    """
    length = file.read(2 if short else 4)
    size = int.from_bytes(length, "little")
    if size > MAX_HEADER_BYTES:
        raise ValueError(f"a header of {size} bytes; at most {MAX_HEADER_BYTES} are read")
    header = io.BytesIO(length + file.read(size))
    read_header = (
        np.lib.format.read_array_header_1_0 if short else np.lib.format.read_array_header_2_0
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy warns of headers that Python 2 wrote
        return read_header(header)


def _read_index(path: Path, tokens: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Read an index file and return its arrays (`lens`, `docs`), not yet compared with each other.
    Raises RequestError if it cannot be read, or `lens` has more than `tokens` entries or `docs`
    more than `tokens` + 1.
    """
    with _open_index(path) as (archive, lens, docs):
        return _read_member(archive, lens, path, tokens), _read_member(
            archive, docs, path, tokens + 1
        )


@contextmanager
def _open_index(
    path: Path,
) -> Iterator[tuple[zipfile.ZipFile, zipfile.ZipInfo, zipfile.ZipInfo]]:
    """As a context manager, open an index file (.npz) and yield (zip archive, member `lens`, member
    `docs`), unread.

    Raises RequestError if a member is missing, the two have more than 4 GiB together, or the
    archive cannot be read; that includes read errors inside the `with` block.
    """
    try:
        with files.open_regular(path) as raw, zipfile.ZipFile(raw) as archive:
            infos = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            missing = [name for name in ("lens", "docs") if name not in infos]
            if missing:
                raise RequestError(
                    f"{path}: no {missing[0]} in it; an index holds lens and docs; {PACK_AGAIN}"
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
            f"{path}: not a readable .npz: {error}; copy it again, or {PACK_AGAIN}"
        ) from error


def _read_member(
    archive: zipfile.ZipFile, info: zipfile.ZipInfo, path: Path, max_entries: int
) -> NDArray[Any]:
    """Read one array of the index and return it, read-only. Raises RequestError if it is not an
    integer array of one dimension, has more than `max_entries` entries, or its header disagrees
    with the size in the zip's directory; all this is checked before unpacking. `path` is for
    messages.
    """
    location = f"{path}: {info.filename}"
    with archive.open(info) as file:
        count, dtype = _read_header(file, location)
        # The header must agree with the zip's directory; checked before anything is unpacked.
        if count > max_entries or info.file_size != file.tell() + count * dtype.itemsize:
            raise RequestError(
                f"{location}: {count} {dtype} in {info.file_size} bytes; allowed: at most"
                f" {max_entries},"
                f" whole; {PACK_AGAIN}"
            )
        return np.frombuffer(file.read(), dtype=dtype)


def _check_index(path: Path, lens: NDArray[Any], docs: NDArray[Any], tokens: int) -> None:
    """Raise RequestError unless `lens` and `docs` have entries, the sentence lengths are 1 or more
    and add up to `tokens`, and the document boundaries increase strictly from 0 to the number of
    sentences. `path` is for messages.
    """
    if not len(lens) or not len(docs):
        raise RequestError(
            f"{path}: {len(lens)} lens and {len(docs)} docs; allowed: 1 or more; {PACK_AGAIN}"
        )
    low, high, total = int(lens.min()), int(lens.max()), int(lens.sum(dtype=np.int64))
    if low < 1 or high > tokens:
        raise RequestError(
            f"{path}: a sentence has the length {low if low < 1 else high}; allowed: 1 to"
            f" {tokens}, all tokens;"
            f" {PACK_AGAIN}"
        )
    if total != tokens:
        raise RequestError(
            f"{path}: lens adds up to {total}; the tokens are {tokens}; the two files are not a"
            f" pair; {PACK_AGAIN}"
        )
    ends = int(docs[0]), int(docs[-1])
    if ends != (0, len(lens)) or not bool((docs[1:] > docs[:-1]).all()):
        problem = f"docs goes from {ends[0]} to {ends[1]}"
        raise RequestError(
            f"{path}: {problem}; allowed: increasing from 0 to {len(lens)}, all sentences;"
            f" {PACK_AGAIN}"
        )


def iterate_chunks(corpus: Corpus) -> Iterator[tuple[int, NDArray[Any]]]:
    """Yield all tokens of a corpus as (position of the chunk's first token, chunk), in chunks of
    `CHUNK_TOKENS`, the last one shorter.
    """
    for begin in range(0, len(corpus.ids), CHUNK_TOKENS):
        yield begin, np.asarray(corpus.ids[begin : begin + CHUNK_TOKENS])


def check_ids(corpus: Corpus, vocab: int) -> None:
    """Raise RequestError, which names the first bad token, if a token is negative or not below
    `vocab`. Reads all tokens once.
    """
    for begin, chunk in iterate_chunks(corpus):
        if int(chunk.max()) >= vocab or int(chunk.min()) < 0:
            offset = int(np.flatnonzero((chunk >= vocab) | (chunk < 0))[0])
            raise RequestError(
                f"{getattr(corpus.ids, 'filename', None) or corpus.name}: token {begin + offset}"
                f" (counted from 0) is {chunk[offset]}; allowed: 0 to {vocab - 1}, the vocabulary;"
                " pack"
                " the texts with the model's own tokenizer"
            )


def fingerprint_corpus(corpus: Corpus, tokenizer_sha256: str | None) -> str:
    """Return the SHA-256 (hex) of the tokenizer's hash, if given, all tokens as int32 and the
    document ends as int64, so that the stored integer type does not matter. Reads all tokens.
    """
    digest = hashlib.sha256((tokenizer_sha256 or "").encode())
    for _, chunk in iterate_chunks(corpus):
        digest.update(chunk.astype("<i4").data)
    digest.update(corpus.ends.astype("<i8").data)
    return digest.hexdigest()


def split_documents(documents: int) -> tuple[range, range, range]:
    """Return the document numbers to train on, to validate and to test on, as three ranges in file
    order.

    The split is 998 : 1 : 1: validation and test get a thousandth of the documents each, rounded as
    in the reference, and at least one. Raises RequestError if there are fewer than three documents.
    """
    if documents < MIN_DOCUMENTS:
        raise RequestError(
            f"{documents} documents; allowed: {MIN_DOCUMENTS} or more, for training, validation"
            " and test"
        )
    held_out = max(1, round(documents / 1000))
    train, valid = documents - 2 * held_out, documents - held_out
    return range(train), range(train, valid), range(valid, documents)


# part of a document: its begin and stop in ids, and the end of the whole document
_DocumentPiece = tuple[int, int, int]


@dataclass(frozen=True)
class _DocumentStream:
    """Documents laid end to end in some order: `order` has their numbers in the corpus, `ends` the
    position in the stream behind each one's last token.
    """

    order: Ids
    ends: Ids  # position in the stream behind each document's last token


class CorpusRows:
    """Rows of `length` tokens cut from the training documents of a corpus; implements
    `TrainingRows`: `batch`, `row`, `held_out`. The key of a training row is its number, that of a
    held-out row is ("valid", number).

    An epoch is all training documents, end to end, in an order drawn from (seed, epoch), and epochs
    follow each other without a gap. Row k is tokens k*length to (k+1)*length of that endless
    stream, and the batch of a step the next `batch_rows` rows. So rows do not depend on how many
    ranks share them.

    A piece of a document is a segment of the row and does not attend to the segments before it. The
    target of its last token is the document's next token if the document continues in the next row;
    at a document's end there is none. Held out are the first whole rows of the validation documents
    in file order, at most `held_out_rows`, or one padded row if they do not fill one.
    """

    def __init__(
        self, corpus: Corpus, length: int, batch_rows: int, seed: int, held_out_rows: int
    ) -> None:
        """Split the corpus into training, validation and test documents; the latter are not used.
        `length` is the tokens of a row, `batch_rows` the rows of a global batch, `held_out_rows`
        the most validation rows. Raises RequestError if there are fewer than three documents.
        """
        self._corpus, self._length, self._batch_rows, self._seed = corpus, length, batch_rows, seed
        train, valid, _ = split_documents(len(corpus.ends))
        self._train_documents = len(train)
        self._train_tokens = int(corpus.ends[train[-1]])
        self._lens = np.diff(corpus.ends, prepend=0)
        self._valid_stream = self._lay_end_to_end(np.arange(valid.start, valid.stop))
        self._held_out_rows = min(held_out_rows, max(1, int(self._valid_stream.ends[-1]) // length))
        self._epoch_stream = lru_cache(maxsize=2)(self._draw_epoch)

    def batch(self, step: int) -> list[RowKey]:
        """Return the keys of the global batch of a step, counted from 0: `batch_rows` consecutive
        row numbers of the endless stream.
        """
        return list(range(step * self._batch_rows, (step + 1) * self._batch_rows))

    def iterate_documents(self) -> Iterator[NDArray[Any]]:
        """Yield the tokens of each training document in file order, for a program that draws rows
        itself.
        """
        begin = 0
        for end in map(int, self._corpus.ends[: self._train_documents]):
            yield np.asarray(self._corpus.ids[begin:end])
            begin = end

    def held_out(self) -> list[RowKey]:
        """Return the keys ("valid", number) of the corpus's held-out rows, in order."""
        return [("valid", k) for k in range(self._held_out_rows)]

    def row(self, key: RowKey) -> TrainingRow:
        """Return the row with this key: a row number, or ("valid", number) for a held-out row. A
        training row may span epochs; the document orders of the last two epochs used are cached.
        """
        if isinstance(key, tuple):
            begin = key[1] * self._length
            return self._build_row(
                list(self._find_pieces(self._valid_stream, begin, begin + self._length))
            )
        pieces: list[_DocumentPiece] = []
        position, stop = key * self._length, (key + 1) * self._length
        while position < stop:
            epoch, begin = divmod(position, self._train_tokens)
            end = min(self._train_tokens, begin + stop - position)
            pieces += self._find_pieces(self._epoch_stream(epoch), begin, end)
            position += end - begin
        return self._build_row(pieces)

    def _draw_epoch(self, epoch: int) -> _DocumentStream:
        """Return the training documents laid end to end in the order of an epoch, which is drawn
        from (seed, epoch) and equal in every version of numpy.
        """
        # Raw draws are the same in every version of numpy; its permutations need not be.
        draws = np.random.PCG64((self._seed, epoch)).random_raw(self._train_documents)
        return self._lay_end_to_end(np.argsort(draws, kind="stable"))

    def _lay_end_to_end(self, order: Ids) -> _DocumentStream:
        """Return the documents with these numbers laid end to end in this order, as a stream with
        the position behind each.
        """
        return _DocumentStream(order, np.cumsum(self._lens[order]))

    def _find_pieces(
        self, stream: _DocumentStream, begin: int, end: int
    ) -> Iterator[_DocumentPiece]:
        """Yield the pieces of documents that lie between two token positions of a stream, each as
        (begin, stop, end of its document) in the corpus's tokens; fewer tokens if the stream ends
        before `end`.
        """
        number = int(np.searchsorted(stream.ends, begin, side="right"))
        while begin < end and number < len(stream.order):
            stream_end, document_end = (
                int(stream.ends[number]),
                int(self._corpus.ends[stream.order[number]]),
            )
            stop, shift = min(end, stream_end), document_end - stream_end
            yield begin + shift, stop + shift, document_end
            begin, number = stop, number + 1

    def _build_row(self, pieces: list[_DocumentPiece]) -> TrainingRow:
        """Build a row from pieces of documents, each a segment, with next-token targets; the last
        token of a document has none. What the pieces do not fill is zeros with ignored targets, as
        a last segment that is not counted in `real`. The row counts as one sample.
        """
        tokens = np.zeros(self._length, dtype=np.int64)
        targets = np.full(self._length, IGNORED, dtype=np.int64)
        filled = 0
        for begin, stop, end in pieces:
            tokens[filled : filled + stop - begin] = self._corpus.ids[begin:stop]
            follow = self._corpus.ids[begin + 1 : min(stop + 1, end)]
            targets[filled : filled + len(follow)] = follow
            filled += stop - begin
        padding = (self._length - filled,) if filled < self._length else ()
        return TrainingRow(
            tokens, targets, (*(stop - begin for begin, stop, _ in pieces), *padding), filled, 1
        )
