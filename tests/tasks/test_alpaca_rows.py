"""Test alpaca's samples and packed rows worked out by hand, batches and epochs, fingerprints, and
generated conversations.
"""

import hashlib
import itertools
import re
from collections import Counter

import numpy as np
import pytest

from fixtures.alpaca import Words
from fixtures.golden import golden
from steelyard.data import counting
from steelyard.data.tokenizer import WordHashTokenizer
from steelyard.data.training_rows import IGNORED, TrainingRows
from steelyard.errors import RequestError
from steelyard.tasks.alpaca import data
from steelyard.tasks.alpaca.data import Conversation, ConversationRows, ConversationSample
from steelyard.tasks.alpaca.task import GeneratedConversationsConfig


def said(*texts: str, instruction: str = "") -> Conversation:
    """Return a conversation whose texts are alternately the human's and the assistant's."""
    return Conversation(
        tuple(zip(itertools.cycle(("human", "assistant")), texts, strict=False)), instruction
    )


# Begin token, header, the human's tag, " cat", newline, the assistant's tag, " dog", "s", newline,
# end token; the second tuple marks the tokens that are targets of training.
ONE = ConversationSample((1, 10, 12, 15, 14, 13, 16, 19, 14, 2), (False,) * 6 + (True,) * 4)
TWO = ConversationSample(
    (1, 10, 11, 17, 14, 12, 16, 14, 13, 15, 14, 12, 17, 14, 13, 18, 14, 2),
    (False,) * 9 + (True,) * 2 + (False,) * 4 + (True,) * 3,
)
OPEN = ConversationSample(
    (1, 10, 12, 15, 14, 13, 16, 14, 12, 17, 14, 2), (False,) * 6 + (True,) * 2 + (False,) * 4
)
BY_HAND = [
    said("cat", "dogs"),
    said("dog", "cat", "mouse", "", instruction="mouse"),
    said("cat", "dog", "mouse"),
]


