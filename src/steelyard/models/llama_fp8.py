"""Transformer blocks of a Llama whose four matmuls run in fp8, for training and for scoring;
everything else, attention included, is bf16.

Operands are scaled by rows: a token's activations, its gradients, and a weight's rows by output
(forward) or by input (backward). A weight's fp8 copies are made on first use after the weight
changed. The gradient of a weight is a product of 16-bit operands, or of fp8 ones scaled by columns
(`WEIGHT_GRADIENT`).

Saved for the backward pass are the residual stream before each norm and the output of gate_up; the
norm and SwiGLU are computed again. Used by engines/torch/llama_stage.py (training) and
engines/torch/score.py.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from steelyard.errors import RequestError
from steelyard.kernels import fp8, fp8_fused, jit
from steelyard.kernels.fp8 import ALIGNED, E4M3, Fp8Matrix, multiply_fp8
from steelyard.models.attention import CachedLayout, PackedLayout, PrefixCache, attend_packed_rows
from steelyard.models.llama import BlockOutput, Llama, LlamaBlock, LlamaShape
from steelyard.models.llama_fused import BlockKernels, GradientOf, add_product, split_qkv_fused
from steelyard.models.tensors import apply_function

FP8_MATRICES = ("qkv", "out", "gate_up", "down")  # linear layers of a block that run in fp8
GRADIENT_DTYPE = E4M3  # of activations' gradients
QUANTIZED_FROM = torch.bfloat16  # weights are rounded to it first
WEIGHT_GRADIENT: Literal["bf16", "fp8"] = "fp8"


class Fp8Kernels(BlockKernels):
    """The operations of `BlockKernels` and those that write fp8, shared by all blocks:
    `quantize_rows`, `quantize_columns`, `add_norm_fp8`, `renorm`, `swiglu_fp8` and
    `swiglu_backward_fp8`.

    With `fast` each of the latter is a Triton kernel where its first argument's device has Triton,
    otherwise the plain function, never compiled.
    """

    def __init__(self, fast: bool) -> None:
        """Choose the functions; `fast` also compiles those of `BlockKernels` that run without
        Triton.
        """
        super().__init__(fast)
        choose: Callable[..., Any] = _choose_by_device if fast else lambda plain, kernel: plain
        self.quantize_rows = choose(fp8.quantize_rows, fp8.triton_quantize_rows)
        self.quantize_columns = choose(fp8.quantize_columns, fp8.triton_quantize_columns)
        self.add_norm_fp8 = choose(fp8_fused.add_norm_fp8, fp8_fused.triton_add_norm_fp8)
        self.renorm = choose(fp8_fused.renorm, fp8_fused.triton_renorm)
        self.swiglu_fp8 = choose(fp8_fused.swiglu_fp8, fp8_fused.triton_swiglu_fp8)
        self.swiglu_backward_fp8 = choose(
            fp8_fused.swiglu_backward_fp8, fp8_fused.triton_swiglu_backward_fp8
        )


def _choose_by_device(plain: Callable[..., Any], kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `kernel` if its first argument is on a device with Triton,
    otherwise `plain`.
    """

    def run(x: Tensor, *arguments: Any) -> Any:
        """Call the kernel or the plain function with these arguments and return its result."""
        return (kernel if jit.has_triton(x.device) else plain)(x, *arguments)

    return run


class Fp8WeightCache:
    """Fp8 copies of weights: `get_copy` returns that of a weight, made by `quantize` (after
    rounding to bf16) on first use and again when the weight's version (`_version`, which torch
    counts up on in-place changes) has changed. `copies` has (version, matrix) by the weight's id.

    With `cached` False nothing is stored and every call makes a new copy: for weights that a rank
    does not keep either.
    """

    def __init__(self, quantize: Callable[[Tensor], Fp8Matrix], cached: bool) -> None:
        """Start with no copies; `quantize` makes an fp8 matrix from a bf16 weight."""
        self.quantize, self.cached = quantize, cached
        self.copies: dict[int, tuple[int, Fp8Matrix]] = {}

    def get_copy(self, weight: Tensor) -> Fp8Matrix:
        """Return a weight in fp8: the stored copy if the weight has not changed since it was made,
        otherwise a new one, which is stored. An outdated copy is freed before the new one is made.
        Without `cached` it is always new and not stored.
        """
        if not self.cached:
            return self._quantize_weight(weight)
        version, copy = self.copies.get(id(weight), (None, None))
        if copy is None or version != weight._version:
            copy = None
            self.copies.pop(id(weight), None)  # frees the old copy before the new one is made
            copy = self._quantize_weight(weight)
            self.copies[id(weight)] = weight._version, copy
        return copy

    def _quantize_weight(self, weight: Tensor) -> Fp8Matrix:
        """Quantize the weight after rounding it to bf16, so that the copy is the same whatever type
        a rank stores the weight in.
        """
        return self.quantize(weight.detach().to(QUANTIZED_FROM))


