"""A block for training: what stands between its matmuls is a kernel, or compiled in pieces; the
matmuls stand outside.

A weight's gradient is added to where it is summed by the matmul that makes it (`Accumulating`).
Left to autograd, a micro-batch writes each weight's gradient, and a second kernel reads it and adds
it to the sum: with fp32 sums and small micro-batches that is a tenth of the time. Where it is
summed is asked in the backward pass: where ranks divide gradients, there is room for a layer's only
while it is computed.

Saved for the backward pass are queries, keys and values as attention reads them, and the output of
gate_up; the input of down is made again from it by the kernel that makes its gradient.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from steelyard.kernels import add_norm, head_norm, jit, rotary, swiglu
from steelyard.models.attention import Layout, Prefix, attend
from steelyard.models.llama import Block, Streams
from steelyard.models.tensors import apply

# a parameter's gradient, to be added to; asked in the backward pass
Gradient = Callable[[Tensor], Tensor]


class AccumulatedLinear(torch.autograd.Function):
    """x times a weight, whose gradient is added to where `gradient` says and nowhere else. The
    weight is not among what is saved: recomputation would give another tensor for it, and who
    divides weights among ranks changes where its numbers lie."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor, gradient: Gradient) -> Tensor:
        context.save_for_backward(x)
        context.weight, context.gradient = weight, gradient
        return x @ weight.t()

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        [x] = context.saved_tensors
        add_product(context.gradient(context.weight), grads[0], x)
        return grads[0] @ context.weight, None, None


class AddNorm(torch.autograd.Function):
    """The sum of two streams, and its RMSNorm."""

    @staticmethod
    def forward(
        context: Any, x: Tensor, delta: Tensor, weight: Tensor, eps: float, kernels: "BlockKernels"
    ) -> tuple[Tensor, Tensor]:
        x, normed, scale = kernels.add_norm(x, delta, weight, eps)
        context.save_for_backward(x, scale, weight)
        context.kernels = kernels
        return x, normed

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        back, weight = context.kernels.add_norm_backward(*context.saved_tensors, *grads)
        return back, back, weight, None, None


class Heads(torch.autograd.Function):
    """Rotated queries and keys, and values."""

    @staticmethod
    def forward(
        context: Any, qkv: Tensor, cos: Tensor, sin: Tensor, queries: int, kernels: "BlockKernels"
    ) -> tuple[Tensor, Tensor, Tensor]:
        context.save_for_backward(cos, sin)
        context.kernels = kernels
        out: tuple[Tensor, Tensor, Tensor] = kernels.split_heads(qkv, cos, sin, queries)
        return out

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        return context.kernels.join_heads(*grads, *context.saved_tensors), None, None, None, None


class NormHeads(torch.autograd.Function):
    """QKV with its queries and keys normed, head by head."""

    @staticmethod
    def forward(
        context: Any,
        qkv: Tensor,
        of_q: Tensor,
        of_k: Tensor,
        eps: float,
        queries: int,
        kernels: "BlockKernels",
    ) -> Tensor:
        context.save_for_backward(qkv, of_q, of_k)
        context.told, context.kernels = (eps, queries), kernels
        out: Tensor = kernels.norm_heads(qkv, of_q, of_k, eps, queries)
        return out

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        back = context.kernels.norm_heads_backward(*context.saved_tensors, grads[0], *context.told)
        return *back, None, None, None


