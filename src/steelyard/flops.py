"""FLOPs of a model from its shapes, in three conventions. docs/metrics.md explains them; tests hold them to a profiler.

A matmul of [m, k] by [k, n] is 2·m·n·k FLOPs. Everything is counted from what a batch's samples say was computed: `tokens`,
`logits` (rows of the vocabulary projection), `pairs` (query-key pairs under the causal mask) and `square` (without it).
"""

from collections.abc import Mapping

from steelyard.question import Model

Counts = Mapping[str, int]


def layer_parameters(model: Model) -> int:
    """Weights of all layers' matrices: what every token is multiplied with."""
    dim = model.hidden // model.heads
    qkv = model.hidden * (model.heads + 2 * model.kv_heads) * dim
    return model.layers * (qkv + model.hidden * model.hidden + 3 * model.hidden * model.ffn)


def parameters(model: Model) -> int:
    """All trained numbers of the model."""
    dim = model.hidden // model.heads
    norms = (2 * model.layers + 1) * model.hidden
    biases = model.layers * (model.heads + 2 * model.kv_heads) * dim if model.qkv_bias else 0
    tables = model.vocab * model.hidden * (1 if model.tied else 2)
    return layer_parameters(model) + norms + biases + tables


def counted(model: Model, counts: Counts) -> int:
    """Matmul FLOPs of a forward as a profiler sees them: attention over the whole square, masked or not."""
    return _matmuls(model, counts) + 4 * model.layers * model.hidden * counts["square"]


def causal(model: Model, counts: Counts) -> int:
    """Matmul FLOPs that the model's definition needs: only the pairs the causal mask leaves."""
    return _matmuls(model, counts) + 4 * model.layers * model.hidden * counts["pairs"]


def palm(model: Model, counts: Counts) -> int:
    """PaLM's count (Chowdhery et al. 2022, appendix B), forward: 2N + 4·L·h·T a token, N without the input table unless
    tied."""
    without_table = parameters(model) - (0 if model.tied else model.vocab * model.hidden)
    return 2 * without_table * counts["tokens"] + 4 * model.layers * model.hidden * counts["square"]


def nominal(model: Model, counts: Counts) -> int | None:
    """Two FLOPs per token and nominal parameter, as the published tables count; unknown where no nominal size is stated."""
    return None if model.nominal_parameters is None else int(2 * model.nominal_parameters) * counts["tokens"]


def _matmuls(model: Model, counts: Counts) -> int:
    return 2 * layer_parameters(model) * counts["tokens"] + 2 * model.vocab * model.hidden * counts["logits"]


CONVENTIONS = {"causal": causal, "palm": palm, "nominal": nominal}

# Forwards that a step is worth. Every matmul of a forward has two in its backward, one for each side; what is computed again
# to save memory is no work of the model.
FORWARDS = {"score": 1, "train": 3}


def work(model: Model, counts: Counts, convention: str, kind: str) -> int | None:
    """FLOPs of scored or trained tokens in a convention."""
    forward = CONVENTIONS[convention](model, counts)
    return None if forward is None else FORWARDS[kind] * forward
