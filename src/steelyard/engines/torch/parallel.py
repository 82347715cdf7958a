"""Engine `torch`, training on many devices: a model laid over them by PyTorch's own means.

Tensor parallelism with sequence parallelism by DTensor, pipelines by torch.distributed.pipelining, replicas that divide what
they hold by FSDP2. The loss of a step is the same function of the same numbers as on one device, and so are its gradients:
they are summed over replicas, never averaged, because each replica's part of the loss is divided by the targets of all.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.utils import get_total_norm

from steelyard.engines.job import Job, Part
from steelyard.engines.torch.model import DTYPES
from steelyard.engines.torch.pipeline import Pipeline
from steelyard.engines.torch.sharded_weights import fill, local
from steelyard.engines.torch.stage import Stage, divide, summed_loss
from steelyard.engines.torch.train import TorchTrainer, _recomputed, compute_dtype
from steelyard.models.llama import Block, Streams
from steelyard.models.placements import Share
from steelyard.plan.degrees import shard_degree
from steelyard.training.loop import Micro
from steelyard.training.optimizer import Adam
from steelyard.weights import load

REPLICAS = ("copies", "shards")  # the replicas of a plan: copies of groups that divide among them what they hold


class LaidTrainer(TorchTrainer):
    block = "plain"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        plan = job.plan
        self.degree = shard_degree(job.case, plan.dp)
        self.sharding = self.tune.sharding if self.degree > 1 else 0
        sizes = (plan.dp // self.degree, self.degree, plan.pp, plan.tp)
        self.mesh = init_device_mesh(self.device.type, sizes, mesh_dim_names=(*REPLICAS, "stages", "team"))
        self.groups = {name: self.mesh[name].get_group() for name in (*REPLICAS, "stages", "team")}
        self.compute = DTYPES[compute_dtype(self.question.precision)]

    def prepare(self, part: Part) -> None:
        train, precision = self.question.train, self.question.precision
        if train is None:
            raise ValueError("a question without training")
        with part("weights"):
            self.stage = self._lay()
            kept = self._convert()
            stages = self.groups["stages"] if self.job.plan.pp > 1 else None
            self.adam: Adam = LaidAdam(list(self.stage.parameters()), kept, train, precision, stages)
            self.job.device.synchronize()
        self.pipeline = None
        if self.job.plan.pp > 1:
            like = torch.empty(0, self.question.model.hidden, dtype=self.compute, device=self.device)
            self.pipeline = Pipeline(self.stage, self.job.place.pp, stages, like, self.job.plan.tp, self._before_backward)

    def _lay(self) -> Stage:
        """This rank's part of the model on the device, filled. It takes memory only once it is divided."""
        plan, place = self.job.plan, self.job.place
        shape = load.shape_of(self.question.model)
        with torch.device("meta"):
            stage = Stage(shape, place.pp, plan.pp, self.kernel).to(DTYPES[self.question.precision.weights])
        if plan.tp > 1:
            divide(stage, self.mesh["team"])
        self._choose_code(stage)
        if self.sharding:
            self._shard(stage)
        stage.to_empty(device=self.device)
        stage.tie()
        shards = Share(self.mesh["shards"].get_local_rank(), self.degree) if self.sharding else Share()
        self.weights = fill(stage, self.job, shape, Share(place.tp, plan.tp), shards)
        return stage.train()

    def _choose_code(self, stage: Stage) -> None:
        """What computes a block and the loss: inside the hooks that gather weights, so that these are never compiled."""
        for block in stage.layers.values():
            run = _streams(_recomputed(cast(Block, block.forward), self.tune.recompute))
            block.forward = torch.compile(run) if self.tune.compile else run
        if self.tune.compile and self.job.plan.tp == 1:
            stage.read = torch.compile(summed_loss, dynamic=True)

    def _shard(self, stage: Stage) -> None:
        """Replicas divide what they hold."""
        mesh: DeviceMesh = self.mesh[REPLICAS] if self.degree < self.job.plan.dp else self.mesh["shards"]
        shard([*stage.layers.values(), stage], mesh, self.sharding, self.compute, DTYPES[self.question.precision.weights])

    def _convert(self) -> list[Tensor] | None:
        """Without shards, weights kept in another precision stand beside the model's own."""
        if self.sharding or self.compute == DTYPES[self.question.precision.weights]:
            return None
        kept = [p.detach() for p in self.stage.parameters()]
        self.stage.to(self.compute)
        return kept

    def _before_backward(self, last: bool) -> None:
        before_backward(self.stage, self.sharding, last)

    def _split(self) -> AbstractContextManager[None]:
        """Where a team has the logits divided, the loss and its backward pass are computed so."""
        return loss_parallel() if self.job.plan.tp > 1 else nullcontext()

    def loss(self, micro: Micro) -> Tensor:
        with self._split():
            out: Tensor = self.stage(None, micro) if self.pipeline is None else self.pipeline.loss(micro)
        return out

    def learn(self, micros: list[Micro], targets: Tensor) -> Tensor:
        losses = [torch.zeros((), dtype=torch.promote_types(self.compute, torch.float32), device=self.device)]

        def weigh(nll: Tensor) -> Tensor:
            loss = nll / targets
            losses.append(loss.detach())
            return self.adam.scale(loss)

        with self._split():
            if self.pipeline is not None:
                self.pipeline.learn(micros, weigh)
            else:
                for i, micro in enumerate(micros):
                    self._before_backward(i == len(micros) - 1)
                    weigh(self.stage(None, micro)).backward()  # type: ignore[no-untyped-call]
        if not self.sharding:
            self._sum_gradients()
        return self._sum(torch.stack(losses).sum(), "stages", *REPLICAS)

    def _sum_gradients(self) -> None:
        """Over replicas that hold everything, once a step."""
        works = []
        for parameter in self.adam.kept:
            if isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor):
                parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
            if parameter.grad is not None and self.job.plan.dp > 1:
                works.append(dist.all_reduce(local(parameter.grad), group=self.groups["copies"], async_op=True))
        for work in works:
            if work is not None:
                work.wait()

    def _sum(self, value: Tensor, *dims: str) -> Tensor:
        for dim in dims:
            if dist.get_world_size(self.groups[dim]) > 1:
                dist.all_reduce(value, group=self.groups[dim])
        return value

    def _names(self) -> list[str]:
        return [name for name, _ in self.stage.named_parameters()]

    def total(self, number: int) -> Tensor:
        return self._sum(super().total(number), *REPLICAS)


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


