"""Bytes that decoding must read from memory, from shapes: the weights once in every step, and the
keys and values of every sequence's context.

Weights are the layers' matrices and the output head, in the types that they are stored in. The rows
of the embedding that a step looks up, norms and biases are negligible beside them. Convention
`CONVENTION`.
"""

from steelyard.case.precision import Precision
from steelyard.models.auto_shape import AutoModel
from steelyard.models.shapes import GlmModel, LlamaModel
from steelyard.plan.flops import count_layer_parameters

CONVENTION = "weights-once-and-kv/1"
BYTES = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 1}
# what everything but the layers' matrices is stored and computed in where these are in fp8
BESIDE_FP8 = "bf16"
ModelShape = LlamaModel | GlmModel | AutoModel


def count_weight_bytes(model: ModelShape, precision: Precision) -> int | None:
    """Return the bytes of the weights that a decode step reads; None for a model whose matrices are
    not known (family `auto`).
    """
    if isinstance(model, AutoModel):
        return None
    head = BESIDE_FP8 if precision.weights == "fp8" else precision.weights
    layers = count_layer_parameters(model) * BYTES[precision.weights]
    return layers + model.vocab * model.hidden * BYTES[head]


def count_kv_bytes(model: ModelShape, precision: Precision) -> int | None:
    """Return the bytes of the keys and values of one token of a context, in all layers; heads that
    share keys share their bytes. None for a model of which they are not known.
    """
    if isinstance(model, AutoModel):
        return None
    activations = BESIDE_FP8 if precision.matmul == "fp8" else precision.matmul
    size = BYTES[precision.kv or activations]
    return 2 * model.layers * model.kv_heads * model.dim * size


def count_decode_bytes(
    model: ModelShape, precision: Precision, steps: int, context_tokens: int
) -> int | None:
    """Return the bytes that so many decode steps read whose sequences have so many tokens of
    context in all; None for a model of which they are not known.
    """
    weights, kv = count_weight_bytes(model, precision), count_kv_bytes(model, precision)
    return None if weights is None or kv is None else steps * weights + context_tokens * kv