class Fp8Training:
    """What the fp8 matmuls of all blocks share in training: `kernels`, fp8 copies of weights, and
    `gradient`, the function that returns a weight's gradient accumulator.

    `forward_weights` and `backward_weights` are `Fp8WeightCache`s of the weights scaled by output
    and by input; with `cached` False copies are not stored. `multiply` returns x · weightᵀ and
    `multiply_back` grad · weight, in bf16, `quantize_gradient` a gradient in fp8 with a scale per
    token; `add_weight_gradient` adds gradᵀ · x to the accumulator.
    """

    def __init__(self, gradient: GradientOf, kernels: Fp8Kernels, cached: bool = True) -> None:
        """Start with no copies of weights; `gradient` returns the accumulator of a weight's
        gradient.
        """
        self.gradient, self.kernels = gradient, kernels
        self.forward_weights, self.backward_weights = (
            Fp8WeightCache(kernels.quantize_rows, cached),
            Fp8WeightCache(kernels.quantize_columns, cached),
        )

    def quantize_gradient(self, grad: Tensor) -> Fp8Matrix:
        """Return a gradient in fp8 with a scale per token."""
        quantized: Fp8Matrix = self.kernels.quantize_rows(grad, GRADIENT_DTYPE)
        return quantized

    def multiply(self, x: Fp8Matrix, weight: Tensor) -> Tensor:
        """Return x · weightᵀ in bf16, [tokens, outputs], of x [tokens, inputs] in fp8 and the
        weight's fp8 copy scaled by output.
        """
        return multiply_fp8(x, self.forward_weights.get_copy(weight))

    def multiply_back(self, grad: Fp8Matrix, weight: Tensor) -> Tensor:
        """Return grad · weight in bf16, the gradient of a matmul's input, of grad [tokens, outputs]
        in fp8 and the weight's fp8 copy scaled by input.
        """
        return multiply_fp8(grad, self.backward_weights.get_copy(weight))

    def add_weight_gradient(self, weight: Tensor, grad: Tensor, x: Tensor) -> None:
        """Add gradᵀ · x, the gradient of a weight [outputs, inputs], to its accumulator
        `gradient(weight)`, in place. `grad` [tokens, outputs] and `x` [tokens, inputs] are
        multiplied in 16 bits or, if `WEIGHT_GRADIENT` is `fp8`, after quantizing both by columns.
        """
        accumulator = self.gradient(weight)
        if WEIGHT_GRADIENT == "bf16":
            add_product(accumulator, grad, x)
        else:
            accumulator.add_(
                multiply_fp8(
                    self.kernels.quantize_columns(grad, GRADIENT_DTYPE),
                    self.kernels.quantize_columns(x),
                    accumulator.dtype,
                )
            )


