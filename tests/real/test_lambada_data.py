"""Test the real LAMBADA set with the real Aquila tokenizer: the known counts, exactly."""

from collections import Counter
from pathlib import Path

import pytest

from fixtures.golden import golden
from steelyard.data import tokenizer
from steelyard.data.tokenizer import Tokenizer
from steelyard.tasks.lambada import data
from steelyard.tasks.lambada.data import LambadaTexts
from steelyard.tasks.lambada.task import LambadaData

FINGERPRINT = "e7363f374fec84ff13be3f278af0eecbd07ec37953e630f08a64e3c1f61accee"


@pytest.fixture(scope="module")
def texts(data_dir: Path) -> list[str]:
    """Return the 5153 real passages."""
    return data.load_passages(LambadaData(kind="lambada"), data_dir / "lambada")[0]


@pytest.fixture(scope="module")
def aquila(data_dir: Path) -> Tokenizer:
    """Return the Aquila tokenizer."""
    return tokenizer.load_tokenizer([data_dir / "tokenizers" / "aquila"])


@pytest.fixture(scope="module")
def passages(texts: list[str], aquila: Tokenizer) -> LambadaTexts:
    """Return the real passages as tokens."""
    return data.encode_passages(texts, aquila, 4096, None, 0)


def test_the_real_set_has_5153_passages(texts: list[str], data_dir: Path) -> None:
    assert len(texts) == 5153
    assert data.load_passages(
        LambadaData(kind="lambada"), data_dir / "lambada" / "lambada_test.jsonl"
    ) == (texts, "lambada_test.jsonl")
    assert texts[0].startswith(golden("in-my-palm-is-clear-stone"))
    assert texts[0].rpartition(" ")[2] == "signs"


def test_two_real_passages_appear_twice(texts: list[str]) -> None:
    repeated = [text for text, count in Counter(texts).items() if count > 1]
    positions = [
        [position for position, text in enumerate(texts) if text == repeated_text]
        for repeated_text in repeated
    ]
    assert positions == [[1753, 1889], [3469, 3624]]
    assert [repeated_text.rpartition(" ")[2] for repeated_text in repeated] == ["Andrew", "Diana"]


def test_real_set_has_the_known_tokens(passages: LambadaTexts) -> None:
    sizes = [len(row) for row in passages.rows]
    assert len(sizes) == 5153
    assert sum(sizes) == 430_166
    assert round(sum(sizes) / len(sizes), 1) == 83.5
    assert (min(sizes), max(sizes), sizes.index(max(sizes))) == (61, 227, 1262)
    assert {(row[0], row[-1]) for row in passages.rows} == {(100006, 100007)}
    assert all(token < 100_000 for row in passages.rows for token in row[1:-1])
    assert passages.groups == passages.index == list(range(5153))


def test_real_last_words_have_the_known_tokens(
    texts: list[str], passages: LambadaTexts, aquila: Tokenizer
) -> None:
    assert sum(passages.last) == 7153
    assert Counter(passages.last) == {1: 3520, 2: 1309, 3: 296, 4: 22, 6: 4, 7: 1, 8: 1}
    # "… care about signs" and the end token
    assert passages.rows[0][-6:] == [2164, 1184, 3140, 1314, 14446, 100007]
    assert passages.last[0] == 1
    # The context has the same tokens with and without the last word, so that no token of the
    # context counts as one of the word.
    context_ids = aquila.encode([text.rpartition(" ")[0] for text in texts])
    assert all(
        row[: -1 - last_length] == ids
        for row, last_length, ids in zip(passages.rows, passages.last, context_ids, strict=True)
    )


def test_the_real_set_with_the_gpt2_tokenizer_has_the_known_tokens(
    texts: list[str], data_dir: Path
) -> None:
    gpt2_passages = data.encode_passages(
        texts, tokenizer.load_tokenizer([data_dir / "tokenizers" / "gpt2"]), 1024, None, 0
    )
    assert (sum(len(row) for row in gpt2_passages.rows), sum(gpt2_passages.last)) == (435_383, 6573)
    assert {row[-1] for row in gpt2_passages.rows} == {50256}


def test_real_fingerprint(texts: list[str], aquila: Tokenizer) -> None:
    assert data.fingerprint_passages(texts, aquila) == FINGERPRINT
