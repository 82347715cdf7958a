"""Engine `torch`, training a Llama on one device or over all devices of a plan.

The loss of a step and its gradients are the same functions of the same numbers as on one device:
gradients are summed over replicas, never averaged, because each replica's part of the loss is
divided by the targets of all. The loop is training/loop.py, the trainer training/trainer.py.
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
    """The placement of a Llama under any plan: what its ranks exchange in a step."""

    def __init__(self, stage: StageLlama, groups: Groups, device: torch.device) -> None:
        self.stage, self.groups, self.device = stage, groups, device
        self.wide = torch.promote_types(stage.compute, torch.float32)
        self.pipeline: Pipeline | None = None

    @property
    def separate(self) -> bool:  # type: ignore[override]
        """Return whether ranks exchange only in `reduce`: plain data parallelism. Tensor
        parallelism, pipelines and shards wait for one another inside forward and backward.
        """
        groups = self.groups
        return (
            groups.copies.size > 1
            and groups.shards.size == groups.tensor.size == groups.stages.size == 1
        )

    def attach(self, model: Model, optimizer: Adam) -> None:
        """Give the optimizer's master weights their gradient buffers, replace its zeroing, and set
        up the pipeline if there are several stages. The stages meet once here, for neighbours may
        exchange only after that.
        """
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
        """Return one zero, for a rank without a loss in a step: a stage that is not the last."""
        return [torch.zeros((), dtype=self.wide, device=self.device)]

    def evaluate(self, model: Model, micro: Any) -> Tensor:
        """Return a micro-batch's summed loss, known to all stages of a pipeline."""
        return model.evaluate(micro) if self.pipeline is None else self.pipeline.loss(micro)

    def backward(self, model: Model, micros: list[Any], weigh: Weigh) -> None:
        """Run forward and backward of a step's micro-batches, in 1F1B order if there is a pipeline;
        `weigh` turns a loss into what backward starts from.
        """
        if self.pipeline is not None:
            self.pipeline.learn(micros, weigh)
            return
        for i, micro in enumerate(micros):
            self.replicas.before(i == 0, i == len(micros) - 1)
            weigh(model.loss(micro)).backward()  # type: ignore[no-untyped-call]

    def reduce(self, loss: Tensor) -> Tensor:
        """Wait for all gradients, and return the loss summed over stages and replicas, in place."""
        self.replicas.drain()
        return _sum(loss, self.groups.stages, *self.groups.replicas)

    def total(self, count: Tensor) -> Tensor:
        """Return the count summed over replicas, in place."""
        return _sum(count, *self.groups.replicas)

    def norm(self, grads: list[Tensor], overflows: list[Tensor]) -> Tensor:
        """Return the norm of all gradients of the whole model. Parameters that all tensor-parallel
        ranks hold are counted once. `overflows` are set in place to the maximum over ranks, so that
        all ranks take a step or none does.
        """
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
        """Start to send the rows that the optimizer changed to ranks that hold whole weights."""
        self.replicas.updated()

    def stored(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the optimizer's tensors as parts of the whole model's, for a checkpoint."""
        return self.stage.stored(state)


def _sum(value: Tensor, *groups: Group) -> Tensor:
    """Sum a tensor over these groups in place, one after the other, and return it."""
    for group in groups:
        group.total(value)
    return value


class TorchTrain(Loop):
    """The engine for work `train_rows`: the common training loop over packed rows, with the
    held-out loss before and after.
    """

    def __init__(self, job: Job) -> None:
        made = trainer(job)
        batches = row_batches(job)
        super().__init__(job, made, batches, HeldOutLoss(job, made, batches))


def trainer(job: Job) -> Trainer:
    """Create the plan's process groups and return a trainer of this rank's stage; all ranks must
    call it. `tune.distributed` makes a single rank run the collectives too. Raises RequestError for
    an attention kernel that cannot be used.
    """
    device: torch.device = job.device.torch_device
    tune, degree = job.case.tune, shard_degree(job.case, job.plan.dp)
    forced = tune.distributed and job.world == 1
    sharding = tune.sharding if degree > 1 or forced else 0
    groups = exchange.form(device, job.device.backend, job.plan, degree, sharding, forced)
    stage = StageLlama(job, choose_kernel(job), groups, sharding)
    return Trainer(job, stage, Placed(stage, groups, device))


def row_batches(job: Job) -> RowBatches:
    """Return how rows become micro-batches: packed end to end without padding, unless `tune.pack`
    is off, or layers are compiled without Triton and need one size. The tokens of a micro-batch are
    a multiple of 128 and of TP.
    """
    tune = job.case.tune
    any_size = jit.serve(job.device.torch_device) or not tune.compile
    # a tensor-parallel group divides the tokens of a micro-batch
    grain = math.lcm(GRAIN, job.plan.tp)
    return RowBatches(job, job.train.length, padded=not tune.pack or not any_size, grain=grain)


def choose_kernel(job: Job) -> str:
    """Return the attention kernel that `tune.attention` names, or the device's fastest for `auto`.
    Raises RequestError if it is unknown, has wrong gradients for packed rows, or lacks the window
    that the model needs.
    """
    question, kernel = job.case.question, job.case.tune.attention
    if kernel == "auto":
        kernel = fastest(job.device, COMPUTED_IN[question.precision.matmul], question.model.dim)
    return with_window(
        known(kernel, True), question.model.window, job.train.length, job.case.tune.attention
    )
