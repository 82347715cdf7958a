"""A GLM for training on one device: gradients of weights and biases are added to where they are kept, as in engines/fused.py.

Biases are added by the matmul itself; what is between matmuls (a dropout, an addition and a norm) is one compiled piece, or a
kernel of glm_kernels.py that also sums up the gradient of the bias before it. The
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
from steelyard.models.glm import Block, Glm, Layer, Streams, split
from steelyard.models.glm_attention import FLASH, ClozeLayout, Joint, attend, merge
from steelyard.models.llama_fused import add_product

ROWS = 512  # of logits read at once where nothing is compiled
ALIGNED = 8  # numbers of 16 bit that a matmul loads at once; GLM's tables of positions have 513 rows

Kept = Callable[[Tensor], Tensor]
Ids = tuple[Tensor, Tensor, Tensor]  # tokens, positions, block positions
Tables = tuple[Tensor, Tensor]  # of positions and of block positions


class Linear(torch.autograd.Function):
    """x times a weight and a bias added, whose gradients are added to `kept` and to `kept_bias`, and nowhere else; the bias's
    not at all if there is no place: then whoever makes the gradient that comes here adds it."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor, bias: Tensor, kept: Tensor, kept_bias: Tensor | None) -> Tensor:
        context.save_for_backward(x, weight)
        context.kept = kept, kept_bias
        return torch.addmm(bias, x, weight.t())

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        x, weight = context.saved_tensors
        kept, kept_bias = context.kept
        add_product(kept, grads[0], x)
        if kept_bias is not None:
            kept_bias.add_(grads[0].sum(0, dtype=kept_bias.dtype))
        return grads[0] @ weight, None, None, None, None


