"""A GLM trained on a cloze: scores of candidates from packed contexts and spans, their loss, and
its trainer.

A candidate's score is the sum of its tokens' log-probabilities; a sample's loss is the
cross-entropy of its candidates' scores. The loss of a step is divided by the samples of the global
batch, so gradients are summed over replicas, and one step is the same function of the same numbers
for any number of replicas. Engines supply what computes the log-probabilities
(`LogProbComputation`).
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from steelyard.data.cloze_samples import ClozePack
from steelyard.engine.job import Job
from steelyard.errors import RequestError
from steelyard.kernels import jit
from steelyard.models import glm
from steelyard.models.cloze_attention import CLOZE_KERNELS, ClozeLayout, make_cloze_layout
from steelyard.models.llama_fused import GradientOf
from steelyard.models.shapes import GlmModel
from steelyard.models.tensors import COMPUTE_DTYPE_NAMES, DTYPES, get_compute_dtype, send_array
from steelyard.training.graph_replay import GraphRecorder, ReplayedFunction
from steelyard.training.placement import ReplicatedPlacement, TrainableModel
from steelyard.training.size_buckets import SizeBucket
from steelyard.training.trainer import Trainer
from steelyard.weights import glm_checkpoint

RECOMPUTE_MODES = ("none", "full")
FASTEST_KERNEL = "packed"  # as measured, for 16-bit types where Triton runs
NO_ANSWER = -1  # value of `right` for samples that are scored and not trained on


@dataclass(frozen=True)
class ClozeMicroBatch:
    """The tensors of a micro-batch of cloze samples on the device; made by `send_cloze_batch`.
    `tokens`, `positions` and `blocks` (GLM's second positions) have one entry per token, all
    contexts and then all spans (a candidate's tokens), whose ends are in `layout`.

    S is the number of span tokens, with padding: `targets` and `span_of_token` [S] have each one's
    target token and span number. `spans_of_sample` [samples, most candidates] has the span numbers
    of a sample's candidates; the number of spans stands for none. `right` [samples] is the index of
    the right candidate, or NO_ANSWER (-1). `list_tensors` returns all tensors that a forward reads,
    `replay_key` is equal for micro-batches that one recorded graph serves.
    """

    tokens: Tensor
    positions: Tensor
    blocks: Tensor
    layout: ClozeLayout
    targets: Tensor  # [S]
    span_of_token: Tensor  # [S]: number of the span; the number of spans for padding
    # [samples, most candidates]: number of the span; the number of spans in slots without one
    spans_of_sample: Tensor
    right: Tensor  # [samples]: index of the right candidate, or NO_ANSWER

    def list_tensors(self, interleaved: bool) -> list[Tensor]:
        """Return all tensors of this micro-batch that a forward pass reads, always in the same
        order, so that a graph's inputs can be overwritten. `interleaved` selects the layout's
        tensors for kernels that read interleaved tokens, else those of kernel `padded`.
        """
        inputs = [
            self.tokens,
            self.positions,
            self.blocks,
            self.targets,
            self.span_of_token,
            self.spans_of_sample,
            self.right,
        ]
        return [*inputs, *self.layout.list_kernel_tensors(interleaved)]

    @property
    def replay_key(self) -> Hashable:
        """Return a key that is equal for micro-batches whose forward passes differ only in the
        values of these tensors. Valid only for micro-batches that were padded to a bucket.
        """
        return len(self.tokens), self.spans_of_sample.shape, self.layout.capacity


@dataclass(frozen=True)
class LogProbComputation:
    """How an engine computes the log-probabilities of the spans' target tokens; made by the
    engine's `MakeComputation`.

    `log_probs(micro_batch, dropout)` returns them as [S] in nats; `dropout` is the probability to
    drop an element, 0 in evaluations. `draw_random_numbers()`, called before every loss, draws new
    numbers for the kernels' dropout (None: nothing to call). `recorder` records graphs of padded
    micro-batches (None: none are recorded). `interleaved`: its attention kernel reads the layout's
    interleaved tensors, not those of kernel `padded`.
    """

    log_probs: Callable[[ClozeMicroBatch, float], Tensor]
    # called before every forward with dropout: draws new random numbers for the kernels
    draw_random_numbers: Callable[[], None] | None = None
    recorder: GraphRecorder | None = None  # records graphs of padded micro-batches
    interleaved: bool = False  # its kernel reads the interleaved layout


MakeComputation = Callable[[glm.Glm, GradientOf], LogProbComputation]


def send_cloze_batch(
    pack: ClozePack, device: torch.device, bucket: SizeBucket | None = None
) -> ClozeMicroBatch:
    """Copy a pack to the device as a micro-batch, without waiting. With a bucket (the size it is
    padded to) the pack must have been padded to it (`fill_pack`); targets and candidates are padded
    here. Without, there are as many candidate slots as the largest sample has.
    """
    counts = np.array(pack.candidates)
    slots = np.arange(bucket.candidates if bucket else counts.max())
    spans = np.where(
        slots < counts[:, None], (counts.cumsum() - counts)[:, None] + slots, len(pack.spans)
    )
    missing = bucket.capacity.logits - len(pack.targets) if bucket else 0
    span_of_token = np.repeat(np.arange(len(pack.spans)), pack.spans)
    return ClozeMicroBatch(
        tokens=send_array(pack.tokens, device),
        positions=send_array(pack.positions, device),
        blocks=send_array(pack.blocks, device),
        layout=make_cloze_layout(
            pack.contexts, pack.spans, pack.groups, device, bucket.capacity if bucket else None
        ),
        targets=send_array(np.pad(pack.targets, (0, missing)), device),
        span_of_token=send_array(
            np.pad(span_of_token, (0, missing), constant_values=len(pack.spans)), device
        ),
        spans_of_sample=send_array(spans, device),
        right=send_array(pack.right, device),
    )


def compute_scores(log_probs: Tensor, micro: ClozeMicroBatch) -> Tensor:
    """Return the candidates' scores [samples, candidate slots] in nats: the sum of the
    log-probabilities `log_probs` [S] of each span's tokens; -inf in slots without a candidate.
    Padding tokens count for none.
    """
    span_count = len(micro.layout.lengths[1])
    span_scores = log_probs.new_zeros(span_count + 1).index_add(0, micro.span_of_token, log_probs)[
        :span_count
    ]
    scores_and_filler = torch.cat((span_scores, log_probs.new_full((1,), -torch.inf)))
    return scores_and_filler.index_select(0, micro.spans_of_sample.flatten()).view(
        micro.spans_of_sample.shape
    )


def get_glm_shape(job: Job) -> GlmModel:
    """Return the job's model, which must be a GLM. Raises TypeError if it is not."""
    model = job.case.question.model
    if not isinstance(model, GlmModel):
        raise TypeError(f"a model of family {model.family!r} is not a GLM")
    return model


def choose_cloze_attention(job: Job) -> str:
    """Return the name of the attention kernel: `tune.attention` unless that is `auto`. For `auto`
    it is `padded` if the device has no flash attention for this precision or the head size does not
    fit it (a multiple of 8 up to 256), else `packed` if that can run, else `flash`. Raises
    RequestError for an unknown kernel, flash with a head size that does not fit, or packed where it
    cannot run; TypeError if the model is no GLM.
    """
    shape, kernel = get_glm_shape(job), job.case.tune.attention
    dim = shape.hidden // shape.heads
    flash_fits = dim % 8 == 0 and dim <= 256  # flash attention's own limits
    if kernel == "auto":
        device_has_flash = (
            job.device.attention(COMPUTE_DTYPE_NAMES[job.case.question.precision.matmul], False)
            == "flash"
        )
        return (
            (FASTEST_KERNEL if can_use_packed_kernel(job) else "flash")
            if device_has_flash and flash_fits
            else "padded"
        )
    if kernel not in CLOZE_KERNELS:
        raise RequestError(
            f"tune.attention={kernel!r} is not known; allowed: auto,"
            f" {', '.join(sorted(CLOZE_KERNELS))}"
        )
    if kernel == "flash" and not flash_fits:
        raise RequestError(
            "tune.attention=flash needs a head dimension that is a multiple of 8 up to 256, not"
            f" {dim}; choose padded"
        )
    if kernel == "packed" and not can_use_packed_kernel(job):
        raise RequestError(
            "tune.attention=packed needs a GPU with Triton, tune.compile=true, a 16-bit precision"
            " and a head dimension of at most 128; choose auto"
        )
    return kernel


def can_use_packed_kernel(job: Job) -> bool:
    """Return whether the Triton kernel `packed` (kernels/glm_packed_attention.py) can compute this
    job: Triton, `tune.compile`, a 16-bit matmul precision and heads of at most 128 numbers.
    """
    shape, question = get_glm_shape(job), job.case.question
    is_16_bit = get_compute_dtype(question.precision.matmul).itemsize == 2
    return (
        jit.has_triton(job.device.torch_device)
        and job.case.tune.compile
        and is_16_bit
        and shape.hidden // shape.heads <= 128
    )


def check_glm_recompute(job: Job) -> None:
    """Raise RequestError unless `tune.recompute` is `none` or `full`."""
    recompute = job.case.tune.recompute
    if recompute not in RECOMPUTE_MODES:
        raise RequestError(
            f"tune.recompute={recompute!r} does not work with GLM; allowed:"
            f" {', '.join(RECOMPUTE_MODES)} "
            "(recomputation must repeat the same dropout)"
        )


class TrainedGlm(TrainableModel):
    """A whole GLM on this rank's device, as a `Trainer` sees it (a `TrainableModel`). `build` sets
    `module`, the GLM, and `weights`, their source; `compile` sets `computation`, the engine's
    `LogProbComputation`; `loss(micro)` is the summed cross-entropy of the samples over their
    candidates with dropout, `evaluate(micro)` the candidates' scores without.

    `make_computation(module, gradient)` chooses how the engine computes log-probabilities;
    `details` are the engine's own choices, for the record. Constructing it raises TypeError if the
    job's model is no GLM.
    """

    def __init__(
        self, job: Job, make_computation: MakeComputation, details: dict[str, Any]
    ) -> None:
        self.job, self.make_computation, self.engine_details = job, make_computation, details
        self.shape = get_glm_shape(job)

    def build(self) -> list[Tensor] | None:
        """Build the GLM with random weights or those of a checkpoint, and cast it to the dtype of
        the matmuls. Return the weights in the dtype that they are stored in if that is another
        dtype (the master weights), else None. Sets `module` and `weights`, their source. Raises
        RequestError if the checkpoint does not fit.
        """
        question, device = self.job.case.question, self.job.device.torch_device
        self.module = glm.build_glm(self.shape, device, DTYPES[question.precision.weights])
        if self.job.weights is None:
            glm.fill_random_glm_weights(self.module, question.seed)
            self.weights = {"source": "random", "seed": question.seed}
        else:
            self.weights = glm_checkpoint.load_glm(
                self.module, self.job.weights, self.job.report_loading
            )
        master = [p.detach() for p in self.module.parameters()]
        self.module.to(get_compute_dtype(question.precision.matmul)).requires_grad_(True)
        return master if master[0].dtype != self.module.word_embeddings.weight.dtype else None

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return (name, parameter) of all parameters of the GLM, each of which this rank updates.
        Valid after `build`.
        """
        return list(self.module.named_parameters())

    def compile(self, gradient: GradientOf) -> None:
        """Make the engine's computation of log-probabilities, and set `computation` and
        `replayed_loss`. If it can record graphs, losses of padded micro-batches will be replayed
        from them. Nothing is computed or recorded here: the first `loss` of each size is computed
        without graphs, the second records them. `gradient(parameter)` returns the tensor that sums
        its gradient.
        """
        self.computation = computation = self.make_computation(self.module, gradient)
        self.replayed_loss: ReplayedFunction[ClozeMicroBatch] | None = None
        if computation.recorder is not None:
            self.replayed_loss = ReplayedFunction(
                self._loss,
                computation.recorder,
                lambda micro: micro.list_tensors(computation.interleaved),
                lambda micro: micro.replay_key,
            )

    def evaluate(self, micro: ClozeMicroBatch) -> Tensor:
        """Return the scores of each sample's candidates without dropout: [samples, most
        candidates], -inf in slots without a candidate.
        """
        return compute_scores(self.computation.log_probs(micro, 0.0), micro)

    def loss(self, micro: ClozeMicroBatch) -> Tensor:
        """Return the summed cross-entropy of a micro-batch's samples over their candidates, in
        nats, with dropout; samples without a right answer are left out. Replayed from graphs if the
        engine records them and the micro-batch was padded to a bucket. Its `backward` must be
        called before the next `loss`: recorded graphs share their memory.
        """
        if self.computation.draw_random_numbers is not None:
            self.computation.draw_random_numbers()
        if self.replayed_loss is None or micro.layout.capacity is None:
            return self._loss(micro)
        return self.replayed_loss(micro)

    def _loss(self, micro: ClozeMicroBatch) -> Tensor:
        """Return the summed cross-entropy, in nats, of a micro-batch's samples over their
        candidates' scores, with dropout; samples without a right answer count 0. This is the
        function that graphs record.
        """
        scores = compute_scores(self.computation.log_probs(micro, self.shape.dropout), micro)
        return F.cross_entropy(scores, micro.right, reduction="sum", ignore_index=NO_ANSWER)

    def details(self) -> dict[str, Any]:
        """Return for the record the engine's choices, and, if graphs are used, `graphs`, for how
        many sizes of micro-batches they have been recorded.
        """
        return (
            self.engine_details
            if self.replayed_loss is None
            else {**self.engine_details, "graphs": len(self.replayed_loss.graph_pairs)}
        )


def make_glm_trainer(
    job: Job, make_computation: MakeComputation, details: dict[str, Any]
) -> Trainer:
    """Return a trainer of a GLM that every replica holds whole; nothing is built yet.
    `make_computation` chooses how the engine computes log-probabilities, `details` are the engine's
    own choices, for the record. Raises TypeError if the model is no GLM.
    """
    placement = ReplicatedPlacement(
        job.plan.dp, get_compute_dtype(job.case.question.precision.matmul), job.device.torch_device
    )
    return Trainer(job, TrainedGlm(job, make_computation, details), placement)
