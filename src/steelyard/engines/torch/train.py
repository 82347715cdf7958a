"""Engine `torch`, training a Llama on one device or over all devices of a plan.

The loss of a step and its gradients are the same functions of the same numbers as on one device:
gradients are summed over replicas, never averaged, because each replica's part of the loss is
divided by the targets of all. The loop is training/training_loop.py, the trainer is
training/trainer.py.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from steelyard.engine.job import Job
from steelyard.engines.torch import collectives
from steelyard.engines.torch.collectives import PlanGroup, PlanGroups
from steelyard.engines.torch.llama_stage import LlamaStage
from steelyard.engines.torch.pipeline import Pipeline
from steelyard.engines.torch.shards import ShardingLevel
from steelyard.kernels import jit
from steelyard.models.attention import (
    check_attention_kernel,
    choose_fastest_kernel,
    choose_windowed_kernel,
)
from steelyard.models.tensors import COMPUTE_DTYPE_NAMES
from steelyard.plan.degrees import get_shard_degree
from steelyard.training.adamw import MixedPrecisionAdamW, compute_total_norm
from steelyard.training.micro_batches import RowBatches
from steelyard.training.packing import TOKEN_MULTIPLE
from steelyard.training.placement import SingleDevicePlacement, TrainableModel, WeighLoss
from steelyard.training.trainer import Trainer
from steelyard.training.training_loop import HeldOutLoss, TrainingLoop


class PlanPlacement(SingleDevicePlacement):
    """The placement of a Llama under any plan (TP, PP, DP, sharding): what its ranks exchange in a
    step, for the `Trainer`. `attach` sets up gradient buffers and pipeline, `backward` runs a
    step's micro-batches, `reduce` waits for gradients and sums the loss, `compute_norm` is the
    gradients' norm over the whole model, `send_updates` sends updated rows: all ranks call these
    together. `to_checkpoint_tensors` marks tensors with their places in the whole model.
    """

    def __init__(self, stage: LlamaStage, groups: PlanGroups, device: torch.device) -> None:
        """Store this rank's stage, its process groups and device; gradients and pipeline come with
        `attach`.
        """
        self.stage, self.groups, self.device = stage, groups, device
        self.loss_dtype = torch.promote_types(stage.matmul_dtype, torch.float32)
        self.pipeline: Pipeline | None = None

    @property
    def exchanges_separately(self) -> bool:  # type: ignore[override]
        """Return whether ranks of this plan exchange only in `reduce` and `sum_over_replicas`:
        plain data parallelism without shards. Tensor parallelism, pipelines and shards wait for one
        another inside forward and backward.
        """
        groups = self.groups
        return (
            groups.copies.size > 1
            and groups.shards.size == groups.tensor.size == groups.stages.size == 1
        )

    def attach(self, model: TrainableModel, optimizer: MixedPrecisionAdamW) -> None:
        """Give the optimizer's master weights their gradient buffers, replace its zeroing
        (`clear_gradients`), initialize its loss scale, and set up `pipeline` if the plan has
        several stages. The stages meet once here, in an all-reduce that all must call, for
        neighbours may exchange only after that.
        """
        self.exchange = self.stage.exchange
        self.exchange.make_gradients(optimizer.master)
        optimizer.clear_gradients = self.exchange.zero_gradients
        # stages without a loss need the scale too
        optimizer.scale(torch.zeros((), device=self.device))
        stages = self.groups.stages
        if stages.size > 1:
            # neighbours may exchange only after all have met once
            stages.reduce_now(torch.zeros((), device=self.device))
            like = torch.empty(
                0, self.stage.shape.hidden, dtype=self.stage.matmul_dtype, device=self.device
            )
            self.pipeline = Pipeline(
                self.stage, stages, like, self.groups.tensor.size, self.exchange.note_backward
            )

    def start_losses(self) -> list[Tensor]:
        """Return a list of one zero on the device, for a rank of the plan that has no loss in a
        step: a stage that is not the last.
        """
        return [torch.zeros((), dtype=self.loss_dtype, device=self.device)]

    def evaluate(self, model: TrainableModel, micro: Any) -> Tensor:
        """Return a micro-batch's summed loss in nats under this plan, without a backward pass; in a
        pipeline all stages get it. All ranks that share a model (stages, tensor-parallel ranks, and
        replicas that shard weights) must call it.
        """
        return model.evaluate(micro) if self.pipeline is None else self.pipeline.loss(micro)

    def backward(self, model: TrainableModel, micros: list[Any], weigh: WeighLoss) -> None:
        """Run forward and backward of a step's micro-batches of this rank, in 1F1B order if the
        plan has a pipeline, else one after the other; gradients accumulate, and are exchanged as
        sharding says, perhaps still after it returns. `weigh` turns a summed loss into what
        backward starts from; it is called on the last stage only.
        """
        if self.pipeline is not None:
            self.pipeline.run_step(micros, weigh)
            return
        for i, micro in enumerate(micros):
            self.exchange.note_backward(i == 0, i == len(micros) - 1)
            weigh(model.loss(micro)).backward()  # type: ignore[no-untyped-call]

    def reduce(self, loss: Tensor) -> Tensor:
        """Wait for all gradients of the step, and return the loss summed over stages and replicas,
        in place; all ranks of the plan must call it.
        """
        self.exchange.wait_for_gradients()
        return _sum_over(loss, self.groups.stages, *self.groups.replicas)

    def sum_over_replicas(self, count: Tensor) -> Tensor:
        """Return the count summed over the plan's replicas, in place; all ranks must call it."""
        return _sum_over(count, *self.groups.replicas)

    def compute_norm(self, grads: list[Tensor], overflows: list[Tensor]) -> Tensor:
        """Return the 2-norm of all gradients of the whole model; `grads` are this rank's, in the
        order of its parameters. Parameters that all tensor-parallel ranks hold are counted once, on
        rank 0 of the group. `overflows` (fp16's flags) are set in place to the maximum over the
        ranks that divide the model, so that all take a step or none does. All ranks must call it.
        """
        counts_shared = self.groups.tensor.rank == 0
        counted = [
            grad
            for grad, item in zip(grads, self.exchange.parameters, strict=True)
            if counts_shared or not item.shared
        ]
        total = compute_total_norm(counted, overflows)
        dividing_groups = [
            item
            for item in (self.groups.shards, self.groups.tensor, self.groups.stages)
            if item.is_live
        ]
        if dividing_groups:
            total = _sum_over(total.square(), *dividing_groups).sqrt()
            for overflow in overflows:  # all ranks take a step, or none
                for group in dividing_groups:
                    group.reduce_now(overflow, dist.ReduceOp.MAX)
        return total

    def send_updates(self) -> None:
        """Start to send the rows that the optimizer changed to replicas that hold whole weights
        (sharding 1 and 2); does not wait.
        """
        self.exchange.send_updates()

    def to_checkpoint_tensors(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the optimizer's tensors of this rank under the same keys, as `PartialTensor`s that
        know their place in the whole model's tensors, for a checkpoint; they share memory.
        """
        return self.stage.as_model_parts(state)


def _sum_over(value: Tensor, *groups: PlanGroup) -> Tensor:
    """Sum a tensor over these groups in place, one after the other, and return it. All ranks of the
    groups must call it; groups of one change nothing.
    """
    for group in groups:
        group.reduce_now(value)
    return value


class TorchTrain(TrainingLoop):
    """The engine `torch` for work `train_rows`: the common training loop over rows, packed unless
    the tune says otherwise, with the held-out loss before and after. Constructing it creates
    process groups, so all ranks must; raises RequestError for an attention kernel that cannot be
    used.
    """

    def __init__(self, job: Job) -> None:
        """Create the trainer of this rank's Llama stage (all ranks together) and the batches; the
        model is built by `prepare`.
        """
        llama_trainer = make_llama_trainer(job)
        batches = make_row_batches(job)
        super().__init__(job, llama_trainer, batches, HeldOutLoss(job, llama_trainer, batches))


def make_llama_trainer(job: Job) -> Trainer:
    """Create the plan's process groups and return a trainer of this rank's stage, whose model is
    not built yet; all ranks must call it. `tune.distributed` makes a single rank run the
    collectives too. Raises RequestError for an attention kernel that cannot be used.
    """
    device: torch.device = job.device.torch_device
    tune, degree = job.case.tune, get_shard_degree(job.case, job.plan.dp)
    forced = tune.distributed and job.world == 1
    sharding: ShardingLevel = tune.sharding if degree > 1 or forced else 0
    groups = collectives.create_plan_groups(
        device, job.device.backend, job.plan, degree, sharding, forced
    )
    stage = LlamaStage(job, choose_training_attention(job), groups, sharding)
    return Trainer(job, stage, PlanPlacement(stage, groups, device))


def make_row_batches(job: Job) -> RowBatches:
    """Return how rows become micro-batches: packed end to end without their padding, or each of
    `train.length` tokens if `tune.pack` is off, or layers are compiled without Triton and need one
    size.

    Packed, the tokens of a micro-batch are filled up, by padding at its end, to a multiple of 128
    and of TP; padded rows are not.
    """
    tune = job.case.tune
    any_size = jit.has_triton(job.device.torch_device) or not tune.compile
    # a tensor-parallel group divides the tokens of a micro-batch
    grain = math.lcm(TOKEN_MULTIPLE, job.plan.tp)
    return RowBatches(
        job, job.train.length, padded=not tune.pack or not any_size, token_multiple=grain
    )


def choose_training_attention(job: Job) -> str:
    """Return the attention kernel that `tune.attention` names, or the device's fastest for `auto`
    (`rows` if that has no window and rows are longer than the model's window). Raises RequestError
    if the kernel is unknown, has wrong gradients for packed rows (`cudnn`), or is named and lacks
    the window that the model needs.
    """
    question, kernel = job.case.question, job.case.tune.attention
    if kernel == "auto":
        kernel = choose_fastest_kernel(
            job.device, COMPUTE_DTYPE_NAMES[question.precision.matmul], question.model.dim
        )
    return choose_windowed_kernel(
        check_attention_kernel(kernel, True),
        question.model.window,
        job.train.length,
        job.case.tune.attention,
    )
