"""FLOPs of a model from its shapes, in three conventions. docs/metrics.md explains them; tests hold them to a profiler.

A matmul of [m, k] by [k, n] is 2·m·n·k FLOPs. Everything is counted from what a batch's samples say was computed: `tokens`,
`logits` (rows of the vocabulary projection), `pairs` (query-key pairs under the mask) and `square` (without it). In a cloze a
context's tokens see all of it, so that only the pairs inside a span are fewer than their square.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from steelyard.case.question import GlmModel, Model

Counts = Mapping[str, int]


@dataclass(frozen=True)
class Family:
    """Trained numbers of a family of models: what every token is multiplied with in a layer; and all else of the model."""

    layer: Callable[[Any], int]
    others: Callable[[Any], int]


def _llama_layer(model: Model) -> int:
    dim = model.hidden // model.heads
    qkv = model.hidden * (model.heads + 2 * model.kv_heads) * dim
    return qkv + model.hidden * model.hidden + 3 * model.hidden * model.ffn


def _llama_others(model: Model) -> int:
    dim = model.hidden // model.heads
    norms = (2 * model.layers + 1) * model.hidden
    biases = model.layers * (model.heads + 2 * model.kv_heads) * dim if model.qkv_bias else 0
    return norms + biases + model.vocab * model.hidden * (1 if model.tied else 2)


def _glm_layer(model: GlmModel) -> int:
    return 4 * model.hidden * model.hidden + 2 * model.hidden * model.ffn


def _glm_others(model: GlmModel) -> int:
    norms = (2 * model.layers + 1) * 2 * model.hidden
    biases = model.layers * (5 * model.hidden + model.ffn)
    return norms + biases + (model.vocab + 2 * (model.positions + 1)) * model.hidden


FAMILIES = {"llama": Family(_llama_layer, _llama_others), "glm": Family(_glm_layer, _glm_others)}


def layer_parameters(model: Model | GlmModel) -> int:
    """Weights of all layers' matrices: what every token is multiplied with."""
    return model.layers * FAMILIES[model.family].layer(model)


def parameters(model: Model | GlmModel) -> int:
    """All trained numbers of the model."""
    return layer_parameters(model) + FAMILIES[model.family].others(model)


def counted(model: Model | GlmModel, counts: Counts) -> int:
    """Matmul FLOPs of a forward as a profiler sees them: attention over the whole square, masked or not."""
    return _matmuls(model, counts) + 4 * model.layers * model.hidden * counts["square"]


def causal(model: Model | GlmModel, counts: Counts) -> int:
    """Matmul FLOPs that the model's definition needs: only the pairs the mask leaves."""
    return _matmuls(model, counts) + 4 * model.layers * model.hidden * counts["pairs"]


def palm(model: Model | GlmModel, counts: Counts) -> int:
    """PaLM's count (Chowdhery et al. 2022, appendix B), forward: 2N + 4·L·h·T a token, N without the input table unless
    tied; tables of positions are in it."""
    without_table = parameters(model) - (0 if model.tied else model.vocab * model.hidden)
    return 2 * without_table * counts["tokens"] + 4 * model.layers * model.hidden * counts["square"]


def nominal(model: Model | GlmModel, counts: Counts) -> int | None:
    """Two FLOPs per token and nominal parameter, as the published tables count; unknown where no nominal size is stated."""
    return None if model.nominal_parameters is None else int(2 * model.nominal_parameters) * counts["tokens"]


def _matmuls(model: Model | GlmModel, counts: Counts) -> int:
    return 2 * layer_parameters(model) * counts["tokens"] + 2 * model.vocab * model.hidden * counts["logits"]


CONVENTIONS = {"causal": causal, "palm": palm, "nominal": nominal}

# Forwards that a step is worth. Every matmul of a forward has two in its backward, one for each side; what is computed again
# to save memory is no work of the model.
FORWARDS = {"score": 1, "train": 3}


def work(model: Model | GlmModel, counts: Counts, convention: str, kind: str) -> int | None:
    """FLOPs of scored or trained tokens in a convention."""
    forward = CONVENTIONS[convention](model, counts)
    return None if forward is None else FORWARDS[kind] * forward
