"""Replicas that divide by FSDP2 what they hold (training/fsdp.py), as a trainer sees them.

The loss of a step is the same function of the same numbers as on one device, and so are its gradients: they are summed over
replicas, never averaged, because each replica's part of the loss is divided by the targets of all.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from steelyard.training.fsdp import before_backward
from steelyard.training.optimizer import Adam, total_norm
from steelyard.training.placement import Model, Weigh


class Sharded:
    lockstep = True
    separate = False  # they meet inside forward and backward

    def __init__(self, group: Any, sharding: int, compute: torch.dtype, device: torch.device) -> None:
        self.group, self.sharding, self.device = group, sharding, device
        self.wide = torch.promote_types(compute, torch.float32)

    def attach(self, model: Model, optimizer: Adam) -> None:
        optimizer.scale(torch.zeros((), device=self.device))  # a replica without a loss needs the scale too

    def no_losses(self) -> list[Tensor]:
        return [torch.zeros((), dtype=self.wide, device=self.device)]

    def evaluate(self, model: Model, micro: Any) -> Tensor:
        return model.evaluate(micro)

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

    def updated(self) -> None:
        """FSDP gathers what it needs."""

    def stored(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return state
