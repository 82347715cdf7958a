"""Transformer blocks of a Llama whose four matmuls run in fp8, for training and for scoring;
everything else, attention included, is bf16.

Operands are scaled by rows: a token's activations, its gradients, and a weight's rows by output
(forward) or by input (backward). A weight's fp8 copies are made on first use after the weight
changed. The gradient of a weight is a product of 16-bit operands, or of fp8 ones scaled by columns
(`WEIGHT_GRADIENT`).

Saved for the backward pass are the residual stream before each norm and the output of gate_up; the
norm and SwiGLU are computed again. Used by engines/torch/llama.py (training) and
engines/torch/score.py.
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

MATRICES = ("qkv", "out", "gate_up", "down")  # linear layers of a block that run in fp8
GRADIENT = E4M3  # of activations' gradients
MADE_OF = torch.bfloat16  # weights are rounded to it first
WEIGHT_GRADIENT: Literal["bf16", "fp8"] = "fp8"


class Fp8Kernels(BlockKernels):
    """The operations of `BlockKernels` and those that write fp8, shared by all blocks: with `fast`
    a Triton kernel where the device has Triton, otherwise the plain function.
    """

    def __init__(self, fast: bool) -> None:
        """Choose the functions; `fast` also compiles those of `BlockKernels` that run without
        Triton.
        """
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
    """Return a function that calls `kernel` if its first argument is on a device with Triton,
    otherwise `plain`.
    """

    def run(x: Tensor, *arguments: Any) -> Any:
        """Call the kernel or the plain function."""
        return (kernel if jit.serve(x.device) else plain)(x, *arguments)

    return run


class Copies:
    """Fp8 copies of weights, made by `quantize` and made again when a weight's version (`_version`)
    has changed.

    With `cached` False nothing is stored and every call makes a new copy: for weights that a rank
    does not keep either.
    """

    def __init__(self, make: Callable[[Tensor], Fp8], kept: bool) -> None:
        """Start with no copies; `quantize` makes an fp8 matrix from a bf16 weight."""
        self.make, self.kept = make, kept
        self.made: dict[int, tuple[int, Fp8]] = {}

    def of(self, weight: Tensor) -> Fp8:
        """Return the weight in fp8, from the cache if the weight has not changed. An outdated copy
        is freed before the new one is made.
        """
        if not self.kept:
            return self._of(weight)
        version, made = self.made.get(id(weight), (None, None))
        if made is None or version != weight._version:
            made = None
            self.made.pop(id(weight), None)  # frees the old copy before the new one is made
            made = self._of(weight)
            self.made[id(weight)] = weight._version, made
        return made

    def _of(self, weight: Tensor) -> Fp8:
        """Quantize the weight after rounding it to bf16, so that the copy is the same whatever type
        a rank stores the weight in.
        """
        return self.make(weight.detach().to(MADE_OF))


class Learning:
    """What the fp8 matmuls of all blocks share in training: kernels, fp8 copies of weights, and
    where gradients are accumulated.

    `forward_weights` and `backward_weights` are the weights scaled by output and by input; with
    `cached` False these copies are not stored.
    """

    def __init__(self, gradient: Gradient, kernels: Fp8Kernels, kept: bool = True) -> None:
        """Start with no copies of weights; `gradient` returns the accumulator of a weight's
        gradient.
        """
        self.gradient, self.kernels = gradient, kernels
        self.forward, self.backward = Copies(kernels.rows, kept), Copies(kernels.columns, kept)

    def scaled(self, grad: Tensor) -> Fp8:
        """Return a gradient in fp8 with a scale per token."""
        made: Fp8 = self.kernels.rows(grad, GRADIENT)
        return made

    def multiply(self, x: Fp8, weight: Tensor) -> Tensor:
        """Return x · weightᵀ in bf16."""
        return product(x, self.forward.of(weight))

    def back(self, grad: Fp8, weight: Tensor) -> Tensor:
        """Return grad · weight in bf16: the gradient of the input."""
        return product(grad, self.backward.of(weight))

    def add(self, weight: Tensor, grad: Tensor, x: Tensor) -> None:
        """Add gradᵀ · x, the gradient of a weight, to its accumulator, in place; computed in 16
        bits or in fp8, as `WEIGHT_GRADIENT` says.
        """
        total = self.gradient(weight)
        if WEIGHT_GRADIENT == "bf16":
            add_product(total, grad, x)
        else:
            total.add_(
                product(self.kernels.columns(grad, GRADIENT), self.kernels.columns(x), total.dtype)
            )


class Linear(torch.autograd.Function):
    """x · weightᵀ in fp8, for training: the backward pass adds the weight's gradient to its
    accumulator and returns that of x only.
    """

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor, code: Learning) -> Tensor:
        """Return x · weightᵀ in bf16. The weight itself is remembered, not saved: recomputation
        would give another tensor for it.
        """
        context.save_for_backward(x)
        # not saved: recomputation would give another tensor
        context.weight, context.code = weight, code
        return code.multiply(code.kernels.rows(x), weight)

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Accumulate the weight's gradient, and return that of x and None for the rest."""
        [x], weight = context.saved_tensors, context.weight
        code: Learning = context.code
        code.add(weight, grads[0], x)
        return code.back(code.scaled(grads[0]), weight), None, None


