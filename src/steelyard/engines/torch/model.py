"""What scoring engines share: the case's model with its weights, and sending arrays to the device."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from steelyard.case.case import Tune
from steelyard.engines.job import Job
from steelyard.models import placements
from steelyard.models.answers import READERS, Reader
from steelyard.models.llama import Llama
from steelyard.weights import load

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def compile_wanted(name: str, tune: Tune) -> bool:
    """The val pass is the reference and never compiled."""
    return tune.compile and name != "val"


def send(array: NDArray[np.int64], device: torch.device) -> Tensor:
    """An array on the device, without waiting for it."""
    host = torch.from_numpy(array)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def reader(job: Job) -> Reader:
    question = job.case.question
    return READERS[question.task](job.texts, question.model.vocab, job.team, job.device.torch_device)


def our_model(job: Job) -> tuple[Llama, dict[str, Any]]:
    """The case's model, or this rank's share of it, on the device with its weights, and where they came from: the same for
    every engine."""
    question, share = job.case.question, job.team.share
    shape = load.shape_of(question.model)
    model = load.build(shape, job.device.torch_device, DTYPES[question.precision.weights], share)
    if job.weights is None:
        load.fill_random(model, question.seed, shape, share)
        source: dict[str, Any] = {"source": "random", "seed": question.seed}
    else:
        source = load.load(model, job.weights, shape, share, job.loading)
    placements.connect(model, share, job.team.total)
    return model, source
