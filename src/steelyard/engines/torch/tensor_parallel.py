"""Tensor-parallel groups: the ranks that hold one model together, and what they send each other
while it scores.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from steelyard.models.placements import WHOLE, Shard
from steelyard.plan import degrees
from steelyard.plan.degrees import Plan


@dataclass(frozen=True)
class TensorParallelGroup:
    """A tensor-parallel group, seen from one of its ranks. A group of one sends nothing."""

    share: Shard = WHOLE
    group: Any = None

    def total(self, part: Tensor) -> Tensor:
        """The sum over the group, in place."""
        if self.share.count > 1:
            dist.all_reduce(part, group=self.group)
        return part

    def gather(self, part: Tensor) -> Tensor:
        """What every rank of the group has, stacked in the order of their shares."""
        if self.share.count == 1:
            return part[None]
        parts = [torch.empty_like(part) for _ in range(self.share.count)]
        dist.all_gather(parts, part.contiguous(), group=self.group)
        return torch.stack(parts)


def form(layout: Plan, rank: int, device: torch.device) -> TensorParallelGroup:
    """The group of a rank. All ranks must call it."""
    if layout.tp == 1:
        return TensorParallelGroup()
    mesh = init_device_mesh(
        device.type, (layout.dp, layout.pp, layout.tp), mesh_dim_names=("dp", "pp", "tp")
    )
    return TensorParallelGroup(
        Shard(degrees.place(layout, rank).tp, layout.tp), mesh["tp"].get_group()
    )
