"""Test alpaca's samples and packed rows worked out by hand, batches and epochs, fingerprints, and
generated conversations.
"""

import hashlib
import itertools
import re
from collections import Counter

import numpy as np
import pytest

from fixtures.alpaca import TableTokenizer
from fixtures.golden import golden
from steelyard.data import counting
from steelyard.data.tokenizer import WordHashTokenizer
from steelyard.data.training_rows import IGNORED, TrainingRows
from steelyard.errors import RequestError
from steelyard.tasks.alpaca import data
from steelyard.tasks.alpaca.data import Conversation, ConversationRows, ConversationSample
from steelyard.tasks.alpaca.task import GeneratedConversationsConfig


def make_conversation(*texts: str, instruction: str = "") -> Conversation:
    """Return a conversation whose texts are alternately the human's and the assistant's."""
    return Conversation(
        tuple(zip(itertools.cycle(("human", "assistant")), texts, strict=False)), instruction
    )


# Begin token, header, the human's tag, " cat", newline, the assistant's tag, " dog", "s", newline,
# end token; the second tuple marks the tokens that are targets of training.
SHORT_SAMPLE = ConversationSample(
    (1, 10, 12, 15, 14, 13, 16, 19, 14, 2), (False,) * 6 + (True,) * 4
)
TWO_ANSWER_SAMPLE = ConversationSample(
    (1, 10, 11, 17, 14, 12, 16, 14, 13, 15, 14, 12, 17, 14, 13, 18, 14, 2),
    (False,) * 9 + (True,) * 2 + (False,) * 4 + (True,) * 3,
)
UNANSWERED_SAMPLE = ConversationSample(
    (1, 10, 12, 15, 14, 13, 16, 14, 12, 17, 14, 2), (False,) * 6 + (True,) * 2 + (False,) * 4
)
CONVERSATIONS = [
    make_conversation("cat", "dogs"),
    make_conversation("dog", "cat", "mouse", "", instruction="mouse"),
    make_conversation("cat", "dog", "mouse"),
]


def test_conversations_are_encoded_as_worked_out_by_hand() -> None:
    assert data.encode_conversations(CONVERSATIONS, TableTokenizer(), 18) == (
        [SHORT_SAMPLE, TWO_ANSWER_SAMPLE, UNANSWERED_SAMPLE],
        0,
    )
    assert data.count_totals([SHORT_SAMPLE, TWO_ANSWER_SAMPLE, UNANSWERED_SAMPLE]) == {
        "samples": 3,
        "tokens": 40,
        "learned": 11,
        "longest": 18,
        "mean": 40 / 3,
    }
    assert data.count_totals([]) == {
        "samples": 0,
        "tokens": 0,
        "learned": 0,
        "longest": 0,
        "mean": 0.0,
    }


@pytest.mark.parametrize(
    ("begin", "close"),
    [((), ()), ((), (2,)), ((1,), (2,)), ((2,), ()), ((2,), (2,)), ((5, 6), (7, 8)), ((2, 2), ())],
)
def test_begin_and_end_tokens_of_a_tokenizer_appear_once(
    begin: tuple[int, ...], close: tuple[int, ...]
) -> None:
    expected = ConversationSample(
        (*begin, *SHORT_SAMPLE.tokens[1:]), (*(False for _ in begin), *SHORT_SAMPLE.learned[1:])
    )
    assert data.encode_conversations(
        [CONVERSATIONS[0]], TableTokenizer(begin=begin, close=close), 18
    ) == ([expected], 0)


def test_a_tokenizer_whose_begin_tokens_vary_is_refused() -> None:
    class VaryingTokenizer(TableTokenizer):
        def encode(self, texts: list[str]) -> list[list[int]]:
            return [[1, 3] if len(text) < 2 else [3] for text in texts]

    with pytest.raises(RequestError) as error:
        data.encode_conversations(CONVERSATIONS, VaryingTokenizer(), 18)
    assert str(error.value) == (golden("tokenizer-words-does-not-begin-and"))


