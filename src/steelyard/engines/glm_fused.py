"""A GLM for training on one device: gradients of weights and biases are added to where they are kept, as in engines/fused.py.

Biases are added by the matmul itself; what is between matmuls (a dropout, an addition and a norm) is one compiled piece. The
logits are in the precision of the matmuls and are read as fp32 inside the kernel, or a few rows at a time where nothing is
compiled: no fp32 copy of all of them is ever there.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from steelyard.engines.fused import add_product
from steelyard.models.glm import Block, Glm, Layer, Streams, split
from steelyard.models.glm_attention import ClozeLayout, attend, merge

ROWS = 512  # of logits read at once where nothing is compiled
ALIGNED = 8  # numbers of 16 bit that a matmul loads at once; GLM's tables of positions have 513 rows

Kept = Callable[[Tensor], Tensor]
Ids = tuple[Tensor, Tensor, Tensor]  # tokens, positions, block positions
Tables = tuple[Tensor, Tensor]  # of positions and of block positions


class Linear(torch.autograd.Function):
    """x times a weight and a bias added, whose gradients are added to `kept` and to `kept_bias`, and nowhere else."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor, bias: Tensor, kept: Tensor, kept_bias: Tensor) -> Tensor:
        context.save_for_backward(x, weight)
        context.kept = kept, kept_bias
        return torch.addmm(bias, x, weight.t())

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        x, weight = context.saved_tensors
        kept, kept_bias = context.kept
        add_product(kept, grads[0], x)
        kept_bias.add_(grads[0].sum(0, dtype=kept_bias.dtype))
        return grads[0] @ weight, None, None, None, None


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
        weight, bias = layer.weight, layer.bias
        out: Tensor = Linear.apply(x, weight, bias, self.kept(weight), self.kept(bias))  # type: ignore[no-untyped-call]
        return out


class FusedGlm:
    """A model's way from tokens to the log-probabilities of the spans' targets."""

    def __init__(self, model: Glm, kept: Kept, compiled: bool, recompute: bool) -> None:
        shape = model.shape
        self.model, self.kept = model, kept
        self.pieces = Pieces(compiled, shape.norm_eps, shape.dropout)
        fused = [FusedLayer(block, kept, self.pieces) for block in model.transformer.layers]  # type: ignore[arg-type]
        self.layers: list[Layer] = [recomputed(layer) for layer in fused] if recompute else list(fused)

    def __call__(self, ids: Ids, targets: Tensor, rows: ClozeLayout, kernel: str, dropout: float) -> Tensor:
        """Of tokens with their positions and block positions: [S], in fp32 or wider."""
        below, table = self.model.transformer, self.model.word_embeddings.weight
        tables = below.position_embeddings.weight, below.block_position_embeddings.weight
        kept = tuple(self.kept(one) for one in (table, *tables))
        embedded: Tensor = Embedded.apply(tables, ids, kept, table)  # type: ignore[no-untyped-call]
        x, delta = self.model.streams(embedded, rows, kernel, dropout, self.layers)
        n = rows.context_tokens
        _, normed = self.pieces.join(x[n:], delta[n:], below.final_layernorm, dropout)
        out: Tensor = Said.apply(normed, table, targets, self.kept(table), self.pieces)  # type: ignore[no-untyped-call]
        return out


def recomputed(layer: Layer) -> Layer:
    """A layer whose activations are computed again in the backward pass, the same numbers dropped."""

    def run(x: Tensor, delta: Tensor, rows: ClozeLayout, kernel: str, dropout: float) -> Streams:
        out: Streams = checkpoint(layer, x, delta, rows, kernel, dropout, use_reentrant=False)
        return out

    return run
