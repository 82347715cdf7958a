"""Micro-batches of packed rows on Paddle's device, for engine `paddle`."""

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import paddle

from steelyard.data.training_rows import IGNORED
from steelyard.training.packing import RowPack, RowPacker

Tensor = Any


@dataclass(frozen=True)
class PaddleMicroBatch:
    """A micro-batch of packed rows on Paddle's device; segments are the parts of its tokens that do
    not see each other. Made by `pack_to_device`.

    `tokens` and `positions` (from 0 in each segment) are int64 [tokens]. `lens` are the segments'
    lengths in tokens, on the host; `segment_starts` their cumulative sums, int32 [segments + 1],
    from 0 to all tokens. `pick` are the indices of tokens whose logits are needed, at least one;
    `targets` the next tokens there (IGNORED for one without loss).
    """

    tokens: Tensor
    positions: Tensor
    lens: tuple[int, ...]
    segment_starts: Tensor  # int32 [segments + 1]
    pick: Tensor  # tokens whose logits are needed
    targets: Tensor


def pack_to_device(pack: RowPack) -> PaddleMicroBatch:
    """Return a pack as a micro-batch on Paddle's current device. A pack without targets gets one at
    token 0 whose loss is ignored, because kernels take no empty tensors.
    """
    pick, targets = (
        (pack.pick, pack.targets)
        if len(pack.pick)
        else (np.zeros(1, np.int64), np.full(1, IGNORED, np.int64))
    )
    segment_starts = np.array([0, *accumulate(pack.segment_lengths)], np.int32)
    tensors = [
        paddle.to_tensor(array)
        for array in (pack.tokens, pack.positions, segment_starts, pick, targets)
    ]
    return PaddleMicroBatch(tensors[0], tensors[1], tuple(pack.segment_lengths), *tensors[2:])


class PaddleBatches(RowPacker):
    """Makes this replica's micro-batches of packed rows on Paddle's device (the training loop's
    `MicroBatchMaker`): a `RowPacker` (training/packing.py), which chooses the rows (`split_keys`)
    and packs them as host arrays (`pack`), with `to_device`, which returns a `PaddleMicroBatch`.
    """

    def to_device(self, pack: RowPack) -> PaddleMicroBatch:
        """Copy a pack to Paddle's current device."""
        return pack_to_device(pack)
