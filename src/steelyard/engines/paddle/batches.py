"""Rows as micro-batches on Paddle's device."""

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import paddle

from steelyard.data.rows import IGNORED
from steelyard.training.packing import Packed, PackedRows

Tensor = Any


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch on the device, and where its segments lie, which the host knows too."""

    tokens: Tensor
    positions: Tensor
    lens: tuple[int, ...]
    borders: Tensor  # int32 [segments + 1]
    pick: Tensor  # tokens whose logits are needed
    targets: Tensor


def to_device(pack: Packed) -> MicroBatch:
    """A micro-batch from which nothing is learned has one token whose target is ignored: kernels
    take no empty tensors.
    """
    pick, targets = (
        (pack.pick, pack.targets)
        if len(pack.pick)
        else (np.zeros(1, np.int64), np.full(1, IGNORED, np.int64))
    )
    borders = np.array([0, *accumulate(pack.lens)], np.int32)
    tensors = [
        paddle.to_tensor(one) for one in (pack.tokens, pack.positions, borders, pick, targets)
    ]
    return MicroBatch(tensors[0], tensors[1], tuple(pack.lens), *tensors[2:])


class PaddleBatches(PackedRows):
    def to_device(self, pack: Packed) -> MicroBatch:
        return to_device(pack)
