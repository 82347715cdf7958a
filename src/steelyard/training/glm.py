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

from steelyard.data.cloze import Pack
from steelyard.engine.job import Job
from steelyard.errors import RequestError
from steelyard.kernels import jit
from steelyard.models import glm
from steelyard.models.glm_attention import KERNELS, ClozeLayout, layout
from steelyard.models.llama_fused import Gradient
from steelyard.models.shapes import GlmModel
from steelyard.models.tensors import COMPUTED_IN, DTYPES, compute_dtype, send
from steelyard.training.buckets import Bucket
from steelyard.training.graphs import Record, Recorded
from steelyard.training.placement import Model, Replicated
from steelyard.training.trainer import Trainer
from steelyard.weights import glm as glm_checkpoint

RECOMPUTE = ("none", "full")
FASTEST = "packed"  # as measured, for 16-bit types where Triton runs
NO_ANSWER = -1  # value of `right` for samples that are scored and not trained on


@dataclass(frozen=True)
class ClozeMicroBatch:
    """The tensors of a micro-batch of cloze samples on the device. S is the number of tokens of all
    spans.
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

    def tensors(self, joint: bool) -> list[Tensor]:
        """Return all tensors that a forward pass reads, always in the same order; `interleaved`
        selects which tensors of the layout the attention kernel reads.
        """
        own = [
            self.tokens,
            self.positions,
            self.blocks,
            self.targets,
            self.span_of_token,
            self.spans_of_sample,
            self.right,
        ]
        return [*own, *self.layout.tensors(joint)]

    @property
    def key(self) -> Hashable:
        """Return a key that is equal for micro-batches whose forward passes differ only in the
        values of these tensors. Valid only for micro-batches that were padded to a bucket.
        """
        return len(self.tokens), self.spans_of_sample.shape, self.layout.room


@dataclass(frozen=True)
class Computing:
    """How an engine computes the log-probabilities of the spans' target tokens.

    `log_probs(micro_batch, dropout)` returns them as [S].
    """

    log_probs: Callable[[ClozeMicroBatch, float], Tensor]
    # called before every forward with dropout: draws new random numbers for the kernels
    draw: Callable[[], None] | None = None
    record: Record | None = None  # records graphs of padded micro-batches
    joint: bool = False  # its kernel reads the interleaved layout


MakeComputing = Callable[[glm.Glm, Gradient], Computing]


def to_device(pack: Pack, device: torch.device, bucket: Bucket | None = None) -> ClozeMicroBatch:
    """Copy a pack to the device as a micro-batch, without waiting. With a bucket the pack must have
    been padded to it (`fill_pack`); targets and candidates are padded here.
    """
    counts = np.array(pack.candidates)
    slots = np.arange(bucket.candidates if bucket else counts.max())
    spans = np.where(
        slots < counts[:, None], (counts.cumsum() - counts)[:, None] + slots, len(pack.spans)
    )
    missing = bucket.room.logits - len(pack.targets) if bucket else 0
    owner = np.repeat(np.arange(len(pack.spans)), pack.spans)
    return ClozeMicroBatch(
        tokens=send(pack.tokens, device),
        positions=send(pack.positions, device),
        blocks=send(pack.blocks, device),
        layout=layout(
            pack.contexts, pack.spans, pack.groups, device, bucket.room if bucket else None
        ),
        targets=send(np.pad(pack.targets, (0, missing)), device),
        span_of_token=send(np.pad(owner, (0, missing), constant_values=len(pack.spans)), device),
        spans_of_sample=send(spans, device),
        right=send(pack.right, device),
    )


def scores_of(log_probs: Tensor, micro: ClozeMicroBatch) -> Tensor:
    """Return the candidates' scores [samples, most candidates] in nats: the sum of the
    log-probabilities `log_probs` [S] of each span's tokens; -inf in slots without a candidate.
    """
    count = len(micro.layout.lengths[1])
    spans = log_probs.new_zeros(count + 1).index_add(0, micro.span_of_token, log_probs)[:count]
    with_none = torch.cat((spans, log_probs.new_full((1,), -torch.inf)))
    return with_none.index_select(0, micro.spans_of_sample.flatten()).view(
        micro.spans_of_sample.shape
    )


def shape_of(job: Job) -> GlmModel:
    """Return the shape of the job's model. Raises TypeError if it is no GLM."""
    model = job.case.question.model
    if not isinstance(model, GlmModel):
        raise TypeError(f"a model of family {model.family!r} is no GLM")
    return model


def choose_kernel(job: Job) -> str:
    """Return the attention kernel `tune.attention`, or for `auto` the fastest one that runs on the
    device (`packed`, `flash` or `padded`). Raises RequestError for an unknown kernel, or one that
    cannot run with this model, precision or device.
    """
    shape, asked = shape_of(job), job.case.tune.attention
    dim = shape.hidden // shape.heads
    fits = dim % 8 == 0 and dim <= 256  # flash attention's own limits
    if asked == "auto":
        flash = (
            job.device.attention(COMPUTED_IN[job.case.question.precision.matmul], False) == "flash"
        )
        return (FASTEST if packs(job) else "flash") if flash and fits else "padded"
    if asked not in KERNELS:
        raise RequestError(
            f"tune.attention={asked!r} is not known; allowed: auto, {', '.join(sorted(KERNELS))}"
        )
    if asked == "flash" and not fits:
        raise RequestError(
            f"tune.attention=flash takes heads of 8, 16, … 256 numbers, not {dim}; choose padded"
        )
    if asked == "packed" and not packs(job):
        raise RequestError(
            "tune.attention=packed needs a GPU with Triton, tune.compile=true, a 16-bit precision"
            " and heads of 128 numbers at most; choose auto"
        )
    return asked


