"""A GLM for training on one device: each matmul of the backward pass adds its weight's gradient to
the accumulator directly, as in llama_fused.py.

Biases are added by the matmul itself. What lies between matmuls (dropout, addition and norm) is one
compiled function or, where Triton runs, a kernel of kernels/glm_norm_gelu.py that also sums up the
gradient of the bias before it. Used by engines/torch/train_cloze.py.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from steelyard.kernels import (
    glm_logits,
    glm_norm_gelu,
    glm_packed_attention,
    glm_span_attention,
    jit,
)
from steelyard.kernels.glm_norm_gelu import Dropout
from steelyard.models.cloze_attention import (
    FLASH,
    INTERLEAVED,
    ClozeLayout,
    attend_cloze,
    merge_softmax_parts,
)
from steelyard.models.glm import Glm, GlmBlock, GlmLayer, GlmStreams, split_glm_qkv
from steelyard.models.llama_fused import GradientOf, add_product

LOGIT_ROWS = 512  # rows of logits at a time if nothing is compiled
DROPOUTS = 3  # two additions to the residual stream, and attention
# 16-bit elements of one 16-byte load of a matmul; GLM's position tables have 513 rows
ALIGNED = 8

Ids = tuple[Tensor, Tensor, Tensor]  # tokens, positions, block positions
Tables = tuple[Tensor, Tensor]  # embeddings of positions, of block positions


class AccumulatedBiasLinear(torch.autograd.Function):
    """An autograd function: x · weightᵀ + bias, whose backward pass adds the gradients of weight
    and bias to the given accumulators and returns that of x only.

    If `bias_accumulator` is None the bias's gradient is not computed here: whoever makes the
    incoming gradient adds it.
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
        """Return x · weightᵀ + bias, [T, outputs], of x [T, inputs]; x and weight are saved for the
        backward pass.
        """
        context.save_for_backward(x, weight)
        context.accumulators = accumulator, bias_accumulator
        return torch.addmm(bias, x, weight.t())

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        """Add the gradients of a linear layer's weight and, unless its accumulator is None, bias to
        their accumulators in place; return that of the input x, and None for the rest.
        """
        x, weight = context.saved_tensors
        accumulator, bias_accumulator = context.accumulators
        add_product(accumulator, grads[0], x)
        if bias_accumulator is not None:
            bias_accumulator.add_(grads[0].sum(0, dtype=bias_accumulator.dtype))
        return grads[0] @ weight, None, None, None, None


