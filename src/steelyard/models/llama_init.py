"""Build a Llama, or a shard of one, on a device, and fill it with random weights.

Called by weights/llama_weights.py, and through the references in families.py.
"""

import hashlib

import torch
from torch import Tensor, nn

from steelyard.models import llama_placements
from steelyard.models.llama import Llama, LlamaShape
from steelyard.models.llama_placements import WHOLE, Shard
from steelyard.models.shapes import GlmModel, LlamaModel
from steelyard.models.tensors import skip_initialization


def get_llama_shape(model: LlamaShape | LlamaModel | GlmModel) -> LlamaShape:
    """Return the `LlamaShape` of a case's Llama; a `LlamaShape` is returned as it is. Raises
    TypeError for another family.
    """
    if isinstance(model, LlamaShape):
        return model
    if not isinstance(model, LlamaModel):
        raise TypeError(f"a model of family {model.family!r} is not a Llama")
    fields = {name: getattr(model, name) for name in type(model).model_fields}
    dims = {
        name: value
        for name, value in fields.items()
        if name not in ("family", "nominal_parameters")
    }
    return LlamaShape(**dims | {"head_dim": model.dim})


def build_llama(
    model: LlamaShape | LlamaModel, device: torch.device, dtype: torch.dtype, shard: Shard = WHOLE
) -> Llama:
    """Return a Llama, or the given tensor-parallel shard of one, on the device, in eval mode with
    gradients disabled and its memory uninitialized: fill or load the weights next. `model` is the
    whole model's shape. Raises ValueError if the number of shards does not divide kv_heads and ffn.
    """
    shape = get_llama_shape(model)
    with skip_initialization(device, dtype):
        llama = Llama(llama_placements.make_shard_shape(shape, shard))
    return llama.requires_grad_(False).eval()


def count_parameters(model: nn.Module) -> int:
    """Return the number of a model's parameters; tied ones count once."""
    return sum(p.numel() for p in model.parameters())


def fill_random_llama_weights(
    model: nn.Module, seed: int, shape: LlamaShape | None = None, shard: Shard = WHOLE
) -> None:
    """Fill all parameters of a Llama, or of a shard, with random weights, in place: normal with
    variance 1 / columns in matrices, ones in norms, zeros in biases.

    This variance keeps the scale of activations, so that answers depend on the whole prompt at any
    model size. `shape` is that of the whole model and must be given for a shard; None takes a
    `Llama`'s own, and for other modules draws each parameter as it is stored. Values depend on the
    seed and on the parameter's name, whole shape, dtype and kind of device, but not on rank, number
    of shards, order of calls, or memory layout of gate and up.
    """
    shape = model.shape if shape is None and isinstance(model, Llama) else shape
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            fill_random_parameter(name, parameter, seed, shape, shard)


def fill_random_parameter(
    name: str, parameter: Tensor, seed: int, shape: LlamaShape | None, shard: Shard = WHOLE
) -> None:
    """Fill one parameter, or a shard of it, with its random weights, in place, as
    `fill_random_llama_weights`; `name` is its full name, `shape` the whole model's (None: the
    parameter is whole and drawn as it is stored). Rows that pad a divided vocabulary become zero.
    """
    if parameter.dim() == 1:
        parameter.fill_(0.0 if name.endswith("bias") else 1.0)
    elif shape is None or (shard.count == 1 and not llama_placements.find_placement(name).swapped):
        _fill_normal(parameter, name, seed)
    else:
        if shard.count > 1:
            parameter.zero_()  # rows that pad a vocabulary stay zero
        fill_random_view(
            name, llama_placements.view_logically(name, parameter, shape, shard), seed, shape, shard
        )


def fill_random_view(
    name: str,
    view: Tensor,
    seed: int,
    shape: LlamaShape,
    shard: Shard = WHOLE,
    dtype: torch.dtype | None = None,
) -> None:
    """Fill a shard's part of one matrix's logical view, in place, with its part of the random
    weights of the whole matrix, which is made and sliced.

    `dtype`, if given, is the type that values are drawn in before they are copied to `view`.
    """
    size = llama_placements.find_placement(name).logical_shape(shape)
    whole = _fill_normal(
        view.new_empty(llama_placements.flatten_logical_shape(name, size), dtype=dtype), name, seed
    ).view(size)
    view.copy_(
        whole[tuple(slice(*span) for span in llama_placements.find_shard_box(name, shape, shard))]
    )


def _fill_normal(parameter: Tensor, name: str, seed: int) -> Tensor:
    """Fill a matrix, in place, with normal numbers of variance 1 / columns from a generator seeded
    by seed and parameter name, and return it.
    """
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator(parameter.device).manual_seed(
        int.from_bytes(digest[:8], "big") >> 1
    )
    return parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
