"""Engine `torch`, training a Llama over all devices of a plan, or on one.

The loss of a step is the same function of the same numbers as on one device, and so are its
gradients: they are summed over replicas, never averaged, because each replica's part of the loss is
divided by the targets of all.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from steelyard.engine.job import Job
from steelyard.engines.torch import exchange
from steelyard.engines.torch.exchange import Group, Groups
from steelyard.engines.torch.llama import StageLlama
from steelyard.engines.torch.schedule import Pipeline
from steelyard.kernels import jit
from steelyard.models.attention import fastest, known, with_window
from steelyard.models.tensors import COMPUTED_IN
from steelyard.plan.degrees import shard_degree
from steelyard.training.loop import HeldOutLoss, Loop
from steelyard.training.micro_batches import RowBatches
from steelyard.training.optimizer import Adam, total_norm
from steelyard.training.packing import GRAIN
from steelyard.training.placement import Model, SingleDevice, Weigh
from steelyard.training.trainer import Trainer


class Placed(SingleDevice):
    """A model under any plan: what its ranks exchange in a step."""

    def __init__(self, stage: StageLlama, groups: Groups, device: torch.device) -> None:
        self.stage, self.groups, self.device = stage, groups, device
        self.wide = torch.promote_types(stage.compute, torch.float32)
        self.pipeline: Pipeline | None = None

    @property
    def separate(self) -> bool:  # type: ignore[override]
        """Whole replicas: what they exchange waits for nobody before `reduce`. Tensor parallelism,
        pipelines and shards wait for one another inside forward and backward."""
        groups = self.groups
        return (
            groups.copies.size > 1
            and groups.shards.size == groups.tensor.size == groups.stages.size == 1
        )

    def attach(self, model: Model, optimizer: Adam) -> None:
        self.replicas = self.stage.replicas
        self.replicas.make_gradients(optimizer.master)
        optimizer.clear = self.replicas.zero
        # stages without a loss need the scale too
        optimizer.scale(torch.zeros((), device=self.device))
        stages = self.groups.stages
        if stages.size > 1:
            # neighbours may exchange only after all have met once
            stages.total(torch.zeros((), device=self.device))
            like = torch.empty(
                0, self.stage.shape.hidden, dtype=self.stage.compute, device=self.device
            )
            self.pipeline = Pipeline(
                self.stage, stages, like, self.groups.tensor.size, self.replicas.before
            )

    def no_losses(self) -> list[Tensor]:
        return [torch.zeros((), dtype=self.wide, device=self.device)]

    def evaluate(self, model: Model, micro: Any) -> Tensor:
        return model.evaluate(micro) if self.pipeline is None else self.pipeline.loss(micro)

    def backward(self, model: Model, micros: list[Any], weigh: Weigh) -> None:
        if self.pipeline is not None:
            self.pipeline.learn(micros, weigh)
            return
        for i, micro in enumerate(micros):
            self.replicas.before(i == 0, i == len(micros) - 1)
            weigh(model.loss(micro)).backward()  # type: ignore[no-untyped-call]

    def reduce(self, loss: Tensor) -> Tensor:
        self.replicas.drain()
        return _sum(loss, self.groups.stages, *self.groups.replicas)

    def total(self, count: Tensor) -> Tensor:
        return _sum(count, *self.groups.replicas)

    def norm(self, grads: list[Tensor], overflows: list[Tensor]) -> Tensor:
        """What all ranks of a tensor-parallel group hold counts once."""
        once = self.groups.tensor.rank == 0
        counted = [
            grad
            for grad, one in zip(grads, self.replicas.held, strict=True)
            if once or not one.shared
        ]
        total = total_norm(counted, overflows)
        divided = [
            one for one in (self.groups.shards, self.groups.tensor, self.groups.stages) if one.live
        ]
        if divided:
            total = _sum(total.square(), *divided).sqrt()
            for found in overflows:  # all ranks take a step, or none
                for group in divided:
                    group.total(found, dist.ReduceOp.MAX)
        return total

    def updated(self) -> None:
        self.replicas.updated()

    def stored(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return self.stage.stored(state)


def _sum(value: Tensor, *groups: Group) -> Tensor:
    for group in groups:
        group.total(value)
    return value


class TorchTrain(Loop):
    def __init__(self, job: Job) -> None:
        made = trainer(job)
        batches = row_batches(job)
        super().__init__(job, made, batches, HeldOutLoss(job, made, batches))


def trainer(job: Job) -> Trainer:
    device: torch.device = job.device.torch_device
    tune, degree = job.case.tune, shard_degree(job.case, job.plan.dp)
    forced = tune.distributed and job.world == 1
    sharding = tune.sharding if degree > 1 or forced else 0
    groups = exchange.form(device, job.device.backend, job.plan, degree, sharding, forced)
    stage = StageLlama(job, choose_kernel(job), groups, sharding)
    return Trainer(job, stage, Placed(stage, groups, device))


def row_batches(job: Job) -> RowBatches:
    """Rows laid end to end need no padding, unless it was asked for, or code is made for one size."""
    tune = job.case.tune
    any_size = jit.serve(job.device.torch_device) or not tune.compile
    # a tensor-parallel group divides the tokens of a micro-batch
    grain = math.lcm(GRAIN, job.plan.tp)
    return RowBatches(job, job.train.length, padded=not tune.pack or not any_size, grain=grain)


def choose_kernel(job: Job) -> str:
    """The kernel of attention that was asked for, or the one for the device."""
    question, kernel = job.case.question, job.case.tune.attention
    if kernel == "auto":
        kernel = fastest(job.device, COMPUTED_IN[question.precision.matmul], question.model.dim)
    return with_window(
        known(kernel, True), question.model.window, job.train.length, job.case.tune.attention
    )
