"""Rows as micro-batches on Paddle's device."""

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import paddle

from steelyard.data.rows import IGNORED, Key
from steelyard.engine.job import Job
from steelyard.training.packing import Packed, deal, empty_row, packed, without_padding

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
    """A micro-batch from which nothing is learned has one token whose target is ignored: kernels take no empty tensors."""
    pick, targets = (pack.pick, pack.targets) if len(pack.pick) else (np.zeros(1, np.int64), np.full(1, IGNORED, np.int64))
    borders = np.array([0, *accumulate(pack.lens)], np.int32)
    tensors = [paddle.to_tensor(one) for one in (pack.tokens, pack.positions, borders, pick, targets)]
    return MicroBatch(tensors[0], tensors[1], tuple(pack.lens), *tensors[2:])


class PaddleBatches:
    """Rows of a task as a replica's micro-batches: every row padded to its length, or none."""

    def __init__(self, job: Job, length: int, padded: bool) -> None:
        self.job, self.length, self.padded = job, length, padded

    def groups(self, keys: list[Key], size: int | None = None) -> list[list[Key]]:
        return deal(self.job, keys, size)

    def pack(self, keys: list[Key]) -> Packed:
        texts = self.job.inputs
        if self.padded:
            return packed([empty_row(self.length) if key is None else texts.row(key) for key in keys])
        return packed(without_padding([texts.row(key) for key in keys if key is not None]))

    def to_device(self, pack: Packed) -> MicroBatch:
        return to_device(pack)

    def targets(self, pack: Packed) -> int:
        return len(pack.pick)

    def seed(self, step: int) -> None:
        """Nothing here is dropped at random."""
