"""Engine `torch`, training a Llama: on one device, or over all of a plan."""

import torch

from steelyard.engines.job import Job
from steelyard.engines.torch.parallel import parallel_trainer
from steelyard.engines.torch.single import SingleLlama
from steelyard.kernels import jit, packed_attention
from steelyard.models.attention import known
from steelyard.models.tensors import COMPUTED_IN, DTYPES
from steelyard.training.loop import HeldOutLoss, Loop
from steelyard.training.micro_batches import RowBatches
from steelyard.training.placement import SingleDevice
from steelyard.training.trainer import Trainer


class TorchTrain(Loop):
    def __init__(self, job: Job) -> None:
        made = trainer(job)
        batches = row_batches(job)
        super().__init__(job, made, batches, HeldOutLoss(job, made, batches))


def trainer(job: Job) -> Trainer:
    kernel = choose_kernel(job)
    return Trainer(job, SingleLlama(job, kernel), SingleDevice()) if _alone(job) else parallel_trainer(job, kernel)


def row_batches(job: Job) -> RowBatches:
    """Rows laid end to end need no padding, unless it was asked for, or code or other devices are made for one size."""
    train, tune = job.case.question.train, job.case.tune
    if train is None:
        raise ValueError("a question without training")
    any_size = _alone(job) and (jit.serve(job.device.torch_device) or not tune.compile)
    return RowBatches(job, train.length, padded=not tune.pack or not any_size)


def choose_kernel(job: Job) -> str:
    """The kernel of attention that was asked for, or the one for the device."""
    question, device = job.case.question, job.device
    kernel = job.case.tune.attention
    if kernel == "auto":
        dtype = COMPUTED_IN[question.precision.matmul]
        kernel = device.attention(dtype, False)
        where: torch.device = device.torch_device
        dim = question.model.hidden // question.model.heads
        if kernel == "flash" and _alone(job) and packed_attention.serves(where, DTYPES[dtype], dim):
            kernel = "packed"
    return known(kernel, True)


def _alone(job: Job) -> bool:
    return job.plan.tp * job.plan.pp * job.plan.dp == 1
