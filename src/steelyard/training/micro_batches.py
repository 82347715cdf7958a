"""Rows as micro-batches: what a replica computes of a global batch, on the device."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from steelyard.data.rows import Key
from steelyard.engine.job import Job
from steelyard.models.attention import Layout, steady_layout
from steelyard.models.tensors import send
from steelyard.training.packing import GRAIN, Packed, deal, empty_row, packed, without_padding


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


class RowBatches:
    """Rows of a task as a replica's micro-batches: every row padded to its length, or none, and their
    tokens a multiple of `grain`."""

    def __init__(
        self,
        job: Job,
        length: int,
        padded: bool = True,
        grain: int = GRAIN,
        to_device: Callable[[Packed, int, torch.device], MicroBatch] = to_device,
    ) -> None:
        self.job, self.length, self.padded, self.grain, self.send = job, length, padded, grain, to_device
        self.device: torch.device = job.device.torch_device

    def groups(self, keys: list[Key], size: int | None = None) -> list[list[Key]]:
        return deal(self.job, keys, size)

    def pack(self, keys: list[Key]) -> Packed:
        texts = self.job.inputs
        if self.padded:
            return packed([empty_row(self.length) if key is None else texts.row(key) for key in keys])
        return packed(without_padding([texts.row(key) for key in keys if key is not None], self.grain))

    def to_device(self, pack: Packed) -> MicroBatch:
        return self.send(pack, self.length, self.device)

    def targets(self, pack: Packed) -> int:
        return len(pack.pick)

    def seed(self, step: int) -> None:
        """Nothing here is dropped at random."""
