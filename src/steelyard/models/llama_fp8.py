"""A block whose four matmuls run in fp8, for training and for scoring. All else, attention among
it, is bf16.

Operands are scaled by rows: a token's activations, its gradients, and of a weight what one output
(forward) or one input (backward) is made with. A weight's fp8 copies are made when they are first
needed after the weight changed. Its gradient is a product of 16-bit operands, or of fp8 ones scaled
by columns (`WEIGHT_GRADIENT`).

Kept for the backward pass are the sum of the streams before a norm, and the output of gate_up; what
the norm and SwiGLU make of them is made again.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from steelyard.errors import RequestError
from steelyard.kernels import fp8, fp8_fused, jit
from steelyard.kernels.fp8 import ALIGNED, E4M3, Fp8, product
from steelyard.models.attention import Layout, Prefix, attend
from steelyard.models.llama import Block, Llama, LlamaShape, Streams
from steelyard.models.llama_fused import BlockKernels, Gradient, add_product, heads
from steelyard.models.tensors import apply

MATRICES = ("qkv", "out", "gate_up", "down")  # of a block: what runs in fp8
GRADIENT = E4M3  # the type of gradients
MADE_OF = torch.bfloat16  # the type that weights have before they are scaled
WEIGHT_GRADIENT: Literal["bf16", "fp8"] = "fp8"


class Fp8Kernels(BlockKernels):
    """What makes the operands, as it is written, or a kernel where the device runs it."""

    def __init__(self, fast: bool) -> None:
        super().__init__(fast)
        make: Callable[..., Any] = _chosen if fast else lambda plain, kernel: plain
        self.rows = make(fp8.rows, fp8.triton_rows)
        self.columns = make(fp8.columns, fp8.triton_columns)
        self.add_norm_fp8 = make(fp8_fused.add_norm_fp8, fp8_fused.triton_add_norm_fp8)
        self.renorm = make(fp8_fused.renorm, fp8_fused.triton_renorm)
        self.gated_fp8 = make(fp8_fused.gated_fp8, fp8_fused.triton_gated_fp8)
        self.gated_backward_fp8 = make(
            fp8_fused.gated_backward_fp8, fp8_fused.triton_gated_backward_fp8
        )


def _chosen(plain: Callable[..., Any], kernel: Callable[..., Any]) -> Callable[..., Any]:
    def run(x: Tensor, *arguments: Any) -> Any:
        return (kernel if jit.serve(x.device) else plain)(x, *arguments)

    return run


class Copies:
    """Fp8 copies of weights. Whoever writes a weight raises its version, and its copies are made
    again. They are not kept where the weights are not."""

    def __init__(self, make: Callable[[Tensor], Fp8], kept: bool) -> None:
        self.make, self.kept = make, kept
        self.made: dict[int, tuple[int, Fp8]] = {}

    def of(self, weight: Tensor) -> Fp8:
        if not self.kept:
            return self._of(weight)
        version, made = self.made.get(id(weight), (None, None))
        if made is None or version != weight._version:
            made = None
            self.made.pop(id(weight), None)  # two are never there at once
            made = self._of(weight)
            self.made[id(weight)] = weight._version, made
        return made

    def _of(self, weight: Tensor) -> Fp8:
        """Of the weight as bf16: so it is the same whether a rank has it so, or in the type that it
        is kept in.
        """
        return self.make(weight.detach().to(MADE_OF))


class Learning:
    """What the matmuls of all blocks share: kernels, copies of weights, and where their gradients
    are summed.
    """

    def __init__(self, gradient: Gradient, kernels: Fp8Kernels, kept: bool = True) -> None:
        self.gradient, self.kernels = gradient, kernels
        self.forward, self.backward = Copies(kernels.rows, kept), Copies(kernels.columns, kept)

    def scaled(self, grad: Tensor) -> Fp8:
        made: Fp8 = self.kernels.rows(grad, GRADIENT)
        return made

    def multiply(self, x: Fp8, weight: Tensor) -> Tensor:
        return product(x, self.forward.of(weight))

    def back(self, grad: Fp8, weight: Tensor) -> Tensor:
        return product(grad, self.backward.of(weight))

    def add(self, weight: Tensor, grad: Tensor, x: Tensor) -> None:
        """The gradient of a weight to its sum."""
        total = self.gradient(weight)
        if WEIGHT_GRADIENT == "bf16":
            add_product(total, grad, x)
        else:
            total.add_(
                product(self.kernels.columns(grad, GRADIENT), self.kernels.columns(x), total.dtype)
            )


class Linear(torch.autograd.Function):
    """x times a weight."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor, code: Learning) -> Tensor:
        context.save_for_backward(x)
        context.weight, context.code = weight, code  # itself: a recomputed tensor is another one
        return code.multiply(code.kernels.rows(x), weight)

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        [x], weight = context.saved_tensors, context.weight
        code: Learning = context.code
        code.add(weight, grads[0], x)
        return code.back(code.scaled(grads[0]), weight), None, None


