"""Rows of a micro-batch packed end to end, with and without their padding."""

import numpy as np

from steelyard.data.training_rows import IGNORED, TrainingRow
from steelyard.training.packing import TOKEN_MULTIPLE, drop_padding, pack_rows


def row(lens: tuple[int, ...], padding: int) -> TrainingRow:
    """Return a row of segments of these lengths with ascending tokens, then padding."""
    real = sum(lens)
    tokens = np.arange(1, real + padding + 1)
    targets = np.where(tokens <= real, tokens + 1, IGNORED)
    return TrainingRow(tokens, targets, (*lens, padding) if padding else lens, real, len(lens))


def test_padding_is_left_out_but_for_a_few_tokens_at_the_end():
    rows = [row((100, 50), 50), row((200,), 0), row((10, 20, 30), 140)]
    found, full = pack_rows(drop_padding(rows)), pack_rows(rows)
    assert len(found.tokens) == 512 == -(-410 // TOKEN_MULTIPLE) * TOKEN_MULTIPLE
    assert found.counts == full.counts | {"padded": 102}
    assert found.segment_lengths == [100, 50, 200, 10, 20, 30, 102]
    assert found.targets.tolist() == full.targets.tolist()
    assert found.tokens[found.pick].tolist() == full.tokens[full.pick].tolist()
    assert found.positions[found.pick].tolist() == full.positions[full.pick].tolist()


def test_rows_without_padding_stay_as_they_are():
    rows = [row((128,), 0), row((100, 28), 0)]
    assert drop_padding(rows) == rows
