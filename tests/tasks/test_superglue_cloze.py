"""Test cloze samples of ReCoRD: an example worked out by hand in both divisions, candidates,
shortened passages, and fingerprints.
"""

import json
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from fixtures.cloze import END, SHORT, START
from fixtures.golden import golden
from steelyard.data import cloze_samples, tokenizer
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

LINE = {
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
MASK = 19
ANN, BOB, OSLO = (4,), (6, 7), (9, 10)


@pytest.fixture
def pieces(tmp_path: Path) -> WordPieces:
    """Return the word-piece tokenizer of PIECES."""
    (tmp_path / "vocab.txt").write_text("\n".join(PIECES))
    return tokenizer.load_word_pieces([tmp_path])


@pytest.fixture
def queries(tmp_path: Path) -> list[Query]:
    """Return the queries of RECORD_LINE, read from a file."""
    (tmp_path / "x.jsonl").write_text(json.dumps(LINE))
    return superglue.read_queries(tmp_path / "x.jsonl")


def lists(found: ClozePack) -> dict[str, Any]:
    """Return the fields of a pack with its arrays as lists, after checking that these are
    one-dimensional and int64.
    """
    out = {name: getattr(found, name) for name in ClozePack.__dataclass_fields__}
    arrays = {name: value for name, value in out.items() if isinstance(value, np.ndarray)}
    assert sorted(arrays) == ["blocks", "positions", "right", "targets", "tokens"]
    assert all(value.dtype == np.int64 and value.ndim == 1 for value in arrays.values())
    return {**out, **{name: value.tolist() for name, value in arrays.items()}}


def test_samples_by_hand(pieces: WordPieces, queries: list[Query]) -> None:
    assert CONTEXT[MASK] == 3
    both = ("Oslo", "Bob Ray")
    held = ClozeSample(
        CONTEXT, MASK, (ANN, BOB, OSLO), (1, 2), ("Ann", "Bob Ray", "Oslo"), both, "1-1"
    )
    assert record.make_evaluation_samples(queries, pieces, 512) == ([held], 0)
    one = ClozeSample(CONTEXT, MASK, (OSLO, ANN), (0,), ("Oslo", "Ann"), ("Oslo",), "1-1")
    two = ClozeSample(CONTEXT, MASK, (BOB, ANN), (0,), ("Bob Ray", "Ann"), ("Bob Ray",), "1-1")
    found, shortened = record.make_training_samples(queries, pieces, 512, 9)
    assert (found, shortened) == ([one, two], 0)
    assert found[0].context is found[1].context


def test_evaluation_by_hand_in_division_open(pieces: WordPieces, queries: list[Query]) -> None:
    found = cloze_samples.pack_samples(
        record.make_evaluation_samples(queries, pieces, 512)[0], "open", START, END
    )
    assert lists(found) == {
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


def test_evaluation_by_hand_in_division_closed(pieces: WordPieces, queries: list[Query]) -> None:
    found = cloze_samples.pack_samples(
        record.make_evaluation_samples(queries, pieces, 512)[0], "closed", START, END
    )
    assert lists(found) == {
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
def test_samples_of_several_lengths_lie_end_to_end(
    division: Literal["closed", "open"], pieces: WordPieces, queries: list[Query]
) -> None:
    samples = [*record.make_training_samples(queries, pieces, 512, 9)[0], SHORT]
    found = lists(cloze_samples.pack_samples(samples, division, START, END))
    times = (2, 2, 3) if division == "closed" else (1, 1, 1)
    spans = [START, 9, 10, START, 4, START, 6, 7, START, 4, START, 7, START, 8, 9, START]
    assert found["tokens"] == [
        *CONTEXT * times[0],
        *CONTEXT * times[1],
        *SHORT.context * times[2],
        *spans,
    ]
    assert found["positions"][-16:] == [*[19] * 10, *[2] * 6]
    assert found["positions"][:-16] == [
        *[*range(25)] * (times[0] + times[1]),
        *[*range(4)] * times[2],
    ]
    assert found["blocks"][-16:] == [1, 2, 3, 1, 2, 1, 2, 3, 1, 2, 1, 2, 1, 2, 3, 1]
    assert found["targets"] == [9, 10, END, 4, END, 6, 7, END, 4, END, 7, END, 8, 9, END, END]
    assert (found["spans"], found["candidates"], found["right"]) == (
        [3, 2, 3, 2, 2, 3, 1],
        [2, 2, 3],
        [0, 0, -1],
    )
    assert found["contexts"] == [25] * (times[0] + times[1]) + [4] * times[2]
    assert found["groups"] == ([1] * 7 if division == "closed" else [2, 2, 3])
    contexts = 625 * (times[0] + times[1]) + 16 * times[2]
    assert found["counts"] == {
        "tokens": 25 * (times[0] + times[1]) + 4 * times[2] + 16,
        "samples": 3,
        "padded": 0,
        "logits": 16,
        "pairs": contexts + 10 * 25 + 6 * 4 + (6 + 3 + 6 + 3 + 3 + 6 + 1),
        "square": contexts + 10 * 25 + 6 * 4 + (9 + 4 + 9 + 4 + 4 + 9 + 1),
    }


def test_no_samples_make_no_pack() -> None:
    with pytest.raises(ValueError, match="a pack of no samples"):
        cloze_samples.pack_samples([], "open", START, END)
    with pytest.raises(ValueError, match="a pack of no samples"):
        ClozeDataset([SHORT], [SHORT], "open", 1, 0, START, END).pack([], held_out=False)


@dataclass(frozen=True)
class Letters:
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


def query(entities: str, answers: str, name: str = "1-1") -> Query:
    """Return a query with entities and answers given as words."""
    return Query(
        "passage", "who @placeholder then", tuple(entities.split()), tuple(answers.split()), name
    )


def texts(found: tuple[list[ClozeSample], int]) -> list[str]:
    """Return the candidate texts of each sample, joined by spaces."""
    return [" ".join(one.texts) for one in found[0]]


def test_up_to_nine_wrong_candidates_stay_in_order() -> None:
    nine = query("a b c d e f g h i j k", "k c")
    found = record.make_training_samples([nine], Letters(), 512, 9)
    assert texts(found) == ["k a b d e f g h i j", "c a b d e f g h i j"]
    assert [one.answers for one in found[0]] == [("k",), ("c",)]
    assert texts(record.make_evaluation_samples([nine], Letters(), 512)) == [
        "a b c d e f g h i j k"
    ]
    assert [one.right for one in record.make_evaluation_samples([nine], Letters(), 512)[0]] == [
        (2, 10)
    ]


def test_more_than_nine_are_shuffled_with_one_generator_for_the_set() -> None:
    """The generator is drawn from in the order of queries and answers, and only for queries with
    more than nine wrong candidates.
    """
    long, short = query("a b c d e f g h i j k l", "k c"), query("a b c", "b", "2-1")
    rng = random.Random(42)
    wanted = []
    for answer in ("k", "c", "k", "c"):
        others = list("abdefghijl")
        rng.shuffle(others)
        wanted.append(" ".join([answer, *others[:9]]))
    found = texts(record.make_training_samples([long, short, long], Letters(), 512, 9))
    assert found == [*wanted[:2], "b a c", *wanted[2:]]
    assert len(set(wanted)) == 4
    assert [len(one.split()) for one in found] == [10, 10, 3, 10, 10]
    assert texts(record.make_training_samples([long], Letters(), 512, 10)) == [
        "k a b d e f g h i j l",
        "c a b d e f g h i j l",
    ]
    assert [
        len(one.split()) for one in texts(record.make_training_samples([long], Letters(), 512, 2))
    ] == [3, 3]


def test_an_answer_that_is_no_entity_is_learned_and_cannot_be_chosen() -> None:
    none, some = query("a b", "z"), query("a b", "z b")
    assert texts(record.make_training_samples([none, some], Letters(), 512, 9)) == [
        "z a b",
        "z a",
        "b a",
    ]
    found = record.make_evaluation_samples([none, some], Letters(), 512)[0]
    assert [(one.texts, one.right, one.answers) for one in found] == [
        (("a", "b"), (), ("z",)),
        (("a", "b"), (1,), ("z", "b")),
    ]
    assert cloze_samples.pack_samples(found, "open", 128, 129).right.tolist() == [-1, 1]


def test_an_answer_without_a_wrong_candidate_is_alone() -> None:
    assert texts(record.make_training_samples([query("a", "a")], Letters(), 512, 9)) == ["a"]


def ids(text: str) -> tuple[int, ...]:
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
    found, count = record.make_evaluation_samples([query("ab xyz", "ab")], Letters(), positions)
    assert count == shortened
    assert found[0].context == (1, *ids(kept), *ids("who"), 2, *ids("then"), 0)
    assert found[0].context[found[0].mask] == 2
    assert len(found[0].context) + 4 <= positions


def test_shortened_contexts_are_counted_for_every_sample() -> None:
    """A training sample is shortened for its own candidates only, not for those of the query's
    other answers.
    """
    longer = query("ab cd xyz", "ab xyz")
    found, count = record.make_training_samples([longer, query("ab", "ab")], Letters(), 20, 9)
    assert [(one.texts, len(one.context)) for one in found] == [
        (("ab", "cd"), 17),
        (("xyz", "cd"), 16),
        (("ab",), 17),
    ]
    assert count == 1


def test_a_query_that_does_not_fit_is_refused() -> None:
    with pytest.raises(RequestError) as caught:
        record.make_evaluation_samples(
            [query("a", "a"), query("ab xyz", "ab", "7-2")], Letters(), 13
        )
    assert str(caught.value) == (golden("query-7-2-its-line-and"))


def test_texts_are_encoded_in_parts_and_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    class Watched(Letters):
        def encode(self, texts: list[str]) -> list[list[int]]:
            seen.append(texts)
            return super().encode(texts)

    many = [query("a b", "b a"), query("b c", "c"), query("d e", "d")]
    whole = record.make_training_samples(many, Letters(), 512, 9)
    monkeypatch.setattr(record, "_ENCODE_BATCH", 3)
    assert record.make_training_samples(many, Watched(), 512, 9) == whole
    assert seen == [
        ["passage", "who ", " then", "b", "a", "c"],
        ["passage", "who ", " then", "d", "e"],
    ]


def test_a_fingerprint_sees_texts_order_set_and_vocabulary() -> None:
    one, two = query("a b", "b"), query("a c", "c", "2-1")
    base = record.fingerprint_queries([one], [two], Letters())
    assert len(base) == 64
    assert (
        record.fingerprint_queries([replace(one, name="9-9")], [two], Letters(source="other"))
        == base
    )
    others = [
        record.fingerprint_queries([two], [one], Letters()),
        record.fingerprint_queries([one, two], [], Letters()),
        record.fingerprint_queries([one], [two], Letters(sha256="1" * 64)),
        *(
            record.fingerprint_queries([replace(one, **{name: value})], [two], Letters())
            for name, value in [
                ("passage", "x"),
                ("query", "@placeholder x"),
                ("entities", ("a", "b", "c")),
                ("answers", ("a",)),
            ]
        ),
    ]
    assert len({base, *others}) == len(others) + 1
