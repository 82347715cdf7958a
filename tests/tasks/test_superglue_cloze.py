"""Test cloze samples of ReCoRD: an example worked out by hand in both divisions, candidates,
shortened passages, and fingerprints.
"""

import json
import random
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest

from fixtures.cloze import END, SHORT_SAMPLE, START
from fixtures.golden import golden
from steelyard.data import cloze_samples, counting, tokenizer
from steelyard.data.cloze_samples import ClozeDataset, ClozePack, ClozeSample
from steelyard.data.tokenizer import WordPieces
from steelyard.errors import RequestError
from steelyard.tasks.superglue_record import data as record
from steelyard.tasks.superglue_record import queries as superglue
from steelyard.tasks.superglue_record.queries import Query

PIECES = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[MASK]",
    "ann",
    "met",
    "bob",
    "ray",
    "in",
    "os",
    "##lo",
    ".",
    "-",
    '"',
    "cold",
    "won",
]
PIECES += ["the", "end", "'", "s"]

RECORD_LINE = {
    "passage": {
        "text": "Ann met “Bob Ray” in Oslo.\n@highlight\nOslo – cold",
        "entities": [
            {"start": 21, "end": 24},
            {"start": 9, "end": 15},
            {"start": 0, "end": 2},
            {"start": 38, "end": 41},
        ],
    },
    "qas": [
        {
            "query": "In the end @placeholder’s won.",
            "answers": [{"text": "Oslo"}, {"text": "Bob Ray"}, {"text": "Oslo"}],
        }
    ],
}
#           [CLS] ann met "  bob ray "  in os lo . -  os lo -  cold
CONTEXT = (2, 4, 5, 13, 6, 7, 13, 8, 9, 10, 11, 12, 9, 10, 12, 14)
#           in the end MASK ' s  won .  [PAD]
CONTEXT += (8, 16, 17, 3, 18, 19, 15, 11, 0)
MASK_POSITION = 19
ANN_TOKENS, BOB_TOKENS, OSLO_TOKENS = (4,), (6, 7), (9, 10)


@pytest.fixture
def pieces(tmp_path: Path) -> WordPieces:
    """Return the word-piece tokenizer of PIECES."""
    (tmp_path / "vocab.txt").write_text("\n".join(PIECES))
    return tokenizer.load_word_pieces([tmp_path])


@pytest.fixture
def queries(tmp_path: Path) -> list[Query]:
    """Return the queries of RECORD_LINE, read from a file."""
    (tmp_path / "x.jsonl").write_text(json.dumps(RECORD_LINE))
    return superglue.read_queries(tmp_path / "x.jsonl")


def convert_to_lists(pack: ClozePack) -> dict[str, Any]:
    """Return the fields of a pack with its arrays as lists, after checking that these are
    one-dimensional and int64.
    """
    fields = {name: getattr(pack, name) for name in ClozePack.__dataclass_fields__}
    arrays = {name: value for name, value in fields.items() if isinstance(value, np.ndarray)}
    assert sorted(arrays) == ["blocks", "positions", "right", "targets", "tokens"]
    assert all(value.dtype == np.int64 and value.ndim == 1 for value in arrays.values())
    return {**fields, **{name: value.tolist() for name, value in arrays.items()}}


def test_queries_are_encoded_as_worked_out_by_hand(
    pieces: WordPieces, queries: list[Query]
) -> None:
    assert CONTEXT[MASK_POSITION] == 3
    answers = ("Oslo", "Bob Ray")
    evaluation_sample = ClozeSample(
        CONTEXT,
        MASK_POSITION,
        (ANN_TOKENS, BOB_TOKENS, OSLO_TOKENS),
        (1, 2),
        ("Ann", "Bob Ray", "Oslo"),
        answers,
        "1-1",
    )
    assert record.make_evaluation_samples(queries, pieces, 512) == ([evaluation_sample], 0)
    oslo_sample = ClozeSample(
        CONTEXT, MASK_POSITION, (OSLO_TOKENS, ANN_TOKENS), (0,), ("Oslo", "Ann"), ("Oslo",), "1-1"
    )
    bob_sample = ClozeSample(
        CONTEXT,
        MASK_POSITION,
        (BOB_TOKENS, ANN_TOKENS),
        (0,),
        ("Bob Ray", "Ann"),
        ("Bob Ray",),
        "1-1",
    )
    training_samples, shortened = record.make_training_samples(queries, pieces, 512, 9)
    assert (training_samples, shortened) == ([oslo_sample, bob_sample], 0)
    assert training_samples[0].context is training_samples[1].context


