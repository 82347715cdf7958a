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

SETTINGS = GeneratedClozeConfig(queries=300, held_out=60, entities=4, seed=3)


def test_generated_queries_ask_for_the_most_frequent_entity() -> None:
    train, held_out = generated.generate_queries(SETTINGS)
    assert (len(train), len(held_out)) == (300, 60)
    assert len({(example.passage, example.query) for example in train + held_out}) == 360
    for example in train + held_out:
        counts = {entity: example.passage.count(entity) for entity in example.entities}
        assert example.entities == tuple(sorted(set(example.entities)))
        assert len(example.entities) == 4
        assert {entity for entity, count in counts.items() if count == 4} == set(example.answers)
        assert {count for entity, count in counts.items() if entity not in example.answers} == {1}
        assert example.query.count("@placeholder") == 1
    assert Counter(len(example.answers) for example in train + held_out).keys() == {1, 2}
    # Neither the first nor the last name of a passage gives the answer away: an answer is there in
    # 20 % to 80 % of the queries.
    for is_at_edge in (str.startswith, str.endswith):
        assert (
            0.2 < sum(is_at_edge(example.passage, example.answers) for example in train) / 300 < 0.8
        )


def test_generated_queries_are_seeded() -> None:
    assert generated.generate_queries(SETTINGS) == generated.generate_queries(SETTINGS)
    other_seed = generated.generate_queries(SETTINGS.model_copy(update={"seed": 4}))
    assert other_seed != generated.generate_queries(SETTINGS)
    more_held_out = generated.generate_queries(SETTINGS.model_copy(update={"held_out": 70}))
    assert more_held_out[0] == generated.generate_queries(SETTINGS)[0]
    assert [example.name for example in more_held_out[0][:2]] == ["made-1", "made-2"]


def test_no_two_generated_queries_are_equal() -> None:
    """With two entities there are so few of the shortest passages that drawing alone would repeat
    some.
    """
    train, held_out = generated.generate_queries(
        GeneratedClozeConfig(queries=6000, held_out=1000, entities=2)
    )
    assert len({(example.passage, example.query) for example in train + held_out}) == 7000


@pytest.mark.parametrize("entities", [2, 3, 12])
def test_generated_queries_have_the_given_number_of_entities(entities: int) -> None:
    train, held_out = generated.generate_queries(
        GeneratedClozeConfig(queries=40, held_out=10, entities=entities)
    )
    assert {len(example.entities) for example in train + held_out} == {entities}
    assert all(set(example.answers) < set(example.entities) for example in train + held_out)


def test_more_entities_than_names_are_refused() -> None:
    with pytest.raises(RequestError) as error:
        generated.generate_queries(GeneratedClozeConfig(queries=2, held_out=1, entities=13))
    assert (
        str(error.value) == "question.data.made.entities=13; allowed: 2 to 12, the number of names"
    )


def test_the_cloze_tokenizer_by_hand() -> None:
    vocabulary = GeneratedClozeTokenizer(62)
    assert (
        vocabulary.vocab,
        vocabulary.source,
        vocabulary.end,
        vocabulary.pad,
        vocabulary.cls,
        vocabulary.mask,
    ) == (62, "made", None, 0, 1, 2)
    assert len(vocabulary.sha256) == 64
    assert (
        vocabulary.sha256
        == GeneratedClozeTokenizer(62).sha256
        != GeneratedClozeTokenizer(63).sha256
    )
    assert vocabulary.encode(["Mira Jonas", "Old  Mill", "elsewhere", ""]) == [
        [4, 5],
        [13, 14],
        [3],
        [],
    ]
    passage_ids = {
        token
        for example in generated.generate_queries(SETTINGS)[0]
        for token in vocabulary.encode([example.passage])[0]
    }
    assert 3 not in passage_ids
    assert max(passage_ids) < GeneratedClozeTokenizer(31).vocab
    with pytest.raises(RequestError) as error:
        GeneratedClozeTokenizer(30)
    assert str(error.value) == golden("made-vocabulary-of-30-pieces-allowed")


def test_generated_queries_are_encoded_with_the_cloze_tokenizer() -> None:
    """No word is unknown, nothing is shortened, and some candidates have two tokens."""
    train, held_out = generated.generate_queries(SETTINGS)
    vocabulary: WordPieces = GeneratedClozeTokenizer(62)
    training, training_shortened = record.make_training_samples(train, vocabulary, 64, 9)
    evaluation, evaluation_shortened = record.make_evaluation_samples(held_out, vocabulary, 64)
    assert (training_shortened, evaluation_shortened) == (0, 0)
    assert len(training) == sum(len(example.answers) for example in train) > 300
    assert not any(3 in example.context for example in training + evaluation)
    assert {len(piece) for example in training + evaluation for piece in example.candidates} == {
        1,
        2,
    }
    assert len({example.mask for example in evaluation}) > 5
    assert [len(example.right) for example in evaluation] == [
        len(example.answers) for example in held_out
    ]
