"""FSDP2: replicas divide among them what they hold, and gather it where it is computed with.

The loss of a step is divided by the targets of all replicas, so gradients are summed over them and never averaged.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard


def shard(modules: list[nn.Module], mesh: DeviceMesh, sharding: int, compute: torch.dtype, kept: torch.dtype) -> None:
    """Divide modules among replicas, each gathered on its own, a parent after its children. Weights are kept as they are, and
    gathered in the precision of the matmuls."""
    policy = MixedPrecisionPolicy(compute, kept) if compute != kept else MixedPrecisionPolicy()
    for module in modules:
        fully_shard(module, mesh=mesh, reshard_after_forward=sharding == 3, mp_policy=policy)
    for module in modules:
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other


def before_backward(module: nn.Module, sharding: int, last: bool) -> None:
    """What is summed over replicas after a micro-batch, and what after the last one of a step alone."""
    if isinstance(module, FSDPModule):
        module.set_is_last_backward(last)
        module.set_requires_gradient_sync(last or sharding > 1)
        module.set_requires_all_reduce(last)
        module.set_reshard_after_backward(last or sharding == 3)