def test_a_pack_by_hand_in_division_open(pieces: WordPieces, queries: list[Query]) -> None:
    pack = cloze_samples.pack_samples(
        record.make_evaluation_samples(queries, pieces, 512)[0], "open", START, END
    )
    assert convert_to_lists(pack) == {
        "tokens": [*CONTEXT, START, 4, START, 6, 7, START, 9, 10],
        "positions": [*range(25), *[19] * 8],
        "blocks": [*[0] * 25, 1, 2, 1, 2, 3, 1, 2, 3],
        "contexts": [25],
        "spans": [2, 3, 3],
        "groups": [3],
        "targets": [4, END, 6, 7, END, 9, 10, END],
        "candidates": [3],
        "right": [1],
        "counts": {
            "tokens": 33,
            "samples": 1,
            "padded": 0,
            "logits": 8,
            "pairs": 25 * 25 + (2 + 3 + 3) * 25 + (3 + 6 + 6),
            "square": 25 * 25 + (2 + 3 + 3) * 25 + (4 + 9 + 9),
        },
    }


def test_a_pack_by_hand_in_division_closed(pieces: WordPieces, queries: list[Query]) -> None:
    pack = cloze_samples.pack_samples(
        record.make_evaluation_samples(queries, pieces, 512)[0], "closed", START, END
    )
    assert convert_to_lists(pack) == {
        "tokens": [*CONTEXT, *CONTEXT, *CONTEXT, START, 4, START, 6, 7, START, 9, 10],
        "positions": [*range(25), *range(25), *range(25), *[19] * 8],
        "blocks": [*[0] * 75, 1, 2, 1, 2, 3, 1, 2, 3],
        "contexts": [25, 25, 25],
        "spans": [2, 3, 3],
        "groups": [1, 1, 1],
        "targets": [4, END, 6, 7, END, 9, 10, END],
        "candidates": [3],
        "right": [1],
        "counts": {
            "tokens": 83,
            "samples": 1,
            "padded": 0,
            "logits": 8,
            "pairs": 3 * 25 * 25 + (2 + 3 + 3) * 25 + (3 + 6 + 6),
            "square": 3 * 25 * 25 + (2 + 3 + 3) * 25 + (4 + 9 + 9),
        },
    }


@pytest.mark.parametrize("division", ["closed", "open"])
def test_samples_of_several_lengths_are_packed_end_to_end(
    division: Literal["closed", "open"], pieces: WordPieces, queries: list[Query]
) -> None:
    samples = [*record.make_training_samples(queries, pieces, 512, 9)[0], SHORT_SAMPLE]
    pack = convert_to_lists(cloze_samples.pack_samples(samples, division, START, END))
    context_copies = (2, 2, 3) if division == "closed" else (1, 1, 1)
    spans = [START, 9, 10, START, 4, START, 6, 7, START, 4, START, 7, START, 8, 9, START]
    assert pack["tokens"] == [
        *CONTEXT * context_copies[0],
        *CONTEXT * context_copies[1],
        *SHORT_SAMPLE.context * context_copies[2],
        *spans,
    ]
    assert pack["positions"][-16:] == [*[19] * 10, *[2] * 6]
    assert pack["positions"][:-16] == [
        *[*range(25)] * (context_copies[0] + context_copies[1]),
        *[*range(4)] * context_copies[2],
    ]
    assert pack["blocks"][-16:] == [1, 2, 3, 1, 2, 1, 2, 3, 1, 2, 1, 2, 1, 2, 3, 1]
    assert pack["targets"] == [9, 10, END, 4, END, 6, 7, END, 4, END, 7, END, 8, 9, END, END]
    assert (pack["spans"], pack["candidates"], pack["right"]) == (
        [3, 2, 3, 2, 2, 3, 1],
        [2, 2, 3],
        [0, 0, -1],
    )
    assert (
        pack["contexts"] == [25] * (context_copies[0] + context_copies[1]) + [4] * context_copies[2]
    )
    assert pack["groups"] == ([1] * 7 if division == "closed" else [2, 2, 3])
    context_pairs = 625 * (context_copies[0] + context_copies[1]) + 16 * context_copies[2]
    assert pack["counts"] == {
        "tokens": 25 * (context_copies[0] + context_copies[1]) + 4 * context_copies[2] + 16,
        "samples": 3,
        "padded": 0,
        "logits": 16,
        "pairs": context_pairs + 10 * 25 + 6 * 4 + (6 + 3 + 6 + 3 + 3 + 6 + 1),
        "square": context_pairs + 10 * 25 + 6 * 4 + (9 + 4 + 9 + 4 + 4 + 9 + 1),
    }


