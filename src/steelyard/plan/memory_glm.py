"""Predict the activations of a GLM in training from its shape: what the backward of a layer of
models/glm_fused.py needs of its forward, where its kernels run. plan/memory.py estimates from the
data's lengths how many tokens a micro-batch has.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from steelyard.models.shapes import GlmModel

ClozeKernel = Literal["flash", "packed", "padded"]  # of models/cloze_attention.py
FP32_BYTES = 4  # bytes of what is fp32 in any precision


@dataclass(frozen=True)
class SavedGlmActivation:
    """A row of the table `SAVED`: activations that a GLM layer saves for its backward. `name` says
    which, `numbers(model)` returns how many numbers per token. `fp32` ones are 4 bytes in any
    precision; `only_kernel` ones are saved with that attention kernel only ("flash", "packed" or
    "padded"; None: with all).
    """

    name: str
    numbers: Callable[[GlmModel], int]
    fp32: bool = False
    only_kernel: ClozeKernel | None = None


SAVED = (
    SavedGlmActivation("residual stream into attention", lambda m: m.hidden),
    SavedGlmActivation("its mean and scale", lambda m: 2, fp32=True),
    SavedGlmActivation("input of query_key_value", lambda m: m.hidden),
    SavedGlmActivation("queries, keys and values", lambda m: 3 * m.hidden),
    SavedGlmActivation(
        "copies of the contexts' keys and values", lambda m: 2 * m.hidden, only_kernel="flash"
    ),
    SavedGlmActivation("output of attention", lambda m: m.hidden),
    SavedGlmActivation("log-sum-exp of attention", lambda m: m.heads, fp32=True),
    SavedGlmActivation("residual stream into the MLP", lambda m: m.hidden),
    SavedGlmActivation("its mean and scale", lambda m: 2, fp32=True),
    SavedGlmActivation("input of dense_h_to_4h", lambda m: m.hidden),
    SavedGlmActivation("input of GELU", lambda m: m.ffn),
    SavedGlmActivation("input of dense_4h_to_h", lambda m: m.ffn),
)


def count_glm_layer_bytes(model: GlmModel, size: int, attention: ClozeKernel) -> int:
    """Return the bytes per token that one GLM layer saves for its backward with an attention kernel
    (`attention`: flash, packed or padded), numbers having `size` bytes, except those that are
    always fp32 (means, scales, log-sum-exp). Raises ValueError for another kernel.
    """
    if attention not in get_args(ClozeKernel):
        raise ValueError(f"attention {attention!r}; allowed: {', '.join(get_args(ClozeKernel))}")
    saved = [part for part in SAVED if part.only_kernel in (None, attention)]
    return sum(part.numbers(model) * (FP32_BYTES if part.fp32 else size) for part in saved)


def count_glm_bytes(
    model: GlmModel,
    size: int,
    recompute: Literal["none", "full"] = "none",
    attention: ClozeKernel = "flash",
) -> int:
    """Return the bytes per token of a micro-batch that all layers of a GLM save for the backward,
    numbers having `size` bytes; with recomputation `full` two hidden states for each layer, and all
    activations of one layer. Logits are not included.
    """
    layer = count_glm_layer_bytes(model, size, attention)
    return (
        model.layers * layer
        if recompute == "none"
        else model.layers * 2 * model.hidden * size + layer
    )


def count_glm_logit_bytes(model: GlmModel, size: int) -> int:
    """Return the bytes per token of a span at the logits: three hidden states, the last norm's mean
    and scale, and the logits, which become their own gradient.
    """
    return 3 * model.hidden * size + 2 * FP32_BYTES + model.vocab * size
