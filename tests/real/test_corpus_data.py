"""Test the first 1,000 documents of the real OpenWebText with the real Llama tokenizer: the known
counts, exactly.
"""

from pathlib import Path

import numpy as np
import pytest

from steelyard.data import tokenizer
from steelyard.data.corpus import CorpusRows, check_ids, open_corpus
from steelyard.data.token_files import CorpusSplit, TokenFiles, inspect_corpus, write_token_files
from steelyard.data.training_rows import IGNORED

FINGERPRINT = "568c3e691b2f6b14107a014674a667aa953e57bc42c330fc24875b7f316dd612"
TOKENS = 1_189_962 + 2 * 1000  # the published count, plus a begin and an end token per document


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where the token files are written."""
    return tmp_path_factory.mktemp("packed") / "openwebtext"


@pytest.fixture(scope="module")
def packed(data_dir: Path, prefix: Path) -> TokenFiles:
    """Write the token files and return what is reported of them."""
    llama = tokenizer.load_tokenizer([data_dir / "tokenizers" / "llama" / "tokenizer.model"])
    return write_token_files(
        [data_dir / "openwebtext" / "openwebtext-1000.jsonl.gz"], llama, prefix
    )


def test_real_token_files_have_the_known_counts(packed: TokenFiles, prefix: Path) -> None:
    assert (packed.documents, packed.tokens, packed.skipped) == (1000, TOKENS, 0)
    assert packed.fingerprint == FINGERPRINT
    corpus = open_corpus(prefix)
    check_ids(corpus, 32000)
    inspection = inspect_corpus(corpus)
    assert inspection.dtype == "uint16"
    assert inspection.splits == {
        "train": CorpusSplit(998, 1_189_500),
        "valid": CorpusSplit(1, 1802),
        "test": CorpusSplit(1, 660),
    }
    assert (inspection.rows, inspection.fingerprint) == (580, FINGERPRINT)
    starts = np.concatenate([[0], corpus.ends[:-1]])
    assert set(corpus.ids[starts].tolist()) == {1}
    assert set(corpus.ids[corpus.ends - 1].tolist()) == {2}
    assert np.count_nonzero(corpus.ids == 2) == 1000


def test_an_epoch_of_real_rows_ignores_document_ends_only(packed: TokenFiles, prefix: Path) -> None:
    rows = CorpusRows(open_corpus(prefix), 2048, 4, 1, 8)
    epoch = [rows.row(number) for number in range(580)]
    ignored = sum(int((row.targets == IGNORED).sum()) for row in epoch)
    ends = sum(int((row.tokens == 2).sum()) for row in epoch)
    assert ignored == ends  # only the end of a document has no target
    assert 990 < ends <= 998
    assert all(sum(row.lens) == row.real == 2048 for row in epoch)
    assert rows.held_out() == [("valid", 0)]
    held_out = rows.row(("valid", 0))
    assert (held_out.real, held_out.lens) == (1802, (1802, 246))
