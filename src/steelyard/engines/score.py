"""What scoring engines share: reading answers off logits, and which batches are theirs."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from steelyard.case import Tune
from steelyard.engines import Job
from steelyard.models import weights
from steelyard.models.llama import Llama

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def compile_wanted(name: str, tune: Tune) -> bool:
    """The val pass is the reference and never compiled."""
    return tune.compile and name != "val"


def send(array: NDArray[np.int64], device: torch.device) -> Tensor:
    """An array on the device, without waiting for it."""
    host = torch.from_numpy(array)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def our_model(job: Job) -> tuple[Llama, dict[str, Any]]:
    """The case's model on the device, with its weights, and where they came from: the same for every engine."""
    question = job.case.question
    model = weights.build(weights.shape_of(question.model), job.device.torch_device, DTYPES[question.precision.weights])
    if job.weights is not None:
        return model, weights.load_hf(model, job.weights, job.loading)
    weights.fill_random(model, question.seed)
    return model, {"source": "random", "seed": question.seed}


class Answers:
    """Answers of one pass. They stay on the device until the pass is over, so that reading them stops nothing."""

    def __init__(self) -> None:
        self._items: list[int] = []
        self._parts: list[Tensor] = []
        self._read: Tensor | None = None

    @staticmethod
    def of(logits: Tensor, letters: Tensor) -> Tensor:
        """Per row: the likeliest token of all, the likeliest of the four answers, and whether every logit was finite."""
        best = logits.argmax(-1)
        choice = logits[:, letters].argmax(-1)
        finite = torch.isfinite(logits).all(-1)
        return torch.stack((best, choice, finite.to(best.dtype)), dim=1)

    def add(self, items: list[int], answers: Tensor) -> None:
        self._items += items
        self._parts.append(answers)

    def read(self) -> None:
        """Copy to the host; waits for the device."""
        self._read = torch.cat(self._parts).cpu() if self._parts else torch.zeros(0, 3, dtype=torch.int64)
        self._parts = []

    def table(self) -> dict[str, Any]:
        if self._read is None:
            raise RuntimeError("answers were not read; the pass did not end")
        best, choice, finite = self._read.unbind(1)
        return {"items": self._items, "best": best.tolist(), "choice": choice.tolist(), "finite": finite.tolist()}
