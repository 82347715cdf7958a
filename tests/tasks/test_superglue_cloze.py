"""The cloze: a ReCoRD example worked out by hand in both divisions, candidates, shortening, batches, real rows, made data."""

import json
import random
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from steelyard.data import cloze, tokenizer
from steelyard.data.cloze import Cloze, ClozeRows, Pack
from steelyard.data.tokenizer import WordPieces
from steelyard.errors import RequestError
from steelyard.tasks.superglue_record import data as record
from steelyard.tasks.superglue_record import made
from steelyard.tasks.superglue_record import queries as superglue
from steelyard.tasks.superglue_record.fields import MadeCloze
from steelyard.tasks.superglue_record.made import ClozeTokenizer
from steelyard.tasks.superglue_record.queries import Query

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[MASK]", "ann", "met", "bob", "ray", "in", "os", "##lo", ".", "-", '"', "cold", "won"]
PIECES += ["the", "end", "'", "s"]
START, END = 20, 21

LINE = {
    "passage": {
        "text": "Ann met “Bob Ray” in Oslo.\n@highlight\nOslo – cold",
        "entities": [{"start": 21, "end": 24}, {"start": 9, "end": 15}, {"start": 0, "end": 2}, {"start": 38, "end": 41}],
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
    (tmp_path / "vocab.txt").write_text("\n".join(PIECES))
    return tokenizer.load_pieces([tmp_path])


@pytest.fixture
def queries(tmp_path: Path) -> list[Query]:
    (tmp_path / "x.jsonl").write_text(json.dumps(LINE))
    return superglue.read(tmp_path / "x.jsonl")


def lists(found: Pack) -> dict[str, Any]:
    out = {name: getattr(found, name) for name in Pack.__dataclass_fields__}
    arrays = {name: value for name, value in out.items() if isinstance(value, np.ndarray)}
    assert sorted(arrays) == ["blocks", "positions", "right", "targets", "tokens"]
    assert all(value.dtype == np.int64 and value.ndim == 1 for value in arrays.values())
    return {**out, **{name: value.tolist() for name, value in arrays.items()}}


def test_samples_by_hand(pieces: WordPieces, queries: list[Query]) -> None:
    assert CONTEXT[MASK] == 3
    both = ("Oslo", "Bob Ray")
    held = Cloze(CONTEXT, MASK, (ANN, BOB, OSLO), (1, 2), ("Ann", "Bob Ray", "Oslo"), both, "1-1")
    assert record.evaluation(queries, pieces, 512) == ([held], 0)
    one = Cloze(CONTEXT, MASK, (OSLO, ANN), (0,), ("Oslo", "Ann"), ("Oslo",), "1-1")
    two = Cloze(CONTEXT, MASK, (BOB, ANN), (0,), ("Bob Ray", "Ann"), ("Bob Ray",), "1-1")
    found, shortened = record.training(queries, pieces, 512, 9)
    assert (found, shortened) == ([one, two], 0)
    assert found[0].context is found[1].context


def test_evaluation_by_hand_in_division_open(pieces: WordPieces, queries: list[Query]) -> None:
    found = cloze.pack(record.evaluation(queries, pieces, 512)[0], "open", START, END)
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
    found = cloze.pack(record.evaluation(queries, pieces, 512)[0], "closed", START, END)
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


SHORT = Cloze((2, 5, 3, 0), 2, ((7,), (8, 9), ()), (), ("a", "b c", ""), ("d",), "2-1")


@pytest.mark.parametrize("division", ["closed", "open"])
def test_samples_of_several_lengths_lie_end_to_end(
    division: Literal["closed", "open"], pieces: WordPieces, queries: list[Query]
) -> None:
    samples = [*record.training(queries, pieces, 512, 9)[0], SHORT]
    found = lists(cloze.pack(samples, division, START, END))
    times = (2, 2, 3) if division == "closed" else (1, 1, 1)
    spans = [START, 9, 10, START, 4, START, 6, 7, START, 4, START, 7, START, 8, 9, START]
    assert found["tokens"] == [*CONTEXT * times[0], *CONTEXT * times[1], *SHORT.context * times[2], *spans]
    assert found["positions"][-16:] == [*[19] * 10, *[2] * 6]
    assert found["positions"][:-16] == [*[*range(25)] * (times[0] + times[1]), *[*range(4)] * times[2]]
    assert found["blocks"][-16:] == [1, 2, 3, 1, 2, 1, 2, 3, 1, 2, 1, 2, 1, 2, 3, 1]
    assert found["targets"] == [9, 10, END, 4, END, 6, 7, END, 4, END, 7, END, 8, 9, END, END]
    assert (found["spans"], found["candidates"], found["right"]) == ([3, 2, 3, 2, 2, 3, 1], [2, 2, 3], [0, 0, -1])
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
        cloze.pack([], "open", START, END)
    with pytest.raises(ValueError, match="a pack of no samples"):
        ClozeRows([SHORT], [SHORT], "open", 1, 0, START, END).pack([], held=False)


@dataclass(frozen=True)
class Letters:
    """A tokenizer one can follow by hand: every letter but the space is a piece."""

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
    return Query("passage", "who @placeholder then", tuple(entities.split()), tuple(answers.split()), name)


def texts(found: tuple[list[Cloze], int]) -> list[str]:
    return [" ".join(one.texts) for one in found[0]]


def test_up_to_nine_wrong_candidates_stay_in_order() -> None:
    nine = query("a b c d e f g h i j k", "k c")
    found = record.training([nine], Letters(), 512, 9)
    assert texts(found) == ["k a b d e f g h i j", "c a b d e f g h i j"]
    assert [one.answers for one in found[0]] == [("k",), ("c",)]
    assert texts(record.evaluation([nine], Letters(), 512)) == ["a b c d e f g h i j k"]
    assert [one.right for one in record.evaluation([nine], Letters(), 512)[0]] == [(2, 10)]


def test_more_than_nine_are_shuffled_with_one_generator_for_the_set() -> None:
    """The generator is drawn from in the order of the queries and their answers, and only where there are too many."""
    long, short = query("a b c d e f g h i j k l", "k c"), query("a b c", "b", "2-1")
    rng = random.Random(42)
    wanted = []
    for answer in ("k", "c", "k", "c"):
        others = list("abdefghijl")
        rng.shuffle(others)
        wanted.append(" ".join([answer, *others[:9]]))
    found = texts(record.training([long, short, long], Letters(), 512, 9))
    assert found == [*wanted[:2], "b a c", *wanted[2:]]
    assert len(set(wanted)) == 4
    assert [len(one.split()) for one in found] == [10, 10, 3, 10, 10]
    assert texts(record.training([long], Letters(), 512, 10)) == ["k a b d e f g h i j l", "c a b d e f g h i j l"]
    assert [len(one.split()) for one in texts(record.training([long], Letters(), 512, 2))] == [3, 3]


def test_an_answer_that_is_no_entity_is_learned_and_cannot_be_chosen() -> None:
    none, some = query("a b", "z"), query("a b", "z b")
    assert texts(record.training([none, some], Letters(), 512, 9)) == ["z a b", "z a", "b a"]
    found = record.evaluation([none, some], Letters(), 512)[0]
    assert [(one.texts, one.right, one.answers) for one in found] == [(("a", "b"), (), ("z",)), (("a", "b"), (1,), ("z", "b"))]
    assert cloze.pack(found, "open", 128, 129).right.tolist() == [-1, 1]


def test_an_answer_without_a_wrong_candidate_is_alone() -> None:
    assert texts(record.training([query("a", "a")], Letters(), 512, 9)) == ["a"]


def ids(text: str) -> tuple[int, ...]:
    return tuple(map(ord, text))


@pytest.mark.parametrize(("positions", "kept", "shortened"), [(21, "passage", 0), (20, "passag", 1), (15, "p", 1), (14, "", 1)])
def test_the_passage_is_shortened_from_its_end_for_the_longest_candidate(positions: int, kept: str, shortened: int) -> None:
    """Around the passage are [CLS], who, [MASK], then, [PAD]; the longest span is start-of-piece, x, y, z."""
    found, count = record.evaluation([query("ab xyz", "ab")], Letters(), positions)
    assert count == shortened
    assert found[0].context == (1, *ids(kept), *ids("who"), 2, *ids("then"), 0)
    assert found[0].context[found[0].mask] == 2
    assert len(found[0].context) + 4 <= positions


def test_shortened_contexts_are_counted_for_every_sample() -> None:
    """Training looks at the candidates of the sample alone."""
    longer = query("ab cd xyz", "ab xyz")
    found, count = record.training([longer, query("ab", "ab")], Letters(), 20, 9)
    assert [(one.texts, len(one.context)) for one in found] == [(("ab", "cd"), 17), (("xyz", "cd"), 16), (("ab",), 17)]
    assert count == 1


def test_a_query_that_does_not_fit_is_refused() -> None:
    with pytest.raises(RequestError) as caught:
        record.evaluation([query("a", "a"), query("ab xyz", "ab", "7-2")], Letters(), 13)
    assert str(caught.value) == (
        "query 7-2 (its line, and its number there) and its longest candidate need 14 positions without the passage; "
        "the model has 13"
    )


def test_texts_are_encoded_in_parts_and_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    class Watched(Letters):
        def encode(self, texts: list[str]) -> list[list[int]]:
            seen.append(texts)
            return super().encode(texts)

    many = [query("a b", "b a"), query("b c", "c"), query("d e", "d")]
    whole = record.training(many, Letters(), 512, 9)
    monkeypatch.setattr(record, "_AT_ONCE", 3)
    assert record.training(many, Watched(), 512, 9) == whole
    assert seen == [["passage", "who ", " then", "b", "a", "c"], ["passage", "who ", " then", "d", "e"]]


def rows(count: int, division: Literal["closed", "open"] = "open", batch: int = 4, seed: int = 0) -> ClozeRows:
    train = [replace(SHORT, context=(2, *[5] * (i * 7 % 10), 3, 0)) for i in range(count)]
    held = [replace(SHORT, context=(2, *[5] * length, 3, 0)) for length in (1, 4, 4, 2)]
    return ClozeRows(train, held, division, batch, seed, START, END)


def test_an_epoch_has_every_sample_once_and_the_next_another_order() -> None:
    found = rows(12)
    epochs = [[key for step in range(start, start + 3) for key in found.batch(step)] for start in (0, 3, 6)]
    assert [sorted(one) for one in epochs] == [list(range(12))] * 3
    assert len({tuple(sorted(found.batch(step))) for step in (0, 3, 6)}) == 3
    assert [rows(12).batch(step) for step in range(9)] == [found.batch(step) for step in range(9)]
    assert [rows(12, seed=1).batch(step) for step in range(9)] != [found.batch(step) for step in range(9)]
    # The order is drawn whatever the division, so that both learn from the same samples.
    assert [sorted(rows(12, "closed").batch(step)) for step in range(9)] == [sorted(found.batch(step)) for step in range(9)]


def test_a_batch_goes_over_the_end_of_an_epoch() -> None:
    found = rows(6)
    keys = [key for step in range(3) for key in found.batch(step)]
    assert Counter(keys) == dict.fromkeys(range(6), 2)
    assert Counter(rows(3, batch=7).batch(0)).most_common()[0][1] == 3


def test_lengths_are_sorted_inside_a_batch_and_nowhere_else() -> None:
    found = rows(40, batch=8)
    sizes = [[found.size(key, held=False) for key in found.batch(step)] for step in range(5)]
    assert all(one == sorted(one, reverse=True) and len(set(one)) > 1 for one in sizes)
    assert all(sizes[i][-1] < sizes[i + 1][0] for i in range(4))
    ties = [key for key in found.batch(0) if found.size(key, held=False) == sizes[0][0]]
    assert ties == sorted(ties)


@pytest.mark.parametrize(("division", "sizes"), [("open", [10, 13, 13, 11]), ("closed", [18, 27, 27, 21])])
def test_evaluation_is_all_of_it_the_longest_first(division: Literal["closed", "open"], sizes: list[int]) -> None:
    found = rows(3, division)
    assert found.held_out() == [1, 2, 3, 0]
    assert [found.size(key, held=True) for key in range(4)] == sizes
    assert [found.pack([key], held=True).counts["tokens"] for key in range(4)] == sizes
    assert found.sample(3, held=True).context == (2, 5, 5, 3, 0)
    assert found.sample(2, held=False).context == (2, *[5] * 4, 3, 0)
    both = found.pack([3, 0], held=True)
    assert both.counts["tokens"] == sizes[3] + sizes[0]
    assert both.contexts == ([5] * 3 + [4] * 3 if division == "closed" else [5, 4])


def test_rows_that_are_none() -> None:
    with pytest.raises(RequestError, match="no samples to train on; allowed: 1 or more"):
        ClozeRows([], [SHORT], "open", 1, 0, START, END)
    with pytest.raises(RequestError, match="a global batch of 0 samples; allowed: 1 or more"):
        ClozeRows([SHORT], [SHORT], "open", 0, 0, START, END)


def test_a_fingerprint_sees_texts_order_set_and_vocabulary() -> None:
    one, two = query("a b", "b"), query("a c", "c", "2-1")
    base = record.fingerprint([one], [two], Letters())
    assert len(base) == 64
    assert record.fingerprint([replace(one, name="9-9")], [two], Letters(source="other")) == base
    others = [
        record.fingerprint([two], [one], Letters()),
        record.fingerprint([one, two], [], Letters()),
        record.fingerprint([one], [two], Letters(sha256="1" * 64)),
        *(
            record.fingerprint([replace(one, **{name: value})], [two], Letters())
            for name, value in [
                ("passage", "x"),
                ("query", "@placeholder x"),
                ("entities", ("a", "b", "c")),
                ("answers", ("a",)),
            ]
        ),
    ]
    assert len({base, *others}) == len(others) + 1


@pytest.fixture(scope="module")
def bert(data_dir: Path) -> WordPieces:
    return tokenizer.load_pieces([data_dir / "tokenizers" / "bert-large-uncased"])


@pytest.fixture(scope="module")
def real(data_dir: Path) -> list[Query]:
    names = ("train32", "dev32", "explorer123")
    return [one for name in names for one in superglue.read(data_dir / "record" / f"record_{name}.jsonl")]


@pytest.mark.parametrize(
    ("division", "learned", "held"),
    [
        ("closed", (590_569, 2087, 143_081_852, 143_092_196), (505_481, 2703, 123_793_508, 123_802_340)),
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
    """The figures of the design: 283 examples of 187 queries, of 2,087 tokens closed and 263 open."""
    train, shortened = record.training(real, bert, 512, 9)
    ask, asked_shortened = record.evaluation(real, bert, 512)
    assert (len(train), len(ask), shortened, asked_shortened) == (283, 187, 0, 0)
    assert (sum(len(one.candidates) for one in train), sum(len(one.candidates) for one in ask)) == (2460, 2083)
    assert max(len(one.context) for one in ask) == 406
    found = ClozeRows(train, ask, division, 8, 0, bert.vocab, bert.vocab + 1)
    for keys, is_held, figures, logits in ((range(283), False, learned, 7655), (range(187), True, held, 6497)):
        counts = found.pack(list(keys), is_held).counts
        assert counts["tokens"] == sum(found.size(key, is_held) for key in keys)
        assert (counts["tokens"], round(counts["tokens"] / len(keys)), counts["pairs"], counts["square"]) == figures
        assert (counts["logits"], counts["samples"], counts["padded"]) == (logits, len(keys), 0)


def test_real_rows_that_are_shortened(real: list[Query], bert: WordPieces) -> None:
    whole = record.evaluation(real, bert, 512)[0]
    found, shortened = record.evaluation(real, bert, 256)
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


MADE = MadeCloze(queries=300, held_out=60, entities=4, seed=3)


def test_made_queries_ask_for_the_one_that_is_named_most() -> None:
    train, held = made.make(MADE)
    assert (len(train), len(held)) == (300, 60)
    assert len({(one.passage, one.query) for one in train + held}) == 360
    for one in train + held:
        times = {entity: one.passage.count(entity) for entity in one.entities}
        assert one.entities == tuple(sorted(set(one.entities)))
        assert len(one.entities) == 4
        assert {entity for entity, count in times.items() if count == 4} == set(one.answers)
        assert {count for entity, count in times.items() if entity not in one.answers} == {1}
        assert one.query.count("@placeholder") == 1
    assert Counter(len(one.answers) for one in train + held).keys() == {1, 2}
    # Neither the first nor the last name gives the answer away.
    for at in (str.startswith, str.endswith):
        assert 0.2 < sum(at(one.passage, one.answers) for one in train) / 300 < 0.8


def test_made_queries_are_the_same_each_time_and_other_with_another_seed() -> None:
    assert made.make(MADE) == made.make(MADE)
    other = made.make(MADE.model_copy(update={"seed": 4}))
    assert other != made.make(MADE)
    more = made.make(MADE.model_copy(update={"held_out": 70}))
    assert more[0] == made.make(MADE)[0]
    assert [one.name for one in more[0][:2]] == ["made-1", "made-2"]


def test_no_two_made_queries_are_alike() -> None:
    """With two candidates there are so few of the shortest that some would be."""
    train, held = made.make(MadeCloze(queries=6000, held_out=1000, entities=2))
    assert len({(one.passage, one.query) for one in train + held}) == 7000


@pytest.mark.parametrize("entities", [2, 3, 12])
def test_made_queries_of_other_sizes(entities: int) -> None:
    train, held = made.make(MadeCloze(queries=40, held_out=10, entities=entities))
    assert {len(one.entities) for one in train + held} == {entities}
    assert all(set(one.answers) < set(one.entities) for one in train + held)


def test_there_are_so_many_names() -> None:
    with pytest.raises(RequestError) as caught:
        made.make(MadeCloze(queries=2, held_out=1, entities=13))
    assert str(caught.value) == "question.data.made.entities=13; allowed: 2 to 12, the names there are"


def test_the_made_vocabulary() -> None:
    words = ClozeTokenizer(62)
    assert (words.vocab, words.source, words.end, words.pad, words.cls, words.mask) == (62, "made", None, 0, 1, 2)
    assert len(words.sha256) == 64
    assert words.sha256 == ClozeTokenizer(62).sha256 != ClozeTokenizer(63).sha256
    assert words.encode(["Mira Jonas", "Old  Mill", "elsewhere", ""]) == [[4, 5], [13, 14], [3], []]
    found = {i for one in made.make(MADE)[0] for i in words.encode([one.passage])[0]}
    assert 3 not in found
    assert max(found) < ClozeTokenizer(31).vocab
    with pytest.raises(RequestError) as caught:
        ClozeTokenizer(30)
    assert str(caught.value) == "a made vocabulary of 30 pieces; allowed: 31 or more, all words of the made task"


def test_made_queries_are_read_with_the_made_vocabulary() -> None:
    """No word is unknown, nothing is shortened, and some candidates have two tokens."""
    train, held = made.make(MADE)
    words: WordPieces = ClozeTokenizer(62)
    learned, shortened = record.training(train, words, 64, 9)
    asked, asked_shortened = record.evaluation(held, words, 64)
    assert (shortened, asked_shortened) == (0, 0)
    assert len(learned) == sum(len(one.answers) for one in train) > 300
    assert not any(3 in one.context for one in learned + asked)
    assert {len(piece) for one in learned + asked for piece in one.candidates} == {1, 2}
    assert len({one.mask for one in asked}) > 5
    assert [len(one.right) for one in asked] == [len(one.answers) for one in held]