class Fp8Linear(torch.autograd.Function):
    """An autograd function: x · weightᵀ of fp8 operands, in bf16, for training. The backward pass
    adds the weight's gradient to `training.gradient(weight)`, computed in the precision of
    `WEIGHT_GRADIENT`, and returns that of x only. x is saved as it is, not in fp8.
    """

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor, training: Fp8Training) -> Tensor:
        """Return x · weightᵀ in bf16, [tokens, outputs], after quantizing x by rows. The weight
        itself is remembered, not saved: recomputation would give another tensor for it.
        """
        context.save_for_backward(x)
        # not saved: recomputation would give another tensor
        context.weight, context.training = weight, training
        return training.multiply(training.kernels.quantize_rows(x), weight)

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Add the weight's gradient of a linear layer in fp8 to `training.gradient(weight)` in
        place; return that of the input x in bf16, and None for the rest.
        """
        [x], weight = context.saved_tensors, context.weight
        training: Fp8Training = context.training
        training.add_weight_gradient(weight, grads[0], x)
        return training.multiply_back(training.quantize_gradient(grads[0]), weight), None, None


class Fp8SwigluLinear(torch.autograd.Function):
    """An autograd function: SwiGLU(gate_up) · weightᵀ of fp8 operands, in bf16, for training. The
    backward pass computes the SwiGLU again, adds the weight's gradient to
    `training.gradient(weight)` and returns that of gate_up only.
    """

    @staticmethod
    def forward(
        context: Any, gate_up: Tensor, weight: Tensor, chunk: int, training: Fp8Training
    ) -> Tensor:
        """Return SwiGLU(gate_up) · weightᵀ in bf16, [tokens, outputs]; gate and up are in
        alternating chunks of `chunk` columns (`LlamaShape.gate_up_chunk`). Only gate_up is saved.
        """
        context.save_for_backward(gate_up)
        context.weight, context.chunk, context.training = weight, chunk, training
        return training.multiply(training.kernels.swiglu_fp8(gate_up, chunk), weight)

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        """Add the gradient of the linear layer's weight after SwiGLU to `training.gradient(weight)`
        in place; return that of gate_up, and None for the rest.
        """
        [gate_up], weight = context.saved_tensors, context.weight
        training: Fp8Training = context.training
        grad = training.multiply_back(training.quantize_gradient(grads[0]), weight)
        back, activated = training.kernels.swiglu_backward(gate_up, grad, context.chunk)
        training.add_weight_gradient(weight, grads[0], activated)
        return back, None, None, None


class Fp8Linears:
    """The matmuls of a `FusedBlock` in fp8, a `BlockLinears` (`linear`, `swiglu_linear`) whose
    backward passes add weight gradients to `training.gradient(weight)`.

    Used with tensor parallelism, where tokens are exchanged between ranks around a matmul; the
    caller does that. Without it a block is an `Fp8TrainBlock`.
    """

    def __init__(self, training: Fp8Training) -> None:
        """Use what all blocks share in training."""
        self.training = training

    def linear(self, x: Tensor, layer: nn.Linear) -> Tensor:
        """Return the layer's output in bf16, with its bias if it has one."""
        out: Tensor = apply_function(Fp8Linear, x, layer.weight, self.training)
        return out if layer.bias is None else out + layer.bias

    def swiglu_linear(
        self, gate_up: Tensor, layer: nn.Linear, chunk: int, kernels: BlockKernels
    ) -> Tensor:
        """Return the layer's output for SwiGLU(gate_up), in bf16, where gate and up are in
        alternating chunks of `chunk` columns. A bias is not added, and `kernels` is not used.
        """
        out: Tensor = apply_function(Fp8SwigluLinear, gate_up, layer.weight, chunk, self.training)
        return out


class Fp8NormLinear(torch.autograd.Function):
    """An autograd function: x + delta, and its RMSNorm times a weight matrix of fp8 operands, for
    training. The backward pass computes the norm again, adds the matrix's gradient to
    `training.gradient(weight)`, and returns those of x, delta and the norm's weight.
    """

    @staticmethod
    def forward(
        context: Any,
        x: Tensor,
        delta: Tensor,
        norm: Tensor,
        weight: Tensor,
        eps: float,
        training: Fp8Training,
    ) -> tuple[Tensor, Tensor]:
        """Return x + delta [T, hidden] and RMSNorm(x + delta) · weightᵀ in bf16, [T, outputs];
        `norm` is the norm's weight.
        """
        x, normed, scale = training.kernels.add_norm_fp8(x, delta, norm, eps)
        context.save_for_backward(x, scale, norm)
        context.weight, context.training = weight, training
        return x, training.multiply(normed, weight)

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        """Add the gradient of the matrix behind the RMSNorm to `training.gradient(weight)` in
        place; return those of x and delta (the same tensor) and of the norm's weight, and None for
        the rest.
        """
        x, scale, norm = context.saved_tensors
        weight, training = context.weight, context.training
        training.add_weight_gradient(weight, grads[1], training.kernels.renorm(x, scale, norm))
        grad = training.multiply_back(training.quantize_gradient(grads[1]), weight)
        back, norm_grad = training.kernels.add_norm_backward(x, scale, norm, grads[0], grad)
        return back, back, norm_grad, None, None, None


