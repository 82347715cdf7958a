"""Build a Llama, or a shard of one, on a device, and fill it with random weights.

Called by weights/load.py, and through the references in families.py.
"""

import hashlib

import torch
from torch import Tensor, nn

from steelyard.models import placements
from steelyard.models.llama import Llama, LlamaShape
from steelyard.models.placements import WHOLE, Shard
from steelyard.models.shapes import GlmModel, LlamaModel
from steelyard.models.tensors import without_values


def shape_of(model: LlamaShape | LlamaModel | GlmModel) -> LlamaShape:
    """Return the `LlamaShape` of a case's Llama; a `LlamaShape` is returned as it is. Raises
    TypeError for another family.
    """
    if isinstance(model, LlamaShape):
        return model
    if not isinstance(model, LlamaModel):
        raise TypeError(f"a model of family {model.family!r} is no Llama")
    told = {name: getattr(model, name) for name in type(model).model_fields}
    dims = {
        name: value for name, value in told.items() if name not in ("family", "nominal_parameters")
    }
    return LlamaShape(**dims | {"head_dim": model.dim})


def build(
    model: LlamaShape | LlamaModel, device: torch.device, dtype: torch.dtype, shard: Shard = WHOLE
) -> Llama:
    """Build a Llama, or the given shard of one, on the device, in eval mode with gradients disabled
    and its memory uninitialized: fill or load the weights next. Raises ValueError if the shape
    cannot be divided by the number of shards.
    """
    shape = shape_of(model)
    with without_values(device, dtype):
        made = Llama(placements.local(shape, shard))
    return made.requires_grad_(False).eval()


def parameters(model: nn.Module) -> int:
    """Return the number of a model's parameters; tied ones count once."""
    return sum(p.numel() for p in model.parameters())


def fill_random(
    model: nn.Module, seed: int, shape: LlamaShape | None = None, shard: Shard = WHOLE
) -> None:
    """Fill all parameters of a Llama, or of a shard, with random weights, in place: N(0, 1 /
    columns) in matrices, ones in norms, zeros in biases.

    This variance keeps the scale of activations, so that answers depend on the whole prompt at any
    model size. `shape` is that of the whole model (default: the model's own). Values depend on the
    seed and on the parameter's name, whole shape, dtype and kind of device, but not on rank, number
    of shards, order of calls, or memory layout of gate and up.
    """
    shape = model.shape if shape is None and isinstance(model, Llama) else shape
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            fill_parameter(name, parameter, seed, shape, shard)


def fill_parameter(
    name: str, parameter: Tensor, seed: int, shape: LlamaShape | None, shard: Shard = WHOLE
) -> None:
    """Fill one parameter, or a shard of it, with its random weights, in place, as
    `fill_random_llama_weights`. Rows that pad a divided vocabulary become zero.
    """
    if parameter.dim() == 1:
        parameter.fill_(0.0 if name.endswith("bias") else 1.0)
    elif shape is None or (shard.count == 1 and not placements.placement(name).swapped):
        _normal(parameter, name, seed)
    else:
        if shard.count > 1:
            parameter.zero_()  # rows that pad a vocabulary stay zero
        fill_place(name, placements.logical_view(name, parameter, shape, shard), seed, shape, shard)


def fill_place(
    name: str,
    place: Tensor,
    seed: int,
    shape: LlamaShape,
    shard: Shard = WHOLE,
    kept: torch.dtype | None = None,
) -> None:
    """Fill a shard's part of one matrix's logical view, in place, with its part of the random
    weights of the whole matrix, which is made and sliced.

    `dtype`, if given, is the type that values are drawn in before they are copied to `view`.
    """
    size = placements.placement(name).logical_shape(shape)
    whole = _normal(
        place.new_empty(placements.flat_shape(name, size), dtype=kept), name, seed
    ).view(size)
    place.copy_(whole[tuple(slice(*span) for span in placements.box(name, shape, shard))])


def _normal(parameter: Tensor, name: str, seed: int) -> Tensor:
    """Fill a matrix with N(0, 1 / columns), in place, from a generator seeded by seed and parameter
    name, and return it.
    """
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator(parameter.device).manual_seed(
        int.from_bytes(digest[:8], "big") >> 1
    )
    return parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
