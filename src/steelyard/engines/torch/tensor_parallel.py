"""Tensor-parallel groups for scoring: the ranks that hold one model together, and what they send
each other while it scores.

`TorchFramework.join_ranks` makes the group; engines get it as `Job.group`.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from steelyard.models.llama_placements import WHOLE, Shard
from steelyard.plan import degrees
from steelyard.plan.degrees import Plan


@dataclass(frozen=True)
class TensorParallelGroup:
    """A tensor-parallel group for scoring, as seen from one of its ranks: `share`, the `Shard`
    (index of count) of the model that it has, and `group`, torch's process group (None for one
    rank, the default). Made by `create_tensor_parallel_group`.

    `total` sums a tensor over the group in place, `gather` stacks every rank's tensor, `broadcast`
    gives all the first rank's; all ranks call them together. A group of one sends nothing.
    """

    share: Shard = WHOLE
    group: Any = None

    def total(self, part: Tensor) -> Tensor:
        """Sum a tensor over this tensor-parallel group in place, and return it; all ranks of the
        group must call it. In a group of one it is unchanged.
        """
        if self.share.count > 1:
            dist.all_reduce(part, group=self.group)
        return part

    def gather(self, part: Tensor) -> Tensor:
        """Return every rank's tensor stacked along a new first dimension, in the order of this
        group's shards; all must have one shape, and all ranks must call it. A group of one returns
        a view [1, ...].
        """
        if self.share.count == 1:
            return part[None]
        parts = [torch.empty_like(part) for _ in range(self.share.count)]
        dist.all_gather(parts, part.contiguous(), group=self.group)
        return torch.stack(parts)

    def broadcast(self, part: Tensor) -> Tensor:
        """Overwrite a tensor with that of this group's first rank, and return it; all ranks of the
        group must call it. In a group of one it is unchanged.
        """
        if self.share.count > 1:
            dist.broadcast(part, group_src=0, group=self.group)
        return part


def create_tensor_parallel_group(
    plan: Plan, rank: int, device: torch.device
) -> TensorParallelGroup:
    """Create the tensor-parallel groups of a plan and return this rank's; all ranks must call it,
    after torch.distributed is initialized. With TP1 no process group is made, and the group has one
    rank.
    """
    if plan.tp == 1:
        return TensorParallelGroup()
    mesh = init_device_mesh(
        device.type, (plan.dp, plan.pp, plan.tp), mesh_dim_names=("dp", "pp", "tp")
    )
    return TensorParallelGroup(
        Shard(degrees.find_position(plan, rank).tp, plan.tp), mesh["tp"].get_group()
    )
