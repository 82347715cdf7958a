"""A Llama trained on one device: packed rows, fused blocks, the loss on learned tokens only.

Logits stay in the precision of the matmuls; the compiled loss reads them as fp32 inside its kernel, so that no fp32 copy of
them is ever there.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from steelyard.engines.job import Job
from steelyard.engines.torch.recompute import recomputed
from steelyard.models import llama_fp8
from steelyard.models.llama import Block, Streams
from steelyard.models.llama_fused import Accumulating, BlockKernels, FusedBlock, Gradient
from steelyard.models.tensors import DTYPES, compute_dtype
from steelyard.training.micro_batches import MicroBatch
from steelyard.weights import load
from steelyard.weights.model import build


class SingleLlama:
    def __init__(self, job: Job, kernel: str) -> None:
        self.job, self.kernel = job, kernel
        self.fp8 = job.case.question.precision.matmul == "fp8"
        self.weights: dict[str, Any] = {}
        self.roots: list[nn.Module] = []

    def build(self) -> list[Tensor] | None:
        job, question = self.job, self.job.case.question
        device, dtype = job.device.torch_device, DTYPES[question.precision.weights]
        shape = load.shape_of(question.model)
        self.module, self.weights = build(shape, device, dtype, question.seed, job.weights, progress=job.loading)
        master = [p.detach() for p in self.module.parameters()]
        self._cast(compute_dtype(question.precision.matmul))
        self.module.requires_grad_(True).train()
        return master if master[0].dtype != self.module.embed.weight.dtype else None

    def _cast(self, dtype: torch.dtype) -> None:
        """What is read in fp8 is made of what is kept: no 16-bit copy stands between them."""
        if not self.fp8:
            self.module.to(dtype)
            return
        llama_fp8.check_sizes(self.module.shape)
        kept = {id(one) for one in llama_fp8.matrices(self.module)}
        for parameter in self.module.parameters():
            if id(parameter) not in kept:
                parameter.data = parameter.data.to(dtype)

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.module.named_parameters())

    def compile(self, gradient: Gradient) -> None:
        tune = self.job.case.tune
        self.blocks = [recomputed(one, tune.recompute) for one in self._fused(gradient, tune.compile)]
        self.losses: Callable[..., Tensor] = torch.compile(_losses, dynamic=True) if tune.compile else _losses

    def _fused(self, gradient: Gradient, fast: bool) -> list[Callable[..., Streams]]:
        layers = cast(list[Block], list(self.module.layers))
        if self.fp8:
            code = llama_fp8.Learning(gradient, llama_fp8.Fp8Kernels(fast))
            return [llama_fp8.Fp8Block(block, code) for block in layers]
        linears, kernels = Accumulating(gradient), BlockKernels(fast)
        return [FusedBlock(block, linears, kernels) for block in layers]

    def loss(self, micro: MicroBatch) -> Tensor:
        hidden = self.module.hidden(micro.tokens, micro.positions, micro.rows, self.kernel, blocks=self.blocks)
        return self.losses(self.module.logits(hidden[micro.pick]), micro.targets).sum()

    def evaluate(self, micro: MicroBatch) -> Tensor:
        return self.loss(micro)

    def variants(self, micro: MicroBatch) -> list[MicroBatch]:
        return [micro]

    def details(self) -> dict[str, Any]:
        told = {"attention": self.kernel, "block": "fused"}
        return told | llama_fp8.details(self.job.device.torch_device) if self.fp8 else told


def _losses(logits: Tensor, targets: Tensor) -> Tensor:
    """One for each target: a compiler has several ways to reduce over them, and takes another whenever they become few."""
    wide = logits.float() if logits.dtype.itemsize < torch.float32.itemsize else logits
    return F.cross_entropy(wide, targets, reduction="none")
