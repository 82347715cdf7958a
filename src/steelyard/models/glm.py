"""GLM (Du et al. 2021): LayerNorm before each part, learned positions and block positions, biases,
tanh-GELU, output tied to the word embeddings.

Tokens are packed as cloze_attention.py describes: nothing is padded, and a linear layer sees one
matrix of all tokens. QKV is one matrix with the rows [Q; K; V]. Modules have the names of GLM's own
checkpoints. Trained by training/glm_trainer.py through glm_fused.py.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from math import sqrt

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from steelyard.models.cloze_attention import ClozeLayout, attend_cloze
from steelyard.models.shapes import GlmModel
from steelyard.models.tensors import skip_initialization

INIT_STD = 0.02  # GLM's initialization of matrices and embeddings, except the two below
# matrices of a layer whose output is added to the residual stream
RESIDUAL_OUTPUTS = ("attention.dense.weight", "mlp.dense_4h_to_h.weight")

GlmStreams = tuple[Tensor, Tensor]
GlmLayer = Callable[[Tensor, Tensor, ClozeLayout, str, float], GlmStreams]


class GlmAttention(nn.Module):
    """The two linear layers of a GLM block's attention, with biases: `query_key_value` (hidden to 3
    · hidden) and `dense` (hidden to hidden), named as in GLM's checkpoints. It has no forward;
    `GlmBlock` calls them.
    """

    def __init__(self, shape: GlmModel) -> None:
        """Create the layers: hidden to 3 · hidden, and hidden to hidden."""
        super().__init__()
        self.query_key_value = nn.Linear(shape.hidden, 3 * shape.hidden)
        self.dense = nn.Linear(shape.hidden, shape.hidden)


class GlmMlp(nn.Module):
    """The two linear layers of a GLM block's MLP, with biases: `dense_h_to_4h` (hidden to ffn) and
    `dense_4h_to_h` (back), named as in GLM's checkpoints. It has no forward; `GlmBlock` calls them.
    """

    def __init__(self, shape: GlmModel) -> None:
        """Create the layers: hidden to ffn, and back."""
        super().__init__()
        self.dense_h_to_4h = nn.Linear(shape.hidden, shape.ffn)
        self.dense_4h_to_h = nn.Linear(shape.ffn, shape.hidden)


class GlmBlock(nn.Module):
    """One transformer block of a GLM: modules input_layernorm, attention, post_attention_layernorm
    and mlp. Called with (x, delta, layout, kernel, dropout), it returns the next (x, delta), [T,
    hidden] each.

    The residual stream is x + dropout(delta): dropout and addition are still to do, so that a
    compiler can fuse both with the norm that follows.
    """

    def __init__(self, shape: GlmModel) -> None:
        """Create the norms and linear layers of one block."""
        super().__init__()
        self.heads = shape.heads
        self.input_layernorm = nn.LayerNorm(shape.hidden, shape.norm_eps)
        self.attention = GlmAttention(shape)
        self.post_attention_layernorm = nn.LayerNorm(shape.hidden, shape.norm_eps)
        self.mlp = GlmMlp(shape)

    def forward(
        self, x: Tensor, delta: Tensor, layout: ClozeLayout, kernel: str, dropout: float
    ) -> GlmStreams:
        """Return (x, delta), [T, hidden] each, after attention and MLP of this GLM block. `kernel`
        names a kernel of `CLOZE_KERNELS`; `dropout` is the probability, in attention and of both
        additions, also in eval mode.
        """
        x, normed = dropout_add_norm(x, delta, self.input_layernorm, dropout)
        qkv = split_glm_qkv(self.attention.query_key_value(normed), self.heads)
        attended = attend_cloze(qkv, layout, kernel, dropout).flatten(1)
        x, normed = dropout_add_norm(
            x, self.attention.dense(attended), self.post_attention_layernorm, dropout
        )
        return x, self.mlp.dense_4h_to_h(F.gelu(self.mlp.dense_h_to_4h(normed), approximate="tanh"))


def split_glm_qkv(qkv: Tensor, heads: int) -> Tensor:
    """View the output of a GLM's QKV matmul [T, 3 · hidden] as [T, 3, H, D]."""
    out: Tensor = qkv.unflatten(-1, (3, heads, -1))  # type: ignore[no-untyped-call]
    return out


def dropout_add_norm(x: Tensor, delta: Tensor, norm: nn.LayerNorm, dropout: float) -> GlmStreams:
    """Return x + dropout(delta) and its LayerNorm, [T, hidden] each. `dropout` is a probability; it
    is applied in eval mode too.
    """
    x = x + F.dropout(delta, dropout)
    return x, F.layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)


