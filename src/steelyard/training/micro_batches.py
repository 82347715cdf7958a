"""Micro-batches of training rows on a torch device."""

from dataclasses import dataclass

import torch
from torch import Tensor

from steelyard.models.attention import Layout, steady_layout
from steelyard.models.tensors import send
from steelyard.training.packing import Packed, PackedRows


@dataclass(frozen=True)
class MicroBatch:
    """Training rows on the device, laid end to end. `pick` are the indices of tokens that have a
    target, and `targets` their target tokens.
    """

    tokens: Tensor
    positions: Tensor
    rows: Layout
    pick: Tensor
    targets: Tensor


def to_device(pack: Packed, length: int, device: torch.device) -> MicroBatch:
    """Copy packed rows of at most `length` tokens to the device, without waiting for it."""
    rows = steady_layout(pack.lens, length, device)
    tokens, positions = send(pack.tokens, device), send(pack.positions, device)
    return MicroBatch(tokens, positions, rows, send(pack.pick, device), send(pack.targets, device))


class RowBatches(PackedRows):
    """Makes a replica's micro-batches of packed rows on a torch device (the loop's
    `MicroBatchMaker`).
    """

    def to_device(self, pack: Packed) -> MicroBatch:
        """Copy a micro-batch to the job's device, without waiting for it."""
        return to_device(pack, self.length, self.job.device.torch_device)
