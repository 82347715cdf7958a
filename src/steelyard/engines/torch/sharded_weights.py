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
from steelyard.models import llama_placements
from steelyard.models.llama import LlamaShape
from steelyard.models.llama_placements import WHOLE, Shard
from steelyard.weights import checkpoint_tensors as layouts
from steelyard.weights import llama_weights

# a parameter's name, and an empty tensor of its whole shape to fill
WholeParameters = Callable[[str, Tensor], Tensor]


def load_shards(
    model: nn.Module, job: Job, shape: LlamaShape, shard: Shard, dtype: torch.dtype
) -> tuple[dict[str, Any], Iterator[tuple[str, Tensor]]]:
    """Return (source of the weights for the record, iterator of (name, this shard's tensor on the
    device)) for the parameters that `model` names; `model` itself is not filled.

    Random from the case's seed, or read from the checkpoint in `job.weights` (progress goes to
    `job.report_loading`); raises RequestError if there is no readable checkpoint, or it does not
    fit the shape. Tensors are made in `dtype`, one by one as the iterator advances, each whole
    first.
    """
    names = [name for name, _ in model.named_parameters()]
    if job.weights is None:
        source: dict[str, Any] = {"source": "random", "seed": job.case.question.seed}
        make_whole = _random_parameters(job.case.question.seed, shape)
    else:
        checkpoint = llama_weights.open_llama_checkpoint(job.weights)
        make_whole = _checkpoint_parameters(checkpoint, shape, names, job.report_loading)
        source = llama_weights.describe_llama_source(checkpoint, shape)

    def parts() -> Iterator[tuple[str, Tensor]]:
        """Yield each parameter's name and this shard's part of it, in the order of `names`; each is
        drawn or read whole when it is asked for.
        """
        for name in names:
            size = llama_placements.flatten_logical_shape(
                name, llama_placements.find_placement(name).logical_shape(shape)
            )
            with torch.no_grad():
                whole = make_whole(
                    name, torch.empty(size, dtype=dtype, device=job.device.torch_device)
                )
            yield name, _take_shard(name, whole, shape, shard)

    return source, parts()


def _take_shard(name: str, whole: Tensor, shape: LlamaShape, shard: Shard) -> Tensor:
    """Return a tensor-parallel shard's part of a whole parameter as a copy of its own; the whole
    itself if it is not divided. Parts of a vocabulary may differ in size and be empty.
    """
    dim = llama_placements.find_flat_split(name)
    if dim is None or shard.count == 1:
        return whole
    if name in llama_placements.VOCABULARY_PARAMETERS:
        begin, end = llama_placements.find_shard_box(name, shape, shard)[0]
        return whole[begin:end].clone()
    return whole.chunk(shard.count, dim)[shard.index].contiguous().clone()


def _random_parameters(seed: int, shape: LlamaShape) -> WholeParameters:
    """Return a function (name, empty tensor of the whole shape) that fills the tensor with the
    parameter's initial values and returns it: matrices random from seed and name alone, norms 1,
    biases 0.
    """

    def fill(name: str, whole: Tensor) -> Tensor:
        """Fill the tensor in place with the initial values of parameter `name` and return it."""
        llama_weights.fill_random_parameter(name, whole, seed, shape)
        return whole

    return fill


def _checkpoint_parameters(
    checkpoint: layouts.LlamaCheckpoint,
    shape: LlamaShape,
    names: list[str],
    progress: layouts.ByteProgress | None,
) -> WholeParameters:
    """Return a function (name, empty tensor of the whole shape) that reads a parameter from a
    checkpoint into the tensor and returns it. Shapes and settings are checked here, and
    RequestError raised if they do not fit. `progress` is called with the bytes read and their total
    over `names`.
    """
    pieces = layouts.group_by_parameter(checkpoint.list_pieces(shape))
    checkpoint.check_values(shape)
    total = sum(
        layouts.count_box_elements(piece.box) * piece.dtype.itemsize
        for name in names
        for piece in pieces[name]
    )
    read_bytes = layouts.ByteCounter(progress, total)

    def read_parameter(name: str, whole: Tensor) -> Tensor:
        """Copy all pieces of parameter `name` from the checkpoint into the tensor, report the bytes
        to `progress`, and return the tensor.
        """
        box = llama_placements.find_shard_box(name, shape, WHOLE)
        view = llama_placements.view_logically(name, whole, shape, WHOLE)
        for piece in pieces[name]:
            layouts.copy_overlap(piece, piece.box, view, box)
            read_bytes.add(layouts.count_box_elements(piece.box) * piece.dtype.itemsize)
        return whole

    return read_parameter