class GatedLinear(torch.autograd.Function):
    """SwiGLU of gate and up, times a weight."""

    @staticmethod
    def forward(
        context: Any, gate_up: Tensor, weight: Tensor, block: int, code: Learning
    ) -> Tensor:
        context.save_for_backward(gate_up)
        context.weight, context.block, context.code = weight, block, code
        return code.multiply(code.kernels.gated_fp8(gate_up, block), weight)

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        [gate_up], weight = context.saved_tensors, context.weight
        code: Learning = context.code
        grad = code.back(code.scaled(grads[0]), weight)
        back, wide = code.kernels.gated_backward(gate_up, grad, context.block)
        code.add(weight, grads[0], wide)
        return back, None, None, None


class Fp8Linears:
    """The matmuls of `FusedBlock` in fp8, for blocks whose tokens are exchanged before and after a
    matmul.
    """

    def __init__(self, code: Learning) -> None:
        self.code = code

    def linear(self, x: Tensor, layer: nn.Linear) -> Tensor:
        out: Tensor = apply(Linear, x, layer.weight, self.code)
        return out if layer.bias is None else out + layer.bias

    def swiglu_linear(
        self, gate_up: Tensor, layer: nn.Linear, block: int, kernels: BlockKernels
    ) -> Tensor:
        out: Tensor = apply(GatedLinear, gate_up, layer.weight, block, self.code)
        return out


class NormLinear(torch.autograd.Function):
    """The sum of two streams, and its norm times a weight."""

    @staticmethod
    def forward(
        context: Any,
        x: Tensor,
        delta: Tensor,
        norm: Tensor,
        weight: Tensor,
        eps: float,
        code: Learning,
    ) -> tuple[Tensor, Tensor]:
        x, normed, scale = code.kernels.add_norm_fp8(x, delta, norm, eps)
        context.save_for_backward(x, scale, norm)
        context.weight, context.code = weight, code
        return x, code.multiply(normed, weight)

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        x, scale, norm = context.saved_tensors
        weight, code = context.weight, context.code
        code.add(weight, grads[1], code.kernels.renorm(x, scale, norm))
        grad = code.back(code.scaled(grads[1]), weight)
        back, of_norm = code.kernels.add_norm_backward(x, scale, norm, grads[0], grad)
        return back, back, of_norm, None, None, None


class FeedForward(torch.autograd.Function):
    """The sum of two streams, and what its norm becomes by gate, up, SwiGLU and down."""

    @staticmethod
    def forward(
        context: Any,
        x: Tensor,
        delta: Tensor,
        norm: Tensor,
        gate_up: Tensor,
        down: Tensor,
        sizes: LlamaShape,
        code: Learning,
    ) -> tuple[Tensor, Tensor]:
        x, normed, scale = code.kernels.add_norm_fp8(x, delta, norm, sizes.norm_eps)
        inner = code.multiply(normed, gate_up)
        context.save_for_backward(x, scale, norm, inner)
        context.weights, context.block, context.code = (gate_up, down), sizes.ffn_block, code
        return x, code.multiply(code.kernels.gated_fp8(inner, sizes.ffn_block), down)

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, norm, inner = context.saved_tensors
        (gate_up, down), code = context.weights, context.code
        grad = code.back(code.scaled(grads[1]), down)
        of_inner, wide, scaled = code.kernels.gated_backward_fp8(
            inner, grad, context.block, GRADIENT
        )
        code.add(down, grads[1], wide)
        del grad, wide
        grad = code.back(scaled, gate_up)
        del scaled
        code.add(gate_up, of_inner, code.kernels.renorm(x, scale, norm))
        back, of_norm = code.kernels.add_norm_backward(x, scale, norm, grads[0], grad)
        return back, back, of_norm, None, None, None, None