class DropoutAddNorm(torch.autograd.Function):
    """An autograd function: x + dropout(delta) and its LayerNorm by Triton kernels. The backward
    pass adds the gradients of the norm's weight and bias, and of the bias in delta if its
    accumulator is not None, to the three `accumulators`, and returns those of x and delta.
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
        """Return x + dropout(delta) and its LayerNorm, [T, hidden] each. `accumulators` are for the
        gradients of the norm's weight, its bias and the bias in delta (or None).
        """
        out, normed, stats = glm_norm_gelu.triton_dropout_add_norm(
            x, delta, norm.weight, norm.bias, norm.eps, dropout
        )
        context.save_for_backward(out, stats, norm.weight)
        context.set_materialize_grads(False)  # after the last block only the norm is used
        context.arguments = accumulators, dropout
        return out, normed

    @staticmethod
    def backward(
        context: Any, *grads: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        """Add the gradients of the norm's weight and bias, and of the bias in delta, to the
        accumulators in place; return those of x (None if not needed and something was dropped) and
        delta, and None for the rest. Raises ValueError if the norm's output has no gradient; the
        sum may have none.
        """
        sum_grad, norm_grad = grads
        if norm_grad is None:
            raise ValueError("backward of dropout-add-norm without a gradient of the norm")
        accumulators, dropout = context.arguments
        x_needs_grad = context.needs_input_grad[0]
        x_grad, delta_grad = glm_norm_gelu.triton_dropout_add_norm_backward(
            context.saved_tensors, sum_grad, norm_grad, accumulators, dropout, x_needs_grad
        )
        return x_grad, delta_grad, None, None, None


class FlashClozeAttention(torch.autograd.Function):
    """An autograd function: a cloze's attention of tokens in interleaved order, kernel `flash`
    where Triton runs. One call of flash attention computes all queries on contexts, and a Triton
    kernel continues with spans on themselves.

    The backward pass adds the gradient of QKV's bias to `accumulator` and returns that of qkv. Why
    the parts of a softmax can be differentiated apart, cloze_attention.py explains.
    """

    @staticmethod
    def forward(
        context: Any, qkv: Tensor, rows: ClozeLayout, dropout: Dropout, accumulator: Tensor
    ) -> Tensor:
        """Return a cloze's attention [T, H, D] of qkv [T, 3, H, D], whose tokens are in the order
        of `rows.interleaved`. Flash attention drops by torch's random state, spans on themselves by
        `dropout`'s seed.
        """
        layout = rows.interleaved
        context_kv = glm_span_attention.gather_context_keys_values(qkv, layout)
        q, k, v = qkv[:, 0], context_kv[:, 0], context_kv[:, 1]
        out, lse, state = FLASH.forward(
            q, k, v, layout.row_offsets, rows.contexts, dropout.share, False
        )
        out = out.contiguous()
        glm_span_attention.attend_spans(qkv, out, lse, layout, dropout)
        context.save_for_backward(qkv, context_kv, out, lse)
        context.arguments = rows, dropout, accumulator, state
        return out

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        """Add the gradient of QKV's bias to `accumulator` in place; return that of qkv [T, 3, H, D]
        through the cloze's attention, and None for the rest.
        """
        qkv, context_kv, out, lse = context.saved_tensors
        rows, dropout, accumulator, state = context.arguments
        grad, offsets = grads[0].contiguous(), (rows.interleaved.row_offsets, rows.contexts)
        dq, dk, dv = FLASH.backward(
            grad, qkv[:, 0], *context_kv.unbind(1), out, lse, state, *offsets, dropout.share, False
        )
        dq = dq.contiguous()  # kernels below read it as contiguous and add to it
        total = torch.empty_like(qkv)
        glm_span_attention.attend_spans_backward(
            grad, qkv, out, lse, dq, total, rows.interleaved, dropout
        )
        glm_span_attention.merge_qkv_gradients((dq, dk, dv), total, rows.interleaved, accumulator)
        return total, None, None, None


class PackedClozeAttention(torch.autograd.Function):
    """An autograd function: a cloze's attention of tokens in interleaved order by this package's
    Triton kernels (kernel `packed`), one forward and two backward. The backward pass adds the
    gradient of QKV's bias to `accumulator` and returns that of qkv.
    """

    @staticmethod
    def forward(
        context: Any, qkv: Tensor, rows: ClozeLayout, dropout: Dropout, accumulator: Tensor
    ) -> Tensor:
        """Return a cloze's attention [T, H, D] of qkv [T, 3, H, D], whose tokens are in the order
        of `rows.interleaved`; raise RequestError if qkv has more than 2^31 - 1 elements.
        """
        ranges, programs = rows.interleaved.token_ranges, rows.interleaved.programs
        out, lse = glm_packed_attention.triton_attend_cloze(qkv, ranges, programs, dropout)
        context.save_for_backward(qkv, out, lse, ranges, programs)
        context.arguments = dropout, accumulator
        return out

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        """Add the gradient of QKV's bias to `accumulator` in place; return that of qkv [T, 3, H, D]
        through the cloze's attention, and None for the rest.
        """
        back = glm_packed_attention.triton_attend_cloze_backward(
            grads[0].contiguous(), *context.saved_tensors, *context.arguments
        )
        return back, None, None, None


class Gelu(torch.autograd.Function):
    """An autograd function: tanh-form GELU by Triton kernels. The backward pass adds the gradient
    of the bias before it, the sum of x's gradient over tokens, to `accumulator`, and returns that
    of x.
    """

    @staticmethod
    def forward(context: Any, x: Tensor, accumulator: Tensor) -> Tensor:
        """Return the tanh-form GELU of x [T, width]."""
        context.save_for_backward(x)
        context.accumulator = accumulator
        return glm_norm_gelu.triton_gelu(x)

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of x, the input of the GELU, and None; add its sum over tokens, the
        gradient of the bias in x, to `accumulator` in place.
        """
        (x,) = context.saved_tensors
        return glm_norm_gelu.triton_gelu_backward(x, grads[0], context.accumulator), None