def test_a_tokenizer_without_an_end_token_is_refused() -> None:
    with pytest.raises(RequestError) as error:
        data.encode_conversations(CONVERSATIONS, TableTokenizer(end=None), 18)
    assert str(error.value) == (golden("tokenizer-words-does-not-say-which"))


def test_a_long_sample_is_truncated_and_dropped_if_no_target_remains() -> None:
    assert data.encode_conversations(CONVERSATIONS, TableTokenizer(), 17) == (
        [
            SHORT_SAMPLE,
            ConversationSample(TWO_ANSWER_SAMPLE.tokens[:17], TWO_ANSWER_SAMPLE.learned[:17]),
            UNANSWERED_SAMPLE,
        ],
        1,
    )
    truncated = [
        ConversationSample(sample.tokens[:9], sample.learned[:9])
        for sample in (SHORT_SAMPLE, UNANSWERED_SAMPLE)
    ]
    assert data.encode_conversations(CONVERSATIONS, TableTokenizer(), 9) == (
        truncated,
        3,
    )  # the first nine tokens of the second sample hold no target
    assert data.encode_conversations(CONVERSATIONS, TableTokenizer(), 7) == (
        [
            ConversationSample(sample.tokens[:7], sample.learned[:7])
            for sample in (SHORT_SAMPLE, UNANSWERED_SAMPLE)
        ],
        3,
    )
    assert data.encode_conversations(CONVERSATIONS, TableTokenizer(), 6) == ([], 3)


def test_a_truncated_sample_may_keep_the_target_after_its_last_token() -> None:
    """With `last_target`, as in the published program, a row of n tokens has n targets if its
    sample has more than n tokens.
    """
    samples = [SHORT_SAMPLE, TWO_ANSWER_SAMPLE, UNANSWERED_SAMPLE]

    def truncate(number: int, length: int, next_target: int | None) -> ConversationSample:
        """Return sample `number` truncated to `length` tokens, with the target that follows the
        last of them.
        """
        return ConversationSample(
            samples[number].tokens[:length], samples[number].learned[:length], next_target
        )

    assert data.encode_conversations(CONVERSATIONS, TableTokenizer(), 18, last_target=True) == (
        samples,
        0,
    )
    # 17 tokens have the 17 targets of a sample of 18, so nothing counts as shortened
    assert data.encode_conversations(CONVERSATIONS, TableTokenizer(), 17, last_target=True) == (
        [SHORT_SAMPLE, truncate(1, 17, 2), UNANSWERED_SAMPLE],
        0,
    )
    assert data.encode_conversations(CONVERSATIONS, TableTokenizer(), 16, last_target=True) == (
        [SHORT_SAMPLE, truncate(1, 16, 14), UNANSWERED_SAMPLE],
        1,
    )
    # The tenth token of each sample: the end token (2), the first token of an answer (15), and one
    # that is no target (None).
    assert data.encode_conversations(CONVERSATIONS, TableTokenizer(), 9, last_target=True) == (
        [truncate(0, 9, 2), truncate(1, 9, 15), truncate(2, 9, None)],
        2,
    )
    assert data.encode_conversations(CONVERSATIONS, TableTokenizer(), 6, last_target=True) == (
        [truncate(0, 6, 16), truncate(2, 6, 16)],
        3,
    )
    assert data.encode_conversations(CONVERSATIONS, TableTokenizer(), 5, last_target=True) == (
        [],
        3,
    )
    assert data.count_totals([truncate(1, 9, 15)]) == {
        "samples": 1,
        "tokens": 9,
        "learned": 1,
        "longest": 9,
        "mean": 9.0,
    }


