"""Engine `torch`, training a GLM on a cloze: packed tokens, weight gradients added to their sums,
kernels where they run, and what a micro-batch launches recorded where the device can replay it."""

from torch import Tensor

from steelyard.data.rows import Key
from steelyard.engine.job import Job
from steelyard.errors import RequestError
from steelyard.kernels import jit
from steelyard.models.glm import Glm
from steelyard.models.glm_fused import FusedGlm
from steelyard.models.llama_fused import Gradient
from steelyard.training.cloze import Accuracy, ClozeBatches
from steelyard.training.glm import (
    ClozeMicroBatch,
    Computing,
    check_recompute,
    choose_kernel,
    glm_trainer,
)
from steelyard.training.graphs import Record
from steelyard.training.loop import Loop
from steelyard.training.trainer import Trainer


class TorchCloze(Loop):
    def __init__(self, job: Job, record: Record | None = None) -> None:
        """`record` stands in for what the device has."""
        self.record = record or choose_recorder(job)
        made = trainer(job, self.record)
        self.cloze = ClozeBatches(job, filled=self.record is not None)
        super().__init__(job, made, self.cloze, Accuracy(job, made))

    def _sizes(self) -> list[list[Key]]:
        """Of every bucket, and all of them again: the whole pass is recorded before it. Without
        any, first the largest of all: the memory that it takes is there for all others."""
        if self.record is None:
            return super()._sizes()
        return 2 * self.cloze.first_of_buckets() or [*self.cloze.largest(), *super()._sizes()]


def choose_recorder(job: Job) -> Record | None:
    """None where nothing is recorded: torch's own recomputation saves the state of random numbers,
    which no recording can.
    """
    tune, make = job.case.tune, getattr(job.device, "recorder", None)
    wanted = tune.compile and tune.recompute == "none" and jit.serve(job.device.torch_device)
    return make() if wanted and make is not None else None


def trainer(job: Job, record: Record | None = None) -> Trainer:
    if job.case.question.precision.matmul == "fp8":
        raise RequestError("engine torch trains a GLM without fp8; use --precision bf16")
    kernel, tune = choose_kernel(job), job.case.tune
    check_recompute(job)

    def make(model: Glm, gradient: Gradient) -> Computing:
        fused = FusedGlm(model, gradient, tune.compile, tune.recompute == "full")

        def log_probs(micro: ClozeMicroBatch, dropout: float) -> Tensor:
            ids = micro.tokens, micro.positions, micro.blocks
            return fused(ids, micro.targets, micro.layout, kernel, dropout)

        return Computing(
            log_probs, fused.draw if fused.triton else None, record, fused.reorders(kernel)
        )

    return glm_trainer(job, make, {"attention": kernel})
