"""Test the generated queries of the cloze task and the tokenizer that encodes them."""

from collections import Counter

import pytest

from fixtures.golden import golden
from steelyard.data.tokenizer import WordPieces
from steelyard.errors import RequestError
from steelyard.tasks.superglue_record import data as record
from steelyard.tasks.superglue_record import generated
from steelyard.tasks.superglue_record.generated import GeneratedClozeTokenizer
from steelyard.tasks.superglue_record.task import GeneratedClozeConfig

MADE = GeneratedClozeConfig(queries=300, held_out=60, entities=4, seed=3)


def test_made_queries_ask_for_the_one_that_is_named_most() -> None:
    train, held = generated.generate_queries(MADE)
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
    # Neither the first nor the last name of a passage gives the answer away: an answer is there in
    # 20 % to 80 % of the queries.
    for at in (str.startswith, str.endswith):
        assert 0.2 < sum(at(one.passage, one.answers) for one in train) / 300 < 0.8


def test_made_queries_are_the_same_each_time_and_other_with_another_seed() -> None:
    assert generated.generate_queries(MADE) == generated.generate_queries(MADE)
    other = generated.generate_queries(MADE.model_copy(update={"seed": 4}))
    assert other != generated.generate_queries(MADE)
    more = generated.generate_queries(MADE.model_copy(update={"held_out": 70}))
    assert more[0] == generated.generate_queries(MADE)[0]
    assert [one.name for one in more[0][:2]] == ["made-1", "made-2"]


def test_no_two_made_queries_are_alike() -> None:
    """With two entities there are so few of the shortest passages that drawing alone would repeat
    some.
    """
    train, held = generated.generate_queries(
        GeneratedClozeConfig(queries=6000, held_out=1000, entities=2)
    )
    assert len({(one.passage, one.query) for one in train + held}) == 7000


@pytest.mark.parametrize("entities", [2, 3, 12])
def test_made_queries_of_other_sizes(entities: int) -> None:
    train, held = generated.generate_queries(
        GeneratedClozeConfig(queries=40, held_out=10, entities=entities)
    )
    assert {len(one.entities) for one in train + held} == {entities}
    assert all(set(one.answers) < set(one.entities) for one in train + held)


def test_there_are_so_many_names() -> None:
    with pytest.raises(RequestError) as caught:
        generated.generate_queries(GeneratedClozeConfig(queries=2, held_out=1, entities=13))
    assert (
        str(caught.value) == "question.data.made.entities=13; allowed: 2 to 12, the names there are"
    )


def test_the_made_vocabulary() -> None:
    words = GeneratedClozeTokenizer(62)
    assert (words.vocab, words.source, words.end, words.pad, words.cls, words.mask) == (
        62,
        "made",
        None,
        0,
        1,
        2,
    )
    assert len(words.sha256) == 64
    assert words.sha256 == GeneratedClozeTokenizer(62).sha256 != GeneratedClozeTokenizer(63).sha256
    assert words.encode(["Mira Jonas", "Old  Mill", "elsewhere", ""]) == [[4, 5], [13, 14], [3], []]
    found = {
        i for one in generated.generate_queries(MADE)[0] for i in words.encode([one.passage])[0]
    }
    assert 3 not in found
    assert max(found) < GeneratedClozeTokenizer(31).vocab
    with pytest.raises(RequestError) as caught:
        GeneratedClozeTokenizer(30)
    assert str(caught.value) == golden("made-vocabulary-of-30-pieces-allowed")


def test_made_queries_are_read_with_the_made_vocabulary() -> None:
    """No word is unknown, nothing is shortened, and some candidates have two tokens."""
    train, held = generated.generate_queries(MADE)
    words: WordPieces = GeneratedClozeTokenizer(62)
    learned, shortened = record.make_training_samples(train, words, 64, 9)
    asked, asked_shortened = record.make_evaluation_samples(held, words, 64)
    assert (shortened, asked_shortened) == (0, 0)
    assert len(learned) == sum(len(one.answers) for one in train) > 300
    assert not any(3 in one.context for one in learned + asked)
    assert {len(piece) for one in learned + asked for piece in one.candidates} == {1, 2}
    assert len({one.mask for one in asked}) > 5
    assert [len(one.right) for one in asked] == [len(one.answers) for one in held]
