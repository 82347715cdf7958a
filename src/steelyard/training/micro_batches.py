"""Micro-batches of training rows on a torch device."""

from dataclasses import dataclass

import torch
from torch import Tensor

from steelyard.models.attention import PackedLayout, make_fixed_size_layout
from steelyard.models.tensors import send_array
from steelyard.training.packing import RowPack, RowPacker


@dataclass(frozen=True)
class MicroBatch:
    """Training rows on the device, laid end to end. `pick` are the indices of tokens that have a
    target, and `targets` their target tokens.
    """

    tokens: Tensor
    positions: Tensor
    layout: PackedLayout
    pick: Tensor
    targets: Tensor


def send_rows(pack: RowPack, length: int, device: torch.device) -> MicroBatch:
    """Copy packed rows of at most `length` tokens to the device, without waiting for it."""
    layout = make_fixed_size_layout(pack.segment_lengths, length, device)
    tokens, positions = send_array(pack.tokens, device), send_array(pack.positions, device)
    return MicroBatch(
        tokens, positions, layout, send_array(pack.pick, device), send_array(pack.targets, device)
    )


class RowBatches(RowPacker):
    """Makes a replica's micro-batches of packed rows on a torch device (the loop's
    `MicroBatchMaker`).
    """

    def to_device(self, pack: RowPack) -> MicroBatch:
        """Copy a micro-batch to the job's device, without waiting for it."""
        return send_rows(pack, self.length, self.job.device.torch_device)
