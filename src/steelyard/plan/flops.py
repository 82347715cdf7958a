"""FLOPs of a model from its shapes, in three conventions. docs/metrics.md explains them; tests
compare them with a profiler.

A matmul of [m, k] by [k, n] is 2·m·n·k FLOPs. All is computed from the counts of a sample in a
record: `tokens`, `logits` (rows of the vocabulary projection), `pairs` (query-key pairs under the
mask) and `square` (pairs without the mask). In a cloze the tokens of a context attend to all of it,
so that only pairs inside a span are fewer than their square.
"""

from collections.abc import Mapping

from steelyard.models import families
from steelyard.models.auto_shape import AutoModel
from steelyard.models.families import Forward
from steelyard.models.shapes import GlmModel, LlamaModel

Counts = Mapping[str, int]
Model = LlamaModel | GlmModel | AutoModel


def layer_parameters(model: Model) -> int:
    """Return the number of weights in the matrices of all layers, which every token is multiplied
    with.
    """
    return model.layers * families.row(model.family).layer_parameters(model)


def parameters(model: Model) -> int:
    """Return the number of all trained parameters of the model."""
    return layer_parameters(model) + families.row(model.family).other_parameters(model)


def forward(model: Model) -> Forward:
    """Return the forward FLOPs of a token, a query-key pair and a logit: computed from the
    matrices, or as counted on the whole model for families that say so.
    """
    counted_of = families.row(model.family).forward
    if counted_of is not None:
        return counted_of(model)
    # A query-key pair has two products: query by key, and weight by value.
    pair = 4 * model.layers * model.heads * model.dim
    return Forward(2 * layer_parameters(model), pair, 2 * model.vocab * model.hidden)


def attention(model: Model, counts: Counts) -> int:
    """Return the attention FLOPs of a forward, over the pairs under the mask."""
    return forward(model).pair * counts["pairs"]


def counted(model: Model, counts: Counts) -> int:
    """Return the matmul FLOPs of a forward as a profiler counts them: attention over all pairs,
    masked or not.
    """
    return weight_flops(model, counts) + forward(model).pair * counts["square"]


def causal(model: Model, counts: Counts) -> int:
    """Return the matmul FLOPs of a forward that the model's definition needs: only pairs under the
    mask.
    """
    return weight_flops(model, counts) + attention(model, counts)


def palm(model: Model, counts: Counts) -> int:
    """Return PaLM's count of a forward (Chowdhery et al. 2022, appendix B): 2N + 4·L·h·T per token,
    h being the width of all heads, N all parameters without the input embedding unless it is tied;
    position tables are included. A sliding window does not change it.
    """
    without_table = parameters(model) - (0 if model.tied else model.vocab * model.hidden)
    return 2 * without_table * counts["tokens"] + forward(model).pair * counts["square"]


def nominal(model: Model, counts: Counts) -> int | None:
    """Return two FLOPs per token and nominal parameter, as the published tables count a forward;
    None if the model has no nominal size.
    """
    return (
        None
        if model.nominal_parameters is None
        else int(2 * model.nominal_parameters) * counts["tokens"]
    )


def weight_flops(model: Model, counts: Counts) -> int:
    """Return the FLOPs of matmuls with weights in a forward, without attention."""
    each = forward(model)
    return each.token * counts["tokens"] + each.logit * counts["logits"]


CONVENTIONS = {"causal": causal, "palm": palm, "nominal": nominal}


def work(model: Model, counts: Counts, convention: str, forwards: int) -> int | None:
    """Return the FLOPs of `forwards` forwards (3 for a training step) in a convention: causal, palm
    or nominal; None if the convention has no number for this model. Raises KeyError for another
    convention.
    """
    one = CONVENTIONS[convention](model, counts)
    return None if one is None else forwards * one
