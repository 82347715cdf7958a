"""Replicas that divide by FSDP2 what they hold, and gather it where it is computed with.

The loss of a step is the same function of the same numbers as on one device, and so are its
gradients: they are summed over replicas, never averaged, because each replica's part of the loss is
divided by the targets of all.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from steelyard.training.optimizer import Adam, total_norm
from steelyard.training.placement import Model, SingleDevice, Weigh


def shard(
    modules: list[nn.Module],
    mesh: DeviceMesh,
    sharding: int,
    compute: torch.dtype,
    kept: torch.dtype,
) -> None:
    """Divide modules among replicas, each gathered on its own, a parent after its children. Weights
    are kept as they are, and gathered in the precision of the matmuls."""
    policy = MixedPrecisionPolicy(compute, kept) if compute != kept else MixedPrecisionPolicy()
    for module in modules:
        fully_shard(module, mesh=mesh, reshard_after_forward=sharding == 3, mp_policy=policy)
    for module in modules:
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other


def before_backward(module: nn.Module, sharding: int, last: bool) -> None:
    """What is summed over replicas after a micro-batch, and what after the last one of a step
    alone.
    """
    if isinstance(module, FSDPModule):
        module.set_is_last_backward(last)
        module.set_requires_gradient_sync(last or sharding > 1)
        module.set_requires_all_reduce(last)
        module.set_reshard_after_backward(last or sharding == 3)


class Sharded(SingleDevice):
    """Replicas that meet inside forward and backward."""

    def __init__(
        self, group: Any, sharding: int, compute: torch.dtype, device: torch.device
    ) -> None:
        self.group, self.sharding, self.device = group, sharding, device
        self.wide = torch.promote_types(compute, torch.float32)

    def attach(self, model: Model, optimizer: Adam) -> None:
        # a replica without a loss needs the scale too
        optimizer.scale(torch.zeros((), device=self.device))

    def no_losses(self) -> list[Tensor]:
        return [torch.zeros((), dtype=self.wide, device=self.device)]

    def backward(self, model: Model, micros: list[Any], weigh: Weigh) -> None:
        for i, micro in enumerate(micros):
            for root in model.roots:
                before_backward(root, self.sharding, i == len(micros) - 1)
            weigh(model.loss(micro)).backward()  # type: ignore[no-untyped-call]

    def reduce(self, loss: Tensor) -> Tensor:
        return self.total(loss)

    def total(self, count: Tensor) -> Tensor:
        dist.all_reduce(count, group=self.group)
        return count

    def norm(self, grads: list[Tensor], overflows: list[Tensor]) -> Tensor:
        total = total_norm(grads, overflows)
        return total.full_tensor() if isinstance(total, DTensor) else total
