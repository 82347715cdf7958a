"""A GLM for training on one device: each matmul of the backward pass adds its weight's gradient to
the accumulator directly, as in llama_fused.py.

Biases are added by the matmul itself. What lies between matmuls (dropout, addition and norm) is one
compiled function or, where Triton runs, a kernel of kernels/glm_norm_gelu.py that also sums up the
gradient of the bias before it. Used by engines/torch/glm.py.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from steelyard.kernels import glm_attention, glm_logits, glm_norm, glm_spans, jit
from steelyard.kernels.glm_norm import Dropout
from steelyard.models.glm import Glm, GlmBlock, GlmStreams, Layer, split
from steelyard.models.glm_attention import FLASH, JOINT, ClozeLayout, attend, merge
from steelyard.models.llama_fused import Gradient, add_product

ROWS = 512  # rows of logits at a time if nothing is compiled
PLACES = 3  # two additions to the residual stream, and attention
# 16-bit elements of one 16-byte load of a matmul; GLM's position tables have 513 rows
ALIGNED = 8

Ids = tuple[Tensor, Tensor, Tensor]  # tokens, positions, block positions
Tables = tuple[Tensor, Tensor]  # embeddings of positions, of block positions


class Linear(torch.autograd.Function):
    """x · weightᵀ + bias, whose backward pass adds the gradients of weight and bias to the given
    accumulators and returns that of x only.

    Without `bias_accumulator` the bias's gradient is not computed here: whoever makes the incoming
    gradient adds it.
    """

    @staticmethod
    def forward(
        context: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        accumulator: Tensor,
        bias_accumulator: Tensor | None,
    ) -> Tensor:
        """Return x · weightᵀ + bias, [T, outputs]."""
        context.save_for_backward(x, weight)
        context.accumulators = accumulator, bias_accumulator
        return torch.addmm(bias, x, weight.t())

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        """Add the gradients of weight and bias to their accumulators, and return that of x and None
        for the rest.
        """
        x, weight = context.saved_tensors
        accumulator, bias_accumulator = context.accumulators
        add_product(accumulator, grads[0], x)
        if bias_accumulator is not None:
            bias_accumulator.add_(grads[0].sum(0, dtype=bias_accumulator.dtype))
        return grads[0] @ weight, None, None, None, None


class DropoutAddNorm(torch.autograd.Function):
    """x + dropout(delta) and its LayerNorm by Triton kernels; the backward pass adds the gradients
    of the norm's weight and bias, and of the bias in delta if there is one, to `accumulators`.
    """

    @staticmethod
    def forward(
        context: Any,
        x: Tensor,
        delta: Tensor,
        norm: nn.LayerNorm,
        accumulators: tuple[Tensor, Tensor, Tensor | None],
        dropout: Dropout,
    ) -> GlmStreams:
        """Return the sum and its norm, [T, hidden] each."""
        out, normed, stats = glm_norm.dropout_add_norm(
            x, delta, norm.weight, norm.bias, norm.eps, dropout
        )
        context.save_for_backward(out, stats, norm.weight)
        context.set_materialize_grads(False)  # after the last block only the norm is used
        context.asked = accumulators, dropout
        return out, normed

    @staticmethod
    def backward(
        context: Any, *grads: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        """Return the gradients of x (None if not needed) and delta, and None for the rest; raise
        ValueError if nothing was computed from the norm.
        """
        more, grad = grads
        if grad is None:
            raise ValueError("a norm that nothing was made from")
        accumulators, dropout = context.asked
        stays = context.needs_input_grad[0]
        back, change = glm_norm.dropout_add_norm_backward(
            context.saved_tensors, more, grad, accumulators, dropout, stays
        )
        return back, change, None, None, None


class JointAttention(torch.autograd.Function):
    """A cloze's attention of tokens in interleaved order, kernel `flash` where Triton runs: one
    call of flash attention for all queries on contexts, and a Triton kernel that continues with
    spans on themselves.

    The backward pass adds the gradient of QKV's bias to `accumulator`. Why the parts of a softmax
    can be differentiated apart, cloze_attention.py explains.
    """

    @staticmethod
    def forward(
        context: Any, qkv: Tensor, rows: ClozeLayout, dropout: Dropout, accumulator: Tensor
    ) -> Tensor:
        """Return [T, H, D] of qkv [T, 3, H, D]."""
        joint = rows.joint
        near = glm_spans.context_keys_values(qkv, joint)
        q, k, v = qkv[:, 0], near[:, 0], near[:, 1]
        out, lse, state = FLASH.forward(q, k, v, joint.rows, rows.contexts, dropout.share, False)
        out = out.contiguous()
        glm_spans.attend_spans(qkv, out, lse, joint, dropout)
        context.save_for_backward(qkv, near, out, lse)
        context.asked = rows, dropout, accumulator, state
        return out

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        """Add the gradient of QKV's bias to `accumulator`, and return that of qkv and None for the
        rest.
        """
        qkv, near, out, lse = context.saved_tensors
        rows, dropout, accumulator, state = context.asked
        grad, borders = grads[0].contiguous(), (rows.joint.rows, rows.contexts)
        dq, dk, dv = FLASH.backward(
            grad, qkv[:, 0], *near.unbind(1), out, lse, state, *borders, dropout.share, False
        )
        dq = dq.contiguous()  # kernels below read it as contiguous and add to it
        total = torch.empty_like(qkv)
        glm_spans.attend_spans_backward(grad, qkv, out, lse, dq, total, rows.joint, dropout)
        glm_spans.merge_gradients((dq, dk, dv), total, rows.joint, accumulator)
        return total, None, None, None


class PackedAttention(torch.autograd.Function):
    """A cloze's attention of tokens in interleaved order by this package's Triton kernels (kernel
    `packed`): one forward, two backward. The backward pass adds the gradient of QKV's bias to
    `accumulator`.
    """

    @staticmethod
    def forward(
        context: Any, qkv: Tensor, rows: ClozeLayout, dropout: Dropout, accumulator: Tensor
    ) -> Tensor:
        """Return [T, H, D] of qkv [T, 3, H, D]; raise RequestError if qkv has more than 2^31 - 1
        elements.
        """
        borders, programs = rows.joint.borders, rows.joint.programs
        out, lse = glm_attention.attend(qkv, borders, programs, dropout)
        context.save_for_backward(qkv, out, lse, borders, programs)
        context.asked = dropout, accumulator
        return out

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        """Add the gradient of QKV's bias to `accumulator`, and return that of qkv and None for the
        rest.
        """
        back = glm_attention.attend_backward(
            grads[0].contiguous(), *context.saved_tensors, *context.asked
        )
        return back, None, None, None


class Gelu(torch.autograd.Function):
    """Tanh-form GELU by Triton kernels; the backward pass adds the gradient of the bias before it
    to `accumulator`.
    """

    @staticmethod
    def forward(context: Any, x: Tensor, accumulator: Tensor) -> Tensor:
        """Return GELU(x), [T, width]."""
        context.save_for_backward(x)
        context.accumulator = accumulator
        return glm_norm.gelu(x)

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Add the bias's gradient to `accumulator`, and return that of x and None."""
        (x,) = context.saved_tensors
        return glm_norm.gelu_backward(x, grads[0], context.accumulator), None


