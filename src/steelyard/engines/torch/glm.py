"""Engine `torch`, training a GLM on cloze samples: packed tokens, weight gradients accumulated in
place, Triton kernels where they run.

Where the device can, the kernel launches of a micro-batch are recorded (a CUDA graph) and replayed.
The loop is training/loop.py, batches and accuracy are training/cloze.py.
"""

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
    """The engine for work `train_cloze`. `record` replaces the device's own recorder of kernel
    launches, for tests; None uses that of the device if it has one and the tune allows it.
    """

    def __init__(self, job: Job, record: Record | None = None) -> None:
        """`record` stands in for what the device has."""
        self.record = record or choose_recorder(job)
        made = trainer(job, self.record)
        self.cloze = ClozeBatches(job, filled=self.record is not None)
        super().__init__(job, made, self.cloze, Accuracy(job, made))

    def _sizes(self) -> list[list[Key]]:
        """Return the micro-batches to warm up with. When recording, one of every bucket, twice, so
        that all graphs exist before the pass; without buckets, the largest one first, so that its
        memory serves all others.
        """
        if self.record is None:
            return super()._sizes()
        return 2 * self.cloze.first_of_buckets() or [*self.cloze.largest(), *super()._sizes()]


def choose_recorder(job: Job) -> Record | None:
    """Return the device's recorder of kernel launches, or None if launches are not recorded:
    without `tune.compile`, with recomputation (it saves random states, which a recording cannot),
    without Triton, or if the device has none.
    """
    tune, make = job.case.tune, getattr(job.device, "recorder", None)
    wanted = tune.compile and tune.recompute == "none" and jit.serve(job.device.torch_device)
    return make() if wanted and make is not None else None


def trainer(job: Job, record: Record | None = None) -> Trainer:
    """Return the trainer of a GLM with fused layers. `record` replays kernel launches if given.
    Raises RequestError for fp8, and for attention kernels or recompute modes that are not
    supported.
    """
    if job.case.question.precision.matmul == "fp8":
        raise RequestError("engine torch trains a GLM without fp8; use --precision bf16")
    kernel, tune = choose_kernel(job), job.case.tune
    check_recompute(job)

    def make(model: Glm, gradient: Gradient) -> Computing:
        """Return how a GLM's log-probabilities are computed by fused layers."""
        fused = FusedGlm(model, gradient, tune.compile, tune.recompute == "full")

        def log_probs(micro: ClozeMicroBatch, dropout: float) -> Tensor:
            """Return the log-probabilities of the spans' targets of a micro-batch, with this
            dropout rate.
            """
            ids = micro.tokens, micro.positions, micro.blocks
            return fused(ids, micro.targets, micro.layout, kernel, dropout)

        return Computing(
            log_probs, fused.draw if fused.triton else None, record, fused.reorders(kernel)
        )

    return glm_trainer(job, make, {"attention": kernel})