class SummedEmbeddings(torch.autograd.Function):
    """An autograd function: the sum of each token's word, position and block-position embedding.
    The backward pass adds the gradients of the three tables to `accumulators` and returns none.

    The position tables have few rows, and nearly all tokens have block position 0, which torch's
    own backward would add one by one. Here their gradients are matmuls with a one-hot matrix.
    """

    @staticmethod
    def forward(
        context: Any, tables: Tables, ids: Ids, accumulators: tuple[Tensor, ...], words: Tensor
    ) -> Tensor:
        """Return the summed embeddings [T, hidden] of `ids` (tokens, positions, block positions,
        [T] each).

        `tables` are the embeddings of positions and block positions, `words` those of words;
        `accumulators` has the accumulators of words, positions and block positions.
        """
        context.arguments = ids, accumulators
        word, position, block = (
            F.embedding(row, table) for row, table in zip(ids, (words, *tables), strict=True)
        )
        return word + (position + block)

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[None, None, None, None]:
        """Add the gradients of the embeddings of words, positions and block positions to their
        accumulators in place, and return None for every argument.
        """
        ids, accumulators = context.arguments
        grad = grads[0].contiguous()
        accumulators[0].add_(
            torch.ops.aten.embedding_dense_backward(grad, ids[0], len(accumulators[0]), -1, False)
        )
        for row, table in zip(ids[1:], accumulators[1:], strict=True):
            table_grad = table.new_zeros(-(-len(table) // ALIGNED) * ALIGNED, table.shape[1])
            one_hot = row[:, None] == torch.arange(len(table_grad), device=row.device)
            add_product(table_grad, one_hot.to(grad.dtype), grad)
            table.add_(table_grad[: len(table)])
        return None, None, None, None


class LogProbs(torch.autograd.Function):
    """An autograd function: the log-probability of each row's target, [rows] in fp32 or wider,
    under logits x · tableᵀ. The logits are saved for the backward pass, which adds the table's
    gradient to `accumulator` and returns that of x. `kernels` are the `GlmKernels` that compute
    both.

    With Triton the backward pass overwrites the saved logits, so it can run only once.
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
        """Return the log-probabilities of `targets`, [rows] in fp32 or wider, of x [rows, hidden]
        and the word embeddings `table` [vocab, hidden]; the logits are saved in the type of x.
        """
        logits = x @ table.t()
        lse, target_logits = kernels.run_by_rows(kernels.log_prob_terms, logits, targets)
        context.save_for_backward(x, table, targets, logits, lse)
        context.arguments = accumulator, kernels
        return target_logits - lse

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        """Add the gradient of the output matrix `table` to `accumulator` in place; return that of x
        [rows, hidden], and None for the rest. With Triton the saved logits are overwritten, so it
        can run only once.
        """
        x, table, targets, logits, lse = context.saved_tensors
        accumulator, kernels = context.arguments
        (grad,) = kernels.run_by_rows(kernels.log_probs_backward, logits, targets, lse, grads[0])
        add_product(accumulator, grad, x)
        return grad @ table, None, None, None, None


class GlmKernels:
    """The operations between a GLM's matmuls, shared by all layers: plain functions, or with
    `compiled` compiled ones; with `triton`, those of log-probabilities are Triton kernels.

    Attributes: `norms` (dropout, addition and LayerNorm, by dropout probability: 0 and the model's
    own), `merge` (`merge_softmax_parts`), `log_prob_terms` and `log_probs_backward`; `add_norm`
    calls one of `norms`, `run_by_rows` calls a function for some rows of logits at a time. Compiled
    with dynamic sizes, because micro-batches differ in their numbers of tokens. `eps` and `dropout`
    are compiled in.
    """

    def __init__(self, compiled: bool, triton: bool, eps: float, dropout: float) -> None:
        """Choose the functions; with `compiled` they are compiled on their first call."""

        def prepare(function: Callable[..., Any]) -> Callable[..., Any]:
            """Return the function under torch.compile, or as it is without `compiled`."""
            return torch.compile(function, dynamic=True) if compiled else function

        # compiled functions make no fp32 copy of all logits
        self.all_rows_at_once = compiled
        self.norms = {
            rate: prepare(glm_norm_gelu.make_plain_dropout_add_norm(eps, rate))
            for rate in (0.0, dropout)
        }
        self.merge = prepare(merge_softmax_parts)
        self.log_prob_terms, self.log_probs_backward = (
            prepare(glm_logits.compute_log_prob_terms),
            prepare(glm_logits.log_probs_backward),
        )
        if triton:
            self.log_prob_terms = glm_logits.triton_compute_log_prob_terms
            self.log_probs_backward = glm_logits.triton_log_probs_backward

    def run_by_rows(
        self, function: Callable[..., tuple[Tensor, ...]], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the results of `function`, one of these operations on logits, on tensors whose
        first dimension is rows: called once if functions are compiled or there are at most
        `LOGIT_ROWS` rows, otherwise for `LOGIT_ROWS` rows at a time, with each result concatenated.
        This limits the fp32 copies of logits.
        """
        if self.all_rows_at_once or len(tensors[0]) <= LOGIT_ROWS:
            return function(*tensors)
        parts = [
            function(*part)
            for part in zip(*(torch.split(tensor, LOGIT_ROWS) for tensor in tensors), strict=True)
        ]
        return tuple(torch.cat(part) for part in zip(*parts, strict=True))

    def add_norm(self, x: Tensor, delta: Tensor, norm: nn.LayerNorm, dropout: float) -> GlmStreams:
        """Return x + dropout(delta) and its LayerNorm by the plain or compiled function. `dropout`
        is 0 or the model's own probability; KeyError otherwise.
        """
        out: GlmStreams = self.norms[dropout](x, delta, norm.weight, norm.bias)
        return out


class FusedGlmLayer:
    """A GLM block without Triton, called as `GlmBlock` and with its parameters: the same function,
    whose linear layers add the gradients of weights and biases to `gradient(parameter)` in the
    backward pass. Norms get theirs by autograd. `kernels` (`GlmKernels`) are the operations between
    matmuls.
    """

    def __init__(self, block: GlmBlock, gradient: GradientOf, kernels: GlmKernels) -> None:
        """Keep the block, whose parameters are used, the lookup of gradients and the shared
        functions.
        """
        self.block, self.gradient, self.kernels = block, gradient, kernels

    def __call__(
        self, x: Tensor, delta: Tensor, rows: ClozeLayout, kernel: str, dropout: float
    ) -> GlmStreams:
        """Return (x, delta), [T, hidden] each, after this GLM block, as `GlmBlock.forward`. Tokens
        are in the order of `ClozeLayout` (not interleaved); `kernel` names a kernel of
        `CLOZE_KERNELS`, `dropout` is 0 or the model's own probability (KeyError otherwise).
        """
        block, kernels = self.block, self.kernels
        x, normed = kernels.add_norm(x, delta, block.input_layernorm, dropout)
        qkv = split_glm_qkv(self._linear(normed, block.attention.query_key_value), block.heads)
        seen = attend_cloze(qkv, rows, kernel, dropout, kernels.merge).flatten(1)
        x, normed = kernels.add_norm(
            x, self._linear(seen, block.attention.dense), block.post_attention_layernorm, dropout
        )
        wide = F.gelu(self._linear(normed, block.mlp.dense_h_to_4h), approximate="tanh")
        return x, self._linear(wide, block.mlp.dense_4h_to_h)

    def _linear(self, x: Tensor, layer: nn.Linear) -> Tensor:
        """Apply a linear layer; its weight's and bias's gradients are accumulated in the backward
        pass.
        """
        return apply_linear(x, layer, self.gradient, self.gradient(layer.bias))


class TritonGlmLayer:
    """A GLM block by Triton kernels, called as `GlmBlock` and with its parameters: the same
    function. The backward pass adds the gradients of its parameters to `gradient(parameter)`; those
    of most biases are summed up by the kernels between matmuls, and that of the last matmul's bias
    by the next layer.

    `bias` is that bias of the layer before, with which the incoming delta was made, or None.
    Kernels `flash` and `packed` need tokens in interleaved order. The block has `DROPOUTS` dropout
    sites, numbered from `site`, whose elements are dropped by `seed`, an int64 tensor that all
    layers share.
    """

    def __init__(
        self, block: GlmBlock, gradient: GradientOf, bias: Tensor | None, seed: Tensor, site: int
    ) -> None:
        """Keep the block, whose parameters are used, the lookup of gradients and the dropout seed,
        a tensor on the device that all layers share.
        """
        self.block, self.gradient, self.bias = block, gradient, bias
        self.seed, self.site = seed, site

    def __call__(
        self, x: Tensor, delta: Tensor, rows: ClozeLayout, kernel: str, dropout: float
    ) -> GlmStreams:
        """Return (x, delta), [T, hidden] each, after this GLM block, as `GlmBlock.forward`. With
        kernel `flash` or `packed` tokens are in interleaved order, with others in that of
        `ClozeLayout`; additions drop by a hash of the seed, kernel `padded` by torch's random
        state.
        """
        block, gradient = self.block, self.gradient
        attention, mlp = block.attention, block.mlp
        first, second, third = (Dropout(dropout, self.seed, self.site + i) for i in range(DROPOUTS))
        x, normed = apply_dropout_add_norm(
            x, delta, block.input_layernorm, first, gradient, self.bias
        )
        bias = attention.query_key_value.bias
        if kernel in INTERLEAVED:
            qkv = split_glm_qkv(
                apply_linear(normed, attention.query_key_value, gradient, None), block.heads
            )
            attention_by = PackedClozeAttention if kernel == "packed" else FlashClozeAttention
            attended: Tensor = attention_by.apply(qkv, rows, second, gradient(bias))  # type: ignore[no-untyped-call]
        else:
            qkv = split_glm_qkv(
                apply_linear(normed, attention.query_key_value, gradient, gradient(bias)),
                block.heads,
            )
            attended = attend_cloze(qkv, rows, kernel, dropout)
        delta = apply_linear(attended.flatten(1), attention.dense, gradient, None)
        x, normed = apply_dropout_add_norm(
            x, delta, block.post_attention_layernorm, third, gradient, attention.dense.bias
        )
        narrow = apply_linear(normed, mlp.dense_h_to_4h, gradient, None)
        activated: Tensor = Gelu.apply(narrow, gradient(mlp.dense_h_to_4h.bias))  # type: ignore[no-untyped-call]
        return x, apply_linear(activated, mlp.dense_4h_to_h, gradient, None)


def apply_linear(
    x: Tensor, layer: nn.Linear, gradient: GradientOf, bias_accumulator: Tensor | None
) -> Tensor:
    """Return x · weightᵀ + bias of a layer; the backward pass adds the weight's gradient to
    `gradient(weight)` and the bias's to `bias_accumulator`, if there is one.
    """
    out: Tensor = AccumulatedBiasLinear.apply(
        x, layer.weight, layer.bias, gradient(layer.weight), bias_accumulator
    )  # type: ignore[no-untyped-call]
    return out


def apply_dropout_add_norm(
    x: Tensor,
    delta: Tensor,
    norm: nn.LayerNorm,
    dropout: Dropout,
    gradient: GradientOf,
    prior_bias: Tensor | None,
) -> GlmStreams:
    """Return x + dropout(delta) and its LayerNorm by Triton kernels; the backward pass accumulates
    the gradients of the norm's weight and bias, and of `prior_bias`, with which delta was made,
    unless it is None.
    """
    accumulators = (
        gradient(norm.weight),
        gradient(norm.bias),
        None if prior_bias is None else gradient(prior_bias),
    )
    out: GlmStreams = DropoutAddNorm.apply(x, delta, norm, accumulators, dropout)  # type: ignore[no-untyped-call]
    return out


class FusedGlm:
    """A GLM's forward pass for training: called with ids, targets, layout, kernel and dropout it
    returns the log-probabilities of the spans' targets, [S] in fp32 or wider. `layers` wrap the
    model's blocks.

    `gradient` returns the accumulator of a parameter's gradient. With `compiled` it uses Triton
    kernels where they run (`triton`), otherwise torch.compile; with `recompute` each block's
    activations are computed again in the backward pass. Where Triton runs, dropout is decided by a
    seed on the device, which `draw_seed` changes and which is 0 before that.
    """

    def __init__(self, model: Glm, gradient: GradientOf, compiled: bool, recompute: bool) -> None:
        """Wrap the model's blocks, whose parameters are shared, as `TritonGlmLayer` if `compiled`
        and the device has Triton, otherwise as `FusedGlmLayer`; make a zero dropout seed on their
        device.
        """
        shape, device = model.shape, model.word_embeddings.weight.device
        self.model, self.gradient = model, gradient
        self.triton = compiled and jit.has_triton(device)
        self.kernels = GlmKernels(compiled, self.triton, shape.norm_eps, shape.dropout)
        self.seed = torch.zeros(1, dtype=torch.int64, device=device)
        blocks: list[GlmBlock] = list(model.transformer.layers)  # type: ignore[arg-type]
        self.last_bias = blocks[-1].mlp.dense_4h_to_h.bias
        self.layers: list[GlmLayer] = [
            FusedGlmLayer(block, gradient, self.kernels) for block in blocks
        ]
        if self.triton:
            biases = [None, *(block.mlp.dense_4h_to_h.bias for block in blocks)]
            sites = range(0, DROPOUTS * len(blocks), DROPOUTS)
            arguments = zip(blocks, biases, sites, strict=False)
            self.layers = [
                TritonGlmLayer(block, gradient, prior_bias, self.seed, site)
                for block, prior_bias, site in arguments
            ]
        if recompute:
            self.layers = [recompute_layer(layer) for layer in self.layers]

    def draw_seed(self) -> None:
        """Draw a new dropout seed for the next forward pass and its backward, in place on the
        device. It comes from torch's random generator of the host, so nothing waits for the device.
        """
        self.seed.fill_(int(torch.randint((1 << 63) - 1, ())))

    def __call__(
        self, ids: Ids, targets: Tensor, rows: ClozeLayout, kernel: str, dropout: float
    ) -> Tensor:
        """Return the log-probabilities of `targets` [S], [S] in fp32 or wider, where S are the
        spans' tokens in order (or the layout's capacity of them).

        `ids` are tokens, positions and block positions, [T] each, in the order of `ClozeLayout`;
        they are reordered here if the kernel needs it. Without Triton, `dropout` is 0 or the
        model's own (KeyError otherwise).
        """
        trunk, table = self.model.transformer, self.model.word_embeddings.weight
        tables = trunk.position_embeddings.weight, trunk.block_position_embeddings.weight
        accumulators = tuple(self.gradient(tensor) for tensor in (table, *tables))
        if self.is_interleaved(kernel):
            tokens, positions, blocks = (row.index_select(0, rows.interleaved.order) for row in ids)
            ids = tokens, positions, blocks
        picked = (
            rows.interleaved.span_positions if self.is_interleaved(kernel) else rows.span_positions
        )
        embedded: Tensor = SummedEmbeddings.apply(tables, ids, accumulators, table)  # type: ignore[no-untyped-call]
        x, delta = (
            tensor.index_select(0, picked)
            for tensor in self.model.run_layers(embedded, rows, kernel, dropout, self.layers)
        )
        if self.triton:
            last_dropout = Dropout(dropout, self.seed, DROPOUTS * len(self.layers))
            normed = apply_dropout_add_norm(
                x, delta, trunk.final_layernorm, last_dropout, self.gradient, self.last_bias
            )[1]
        else:
            normed = self.kernels.add_norm(x, delta, trunk.final_layernorm, dropout)[1]
        out: Tensor = LogProbs.apply(normed, table, targets, self.gradient(table), self.kernels)  # type: ignore[no-untyped-call]
        return out

    def is_interleaved(self, kernel: str) -> bool:
        """Return whether this fused GLM computes tokens in interleaved order (every context
        followed by its spans) with this kernel: with Triton, for `flash` and `packed`; otherwise
        never.
        """
        return self.triton and kernel in INTERLEAVED


def recompute_layer(layer: GlmLayer) -> GlmLayer:
    """Return a layer that calls `layer` under activation checkpointing: activations are computed
    again in the backward pass, with the same elements dropped.
    """

    def run_checkpointed(
        x: Tensor, delta: Tensor, rows: ClozeLayout, kernel: str, dropout: float
    ) -> GlmStreams:
        """Call the layer through `torch.utils.checkpoint`."""
        out: GlmStreams = checkpoint(layer, x, delta, rows, kernel, dropout, use_reentrant=False)
        return out

    return run_checkpointed
