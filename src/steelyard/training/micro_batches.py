"""Rows as micro-batches: what a replica computes of a global batch, on the device."""

from dataclasses import dataclass

import torch
from torch import Tensor

from steelyard.models.attention import Layout, steady_layout
from steelyard.models.tensors import send
from steelyard.training.packing import Packed, PackedRows


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch on the device."""

    tokens: Tensor
    positions: Tensor
    rows: Layout
    pick: Tensor
    targets: Tensor


def to_device(pack: Packed, length: int, device: torch.device) -> MicroBatch:
    """Rows of at most `length` tokens on the device, without waiting for it."""
    rows = steady_layout(pack.lens, length, device)
    tokens, positions = send(pack.tokens, device), send(pack.positions, device)
    return MicroBatch(tokens, positions, rows, send(pack.pick, device), send(pack.targets, device))


class RowBatches(PackedRows):
    """Packed rows on a device of torch."""

    def to_device(self, pack: Packed) -> MicroBatch:
        return to_device(pack, self.length, self.job.device.torch_device)
