"""Engine `torch`, training: models/llama.py on packed rows, blocks compiled one by one, the loss on learned tokens only.

Logits stay in the precision of the matmuls; the compiled loss reads them as fp32 inside its kernel, so that no fp32 copy of
them is ever there.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from steelyard.engines import Job, Part
from steelyard.engines.fused import FusedBlock, Pieces
from steelyard.engines.optimizer import Adam
from steelyard.engines.score import DTYPES
from steelyard.engines.train import Loop, Micro
from steelyard.errors import RequestError
from steelyard.models import weights
from steelyard.models.attention import KERNELS
from steelyard.models.llama import Llama, Streams

# What selective recomputation keeps: the results of matmuls and of attention. All else is computed again.
KEPT_OPS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._flash_attention_forward.default,
    torch.ops.aten._efficient_attention_forward.default,
}


class TorchTrain(Loop):
    def __init__(self, job: Job) -> None:
        super().__init__(job, _trainer(job))


class TorchTrainer:
    def __init__(self, job: Job) -> None:
        self.job = job
        self.question = job.case.question
        self.tune = job.case.tune
        self.device: torch.device = job.device.torch_device
        self.kernel = self._choose_kernel()
        self.weights: dict[str, Any] = {}

    def _choose_kernel(self) -> str:
        kernel = self.tune.attention
        if kernel == "auto":
            kernel = self.job.device.attention(_compute_dtype(self.question.precision), False)
        if kernel not in KERNELS:
            raise RequestError(f"tune.attention={kernel!r} is not known; allowed: auto, {', '.join(sorted(KERNELS))}")
        return str(kernel)

    def prepare(self, part: Part) -> None:
        if self.question.train is None:
            raise ValueError("a question without training")
        with part("weights"):
            self.model, kept = self._build()
            self.adam = Adam(list(self.model.parameters()), kept, self.question.train, self.question.precision)
            self.job.device.synchronize()
        pieces = Pieces(self.tune.compile)
        fused = [FusedBlock(b, self.adam.gradient, pieces) for b in self.model.layers]  # type: ignore[arg-type]
        self.blocks = [_recomputed(one, self.tune.recompute) for one in fused]
        self.head: Callable[..., Tensor] = torch.compile(_head, dynamic=True) if self.tune.compile else _head

    def _build(self) -> tuple[Llama, list[Tensor] | None]:
        """The model in the precision it is computed in, and its weights in the one they are kept in, where that is another."""
        question = self.question
        shape = weights.shape_of(question.model)
        model = weights.build(shape, self.device, DTYPES[question.precision.weights])
        if self.job.weights is None:
            weights.fill_random(model, question.seed)
            self.weights = {"source": "random", "seed": question.seed}
        else:
            self.weights = weights.load(model, self.job.weights, shape, progress=self.job.loading)
        kept = [p.detach() for p in model.parameters()]
        model.to(DTYPES[_compute_dtype(question.precision)]).requires_grad_(True).train()
        return model, kept if kept[0].dtype != model.embed.weight.dtype else None

    def warm(self, micro: Micro) -> None:
        with torch.no_grad():
            self.loss(micro)
        self.learn([micro], self.total(1))
        self.adam.forget()

    def loss(self, micro: Micro) -> Tensor:
        hidden = self.model.hidden(micro.tokens, micro.positions, micro.rows, self.kernel, blocks=self.blocks)
        return self.head(self.model, hidden[micro.pick], micro.targets)

    def learn(self, micros: list[Micro], targets: Tensor) -> Tensor:
        losses = []
        for micro in micros:
            loss = self.loss(micro) / targets
            self.adam.scale(loss).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    def update(self, lr: float) -> Tensor:
        return self.adam.step(lr)

    def state(self) -> dict[str, Tensor]:
        return self.adam.state(self._names())

    def _names(self) -> list[str]:
        return [name for name, _ in self.model.named_parameters()]

    def numbers(self) -> dict[str, float]:
        return self.adam.numbers()

    def restore(self, numbers: dict[str, float]) -> None:
        self.adam.restore(numbers)

    def total(self, number: int) -> Tensor:
        return torch.tensor(float(number), device=self.device)

    def details(self) -> dict[str, Any]:
        return {"attention": self.kernel, "weights": self.weights}


def _trainer(job: Job) -> TorchTrainer:
    """On one device, or laid over many."""
    if job.plan.tp * job.plan.pp * job.plan.dp == 1:
        return TorchTrainer(job)
    from steelyard.engines.laid import LaidTrainer

    return LaidTrainer(job)


def _compute_dtype(precision: Any) -> str:
    return {"fp32": "fp32", "tf32": "fp32", "fp16": "fp16", "bf16": "bf16"}[precision.matmul]


def _head(model: Llama, hidden: Tensor, targets: Tensor) -> Tensor:
    logits = model.logits(hidden)
    wide = logits.float() if logits.dtype.itemsize < torch.float32.itemsize else logits
    return F.cross_entropy(wide, targets, reduction="sum")


def _recomputed(block: Callable[..., Streams], how: str) -> Callable[..., Streams]:
    """A block whose activations are computed again in the backward pass: all, or all but those of large operations."""
    if how == "none":
        return block

    def selective() -> Any:
        return create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]

    def run(*arguments: Any) -> Streams:
        if how == "full":
            out: Streams = checkpoint(block, *arguments, use_reentrant=False)
        else:
            out = checkpoint(block, *arguments, use_reentrant=False, context_fn=selective)
        return out

    return run


def _policy(context: Any, op: Any, *arguments: Any, **named: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in KEPT_OPS else CheckpointPolicy.PREFER_RECOMPUTE