class GlmTransformer(nn.Module):
    """A GLM's parts behind the word embeddings, named as in GLM's checkpoints:
    `position_embeddings` and `block_position_embeddings` (tables of `positions` + 1 rows), `layers`
    (`GlmBlock`s) and `final_layernorm`. It has no forward; `Glm` calls them.
    """

    def __init__(self, shape: GlmModel) -> None:
        """Create position tables of `positions` + 1 rows, the blocks and the final norm."""
        super().__init__()
        self.position_embeddings = nn.Embedding(shape.positions + 1, shape.hidden)
        self.block_position_embeddings = nn.Embedding(shape.positions + 1, shape.hidden)
        self.layers = nn.ModuleList(GlmBlock(shape) for _ in range(shape.layers))
        self.final_layernorm = nn.LayerNorm(shape.hidden, shape.norm_eps)


class Glm(nn.Module):
    """A GLM: `word_embeddings`, which are the output matrix too, and `transformer`. `embed` gives
    the summed embeddings [T, hidden], `run_layers` the residual stream as (x, delta), calling the
    model the logits [S, vocab] of the spans' tokens. Built with the current default device and
    type.
    """

    def __init__(self, shape: GlmModel) -> None:
        """Create the modules with the current default device and type."""
        super().__init__()
        self.shape = shape
        self.word_embeddings = nn.Embedding(shape.vocab, shape.hidden)
        self.transformer = GlmTransformer(shape)

    def embed(self, tokens: Tensor, positions: Tensor, block_positions: Tensor) -> Tensor:
        """Return the sum of each token's word, position and block-position embeddings, [T, hidden].
        `positions` and `block_positions` are int64 [T], as `tokens`.
        """
        transformer = self.transformer
        position_sum = transformer.position_embeddings(
            positions
        ) + transformer.block_position_embeddings(block_positions)
        out: Tensor = self.word_embeddings(tokens) + position_sum
        return out

    def run_layers(
        self,
        embedded: Tensor,
        layout: ClozeLayout,
        kernel: str,
        dropout: float,
        layers: Sequence[GlmLayer] = (),
    ) -> GlmStreams:
        """Return the residual stream of a GLM after the last block as (x, delta), [T, hidden] each,
        with dropout and addition of delta still to do. `embedded` are the token embeddings [T,
        hidden]; `layers`, if any, are run in place of the model's own blocks, for example compiled
        ones.
        """
        x, delta = torch.zeros_like(embedded), embedded
        chosen: Iterable[GlmLayer] = layers or self.transformer.layers
        for layer in chosen:
            x, delta = layer(x, delta, layout, kernel, dropout)
        return x, delta

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        block_positions: Tensor,
        layout: ClozeLayout,
        kernel: str,
        dropout: float = 0.0,
    ) -> Tensor:
        """Return a GLM's logits of the spans' tokens only: [S, vocab]. Tokens are in the order of
        `ClozeLayout`, all contexts before all spans; the ids are int64 [T] each, `dropout` is a
        probability.
        """
        x, delta = self.run_layers(
            self.embed(tokens, positions, block_positions), layout, kernel, dropout
        )
        n = layout.context_tokens
        normed = dropout_add_norm(x[n:], delta[n:], self.transformer.final_layernorm, dropout)[1]
        return F.linear(normed, self.word_embeddings.weight)


def build_glm(shape: GlmModel, device: torch.device, dtype: torch.dtype) -> Glm:
    """Return a GLM on the device, with gradients disabled and its memory uninitialized: fill or
    load the weights next. It is in train mode, but only the argument `dropout` of a call decides on
    dropout.
    """
    with skip_initialization(device, dtype):
        model = Glm(shape)
    return model.requires_grad_(False)


def fill_random_glm_weights(model: Glm, seed: int) -> None:
    """Fill all parameters of a GLM with random initial weights, in place: normal with standard
    deviation 0.02 in matrices and embeddings, ones in norms, zeros in biases.

    The two matrices of a layer that write to the residual stream have the standard deviation
    divided by sqrt(2 · layers), as in GLM's own program (`scaled_init_method`). Values depend on
    the seed and on the parameter's name, shape, dtype and kind of device, not on the order of
    calls.
    """
    residual_std = INIT_STD / sqrt(2 * model.shape.layers)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
            generator = torch.Generator(parameter.device).manual_seed(
                int.from_bytes(digest[:8], "big") >> 1
            )
            parameter.normal_(
                0.0,
                residual_std if name.endswith(RESIDUAL_OUTPUTS) else INIT_STD,
                generator=generator,
            )