class Fp8FeedForward(torch.autograd.Function):
    """An autograd function: x + delta, and its whole feed-forward (RMSNorm, gate and up, SwiGLU,
    down) with matmuls in fp8, for training. The backward pass computes norm and SwiGLU again, adds
    the gradients of both matrices to `training.gradient(weight)`, and returns those of x, delta and
    the norm's weight.
    """

    @staticmethod
    def forward(
        context: Any,
        x: Tensor,
        delta: Tensor,
        norm: Tensor,
        gate_up: Tensor,
        down: Tensor,
        shape: LlamaShape,
        training: Fp8Training,
    ) -> tuple[Tensor, Tensor]:
        """Return x + delta and the feed-forward's output in bf16, [T, hidden] each; `norm`,
        `gate_up` and `down` are weights.
        """
        x, normed, scale = training.kernels.add_norm_fp8(x, delta, norm, shape.norm_eps)
        inner = training.multiply(normed, gate_up)
        context.save_for_backward(x, scale, norm, inner)
        context.weights, context.chunk, context.training = (
            (gate_up, down),
            shape.gate_up_chunk,
            training,
        )
        return x, training.multiply(training.kernels.swiglu_fp8(inner, shape.gate_up_chunk), down)

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Add the gradients of the matrices gate_up and down to their accumulators in place; return
        those of x and delta (the same tensor) and of the norm's weight, and None for the rest.
        """
        x, scale, norm, inner = context.saved_tensors
        (gate_up, down), training = context.weights, context.training
        grad = training.multiply_back(training.quantize_gradient(grads[1]), down)
        inner_grad, activated, scaled = training.kernels.swiglu_backward_fp8(
            inner, grad, context.chunk, GRADIENT_DTYPE
        )
        training.add_weight_gradient(down, grads[1], activated)
        del grad, activated
        grad = training.multiply_back(scaled, gate_up)
        del scaled
        training.add_weight_gradient(gate_up, inner_grad, training.kernels.renorm(x, scale, norm))
        back, norm_grad = training.kernels.add_norm_backward(x, scale, norm, grads[0], grad)
        return back, back, norm_grad, None, None, None, None


class Fp8TrainBlock:
    """A Llama block with fp8 matmuls for training, called as `LlamaBlock` and with its parameters:
    the same function; attention is not in fp8. The matmuls add the gradients of their weights to
    `training.gradient(weight)` (`training`: `Fp8Training`); norms and biases get theirs by
    autograd.
    """

    def __init__(self, block: LlamaBlock, training: Fp8Training) -> None:
        """Wrap a block, whose parameters are used."""
        self.block, self.training = block, training

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
        """Return x, delta, keys and values of a Llama block for training, as `LlamaBlock.forward`:
        the matmuls are in fp8, attention is not.
        """
        block, training, shape = self.block, self.training, self.block.shape
        norm, weight, bias = block.attention_norm.weight, block.qkv.weight, block.qkv.bias
        x, qkv = apply_function(Fp8NormLinear, x, delta, norm, weight, shape.norm_eps, training)
        qkv = qkv if bias is None else qkv + bias
        q, k, v = split_qkv_fused(qkv, cos, sin, block, training.kernels)
        attended = attend_packed_rows(q, k, v, layout, kernel, prefix, shape.window).flatten(1)
        delta = apply_function(Fp8Linear, attended, block.out.weight, training)
        weights = block.gate_up.weight, block.down.weight
        x, delta = apply_function(
            Fp8FeedForward, x, delta, block.ffn_norm.weight, *weights, shape, training
        )
        return x, delta, k, v


class Fp8ScoringLinear(nn.Module):
    """A linear layer for scoring that stores its weight in fp8 only, as buffers `values` and
    `scale` (one per row). Called with x in 16 bits, which it quantizes, or in fp8, it returns bf16.
    It shares bias and forward hooks of the layer it replaces.
    """

    def __init__(self, layer: nn.Linear) -> None:
        """Quantize the layer's weight by rows; take over its bias and forward hooks."""
        super().__init__()
        quantized = fp8.quantize_rows_fast(layer.weight.detach())
        self.register_buffer("values", quantized.values)
        self.register_buffer("scale", quantized.scale)
        self.bias = layer.bias
        self._forward_hooks = layer._forward_hooks  # a tensor-parallel group sums in them

    def forward(self, x: Tensor | Fp8Matrix) -> Tensor:
        """Return this layer's output in bf16, [tokens, outputs], with its bias if it has one; the
        input is quantized by rows unless it is fp8 already.
        """
        quantized = x if isinstance(x, Fp8Matrix) else fp8.quantize_rows(x)
        out = multiply_fp8(
            quantized, Fp8Matrix(self.get_buffer("values"), self.get_buffer("scale"))
        )
        return out if self.bias is None else out + self.bias


