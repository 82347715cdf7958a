"""A Llama block for training and fast scoring, in which each operation between matmuls is one
Triton kernel or compiled function; the matmuls stay plain.

In the backward pass the matmul that computes a weight's gradient adds it to the accumulator
directly (`AccumulatingLinears`). Autograd would write each micro-batch's gradient and add it by a
second kernel: with fp32 accumulators and small micro-batches that is a tenth of the time. The
accumulator is looked up during the backward pass, because with sharded gradients there is memory
for a layer's only while the layer is computed.

Saved for the backward pass are queries, keys and values as attention reads them, and the output of
gate_up; SwiGLU is computed again by the kernel of its gradient. Used by engines/torch.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from steelyard.kernels import add_norm, jit, qk_norm, rotary, swiglu
from steelyard.models.attention import CachedLayout, PackedLayout, PrefixCache, attend_packed_rows
from steelyard.models.llama import BlockOutput, LlamaBlock
from steelyard.models.tensors import apply_function

# returns the accumulator of a parameter's gradient; called in the backward pass
GradientOf = Callable[[Tensor], Tensor]


class AccumulatedLinear(torch.autograd.Function):
    """An autograd function: x · weightᵀ, whose backward pass adds the weight's gradient to
    `gradient(weight)` and returns that of x only.

    The weight is remembered, not saved: recomputation would give another tensor for it, and
    sharding moves its memory.
    """

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor, gradient: GradientOf) -> Tensor:
        """Return x · weightᵀ, [T, outputs]; x is saved for the backward pass."""
        context.save_for_backward(x)
        context.weight, context.gradient = weight, gradient
        return x @ weight.t()

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Add the linear layer's weight gradient to `gradient(weight)` in place; return that of the
        input x, and None for the rest.
        """
        [x] = context.saved_tensors
        add_product(context.gradient(context.weight), grads[0], x)
        return grads[0] @ context.weight, None, None


class AddNorm(torch.autograd.Function):
    """An autograd function: x + delta and its RMSNorm, with its own backward pass by the shared
    kernels; x, delta and the norm's weight get gradients.
    """

    @staticmethod
    def forward(
        context: Any, x: Tensor, delta: Tensor, weight: Tensor, eps: float, kernels: "BlockKernels"
    ) -> tuple[Tensor, Tensor]:
        """Return x + delta and its RMSNorm times `weight`, [T, hidden] each."""
        x, normed, scale = kernels.add_norm(x, delta, weight, eps)
        context.save_for_backward(x, scale, weight)
        context.kernels = kernels
        return x, normed

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        """Return the gradients of x and delta (the same tensor) and of the RMSNorm's weight, from
        those of the sum and of the norm; None for the rest.
        """
        back, weight_grad = context.kernels.add_norm_backward(*context.saved_tensors, *grads)
        return back, back, weight_grad, None, None


