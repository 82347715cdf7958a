"""Writes the training documents as Megatron's indexed dataset: tokens end to end in `.bin`, lengths
and offsets in `.idx`.

Megatron's null tokenizer takes the last number of the vocabulary as the end of a document, and
separates documents by it. So the token that ends ours and that last number are swapped, which
training from random weights does not notice.
"""

import struct
from pathlib import Path

import numpy as np

from steelyard.data.corpus import CorpusRows
from steelyard.data.training_rows import Ids
from steelyard.errors import RequestError

MAGIC, VERSION = b"MMIDIDX\x00\x00", 1
DTYPE_CODES = {np.dtype("int32"): 4, np.dtype("uint16"): 8}  # by the codes of Megatron's DType


def write_indexed_dataset(rows: CorpusRows, vocab: int, prefix: Path) -> int:
    """Write all documents to `prefix.bin` (uint16, or int32 for a vocabulary of more than 65536)
    and `prefix.idx`, replacing existing files, with the end token and vocab - 1 swapped, and return
    how many tokens they hold. The end token is the last of the first document. Raises RequestError
    if another document does not end with it, or one has it elsewhere; the `.bin` file then stays
    incomplete.
    """
    dtype = np.dtype("uint16") if vocab <= 1 << 16 else np.dtype("int32")
    end: int | None = None
    lens: list[int] = []
    with prefix.with_suffix(".bin").open("wb") as file:
        for document in rows.iterate_documents():
            end = int(document[-1]) if end is None else end
            if int(document[-1]) != end or int(np.count_nonzero(document == end)) > 1:
                raise RequestError(
                    f"engine flagscale: document {len(lens)} does not end with its only token"
                    f" {end}, by which FlagScale separates documents; pack the texts with steelyard"
                    " data pack, or choose another engine"
                )
            file.write(
                _swap_tokens(document, end, vocab - 1).astype(dtype.newbyteorder("<")).tobytes()
            )
            lens.append(len(document))
    _write_index(np.array(lens, dtype="<i4"), dtype, prefix.with_suffix(".idx"))
    return sum(lens)


def _swap_tokens(document: Ids, end: int, last: int) -> Ids:
    """Return a copy of the document in which tokens `end` and `last` are swapped."""
    out = document.astype(np.int64)
    out[document == end], out[document == last] = last, end
    return out


def _write_index(
    lens: "np.ndarray[tuple[int], np.dtype[np.int32]]", dtype: "np.dtype[np.generic]", path: Path
) -> None:
    """Write Megatron's `.idx` file for the documents' lengths in tokens: magic, version, dtype code
    of the tokens, then lengths, offsets into `.bin` in bytes, and document numbers (one sequence
    per document).
    """
    begins = np.zeros(len(lens), dtype="<i8")
    begins[1:] = np.cumsum(lens[:-1], dtype=np.int64) * dtype.itemsize
    with path.open("wb") as file:
        file.write(
            MAGIC + struct.pack("<QBQQ", VERSION, DTYPE_CODES[dtype], len(lens), len(lens) + 1)
        )
        file.write(
            lens.tobytes() + begins.tobytes() + np.arange(len(lens) + 1, dtype="<i8").tobytes()
        )
