"""Open a Llama checkpoint of either format and load it into a model, whole or one shard of it, one
tensor at a time.

Each tensor goes from the mapped file straight into the model, so host memory never holds a second
copy. All headers are checked before the first value is copied: a wrong folder fails at once.
Engines call this in a worker; functions that build a model and fill it with random weights are
exported again from models/llama_init.py.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from steelyard.errors import RequestError
from steelyard.models import families, llama_placements
from steelyard.models.llama import Llama, LlamaShape
from steelyard.models.llama_init import (
    build_llama,
    fill_random_llama_weights,
    fill_random_parameter,
    fill_random_view,
    get_llama_shape,
)
from steelyard.models.llama_placements import WHOLE, Shard
from steelyard.weights import checkpoint_tensors, hf_checkpoint, megatron_checkpoint
from steelyard.weights.checkpoint_tensors import ByteCounter, ByteProgress, LlamaCheckpoint
from steelyard.weights.hf_config import CONFIG_NAME, INDEX_NAME, SINGLE_NAME

__all__ = [
    "WHOLE",
    "ByteProgress",
    "build_llama",
    "copy_to_hf_model",
    "describe_llama_source",
    "fill_random_llama_weights",
    "fill_random_parameter",
    "fill_random_view",
    "get_llama_shape",
    "has_llama_checkpoint",
    "load_into_views",
    "load_llama",
    "open_llama_checkpoint",
]


def has_llama_checkpoint(folder: Path) -> bool:
    """Return whether a folder holds a Llama checkpoint, in Hugging Face's or Megatron's format.
    Raise OSError or RequestError if its files cannot be read.
    """
    return megatron_checkpoint.has_megatron_shards(folder) or hf_checkpoint.has_hf_llama(folder)


def open_llama_checkpoint(folder: Path) -> LlamaCheckpoint:
    """Open the Llama checkpoint in a folder, in Hugging Face's or Megatron's format: headers are
    read, values are not.

    A Megatron checkpoint that only a tracker in a subfolder names is ignored if the folder itself
    has Hugging Face weights. Raise RequestError if the folder does not exist, is a file or cannot
    be read, holds no checkpoint, a damaged one, one in both formats, one of another family, or an
    unfinished conversion.
    """
    if folder.is_file():
        raise RequestError(
            f"weights {str(folder)!r} is a file; give the folder of the checkpoint, or random"
        )
    if not folder.is_dir():
        raise RequestError(
            f"weights folder {str(folder)!r} does not exist; give a folder of weights, or random"
        )
    with checkpoint_tensors.refuse_unreadable(folder):
        return _open_llama_checkpoint(folder)


def _open_llama_checkpoint(folder: Path) -> LlamaCheckpoint:
    """Open a folder's checkpoint as `open_llama_checkpoint` does; OSError is passed on.

    A Megatron checkpoint that a tracker in a subfolder names is ignored if the folder itself has
    Hugging Face weights.
    """
    _check_finished(folder)
    checkpoint_tensors.check_family(folder, families.LLAMA.name)
    shards = megatron_checkpoint.find_shards_folder(folder)
    is_below = shards is not None and folder not in (shards, shards.parent)
    if (
        shards is None
        and not hf_checkpoint.has_weights_files(folder)
        and not (folder / CONFIG_NAME).exists()
    ):
        raise RequestError(
            f"{folder.resolve()}: holds no checkpoint, neither Hugging Face's ({CONFIG_NAME} and "
            f"{SINGLE_NAME} or {INDEX_NAME}) nor Megatron's ({megatron_checkpoint.TRACKER_NAME} or"
            " mp_rank_00); "
            "give a folder that does"
        )
    if shards is None or (is_below and hf_checkpoint.has_weights_files(folder)):
        return hf_checkpoint.open_hf_checkpoint(folder)
    if hf_checkpoint.has_weights_files(folder):
        raise RequestError(
            f"{folder}: holds a Hugging Face and a Megatron checkpoint; give {shards}, or move one"
            " away"
        )
    _check_finished(shards.parent)
    return megatron_checkpoint.open_megatron_checkpoint(shards)


def _check_finished(folder: Path) -> None:
    """Raise RequestError if a folder has a conversion's journal (conversion.json) that does not say
    it is finished; a folder without one passes.
    """
    path = folder / checkpoint_tensors.JOURNAL_NAME
    if path.is_file() and checkpoint_tensors.read_journal(path).get("finished") is not True:
        raise RequestError(
            f"{path}: the conversion into this folder is not finished; run the same conversion"
            " again to continue it"
        )


def load_llama(
    model: Llama,
    folder: Path,
    shape: LlamaShape,
    shard: Shard = WHOLE,
    progress: ByteProgress | None = None,
) -> dict[str, Any]:
    """Fill a Llama, which is shard `shard` of a model of this shape, from a checkpoint folder in
    place, and return where the weights came from (`describe_llama_source`).

    Embedding and output are set to zero first, so that rows that pad the vocabulary stay zero.
    `progress` is called after every tensor with the bytes copied so far and in all. Raise
    RequestError if the checkpoint is not of this model.
    """
    with torch.no_grad():
        views = {}
        for name in checkpoint_tensors.list_parameter_names(shape):
            parameter = model.get_parameter(name)
            if name in ("embed.weight", "output.weight"):
                parameter.zero_()  # rows that pad the vocabulary stay zero
            views[name] = llama_placements.view_logically(name, parameter, shape, shard)
    return load_into_views(views, folder, shape, shard, progress)


def load_into_views(
    views: Mapping[str, Tensor],
    folder: Path,
    shape: LlamaShape,
    shard: Shard,
    progress: ByteProgress | None,
) -> dict[str, Any]:
    """Fill tensors from a checkpoint folder in place, casting to their dtype, and return where the
    weights came from (`describe_llama_source`). The whole checkpoint is checked before the first
    value is copied.

    `views` are logical views by parameter name, each as large as the box of `shard`; other
    parameters are not loaded. `progress` is called after every tensor with the bytes copied so far
    and in all. Raise RequestError if the checkpoint is not of a model of this shape.
    """
    source = open_llama_checkpoint(folder)
    pieces = [piece for piece in source.list_pieces(shape) if piece.parameter in views]
    source.check_values(shape)
    boxes = {name: llama_placements.find_shard_box(name, shape, shard) for name in views}
    overlaps = list(checkpoint_tensors.find_overlaps(pieces, boxes.__getitem__))
    copied = ByteCounter(
        progress,
        sum(
            checkpoint_tensors.count_box_elements(overlap_box) * piece.dtype.itemsize
            for piece, overlap_box in overlaps
        ),
    )
    with torch.no_grad():
        for piece, overlap_box in overlaps:
            checkpoint_tensors.copy_overlap(
                piece, overlap_box, views[piece.parameter], boxes[piece.parameter]
            )
            copied.add(checkpoint_tensors.count_box_elements(overlap_box) * piece.dtype.itemsize)
    return describe_llama_source(source, shape)


def describe_llama_source(source: LlamaCheckpoint, shape: LlamaShape) -> dict[str, Any]:
    """Return where the weights of a Llama came from as a record stores it: the dict of
    `describe_source`, and for Megatron also `tp` (number of shards) and `iteration`.
    """
    headers = source.headers
    description = checkpoint_tensors.describe_source(
        headers, checkpoint_tensors.count_elements(shape)
    )
    return (
        description
        if headers.iteration is None
        else description | {"tp": headers.tp, "iteration": headers.iteration}
    )


def copy_to_hf_model(model: Llama, parameters: dict[str, Tensor]) -> None:
    """Copy the weights of a whole Llama of ours into the parameters of a Hugging Face model, which
    are by its names, in place and cast to their dtype; biases of output projections, which our
    model lacks, become zero.

    An output tied to the embedding is left alone. Raise ValueError for a parameter that no Llama
    has; parameters that are missing are not noticed.
    """
    parts = hf_checkpoint.map_hf_tensors(model.shape)
    with torch.no_grad():
        for name, parameter in parameters.items():
            if name in parts:
                part = parts[name]
                view = llama_placements.view_logically(
                    part.parameter, model.get_parameter(part.parameter), model.shape, WHOLE
                )
                parameter.copy_(
                    view[tuple(slice(*span) for span in part.box)].reshape(parameter.shape)
                )
            elif name.endswith("o_proj.bias"):
                parameter.zero_()
            elif not (model.shape.tied and name == "lm_head.weight"):
                raise ValueError(f"parameter {name!r} is not a parameter of a Llama model")
