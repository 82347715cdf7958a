"""Engine `torch`, training a GLM on a cloze: candidates' scores from packed contexts and spans, over replicas of the model.

A candidate's score is the sum of its tokens' log-probabilities; a sample's loss is the cross-entropy of its candidates'
scores. The loss of a step is divided by the samples of the global batch, so gradients are summed over replicas, and one step
is the same function of the same numbers whatever the number of replicas.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from steelyard.case.question import GlmModel
from steelyard.data.cloze import Pack
from steelyard.engines.job import Job, Part
from steelyard.engines.torch.model import DTYPES, send
from steelyard.engines.torch.train import compute_dtype
from steelyard.errors import RequestError
from steelyard.models import glm
from steelyard.models.glm_attention import KERNELS, ClozeLayout, layout
from steelyard.models.glm_fused import FusedGlm
from steelyard.training.optimizer import Adam, Kept
from steelyard.weights import glm as glm_checkpoint

BUCKET = 64 << 20  # numbers of gradients that replicas sum in one call
RECOMPUTE = ("none", "full")
NO_ANSWER = -1  # in `right`: such a sample is scored and not learned from


@dataclass(frozen=True)
class ClozeMicro:
    """A micro-batch on the device."""

    tokens: Tensor
    positions: Tensor
    blocks: Tensor
    layout: ClozeLayout
    targets: Tensor  # [S]
    span_of_token: Tensor  # [S]
    spans_of_sample: Tensor  # [samples, most candidates]: number of the span; one more than there are where none is
    right: Tensor  # [samples]


def to_device(pack: Pack, device: torch.device) -> ClozeMicro:
    counts = np.array(pack.candidates)
    slots = np.arange(counts.max())
    spans = np.where(slots < counts[:, None], (counts.cumsum() - counts)[:, None] + slots, len(pack.spans))
    return ClozeMicro(
        tokens=send(pack.tokens, device),
        positions=send(pack.positions, device),
        blocks=send(pack.blocks, device),
        layout=layout(pack.contexts, pack.spans, pack.groups, device),
        targets=send(pack.targets, device),
        span_of_token=send(np.repeat(np.arange(len(pack.spans)), pack.spans), device),
        spans_of_sample=send(spans, device),
        right=send(pack.right, device),
    )


def scores_of(said: Tensor, micro: ClozeMicro) -> Tensor:
    """Scores [samples, most candidates] from the log-probabilities [S] of the spans' tokens; -inf where no candidate is."""
    count = len(micro.layout.lengths[1])
    spans = said.new_zeros(count).index_add(0, micro.span_of_token, said)
    with_none = torch.cat((spans, said.new_full((1,), -torch.inf)))
    return with_none.index_select(0, micro.spans_of_sample.flatten()).view(micro.spans_of_sample.shape)


