"""Weights of a tensor-parallel Llama: one parameter at a time is drawn or read whole, and each rank
keeps its shard.

So every plan begins with the same numbers, and no rank holds more than one parameter beyond its
own. llama_stage.py takes them for training.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from steelyard.engine.job import Job
from steelyard.models import placements
from steelyard.models.llama import LlamaShape
from steelyard.models.placements import WHOLE, Shard
from steelyard.weights import checkpoint as layouts
from steelyard.weights import load

# a parameter's name, and an empty tensor of its whole shape to fill
Wholes = Callable[[str, Tensor], Tensor]


def local_parameters(
    model: nn.Module, job: Job, shape: LlamaShape, share: Shard, kept: torch.dtype
) -> tuple[dict[str, Any], Iterator[tuple[str, Tensor]]]:
    """Return (source of the weights for the record, iterator of (name, this shard's tensor on the
    device)) for the parameters that `model` names.

    Random from the case's seed, or read from the checkpoint in `job.weights`; a checkpoint that
    does not fit the shape raises RequestError. Tensors are made in `dtype`, one by one as the
    iterator advances.
    """
    names = [name for name, _ in model.named_parameters()]
    if job.weights is None:
        source: dict[str, Any] = {"source": "random", "seed": job.case.question.seed}
        wholes = _random(job.case.question.seed, shape)
    else:
        checkpoint = load.open_folder(job.weights)
        wholes = _read(checkpoint, shape, names, job.loading)
        source = load.facts(checkpoint, shape)

    def parts() -> Iterator[tuple[str, Tensor]]:
        """Yield each parameter's name and this shard's part of it."""
        for name in names:
            size = placements.flat_shape(name, placements.placement(name).logical_shape(shape))
            with torch.no_grad():
                whole = wholes(name, torch.empty(size, dtype=kept, device=job.device.torch_device))
            yield name, _part(name, whole, shape, share)

    return source, parts()


def _part(name: str, whole: Tensor, shape: LlamaShape, share: Shard) -> Tensor:
    """Return a shard's part of a whole parameter as a tensor of its own; the whole itself if it is
    not divided. Parts of a vocabulary may differ in size.
    """
    dim = placements.flat_split(name)
    if dim is None or share.count == 1:
        return whole
    if name in placements.VOCABULARY:
        begin, end = placements.box(name, shape, share)[0]
        return whole[begin:end].clone()
    return whole.chunk(share.count, dim)[share.index].contiguous().clone()


def _random(seed: int, shape: LlamaShape) -> Wholes:
    """Return a function (name, empty tensor) that fills a whole parameter with the seed's random
    numbers and returns it.
    """

    def make(name: str, whole: Tensor) -> Tensor:
        """Fill the tensor with the parameter's initial values and return it."""
        load.fill_parameter(name, whole, seed, shape)
        return whole

    return make


def _read(
    checkpoint: layouts.Checkpoint,
    shape: LlamaShape,
    names: list[str],
    progress: layouts.ByteProgress | None,
) -> Wholes:
    """Return a function (name, empty tensor) that reads a whole parameter from a checkpoint. Shapes
    and settings are checked here, and RequestError raised if they do not fit. `progress` is called
    with the bytes read and their total over `names`.
    """
    pieces = layouts.by_parameter(checkpoint.pieces(shape))
    checkpoint.check_values(shape)
    total = sum(
        layouts.size(piece.box) * piece.dtype.itemsize for name in names for piece in pieces[name]
    )
    copied = layouts.Progress(progress, total)

    def read(name: str, whole: Tensor) -> Tensor:
        """Copy all pieces of the parameter into the tensor, report the bytes, and return it."""
        box = placements.box(name, shape, WHOLE)
        place = placements.logical_view(name, whole, shape, WHOLE)
        for piece in pieces[name]:
            layouts.copy(piece, piece.box, place, box)
            copied.add(layouts.size(piece.box) * piece.dtype.itemsize)
        return whole

    return read