class Fp8ScoreBlock:
    """A Llama block for scoring whose linear layers `convert_to_fp8` has replaced: called as
    `LlamaBlock` (the result is x, delta, keys, values), the same function, where `kernels`
    (`Fp8Kernels`) write the inputs of matmuls in fp8. Attention is not in fp8.
    """

    def __init__(self, block: LlamaBlock, kernels: Fp8Kernels) -> None:
        """Wrap a block whose linear layers `convert_to_fp8` has replaced."""
        self.block, self.kernels = block, kernels

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
        """Return x, delta, keys and values of a Llama block in scoring, as `LlamaBlock.forward`."""
        block, kernels, shape = self.block, self.kernels, self.block.shape
        x, normed, _ = kernels.add_norm_fp8(x, delta, block.attention_norm.weight, shape.norm_eps)
        q, k, v = split_qkv_fused(block.qkv(normed), cos, sin, block, kernels)
        attended = kernels.quantize_rows(
            attend_packed_rows(q, k, v, layout, kernel, prefix, shape.window).flatten(1)
        )
        x, normed, _ = kernels.add_norm_fp8(
            x, block.out(attended), block.ffn_norm.weight, shape.norm_eps
        )
        return x, block.down(kernels.swiglu_fp8(block.gate_up(normed), shape.gate_up_chunk)), k, v


def convert_to_fp8(model: Llama) -> None:
    """Replace the linear layers qkv, out, gate_up and down of every block by `Fp8ScoringLinear`, in
    place; the original weights are dropped, so the model can only score. Embedding, norms and
    output stay as they are.
    """
    for block in model.layers:
        for name in FP8_MATRICES:
            setattr(block, name, Fp8ScoringLinear(getattr(block, name)))


def is_fp8_matrix(name: str) -> bool:
    """Return whether the parameter of this full name, such as `layers.0.qkv.weight`, is the weight
    of a matmul that runs in fp8 (qkv, out, gate_up or down).
    """
    owner, _, leaf = name.rpartition(".")
    return leaf == "weight" and owner.rpartition(".")[2] in FP8_MATRICES


def list_fp8_values(model: Llama) -> list[Tensor]:
    """Return the fp8 values of all matrices of a model that `convert_to_fp8` has changed."""
    return [
        module.get_buffer("values")
        for module in model.modules()
        if isinstance(module, Fp8ScoringLinear)
    ]


def describe_fp8(device: torch.device, trains: bool = True) -> dict[str, str]:
    """Return how fp8 is computed on the device, as texts for the record: `fp8` (row-wise scales, or
    emulated on a CPU) and, if `trains`, `weight_gradients` (`bf16` or `fp8`).
    """
    computation = (
        "emulated: numbers of fp8, sums of fp32"
        if device.type == "cpu"
        else "row-wise scales, torch._scaled_mm"
    )
    return {"fp8": computation} | ({"weight_gradients": WEIGHT_GRADIENT} if trains else {})


def check_fp8_sizes(shape: LlamaShape) -> None:
    """Raise RequestError, with the first size that does not fit, unless all sides of a shard's fp8
    matrices are multiples of `ALIGNED` (16), which devices require; `shape` is that of one
    tensor-parallel shard.
    """
    qkv = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    for name, size in {
        "hidden": shape.hidden,
        "qkv": qkv,
        "heads": shape.heads * shape.head_dim,
        "ffn": shape.ffn,
    }.items():
        if size % ALIGNED:
            raise RequestError(
                f"fp8 needs sizes that are multiples of {ALIGNED}, and {name} is {size} on each"
                " device; use --precision bf16 or less tensor parallelism"
            )
