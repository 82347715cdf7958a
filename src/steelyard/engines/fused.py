"""A block for training on one device: weight gradients are added to where they are kept by the matmul that makes them.

Left to autograd, a micro-batch writes each weight's gradient, and a second kernel reads it and adds it to the sum: with fp32
sums and small micro-batches that is a tenth of the time. So the matmuls stand outside the compiled code, and what is between
them is compiled in pieces.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from steelyard.models.attention import Layout, Prefix, attend
from steelyard.models.llama import Block, Streams, gated, heads


class Accumulated(torch.autograd.Function):
    """x times a weight, whose gradient is added to `kept` and nowhere else."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor, kept: Tensor) -> Tensor:
        context.save_for_backward(x, weight)
        context.kept = kept
        return x @ weight.t()

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        x, weight = context.saved_tensors
        add_product(context.kept, grads[0], x)
        return grads[0] @ weight, None, None


def add_product(kept: Tensor, grad: Tensor, x: Tensor) -> None:
    """Add gradᵀ x to `kept`, which may be of higher precision."""
    if kept.dtype == x.dtype:
        kept.addmm_(grad.t(), x)
    elif x.device.type == "cpu":  # its matmuls have no other type for their sums
        kept.add_(grad.t() @ x)
    else:
        torch.addmm(kept, grad.t(), x, out_dtype=kept.dtype, out=kept)


def add_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    x = x + delta
    return x, F.rms_norm(x, (x.shape[-1],), weight, eps)


class Pieces:
    """What stands between the matmuls of a block, compiled or as it is written: the same for all blocks."""

    def __init__(self, compiled: bool) -> None:
        make: Callable[..., Any] = torch.compile if compiled else lambda function: function
        self.add_norm, self.heads, self.gated = make(add_norm), make(heads), make(gated)


class FusedBlock:
    """The same function as `Block`, with `kept` saying where each weight's gradient goes."""

    def __init__(self, block: Block, kept: Callable[[Tensor], Tensor], pieces: Pieces) -> None:
        self.block, self.kept, self.pieces = block, kept, pieces

    def __call__(
        self, x: Tensor, delta: Tensor, cos: Tensor, sin: Tensor, rows: Layout, kernel: str, prefix: Prefix | None
    ) -> Streams:
        block, pieces = self.block, self.pieces
        eps = block.shape.norm_eps
        x, normed = pieces.add_norm(x, delta, block.attention_norm.weight, eps)
        q, k, v = pieces.heads(self._linear(normed, block.qkv), cos, sin, block.shape)
        seen = attend(q, k, v, rows, kernel, prefix).flatten(1)
        x, normed = pieces.add_norm(x, self._linear(seen, block.out), block.ffn_norm.weight, eps)
        wide = pieces.gated(self._linear(normed, block.gate_up), block.shape.ffn_block)
        return x, self._linear(wide, block.down), k, v

    def _linear(self, x: Tensor, layer: nn.Linear) -> Tensor:
        out: Tensor = Accumulated.apply(x, layer.weight, self.kept(layer.weight))  # type: ignore[no-untyped-call]
        return out if layer.bias is None else out + layer.bias