def _streams(block: Callable[..., Streams]) -> Callable[..., tuple[Tensor, Tensor]]:
    """A block without its keys and values, which nobody asks for here."""

    def run(*arguments: Any) -> tuple[Tensor, Tensor]:
        return block(*arguments)[:2]

    return run


class LaidAdam(Adam):
    """The same for parameters of which this rank holds a part."""

    def __init__(self, own: list[nn.Parameter], kept: list[Tensor] | None, train: Any, precision: Any, stages: Any) -> None:
        super().__init__(own, kept, train, precision)
        self.stages = stages
        self.scale(torch.zeros((), device=own[0].device))  # stages without a loss need the scale too

    def norm(self, grads: list[Tensor]) -> Tensor:
        """Of all gradients, of all ranks."""
        total = get_total_norm(grads, foreach=True)
        if isinstance(total, DTensor):
            total = total.full_tensor()
        if self.stages is not None:
            total = total.square()
            dist.all_reduce(total, group=self.stages)
            total = total.sqrt()
            for found in self.scaler._found_inf_per_device(self.inner).values() if self.scaler.is_enabled() else ():
                dist.all_reduce(found, dist.ReduceOp.MAX, self.stages)  # all stages take a step, or none
        return total

    def hand_over(self) -> None:
        torch._foreach_copy_([local(one) for one in self.own], [local(one) for one in self.kept])
