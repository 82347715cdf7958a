"""Data parallelism by FSDP2: replicas divide the model among them, and gather parameters where they
are computed with.

A step computes the same loss and gradients as on one device: gradients are summed over replicas,
never averaged, because each replica's part of the loss is already divided by the targets of all.
Used by engine transformers.
"""

from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from steelyard.training.adamw import MixedPrecisionAdamW, compute_total_norm
from steelyard.training.placement import SingleDevicePlacement, TrainableModel, WeighLoss

FsdpLevel = Literal[1, 2, 3]  # ZeRO levels


def shard_modules(
    modules: list[nn.Module],
    mesh: DeviceMesh,
    sharding: FsdpLevel,
    matmul_dtype: torch.dtype,
    stored_dtype: torch.dtype,
) -> None:
    """Apply FSDP2's `fully_shard` to the modules in place, in their order, which must be children
    before parents, so that each is gathered on its own. Weights stay stored in `stored_dtype` and
    are gathered in `matmul_dtype`; gradients are reduced in `stored_dtype` and summed, not
    averaged. With `sharding` 3 weights are released after the forward pass.
    """
    policy = (
        MixedPrecisionPolicy(matmul_dtype, stored_dtype)
        if matmul_dtype != stored_dtype
        else MixedPrecisionPolicy()
    )
    for module in modules:
        fully_shard(module, mesh=mesh, reshard_after_forward=sharding == 3, mp_policy=policy)
    for module in modules:
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo can only sum


def set_gradient_sync(module: nn.Module, sharding: FsdpLevel, last: bool) -> None:
    """Set what an FSDP module does after the coming backward pass: with `sharding` 1 gradients are
    reduced after the `last` micro-batch of a step only, with more after every one; weights are
    released after the last one, with 3 after every one. Does nothing for a module without FSDP.
    """
    if isinstance(module, FSDPModule):
        module.set_is_last_backward(last)
        module.set_requires_gradient_sync(last or sharding > 1)
        module.set_requires_all_reduce(last)
        module.set_reshard_after_backward(last or sharding == 3)


class FsdpPlacement(SingleDevicePlacement):
    """Replicas that divide the model among them by FSDP2 (a `SingleDevicePlacement` for a
    `Trainer`): they exchange weights and gradients inside forward and backward, so
    `exchanges_separately` is false and all must have equally many micro-batches. Only losses and
    counts are summed separately. `model.fsdp_roots` must have been sharded by `shard_modules`
    already; `backward` says to them when to reduce.

    `group` is the replicas' process group, `sharding` the ZeRO level (1, 2 or 3; else ValueError),
    `loss_dtype` that of the matmuls, at least fp32.
    """

    def __init__(
        self, group: Any, sharding: FsdpLevel, matmul_dtype: torch.dtype, device: torch.device
    ) -> None:
        """Store the settings: `group` is the process group of the replicas, `sharding` 1, 2 or 3 as
        in ZeRO, `matmul_dtype` the dtype of the matmuls.
        """
        if sharding not in get_args(FsdpLevel):
            raise ValueError(f"sharding {sharding}; allowed: 1, 2, 3")
        self.group, self.sharding, self.device = group, sharding, device
        self.loss_dtype = torch.promote_types(matmul_dtype, torch.float32)

    def attach(self, model: TrainableModel, optimizer: MixedPrecisionAdamW) -> None:
        """Initialize the optimizer's fp16 loss scale by scaling a zero, which a replica of an FSDP
        model that has no loss in a step needs too. `model` is not used.
        """
        # a replica without a loss needs the loss scale too
        optimizer.scale(torch.zeros((), device=self.device))

    def start_losses(self) -> list[Tensor]:
        """Return the list that a step's losses are appended to, with one zero on the device
        (`loss_dtype`), for a replica without a loss in a step.
        """
        return [torch.zeros((), dtype=self.loss_dtype, device=self.device)]

    def backward(self, model: TrainableModel, micros: list[Any], weigh: WeighLoss) -> None:
        """Run forward and backward of a step's micro-batches; FSDP reduces gradients in between.
        `weigh` turns a micro-batch's summed loss into the tensor that `backward` is called on. All
        replicas call it together, with equally many micro-batches.
        """
        for i, micro in enumerate(micros):
            for root in model.fsdp_roots:
                set_gradient_sync(root, self.sharding, i == len(micros) - 1)
            weigh(model.loss(micro)).backward()  # type: ignore[no-untyped-call]

    def reduce(self, loss: Tensor) -> Tensor:
        """Sum the loss over replicas in place and return it; FSDP has summed the gradients in
        `backward` already. All replicas call it together.
        """
        return self.sum_over_replicas(loss)

    def sum_over_replicas(self, count: Tensor) -> Tensor:
        """Sum a tensor (a count) over the replicas of `group` in place, and return it; all replicas
        call it together.
        """
        dist.all_reduce(count, group=self.group)
        return count

    def compute_norm(self, grads: list[Tensor], overflows: list[Tensor]) -> Tensor:
        """Return the 2-norm of all gradients of all replicas, a tensor on the device; all replicas
        call it together. `overflows` is not used.
        """
        total = compute_total_norm(grads, overflows)
        return total.full_tensor() if isinstance(total, DTensor) else total