class Joined(torch.autograd.Function):
    """The residual stream and its norm, by a kernel. Gradients of the norm's weight and bias, and of the bias that was added
    to delta, if there was one, are added to `kept`."""

    @staticmethod
    def forward(
        context: Any, x: Tensor, delta: Tensor, norm: nn.LayerNorm, kept: tuple[Tensor, Tensor, Tensor | None], dropout: float
    ) -> Streams:
        seed = glm_norm.draw(dropout)
        out, normed, stats = glm_norm.joined(x, delta, norm.weight, norm.bias, norm.eps, dropout, seed)
        context.save_for_backward(out, stats, norm.weight)
        context.set_materialize_grads(False)  # of the last stream only the norm is read
        context.asked = kept, dropout, seed
        return out, normed

    @staticmethod
    def backward(context: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        more, grad = grads
        if grad is None:
            raise ValueError("a norm that nothing was made from")
        kept, dropout, seed = context.asked
        stays = context.needs_input_grad[0]
        back, change = glm_norm.joined_backward(context.saved_tensors, more, grad, kept, dropout, seed, stays)
        return back, change, None, None, None


class Seen(torch.autograd.Function):
    """Attention of tokens in the order of `Joint`: one call of flash attention, all queries on contexts, and a kernel for spans
    on themselves. How the halves of the spans' softmax are one in the backward pass, models/glm_attention.py says. The
    gradient of the bias that was added to qkv is added to `kept`."""

    @staticmethod
    def forward(context: Any, qkv: Tensor, rows: ClozeLayout, dropout: float, kept: Tensor) -> Tensor:
        joint = rows.joint
        near = glm_spans.of_contexts(qkv, joint)
        q, k, v = qkv[:, 0], near[:, 0], near[:, 1]
        out, lse, state = FLASH.forward(q, k, v, joint.rows, rows.contexts, dropout, False)
        out = out.contiguous()
        seed = glm_norm.draw(dropout)
        glm_spans.own(qkv, out, lse, joint, dropout, seed)
        context.save_for_backward(qkv, near, out, lse)
        context.asked = rows, dropout, kept, state, seed
        return out

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        qkv, near, out, lse = context.saved_tensors
        rows, dropout, kept, state, seed = context.asked
        grad, borders = grads[0].contiguous(), (rows.joint.rows, rows.contexts)
        dq, dk, dv = FLASH.backward(grad, qkv[:, 0], *near.unbind(1), out, lse, state, *borders, dropout, False)
        dq = dq.contiguous()  # as the kernels read it, and one of them adds to it
        total = torch.empty_like(qkv)
        glm_spans.own_backward(grad, qkv, out, lse, dq, total, rows.joint, dropout, seed)
        glm_spans.lay((dq, dk, dv), total, rows.joint, kept)
        return total, None, None, None


class Gelu(torch.autograd.Function):
    """The gradient of the bias that was added to x is added to `kept`."""

    @staticmethod
    def forward(context: Any, x: Tensor, kept: Tensor) -> Tensor:
        context.save_for_backward(x)
        context.kept = kept
        return F.gelu(x, approximate="tanh")

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (x,) = context.saved_tensors
        return glm_norm.gelu_backward(x, grads[0], context.kept), None


class Embedded(torch.autograd.Function):
    """The sum of a token's rows of three tables: words, positions and block positions. A table of positions has few rows, and
    nearly all tokens have block position 0: torch's own backward adds those one by one. Here it is a matmul with ones at the
    rows that were read."""

    @staticmethod
    def forward(context: Any, tables: Tables, ids: Ids, kept: tuple[Tensor, ...], words: Tensor) -> Tensor:
        context.asked = ids, kept
        word, position, block = (F.embedding(row, table) for row, table in zip(ids, (words, *tables), strict=True))
        return word + (position + block)

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[None, None, None, None]:
        ids, kept = context.asked
        grad = grads[0].contiguous()
        kept[0].add_(torch.ops.aten.embedding_dense_backward(grad, ids[0], len(kept[0]), -1, False))
        for row, table in zip(ids[1:], kept[1:], strict=True):
            total = table.new_zeros(-(-len(table) // ALIGNED) * ALIGNED, table.shape[1])
            read = row[:, None] == torch.arange(len(total), device=row.device)
            add_product(total, read.to(grad.dtype), grad)
            table.add_(total[: len(table)])
        return None, None, None, None


class Said(torch.autograd.Function):
    """The log-probability of each row's target. The table's gradient is added to `kept`."""

    @staticmethod
    def forward(context: Any, x: Tensor, table: Tensor, targets: Tensor, kept: Tensor, pieces: "Pieces") -> Tensor:
        logits = x @ table.t()
        lse, found = pieces.rows(pieces.said, logits, targets)
        context.save_for_backward(x, table, targets, logits, lse)
        context.asked = kept, pieces
        return found - lse

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        x, table, targets, logits, lse = context.saved_tensors
        kept, pieces = context.asked
        (grad,) = pieces.rows(pieces.unsaid, logits, targets, lse, grads[0])
        add_product(kept, grad, x)
        return grad @ table, None, None, None, None


def said(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The log-sum-exp of each row, and its target's logit."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide.logsumexp(-1), wide.gather(-1, targets[:, None])[:, 0]


def unsaid(logits: Tensor, targets: Tensor, lse: Tensor, grad: Tensor) -> tuple[Tensor]:
    """The gradient of the logits."""
    right = torch.arange(logits.shape[-1], device=logits.device) == targets[:, None]
    return (((right.to(lse.dtype) - (logits - lse[:, None]).exp()) * grad[:, None]).to(logits.dtype),)


def _joined(eps: float, dropout: float) -> Callable[..., Streams]:
    """The residual stream and its norm, as models/glm.py has them, with numbers that a compiler takes for constants."""

    def run(x: Tensor, delta: Tensor, weight: Tensor, bias: Tensor) -> Streams:
        x = x + F.dropout(delta, dropout)
        return x, F.layer_norm(x, (x.shape[-1],), weight, bias, eps)

    def still(x: Tensor, delta: Tensor, weight: Tensor, bias: Tensor) -> Streams:
        x = x + delta
        return x, F.layer_norm(x, (x.shape[-1],), weight, bias, eps)

    return run if dropout else still


class Pieces:
    """What stands between the matmuls, compiled or as it is written: the same for all layers. Every micro-batch has a size of
    its own, so sizes are no constants."""

    def __init__(self, compiled: bool, eps: float, dropout: float) -> None:
        def make(function: Callable[..., Any]) -> Callable[..., Any]:
            return torch.compile(function, dynamic=True) if compiled else function

        self.compiled = compiled
        self.joined = {rate: make(_joined(eps, rate)) for rate in (0.0, dropout)}
        self.merge, self.said, self.unsaid = make(merge), make(said), make(unsaid)

    def rows(self, piece: Callable[..., tuple[Tensor, ...]], *tensors: Tensor) -> tuple[Tensor, ...]:
        """A function of rows, all at once if it is compiled, else a few at a time."""
        if self.compiled or len(tensors[0]) <= ROWS:
            return piece(*tensors)
        parts = [piece(*part) for part in zip(*(torch.split(tensor, ROWS) for tensor in tensors), strict=True)]
        return tuple(torch.cat(part) for part in zip(*parts, strict=True))

    def join(self, x: Tensor, delta: Tensor, norm: nn.LayerNorm, dropout: float) -> Streams:
        out: Streams = self.joined[dropout](x, delta, norm.weight, norm.bias)
        return out


class FusedLayer:
    """The same function as `Block`, with `kept` saying where a gradient goes."""

    def __init__(self, block: Block, kept: Kept, pieces: Pieces) -> None:
        self.block, self.kept, self.pieces = block, kept, pieces

    def __call__(self, x: Tensor, delta: Tensor, rows: ClozeLayout, kernel: str, dropout: float) -> Streams:
        block, pieces = self.block, self.pieces
        x, normed = pieces.join(x, delta, block.input_layernorm, dropout)
        qkv = split(self._linear(normed, block.attention.query_key_value), block.heads)
        seen = attend(qkv, rows, kernel, dropout, pieces.merge).flatten(1)
        x, normed = pieces.join(x, self._linear(seen, block.attention.dense), block.post_attention_layernorm, dropout)
        wide = F.gelu(self._linear(normed, block.mlp.dense_h_to_4h), approximate="tanh")
        return x, self._linear(wide, block.mlp.dense_4h_to_h)

    def _linear(self, x: Tensor, layer: nn.Linear) -> Tensor:
        return linear(x, layer, self.kept, self.kept(layer.bias))


class KernelLayer:
    """The same by kernels, which have the gradients of all biases. `before` is the bias that delta was made with, if any.
    Kernel "flash" has its tokens in the order of `Joint`."""

    def __init__(self, block: Block, kept: Kept, before: Tensor | None) -> None:
        self.block, self.kept, self.before = block, kept, before

    def __call__(self, x: Tensor, delta: Tensor, rows: ClozeLayout, kernel: str, dropout: float) -> Streams:
        block, kept = self.block, self.kept
        attention, mlp = block.attention, block.mlp
        x, normed = join(x, delta, block.input_layernorm, dropout, kept, self.before)
        bias = attention.query_key_value.bias
        if kernel == "flash":
            qkv = split(linear(normed, attention.query_key_value, kept, None), block.heads)
            seen: Tensor = Seen.apply(qkv, rows, dropout, kept(bias))  # type: ignore[no-untyped-call]
        else:
            qkv = split(linear(normed, attention.query_key_value, kept, kept(bias)), block.heads)
            seen = attend(qkv, rows, kernel, dropout)
        delta = linear(seen.flatten(1), attention.dense, kept, None)
        x, normed = join(x, delta, block.post_attention_layernorm, dropout, kept, attention.dense.bias)
        narrow = linear(normed, mlp.dense_h_to_4h, kept, None)
        wide: Tensor = Gelu.apply(narrow, kept(mlp.dense_h_to_4h.bias))  # type: ignore[no-untyped-call]
        return x, linear(wide, mlp.dense_4h_to_h, kept, None)


def linear(x: Tensor, layer: nn.Linear, kept: Kept, kept_bias: Tensor | None) -> Tensor:
    out: Tensor = Linear.apply(x, layer.weight, layer.bias, kept(layer.weight), kept_bias)  # type: ignore[no-untyped-call]
    return out


def join(x: Tensor, delta: Tensor, norm: nn.LayerNorm, dropout: float, kept: Kept, before: Tensor | None) -> Streams:
    places = kept(norm.weight), kept(norm.bias), None if before is None else kept(before)
    out: Streams = Joined.apply(x, delta, norm, places, dropout)  # type: ignore[no-untyped-call]
    return out


class FusedGlm:
    """A model's way from tokens to the log-probabilities of the spans' targets."""

    def __init__(self, model: Glm, kept: Kept, compiled: bool, recompute: bool) -> None:
        shape = model.shape
        self.model, self.kept = model, kept
        self.pieces = Pieces(compiled, shape.norm_eps, shape.dropout)
        self.kernels = compiled and jit.serve(model.word_embeddings.weight.device)
        blocks: list[Block] = list(model.transformer.layers)  # type: ignore[arg-type]
        self.last = blocks[-1].mlp.dense_4h_to_h.bias
        self.layers: list[Layer] = [FusedLayer(block, kept, self.pieces) for block in blocks]
        if self.kernels:
            biases = [None, *(block.mlp.dense_4h_to_h.bias for block in blocks)]
            self.layers = [KernelLayer(block, kept, before) for block, before in zip(blocks, biases, strict=False)]
        if recompute:
            self.layers = [recomputed(layer) for layer in self.layers]

    def __call__(self, ids: Ids, targets: Tensor, rows: ClozeLayout, kernel: str, dropout: float) -> Tensor:
        """Of tokens with their positions and block positions: [S], in fp32 or wider."""
        below, table = self.model.transformer, self.model.word_embeddings.weight
        tables = below.position_embeddings.weight, below.block_position_embeddings.weight
        kept = tuple(self.kept(one) for one in (table, *tables))
        joint = rows.joint if self.kernels and kernel == "flash" else None
        if joint is not None:
            tokens, positions, blocks = (row.index_select(0, joint.order) for row in ids)
            ids = tokens, positions, blocks
        embedded: Tensor = Embedded.apply(tables, ids, kept, table)  # type: ignore[no-untyped-call]
        x, delta = self.model.streams(embedded, rows, kernel, dropout, self.layers)
        x, delta = (_of_spans(one, rows, joint) for one in (x, delta))
        if self.kernels:
            normed = join(x, delta, below.final_layernorm, dropout, self.kept, self.last)[1]
        else:
            normed = self.pieces.join(x, delta, below.final_layernorm, dropout)[1]
        out: Tensor = Said.apply(normed, table, targets, self.kept(table), self.pieces)  # type: ignore[no-untyped-call]
        return out


def _of_spans(x: Tensor, rows: ClozeLayout, joint: Joint | None) -> Tensor:
    return x[rows.context_tokens :] if joint is None else x.index_select(0, joint.spans)


def recomputed(layer: Layer) -> Layer:
    """A layer whose activations are computed again in the backward pass, the same numbers dropped."""

    def run(x: Tensor, delta: Tensor, rows: ClozeLayout, kernel: str, dropout: float) -> Streams:
        out: Streams = checkpoint(layer, x, delta, rows, kernel, dropout, use_reentrant=False)
        return out

    return run