def test_a_pack_without_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="no samples to pack"):
        cloze_samples.pack_samples([], "open", START, END)
    with pytest.raises(ValueError, match="no samples to pack"):
        ClozeDataset([SHORT_SAMPLE], [SHORT_SAMPLE], "open", 1, 0, START, END).pack(
            [], held_out=False
        )


@dataclass(frozen=True)
class LetterTokenizer:
    """A tokenizer that can be followed by hand: the pieces are the letters, spaces are dropped, and
    ids are code points.
    """

    vocab: int = 128
    source: str = "letters"
    sha256: str = "0" * 64
    end: int | None = None
    pad: int = 0
    cls: int = 1
    mask: int = 2

    def encode(self, texts: list[str]) -> list[list[int]]:
        return [[ord(letter) for letter in text if letter != " "] for text in texts]


def make_query(entities: str, answers: str, name: str = "1-1") -> Query:
    """Return a query with entities and answers given as words."""
    return Query(
        "passage", "who @placeholder then", tuple(entities.split()), tuple(answers.split()), name
    )


def join_candidates(encoded: tuple[list[ClozeSample], int]) -> list[str]:
    """Return the candidate texts of each sample, joined by spaces."""
    return [" ".join(sample.texts) for sample in encoded[0]]


def test_up_to_nine_wrong_candidates_stay_in_order() -> None:
    eleven_entities = make_query("a b c d e f g h i j k", "k c")
    encoded = record.make_training_samples([eleven_entities], LetterTokenizer(), 512, 9)
    assert join_candidates(encoded) == ["k a b d e f g h i j", "c a b d e f g h i j"]
    assert [sample.answers for sample in encoded[0]] == [("k",), ("c",)]
    assert join_candidates(
        record.make_evaluation_samples([eleven_entities], LetterTokenizer(), 512)
    ) == ["a b c d e f g h i j k"]
    assert [
        sample.right
        for sample in record.make_evaluation_samples([eleven_entities], LetterTokenizer(), 512)[0]
    ] == [(2, 10)]


def test_more_than_nine_wrong_candidates_are_shuffled_by_one_generator() -> None:
    """The generator is drawn from in the order of queries and answers, and only for queries with
    more than nine wrong candidates.
    """
    long, short = make_query("a b c d e f g h i j k l", "k c"), make_query("a b c", "b", "2-1")
    rng = random.Random(42)
    expected = []
    for answer in ("k", "c", "k", "c"):
        wrong = list("abdefghijl")
        rng.shuffle(wrong)
        expected.append(" ".join([answer, *wrong[:9]]))
    candidates = join_candidates(
        record.make_training_samples([long, short, long], LetterTokenizer(), 512, 9)
    )
    assert candidates == [*expected[:2], "b a c", *expected[2:]]
    assert len(set(expected)) == 4
    assert [len(names.split()) for names in candidates] == [10, 10, 3, 10, 10]
    assert join_candidates(record.make_training_samples([long], LetterTokenizer(), 512, 10)) == [
        "k a b d e f g h i j l",
        "c a b d e f g h i j l",
    ]
    assert [
        len(names.split())
        for names in join_candidates(
            record.make_training_samples([long], LetterTokenizer(), 512, 2)
        )
    ] == [3, 3]


def test_an_answer_that_is_no_entity_is_learned_and_cannot_be_chosen() -> None:
    without_entity, one_entity = make_query("a b", "z"), make_query("a b", "z b")
    assert join_candidates(
        record.make_training_samples([without_entity, one_entity], LetterTokenizer(), 512, 9)
    ) == ["z a b", "z a", "b a"]
    samples = record.make_evaluation_samples([without_entity, one_entity], LetterTokenizer(), 512)[
        0
    ]
    assert [(sample.texts, sample.right, sample.answers) for sample in samples] == [
        (("a", "b"), (), ("z",)),
        (("a", "b"), (1,), ("z", "b")),
    ]
    assert cloze_samples.pack_samples(samples, "open", 128, 129).right.tolist() == [-1, 1]


def test_an_answer_without_wrong_candidates_is_the_only_candidate() -> None:
    assert join_candidates(
        record.make_training_samples([make_query("a", "a")], LetterTokenizer(), 512, 9)
    ) == ["a"]