class SplitRotatedHeads(torch.autograd.Function):
    """An autograd function: queries and keys, rotated by their positions, and values, split off QKV
    as new tensors, with its own backward pass; only qkv gets a gradient.
    """

    @staticmethod
    def forward(
        context: Any, qkv: Tensor, cos: Tensor, sin: Tensor, queries: int, kernels: "BlockKernels"
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated q [T, H, D], rotated k and v [T, G, D] of qkv [T, G · (queries + 2) · D]
        as new tensors; `queries` is the number of query heads of a key group.
        """
        context.save_for_backward(cos, sin)
        context.kernels = kernels
        out: tuple[Tensor, Tensor, Tensor] = kernels.split_rotated_heads(qkv, cos, sin, queries)
        return out

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        """Return the gradient of qkv from those of rotated queries, rotated keys and values, and
        None for the rest.
        """
        return (
            context.kernels.split_rotated_heads_backward(*grads, *context.saved_tensors),
            None,
            None,
            None,
            None,
        )


class NormHeads(torch.autograd.Function):
    """An autograd function: a copy of QKV with the RMSNorm of each query and key head (QK norm;
    values unchanged, nothing is rotated), with its own backward pass.
    """

    @staticmethod
    def forward(
        context: Any,
        qkv: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
        eps: float,
        queries: int,
        kernels: "BlockKernels",
    ) -> Tensor:
        """Return a copy of qkv [T, G · (queries + 2) · D] with the RMSNorm of each query head times
        `q_weight` and of each key head times `k_weight`; `queries` is the number of query heads of
        a key group.
        """
        context.save_for_backward(qkv, q_weight, k_weight)
        context.numbers, context.kernels = (eps, queries), kernels
        out: Tensor = kernels.norm_heads(qkv, q_weight, k_weight, eps, queries)
        return out

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of qkv, of the query norm's weight and of the key norm's weight (QK
        norm alone, no rotation), and None for the rest.
        """
        back = context.kernels.norm_heads_backward(
            *context.saved_tensors, grads[0], *context.numbers
        )
        return *back, None, None, None


def split_qkv_fused(
    qkv: Tensor, cos: Tensor, sin: Tensor, block: LlamaBlock, kernels: "BlockKernels"
) -> tuple[Tensor, Tensor, Tensor]:
    """Return rotated queries, rotated keys and values of QKV [T, G · (H / G + 2) · D], with QK norm
    first if the block has it.

    With gradients enabled they are new tensors, [T, H, D] and [T, G, D]. Otherwise `qkv` (or its
    normed copy) is overwritten and they are views of it, queries as [T, G, H / G, D].
    """
    queries = block.shape.heads // block.shape.kv_heads
    if block.q_norm is not None and block.k_norm is not None:
        qkv = apply_function(
            NormHeads,
            qkv,
            block.q_norm.weight,
            block.k_norm.weight,
            block.shape.norm_eps,
            queries,
            kernels,
        )
    if torch.is_grad_enabled():
        split = apply_function(SplitRotatedHeads, qkv, cos, sin, queries, kernels)
    else:
        split = kernels.rotate_heads_in_place(qkv, cos, sin, queries)
    q, k, v = split
    return q, k, v


class SwigluLinear(torch.autograd.Function):
    """An autograd function: SwiGLU(gate_up) · weightᵀ, whose backward pass computes the SwiGLU
    again, adds the weight's gradient to `gradient(weight)` and returns that of gate_up only.
    """

    @staticmethod
    def forward(
        context: Any,
        gate_up: Tensor,
        weight: Tensor,
        gradient: GradientOf,
        chunk: int,
        kernels: "BlockKernels",
    ) -> Tensor:
        """Return SwiGLU(gate_up) · weightᵀ, [T, outputs]; gate and up are in alternating chunks of
        `chunk` columns (`LlamaShape.gate_up_chunk`). Only gate_up is saved.
        """
        context.save_for_backward(gate_up)
        context.weight, context.gradient, context.chunk, context.kernels = (
            weight,
            gradient,
            chunk,
            kernels,
        )
        out: Tensor = kernels.swiglu(gate_up, chunk) @ weight.t()
        return out

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        """Add the gradient of the linear layer's weight after SwiGLU to `gradient(weight)` in
        place; return that of gate_up, and None for the rest.
        """
        [gate_up] = context.saved_tensors
        back, activated = context.kernels.swiglu_backward(
            gate_up, grads[0] @ context.weight, context.chunk
        )
        add_product(context.gradient(context.weight), grads[0], activated)
        return back, None, None, None, None


def add_product(accumulator: Tensor, grad: Tensor, x: Tensor) -> None:
    """Add gradᵀ · x to `accumulator` [outputs, inputs], in place; `grad` is [tokens, outputs], `x`
    [tokens, inputs]. The accumulator may have a higher precision; on a device the product is then
    added in it, on a CPU rounded to the type of x first.
    """
    if accumulator.dtype == x.dtype:
        accumulator.addmm_(grad.t(), x)
    elif x.device.type == "cpu":  # where addmm has no out_dtype
        accumulator.add_(grad.t() @ x)
    else:
        torch.addmm(accumulator, grad.t(), x, out_dtype=accumulator.dtype, out=accumulator)


class BlockKernels:
    """The operations between a Llama block's matmuls, shared by all blocks: `add_norm`,
    `split_rotated_heads`, `norm_heads` and `swiglu`, each with its `_backward`, and
    `rotate_heads_in_place`.

    With `compiled` each is a Triton kernel where its first argument's device has Triton, and the
    plain function under torch.compile elsewhere; otherwise the plain function.
    """

    def __init__(self, compiled: bool) -> None:
        """Choose the functions; nothing is compiled before it is first called."""
        choose: Callable[..., Any] = (
            _choose_kernel_or_compiled if compiled else lambda plain, kernel: plain
        )
        self.add_norm = choose(add_norm.add_norm, add_norm.triton_add_norm)
        self.add_norm_backward = choose(
            add_norm.add_norm_backward, add_norm.triton_add_norm_backward
        )
        self.split_rotated_heads = choose(
            rotary.split_rotated_heads, rotary.triton_split_rotated_heads
        )
        self.rotate_heads_in_place = choose(
            rotary.rotate_heads_in_place, rotary.triton_rotate_heads_in_place
        )
        self.split_rotated_heads_backward = choose(
            rotary.split_rotated_heads_backward, rotary.triton_split_rotated_heads_backward
        )
        self.norm_heads = choose(qk_norm.norm_heads, qk_norm.triton_norm_heads)
        self.norm_heads_backward = choose(
            qk_norm.norm_heads_backward, qk_norm.triton_norm_heads_backward
        )
        self.swiglu = choose(swiglu.swiglu_interleaved, swiglu.triton_swiglu_interleaved)
        self.swiglu_backward = choose(
            swiglu.swiglu_interleaved_backward, swiglu.triton_swiglu_interleaved_backward
        )


def _choose_kernel_or_compiled(
    plain: Callable[..., Any], kernel: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a function that calls `kernel` if its first argument is on a device with Triton,
    otherwise `plain`, compiled on first use.
    """

    @cache
    def compile_plain() -> Any:  # on first use: loading the compiler takes seconds
        """Return `plain` under torch.compile; cached. Made on first use because loading the
        compiler takes seconds.
        """
        return torch.compile(plain)

    def run(x: Tensor, *arguments: Any) -> Any:
        """Call the kernel or the compiled function with these arguments and return its result."""
        return (kernel if jit.has_triton(x.device) else compile_plain())(x, *arguments)

    return run


class BlockLinears(Protocol):
    """The protocol by which a `FusedBlock` calls its matmuls, which decides where the gradients of
    their weights go: `linear(x, layer)` and `swiglu_linear(gate_up, layer, chunk, kernels)`, the
    layer's output for x, or for SwiGLU(gate_up). Implemented for training by `AccumulatingLinears`,
    `Fp8Linears` and, with tensor parallelism, `TokenParallelLinears`, and for scoring by
    `ScoringLinears`.
    """

    def linear(self, x: Tensor, layer: nn.Linear) -> Tensor:
        """Return the layer's output for x, with its bias if it has one."""

    def swiglu_linear(
        self, gate_up: Tensor, layer: nn.Linear, chunk: int, kernels: BlockKernels
    ) -> Tensor:
        """Return the layer's output for SwiGLU(gate_up), where gate and up are in alternating
        chunks of `chunk` columns.
        """


class AccumulatingLinears:
    """Matmuls of a `FusedBlock` for training, a `BlockLinears`: `linear` and `swiglu_linear`
    (SwiGLU first, computed again in the backward pass) each add their weight's gradient to
    `gradient(weight)` in the backward pass, so autograd gets none. Biases get theirs by autograd;
    `swiglu_linear` adds none.
    """

    def __init__(self, gradient: GradientOf) -> None:
        """Use `gradient` to look up the accumulator of a weight's gradient."""
        self.gradient = gradient

    def linear(self, x: Tensor, layer: nn.Linear) -> Tensor:
        """Return the layer's output for x in training, with its bias if it has one. The backward
        pass adds the weight's gradient to `gradient(weight)`; the bias's is autograd's.
        """
        out: Tensor = apply_function(AccumulatedLinear, x, layer.weight, self.gradient)
        return out if layer.bias is None else out + layer.bias

    def swiglu_linear(
        self, gate_up: Tensor, layer: nn.Linear, chunk: int, kernels: BlockKernels
    ) -> Tensor:
        """Return the layer's output for SwiGLU(gate_up), where gate and up are in alternating
        chunks of `chunk` columns; the backward pass adds the weight's gradient to
        `gradient(weight)`. A bias is not added.
        """
        out: Tensor = apply_function(
            SwigluLinear, gate_up, layer.weight, self.gradient, chunk, kernels
        )
        return out


class ScoringLinears:
    """Matmuls of a `FusedBlock` for scoring, a `BlockLinears`: `linear` and `swiglu_linear` call
    the module itself, so that its hooks run, in which a tensor-parallel group sums outputs (all its
    ranks call it). Gradients, if any, are autograd's.
    """

    def linear(self, x: Tensor, layer: nn.Linear) -> Tensor:
        """Return layer(x) of a block in scoring, called as a module so that its hooks run: in them
        a tensor-parallel group sums the outputs of row-parallel layers, so all its ranks call it.
        """
        out: Tensor = layer(x)
        return out

    def swiglu_linear(
        self, gate_up: Tensor, layer: nn.Linear, chunk: int, kernels: BlockKernels
    ) -> Tensor:
        """Return layer(SwiGLU(gate_up)) of a block in scoring, where gate and up are in alternating
        chunks of `chunk` columns. The layer is called as a module: in its hooks a tensor-parallel
        group sums outputs, so all its ranks call it.
        """
        out: Tensor = layer(kernels.swiglu(gate_up, chunk))
        return out


class FusedBlock:
    """A Llama block with fused operations between matmuls, called as `LlamaBlock` (the result is x,
    delta, keys, values): the same function, with the parameters of `block`. `linears` (a
    `BlockLinears`) runs the matmuls, `kernels` (`BlockKernels`) what is between them; attention is
    models/attention.py's.
    """

    def __init__(self, block: LlamaBlock, linears: BlockLinears, kernels: BlockKernels) -> None:
        """Wrap a block, whose parameters are used, with the way its matmuls are called and the
        shared functions.
        """
        self.block, self.linears, self.kernels = block, linears, kernels

    def __call__(
        self,
        x: Tensor,
        delta: Tensor,
        cos: Tensor,
        sin: Tensor,
        layout: PackedLayout | CachedLayout,
        kernel: str,
        prefix: PrefixCache | None,
    ) -> BlockOutput:
        """Return x, delta, keys and values of a Llama block, as `LlamaBlock.forward`. With
        gradients disabled, keys and values are views of the QKV matrix or its normed copy.
        """
        block, linears, kernels, shape = self.block, self.linears, self.kernels, self.block.shape
        x, normed = apply_function(
            AddNorm, x, delta, block.attention_norm.weight, shape.norm_eps, kernels
        )
        q, k, v = split_qkv_fused(linears.linear(normed, block.qkv), cos, sin, block, kernels)
        attended = attend_packed_rows(q, k, v, layout, kernel, prefix, shape.window).flatten(1)
        x, normed = apply_function(
            AddNorm,
            x,
            linears.linear(attended, block.out),
            block.ffn_norm.weight,
            shape.norm_eps,
            kernels,
        )
        gate_up = linears.linear(normed, block.gate_up)
        return x, linears.swiglu_linear(gate_up, block.down, shape.gate_up_chunk, kernels), k, v
