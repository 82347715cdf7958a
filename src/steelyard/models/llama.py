"""The Llama family: RMSNorm, rotary positions, SwiGLU, grouped keys, tied or untied output;
optional are a QKV bias (Qwen2), norms of query and key heads (Qwen3), a window (Mistral) and scaled
rotary positions (Llama 3).

Tokens are packed: a batch is one long row of tokens with a `Layout` that says where its sequences
begin, so a linear layer sees one large matrix and nothing is padded. QKV is one matrix, stored by
key group as (its query heads, key, value): a slice of whole groups is a slice of the rows. Gate and
up are one matrix too, in alternating blocks of a few rows each, for the same reason.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from steelyard.kernels.rotary import rotate
from steelyard.kernels.swiglu import gated
from steelyard.models.attention import Layout, Prefix, attend
from steelyard.models.shapes import LinearRope, Llama3Rope


@dataclass(frozen=True)
class LlamaShape:
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    positions: int
    rope_base: float = 10000.0
    norm_eps: float = 1e-5
    qkv_bias: bool = False
    tied: bool = False
    qk_norm: bool = False
    window: int | None = None
    rope_scaling: LinearRope | Llama3Rope | None = None

    @property
    def ffn_block(self) -> int:
        """Rows of gate, then as many of up: the most, up to what one load of 16 bytes takes, of
        which every share that divides the key groups holds whole ones. So a share has the same
        block as the whole."""
        shares = math.gcd(self.ffn, self.kv_heads)
        return next(block for block in (8, 4, 2, 1) if self.ffn % (block * shares) == 0)


class GatesApart(LlamaShape):
    """The same with all rows of gate before all of up: for a CPU, and for a whole model only."""

    @property
    def ffn_block(self) -> int:
        return self.ffn


Streams = tuple[Tensor, Tensor, Tensor, Tensor]


class Block(nn.Module):
    """One layer. The residual stream comes as (x, delta), their sum not yet taken, so that a
    compiler can fuse the addition with the norm that follows it."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        groups, dim = shape.kv_heads, shape.head_dim
        self.attention_norm = nn.RMSNorm(shape.hidden, shape.norm_eps)
        self.qkv = nn.Linear(shape.hidden, (shape.heads + 2 * groups) * dim, bias=shape.qkv_bias)
        self.out = nn.Linear(shape.heads * dim, shape.hidden, bias=False)
        self.ffn_norm = nn.RMSNorm(shape.hidden, shape.norm_eps)
        self.gate_up = nn.Linear(shape.hidden, 2 * shape.ffn, bias=False)
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=False)
        self.q_norm = nn.RMSNorm(dim, shape.norm_eps) if shape.qk_norm else None
        self.k_norm = nn.RMSNorm(dim, shape.norm_eps) if shape.qk_norm else None

    def forward(
        self,
        x: Tensor,
        delta: Tensor,
        cos: Tensor,
        sin: Tensor,
        rows: Layout,
        kernel: str,
        prefix: Prefix | None,
    ) -> Streams:
        """Returns x, delta, and this batch's keys and values."""
        x = x + delta
        q, k, v = heads(
            self.qkv(self.attention_norm(x)), cos, sin, self.shape, self.q_norm, self.k_norm
        )
        x = x + self.out(attend(q, k, v, rows, kernel, prefix, self.shape.window).flatten(1))
        return x, self.down(swiglu(self.gate_up(self.ffn_norm(x)), self.shape)), k, v


def swiglu(gate_up: Tensor, shape: LlamaShape) -> Tensor:
    """SwiGLU; in place where gate and up lie apart, which only scoring on a CPU has: there new
    memory is slow at first.
    """
    if not isinstance(shape, GatesApart):
        return gated(gate_up, shape.ffn_block)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate, inplace=True).mul_(up)


Norm = Callable[[Tensor], Tensor]


