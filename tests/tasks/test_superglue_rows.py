"""Test the cloze dataset: batches and epochs, evaluation, and the known counts of real samples."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from fixtures.cloze import END, SHORT_SAMPLE, START
from steelyard.data import tokenizer
from steelyard.data.cloze_samples import ClozeDataset
from steelyard.data.tokenizer import WordPieces
from steelyard.errors import RequestError
from steelyard.tasks.superglue_record import data as record
from steelyard.tasks.superglue_record import queries as superglue
from steelyard.tasks.superglue_record.queries import Query


def make_dataset(
    count: int, division: Literal["closed", "open"] = "open", batch: int = 4, seed: int = 0
) -> ClozeDataset:
    """Return a dataset of `count` training samples and four held-out ones of several lengths."""
    train = [
        replace(SHORT_SAMPLE, context=(2, *[5] * (sample * 7 % 10), 3, 0))
        for sample in range(count)
    ]
    held_out = [replace(SHORT_SAMPLE, context=(2, *[5] * length, 3, 0)) for length in (1, 4, 4, 2)]
    return ClozeDataset(train, held_out, division, batch, seed, START, END)


def test_an_epoch_has_every_sample_once_and_the_next_another_order() -> None:
    dataset = make_dataset(12)
    epochs = [
        [key for step in range(start, start + 3) for key in dataset.batch(step)]
        for start in (0, 3, 6)
    ]
    assert [sorted(epoch) for epoch in epochs] == [list(range(12))] * 3
    assert len({tuple(sorted(dataset.batch(step))) for step in (0, 3, 6)}) == 3
    assert [make_dataset(12).batch(step) for step in range(9)] == [
        dataset.batch(step) for step in range(9)
    ]
    assert [make_dataset(12, seed=1).batch(step) for step in range(9)] != [
        dataset.batch(step) for step in range(9)
    ]
    # The order does not depend on the division, so that both divisions train on the same samples.
    assert [sorted(make_dataset(12, "closed").batch(step)) for step in range(9)] == [
        sorted(dataset.batch(step)) for step in range(9)
    ]


def test_a_batch_continues_into_the_next_epoch() -> None:
    dataset = make_dataset(6)
    keys = [key for step in range(3) for key in dataset.batch(step)]
    assert Counter(keys) == dict.fromkeys(range(6), 2)
    assert Counter(make_dataset(3, batch=7).batch(0)).most_common()[0][1] == 3


def test_a_batch_is_sorted_by_length_but_batches_are_not() -> None:
    dataset = make_dataset(40, batch=8)
    sizes = [
        [dataset.count_tokens(key, held_out=False) for key in dataset.batch(step)]
        for step in range(5)
    ]
    assert all(
        batch_sizes == sorted(batch_sizes, reverse=True) and len(set(batch_sizes)) > 1
        for batch_sizes in sizes
    )
    assert all(sizes[step_number][-1] < sizes[step_number + 1][0] for step_number in range(4))
    ties = [
        key for key in dataset.batch(0) if dataset.count_tokens(key, held_out=False) == sizes[0][0]
    ]
    assert ties == sorted(ties)


@pytest.mark.parametrize(
    ("division", "sizes"), [("open", [10, 13, 13, 11]), ("closed", [18, 27, 27, 21])]
)
def test_evaluation_has_all_held_out_samples_longest_first(
    division: Literal["closed", "open"], sizes: list[int]
) -> None:
    dataset = make_dataset(3, division)
    assert dataset.held_out() == [1, 2, 3, 0]
    assert [dataset.count_tokens(key, held_out=True) for key in range(4)] == sizes
    assert [dataset.pack([key], held_out=True).counts["tokens"] for key in range(4)] == sizes
    assert dataset.sample(3, held_out=True).context == (2, 5, 5, 3, 0)
    assert dataset.sample(2, held_out=False).context == (2, *[5] * 4, 3, 0)
    pack = dataset.pack([3, 0], held_out=True)
    assert pack.counts["tokens"] == sizes[3] + sizes[0]
    assert pack.contexts == ([5] * 3 + [4] * 3 if division == "closed" else [5, 4])


def test_no_samples_or_an_empty_batch_are_refused() -> None:
    with pytest.raises(RequestError, match="no samples to train on; allowed: 1 or more"):
        ClozeDataset([], [SHORT_SAMPLE], "open", 1, 0, START, END)
    with pytest.raises(RequestError, match="a global batch of 0 samples; allowed: 1 or more"):
        ClozeDataset([SHORT_SAMPLE], [SHORT_SAMPLE], "open", 0, 0, START, END)


@pytest.fixture(scope="module")
def bert(data_dir: Path) -> WordPieces:
    """Return the tokenizer of bert-large-uncased."""
    return tokenizer.load_word_pieces([data_dir / "tokenizers" / "bert-large-uncased"])


@pytest.fixture(scope="module")
def real(data_dir: Path) -> list[Query]:
    """Return the 187 real queries of three files."""
    names = ("train32", "dev32", "explorer123")
    return [
        query
        for name in names
        for query in superglue.read_queries(data_dir / "record" / f"record_{name}.jsonl")
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
def test_real_samples_have_the_known_counts(
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
    evaluation, evaluation_shortened = record.make_evaluation_samples(real, bert, 512)
    assert (len(train), len(evaluation), shortened, evaluation_shortened) == (283, 187, 0, 0)
    assert (
        sum(len(sample.candidates) for sample in train),
        sum(len(sample.candidates) for sample in evaluation),
    ) == (2460, 2083)
    assert max(len(sample.context) for sample in evaluation) == 406
    dataset = ClozeDataset(train, evaluation, division, 8, 0, bert.vocab, bert.vocab + 1)
    for keys, from_held_out, figures, logits in (
        (range(283), False, learned, 7655),
        (range(187), True, held, 6497),
    ):
        counts = dataset.pack(list(keys), from_held_out).counts
        assert counts["tokens"] == sum(dataset.count_tokens(key, from_held_out) for key in keys)
        assert (
            counts["tokens"],
            round(counts["tokens"] / len(keys)),
            counts["pairs"],
            counts["square"],
        ) == figures
        assert (counts["logits"], counts["samples"], counts["padded"]) == (logits, len(keys), 0)


def test_real_passages_are_shortened_to_256_positions(real: list[Query], bert: WordPieces) -> None:
    full_samples = record.make_evaluation_samples(real, bert, 512)[0]
    samples, shortened = record.make_evaluation_samples(real, bert, 256)
    longest = [max(map(len, sample.candidates)) + 1 for sample in samples]
    assert shortened == 58
    for sample, full_sample, span in zip(samples, full_samples, longest, strict=True):
        fits = len(full_sample.context) + span <= 256
        assert (sample == full_sample) == fits
        assert fits or len(sample.context) + span == 256
        assert sample.context[sample.mask] == bert.mask
        tail = len(sample.context) - sample.mask
        assert sample.context[-tail:] == full_sample.context[-tail:]
        assert sample.context[:5] == full_sample.context[:5]
