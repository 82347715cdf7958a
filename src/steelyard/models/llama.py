"""The Llama family: RMSNorm, rotary positions, SwiGLU, grouped keys, tied or untied output;
optionally a QKV bias (Qwen2), norms of query and key heads (Qwen3), a window (Mistral) and scaled
rotary positions (Llama 3).

Tokens are packed: a batch is one long row of tokens with a `PackedLayout` that says where its
sequences begin, so a linear layer sees one matrix of all tokens and nothing is padded. QKV is one
matrix, stored by key group as (its query heads, key, value), so that whole groups are a slice of
its rows. For the same reason gate and up are one matrix in alternating chunks of a few rows. This
is the plain model; llama_fused.py and llama_fp8.py compute the same faster.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from steelyard.kernels.rotary import rotate
from steelyard.kernels.swiglu import swiglu_interleaved
from steelyard.models.attention import CachedLayout, PackedLayout, PrefixCache, attend_packed_rows
from steelyard.models.shapes import LinearRope, Llama3Rope


@dataclass(frozen=True)
class LlamaShape:
    """Dimensions of a Llama, or of one tensor-parallel shard of it: the fields of `LlamaModel` that
    say what is computed.

    `kv_heads` is the number of key groups (of `heads` query heads), `positions` the longest
    sequence, `window` the keys that a token sees (itself included; None: all before it), `tied`
    whether embedding and output are one matrix, `qkv_bias` and `qk_norm` (RMS norm of each query
    and key head) as in Qwen, `rope_scaling` how rotary positions are scaled (None: not).
    `gate_up_chunk` is derived from ffn and kv_heads: how gate and up rows alternate.
    """

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
    def gate_up_chunk(self) -> int:
        """The number of gate rows that are followed by as many up rows in the matrix gate_up: 8, 4,
        2 or 1.

        It is the largest (8 elements of 16 bits are one load of 16 bytes) for which every equal
        division of the key groups gets whole chunks, so a shard has the same chunk as the whole
        model.
        """
        shards = math.gcd(self.ffn, self.kv_heads)
        return next(chunk for chunk in (8, 4, 2, 1) if self.ffn % (chunk * shards) == 0)


class GateFirstShape(LlamaShape):
    """A `LlamaShape` where the matrix gate_up has all gate rows before all up rows (`gate_up_chunk`
    is ffn): for scoring on a CPU, which is slow with short chunks, and for a whole model only, not
    for shards.
    """

    @property
    def gate_up_chunk(self) -> int:
        """The number of gate rows before the up rows: all of them."""
        return self.ffn


BlockOutput = tuple[Tensor, Tensor, Tensor, Tensor]


class LlamaBlock(nn.Module):
    """One transformer block of a Llama: modules attention_norm, qkv, out, ffn_norm, gate_up, down
    and, with QK norm, q_norm and k_norm (else None). Called, it returns the next x and delta, [T,
    hidden] each, and this batch's rotated keys and values, [T, G, D] each.

    The residual stream is x + delta, not yet added, so that a compiler can fuse the addition with
    the norm that follows.
    """

    def __init__(self, shape: LlamaShape) -> None:
        """Create the norms and linear layers of one block; q_norm and k_norm are None without QK
        norm.
        """
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
        layout: PackedLayout | CachedLayout,
        kernel: str,
        prefix: PrefixCache | None,
    ) -> BlockOutput:
        """Return x and delta, [T, hidden] each, and this batch's rotated keys and values, [T, G, D]
        each, after this block. The residual stream is x + delta.

        `cos` and `sin` are those of `compute_rotary_cos_sin`, `kernel` names a kernel of
        `ATTENTION_KERNELS`, `prefix` is this layer's cache of a shared prefix.
        """
        x = x + delta
        q, k, v = split_qkv(
            self.qkv(self.attention_norm(x)), cos, sin, self.shape, self.q_norm, self.k_norm
        )
        x = x + self.out(
            attend_packed_rows(q, k, v, layout, kernel, prefix, self.shape.window).flatten(1)
        )
        return x, self.down(apply_swiglu(self.gate_up(self.ffn_norm(x)), self.shape)), k, v


def apply_swiglu(gate_up: Tensor, shape: LlamaShape) -> Tensor:
    """Return silu(gate) · up, [T, ffn]. For a `GateFirstShape` it is computed in place and
    overwrites the first half of `gate_up`: on a CPU new memory is slow at first.
    """
    if not isinstance(shape, GateFirstShape):
        return swiglu_interleaved(gate_up, shape.gate_up_chunk)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate, inplace=True).mul_(up)


HeadNorm = Callable[[Tensor], Tensor]


def split_qkv(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    shape: LlamaShape,
    q_norm: HeadNorm | None = None,
    k_norm: HeadNorm | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split QKV [T, G · (H / G + 2) · D] into queries [T, H, D], keys and values [T, G, D]; norm
    queries and keys if norms are given, and rotate them.

    G is taken from the width of `qkv`, so that it also works for a shard with fewer groups than
    `shape` says.
    """
    grouped = qkv.unflatten(-1, (-1, shape.heads // shape.kv_heads + 2, shape.head_dim))  # type: ignore[no-untyped-call]
    q, k = grouped[:, :, :-2], grouped[:, :, -2]
    q, k = q if q_norm is None else q_norm(q), k if k_norm is None else k_norm(k)
    return rotate(q.flatten(1, 2), cos, sin), rotate(k, cos, sin), grouped[:, :, -1]


class Llama(nn.Module):
    """A Llama, or one tensor-parallel shard of it: modules `embed`, `layers` (`LlamaBlock`s),
    `norm` and `output`, made with the current default device and type. `run_layers` gives the
    residual stream [T, hidden], `compute_logits` logits of it, calling the model the logits at the
    tokens in `pick`; `make_empty_prefix` allocates the caches of a shared prefix.
    """

    def __init__(self, shape: LlamaShape) -> None:
        """Create the modules with the current default device and type; tied models share one matrix
        for embedding and output.
        """
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(LlamaBlock(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, shape.norm_eps)
        self.output = nn.Linear(shape.hidden, shape.vocab, bias=False)
        if shape.tied:
            self.output.weight = self.embed.weight

    def run_layers(
        self,
        tokens: Tensor,
        positions: Tensor,
        layout: PackedLayout | CachedLayout,
        kernel: str,
        prefix: list[PrefixCache] | None = None,
        keep: slice | None = None,
        blocks: Sequence[Callable[..., BlockOutput]] | None = None,
        pick: Tensor | None = None,
    ) -> Tensor:
        """Return the residual stream of a Llama after the last block, before the final norm: [T,
        hidden], or only at the tokens in `pick`, [len(pick), hidden].

        `tokens` and `positions` are [T]; `prefix` has one cache per layer, which attention reads if
        the layout has `gather`. With `keep` and `prefix`, the keys and values of that slice of
        tokens are written to the beginning of each cache, in place, for later batches. `blocks` are
        run in place of the model's own, for example compiled ones.
        """
        x = self.embed(tokens)
        delta = torch.zeros_like(x)
        cos, sin = compute_rotary_cos_sin(positions, self.shape, x.dtype)
        layers: Iterable[Callable[..., BlockOutput]] = self.layers if blocks is None else blocks
        for i, block in enumerate(layers):
            cached = prefix[i] if prefix is not None else None
            x, delta, k, v = block(x, delta, cos, sin, layout, kernel, cached)
            if keep is not None and cached is not None:
                size = keep.stop - keep.start
                cached[0][:size].copy_(k[keep])
                cached[1][:size].copy_(v[keep])
        out: Tensor = x + delta if pick is None else x[pick] + delta[pick]
        return out

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [..., vocab] of hidden states: final norm and output matrix."""
        out: Tensor = self.output(self.norm(hidden))
        return out

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        layout: PackedLayout | CachedLayout,
        kernel: str,
        pick: Tensor,
        prefix: list[PrefixCache] | None = None,
        keep: slice | None = None,
        blocks: Sequence[Callable[..., BlockOutput]] | None = None,
    ) -> Tensor:
        """Return a Llama's logits at the tokens in `pick` only: [len(pick), vocab]; of a shard, its
        own part of the vocabulary. The other arguments are those of `run_layers`.
        """
        return self.compute_logits(
            self.run_layers(tokens, positions, layout, kernel, prefix, keep, blocks, pick)
        )

    def make_empty_prefix(self, tokens: int) -> list[PrefixCache]:
        """Return zeroed caches for the keys and values of one shared prefix of at most `tokens`
        tokens: a pair [tokens, G, D] for each layer of this Llama, of the type and on the device of
        its embedding.
        """
        like = self.embed.weight
        size = (tokens, self.shape.kv_heads, self.shape.head_dim)
        return [(like.new_zeros(size), like.new_zeros(size)) for _ in range(self.shape.layers)]


def compute_rotary_cos_sin(
    positions: Tensor, shape: LlamaShape, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return cos and sin of every token's rotary angles, [T, 1, D/2] each, computed in fp32 and
    converted to `dtype`. Frequencies are scaled as `shape.rope_scaling` says (linear, Llama 3's, or
    not at all).
    """
    dim = shape.head_dim
    exponents = torch.arange(0, dim, 2, dtype=torch.int64, device=positions.device).float() / dim
    frequencies = 1.0 / shape.rope_base**exponents
    if shape.rope_scaling is not None:
        frequencies = ROPE_SCALINGS[shape.rope_scaling.kind](frequencies, shape.rope_scaling)
    angles = positions[:, None].float() * frequencies
    return angles.cos()[:, None].to(dtype), angles.sin()[:, None].to(dtype)


def _scale_linear(frequencies: Tensor, scaling: LinearRope) -> Tensor:
    """Return all frequencies divided by the scaling's factor."""
    return frequencies / scaling.factor


def _scale_llama3(frequencies: Tensor, scaling: Llama3Rope) -> Tensor:
    """Return rotary frequencies scaled as in Llama 3: those of fewer than `low` waves in the first
    `original_positions` positions are divided by `factor`, those of more than `high` are unchanged,
    and between them both are mixed linearly by the number of waves.

    Operations are in the order of transformers: at long positions the last bit of a frequency is
    visible in an angle.
    """
    waves = scaling.original_positions / (2 * math.pi / frequencies)
    unscaled_share = ((waves - scaling.low) / (scaling.high - scaling.low)).clamp(0, 1)
    return (1 - unscaled_share) * frequencies / scaling.factor + unscaled_share * frequencies


ROPE_SCALINGS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "linear": _scale_linear,
    "llama3": _scale_llama3,
}
