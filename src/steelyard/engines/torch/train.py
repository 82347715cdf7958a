"""Engine `torch`, training: models/llama.py on packed rows, blocks compiled one by one, the loss on learned tokens only.

Logits stay in the precision of the matmuls; the compiled loss reads them as fp32 inside its kernel, so that no fp32 copy of
them is ever there.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from steelyard.data.rows import Key, Row
from steelyard.engines.job import Job, Part
from steelyard.engines.torch.model import DTYPES
from steelyard.errors import RequestError
from steelyard.kernels import jit, packed_attention
from steelyard.models.attention import KERNELS
from steelyard.models.llama import Llama, Streams
from steelyard.models.llama_fused import FusedBlock, Pieces
from steelyard.training.loop import Loop, Micro, empty_row, packed
from steelyard.training.optimizer import Adam, Kept
from steelyard.weights import load

# What selective recomputation keeps: the results of matmuls and of attention. All else is computed again.
KEPT_OPS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._flash_attention_forward.default,
    torch.ops.aten._efficient_attention_forward.default,
}


GRAIN = 128  # tokens: matmul kernels work in tiles


class TorchTrain(Loop):
    def __init__(self, job: Job) -> None:
        super().__init__(job, _trainer(job))

    def _pack(self, keys: list[Key]) -> Any:
        """Rows laid end to end need no padding, unless it was asked for, or code or other devices are made for one size."""
        tune = self.job.case.tune
        any_size = _alone(self.job) and (jit.serve(self.device) or not tune.compile)
        if not tune.pack or not any_size:
            return super()._pack(keys)
        return packed(without_padding([self.job.texts.row(key) for key in keys if key is not None]))


class TorchTrainer(Kept):
    block = "fused"  # that of engines/fused.py, or "plain": the model's own

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
            dtype = compute_dtype(self.question.precision)
            kernel = self.job.device.attention(dtype, False)
            dim = self.question.model.hidden // self.question.model.heads
            if kernel == "flash" and _alone(self.job) and packed_attention.serves(self.device, DTYPES[dtype], dim):
                kernel = "packed"
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
        self.losses: Callable[..., Tensor] = torch.compile(_losses, dynamic=True) if self.tune.compile else _losses

    def _build(self) -> tuple[Llama, list[Tensor] | None]:
        """The model in the precision it is computed in, and its weights in the one they are kept in, where that is another."""
        question = self.question
        shape = load.shape_of(question.model)
        model = load.build(shape, self.device, DTYPES[question.precision.weights])
        if self.job.weights is None:
            load.fill_random(model, question.seed)
            self.weights = {"source": "random", "seed": question.seed}
        else:
            self.weights = load.load(model, self.job.weights, shape, progress=self.job.loading)
        kept = [p.detach() for p in model.parameters()]
        model.to(DTYPES[compute_dtype(question.precision)]).requires_grad_(True).train()
        return model, kept if kept[0].dtype != model.embed.weight.dtype else None

    def warm(self, micro: Micro) -> None:
        with torch.no_grad():
            self.loss(micro)
        self.learn([micro], self.total(1))
        self.adam.forget()

    def loss(self, micro: Micro) -> Tensor:
        hidden = self.model.hidden(micro.tokens, micro.positions, micro.rows, self.kernel, blocks=self.blocks)
        return self.losses(self.model.logits(hidden[micro.pick]), micro.targets).sum()

    def learn(self, micros: list[Micro], targets: Tensor) -> Tensor:
        losses = []
        for micro in micros:
            loss = self.loss(micro) / targets
            self.adam.scale(loss).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    def update(self, lr: float) -> Tensor:
        return self.adam.step(lr)

    def _names(self) -> list[str]:
        return [name for name, _ in self.model.named_parameters()]

    def total(self, number: int) -> Tensor:
        return torch.full((), float(number), device=self.device)  # a copy from the host would wait for the device

    def details(self) -> dict[str, Any]:
        return {"attention": self.kernel, "block": self.block, "weights": self.weights}


def _trainer(job: Job) -> TorchTrainer:
    """On one device, or laid over many."""
    if _alone(job):
        return TorchTrainer(job)
    from steelyard.engines.torch.parallel import LaidTrainer

    return LaidTrainer(job)


def _alone(job: Job) -> bool:
    return job.plan.tp * job.plan.pp * job.plan.dp == 1


def without_padding(rows: list[Row]) -> list[Row]:
    """The same rows without what fills them up, and less than GRAIN tokens that fill up all of them together."""
    short = [row if row.real == len(row.tokens) else _cut(row) for row in rows]
    left = -sum(row.real for row in rows) % GRAIN
    return [*short, empty_row(left)] if left else short


def _cut(row: Row) -> Row:
    return replace(row, tokens=row.tokens[: row.real], targets=row.targets[: row.real], lens=row.lens[:-1])


def compute_dtype(precision: Any) -> str:
    return {"fp32": "fp32", "tf32": "fp32", "fp16": "fp16", "bf16": "bf16"}[precision.matmul]


def _losses(logits: Tensor, targets: Tensor) -> Tensor:
    """One for each target: a compiler has several ways to reduce over them, and takes another whenever they become few."""
    wide = logits.float() if logits.dtype.itemsize < torch.float32.itemsize else logits
    return F.cross_entropy(wide, targets, reduction="none")


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