def packs(job: Job) -> bool:
    """Return whether the Triton kernel `packed` (kernels/glm_packed_attention.py) can compute this
    job: Triton, `tune.compile`, a 16-bit matmul precision and heads of at most 128 numbers.
    """
    shape, question = shape_of(job), job.case.question
    narrow = compute_dtype(question.precision.matmul).itemsize == 2
    return (
        jit.serve(job.device.torch_device)
        and job.case.tune.compile
        and narrow
        and shape.hidden // shape.heads <= 128
    )


def check_recompute(job: Job) -> None:
    """Raise RequestError unless `tune.recompute` is `none` or `full`."""
    recompute = job.case.tune.recompute
    if recompute not in RECOMPUTE:
        raise RequestError(
            f"tune.recompute={recompute!r} does not work with GLM; allowed: {', '.join(RECOMPUTE)} "
            "(recomputation must repeat the same dropout)"
        )


class TrainedGlm(Model):
    """A whole GLM on this rank's device, as a trainer sees it.

    `make_computation` chooses how the engine computes log-probabilities, once the module is built;
    `details` are the engine's own choices, for the record.
    """

    def __init__(self, job: Job, make: MakeComputing, details: dict[str, Any]) -> None:
        self.job, self.make, self.chosen = job, make, details
        self.shape = shape_of(job)

    def build(self) -> list[Tensor] | None:
        """Build the module with random weights or those of a checkpoint, and cast it to the dtype
        of the matmuls. Return the weights in the dtype that they are stored in if that is another
        dtype (the master weights), else None. Sets `weights`.
        """
        question, device = self.job.case.question, self.job.device.torch_device
        self.module = glm.build(self.shape, device, DTYPES[question.precision.weights])
        if self.job.weights is None:
            glm.fill_random(self.module, question.seed)
            self.weights = {"source": "random", "seed": question.seed}
        else:
            self.weights = glm_checkpoint.load(self.module, self.job.weights, self.job.loading)
        master = [p.detach() for p in self.module.parameters()]
        self.module.to(compute_dtype(question.precision.matmul)).requires_grad_(True)
        return master if master[0].dtype != self.module.word_embeddings.weight.dtype else None

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return all parameters of the model with their names."""
        return list(self.module.named_parameters())

    def compile(self, gradient: Gradient) -> None:
        """Make the engine's computation of log-probabilities; if it can record graphs, losses of
        padded micro-batches will be replayed from graphs.
        """
        self.computing = made = self.make(self.module, gradient)
        self.recorded: Recorded[ClozeMicroBatch] | None = None
        if made.record is not None:
            self.recorded = Recorded(
                self._loss,
                made.record,
                lambda micro: micro.tensors(made.joint),
                lambda micro: micro.key,
            )

    def evaluate(self, micro: ClozeMicroBatch) -> Tensor:
        """Return the scores of each sample's candidates without dropout: [samples, most
        candidates], -inf in slots without a candidate.
        """
        return scores_of(self.computing.log_probs(micro, 0.0), micro)

    def loss(self, micro: ClozeMicroBatch) -> Tensor:
        """Return the summed cross-entropy of a micro-batch's samples, in nats, with dropout;
        samples without a right answer are left out. Its `backward` must be called before the next
        `loss`: recorded graphs share their memory.
        """
        if self.computing.draw is not None:
            self.computing.draw()
        if self.recorded is None or micro.layout.room is None:
            return self._loss(micro)
        return self.recorded(micro)

    def _loss(self, micro: ClozeMicroBatch) -> Tensor:
        """Compute the summed loss of a micro-batch; this is the function that graphs record."""
        scores = scores_of(self.computing.log_probs(micro, self.shape.dropout), micro)
        return F.cross_entropy(scores, micro.right, reduction="sum", ignore_index=NO_ANSWER)

    def details(self) -> dict[str, Any]:
        """Return the engine's choices, with `graphs`, the number of recorded sizes, if graphs are
        used.
        """
        return (
            self.chosen
            if self.recorded is None
            else {**self.chosen, "graphs": len(self.recorded.pairs)}
        )


def glm_trainer(job: Job, make: MakeComputing, details: dict[str, Any]) -> Trainer:
    """Return a trainer of a GLM that every replica holds whole. `details` are the engine's own
    choices, for the record.
    """
    placement = Replicated(
        job.plan.dp, compute_dtype(job.case.question.precision.matmul), job.device.torch_device
    )
    return Trainer(job, TrainedGlm(job, make, details), placement)