def test_the_row_of_a_truncated_sample_by_hand() -> None:
    ignored = IGNORED
    (with_target,), _ = data.encode_conversations(
        CONVERSATIONS[:1], TableTokenizer(), 8, last_target=True
    )
    row = ConversationRows([with_target], 8, 1, 0, 0).row((0,))
    assert row.tokens.tolist() == [1, 10, 12, 15, 14, 13, 16, 19]
    assert row.targets.tolist() == [ignored] * 5 + [16, 19, 14]
    assert (row.lens, row.real, row.samples) == ((8,), 8, 1)
    (without_target,), _ = data.encode_conversations(CONVERSATIONS[:1], TableTokenizer(), 8)
    assert ConversationRows([without_target], 8, 1, 0, 0).row((0,)).targets.tolist() == [
        ignored
    ] * 5 + [16, 19, ignored]
    assert [
        counting.count_row(ConversationRows([sample], 8, 1, 0, 0).row((0,)))["logits"]
        for sample in (without_target, with_target)
    ] == [2, 3]
    # packed in one row, the target after the first sample's end does not reach into the second
    packed_row = ConversationRows([with_target, without_target], 18, 2, 0, 0).row((0, 1))
    assert (
        packed_row.targets.tolist()
        == [ignored] * 5 + [16, 19, 14] + [ignored] * 5 + [16, 19, ignored] + [ignored] * 2
    )


def test_chunked_encoding_equals_encoding_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    conversations = data.generate_conversations(GeneratedConversationsConfig(conversations=40))
    encoded = data.encode_conversations(conversations, WordHashTokenizer(512), 256)
    monkeypatch.setattr(data, "_ENCODE_BATCH", 7)
    assert data.encode_conversations(conversations, WordHashTokenizer(512), 256) == encoded
    assert [
        data.encode_conversations([conversation], WordHashTokenizer(512), 256)[0][0]
        for conversation in conversations
    ] == encoded[0]


def test_a_packed_row_by_hand() -> None:
    rows = ConversationRows([SHORT_SAMPLE, TWO_ANSWER_SAMPLE, UNANSWERED_SAMPLE], 32, 3, 0, 0)
    assert rows.batch(0) == [(1, 2), (0,)]
    row = rows.row((1, 2))
    assert row.tokens.tolist() == [*TWO_ANSWER_SAMPLE.tokens, *UNANSWERED_SAMPLE.tokens, 0, 0]
    ignored = IGNORED
    assert row.targets.tolist() == (
        [ignored] * 8
        + [15, 14]
        + [ignored] * 4
        + [18, 14, 2, ignored]
        + [ignored] * 5
        + [16, 14]
        + [ignored] * 5
        + [ignored, ignored]
    )
    assert (row.lens, row.real, row.samples) == ((18, 12, 2), 30, 2)
    assert row.tokens.dtype == row.targets.dtype == np.int64
    full_row = ConversationRows(
        [SHORT_SAMPLE, TWO_ANSWER_SAMPLE, UNANSWERED_SAMPLE], 30, 3, 0, 0
    ).row((1, 2))
    assert (full_row.lens, full_row.real, full_row.samples, len(full_row.tokens)) == (
        (18, 12),
        30,
        2,
        30,
    )


def test_first_fit_decreasing_by_hand() -> None:
    lengths = dict(enumerate([3, 7, 5, 2, 6, 4, 2, 10, 3]))
    expected = [(7,), (1, 0), (4, 5), (2, 8, 3), (6,)]
    for order in ([*lengths], [*reversed(lengths)], sorted(lengths, key=lambda i: i * 5 % 9)):
        assert data.pack_first_fit(lengths, order, 10) == expected
    assert data.pack_first_fit({3: 4}, [3, 3, 3], 10) == [(3, 3), (3,)]
    assert data.pack_first_fit({}, [], 10) == []


@pytest.fixture(scope="module")
def samples() -> list[ConversationSample]:
    """Return the encoded samples of 101 generated conversations, none longer than 200 tokens."""
    return data.encode_conversations(
        data.generate_conversations(GeneratedConversationsConfig(conversations=101, seed=4)),
        WordHashTokenizer(512),
        200,
    )[0]


def flatten(keys: list[tuple[int, ...]]) -> list[int]:
    """Return the sample numbers of all row keys in one list."""
    return [sample for key in keys for sample in key]