class SummedEmbeddings(torch.autograd.Function):
    """The sum of each token's word, position and block-position embedding; the backward pass adds
    the gradients of the three tables to `accumulators` and returns none.

    The position tables have few rows, and nearly all tokens have block position 0, which torch's
    own backward would add one by one. Here their gradients are matmuls with a one-hot matrix.
    """

    @staticmethod
    def forward(
        context: Any, tables: Tables, ids: Ids, accumulators: tuple[Tensor, ...], words: Tensor
    ) -> Tensor:
        """Return [T, hidden]; `tables` are those of positions and block positions, `words` the word
        embeddings.
        """
        context.asked = ids, accumulators
        word, position, block = (
            F.embedding(row, table) for row, table in zip(ids, (words, *tables), strict=True)
        )
        return word + (position + block)

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[None, None, None, None]:
        """Add the gradients of words, positions and block positions to the accumulators, and return
        None for every argument.
        """
        ids, accumulators = context.asked
        grad = grads[0].contiguous()
        accumulators[0].add_(
            torch.ops.aten.embedding_dense_backward(grad, ids[0], len(accumulators[0]), -1, False)
        )
        for row, table in zip(ids[1:], accumulators[1:], strict=True):
            total = table.new_zeros(-(-len(table) // ALIGNED) * ALIGNED, table.shape[1])
            read = row[:, None] == torch.arange(len(total), device=row.device)
            add_product(total, read.to(grad.dtype), grad)
            table.add_(total[: len(table)])
        return None, None, None, None


class LogProbs(torch.autograd.Function):
    """The log-probability of each row's target under logits x · tableᵀ; the backward pass adds the
    table's gradient to `accumulator`.
    """

    @staticmethod
    def forward(
        context: Any,
        x: Tensor,
        table: Tensor,
        targets: Tensor,
        accumulator: Tensor,
        kernels: "GlmKernels",
    ) -> Tensor:
        """Return log-probabilities [rows] in fp32 or wider, of x [rows, hidden]."""
        logits = x @ table.t()
        lse, found = kernels.rows(kernels.log_probs, logits, targets)
        context.save_for_backward(x, table, targets, logits, lse)
        context.asked = accumulator, kernels
        return found - lse

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        """Add the table's gradient to `accumulator`, and return that of x and None for the rest.
        With Triton the saved logits are overwritten.
        """
        x, table, targets, logits, lse = context.saved_tensors
        accumulator, kernels = context.asked
        (grad,) = kernels.rows(kernels.log_probs_backward, logits, targets, lse, grads[0])
        add_product(accumulator, grad, x)
        return grad @ table, None, None, None, None


class GlmKernels:
    """The operations between a GLM's matmuls, shared by all layers: plain functions, compiled ones
    (`compiled`), or Triton kernels for log-probabilities (`triton`).

    Compiled with dynamic sizes, because micro-batches differ in their numbers of tokens. `eps` and
    `dropout` are compiled in.
    """

    def __init__(self, compiled: bool, triton: bool, eps: float, dropout: float) -> None:
        """Choose the functions; with `compiled` they are compiled on their first call."""

        def make(function: Callable[..., Any]) -> Callable[..., Any]:
            """Return the function under torch.compile, or as it is without `compiled`."""
            return torch.compile(function, dynamic=True) if compiled else function

        # compiled functions make no fp32 copy of all logits
        self.whole = compiled
        self.norms = {
            rate: make(glm_norm.plain_dropout_add_norm(eps, rate)) for rate in (0.0, dropout)
        }
        self.merge = make(merge)
        self.log_probs, self.log_probs_backward = (
            make(glm_logits.log_probs),
            make(glm_logits.log_probs_backward),
        )
        if triton:
            self.log_probs = glm_logits.triton_log_probs
            self.log_probs_backward = glm_logits.triton_log_probs_backward

    def rows(
        self, piece: Callable[..., tuple[Tensor, ...]], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """Call `function` on tensors whose first dimension is rows: on all rows at once if
        functions are compiled, otherwise on `LOGIT_ROWS` rows at a time, and concatenate the
        results.
        """
        if self.whole or len(tensors[0]) <= ROWS:
            return piece(*tensors)
        parts = [
            piece(*part)
            for part in zip(*(torch.split(tensor, ROWS) for tensor in tensors), strict=True)
        ]
        return tuple(torch.cat(part) for part in zip(*parts, strict=True))

    def add_norm(self, x: Tensor, delta: Tensor, norm: nn.LayerNorm, dropout: float) -> GlmStreams:
        """Return x + dropout(delta) and its LayerNorm; `dropout` is 0 or the model's own
        probability (KeyError otherwise).
        """
        out: GlmStreams = self.norms[dropout](x, delta, norm.weight, norm.bias)
        return out


class FusedLayer:
    """A GLM block without Triton: the same function as `GlmBlock`, with weight gradients added to
    where `gradient` says.
    """

    def __init__(self, block: GlmBlock, gradient: Gradient, kernels: GlmKernels) -> None:
        """Keep the block, whose parameters are used, the lookup of gradients and the shared
        functions.
        """
        self.block, self.gradient, self.kernels = block, gradient, kernels

    def __call__(
        self, x: Tensor, delta: Tensor, rows: ClozeLayout, kernel: str, dropout: float
    ) -> GlmStreams:
        """Return (x, delta), as `GlmBlock.forward`."""
        block, kernels = self.block, self.kernels
        x, normed = kernels.add_norm(x, delta, block.input_layernorm, dropout)
        qkv = split(self._linear(normed, block.attention.query_key_value), block.heads)
        seen = attend(qkv, rows, kernel, dropout, kernels.merge).flatten(1)
        x, normed = kernels.add_norm(
            x, self._linear(seen, block.attention.dense), block.post_attention_layernorm, dropout
        )
        wide = F.gelu(self._linear(normed, block.mlp.dense_h_to_4h), approximate="tanh")
        return x, self._linear(wide, block.mlp.dense_4h_to_h)

    def _linear(self, x: Tensor, layer: nn.Linear) -> Tensor:
        """Apply a linear layer; its weight's and bias's gradients are accumulated in the backward
        pass.
        """
        return linear(x, layer, self.gradient, self.gradient(layer.bias))


class KernelLayer:
    """A GLM block by Triton kernels: the same function as `GlmBlock`, in which the kernels between
    matmuls sum up the gradients of all biases.

    `bias` is the bias of the matmul that made the incoming delta, or None. Kernels of `INTERLEAVED`
    need tokens in interleaved order. The block has `DROPOUTS` dropout sites, numbered from `site`.
    """

    def __init__(
        self, block: GlmBlock, gradient: Gradient, before: Tensor | None, seed: Tensor, place: int
    ) -> None:
        """Keep the block, whose parameters are used, the lookup of gradients and the dropout seed,
        a tensor on the device that all layers share.
        """
        self.block, self.gradient, self.before = block, gradient, before
        self.seed, self.place = seed, place

    def __call__(
        self, x: Tensor, delta: Tensor, rows: ClozeLayout, kernel: str, dropout: float
    ) -> GlmStreams:
        """Return (x, delta), as `GlmBlock.forward`."""
        block, gradient = self.block, self.gradient
        attention, mlp = block.attention, block.mlp
        first, second, third = (Dropout(dropout, self.seed, self.place + i) for i in range(PLACES))
        x, normed = dropout_add_norm(x, delta, block.input_layernorm, first, gradient, self.before)
        bias = attention.query_key_value.bias
        if kernel in JOINT:
            qkv = split(linear(normed, attention.query_key_value, gradient, None), block.heads)
            attention_by = PackedAttention if kernel == "packed" else JointAttention
            seen: Tensor = attention_by.apply(qkv, rows, second, gradient(bias))  # type: ignore[no-untyped-call]
        else:
            qkv = split(
                linear(normed, attention.query_key_value, gradient, gradient(bias)), block.heads
            )
            seen = attend(qkv, rows, kernel, dropout)
        delta = linear(seen.flatten(1), attention.dense, gradient, None)
        x, normed = dropout_add_norm(
            x, delta, block.post_attention_layernorm, third, gradient, attention.dense.bias
        )
        narrow = linear(normed, mlp.dense_h_to_4h, gradient, None)
        wide: Tensor = Gelu.apply(narrow, gradient(mlp.dense_h_to_4h.bias))  # type: ignore[no-untyped-call]
        return x, linear(wide, mlp.dense_4h_to_h, gradient, None)


def linear(
    x: Tensor, layer: nn.Linear, gradient: Gradient, bias_accumulator: Tensor | None
) -> Tensor:
    """Return x · weightᵀ + bias of a layer; the backward pass adds the weight's gradient to
    `gradient(weight)` and the bias's to `bias_accumulator`, if there is one.
    """
    out: Tensor = Linear.apply(
        x, layer.weight, layer.bias, gradient(layer.weight), bias_accumulator
    )  # type: ignore[no-untyped-call]
    return out


def dropout_add_norm(
    x: Tensor,
    delta: Tensor,
    norm: nn.LayerNorm,
    dropout: Dropout,
    gradient: Gradient,
    before: Tensor | None,
) -> GlmStreams:
    """Return x + dropout(delta) and its LayerNorm by Triton kernels; the backward pass accumulates
    the gradients of the norm's weight and bias, and of `prior_bias`, with which delta was made,
    unless it is None.
    """
    places = (
        gradient(norm.weight),
        gradient(norm.bias),
        None if before is None else gradient(before),
    )
    out: GlmStreams = DropoutAddNorm.apply(x, delta, norm, places, dropout)  # type: ignore[no-untyped-call]
    return out


class FusedGlm:
    """A GLM's forward pass for training, from tokens to the log-probabilities of the spans'
    targets.

    `gradient` returns the accumulator of a parameter's gradient. With `compiled` it uses Triton
    kernels where they run, otherwise torch.compile; with `recompute` each block's activations are
    computed again in the backward pass.
    """

    def __init__(self, model: Glm, gradient: Gradient, compiled: bool, recompute: bool) -> None:
        """Wrap the model's blocks, whose parameters are shared, and make a zero dropout seed on
        their device.
        """
        shape, device = model.shape, model.word_embeddings.weight.device
        self.model, self.gradient = model, gradient
        self.triton = compiled and jit.serve(device)
        self.kernels = GlmKernels(compiled, self.triton, shape.norm_eps, shape.dropout)
        self.seed = torch.zeros(1, dtype=torch.int64, device=device)
        blocks: list[GlmBlock] = list(model.transformer.layers)  # type: ignore[arg-type]
        self.last = blocks[-1].mlp.dense_4h_to_h.bias
        self.layers: list[Layer] = [FusedLayer(block, gradient, self.kernels) for block in blocks]
        if self.triton:
            biases = [None, *(block.mlp.dense_4h_to_h.bias for block in blocks)]
            places = range(0, PLACES * len(blocks), PLACES)
            every = zip(blocks, biases, places, strict=False)
            self.layers = [
                KernelLayer(block, gradient, before, self.seed, place)
                for block, before, place in every
            ]
        if recompute:
            self.layers = [recomputed(layer) for layer in self.layers]

    def draw(self) -> None:
        """Draw a new dropout seed for the next forward pass and its backward, in place on the
        device. It comes from torch's random generator of the host, so nothing waits for the device.
        """
        self.seed.fill_(int(torch.randint((1 << 63) - 1, ())))

    def __call__(
        self, ids: Ids, targets: Tensor, rows: ClozeLayout, kernel: str, dropout: float
    ) -> Tensor:
        """Return the log-probabilities of `targets`, [S] in fp32 or wider, where S are the spans'
        tokens (or the layout's capacity).

        `ids` are tokens, positions and block positions in the order of `ClozeLayout`; they are
        reordered here if the kernel needs it.
        """
        below, table = self.model.transformer, self.model.word_embeddings.weight
        tables = below.position_embeddings.weight, below.block_position_embeddings.weight
        accumulators = tuple(self.gradient(one) for one in (table, *tables))
        if self.reorders(kernel):
            tokens, positions, blocks = (row.index_select(0, rows.joint.order) for row in ids)
            ids = tokens, positions, blocks
        picked = rows.joint.spans if self.reorders(kernel) else rows.picked
        embedded: Tensor = SummedEmbeddings.apply(tables, ids, accumulators, table)  # type: ignore[no-untyped-call]
        x, delta = (
            one.index_select(0, picked)
            for one in self.model.streams(embedded, rows, kernel, dropout, self.layers)
        )
        if self.triton:
            last = Dropout(dropout, self.seed, PLACES * len(self.layers))
            normed = dropout_add_norm(
                x, delta, below.final_layernorm, last, self.gradient, self.last
            )[1]
        else:
            normed = self.kernels.add_norm(x, delta, below.final_layernorm, dropout)[1]
        out: Tensor = LogProbs.apply(normed, table, targets, self.gradient(table), self.kernels)  # type: ignore[no-untyped-call]
        return out

    def reorders(self, kernel: str) -> bool:
        """Return whether tokens are computed in interleaved order with this kernel: only with
        Triton.
        """
        return self.triton and kernel in JOINT


def recomputed(layer: Layer) -> Layer:
    """Return a layer that calls `layer` under activation checkpointing: activations are computed
    again in the backward pass, with the same elements dropped.
    """

    def run(x: Tensor, delta: Tensor, rows: ClozeLayout, kernel: str, dropout: float) -> GlmStreams:
        """Call the layer through `torch.utils.checkpoint`."""
        out: GlmStreams = checkpoint(layer, x, delta, rows, kernel, dropout, use_reentrant=False)
        return out

    return run
