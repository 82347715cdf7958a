"""Engine `torch`, training a Llama over all devices of a plan, or on one."""

import math

import torch

from steelyard.engine.job import Job
from steelyard.engines.torch import exchange
from steelyard.engines.torch.llama import StageLlama
from steelyard.engines.torch.placed import Placed
from steelyard.kernels import jit, packed_attention
from steelyard.models.attention import known, with_window
from steelyard.models.tensors import COMPUTED_IN, DTYPES
from steelyard.plan.degrees import shard_degree
from steelyard.training.loop import HeldOutLoss, Loop
from steelyard.training.micro_batches import RowBatches
from steelyard.training.packing import GRAIN
from steelyard.training.trainer import Trainer


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
    train, tune = job.case.question.train, job.case.tune
    if train is None:
        raise ValueError("a question without training")
    any_size = jit.serve(job.device.torch_device) or not tune.compile
    grain = math.lcm(GRAIN, job.plan.tp)  # a tensor-parallel group divides the tokens of a micro-batch
    return RowBatches(job, train.length, padded=not tune.pack or not any_size, grain=grain)


def choose_kernel(job: Job) -> str:
    """The kernel of attention that was asked for, or the one for the device."""
    question, device = job.case.question, job.device
    kernel = asked = job.case.tune.attention
    if kernel == "auto":
        dtype = COMPUTED_IN[question.precision.matmul]
        kernel = device.attention(dtype, False)
        where: torch.device = device.torch_device
        if kernel == "flash" and packed_attention.serves(where, DTYPES[dtype], question.model.dim):
            kernel = "packed"
    longest = question.model.positions if question.train is None else question.train.length
    return with_window(known(kernel, True), question.model.window, longest, asked)