def test_a_packed_batch_holds_each_of_its_samples_once_and_whole(
    samples: list[ConversationSample],
) -> None:
    rows: TrainingRows = ConversationRows(samples, 200, 16, 3, 5)
    same_rows = ConversationRows(samples, 200, 16, 3, 5)
    for step in (0, 1, 2, 11):
        keys = rows.batch(step)
        assert keys == same_rows.batch(step) == rows.batch(step)
        unpacked = ConversationRows(samples, 200, 16, 3, 5, pack=False).batch(step)
        assert sorted(flatten(keys)) == sorted(flatten(unpacked))
        assert len(flatten(keys)) == 16 > len(keys)
        for key in keys:
            row, start = rows.row(key), 0
            assert len(row.tokens) == len(row.targets) == sum(row.lens) == 200
            for i, size in zip(key, row.lens, strict=False):
                assert tuple(row.tokens[start : start + size]) == samples[i].tokens
                learned_tokens = [
                    token
                    for token, learned in zip(samples[i].tokens, samples[i].learned, strict=True)
                    if learned
                ]
                targets = row.targets[start : start + size]
                assert targets[targets != IGNORED].tolist() == learned_tokens
                assert targets[-1] == IGNORED
                start += size
            assert (start, len(key)) == (row.real, row.samples)
            assert set(row.targets[start:]) <= {IGNORED}
            assert set(row.tokens[start:]) <= {0}


def test_without_packing_every_sample_is_a_row(samples: list[ConversationSample]) -> None:
    rows = ConversationRows(samples, 200, 16, 3, 5, pack=False)
    for key in rows.batch(0) + rows.held_out():
        (i,), row = key, rows.row(key)
        size = len(samples[i].tokens)
        assert (row.lens, row.real, row.samples) == ((size, 200 - size), size, 1)
    assert len(rows.batch(0)) == 16
    assert len(rows.held_out()) == 5


@pytest.mark.parametrize("pack", [True, False])
def test_held_out_samples_are_never_trained_on_and_the_others_once_an_epoch(
    samples: list[ConversationSample], pack: bool
) -> None:
    rows = ConversationRows(samples, 200, 16, 3, 5, pack)
    held_out = flatten(rows.held_out())
    assert len(set(held_out)) == len(held_out) == 5
    epochs = [
        flatten([key for step in range(6 * epoch, 6 * epoch + 6) for key in rows.batch(step)])
        for epoch in range(3)
    ]
    for epoch_samples in epochs:  # 101 samples, 5 of them held out: 96 make six batches of 16
        assert sorted(epoch_samples + held_out) == list(range(101))
    assert len({tuple(epoch_samples) for epoch_samples in epochs}) == 3


def test_a_batch_continues_into_the_next_epoch(samples: list[ConversationSample]) -> None:
    rows = ConversationRows(samples[:10], 200, 4, 0, 1, pack=False)
    order = flatten([key for step in range(9) for key in rows.batch(step)])
    assert [Counter(order[start : start + 9]) for start in (0, 9, 18, 27)] == [
        Counter(set(order))
    ] * 4
    large_batch = ConversationRows(samples[:10], 200, 36, 0, 1)
    assert sorted(flatten(large_batch.batch(0))) == sorted(order)
    assert [large_batch.row(key).samples for key in large_batch.batch(0)] == [
        len(key) for key in large_batch.batch(0)
    ]


def test_another_seed_gives_other_batches_and_held_out_samples(
    samples: list[ConversationSample],
) -> None:
    seed_0, seed_1 = (ConversationRows(samples, 200, 16, seed, 20) for seed in (0, 1))
    assert seed_0.batch(0) != seed_1.batch(0)
    assert seed_0.held_out() != seed_1.held_out()
    assert set(flatten(ConversationRows(samples, 200, 16, 0, 5).held_out())) < set(
        flatten(seed_0.held_out())
    )


