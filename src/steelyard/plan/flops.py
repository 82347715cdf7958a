"""FLOPs of a model from its shapes, in three conventions. docs/metrics.md explains them; tests hold
them to a profiler.

A matmul of [m, k] by [k, n] is 2·m·n·k FLOPs. Everything is counted from what a batch's samples say
was computed: `tokens`, `logits` (rows of the vocabulary projection), `pairs` (query-key pairs under
the mask) and `square` (without it). In a cloze a context's tokens see all of it, so that only the
pairs inside a span are fewer than their square.
"""

from collections.abc import Mapping

from steelyard.models import families
from steelyard.models.auto_shape import AutoModel
from steelyard.models.families import Forward
from steelyard.models.shapes import GlmModel, LlamaModel

Counts = Mapping[str, int]
Model = LlamaModel | GlmModel | AutoModel


def layer_parameters(model: Model) -> int:
    """Weights of all layers' matrices: what every token is multiplied with."""
    return model.layers * families.row(model.family).layer_parameters(model)


def parameters(model: Model) -> int:
    """All trained numbers of the model."""
    return layer_parameters(model) + families.row(model.family).other_parameters(model)


def forward(model: Model) -> Forward:
    """What a token, a query-key pair and a logit cost: from the matrices, or as it was counted of
    the whole model.
    """
    counted_of = families.row(model.family).forward
    if counted_of is not None:
        return counted_of(model)
    # A pair of a query and a key: their product, and that with the value.
    pair = 4 * model.layers * model.heads * model.dim
    return Forward(2 * layer_parameters(model), pair, 2 * model.vocab * model.hidden)


def attention(model: Model, counts: Counts) -> int:
    """Of a forward, over the pairs that the mask leaves."""
    return forward(model).pair * counts["pairs"]


def counted(model: Model, counts: Counts) -> int:
    """Matmul FLOPs of a forward as a profiler sees them: attention over the whole square, masked or
    not.
    """
    return weight_flops(model, counts) + forward(model).pair * counts["square"]


def causal(model: Model, counts: Counts) -> int:
    """Matmul FLOPs that the model's definition needs: only the pairs the mask leaves."""
    return weight_flops(model, counts) + attention(model, counts)


def palm(model: Model, counts: Counts) -> int:
    """PaLM's count (Chowdhery et al. 2022, appendix B), forward: 2N + 4·L·h·T a token, h being the
    width of all heads, N without the input table unless tied; tables of positions are in it. A
    window does not change it."""
    without_table = parameters(model) - (0 if model.tied else model.vocab * model.hidden)
    return 2 * without_table * counts["tokens"] + forward(model).pair * counts["square"]


def nominal(model: Model, counts: Counts) -> int | None:
    """Two FLOPs per token and nominal parameter, as the published tables count; unknown where no
    nominal size is stated.
    """
    return (
        None
        if model.nominal_parameters is None
        else int(2 * model.nominal_parameters) * counts["tokens"]
    )


def weight_flops(model: Model, counts: Counts) -> int:
    """Of the products with weights in a forward; attention has none."""
    each = forward(model)
    return each.token * counts["tokens"] + each.logit * counts["logits"]


CONVENTIONS = {"causal": causal, "palm": palm, "nominal": nominal}


def work(model: Model, counts: Counts, convention: str, forwards: int) -> int | None:
    """Return the FLOPs of so many forwards in a convention; None where it does not say how many a
    forward has.
    """
    one = CONVENTIONS[convention](model, counts)
    return None if one is None else forwards * one
