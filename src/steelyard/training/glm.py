"""A GLM that is trained on a cloze: candidates' scores from packed contexts and spans.

A candidate's score is the sum of its tokens' log-probabilities; a sample's loss is the cross-entropy of its candidates'
scores. The loss of a step is divided by the samples of the global batch, so gradients are summed over replicas, and one step
is the same function of the same numbers whatever the number of replicas. Engines bring what computes the log-probabilities.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from steelyard.data.cloze import Pack
from steelyard.engines.job import Job
from steelyard.errors import RequestError
from steelyard.models import glm
from steelyard.models.glm_attention import KERNELS, ClozeLayout, layout
from steelyard.models.llama_fused import Gradient
from steelyard.models.shapes import GlmModel
from steelyard.models.tensors import COMPUTED_IN, DTYPES, compute_dtype, send
from steelyard.training.placement import Replicated
from steelyard.training.trainer import Trainer
from steelyard.weights import glm as glm_checkpoint

RECOMPUTE = ("none", "full")
NO_ANSWER = -1  # in `right`: such a sample is scored and not learned from


@dataclass(frozen=True)
class ClozeMicroBatch:
    """A micro-batch on the device."""

    tokens: Tensor
    positions: Tensor
    blocks: Tensor
    layout: ClozeLayout
    targets: Tensor  # [S]
    span_of_token: Tensor  # [S]
    spans_of_sample: Tensor  # [samples, most candidates]: number of the span; one more than there are where none is
    right: Tensor  # [samples]


LogProbsOf = Callable[[ClozeMicroBatch, float], Tensor]  # of the spans' targets [S], with so much dropout
MakeLogProbs = Callable[[glm.Glm, Gradient], LogProbsOf]


def to_device(pack: Pack, device: torch.device) -> ClozeMicroBatch:
    counts = np.array(pack.candidates)
    slots = np.arange(counts.max())
    spans = np.where(slots < counts[:, None], (counts.cumsum() - counts)[:, None] + slots, len(pack.spans))
    return ClozeMicroBatch(
        tokens=send(pack.tokens, device),
        positions=send(pack.positions, device),
        blocks=send(pack.blocks, device),
        layout=layout(pack.contexts, pack.spans, pack.groups, device),
        targets=send(pack.targets, device),
        span_of_token=send(np.repeat(np.arange(len(pack.spans)), pack.spans), device),
        spans_of_sample=send(spans, device),
        right=send(pack.right, device),
    )


def scores_of(log_probs: Tensor, micro: ClozeMicroBatch) -> Tensor:
    """Scores [samples, most candidates] from the log-probabilities [S] of the spans' tokens; -inf where no candidate is."""
    count = len(micro.layout.lengths[1])
    spans = log_probs.new_zeros(count).index_add(0, micro.span_of_token, log_probs)
    with_none = torch.cat((spans, log_probs.new_full((1,), -torch.inf)))
    return with_none.index_select(0, micro.spans_of_sample.flatten()).view(micro.spans_of_sample.shape)


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
        flash = job.device.attention(COMPUTED_IN[job.case.question.precision.matmul], False) == "flash"
        return "flash" if flash and fits else "padded"
    if asked not in KERNELS:
        raise RequestError(f"tune.attention={asked!r} is not known; allowed: auto, {', '.join(sorted(KERNELS))}")
    if asked == "flash" and not fits:
        raise RequestError(f"tune.attention=flash takes heads of 8, 16, … 256 numbers, not {dim}; choose padded")
    return asked


def check_recompute(job: Job) -> None:
    recompute = job.case.tune.recompute
    if recompute not in RECOMPUTE:
        raise RequestError(
            f"tune.recompute={recompute!r} does not work with GLM; allowed: {', '.join(RECOMPUTE)} "
            "(recomputation must repeat the same dropout)"
        )


class TrainedGlm:
    """A GLM on this rank's device, whole."""

    def __init__(self, job: Job, log_probs: MakeLogProbs, details: dict[str, Any]) -> None:
        self.job, self.make_log_probs, self.chosen = job, log_probs, details
        self.shape = shape_of(job)
        self.weights: dict[str, Any] = {}
        self.roots: list[nn.Module] = []

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
        self.log_probs = self.make_log_probs(self.module, gradient)

    def evaluate(self, micro: ClozeMicroBatch) -> Tensor:
        """Scores of each sample's candidates, nothing dropped: [samples, most candidates], -inf where there is none."""
        return scores_of(self.log_probs(micro, 0.0), micro)

    def loss(self, micro: ClozeMicroBatch) -> Tensor:
        """The summed cross-entropy of a micro-batch's samples, in nats, with dropout."""
        scores = scores_of(self.log_probs(micro, self.shape.dropout), micro)
        return F.cross_entropy(scores, micro.right, reduction="sum", ignore_index=NO_ANSWER)

    def variants(self, micro: ClozeMicroBatch) -> list[ClozeMicroBatch]:
        return [micro]

    def details(self) -> dict[str, Any]:
        return self.chosen


def glm_trainer(job: Job, log_probs: MakeLogProbs, details: dict[str, Any]) -> Trainer:
    """Over replicas of the model. `details` are what an engine chose."""
    placement = Replicated(job.plan.dp, compute_dtype(job.case.question.precision.matmul), job.device.torch_device)
    return Trainer(job, TrainedGlm(job, log_probs, details), placement)
