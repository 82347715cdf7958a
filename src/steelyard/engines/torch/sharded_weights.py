"""Weights of a model that is divided over devices: one parameter at a time is made or read whole, and each rank keeps its part.

So every plan begins with the same numbers, and no rank ever holds more than one parameter beyond its own.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from steelyard.engines.job import Job
from steelyard.models import placements
from steelyard.models.llama import LlamaShape
from steelyard.models.placements import WHOLE, Shard
from steelyard.models.tensors import local
from steelyard.weights import checkpoint as layouts
from steelyard.weights import load

Wholes = Callable[[str, Tensor], Tensor]  # a parameter's name, and an empty tensor of its whole shape to fill


def fill(model: nn.Module, job: Job, shape: LlamaShape, tensor: Shard, shards: Shard) -> dict[str, Any]:
    """Fill a share of a model, or a shard of that; returns where the weights came from, for the record."""
    question = job.case.question
    names = [name for name, _ in model.named_parameters()]
    if job.weights is None:
        source: dict[str, Any] = {"source": "random", "seed": question.seed}
        wholes = _random(question.seed, shape)
    else:
        checkpoint = load.open_folder(job.weights)
        wholes = _read(checkpoint, shape, names, job.loading)
        source = load.facts(checkpoint, shape)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            own = local(parameter)
            whole = wholes(name, own.new_empty(parameter.shape))
            own.copy_(_part(_part(whole, split(name), tensor), 0, shards))
    return source


def split(name: str) -> int | None:
    """The dimension of a parameter that tensor parallelism divides."""
    if placements.placement(name).split is None:
        return None
    return int(name.split(".")[-2] in placements.SUMMED)


def _part(whole: Tensor, dim: int | None, share: Shard) -> Tensor:
    """What a share holds; those at the end may have less than others, or nothing."""
    if dim is None or share.count == 1:
        return whole
    parts = whole.chunk(share.count, dim)
    return parts[share.index] if share.index < len(parts) else whole.narrow(dim, 0, 0)


def _random(seed: int, shape: LlamaShape) -> Wholes:
    def make(name: str, whole: Tensor) -> Tensor:
        load.fill_random(_Named(name, whole), seed, shape)
        return whole

    return make


class _Named(nn.Module):
    """One parameter, with its name in the whole model, on which its random numbers depend."""

    def __init__(self, name: str, whole: Tensor) -> None:
        super().__init__()
        self.pair = name, nn.Parameter(whole, requires_grad=False)

    def named_parameters(self, *arguments: Any, **named: Any) -> Iterator[tuple[str, nn.Parameter]]:
        yield self.pair


def _read(checkpoint: layouts.Checkpoint, shape: LlamaShape, names: list[str], progress: layouts.ByteProgress | None) -> Wholes:
    pieces = layouts.by_parameter(checkpoint.pieces(shape))
    checkpoint.check_values(shape)
    total = sum(layouts.size(piece.box) * piece.dtype.itemsize for name in names for piece in pieces[name])
    done = 0

    def read(name: str, whole: Tensor) -> Tensor:
        nonlocal done
        box = placements.box(name, shape, WHOLE)
        place = placements.logical_view(name, whole, shape, WHOLE)
        for piece in pieces[name]:
            layouts.copy(piece, piece.box, place, box)
            done += layouts.size(piece.box) * piece.dtype.itemsize
            if progress is not None:
                progress(done, total)
        return whole

    return read