class GatedLinear(torch.autograd.Function):
    """SwiGLU(gate_up) · weightᵀ in fp8, for training: the backward pass adds the weight's gradient
    to its accumulator and returns that of gate_up only.
    """

    @staticmethod
    def forward(
        context: Any, gate_up: Tensor, weight: Tensor, block: int, code: Learning
    ) -> Tensor:
        """Return SwiGLU(gate_up) · weightᵀ in bf16; `chunk` is `LlamaShape.gate_up_chunk`."""
        context.save_for_backward(gate_up)
        context.weight, context.block, context.code = weight, block, code
        return code.multiply(code.kernels.gated_fp8(gate_up, block), weight)

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        """Accumulate the weight's gradient, and return that of gate_up and None for the rest."""
        [gate_up], weight = context.saved_tensors, context.weight
        code: Learning = context.code
        grad = code.back(code.scaled(grads[0]), weight)
        back, wide = code.kernels.gated_backward(gate_up, grad, context.block)
        code.add(weight, grads[0], wide)
        return back, None, None, None


class Fp8Linears:
    """The matmuls of a `FusedBlock` in fp8, for blocks whose tokens are exchanged between ranks
    before and after a matmul; a `BlockLinears`.
    """

    def __init__(self, code: Learning) -> None:
        """Use what all blocks share in training."""
        self.code = code

    def linear(self, x: Tensor, layer: nn.Linear) -> Tensor:
        """Return the layer's output in bf16, with its bias if it has one."""
        out: Tensor = apply(Linear, x, layer.weight, self.code)
        return out if layer.bias is None else out + layer.bias

    def swiglu_linear(
        self, gate_up: Tensor, layer: nn.Linear, block: int, kernels: BlockKernels
    ) -> Tensor:
        """Return the layer's output for SwiGLU(gate_up), in bf16. `kernels` is not used."""
        out: Tensor = apply(GatedLinear, gate_up, layer.weight, block, self.code)
        return out


class NormLinear(torch.autograd.Function):
    """x + delta, and its RMSNorm times a weight in fp8, for training: the backward pass adds the
    weight's gradient to its accumulator.
    """

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
        """Return x + delta and RMSNorm(x + delta) · weightᵀ; `norm` is the norm's weight."""
        x, normed, scale = code.kernels.add_norm_fp8(x, delta, norm, eps)
        context.save_for_backward(x, scale, norm)
        context.weight, context.code = weight, code
        return x, code.multiply(normed, weight)

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        """Accumulate the weight's gradient; return those of x, delta and the norm's weight, and
        None for the rest.
        """
        x, scale, norm = context.saved_tensors
        weight, code = context.weight, context.code
        code.add(weight, grads[1], code.kernels.renorm(x, scale, norm))
        grad = code.back(code.scaled(grads[1]), weight)
        back, of_norm = code.kernels.add_norm_backward(x, scale, norm, grads[0], grad)
        return back, back, of_norm, None, None, None