@pytest.mark.parametrize(
    ("count", "length", "batch", "held_out", "reason"),
    [
        (3, 17, 1, 0, "a sample has 18 tokens; a row has 17, and no sample is split"),
        (3, 18, 1, 3, "3 samples, and 3 to hold out; at least one is to be trained on"),
        (0, 18, 1, 0, "0 samples, and 0 to hold out; at least one is to be trained on"),
        (3, 18, 1, -1, "3 samples, and -1 to hold out; at least one is to be trained on"),
        (3, 18, 0, 0, "a global batch of 0 samples; allowed: 1 or more"),
    ],
)
def test_impossible_row_settings_are_refused(
    count: int, length: int, batch: int, held_out: int, reason: str
) -> None:
    with pytest.raises(RequestError) as error:
        ConversationRows(
            [SHORT_SAMPLE, TWO_ANSWER_SAMPLE, UNANSWERED_SAMPLE][:count], length, batch, 0, held_out
        )
    assert str(error.value) == reason


def test_a_fingerprint_depends_on_texts_order_and_vocabulary() -> None:
    expected = hashlib.sha256(
        b'%b["",[["human","a"],["assistant","\xc3\xa9"]]]["b",[["human","c"],["assistant",""]]]'
        % (b"0" * 64)
    ).hexdigest()
    conversations = [make_conversation("a", "é"), make_conversation("c", "", instruction="b")]
    assert data.fingerprint_conversations(conversations, TableTokenizer()) == expected
    changed = [
        conversations[::-1],
        conversations[:1],
        [conversations[0], make_conversation("c", "")],
        [make_conversation("a", "e"), conversations[1]],
    ]
    assert expected not in [
        data.fingerprint_conversations(conversations_changed, TableTokenizer())
        for conversations_changed in changed
    ]
    assert expected != data.fingerprint_conversations(
        conversations, TableTokenizer(sha256="1" * 64)
    )


def test_generated_conversations_are_seeded_and_answers_repeat_words_of_the_question() -> None:
    generated = data.generate_conversations(GeneratedConversationsConfig(conversations=600, seed=2))
    assert generated == data.generate_conversations(
        GeneratedConversationsConfig(conversations=600, seed=2)
    )
    assert generated[:100] == data.generate_conversations(
        GeneratedConversationsConfig(conversations=100, seed=2)
    )
    assert generated != data.generate_conversations(
        GeneratedConversationsConfig(conversations=600, seed=3)
    )
    assert len(set(generated)) == len(generated) == 600
    assert {len(conversation.turns) for conversation in generated} == {2, 4}
    for conversation in generated:
        assert [role for role, _ in conversation.turns] == ["human", "assistant"] * (
            len(conversation.turns) // 2
        )
        for (_, question), (_, answer) in zip(
            conversation.turns[::2], conversation.turns[1::2], strict=True
        ):
            assert set(answer.split()) <= set(re.findall(r"\w+", question))


def test_generated_instructions_have_inputs_after_the_separator() -> None:
    newline_joined, wide_joined = (
        data.generate_conversations(GeneratedConversationsConfig(conversations=200), separator)
        for separator in ("\n", "\n\n\n")
    )
    assert newline_joined == data.generate_conversations(
        GeneratedConversationsConfig(conversations=200)
    )
    questions = [
        [text for conversation in generated for role, text in conversation.turns if role == "human"]
        for generated in (newline_joined, wide_joined)
    ]
    assert [text.replace("\n", "\n\n\n") for text in questions[0]] == questions[1]
    assert sum("\n\n\n" in text for text in questions[1]) > 20


def test_generated_answers_are_tokens_of_the_question() -> None:
    generated = data.generate_conversations(GeneratedConversationsConfig(conversations=50))
    tokenizer = WordHashTokenizer(512)
    encoded, shortened = data.encode_conversations(generated, tokenizer, 256)
    assert shortened == 0
    newline = tokenizer.encode(["\n"])[0][1]
    for sample in encoded:
        assert (sample.tokens[0], sample.tokens[-1], sample.learned[-1]) == (1, 0, True)
        question_tokens = {
            token
            for token, learned in zip(sample.tokens, sample.learned, strict=True)
            if not learned
        }
        answer_tokens = [
            token for token, learned in zip(sample.tokens, sample.learned, strict=True) if learned
        ]
        assert set(answer_tokens) - {0, newline} <= question_tokens
    sizes = [len(sample.tokens) for sample in encoded]
    assert max(sizes) < 128
