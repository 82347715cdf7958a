"""GLM (Du et al. 2021): LayerNorm before each part, learned positions and block positions, biases,
tanh-GELU, tied output.

Tokens are packed as models/glm_attention.py says: nothing is padded, and a linear layer sees one
large matrix. QKV is one matrix of the rows [Q; K; V]. Modules have the names of GLM's own
checkpoints.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from math import sqrt

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from steelyard.models.glm_attention import ClozeLayout, attend
from steelyard.models.shapes import GlmModel
from steelyard.models.tensors import without_values

STD = 0.02  # of GLM's initialisation, for matrices and tables but for the two below
# of each layer: what goes into the residual stream
OUTPUTS = ("attention.dense.weight", "mlp.dense_4h_to_h.weight")

GlmStreams = tuple[Tensor, Tensor]
Layer = Callable[[Tensor, Tensor, ClozeLayout, str, float], GlmStreams]


class Attention(nn.Module):
    def __init__(self, shape: GlmModel) -> None:
        super().__init__()
        self.query_key_value = nn.Linear(shape.hidden, 3 * shape.hidden)
        self.dense = nn.Linear(shape.hidden, shape.hidden)


class Mlp(nn.Module):
    def __init__(self, shape: GlmModel) -> None:
        super().__init__()
        self.dense_h_to_4h = nn.Linear(shape.hidden, shape.ffn)
        self.dense_4h_to_h = nn.Linear(shape.ffn, shape.hidden)


class GlmBlock(nn.Module):
    """One layer. The residual stream comes as (x, delta): what is to be dropped of delta is not
    yet, nor the rest added, so that a compiler can fuse both with the norm that follows."""

    def __init__(self, shape: GlmModel) -> None:
        super().__init__()
        self.heads = shape.heads
        self.input_layernorm = nn.LayerNorm(shape.hidden, shape.norm_eps)
        self.attention = Attention(shape)
        self.post_attention_layernorm = nn.LayerNorm(shape.hidden, shape.norm_eps)
        self.mlp = Mlp(shape)

    def forward(
        self, x: Tensor, delta: Tensor, rows: ClozeLayout, kernel: str, dropout: float
    ) -> GlmStreams:
        x, normed = joined(x, delta, self.input_layernorm, dropout)
        qkv = split(self.attention.query_key_value(normed), self.heads)
        seen = attend(qkv, rows, kernel, dropout).flatten(1)
        x, normed = joined(x, self.attention.dense(seen), self.post_attention_layernorm, dropout)
        return x, self.mlp.dense_4h_to_h(F.gelu(self.mlp.dense_h_to_4h(normed), approximate="tanh"))


def split(qkv: Tensor, heads: int) -> Tensor:
    """[T, 3, H, D]."""
    out: Tensor = qkv.unflatten(-1, (3, heads, -1))  # type: ignore[no-untyped-call]
    return out


def joined(x: Tensor, delta: Tensor, norm: nn.LayerNorm, dropout: float) -> GlmStreams:
    """The residual stream, and its norm."""
    x = x + F.dropout(delta, dropout)
    return x, F.layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)


class Transformer(nn.Module):
    def __init__(self, shape: GlmModel) -> None:
        super().__init__()
        self.position_embeddings = nn.Embedding(shape.positions + 1, shape.hidden)
        self.block_position_embeddings = nn.Embedding(shape.positions + 1, shape.hidden)
        self.layers = nn.ModuleList(GlmBlock(shape) for _ in range(shape.layers))
        self.final_layernorm = nn.LayerNorm(shape.hidden, shape.norm_eps)


class Glm(nn.Module):
    def __init__(self, shape: GlmModel) -> None:
        super().__init__()
        self.shape = shape
        self.word_embeddings = nn.Embedding(shape.vocab, shape.hidden)
        self.transformer = Transformer(shape)

    def embed(self, tokens: Tensor, positions: Tensor, blocks: Tensor) -> Tensor:
        """The sum of a token's three rows."""
        below = self.transformer
        placed = below.position_embeddings(positions) + below.block_position_embeddings(blocks)
        out: Tensor = self.word_embeddings(tokens) + placed
        return out

    def streams(
        self,
        embedded: Tensor,
        rows: ClozeLayout,
        kernel: str,
        dropout: float,
        layers: Sequence[Layer] = (),
    ) -> GlmStreams:
        """The residual stream behind the last layer, its last part not yet added: [T, hidden] each.
        `layers` stand in for the model's own, compiled ones say."""
        x, delta = torch.zeros_like(embedded), embedded
        chosen: Iterable[Layer] = layers or self.transformer.layers
        for layer in chosen:
            x, delta = layer(x, delta, rows, kernel, dropout)
        return x, delta

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        blocks: Tensor,
        rows: ClozeLayout,
        kernel: str,
        dropout: float = 0.0,
    ) -> Tensor:
        """Logits of the spans' tokens only: [S, vocab]."""
        x, delta = self.streams(self.embed(tokens, positions, blocks), rows, kernel, dropout)
        n = rows.context_tokens
        normed = joined(x[n:], delta[n:], self.transformer.final_layernorm, dropout)[1]
        return F.linear(normed, self.word_embeddings.weight)


def build(shape: GlmModel, device: torch.device, dtype: torch.dtype) -> Glm:
    """A model on the device, without gradients. Its memory is not initialised: fill or load it
    next.
    """
    with without_values(device, dtype):
        model = Glm(shape)
    return model.requires_grad_(False)


def fill_random(model: Glm, seed: int) -> None:
    """Random weights as GLM begins with: normal in matrices and tables, ones and zeros in norms,
    zeros in biases. What a layer adds to the residual stream is smaller by the root of the number
    of such parts, two a layer, as in GLM's own program (`scaled_init_method`). The values of a
    parameter depend on the seed, its name, shape, dtype and kind of device, and those of such a
    part on the number of layers."""
    scaled = STD / sqrt(2 * model.shape.layers)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
            generator = torch.Generator(parameter.device).manual_seed(
                int.from_bytes(digest[:8], "big") >> 1
            )
            parameter.normal_(0.0, scaled if name.endswith(OUTPUTS) else STD, generator=generator)
