"""A block for training on one device: weight gradients are added to where they are kept by the matmul that makes them.

Left to autograd, a micro-batch writes each weight's gradient, and a second kernel reads it and adds it to the sum: with fp32
sums and small micro-batches that is a tenth of the time. So the matmuls stand outside the compiled code, and what is between
them is compiled in pieces, or has a kernel of its own.

Kept for the backward pass are queries, keys and values as attention reads them, and the output of gate_up; the
input of down is made again from it by the kernel that makes its gradient.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from steelyard.kernels import jit, llama
from steelyard.models.attention import Layout, Prefix, attend
from steelyard.models.llama import Block, Streams, gated, rotate


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


class AddNorm(torch.autograd.Function):
    """The sum of two streams, and its RMSNorm."""

    @staticmethod
    def forward(context: Any, x: Tensor, delta: Tensor, weight: Tensor, eps: float, pieces: "Pieces") -> tuple[Tensor, Tensor]:
        x, normed, scale = pieces.add_norm(x, delta, weight, eps)
        context.save_for_backward(x, scale, weight)
        context.pieces = pieces
        return x, normed

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        back, weight = context.pieces.add_norm_backward(*context.saved_tensors, *grads)
        return back, back, weight, None, None


class Heads(torch.autograd.Function):
    """Rotated queries and keys, and values."""

    @staticmethod
    def forward(
        context: Any, qkv: Tensor, cos: Tensor, sin: Tensor, queries: int, pieces: "Pieces"
    ) -> tuple[Tensor, Tensor, Tensor]:
        context.save_for_backward(cos, sin)
        context.pieces = pieces
        out: tuple[Tensor, Tensor, Tensor] = pieces.split(qkv, cos, sin, queries)
        return out

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        return context.pieces.join(*grads, *context.saved_tensors), None, None, None, None


class Narrowed(torch.autograd.Function):
    """SwiGLU of gate and up, times a weight whose gradient is added to `kept`."""

    @staticmethod
    def forward(context: Any, gate_up: Tensor, weight: Tensor, kept: Tensor, block: int, pieces: "Pieces") -> Tensor:
        context.save_for_backward(gate_up, weight)
        context.kept, context.block, context.pieces = kept, block, pieces
        out: Tensor = pieces.gated(gate_up, block) @ weight.t()
        return out

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        gate_up, weight = context.saved_tensors
        back, wide = context.pieces.gated_backward(gate_up, grads[0] @ weight, context.block)
        add_product(context.kept, grads[0], wide)
        return back, None, None, None, None


def add_product(kept: Tensor, grad: Tensor, x: Tensor) -> None:
    """Add gradᵀ x to `kept`, which may be of higher precision."""
    if kept.dtype == x.dtype:
        kept.addmm_(grad.t(), x)
    elif x.device.type == "cpu":  # its matmuls have no other type for their sums
        kept.add_(grad.t() @ x)
    else:
        torch.addmm(kept, grad.t(), x, out_dtype=kept.dtype, out=kept)


def add_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """x + delta, its RMSNorm, and what that was scaled with."""
    x = x + delta
    wide = _wide(x)
    scale = wide.square().mean(-1, keepdim=True).add(eps).rsqrt()
    return x, (wide * scale * weight).to(x.dtype), scale


def add_norm_backward(x: Tensor, scale: Tensor, weight: Tensor, more: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of x and of the weight, from those of the sum and of its norm."""
    unit, grad = _wide(x) * scale, _wide(grad)
    slope = grad * weight
    back = more + scale * (slope - unit * (slope * unit).mean(-1, keepdim=True))
    return back.to(x.dtype), (grad * unit).sum(0).to(weight.dtype)


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype.itemsize < torch.float32.itemsize else x


def split(qkv: Tensor, cos: Tensor, sin: Tensor, queries: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys, rotated, and values; `queries` are the query heads of a key group. No two share memory with `qkv`."""
    grouped = qkv.unflatten(-1, (-1, queries + 2, 2 * cos.shape[-1]))  # type: ignore[no-untyped-call]
    q = rotate(grouped[:, :, :-2].flatten(1, 2), cos, sin)
    return q, rotate(grouped[:, :, -2], cos, sin), grouped[:, :, -1].clone()


def join(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The gradient of qkv from those of queries, keys and values."""
    grouped = rotate(q, cos, -sin).unflatten(1, (k.shape[1], -1))  # type: ignore[no-untyped-call]
    return torch.cat((grouped, rotate(k, cos, -sin)[:, :, None], v[:, :, None]), dim=2).flatten(1)


def gated_backward(gate_up: Tensor, grad: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """The gradient of gate and up, and their SwiGLU again."""
    gate, up = gate_up.unflatten(-1, (-1, 2, block)).unbind(-2)  # type: ignore[no-untyped-call]
    grad = grad.unflatten(-1, (-1, block))  # type: ignore[no-untyped-call]
    share = gate.sigmoid()
    silu = gate * share
    back = torch.stack((grad * up * (share + silu * (1 - share)), grad * silu), dim=-2)
    return back.flatten(1), (silu * up).flatten(-2)


class Pieces:
    """What stands between the matmuls of a block, as it is written, or compiled, or a kernel: the same for all blocks."""

    def __init__(self, compiled: bool) -> None:
        make: Callable[..., Any] = _or_kernel if compiled else lambda function: function
        self.add_norm, self.add_norm_backward = make(add_norm), make(add_norm_backward)
        self.split, self.join = make(split), make(join)
        self.gated, self.gated_backward = make(gated), make(gated_backward)


def _or_kernel(written: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel of the same name where there is one for the device, otherwise the function compiled."""
    compiled: Any = torch.compile(written)
    kernel: Any = getattr(llama, written.__name__)

    def run(x: Tensor, *arguments: Any) -> Any:
        return (kernel if jit.serve(x.device) else compiled)(x, *arguments)

    return run


class FusedBlock:
    """The same function as `Block`, with `kept` saying where each weight's gradient goes."""

    def __init__(self, block: Block, kept: Callable[[Tensor], Tensor], pieces: Pieces) -> None:
        self.block, self.kept, self.pieces = block, kept, pieces

    def __call__(
        self, x: Tensor, delta: Tensor, cos: Tensor, sin: Tensor, rows: Layout, kernel: str, prefix: Prefix | None
    ) -> Streams:
        block, pieces, shape = self.block, self.pieces, self.block.shape
        x, normed = _apply(AddNorm, x, delta, block.attention_norm.weight, shape.norm_eps, pieces)
        q, k, v = _apply(Heads, self._linear(normed, block.qkv), cos, sin, shape.heads // shape.kv_heads, pieces)
        seen = attend(q, k, v, rows, kernel, prefix).flatten(1)
        x, normed = _apply(AddNorm, x, self._linear(seen, block.out), block.ffn_norm.weight, shape.norm_eps, pieces)
        wide = self._linear(normed, block.gate_up)
        down = block.down.weight
        return x, _apply(Narrowed, wide, down, self.kept(down), shape.ffn_block, pieces), k, v

    def _linear(self, x: Tensor, layer: nn.Linear) -> Tensor:
        out: Tensor = _apply(Accumulated, x, layer.weight, self.kept(layer.weight))
        return out if layer.bias is None else out + layer.bias


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    return function.apply(*arguments)  # type: ignore[no-untyped-call]