class Fp8Block:
    """A block that learns."""

    def __init__(self, block: Block, code: Learning) -> None:
        self.block, self.code = block, code

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
        block, code, shape = self.block, self.code, self.block.shape
        norm, weight, bias = block.attention_norm.weight, block.qkv.weight, block.qkv.bias
        x, qkv = apply(NormLinear, x, delta, norm, weight, shape.norm_eps, code)
        qkv = qkv if bias is None else qkv + bias
        q, k, v = heads(qkv, cos, sin, block, code.kernels)
        seen = attend(q, k, v, rows, kernel, prefix, shape.window).flatten(1)
        delta = apply(Linear, seen, block.out.weight, code)
        weights = block.gate_up.weight, block.down.weight
        x, delta = apply(FeedForward, x, delta, block.ffn_norm.weight, *weights, shape, code)
        return x, delta, k, v


class ScoredLinear(nn.Module):
    """A linear layer of which only fp8 is kept. What it is given may be fp8 already."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        made = fp8.make_rows(layer.weight.detach())
        self.register_buffer("values", made.values)
        self.register_buffer("scale", made.scale)
        self.bias = layer.bias
        self._forward_hooks = layer._forward_hooks  # by which a tensor-parallel group sums

    def forward(self, x: Tensor | Fp8) -> Tensor:
        made = x if isinstance(x, Fp8) else fp8.rows(x)
        out = product(made, Fp8(self.get_buffer("values"), self.get_buffer("scale")))
        return out if self.bias is None else out + self.bias


class Fp8ScoreBlock:
    """The same as `Block` with such layers, its fp8 made by kernels."""

    def __init__(self, block: Block, kernels: Fp8Kernels) -> None:
        self.block, self.kernels = block, kernels

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
        block, kernels, shape = self.block, self.kernels, self.block.shape
        x, normed, _ = kernels.add_norm_fp8(x, delta, block.attention_norm.weight, shape.norm_eps)
        q, k, v = heads(block.qkv(normed), cos, sin, block, kernels)
        seen = kernels.rows(attend(q, k, v, rows, kernel, prefix, shape.window).flatten(1))
        x, normed, _ = kernels.add_norm_fp8(
            x, block.out(seen), block.ffn_norm.weight, shape.norm_eps
        )
        return x, block.down(kernels.gated_fp8(block.gate_up(normed), shape.ffn_block)), k, v


def keep_fp8(model: Llama) -> None:
    """Keep nothing but fp8 of the layers' matrices; to score with."""
    for block in model.layers:
        for name in MATRICES:
            setattr(block, name, ScoredLinear(getattr(block, name)))


def is_matrix(name: str) -> bool:
    """Whether a parameter of this name is read in fp8."""
    owner, _, leaf = name.rpartition(".")
    return leaf == "weight" and owner.rpartition(".")[2] in MATRICES


def kept(model: Llama) -> list[Tensor]:
    """The fp8 numbers of a model that `keep_fp8` was called on."""
    return [one.get_buffer("values") for one in model.modules() if isinstance(one, ScoredLinear)]


def details(device: torch.device, learns: bool = True) -> dict[str, str]:
    """How fp8 was computed, for the record."""
    how = (
        "emulated: numbers of fp8, sums of fp32"
        if device.type == "cpu"
        else "row-wise scales, torch._scaled_mm"
    )
    return {"fp8": how} | ({"weight_gradients": WEIGHT_GRADIENT} if learns else {})


def check_sizes(shape: LlamaShape) -> None:
    """A device multiplies fp8 matrices of such sizes only; `shape` is that of this device's share."""
    qkv = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    for what, size in {
        "hidden": shape.hidden,
        "qkv": qkv,
        "heads": shape.heads * shape.head_dim,
        "ffn": shape.ffn,
    }.items():
        if size % ALIGNED:
            raise RequestError(
                f"fp8 takes sizes that {ALIGNED} divides, and {what} is {size} on a device; use"
                " bf16 or less TP"
            )
