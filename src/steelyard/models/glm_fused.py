"""A GLM for training on one device: gradients of weights and biases are added to where they are summed, as in llama_fused.py.

Biases are added by the matmul itself; what is between matmuls (a dropout, an addition and a norm) is one compiled piece, or a
kernel of kernels/glm_norm.py that also sums up the gradient of the bias before it. The
logits are in the precision of the matmuls and are read as fp32 inside the kernel, or a few rows at a time where nothing is
compiled: no fp32 copy of all of them is ever there.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from steelyard.kernels import glm_norm, glm_spans, jit
from steelyard.kernels.glm_spans import Joint
from steelyard.models.glm import Glm, GlmBlock, GlmStreams, Layer, split
from steelyard.models.glm_attention import FLASH, ClozeLayout, attend, merge
from steelyard.models.llama_fused import Gradient, add_product

ROWS = 512  # of logits read at once where nothing is compiled
ALIGNED = 8  # numbers of 16 bit that a matmul loads at once; GLM's tables of positions have 513 rows

Ids = tuple[Tensor, Tensor, Tensor]  # tokens, positions, block positions
Tables = tuple[Tensor, Tensor]  # of positions and of block positions


class Linear(torch.autograd.Function):
    """x times a weight and a bias added, whose gradients are added to `accumulator` and to `bias_accumulator`, and nowhere
    else; the bias's not at all if there is no place: then whoever makes the gradient that comes here adds it."""

    @staticmethod
    def forward(
        context: Any, x: Tensor, weight: Tensor, bias: Tensor, accumulator: Tensor, bias_accumulator: Tensor | None
    ) -> Tensor:
        context.save_for_backward(x, weight)
        context.accumulators = accumulator, bias_accumulator
        return torch.addmm(bias, x, weight.t())

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        x, weight = context.saved_tensors
        accumulator, bias_accumulator = context.accumulators
        add_product(accumulator, grads[0], x)
        if bias_accumulator is not None:
            bias_accumulator.add_(grads[0].sum(0, dtype=bias_accumulator.dtype))
        return grads[0] @ weight, None, None, None, None