def heads(
    qkv: Tensor, cos: Tensor, sin: Tensor, block: Block, kernels: "BlockKernels"
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys, rotated, and values. Where nothing is learned they stay inside `qkv`, which
    nobody else reads.
    """
    queries = block.shape.heads // block.shape.kv_heads
    if block.q_norm is not None and block.k_norm is not None:
        qkv = apply(
            NormHeads,
            qkv,
            block.q_norm.weight,
            block.k_norm.weight,
            block.shape.norm_eps,
            queries,
            kernels,
        )
    if torch.is_grad_enabled():
        made = apply(Heads, qkv, cos, sin, queries, kernels)
    else:
        made = kernels.rotate_heads(qkv, cos, sin, queries)
    q, k, v = made
    return q, k, v


class SwigluLinear(torch.autograd.Function):
    """SwiGLU of gate and up, times a weight whose gradient is added to where `gradient` says."""

    @staticmethod
    def forward(
        context: Any,
        gate_up: Tensor,
        weight: Tensor,
        gradient: Gradient,
        block: int,
        kernels: "BlockKernels",
    ) -> Tensor:
        context.save_for_backward(gate_up)
        context.weight, context.gradient, context.block, context.kernels = (
            weight,
            gradient,
            block,
            kernels,
        )
        out: Tensor = kernels.gated(gate_up, block) @ weight.t()
        return out

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        [gate_up] = context.saved_tensors
        back, wide = context.kernels.gated_backward(
            gate_up, grads[0] @ context.weight, context.block
        )
        add_product(context.gradient(context.weight), grads[0], wide)
        return back, None, None, None, None


def add_product(accumulator: Tensor, grad: Tensor, x: Tensor) -> None:
    """Add gradᵀ x to `accumulator`, which may be of higher precision."""
    if accumulator.dtype == x.dtype:
        accumulator.addmm_(grad.t(), x)
    elif x.device.type == "cpu":  # its matmuls have no other type for their sums
        accumulator.add_(grad.t() @ x)
    else:
        torch.addmm(accumulator, grad.t(), x, out_dtype=accumulator.dtype, out=accumulator)


class BlockKernels:
    """What stands between the matmuls of a block, as it is written, or compiled, or a kernel: the
    same for all blocks.
    """

    def __init__(self, compiled: bool) -> None:
        make: Callable[..., Any] = _compiled if compiled else lambda plain, kernel: plain
        self.add_norm = make(add_norm.add_norm, add_norm.triton_add_norm)
        self.add_norm_backward = make(add_norm.add_norm_backward, add_norm.triton_add_norm_backward)
        self.split_heads = make(rotary.split_heads, rotary.triton_split_heads)
        self.rotate_heads = make(rotary.rotate_heads, rotary.triton_rotate_heads)
        self.join_heads = make(rotary.join_heads, rotary.triton_join_heads)
        self.norm_heads = make(head_norm.norm_heads, head_norm.triton_norm_heads)
        self.norm_heads_backward = make(
            head_norm.norm_heads_backward, head_norm.triton_norm_heads_backward
        )
        self.gated = make(swiglu.gated, swiglu.triton_gated)
        self.gated_backward = make(swiglu.gated_backward, swiglu.triton_gated_backward)


def _compiled(plain: Callable[..., Any], kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel where the device runs it, otherwise the plain function compiled."""

    @cache
    def compiled() -> Any:  # where it is first used: loading a compiler takes seconds
        return torch.compile(plain)

    def run(x: Tensor, *arguments: Any) -> Any:
        return (kernel if jit.serve(x.device) else compiled())(x, *arguments)

    return run


class Linears(Protocol):
    """How the matmuls of a block are called, and where the gradients of their weights go."""

    def linear(self, x: Tensor, layer: nn.Linear) -> Tensor: ...

    def swiglu_linear(
        self, gate_up: Tensor, layer: nn.Linear, block: int, kernels: BlockKernels
    ) -> Tensor: ...


class Accumulating:
    """Every matmul adds its weight's gradient to where `gradient` says."""

    def __init__(self, gradient: Gradient) -> None:
        self.gradient = gradient

    def linear(self, x: Tensor, layer: nn.Linear) -> Tensor:
        out: Tensor = apply(AccumulatedLinear, x, layer.weight, self.gradient)
        return out if layer.bias is None else out + layer.bias

    def swiglu_linear(
        self, gate_up: Tensor, layer: nn.Linear, block: int, kernels: BlockKernels
    ) -> Tensor:
        out: Tensor = apply(SwigluLinear, gate_up, layer.weight, self.gradient, block, kernels)
        return out


class Scoring:
    """Modules are called, with their hooks; nothing is learned."""

    def linear(self, x: Tensor, layer: nn.Linear) -> Tensor:
        out: Tensor = layer(x)
        return out

    def swiglu_linear(
        self, gate_up: Tensor, layer: nn.Linear, block: int, kernels: BlockKernels
    ) -> Tensor:
        out: Tensor = layer(kernels.gated(gate_up, block))
        return out


class FusedBlock:
    """The same function as `Block`."""

    def __init__(self, block: Block, linears: Linears, kernels: BlockKernels) -> None:
        self.block, self.linears, self.kernels = block, linears, kernels

    def __call__(
        self,
        x: Tensor,
        delta: Tensor,
        cos: Tensor,
        sin: Tensor,
        rows: Layout,
        kernel: str,
        prefix: Prefix | None,
    ) -> Streams:
        block, linears, kernels, shape = self.block, self.linears, self.kernels, self.block.shape
        x, normed = apply(AddNorm, x, delta, block.attention_norm.weight, shape.norm_eps, kernels)
        q, k, v = heads(linears.linear(normed, block.qkv), cos, sin, block, kernels)
        seen = attend(q, k, v, rows, kernel, prefix, shape.window).flatten(1)
        x, normed = apply(
            AddNorm,
            x,
            linears.linear(seen, block.out),
            block.ffn_norm.weight,
            shape.norm_eps,
            kernels,
        )
        gate_up = linears.linear(normed, block.gate_up)
        return x, linears.swiglu_linear(gate_up, block.down, shape.ffn_block, kernels), k, v
