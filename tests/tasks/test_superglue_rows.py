"""Test the cloze dataset: batches and epochs, evaluation, and the known counts of real samples."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from fixtures.cloze import END, SHORT, START
from steelyard.data import tokenizer
from steelyard.data.cloze_samples import ClozeDataset
from steelyard.data.tokenizer import WordPieces
from steelyard.errors import RequestError
from steelyard.tasks.superglue_record import data as record
from steelyard.tasks.superglue_record import queries as superglue
from steelyard.tasks.superglue_record.queries import Query


def rows(
    count: int, division: Literal["closed", "open"] = "open", batch: int = 4, seed: int = 0
) -> ClozeDataset:
    """Return a dataset of `count` training samples and four held-out ones of several lengths."""
    train = [replace(SHORT, context=(2, *[5] * (i * 7 % 10), 3, 0)) for i in range(count)]
    held = [replace(SHORT, context=(2, *[5] * length, 3, 0)) for length in (1, 4, 4, 2)]
    return ClozeDataset(train, held, division, batch, seed, START, END)


def test_an_epoch_has_every_sample_once_and_the_next_another_order() -> None:
    found = rows(12)
    epochs = [
        [key for step in range(start, start + 3) for key in found.batch(step)]
        for start in (0, 3, 6)
    ]
    assert [sorted(one) for one in epochs] == [list(range(12))] * 3
    assert len({tuple(sorted(found.batch(step))) for step in (0, 3, 6)}) == 3
    assert [rows(12).batch(step) for step in range(9)] == [found.batch(step) for step in range(9)]
    assert [rows(12, seed=1).batch(step) for step in range(9)] != [
        found.batch(step) for step in range(9)
    ]
    # The order does not depend on the division, so that both divisions train on the same samples.
    assert [sorted(rows(12, "closed").batch(step)) for step in range(9)] == [
        sorted(found.batch(step)) for step in range(9)
    ]


def test_a_batch_goes_over_the_end_of_an_epoch() -> None:
    found = rows(6)
    keys = [key for step in range(3) for key in found.batch(step)]
    assert Counter(keys) == dict.fromkeys(range(6), 2)
    assert Counter(rows(3, batch=7).batch(0)).most_common()[0][1] == 3


def test_lengths_are_sorted_inside_a_batch_and_nowhere_else() -> None:
    found = rows(40, batch=8)
    sizes = [
        [found.count_tokens(key, held_out=False) for key in found.batch(step)] for step in range(5)
    ]
    assert all(one == sorted(one, reverse=True) and len(set(one)) > 1 for one in sizes)
    assert all(sizes[i][-1] < sizes[i + 1][0] for i in range(4))
    ties = [key for key in found.batch(0) if found.count_tokens(key, held_out=False) == sizes[0][0]]
    assert ties == sorted(ties)


@pytest.mark.parametrize(
    ("division", "sizes"), [("open", [10, 13, 13, 11]), ("closed", [18, 27, 27, 21])]
)
def test_evaluation_is_all_of_it_the_longest_first(
    division: Literal["closed", "open"], sizes: list[int]
) -> None:
    found = rows(3, division)
    assert found.held_out() == [1, 2, 3, 0]
    assert [found.count_tokens(key, held_out=True) for key in range(4)] == sizes
    assert [found.pack([key], held_out=True).counts["tokens"] for key in range(4)] == sizes
    assert found.sample(3, held_out=True).context == (2, 5, 5, 3, 0)
    assert found.sample(2, held_out=False).context == (2, *[5] * 4, 3, 0)
    both = found.pack([3, 0], held_out=True)
    assert both.counts["tokens"] == sizes[3] + sizes[0]
    assert both.contexts == ([5] * 3 + [4] * 3 if division == "closed" else [5, 4])


def test_rows_that_are_none() -> None:
    with pytest.raises(RequestError, match="no samples to train on; allowed: 1 or more"):
        ClozeDataset([], [SHORT], "open", 1, 0, START, END)
    with pytest.raises(RequestError, match="a global batch of 0 samples; allowed: 1 or more"):
        ClozeDataset([SHORT], [SHORT], "open", 0, 0, START, END)


@pytest.fixture(scope="module")
def bert(data_dir: Path) -> WordPieces:
    """Return the tokenizer of bert-large-uncased."""
    return tokenizer.load_word_pieces([data_dir / "tokenizers" / "bert-large-uncased"])


@pytest.fixture(scope="module")
def real(data_dir: Path) -> list[Query]:
    """Return the 187 real queries of three files."""
    names = ("train32", "dev32", "explorer123")
    return [
        one
        for name in names
        for one in superglue.read_queries(data_dir / "record" / f"record_{name}.jsonl")
    ]


@pytest.mark.parametrize(
    ("division", "learned", "held"),
    [
        (
            "closed",
            (590_569, 2087, 143_081_852, 143_092_196),
            (505_481, 2703, 123_793_508, 123_802_340),
        ),
        ("open", (74_356, 263, 17_932_119, 17_942_463), (50_489, 270, 12_158_880, 12_167_712)),
    ],
)
def test_real_rows(
    division: Literal["closed", "open"],
    learned: tuple[int, ...],
    held: tuple[int, ...],
    real: list[Query],
    bert: WordPieces,
) -> None:
    """The expected figures are those of the design: 283 training samples of 187 queries, with a
    mean of 2,087 tokens in division closed and 263 in open.
    """
    train, shortened = record.make_training_samples(real, bert, 512, 9)
    ask, asked_shortened = record.make_evaluation_samples(real, bert, 512)
    assert (len(train), len(ask), shortened, asked_shortened) == (283, 187, 0, 0)
    assert (sum(len(one.candidates) for one in train), sum(len(one.candidates) for one in ask)) == (
        2460,
        2083,
    )
    assert max(len(one.context) for one in ask) == 406
    found = ClozeDataset(train, ask, division, 8, 0, bert.vocab, bert.vocab + 1)
    for keys, is_held, figures, logits in (
        (range(283), False, learned, 7655),
        (range(187), True, held, 6497),
    ):
        counts = found.pack(list(keys), is_held).counts
        assert counts["tokens"] == sum(found.count_tokens(key, is_held) for key in keys)
        assert (
            counts["tokens"],
            round(counts["tokens"] / len(keys)),
            counts["pairs"],
            counts["square"],
        ) == figures
        assert (counts["logits"], counts["samples"], counts["padded"]) == (logits, len(keys), 0)


def test_real_rows_that_are_shortened(real: list[Query], bert: WordPieces) -> None:
    whole = record.make_evaluation_samples(real, bert, 512)[0]
    found, shortened = record.make_evaluation_samples(real, bert, 256)
    longest = [max(map(len, one.candidates)) + 1 for one in found]
    assert shortened == 58
    for one, before, span in zip(found, whole, longest, strict=True):
        fits = len(before.context) + span <= 256
        assert (one == before) == fits
        assert fits or len(one.context) + span == 256
        assert one.context[one.mask] == bert.mask
        kept = len(one.context) - one.mask
        assert one.context[-kept:] == before.context[-kept:]
        assert one.context[:5] == before.context[:5]
