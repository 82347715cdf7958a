"""A model split over many devices with PyTorch's own tools: tensor parallelism by DTensor, pipelines, replicas by FSDP2.

The loss of a step is the same function of the same numbers as on one device, and so are its gradients: they are summed over
replicas, never averaged, because each replica's part of the loss is divided by the targets of all.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from steelyard.models.tensors import local
from steelyard.plan.degrees import Plan
from steelyard.training.fsdp import before_backward
from steelyard.training.optimizer import Adam, total_norm
from steelyard.training.placement import Model, Weigh

REPLICAS = ("copies", "shards")  # the replicas of a plan: copies of groups that divide among them what they hold
DIMS = (*REPLICAS, "stages", "tensor")

Last = Callable[[bool], None]  # told before every backward pass whether it is the step's last


class Schedule(Protocol):
    """A pipeline's stages, one micro-batch after the other."""

    def learn(self, micros: list[Any], weigh: Weigh) -> None: ...

    def loss(self, micro: Any) -> Tensor: ...


def plan_mesh(device: torch.device, plan: Plan, degree: int) -> DeviceMesh:
    """All ranks of a plan, `degree` of its replicas dividing among them what they hold."""
    sizes = (plan.dp // degree, degree, plan.pp, plan.tp)
    return init_device_mesh(device.type, sizes, mesh_dim_names=DIMS)


class Parallel:
    lockstep = True

    def __init__(
        self,
        mesh: DeviceMesh,
        sharding: int,
        compute: torch.dtype,
        device: torch.device,
        pipeline: Callable[[Model, Any, Last], Schedule] | None = None,
    ) -> None:
        """`pipeline` makes the schedule of a model's stages, over their process group."""
        self.groups = {name: mesh[name].get_group() for name in DIMS}
        self.sharding, self.device, self.make_pipeline = sharding, device, pipeline
        self.wide = torch.promote_types(compute, torch.float32)

    @property
    def separate(self) -> bool:
        """Whole replicas: tensor parallelism, pipelines and shards meet inside forward and backward."""
        whole = not self.sharding and self._size("tensor") == self._size("stages") == 1
        return whole and self._size("copies") > 1

    def attach(self, model: Model, optimizer: Adam) -> None:
        self.model, self.optimizer, self.pipeline = model, optimizer, None
        optimizer.scale(torch.zeros((), device=self.device))  # stages without a loss need the scale too
        if self.make_pipeline is not None:
            self.pipeline = self.make_pipeline(model, self.groups["stages"], self._before_backward)

    def no_losses(self) -> list[Tensor]:
        return [torch.zeros((), dtype=self.wide, device=self.device)]

    def _before_backward(self, last: bool) -> None:
        for root in self.model.roots:
            before_backward(root, self.sharding, last)

    def _split_logits(self) -> AbstractContextManager[None]:
        """Where the logits are divided, the loss and its backward pass are computed so."""
        return loss_parallel() if self._size("tensor") > 1 else nullcontext()

    def evaluate(self, model: Model, micro: Any) -> Tensor:
        with self._split_logits():
            return model.evaluate(micro) if self.pipeline is None else self.pipeline.loss(micro)

    def backward(self, model: Model, micros: list[Any], weigh: Weigh) -> None:
        with self._split_logits():
            if self.pipeline is not None:
                self.pipeline.learn(micros, weigh)
                return
            for i, micro in enumerate(micros):
                self._before_backward(i == len(micros) - 1)
                weigh(model.loss(micro)).backward()  # type: ignore[no-untyped-call]

    def reduce(self, loss: Tensor) -> Tensor:
        if not self.sharding:
            self._sum_gradients()
        return self._sum(loss, "stages", *REPLICAS)

    def _sum_gradients(self) -> None:
        """Over replicas that hold everything, once a step."""
        works = []
        for parameter in self.optimizer.master:
            if isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor):
                parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
            if parameter.grad is not None and self._size("copies") > 1:
                works.append(dist.all_reduce(local(parameter.grad), group=self.groups["copies"], async_op=True))
        for work in works:
            if work is not None:
                work.wait()

    def _size(self, dim: str) -> int:
        return dist.get_world_size(self.groups[dim])

    def _sum(self, value: Tensor, *dims: str) -> Tensor:
        for dim in dims:
            if self._size(dim) > 1:
                dist.all_reduce(value, group=self.groups[dim])
        return value

    def total(self, count: Tensor) -> Tensor:
        return self._sum(count, *REPLICAS)

    def norm(self, grads: list[Tensor], overflows: list[Tensor]) -> Tensor:
        total = total_norm(grads, overflows)
        if isinstance(total, DTensor):
            total = total.full_tensor()
        if self._size("stages") > 1:
            total = total.square()
            dist.all_reduce(total, group=self.groups["stages"])
            total = total.sqrt()
            for found in overflows:
                dist.all_reduce(found, dist.ReduceOp.MAX, self.groups["stages"])  # all stages take a step, or none
        return total