def encode_letters(text: str) -> tuple[int, ...]:
    """Return the ids that LetterTokenizer gives a text without spaces."""
    return tuple(map(ord, text))


@pytest.mark.parametrize(
    ("positions", "kept", "shortened"),
    [(21, "passage", 0), (20, "passag", 1), (15, "p", 1), (14, "", 1)],
)
def test_the_passage_is_shortened_from_its_end_for_the_longest_candidate(
    positions: int, kept: str, shortened: int
) -> None:
    """Around the passage are [CLS], "who", [MASK], "then" and [PAD]; the longest span is the start
    token, x, y and z.
    """
    samples, count = record.make_evaluation_samples(
        [make_query("ab xyz", "ab")], LetterTokenizer(), positions
    )
    assert count == shortened
    assert samples[0].context == (
        1,
        *encode_letters(kept),
        *encode_letters("who"),
        2,
        *encode_letters("then"),
        0,
    )
    assert samples[0].context[samples[0].mask] == 2
    assert len(samples[0].context) + 4 <= positions


def test_training_shortens_by_the_candidates_of_each_sample() -> None:
    """A training sample is shortened for its own candidates only, not for those of the query's
    other answers.
    """
    two_answers = make_query("ab cd xyz", "ab xyz")
    samples, count = record.make_training_samples(
        [two_answers, make_query("ab", "ab")], LetterTokenizer(), 20, 9
    )
    assert [(sample.texts, len(sample.context)) for sample in samples] == [
        (("ab", "cd"), 17),
        (("xyz", "cd"), 16),
        (("ab",), 17),
    ]
    assert count == 1


def test_a_query_longer_than_the_positions_is_refused() -> None:
    with pytest.raises(RequestError) as error:
        record.make_evaluation_samples(
            [make_query("a", "a"), make_query("ab xyz", "ab", "7-2")], LetterTokenizer(), 13
        )
    assert str(error.value) == (golden("query-7-2-its-line-and"))


def test_texts_are_encoded_in_chunks_without_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded_texts: list[list[str]] = []

    class RecordingTokenizer(LetterTokenizer):
        def encode(self, texts: list[str]) -> list[list[int]]:
            encoded_texts.append(texts)
            return super().encode(texts)

    queries = [make_query("a b", "b a"), make_query("b c", "c"), make_query("d e", "d")]
    expected = record.make_training_samples(queries, LetterTokenizer(), 512, 9)
    monkeypatch.setattr(record, "_ENCODE_BATCH", 3)
    assert record.make_training_samples(queries, RecordingTokenizer(), 512, 9) == expected
    assert encoded_texts == [
        ["passage", "who ", " then", "b", "a", "c"],
        ["passage", "who ", " then", "d", "e"],
    ]


def test_a_fingerprint_depends_on_texts_split_and_vocabulary() -> None:
    train_query, val_query = make_query("a b", "b"), make_query("a c", "c", "2-1")
    fingerprint = record.fingerprint_queries([train_query], [val_query], LetterTokenizer())
    assert len(fingerprint) == 64
    assert (
        record.fingerprint_queries(
            [replace(train_query, name="9-9")], [val_query], LetterTokenizer(source="other")
        )
        == fingerprint
    )
    changed = [
        record.fingerprint_queries([val_query], [train_query], LetterTokenizer()),
        record.fingerprint_queries([train_query, val_query], [], LetterTokenizer()),
        record.fingerprint_queries([train_query], [val_query], LetterTokenizer(sha256="1" * 64)),
        *(
            record.fingerprint_queries(
                [replace(train_query, **{name: value})], [val_query], LetterTokenizer()
            )
            for name, value in [
                ("passage", "x"),
                ("query", "@placeholder x"),
                ("entities", ("a", "b", "c")),
                ("answers", ("a",)),
            ]
        ),
    ]
    assert len({fingerprint, *changed}) == len(changed) + 1


def test_an_unknown_division_is_refused() -> None:
    expected = "division 'opened' is not known; allowed: closed, open"
    division: Any = "opened"
    with pytest.raises(ValueError, match=expected):
        cloze_samples.pack_samples([SHORT_SAMPLE], division, START, END)
    with pytest.raises(ValueError, match=expected):
        counting.make_text_counter(SimpleNamespace(rows=[[1]], groups=[0]), division, None)  # type: ignore[arg-type]