class FeedForward(torch.autograd.Function):
    """x + delta, and its whole feed-forward (RMSNorm, gate and up, SwiGLU, down) in fp8, for
    training: the backward pass adds the gradients of both weights to their accumulators.
    """

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
        """Return x + delta and the feed-forward's output; norm, gate_up and down are weights."""
        x, normed, scale = code.kernels.add_norm_fp8(x, delta, norm, sizes.norm_eps)
        inner = code.multiply(normed, gate_up)
        context.save_for_backward(x, scale, norm, inner)
        context.weights, context.block, context.code = (gate_up, down), sizes.ffn_block, code
        return x, code.multiply(code.kernels.gated_fp8(inner, sizes.ffn_block), down)

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Accumulate the gradients of gate_up and down; return those of x, delta and the norm's
        weight, and None for the rest.
        """
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
    """A Llama block with fp8 matmuls for training: the same function as `LlamaBlock`, with weight
    gradients accumulated by the matmuls.
    """

    def __init__(self, block: Block, code: Learning) -> None:
        """Wrap a block, whose parameters are used."""
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
        """Return x, delta, keys and values, as `LlamaBlock.forward`."""
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
    """A linear layer for scoring that stores its weight in fp8 only, as buffers `values` and
    `scale`. It shares the forward hooks of the layer it replaces.
    """

    def __init__(self, layer: nn.Linear) -> None:
        """Quantize the layer's weight by rows; take over its bias and forward hooks."""
        super().__init__()
        made = fp8.make_rows(layer.weight.detach())
        self.register_buffer("values", made.values)
        self.register_buffer("scale", made.scale)
        self.bias = layer.bias
        self._forward_hooks = layer._forward_hooks  # a tensor-parallel group sums in them

    def forward(self, x: Tensor | Fp8) -> Tensor:
        """Return the layer's output in bf16, with its bias if it has one; the input is quantized
        unless it is fp8 already.
        """
        made = x if isinstance(x, Fp8) else fp8.rows(x)
        out = product(made, Fp8(self.get_buffer("values"), self.get_buffer("scale")))
        return out if self.bias is None else out + self.bias


class Fp8ScoreBlock:
    """A Llama block for scoring whose linear layers `convert_to_fp8` has replaced: the same
    function as `LlamaBlock`, with fp8 written by fused kernels.
    """

    def __init__(self, block: Block, kernels: Fp8Kernels) -> None:
        """Wrap a block whose linear layers `convert_to_fp8` has replaced."""
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
        """Return x, delta, keys and values, as `LlamaBlock.forward`."""
        block, kernels, shape = self.block, self.kernels, self.block.shape
        x, normed, _ = kernels.add_norm_fp8(x, delta, block.attention_norm.weight, shape.norm_eps)
        q, k, v = heads(block.qkv(normed), cos, sin, block, kernels)
        seen = kernels.rows(attend(q, k, v, rows, kernel, prefix, shape.window).flatten(1))
        x, normed, _ = kernels.add_norm_fp8(
            x, block.out(seen), block.ffn_norm.weight, shape.norm_eps
        )
        return x, block.down(kernels.gated_fp8(block.gate_up(normed), shape.ffn_block)), k, v


def keep_fp8(model: Llama) -> None:
    """Replace the four matrices of every block by `Fp8ScoringLinear`, in place; the original
    weights are dropped, so the model can only score.
    """
    for block in model.layers:
        for name in MATRICES:
            setattr(block, name, ScoredLinear(getattr(block, name)))


def is_matrix(name: str) -> bool:
    """Return whether the parameter of this name is the weight of a matmul that runs in fp8."""
    owner, _, leaf = name.rpartition(".")
    return leaf == "weight" and owner.rpartition(".")[2] in MATRICES


def kept(model: Llama) -> list[Tensor]:
    """Return the fp8 values of all matrices of a model that `convert_to_fp8` has changed."""
    return [one.get_buffer("values") for one in model.modules() if isinstance(one, ScoredLinear)]


def details(device: torch.device, learns: bool = True) -> dict[str, str]:
    """Return how fp8 is computed on the device, as texts for the record: `fp8` (row-wise scales, or
    emulated on a CPU) and, if `trains`, `weight_gradients` (`bf16` or `fp8`).
    """
    how = (
        "emulated: numbers of fp8, sums of fp32"
        if device.type == "cpu"
        else "row-wise scales, torch._scaled_mm"
    )
    return {"fp8": how} | ({"weight_gradients": WEIGHT_GRADIENT} if learns else {})


def check_sizes(shape: LlamaShape) -> None:
    """Raise RequestError unless all sides of a shard's fp8 matrices are multiples of `ALIGNED`
    (16), which devices require; `shape` is that of one shard.
    """
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