def heads(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    shape: LlamaShape,
    of_q: Norm | None = None,
    of_k: Norm | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys, normed where the model does so, and rotated, and values, of all groups that
    are there: a share has fewer."""
    grouped = qkv.unflatten(-1, (-1, shape.heads // shape.kv_heads + 2, shape.head_dim))  # type: ignore[no-untyped-call]
    q, k = grouped[:, :, :-2], grouped[:, :, -2]
    q, k = q if of_q is None else of_q(q), k if of_k is None else of_k(k)
    return rotate(q.flatten(1, 2), cos, sin), rotate(k, cos, sin), grouped[:, :, -1]


class Llama(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, shape.norm_eps)
        self.output = nn.Linear(shape.hidden, shape.vocab, bias=False)
        if shape.tied:
            self.output.weight = self.embed.weight

    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor,
        rows: Layout,
        kernel: str,
        prefix: list[Prefix] | None = None,
        keep: slice | None = None,
        blocks: Sequence[Callable[..., Streams]] | None = None,
        pick: Tensor | None = None,
    ) -> Tensor:
        """The residual stream after the last layer, before its norm: [T, hidden], or at the picked
        tokens only. With `keep`, the keys and values of those tokens are left in `prefix` for later
        batches. `blocks` stand in for the layers, compiled ones say."""
        x = self.embed(tokens)
        delta = torch.zeros_like(x)
        cos, sin = rotary(positions, self.shape, x.dtype)
        layers: Iterable[Callable[..., Streams]] = self.layers if blocks is None else blocks
        for i, block in enumerate(layers):
            cached = prefix[i] if prefix is not None else None
            x, delta, k, v = block(x, delta, cos, sin, rows, kernel, cached)
            if keep is not None and cached is not None:
                size = keep.stop - keep.start
                cached[0][:size].copy_(k[keep])
                cached[1][:size].copy_(v[keep])
        out: Tensor = x + delta if pick is None else x[pick] + delta[pick]
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.output(self.norm(hidden))
        return out

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        rows: Layout,
        kernel: str,
        pick: Tensor,
        prefix: list[Prefix] | None = None,
        keep: slice | None = None,
        blocks: Sequence[Callable[..., Streams]] | None = None,
    ) -> Tensor:
        """Logits at the picked tokens only: [len(pick), vocab]."""
        return self.logits(self.hidden(tokens, positions, rows, kernel, prefix, keep, blocks, pick))

    def empty_prefix(self, rows: int) -> list[Prefix]:
        """Room for the keys and values of one shared prefix of at most so many tokens, in every
        layer.
        """
        like = self.embed.weight
        size = (rows, self.shape.kv_heads, self.shape.head_dim)
        return [(like.new_zeros(size), like.new_zeros(size)) for _ in range(self.shape.layers)]


def rotary(positions: Tensor, shape: LlamaShape, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of every token's angles, [T, 1, D/2], computed in fp32."""
    dim = shape.head_dim
    steps = torch.arange(0, dim, 2, dtype=torch.int64, device=positions.device).float() / dim
    speeds = 1.0 / shape.rope_base**steps
    if shape.rope_scaling is not None:
        speeds = SCALED[shape.rope_scaling.kind](speeds, shape.rope_scaling)
    angles = positions[:, None].float() * speeds
    return angles.cos()[:, None].to(dtype), angles.sin()[:, None].to(dtype)


def _linear(speeds: Tensor, scaling: LinearRope) -> Tensor:
    return speeds / scaling.factor


def _llama3(speeds: Tensor, scaling: Llama3Rope) -> Tensor:
    """How many waves the original positions hold says how much of a frequency is kept: from `low`,
    nothing, to `high`, all. In the order in which transformers computes it: at long positions the
    last bit of a frequency is seen in an angle."""
    waves = scaling.original_positions / (2 * math.pi / speeds)
    kept = ((waves - scaling.low) / (scaling.high - scaling.low)).clamp(0, 1)
    return (1 - kept) * speeds / scaling.factor + kept * speeds


SCALED: dict[str, Callable[[Tensor, Any], Tensor]] = {"linear": _linear, "llama3": _llama3}
