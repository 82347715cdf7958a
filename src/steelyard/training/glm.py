"""A GLM that is trained on a cloze: candidates' scores from packed contexts and spans.

A candidate's score is the sum of its tokens' log-probabilities; a sample's loss is the
cross-entropy of its candidates' scores. The loss of a step is divided by the samples of the global
batch, so gradients are summed over replicas, and one step is the same function of the same numbers
whatever the number of replicas. Engines bring what computes the log-probabilities.
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
FASTEST = "packed"  # of the kernels for 16-bit types where Triton runs too, as measured
NO_ANSWER = -1  # in `right`: such a sample is scored and not learned from


@dataclass(frozen=True)
class ClozeMicroBatch:
    """A micro-batch on the device."""

    tokens: Tensor
    positions: Tensor
    blocks: Tensor
    layout: ClozeLayout
    targets: Tensor  # [S]
    span_of_token: Tensor  # [S]; as many as there are spans where a token is of none
    # [samples, most candidates]: number of the span; as many as there are where none is
    spans_of_sample: Tensor
    right: Tensor  # [samples]

    def tensors(self, joint: bool) -> list[Tensor]:
        """All that a forward pass reads."""
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
        """The same where a forward pass is the same but for the values of these tensors; of those
        that fill a bucket.
        """
        return len(self.tokens), self.spans_of_sample.shape, self.layout.room


@dataclass(frozen=True)
class Computing:
    """How an engine computes the log-probabilities of the spans' targets: [S], with so much
    dropout.
    """

    log_probs: Callable[[ClozeMicroBatch, float], Tensor]
    # new random numbers for its kernels, before every pass that drops some
    draw: Callable[[], None] | None = None
    record: Record | None = None  # what records passes over micro-batches that fill a bucket
    joint: bool = False  # which of a layout's tensors it reads


MakeComputing = Callable[[glm.Glm, Gradient], Computing]


def to_device(pack: Pack, device: torch.device, bucket: Bucket | None = None) -> ClozeMicroBatch:
    """Of a pack, which fills the bucket if there is one."""
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
    """Scores [samples, most candidates] from the log-probabilities [S] of the spans' tokens; -inf
    where no candidate is.
    """
    count = len(micro.layout.lengths[1])
    spans = log_probs.new_zeros(count + 1).index_add(0, micro.span_of_token, log_probs)[:count]
    with_none = torch.cat((spans, log_probs.new_full((1,), -torch.inf)))
    return with_none.index_select(0, micro.spans_of_sample.flatten()).view(
        micro.spans_of_sample.shape
    )


def shape_of(job: Job) -> GlmModel:
    model = job.case.question.model
    if not isinstance(model, GlmModel):
        raise TypeError(f"a model of family {model.family!r} is no GLM")
    return model


def choose_kernel(job: Job) -> str:
    """The kernel of attention that was asked for, or the one for the device."""
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
    """Whether kernels/glm_attention.py computes this."""
    shape, question = shape_of(job), job.case.question
    narrow = compute_dtype(question.precision.matmul).itemsize == 2
    return (
        jit.serve(job.device.torch_device)
        and job.case.tune.compile
        and narrow
        and shape.hidden // shape.heads <= 128
    )


def check_recompute(job: Job) -> None:
    recompute = job.case.tune.recompute
    if recompute not in RECOMPUTE:
        raise RequestError(
            f"tune.recompute={recompute!r} does not work with GLM; allowed: {', '.join(RECOMPUTE)} "
            "(recomputation must repeat the same dropout)"
        )


class TrainedGlm(Model):
    """A GLM on this rank's device, whole."""

    def __init__(self, job: Job, make: MakeComputing, details: dict[str, Any]) -> None:
        self.job, self.make, self.chosen = job, make, details
        self.shape = shape_of(job)

    def build(self) -> list[Tensor] | None:
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
        return list(self.module.named_parameters())

    def compile(self, gradient: Gradient) -> None:
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
        """Scores of each sample's candidates, nothing dropped: [samples, most candidates], -inf
        where there is none.
        """
        return scores_of(self.computing.log_probs(micro, 0.0), micro)

    def loss(self, micro: ClozeMicroBatch) -> Tensor:
        """The summed cross-entropy of a micro-batch's samples, in nats, with dropout. Call its
        `backward` before the next.
        """
        if self.computing.draw is not None:
            self.computing.draw()
        if self.recorded is None or micro.layout.room is None:
            return self._loss(micro)
        return self.recorded(micro)

    def _loss(self, micro: ClozeMicroBatch) -> Tensor:
        scores = scores_of(self.computing.log_probs(micro, self.shape.dropout), micro)
        return F.cross_entropy(scores, micro.right, reduction="sum", ignore_index=NO_ANSWER)

    def details(self) -> dict[str, Any]:
        return (
            self.chosen
            if self.recorded is None
            else {**self.chosen, "graphs": len(self.recorded.pairs)}
        )


def glm_trainer(job: Job, make: MakeComputing, details: dict[str, Any]) -> Trainer:
    """Over replicas of the model. `details` are what an engine chose."""
    placement = Replicated(
        job.plan.dp, compute_dtype(job.case.question.precision.matmul), job.device.torch_device
    )
    return Trainer(job, TrainedGlm(job, make, details), placement)
