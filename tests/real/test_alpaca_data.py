"""Test the real alpaca data with the real Aquila tokenizer: the known counts, exactly."""

from collections import Counter
from pathlib import Path

import pytest

from steelyard.data import tokenizer
from steelyard.data.tokenizer import Tokenizer
from steelyard.tasks.alpaca import data
from steelyard.tasks.alpaca.data import Conversation, ConversationRows, ConversationSample

pytestmark = pytest.mark.full
UNIFORM = 9229  # first rows of the file, which are a fair sample of the published set
FINGERPRINT = "2288acadd413c9ade221122180c9844641efb992f66b4acf523a30b012fa6f17"


@pytest.fixture(scope="module")
def conversations(data_dir: Path) -> list[Conversation]:
    """Return the real conversations of the shared alpaca subset."""
    found, name = data.read_conversations(data_dir / "alpaca")
    assert name == "alpaca_subset.json.gz"
    return found


@pytest.fixture(scope="module")
def aquila(data_dir: Path) -> Tokenizer:
    """Return the Aquila tokenizer."""
    return tokenizer.load_tokenizer([data_dir / "tokenizers" / "aquila"])


@pytest.fixture(scope="module")
def samples(conversations: list[Conversation], aquila: Tokenizer) -> list[ConversationSample]:
    """Return the real conversations as samples of at most 2048 tokens; none is shortened."""
    found, shortened = data.encode_conversations(conversations, aquila, 2048)
    assert shortened == 0
    return found


def test_real_rows(conversations: list[Conversation]) -> None:
    assert len(conversations) == 21_427
    assert all(
        [role for role, _ in one.turns] == ["human", "assistant"] and not one.instruction
        for one in conversations
    )
    empty = [i for i, one in enumerate(conversations) if not one.turns[1][1]]
    assert empty == [1461, 3587, 6234, 8990, 13079, 15291, 15791, 16824, 16883, 17943]
    assert all(one.turns[0][1] for one in conversations)


def test_real_totals(samples: list[ConversationSample]) -> None:
    whole, fair = data.count_totals(samples), data.count_totals(samples[:UNIFORM])
    assert {**whole, "mean": round(whole["mean"], 2)} == {
        "samples": 21_427,
        "tokens": 2_718_083,
        "learned": 1_553_142,
        "longest": 1032,
        "mean": 126.85,
    }
    assert {**fair, "mean": round(fair["mean"], 2)} == {
        "samples": 9229,
        "tokens": 1_059_243,
        "learned": 551_694,
        "longest": 983,
        "mean": 114.77,
    }


def test_real_samples_are_those_of_the_reference(
    conversations: list[Conversation], samples: list[ConversationSample], aquila: Tokenizer
) -> None:
    """The reference encodes the assistant's tag and text at once, and this package encodes them
    apart; every token is the same.
    """

    def bare(texts: list[str]) -> list[list[int]]:
        """Return the tokens of texts without the begin token."""
        return [ids[1:] for ids in aquila.encode(texts)]

    (header,) = bare([data.HEADER])
    assert len(header) == 29
    asked = bare([f"### Human: {one.turns[0][1]}\n" for one in conversations])
    told = bare([f"### Assistant: {one.turns[1][1]}\n" for one in conversations])
    for sample, human, assistant in zip(samples, asked, told, strict=True):
        assert sample.tokens == (100006, *header, *human, *assistant, 100007)
        learned = len(assistant) - 3  # without the tag's tokens "###", " Assistant" and ":"
        assert sample.learned == (False,) * (len(sample.tokens) - learned - 1) + (True,) * (
            learned + 1
        )


def test_an_empty_answer_is_a_line_and_the_end(samples: list[ConversationSample]) -> None:
    assert (samples[1461].tokens[-5:], samples[1461].learned[-5:]) == (
        (8090, 34061, 26, 5037, 100007),
        (False, False, False, True, True),
    )
    assert min(sum(sample.learned) for sample in samples) == 2


def test_real_samples_that_are_cut(
    conversations: list[Conversation], samples: list[ConversationSample], aquila: Tokenizer
) -> None:
    found, shortened = data.encode_conversations(conversations[:2000], aquila, 128)
    assert shortened == sum(len(sample.tokens) > 128 for sample in samples[:2000]) == 603
    expected = [
        ConversationSample(one.tokens[:128], one.learned[:128])
        for one in samples[:2000]
        if any(one.learned[:128])
    ]
    assert found == expected
    assert len(found) == 1995


@pytest.mark.parametrize(
    ("count", "samples_a_row", "fill", "rows_a_batch"),
    [(21_427, 15.17, 0.940, {7: 2, 8: 91, 9: 73, 10: 1}), (UNIFORM, 16.55, 0.927, {7: 19, 8: 53})],
)
def test_real_rows_of_2048(
    count: int,
    samples_a_row: float,
    fill: float,
    rows_a_batch: dict[int, int],
    samples: list[ConversationSample],
) -> None:
    rows = ConversationRows(samples[:count], 2048, 128, 0, 0)
    batches = [rows.batch(step) for step in range(count // 128)]
    keys = [key for batch in batches for key in batch]
    real = [sum(len(samples[i].tokens) for i in key) for key in keys]
    assert max(real) <= 2048
    assert Counter(map(len, batches)) == rows_a_batch
    assert round(len(batches) * 128 / len(keys), 2) == samples_a_row
    assert round(sum(real) / len(real) / 2048, 3) == fill
    assert sum(rows.row(key).real for key in keys[:50]) == sum(real[:50])


def test_unpacked_rows_are_mostly_padding(samples: list[ConversationSample]) -> None:
    rows = ConversationRows(samples[:UNIFORM], 2048, 128, 0, 0, pack=False)
    real = [rows.row(key).real for step in range(3) for key in rows.batch(step)]
    assert len(real) == 3 * 128
    assert 0.05 < sum(real) / len(real) / 2048 < 0.06


def test_real_fingerprint(conversations: list[Conversation], aquila: Tokenizer) -> None:
    assert data.fingerprint_conversations(conversations, aquila) == FINGERPRINT