def test_samples_by_hand() -> None:
    assert data.encode_conversations(BY_HAND, Words(), 18) == ([ONE, TWO, OPEN], 0)
    assert data.count_totals([ONE, TWO, OPEN]) == {
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
def test_what_a_tokenizer_puts_around_a_text_stands_once(
    begin: tuple[int, ...], close: tuple[int, ...]
) -> None:
    expected = ConversationSample(
        (*begin, *ONE.tokens[1:]), (*(False for _ in begin), *ONE.learned[1:])
    )
    assert data.encode_conversations([BY_HAND[0]], Words(begin=begin, close=close), 18) == (
        [expected],
        0,
    )


def test_a_tokenizer_that_begins_texts_unlike_is_refused() -> None:
    class Fickle(Words):
        def encode(self, texts: list[str]) -> list[list[int]]:
            return [[1, 3] if len(text) < 2 else [3] for text in texts]

    with pytest.raises(RequestError) as caught:
        data.encode_conversations(BY_HAND, Fickle(), 18)
    assert str(caught.value) == (golden("tokenizer-words-does-not-begin-and"))


def test_a_tokenizer_without_an_end_is_refused() -> None:
    with pytest.raises(RequestError) as caught:
        data.encode_conversations(BY_HAND, Words(end=None), 18)
    assert str(caught.value) == (golden("tokenizer-words-does-not-say-which"))


def test_a_long_sample_is_cut_at_its_end_and_left_out_if_nothing_is_learned() -> None:
    assert data.encode_conversations(BY_HAND, Words(), 17) == (
        [ONE, ConversationSample(TWO.tokens[:17], TWO.learned[:17]), OPEN],
        1,
    )
    cut = [ConversationSample(one.tokens[:9], one.learned[:9]) for one in (ONE, OPEN)]
    assert data.encode_conversations(BY_HAND, Words(), 9) == (
        cut,
        3,
    )  # the first nine tokens of the second sample hold no target
    assert data.encode_conversations(BY_HAND, Words(), 7) == (
        [ConversationSample(o.tokens[:7], o.learned[:7]) for o in (ONE, OPEN)],
        3,
    )
    assert data.encode_conversations(BY_HAND, Words(), 6) == ([], 3)


def test_a_cut_sample_may_keep_the_target_behind_the_cut() -> None:
    """With `last_target`, as in the published program, a row of n tokens has n targets if its
    sample has more than n tokens.
    """
    whole = [ONE, TWO, OPEN]

    def cut(number: int, length: int, beyond: int | None) -> ConversationSample:
        """Return sample `number` truncated to `length` tokens, with the target that follows the
        last of them.
        """
        return ConversationSample(
            whole[number].tokens[:length], whole[number].learned[:length], beyond
        )

    assert data.encode_conversations(BY_HAND, Words(), 18, last_target=True) == (whole, 0)
    # 17 tokens have the 17 targets of a sample of 18, so nothing counts as shortened
    assert data.encode_conversations(BY_HAND, Words(), 17, last_target=True) == (
        [ONE, cut(1, 17, 2), OPEN],
        0,
    )
    assert data.encode_conversations(BY_HAND, Words(), 16, last_target=True) == (
        [ONE, cut(1, 16, 14), OPEN],
        1,
    )
    # The tenth token of each sample: the end token (2), the first token of an answer (15), and one
    # that is no target (None).
    assert data.encode_conversations(BY_HAND, Words(), 9, last_target=True) == (
        [cut(0, 9, 2), cut(1, 9, 15), cut(2, 9, None)],
        2,
    )
    assert data.encode_conversations(BY_HAND, Words(), 6, last_target=True) == (
        [cut(0, 6, 16), cut(2, 6, 16)],
        3,
    )
    assert data.encode_conversations(BY_HAND, Words(), 5, last_target=True) == ([], 3)
    assert data.count_totals([cut(1, 9, 15)]) == {
        "samples": 1,
        "tokens": 9,
        "learned": 1,
        "longest": 9,
        "mean": 9.0,
    }


def test_the_row_of_a_cut_sample_by_hand() -> None:
    no = IGNORED
    (kept,), _ = data.encode_conversations(BY_HAND[:1], Words(), 8, last_target=True)
    row = ConversationRows([kept], 8, 1, 0, 0).row((0,))
    assert row.tokens.tolist() == [1, 10, 12, 15, 14, 13, 16, 19]
    assert row.targets.tolist() == [no] * 5 + [16, 19, 14]
    assert (row.lens, row.real, row.samples) == ((8,), 8, 1)
    (lost,), _ = data.encode_conversations(BY_HAND[:1], Words(), 8)
    assert ConversationRows([lost], 8, 1, 0, 0).row((0,)).targets.tolist() == [no] * 5 + [
        16,
        19,
        no,
    ]
    assert [
        counting.count_row(ConversationRows([one], 8, 1, 0, 0).row((0,)))["logits"]
        for one in (lost, kept)
    ] == [2, 3]
    # packed in one row, the target after the first sample's end does not reach into the second
    behind = ConversationRows([kept, lost], 18, 2, 0, 0).row((0, 1))
    assert behind.targets.tolist() == [no] * 5 + [16, 19, 14] + [no] * 5 + [16, 19, no] + [no] * 2


def test_many_conversations_are_encoded_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    made = data.generate_conversations(GeneratedConversationsConfig(conversations=40))
    whole = data.encode_conversations(made, WordHashTokenizer(512), 256)
    monkeypatch.setattr(data, "_ENCODE_BATCH", 7)
    assert data.encode_conversations(made, WordHashTokenizer(512), 256) == whole
    assert [
        data.encode_conversations([one], WordHashTokenizer(512), 256)[0][0] for one in made
    ] == whole[0]


def test_a_row_by_hand() -> None:
    rows = ConversationRows([ONE, TWO, OPEN], 32, 3, 0, 0)
    assert rows.batch(0) == [(1, 2), (0,)]
    row = rows.row((1, 2))
    assert row.tokens.tolist() == [*TWO.tokens, *OPEN.tokens, 0, 0]
    no = IGNORED
    assert row.targets.tolist() == (
        [no] * 8 + [15, 14] + [no] * 4 + [18, 14, 2, no] + [no] * 5 + [16, 14] + [no] * 5 + [no, no]
    )
    assert (row.lens, row.real, row.samples) == ((18, 12, 2), 30, 2)
    assert row.tokens.dtype == row.targets.dtype == np.int64
    full = ConversationRows([ONE, TWO, OPEN], 30, 3, 0, 0).row((1, 2))
    assert (full.lens, full.real, full.samples, len(full.tokens)) == ((18, 12), 30, 2, 30)


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


def flat(keys: list[tuple[int, ...]]) -> list[int]:
    """Return the sample numbers of all row keys in one list."""
    return [i for key in keys for i in key]


def test_a_batch_holds_each_of_its_samples_once_and_whole(
    samples: list[ConversationSample],
) -> None:
    rows: TrainingRows = ConversationRows(samples, 200, 16, 3, 5)
    again = ConversationRows(samples, 200, 16, 3, 5)
    for step in (0, 1, 2, 11):
        keys = rows.batch(step)
        assert keys == again.batch(step) == rows.batch(step)
        unpacked = ConversationRows(samples, 200, 16, 3, 5, pack=False).batch(step)
        assert sorted(flat(keys)) == sorted(flat(unpacked))
        assert len(flat(keys)) == 16 > len(keys)
        for key in keys:
            row, start = rows.row(key), 0
            assert len(row.tokens) == len(row.targets) == sum(row.lens) == 200
            for i, size in zip(key, row.lens, strict=False):
                assert tuple(row.tokens[start : start + size]) == samples[i].tokens
                told = [
                    t
                    for t, learned in zip(samples[i].tokens, samples[i].learned, strict=True)
                    if learned
                ]
                targets = row.targets[start : start + size]
                assert targets[targets != IGNORED].tolist() == told
                assert targets[-1] == IGNORED
                start += size
            assert (start, len(key)) == (row.real, row.samples)
            assert set(row.targets[start:]) <= {IGNORED}
            assert set(row.tokens[start:]) <= {0}


def test_unpacked_every_sample_is_a_row(samples: list[ConversationSample]) -> None:
    rows = ConversationRows(samples, 200, 16, 3, 5, pack=False)
    for key in rows.batch(0) + rows.held_out():
        (i,), row = key, rows.row(key)
        size = len(samples[i].tokens)
        assert (row.lens, row.real, row.samples) == ((size, 200 - size), size, 1)
    assert len(rows.batch(0)) == 16
    assert len(rows.held_out()) == 5


@pytest.mark.parametrize("pack", [True, False])
def test_held_out_samples_are_in_no_batch_and_the_others_are_once_an_epoch(
    samples: list[ConversationSample], pack: bool
) -> None:
    rows = ConversationRows(samples, 200, 16, 3, 5, pack)
    held = flat(rows.held_out())
    assert len(set(held)) == len(held) == 5
    epochs = [
        flat([key for step in range(6 * epoch, 6 * epoch + 6) for key in rows.batch(step)])
        for epoch in range(3)
    ]
    for one in epochs:  # 101 samples, 5 of them held out: 96 make six batches of 16
        assert sorted(one + held) == list(range(101))
    assert len({tuple(one) for one in epochs}) == 3


def test_a_batch_runs_on_into_the_next_epoch(samples: list[ConversationSample]) -> None:
    rows = ConversationRows(samples[:10], 200, 4, 0, 1, pack=False)
    line = flat([key for step in range(9) for key in rows.batch(step)])
    assert [Counter(line[start : start + 9]) for start in (0, 9, 18, 27)] == [
        Counter(set(line))
    ] * 4
    large = ConversationRows(samples[:10], 200, 36, 0, 1)
    assert sorted(flat(large.batch(0))) == sorted(line)
    assert [large.row(key).samples for key in large.batch(0)] == [
        len(key) for key in large.batch(0)
    ]


def test_seeds_differ(samples: list[ConversationSample]) -> None:
    one, other = (ConversationRows(samples, 200, 16, seed, 20) for seed in (0, 1))
    assert one.batch(0) != other.batch(0)
    assert one.held_out() != other.held_out()
    assert set(flat(ConversationRows(samples, 200, 16, 0, 5).held_out())) < set(
        flat(one.held_out())
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
def test_rows_that_cannot_be(
    count: int, length: int, batch: int, held_out: int, reason: str
) -> None:
    with pytest.raises(RequestError) as caught:
        ConversationRows([ONE, TWO, OPEN][:count], length, batch, 0, held_out)
    assert str(caught.value) == reason


def test_a_fingerprint_sees_every_text_their_order_and_the_vocabulary() -> None:
    by_hand = hashlib.sha256(
        b'%b["",[["human","a"],["assistant","\xc3\xa9"]]]["b",[["human","c"],["assistant",""]]]'
        % (b"0" * 64)
    ).hexdigest()
    some = [said("a", "é"), said("c", "", instruction="b")]
    assert data.fingerprint_conversations(some, Words()) == by_hand
    others = [some[::-1], some[:1], [some[0], said("c", "")], [said("a", "e"), some[1]]]
    assert by_hand not in [data.fingerprint_conversations(other, Words()) for other in others]
    assert by_hand != data.fingerprint_conversations(some, Words(sha256="1" * 64))


def test_made_conversations_are_the_same_each_time_and_answered_by_what_was_asked() -> None:
    made = data.generate_conversations(GeneratedConversationsConfig(conversations=600, seed=2))
    assert made == data.generate_conversations(
        GeneratedConversationsConfig(conversations=600, seed=2)
    )
    assert made[:100] == data.generate_conversations(
        GeneratedConversationsConfig(conversations=100, seed=2)
    )
    assert made != data.generate_conversations(
        GeneratedConversationsConfig(conversations=600, seed=3)
    )
    assert len(set(made)) == len(made) == 600
    assert {len(one.turns) for one in made} == {2, 4}
    for one in made:
        assert [role for role, _ in one.turns] == ["human", "assistant"] * (len(one.turns) // 2)
        for (_, asked), (_, answer) in zip(one.turns[::2], one.turns[1::2], strict=True):
            assert set(answer.split()) <= set(re.findall(r"\w+", asked))


def test_made_instructions_have_inputs_behind_the_joint() -> None:
    made, joined = (
        data.generate_conversations(GeneratedConversationsConfig(conversations=200), joint)
        for joint in ("\n", "\n\n\n")
    )
    assert made == data.generate_conversations(GeneratedConversationsConfig(conversations=200))
    asked = [
        [text for one in found for role, text in one.turns if role == "human"]
        for found in (made, joined)
    ]
    assert [text.replace("\n", "\n\n\n") for text in asked[0]] == asked[1]
    assert sum("\n\n\n" in text for text in asked[1]) > 20


def test_made_answers_are_tokens_of_what_was_asked() -> None:
    made = data.generate_conversations(GeneratedConversationsConfig(conversations=50))
    tokens = WordHashTokenizer(512)
    found, shortened = data.encode_conversations(made, tokens, 256)
    assert shortened == 0
    newline = tokens.encode(["\n"])[0][1]
    for sample in found:
        assert (sample.tokens[0], sample.tokens[-1], sample.learned[-1]) == (1, 0, True)
        seen = {t for t, learned in zip(sample.tokens, sample.learned, strict=True) if not learned}
        told = [t for t, learned in zip(sample.tokens, sample.learned, strict=True) if learned]
        assert set(told) - {0, newline} <= seen
    sizes = [len(sample.tokens) for sample in found]
    assert max(sizes) < 128
