"""Micro-batches of training rows on a torch device."""

from dataclasses import dataclass

import torch
from torch import Tensor

from steelyard.models.attention import PackedLayout, make_fixed_size_layout
from steelyard.models.tensors import send_array
from steelyard.training.packing import RowPack, RowPacker


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch of training rows on a torch device, laid end to end; made by `send_rows`.
    `tokens` and `positions` (from 0 in each segment) are int64 [tokens], `layout` says where
    segments begin, `pick` are the indices of tokens that have a target, and `targets` their target
    tokens, both int64 [targets].
    """

    tokens: Tensor
    positions: Tensor
    layout: PackedLayout
    pick: Tensor
    targets: Tensor


def send_rows(pack: RowPack, length: int, device: torch.device) -> MicroBatch:
    """Return packed rows as a micro-batch on the device, copied without waiting. `length` is the
    longest that a segment may be; the layout gets it as maximum, so that a compiler sees few sizes.
    """
    layout = make_fixed_size_layout(pack.segment_lengths, length, device)
    tokens, positions = send_array(pack.tokens, device), send_array(pack.positions, device)
    return MicroBatch(
        tokens, positions, layout, send_array(pack.pick, device), send_array(pack.targets, device)
    )


class RowBatches(RowPacker):
    """Makes a replica's micro-batches of packed rows on a torch device (the loop's
    `MicroBatchMaker`): a `RowPacker`, which chooses the rows (`split_keys`) and packs them as host
    arrays (`pack`), with `to_device`, which returns a `MicroBatch`.
    """

    def to_device(self, pack: RowPack) -> MicroBatch:
        """Copy packed rows to the job's torch device, without waiting for it, and return them as a
        `MicroBatch`.
        """
        return send_rows(pack, self.length, self.job.device.torch_device)