class GlmTrainer(Kept):
    def __init__(self, job: Job) -> None:
        self.job = job
        self.question = job.case.question
        self.tune = job.case.tune
        self.device: torch.device = job.device.torch_device
        if not isinstance(self.question.model, GlmModel):
            raise TypeError(f"a model of family {self.question.model.family!r} is no GLM")
        self.shape: GlmModel = self.question.model
        self.kernel = self._choose_kernel()
        if self.tune.recompute not in RECOMPUTE:
            raise RequestError(
                f"tune.recompute={self.tune.recompute!r} is not there for a GLM; allowed: {', '.join(RECOMPUTE)} "
                "(what is computed again must drop the same numbers)"
            )
        self.weights: dict[str, Any] = {}

    def _choose_kernel(self) -> str:
        asked, dim = self.tune.attention, self.shape.hidden // self.shape.heads
        fits = dim % 8 == 0 and dim <= 256  # flash attention's own limits
        if asked == "auto":
            flash = self.job.device.attention(compute_dtype(self.question.precision), False) == "flash"
            return "flash" if flash and fits else "padded"
        if asked not in KERNELS:
            raise RequestError(f"tune.attention={asked!r} is not known; allowed: auto, {', '.join(sorted(KERNELS))}")
        if asked == "flash" and not fits:
            raise RequestError(f"tune.attention=flash takes heads of 8, 16, … 256 numbers, not {dim}; choose padded")
        return asked

    def prepare(self, part: Part) -> None:
        if self.question.train is None:
            raise ValueError("a question without training")
        with part("weights"):
            self.model, kept = self._build()
            self.adam = Adam(list(self.model.parameters()), kept, self.question.train, self.question.precision)
            self.buckets = self._lay_gradients()
            self.job.device.synchronize()
        self._choose_code()

    def _choose_code(self) -> None:
        """What computes the log-probabilities of a micro-batch's targets."""
        fused = FusedGlm(self.model, self.adam.gradient, self.tune.compile, self.tune.recompute == "full")

        def said(micro: ClozeMicro, dropout: float) -> Tensor:
            ids = micro.tokens, micro.positions, micro.blocks
            return fused(ids, micro.targets, micro.layout, self.kernel, dropout)

        self.said: Callable[[ClozeMicro, float], Tensor] = said

    def _build(self) -> tuple[glm.Glm, list[Tensor] | None]:
        """The model in the precision it is computed in, and its weights in the one they are kept in, where that is another."""
        question = self.question
        model = glm.build(self.shape, self.device, DTYPES[question.precision.weights])
        if self.job.weights is None:
            glm.fill_random(model, question.seed)
            self.weights = {"source": "random", "seed": question.seed}
        else:
            self.weights = glm_checkpoint.load(model, self.job.weights, self.job.loading)
        kept = [p.detach() for p in model.parameters()]
        model.to(DTYPES[compute_dtype(question.precision)]).requires_grad_(True)
        return model, kept if kept[0].dtype != model.word_embeddings.weight.dtype else None

    def _lay_gradients(self) -> list[Tensor]:
        """Gradients as parts of a few long rows of numbers: replicas sum those, and nothing is copied."""
        buckets: list[list[Tensor]] = [[]]
        for parameter in self.adam.kept:
            if buckets[-1] and sum(p.numel() for p in buckets[-1]) + parameter.numel() > BUCKET:
                buckets.append([])
            buckets[-1].append(parameter)
        out = []
        for bucket in buckets:
            flat = torch.zeros(sum(p.numel() for p in bucket), dtype=bucket[0].dtype, device=self.device)
            for parameter, grad in zip(bucket, torch.split(flat, [p.numel() for p in bucket]), strict=True):
                parameter.grad = grad.view(parameter.shape)
            out.append(flat)
        self.adam.gradient(self.adam.own[0])  # from now on they are set to zero and not dropped
        self.adam.scale(torch.zeros((), device=self.device))  # a replica without samples in a step needs the scale too
        return out

    def warm(self, micro: ClozeMicro) -> None:
        """Run everything but the update once. Replicas need not do so at the same time."""
        self.scores(micro)
        self._learn([micro], torch.ones((), device=self.device))
        self.adam.forget()

    def scores(self, micro: ClozeMicro) -> Tensor:
        """Of each sample's candidates, nothing dropped: [samples, most candidates], -inf where there is none."""
        with torch.no_grad():
            return scores_of(self.said(micro, 0.0), micro)

    def loss(self, micro: ClozeMicro) -> Tensor:
        """The summed cross-entropy of a micro-batch's samples, in nats, with dropout."""
        scores = scores_of(self.said(micro, self.shape.dropout), micro)
        return F.cross_entropy(scores, micro.right, reduction="sum", ignore_index=NO_ANSWER)

    def _learn(self, micros: list[ClozeMicro], targets: Tensor) -> Tensor:
        losses = [torch.zeros((), dtype=self._wide(), device=self.device)]
        for micro in micros:
            loss = self.loss(micro) / targets
            self.adam.scale(loss).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    def _wide(self) -> torch.dtype:
        return torch.promote_types(self.model.word_embeddings.weight.dtype, torch.float32)

    def learn(self, micros: list[ClozeMicro], targets: Tensor) -> Tensor:
        """Gradients of Σ loss / targets, which are the samples of the global batch; the mean loss over all replicas."""
        loss = self._learn(micros, targets)
        if self.job.plan.dp > 1:
            works = [dist.all_reduce(flat, async_op=True) for flat in (*self.buckets, loss)]
            for work in works:
                if work is not None:
                    work.wait()
        return loss

    def update(self, lr: float) -> Tensor:
        return self.adam.step(lr)

    def _names(self) -> list[str]:
        return [name for name, _ in self.model.named_parameters()]

    def total(self, number: int) -> Tensor:
        total = torch.full((), float(number), device=self.device)  # a copy from the host would wait for the device
        if self.job.plan.dp > 1:
            dist.all_reduce(total)
        return total

    def details(self) -> dict[str, Any]:
        return {"attention": self.kernel, "weights": self.weights}
