"""A Llama on a device, or a shard of one, and random weights for it."""

import hashlib

import torch
from torch import Tensor, nn

from steelyard.models import placements
from steelyard.models.llama import Llama, LlamaShape
from steelyard.models.placements import WHOLE, Shard
from steelyard.models.shapes import GlmModel, LlamaModel
from steelyard.models.tensors import without_values


def shape_of(model: LlamaShape | LlamaModel | GlmModel) -> LlamaShape:
    """The shape of a case's Llama; a shape is its own."""
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
    """A shard of a model on the device, in eval mode, without gradients. Its memory is not
    initialised: fill or load it next."""
    shape = shape_of(model)
    with without_values(device, dtype):
        made = Llama(placements.local(shape, shard))
    return made.requires_grad_(False).eval()


def parameters(model: nn.Module) -> int:
    """How many parameters a model has; tied ones count once."""
    return sum(p.numel() for p in model.parameters())


def fill_random(
    model: nn.Module, seed: int, shape: LlamaShape | None = None, shard: Shard = WHOLE
) -> None:
    """Random weights: N(0, 1 / columns) in matrices, which keeps the scale of what passes through,
    so that answers depend on the whole prompt at any size; ones in norms, zeros in biases. The
    values of a parameter of the whole model depend on the seed, its name, shape, dtype and kind of
    device; not on rank, count of ranks, order, or the order of its rows in memory: they are made in
    that of its logical view."""
    shape = model.shape if shape is None and isinstance(model, Llama) else shape
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            fill_parameter(name, parameter, seed, shape, shard)


def fill_parameter(
    name: str, parameter: Tensor, seed: int, shape: LlamaShape | None, shard: Shard = WHOLE
) -> None:
    """Fill one parameter, or a shard of it, with its random numbers."""
    if parameter.dim() == 1:
        parameter.fill_(0.0 if name.endswith("bias") else 1.0)
    elif shape is None or (shard.count == 1 and not placements.placement(name).swapped):
        _normal(parameter, name, seed)
    else:
        if shard.count > 1:
            parameter.zero_()  # rows that pad a vocabulary stay so
        fill_place(name, placements.logical_view(name, parameter, shape, shard), seed, shape, shard)


def fill_place(
    name: str,
    place: Tensor,
    seed: int,
    shape: LlamaShape,
    shard: Shard = WHOLE,
    kept: torch.dtype | None = None,
) -> None:
    """The same of one matrix: a shard's part of its logical view, wherever that lies. The values
    are made in the type that weights are kept in, where the place has another."""
    size = placements.placement(name).logical_shape(shape)
    whole = _normal(
        place.new_empty(placements.flat_shape(name, size), dtype=kept), name, seed
    ).view(size)
    place.copy_(whole[tuple(slice(*span) for span in placements.box(name, shape, shard))])


def _normal(parameter: Tensor, name: str, seed: int) -> Tensor:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator(parameter.device).manual_seed(
        int.from_bytes(digest[:8], "big") >> 1
    )
    return parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
