"""Test the real alpaca data with the real Aquila tokenizer: the known counts, exactly."""

from collections import Counter
from pathlib import Path

import pytest

from steelyard.data import tokenizer
from steelyard.data.tokenizer import Tokenizer
from steelyard.tasks.alpaca import data
from steelyard.tasks.alpaca.data import Conversation, ConversationRows, ConversationSample

pytestmark = pytest.mark.full
FAIR_SAMPLE_ROWS = 9229  # first rows of the file, which are a fair sample of the published set
FINGERPRINT = "2288acadd413c9ade221122180c9844641efb992f66b4acf523a30b012fa6f17"


@pytest.fixture(scope="module")
def conversations(data_dir: Path) -> list[Conversation]:
    """Return the real conversations of the shared alpaca subset."""
    read, name = data.read_conversations(data_dir / "alpaca")
    assert name == "alpaca_subset.json.gz"
    return read


@pytest.fixture(scope="module")
def aquila(data_dir: Path) -> Tokenizer:
    """Return the Aquila tokenizer."""
    return tokenizer.load_tokenizer([data_dir / "tokenizers" / "aquila"])


@pytest.fixture(scope="module")
def samples(conversations: list[Conversation], aquila: Tokenizer) -> list[ConversationSample]:
    """Return the real conversations as samples of at most 2048 tokens; none is shortened."""
    encoded, shortened = data.encode_conversations(conversations, aquila, 2048)
    assert shortened == 0
    return encoded


def test_real_conversations_have_the_known_counts(conversations: list[Conversation]) -> None:
    assert len(conversations) == 21_427
    assert all(
        [role for role, _ in conversation.turns] == ["human", "assistant"]
        and not conversation.instruction
        for conversation in conversations
    )
    empty = [
        number for number, conversation in enumerate(conversations) if not conversation.turns[1][1]
    ]
    assert empty == [1461, 3587, 6234, 8990, 13079, 15291, 15791, 16824, 16883, 17943]
    assert all(conversation.turns[0][1] for conversation in conversations)


def test_real_totals(samples: list[ConversationSample]) -> None:
    all_totals, fair_totals = (
        data.count_totals(samples),
        data.count_totals(samples[:FAIR_SAMPLE_ROWS]),
    )
    assert {**all_totals, "mean": round(all_totals["mean"], 2)} == {
        "samples": 21_427,
        "tokens": 2_718_083,
        "learned": 1_553_142,
        "longest": 1032,
        "mean": 126.85,
    }
    assert {**fair_totals, "mean": round(fair_totals["mean"], 2)} == {
        "samples": 9229,
        "tokens": 1_059_243,
        "learned": 551_694,
        "longest": 983,
        "mean": 114.77,
    }


def test_real_samples_equal_the_reference_encoding(
    conversations: list[Conversation], samples: list[ConversationSample], aquila: Tokenizer
) -> None:
    """The reference encodes the assistant's tag and text at once, and this package encodes them
    apart; every token is the same.
    """

    def encode_without_begin(texts: list[str]) -> list[list[int]]:
        """Return the tokens of texts without the begin token."""
        return [ids[1:] for ids in aquila.encode(texts)]

    (header,) = encode_without_begin([data.HEADER])
    assert len(header) == 29
    human_ids = encode_without_begin(
        [f"### Human: {conversation.turns[0][1]}\n" for conversation in conversations]
    )
    assistant_ids = encode_without_begin(
        [f"### Assistant: {conversation.turns[1][1]}\n" for conversation in conversations]
    )
    for sample, human, assistant in zip(samples, human_ids, assistant_ids, strict=True):
        assert sample.tokens == (100006, *header, *human, *assistant, 100007)
        learned = len(assistant) - 3  # without the tag's tokens "###", " Assistant" and ":"
        assert sample.learned == (False,) * (len(sample.tokens) - learned - 1) + (True,) * (
            learned + 1
        )


def test_an_empty_answer_is_a_newline_and_the_end_token(samples: list[ConversationSample]) -> None:
    assert (samples[1461].tokens[-5:], samples[1461].learned[-5:]) == (
        (8090, 34061, 26, 5037, 100007),
        (False, False, False, True, True),
    )
    assert min(sum(sample.learned) for sample in samples) == 2


def test_real_samples_are_truncated_to_128_tokens(
    conversations: list[Conversation], samples: list[ConversationSample], aquila: Tokenizer
) -> None:
    encoded, shortened = data.encode_conversations(conversations[:2000], aquila, 128)
    assert shortened == sum(len(sample.tokens) > 128 for sample in samples[:2000]) == 603
    expected = [
        ConversationSample(full_sample.tokens[:128], full_sample.learned[:128])
        for full_sample in samples[:2000]
        if any(full_sample.learned[:128])
    ]
    assert encoded == expected
    assert len(encoded) == 1995


@pytest.mark.parametrize(
    ("count", "samples_a_row", "fill", "rows_a_batch"),
    [
        (21_427, 15.17, 0.940, {7: 2, 8: 91, 9: 73, 10: 1}),
        (FAIR_SAMPLE_ROWS, 16.55, 0.927, {7: 19, 8: 53}),
    ],
)
def test_real_samples_fill_packed_rows_of_2048(
    count: int,
    samples_a_row: float,
    fill: float,
    rows_a_batch: dict[int, int],
    samples: list[ConversationSample],
) -> None:
    rows = ConversationRows(samples[:count], 2048, 128, 0, 0)
    batches = [rows.batch(step) for step in range(count // 128)]
    keys = [key for batch in batches for key in batch]
    real_tokens = [sum(len(samples[number].tokens) for number in key) for key in keys]
    assert max(real_tokens) <= 2048
    assert Counter(map(len, batches)) == rows_a_batch
    assert round(len(batches) * 128 / len(keys), 2) == samples_a_row
    assert round(sum(real_tokens) / len(real_tokens) / 2048, 3) == fill
    assert sum(rows.row(key).real for key in keys[:50]) == sum(real_tokens[:50])


def test_unpacked_rows_are_mostly_padding(samples: list[ConversationSample]) -> None:
    rows = ConversationRows(samples[:FAIR_SAMPLE_ROWS], 2048, 128, 0, 0, pack=False)
    real_tokens = [rows.row(key).real for step in range(3) for key in rows.batch(step)]
    assert len(real_tokens) == 3 * 128
    assert 0.05 < sum(real_tokens) / len(real_tokens) / 2048 < 0.06


def test_real_fingerprint(conversations: list[Conversation], aquila: Tokenizer) -> None:
    assert data.fingerprint_conversations(conversations, aquila) == FINGERPRINT
