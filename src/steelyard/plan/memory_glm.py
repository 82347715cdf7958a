"""Predict the activations of a GLM in training from its shape: what the backward of a layer of
models/glm_fused.py needs of its forward, where its kernels run. plan/memory.py estimates from the
data's lengths how many tokens a micro-batch has.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from steelyard.models.shapes import GlmModel

WIDE = 4  # bytes of what is fp32 in any precision


@dataclass(frozen=True)
class GlmSaved:
    """Activations that a layer saves for its backward: how many numbers per token. `fp32` ones are
    4 bytes in any precision; `only_kernel` ones are saved with that attention kernel only.
    """

    name: str
    numbers: Callable[[GlmModel], int]
    wide: bool = False
    only: str | None = None


SAVED = (
    GlmSaved("residual stream into attention", lambda m: m.hidden),
    GlmSaved("its mean and scale", lambda m: 2, wide=True),
    GlmSaved("input of query_key_value", lambda m: m.hidden),
    GlmSaved("queries, keys and values", lambda m: 3 * m.hidden),
    GlmSaved("copies of the contexts' keys and values", lambda m: 2 * m.hidden, only="flash"),
    GlmSaved("output of attention", lambda m: m.hidden),
    GlmSaved("log-sum-exp of attention", lambda m: m.heads, wide=True),
    GlmSaved("residual stream into the MLP", lambda m: m.hidden),
    GlmSaved("its mean and scale", lambda m: 2, wide=True),
    GlmSaved("input of dense_h_to_4h", lambda m: m.hidden),
    GlmSaved("input of GELU", lambda m: m.ffn),
    GlmSaved("input of dense_4h_to_h", lambda m: m.ffn),
)


def layer_bytes(model: GlmModel, size: int, attention: str) -> int:
    """Return the bytes per token that one layer saves for its backward with an attention kernel,
    numbers having `size` bytes.
    """
    kept = [part for part in SAVED if part.only in (None, attention)]
    return sum(part.numbers(model) * (WIDE if part.wide else size) for part in kept)


def glm_bytes(
    model: GlmModel,
    size: int,
    recompute: Literal["none", "full"] = "none",
    attention: str = "flash",
) -> int:
    """Return the bytes per token of a micro-batch that all layers save; with recomputation `full`
    two hidden states for each layer, and one layer's activations.
    """
    one = layer_bytes(model, size, attention)
    return (
        model.layers * one if recompute == "none" else model.layers * 2 * model.hidden * size + one
    )


def logit_bytes(model: GlmModel, size: int) -> int:
    """Return the bytes per token of a span at the logits: three hidden states, the last norm's mean
    and scale, and the logits, which become their own gradient.
    """
    return 3 * model.hidden * size + 2 * WIDE + model.vocab * size
