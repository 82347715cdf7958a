"""FLOPs of a model from its shapes, in three conventions. docs/metrics.md explains them; tests
compare them with a profiler.

A matmul of [m, k] by [k, n] is 2·m·n·k FLOPs. All is computed from the counts of a sample in a
record: `tokens`, `logits` (rows of the vocabulary projection), `pairs` (query-key pairs under the
mask) and `square` (pairs without the mask). In a cloze the tokens of a context attend to all of it,
so that only pairs inside a span are fewer than their square.
"""

from collections.abc import Mapping
from typing import Literal

from steelyard.models import families
from steelyard.models.auto_shape import AutoModel
from steelyard.models.families import ForwardFlops
from steelyard.models.shapes import GlmModel, LlamaModel

Counts = Mapping[str, int]
ModelShape = LlamaModel | GlmModel | AutoModel
Convention = Literal["causal", "palm", "nominal"]


def count_layer_parameters(model: ModelShape) -> int:
    """Return the number of weights in the matrices of all layers, which every token is multiplied
    with.
    """
    return model.layers * families.find_family(model.family).count_layer_parameters(model)


def count_model_parameters(model: ModelShape) -> int:
    """Return the number of all trained parameters of the model: the layers' matrices and the
    family's others (embeddings, norms, biases).
    """
    return count_layer_parameters(model) + families.find_family(model.family).other_parameters(
        model
    )


def get_forward_flops(model: ModelShape) -> ForwardFlops:
    """Return the forward FLOPs of a token, of a query-key pair in all layers, and of a logit row:
    computed from the model's matrices and heads, or by the family's own function if it has one
    (models whose FLOPs were counted by running them).
    """
    count_forward = families.find_family(model.family).forward
    if count_forward is not None:
        return count_forward(model)
    # A query-key pair has two products: query by key, and weight by value.
    pair = 4 * model.layers * model.heads * model.dim
    return ForwardFlops(2 * count_layer_parameters(model), pair, 2 * model.vocab * model.hidden)


def count_attention_flops(model: ModelShape, counts: Counts) -> int:
    """Return the attention FLOPs of one forward in all layers, over the query-key pairs under the
    mask (`counts["pairs"]`); query by key and weight by value.
    """
    return get_forward_flops(model).pair * counts["pairs"]


def count_profiled_flops(model: ModelShape, counts: Counts) -> int:
    """Return the matmul FLOPs of one forward as a profiler counts them: weights, and attention over
    all pairs, masked or not (`counts["square"]`).
    """
    return count_weight_flops(model, counts) + get_forward_flops(model).pair * counts["square"]


def count_causal_flops(model: ModelShape, counts: Counts) -> int:
    """Return the matmul FLOPs of one forward that the model's definition needs: weights, and
    attention over pairs under the mask only (`counts["pairs"]`). Reads counts "tokens", "logits"
    and "pairs".
    """
    return count_weight_flops(model, counts) + count_attention_flops(model, counts)


def count_palm_flops(model: ModelShape, counts: Counts) -> int:
    """Return PaLM's count of a forward (Chowdhery et al. 2022, appendix B): 2N + 4·L·h·T per token,
    h being the width of all heads, N all parameters without the input embedding unless it is tied;
    position tables are included. T·tokens is `counts["square"]`. A sliding window does not change
    it.
    """
    without_table = count_model_parameters(model) - (
        0 if model.tied else model.vocab * model.hidden
    )
    return 2 * without_table * counts["tokens"] + get_forward_flops(model).pair * counts["square"]


def count_nominal_flops(model: ModelShape, counts: Counts) -> int | None:
    """Return two FLOPs per token and nominal parameter, as the published tables count a forward;
    None if the model has no nominal size.
    """
    return (
        None
        if model.nominal_parameters is None
        else int(2 * model.nominal_parameters) * counts["tokens"]
    )


def count_weight_flops(model: ModelShape, counts: Counts) -> int:
    """Return the FLOPs of matmuls with weights in one forward, without attention: the layers for
    each of `counts["tokens"]`, the output matrix for each of `counts["logits"]`.
    """
    forward_flops = get_forward_flops(model)
    return forward_flops.token * counts["tokens"] + forward_flops.logit * counts["logits"]


CONVENTIONS = {
    "causal": count_causal_flops,
    "palm": count_palm_flops,
    "nominal": count_nominal_flops,
}


def count_flops(
    model: ModelShape, counts: Counts, convention: Convention, forwards: int
) -> int | None:
    """Return the FLOPs of `forwards` forwards (3 for a training step) over all work in `counts`, in
    a convention: causal, palm or nominal; None if the model has no nominal size. Raises ValueError
    for another convention.
    """
    if convention not in CONVENTIONS:
        raise ValueError(f"convention {convention!r}; allowed: {', '.join(CONVENTIONS)}")
    forward_flops = CONVENTIONS[convention](model, counts)
    return None if forward_flops is None else forwards * forward_flops
