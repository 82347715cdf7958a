"""Engine `torch`, training a GLM on a cloze: packed tokens, weight gradients added to their sums, kernels where they run."""

from torch import Tensor

from steelyard.engines.job import Job
from steelyard.errors import RequestError
from steelyard.models.glm import Glm
from steelyard.models.glm_fused import FusedGlm
from steelyard.models.llama_fused import Gradient
from steelyard.training.cloze import Accuracy, ClozeBatches
from steelyard.training.glm import ClozeMicroBatch, LogProbsOf, check_recompute, choose_kernel, glm_trainer
from steelyard.training.loop import Loop
from steelyard.training.trainer import Trainer


class TorchCloze(Loop):
    def __init__(self, job: Job) -> None:
        made = trainer(job)
        super().__init__(job, made, ClozeBatches(job), Accuracy(job, made))


def trainer(job: Job) -> Trainer:
    if job.case.question.precision.matmul == "fp8":
        raise RequestError("engine torch trains a GLM without fp8; use --precision bf16")
    kernel, tune = choose_kernel(job), job.case.tune
    check_recompute(job)

    def make(model: Glm, gradient: Gradient) -> LogProbsOf:
        fused = FusedGlm(model, gradient, tune.compile, tune.recompute == "full")

        def log_probs(micro: ClozeMicroBatch, dropout: float) -> Tensor:
            ids = micro.tokens, micro.positions, micro.blocks
            return fused(ids, micro.targets, micro.layout, kernel, dropout)

        return log_probs

    return glm_trainer(job, make, {"attention": kernel})
