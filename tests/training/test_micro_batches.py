"""Rows of a micro-batch packed end to end, with and without their padding."""

import numpy as np

from steelyard.data.training_rows import IGNORED, TrainingRow
from steelyard.training.packing import TOKEN_MULTIPLE, drop_padding, pack_rows


def make_row(lens: tuple[int, ...], padding: int) -> TrainingRow:
    """Return a row of segments of these lengths with ascending tokens, then padding."""
    real = sum(lens)
    tokens = np.arange(1, real + padding + 1)
    targets = np.where(tokens <= real, tokens + 1, IGNORED)
    return TrainingRow(tokens, targets, (*lens, padding) if padding else lens, real, len(lens))


def test_padding_is_removed_up_to_a_multiple_of_the_grain():
    rows = [make_row((100, 50), 50), make_row((200,), 0), make_row((10, 20, 30), 140)]
    unpadded, full = pack_rows(drop_padding(rows)), pack_rows(rows)
    assert len(unpadded.tokens) == 512 == -(-410 // TOKEN_MULTIPLE) * TOKEN_MULTIPLE
    assert unpadded.counts == full.counts | {"padded": 102}
    assert unpadded.segment_lengths == [100, 50, 200, 10, 20, 30, 102]
    assert unpadded.targets.tolist() == full.targets.tolist()
    assert unpadded.tokens[unpadded.pick].tolist() == full.tokens[full.pick].tolist()
    assert unpadded.positions[unpadded.pick].tolist() == full.positions[full.pick].tolist()


def test_rows_without_padding_are_unchanged():
    rows = [make_row((128,), 0), make_row((100, 28), 0)]
    assert drop_padding(rows) == rows
