"""Engine `torch`, training a GLM on cloze samples: packed tokens, weight gradients accumulated in
place, Triton kernels where they run.

Where the device can, the kernel launches of a micro-batch are recorded (a CUDA graph) and replayed.
The loop is training/training_loop.py, batches and accuracy are training/cloze_training.py.
"""

from torch import Tensor

from steelyard.data.training_rows import RowKey
from steelyard.engine.job import Job
from steelyard.errors import RequestError
from steelyard.kernels import jit
from steelyard.models.glm import Glm
from steelyard.models.glm_fused import FusedGlm
from steelyard.models.llama_fused import GradientOf
from steelyard.training.cloze_training import ClozeAccuracy, ClozeBatches
from steelyard.training.glm_trainer import (
    ClozeMicroBatch,
    LogProbComputation,
    check_glm_recompute,
    choose_cloze_attention,
    make_glm_trainer,
)
from steelyard.training.graph_replay import GraphRecorder
from steelyard.training.trainer import Trainer
from steelyard.training.training_loop import TrainingLoop


class TorchCloze(TrainingLoop):
    """The engine `torch` for work `train_cloze`: the common training loop over packed cloze
    samples, with the accuracy as evaluation.

    `record` records a micro-batch's kernel launches for replay (a CUDA graph), and replaces the
    device's own recorder, for tests; None uses that of the device if `choose_recorder` finds one.
    With a recorder, micro-batches are padded to a few sizes, unless the largest has too many
    tokens. RequestError for fp8, and for kernels and recompute modes that it cannot run.
    """

    def __init__(self, job: Job, record: GraphRecorder | None = None) -> None:
        """Choose recorder, trainer and batches; the model is built by `prepare`. With a recorder,
        micro-batches are padded to a few sizes, unless the largest has too many tokens. Raises
        RequestError for what `make_cloze_trainer` refuses.
        """
        self.record = record or choose_recorder(job)
        cloze_trainer = make_cloze_trainer(job, self.record)
        self.cloze = ClozeBatches(job, fills_buckets=self.record is not None)
        super().__init__(job, cloze_trainer, self.cloze, ClozeAccuracy(job, cloze_trainer))

    def _pick_keys_of_each_size(self) -> list[list[RowKey]]:
        """Return the sample keys of each micro-batch to warm up with. When recording, one of every
        bucket (size that micro-batches are padded to), the whole list twice, so that all graphs
        exist before the pass; without buckets, the largest one first, so that its memory serves all
        others. Without recording, one for each number of samples, as in every training.
        """
        if self.record is None:
            return super()._pick_keys_of_each_size()
        return 2 * self.cloze.pick_one_per_bucket() or [
            *self.cloze.pick_largest(),
            *super()._pick_keys_of_each_size(),
        ]


def choose_recorder(job: Job) -> GraphRecorder | None:
    """Return a new recorder of kernel launches of the device, or None if launches are not recorded:
    without `tune.compile`, with recomputation (it saves random states, which a recording cannot),
    without Triton, or if the device has none.
    """
    tune, make_recorder = job.case.tune, getattr(job.device, "recorder", None)
    records = tune.compile and tune.recompute == "none" and jit.has_triton(job.device.torch_device)
    return make_recorder() if records and make_recorder is not None else None


def make_cloze_trainer(job: Job, record: GraphRecorder | None = None) -> Trainer:
    """Return the trainer of a GLM with fused layers, which each replica holds whole. `record`, if
    given, records and replays kernel launches. Raises RequestError for fp8, an unknown attention
    kernel or one that cannot run here, and recompute modes but `none` and `full`.
    """
    if job.case.question.precision.matmul == "fp8":
        raise RequestError("engine torch trains a GLM without fp8; use --precision bf16")
    kernel, tune = choose_cloze_attention(job), job.case.tune
    check_glm_recompute(job)

    def make_computing(model: Glm, gradient: GradientOf) -> LogProbComputation:
        """Return how a GLM's log-probabilities are computed by fused layers; `gradient(parameter)`
        returns the tensor to which a parameter's gradient is added.
        """
        fused = FusedGlm(model, gradient, tune.compile, tune.recompute == "full")

        def log_probs(micro: ClozeMicroBatch, dropout: float) -> Tensor:
            """Return the log-probabilities [S] of the spans' target tokens of a micro-batch, with
            this dropout rate.
            """
            ids = micro.tokens, micro.positions, micro.blocks
            return fused(ids, micro.targets, micro.layout, kernel, dropout)

        return LogProbComputation(
            log_probs,
            fused.draw_seed if fused.triton else None,
            record,
            fused.is_interleaved(kernel),
        )

    return make_glm_trainer(job, make_computing, {"attention": kernel})