class DropoutAddNorm(torch.autograd.Function):
    """The residual stream and its norm, by a kernel. Gradients of the norm's weight and bias, and of the bias that was added
    to delta, if there was one, are added to `accumulators`."""

    @staticmethod
    def forward(
        context: Any,
        x: Tensor,
        delta: Tensor,
        norm: nn.LayerNorm,
        accumulators: tuple[Tensor, Tensor, Tensor | None],
        dropout: float,
    ) -> GlmStreams:
        seed = glm_norm.draw(dropout)
        out, normed, stats = glm_norm.dropout_add_norm(x, delta, norm.weight, norm.bias, norm.eps, dropout, seed)
        context.save_for_backward(out, stats, norm.weight)
        context.set_materialize_grads(False)  # of the last stream only the norm is read
        context.asked = accumulators, dropout, seed
        return out, normed

    @staticmethod
    def backward(context: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        more, grad = grads
        if grad is None:
            raise ValueError("a norm that nothing was made from")
        accumulators, dropout, seed = context.asked
        stays = context.needs_input_grad[0]
        back, change = glm_norm.dropout_add_norm_backward(context.saved_tensors, more, grad, accumulators, dropout, seed, stays)
        return back, change, None, None, None


class JointAttention(torch.autograd.Function):
    """Attention of tokens in the order of `Joint`: one call of flash attention, all queries on contexts, and a kernel for spans
    on themselves. How the halves of the spans' softmax are one in the backward pass, models/glm_attention.py says. The
    gradient of the bias that was added to qkv is added to `accumulator`."""

    @staticmethod
    def forward(context: Any, qkv: Tensor, rows: ClozeLayout, dropout: float, accumulator: Tensor) -> Tensor:
        joint = rows.joint
        near = glm_spans.context_keys_values(qkv, joint)
        q, k, v = qkv[:, 0], near[:, 0], near[:, 1]
        out, lse, state = FLASH.forward(q, k, v, joint.rows, rows.contexts, dropout, False)
        out = out.contiguous()
        seed = glm_norm.draw(dropout)
        glm_spans.attend_spans(qkv, out, lse, joint, dropout, seed)
        context.save_for_backward(qkv, near, out, lse)
        context.asked = rows, dropout, accumulator, state, seed
        return out

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        qkv, near, out, lse = context.saved_tensors
        rows, dropout, accumulator, state, seed = context.asked
        grad, borders = grads[0].contiguous(), (rows.joint.rows, rows.contexts)
        dq, dk, dv = FLASH.backward(grad, qkv[:, 0], *near.unbind(1), out, lse, state, *borders, dropout, False)
        dq = dq.contiguous()  # as the kernels read it, and one of them adds to it
        total = torch.empty_like(qkv)
        glm_spans.attend_spans_backward(grad, qkv, out, lse, dq, total, rows.joint, dropout, seed)
        glm_spans.merge_gradients((dq, dk, dv), total, rows.joint, accumulator)
        return total, None, None, None


class Gelu(torch.autograd.Function):
    """The gradient of the bias that was added to x is added to `accumulator`."""

    @staticmethod
    def forward(context: Any, x: Tensor, accumulator: Tensor) -> Tensor:
        context.save_for_backward(x)
        context.accumulator = accumulator
        return F.gelu(x, approximate="tanh")

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (x,) = context.saved_tensors
        return glm_norm.gelu_backward(x, grads[0], context.accumulator), None


class SummedEmbeddings(torch.autograd.Function):
    """The sum of a token's rows of three tables: words, positions and block positions. A table of positions has few rows, and
    nearly all tokens have block position 0: torch's own backward adds those one by one. Here it is a matmul with ones at the
    rows that were read."""

    @staticmethod
    def forward(context: Any, tables: Tables, ids: Ids, accumulators: tuple[Tensor, ...], words: Tensor) -> Tensor:
        context.asked = ids, accumulators
        word, position, block = (F.embedding(row, table) for row, table in zip(ids, (words, *tables), strict=True))
        return word + (position + block)

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[None, None, None, None]:
        ids, accumulators = context.asked
        grad = grads[0].contiguous()
        accumulators[0].add_(torch.ops.aten.embedding_dense_backward(grad, ids[0], len(accumulators[0]), -1, False))
        for row, table in zip(ids[1:], accumulators[1:], strict=True):
            total = table.new_zeros(-(-len(table) // ALIGNED) * ALIGNED, table.shape[1])
            read = row[:, None] == torch.arange(len(total), device=row.device)
            add_product(total, read.to(grad.dtype), grad)
            table.add_(total[: len(table)])
        return None, None, None, None


class LogProbs(torch.autograd.Function):
    """The log-probability of each row's target. The table's gradient is added to `accumulator`."""

    @staticmethod
    def forward(context: Any, x: Tensor, table: Tensor, targets: Tensor, accumulator: Tensor, kernels: "GlmKernels") -> Tensor:
        logits = x @ table.t()
        lse, found = kernels.rows(kernels.log_probs, logits, targets)
        context.save_for_backward(x, table, targets, logits, lse)
        context.asked = accumulator, kernels
        return found - lse

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        x, table, targets, logits, lse = context.saved_tensors
        accumulator, kernels = context.asked
        (grad,) = kernels.rows(kernels.log_probs_backward, logits, targets, lse, grads[0])
        add_product(accumulator, grad, x)
        return grad @ table, None, None, None, None


def log_probs(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The log-sum-exp of each row, and its target's logit."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide.logsumexp(-1), wide.gather(-1, targets[:, None])[:, 0]


def log_probs_backward(logits: Tensor, targets: Tensor, lse: Tensor, grad: Tensor) -> tuple[Tensor]:
    """The gradient of the logits."""
    right = torch.arange(logits.shape[-1], device=logits.device) == targets[:, None]
    return (((right.to(lse.dtype) - (logits - lse[:, None]).exp()) * grad[:, None]).to(logits.dtype),)


class GlmKernels:
    """What stands between the matmuls, compiled or as it is written: the same for all layers. Every micro-batch has a size of
    its own, so sizes are no constants."""

    def __init__(self, compiled: bool, eps: float, dropout: float) -> None:
        def make(function: Callable[..., Any]) -> Callable[..., Any]:
            return torch.compile(function, dynamic=True) if compiled else function

        self.compiled = compiled
        self.norms = {rate: make(glm_norm.plain_dropout_add_norm(eps, rate)) for rate in (0.0, dropout)}
        self.merge = make(merge)
        self.log_probs, self.log_probs_backward = make(log_probs), make(log_probs_backward)

    def rows(self, piece: Callable[..., tuple[Tensor, ...]], *tensors: Tensor) -> tuple[Tensor, ...]:
        """A function of rows, all at once if it is compiled, else a few at a time."""
        if self.compiled or len(tensors[0]) <= ROWS:
            return piece(*tensors)
        parts = [piece(*part) for part in zip(*(torch.split(tensor, ROWS) for tensor in tensors), strict=True)]
        return tuple(torch.cat(part) for part in zip(*parts, strict=True))

    def add_norm(self, x: Tensor, delta: Tensor, norm: nn.LayerNorm, dropout: float) -> GlmStreams:
        out: GlmStreams = self.norms[dropout](x, delta, norm.weight, norm.bias)
        return out


class FusedLayer:
    """The same function as `GlmBlock`, with `gradient` saying where one is summed."""

    def __init__(self, block: GlmBlock, gradient: Gradient, kernels: GlmKernels) -> None:
        self.block, self.gradient, self.kernels = block, gradient, kernels

    def __call__(self, x: Tensor, delta: Tensor, rows: ClozeLayout, kernel: str, dropout: float) -> GlmStreams:
        block, kernels = self.block, self.kernels
        x, normed = kernels.add_norm(x, delta, block.input_layernorm, dropout)
        qkv = split(self._linear(normed, block.attention.query_key_value), block.heads)
        seen = attend(qkv, rows, kernel, dropout, kernels.merge).flatten(1)
        x, normed = kernels.add_norm(x, self._linear(seen, block.attention.dense), block.post_attention_layernorm, dropout)
        wide = F.gelu(self._linear(normed, block.mlp.dense_h_to_4h), approximate="tanh")
        return x, self._linear(wide, block.mlp.dense_4h_to_h)

    def _linear(self, x: Tensor, layer: nn.Linear) -> Tensor:
        return linear(x, layer, self.gradient, self.gradient(layer.bias))


class KernelLayer:
    """The same by kernels, which have the gradients of all biases. `before` is the bias that delta was made with, if any.
    Kernel "flash" has its tokens in the order of `Joint`."""

    def __init__(self, block: GlmBlock, gradient: Gradient, before: Tensor | None) -> None:
        self.block, self.gradient, self.before = block, gradient, before

    def __call__(self, x: Tensor, delta: Tensor, rows: ClozeLayout, kernel: str, dropout: float) -> GlmStreams:
        block, gradient = self.block, self.gradient
        attention, mlp = block.attention, block.mlp
        x, normed = dropout_add_norm(x, delta, block.input_layernorm, dropout, gradient, self.before)
        bias = attention.query_key_value.bias
        if kernel == "flash":
            qkv = split(linear(normed, attention.query_key_value, gradient, None), block.heads)
            seen: Tensor = JointAttention.apply(qkv, rows, dropout, gradient(bias))  # type: ignore[no-untyped-call]
        else:
            qkv = split(linear(normed, attention.query_key_value, gradient, gradient(bias)), block.heads)
            seen = attend(qkv, rows, kernel, dropout)
        delta = linear(seen.flatten(1), attention.dense, gradient, None)
        x, normed = dropout_add_norm(x, delta, block.post_attention_layernorm, dropout, gradient, attention.dense.bias)
        narrow = linear(normed, mlp.dense_h_to_4h, gradient, None)
        wide: Tensor = Gelu.apply(narrow, gradient(mlp.dense_h_to_4h.bias))  # type: ignore[no-untyped-call]
        return x, linear(wide, mlp.dense_4h_to_h, gradient, None)


def linear(x: Tensor, layer: nn.Linear, gradient: Gradient, bias_accumulator: Tensor | None) -> Tensor:
    out: Tensor = Linear.apply(x, layer.weight, layer.bias, gradient(layer.weight), bias_accumulator)  # type: ignore[no-untyped-call]
    return out


def dropout_add_norm(
    x: Tensor, delta: Tensor, norm: nn.LayerNorm, dropout: float, gradient: Gradient, before: Tensor | None
) -> GlmStreams:
    places = gradient(norm.weight), gradient(norm.bias), None if before is None else gradient(before)
    out: GlmStreams = DropoutAddNorm.apply(x, delta, norm, places, dropout)  # type: ignore[no-untyped-call]
    return out


class FusedGlm:
    """A model's way from tokens to the log-probabilities of the spans' targets."""

    def __init__(self, model: Glm, gradient: Gradient, compiled: bool, recompute: bool) -> None:
        shape = model.shape
        self.model, self.gradient = model, gradient
        self.kernels = GlmKernels(compiled, shape.norm_eps, shape.dropout)
        self.triton = compiled and jit.serve(model.word_embeddings.weight.device)
        blocks: list[GlmBlock] = list(model.transformer.layers)  # type: ignore[arg-type]
        self.last = blocks[-1].mlp.dense_4h_to_h.bias
        self.layers: list[Layer] = [FusedLayer(block, gradient, self.kernels) for block in blocks]
        if self.triton:
            biases = [None, *(block.mlp.dense_4h_to_h.bias for block in blocks)]
            self.layers = [KernelLayer(block, gradient, before) for block, before in zip(blocks, biases, strict=False)]
        if recompute:
            self.layers = [recomputed(layer) for layer in self.layers]

    def __call__(self, ids: Ids, targets: Tensor, rows: ClozeLayout, kernel: str, dropout: float) -> Tensor:
        """Of tokens with their positions and block positions: [S], in fp32 or wider."""
        below, table = self.model.transformer, self.model.word_embeddings.weight
        tables = below.position_embeddings.weight, below.block_position_embeddings.weight
        accumulators = tuple(self.gradient(one) for one in (table, *tables))
        joint = rows.joint if self.triton and kernel == "flash" else None
        if joint is not None:
            tokens, positions, blocks = (row.index_select(0, joint.order) for row in ids)
            ids = tokens, positions, blocks
        embedded: Tensor = SummedEmbeddings.apply(tables, ids, accumulators, table)  # type: ignore[no-untyped-call]
        x, delta = self.model.streams(embedded, rows, kernel, dropout, self.layers)
        x, delta = (_of_spans(one, rows, joint) for one in (x, delta))
        if self.triton:
            normed = dropout_add_norm(x, delta, below.final_layernorm, dropout, self.gradient, self.last)[1]
        else:
            normed = self.kernels.add_norm(x, delta, below.final_layernorm, dropout)[1]
        out: Tensor = LogProbs.apply(normed, table, targets, self.gradient(table), self.kernels)  # type: ignore[no-untyped-call]
        return out


def _of_spans(x: Tensor, rows: ClozeLayout, joint: Joint | None) -> Tensor:
    return x[rows.context_tokens :] if joint is None else x.index_select(0, joint.spans)


def recomputed(layer: Layer) -> Layer:
    """A layer whose activations are computed again in the backward pass, the same numbers dropped."""

    def run(x: Tensor, delta: Tensor, rows: ClozeLayout, kernel: str, dropout: float) -> GlmStreams:
        out: GlmStreams = checkpoint(layer, x, delta, rows, kernel, dropout, use_reentrant=False)
        return out

    return run
