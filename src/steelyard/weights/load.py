"""Weights of a Llama, or of a shard of one, from a checkpoint, streamed.

Loading reads one tensor at a time from the mapped file straight into its place in the model, so
host memory never holds a second copy. All headers are checked before the first byte of data is
copied: a wrong folder fails at once.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from steelyard.errors import RequestError
from steelyard.models import families, placements
from steelyard.models.llama import Llama, LlamaShape
from steelyard.models.llama_init import build, fill_parameter, fill_place, fill_random, shape_of
from steelyard.models.placements import WHOLE, Shard
from steelyard.weights import checkpoint, huggingface, megatron
from steelyard.weights.checkpoint import ByteProgress, Checkpoint, Progress
from steelyard.weights.hf_config import CONFIG_NAME, INDEX_NAME, SINGLE_NAME

__all__ = [
    "WHOLE",
    "ByteProgress",
    "build",
    "copy_to_hf",
    "facts",
    "fill_parameter",
    "fill_place",
    "fill_random",
    "holds",
    "load",
    "load_places",
    "open_folder",
    "shape_of",
]


def holds(folder: Path) -> bool:
    """Whether a folder holds weights of a Llama, of either format."""
    return megatron.holds(folder) or huggingface.holds(folder)


def open_folder(folder: Path) -> Checkpoint:
    """The checkpoint in a folder, of either format, its headers read and its tensors not."""
    if folder.is_file():
        raise RequestError(
            f"weights {str(folder)!r} is a file; give the folder of the checkpoint, or random"
        )
    if not folder.is_dir():
        raise RequestError(
            f"weights folder {str(folder)!r} does not exist; give a folder of weights, or random"
        )
    with checkpoint.readable(folder):
        return _open_folder(folder)


def _open_folder(folder: Path) -> Checkpoint:
    _check_finished(folder)
    checkpoint.check_family(folder, families.LLAMA.name)
    shards = megatron.find(folder)
    below = shards is not None and folder not in (shards, shards.parent)
    if shards is None and not huggingface.present(folder) and not (folder / CONFIG_NAME).exists():
        raise RequestError(
            f"{folder.resolve()}: holds no checkpoint, neither Hugging Face's ({CONFIG_NAME} and "
            f"{SINGLE_NAME} or {INDEX_NAME}) nor Megatron's ({megatron.TRACKER} or mp_rank_00); "
            "give a folder that does"
        )
    if shards is None or (below and huggingface.present(folder)):
        return huggingface.read(folder)
    if huggingface.present(folder):
        raise RequestError(
            f"{folder}: holds a Hugging Face and a Megatron checkpoint; give {shards}, or move one"
            " away"
        )
    _check_finished(shards.parent)
    return megatron.read(shards)


def _check_finished(folder: Path) -> None:
    path = folder / checkpoint.JOURNAL
    if path.is_file() and checkpoint.read_journal(path).get("finished") is not True:
        raise RequestError(
            f"{path}: says that its folder is not complete; convert the same source to it again,"
            " which goes on where it stopped"
        )


def load(
    model: Llama,
    folder: Path,
    shape: LlamaShape,
    shard: Shard = WHOLE,
    progress: ByteProgress | None = None,
) -> dict[str, Any]:
    """Fill a shard of a model of this shape from a checkpoint; returns where the weights came from,
    for the record. `progress` is told the bytes copied so far and in all, after every tensor."""
    with torch.no_grad():
        places = {}
        for name in checkpoint.parameters(shape):
            parameter = model.get_parameter(name)
            if name in ("embed.weight", "output.weight"):
                parameter.zero_()  # rows that pad a vocabulary stay so
            places[name] = placements.logical_view(name, parameter, shape, shard)
    return load_places(places, folder, shape, shard, progress)


def load_places(
    places: Mapping[str, Tensor],
    folder: Path,
    shape: LlamaShape,
    shard: Shard,
    progress: ByteProgress | None,
) -> dict[str, Any]:
    """The same into any places: views as large as a shard's boxes, by the names of the parameters
    that are wanted.
    """
    source = open_folder(folder)
    pieces = [piece for piece in source.pieces(shape) if piece.parameter in places]
    source.check_values(shape)
    boxes = {name: placements.box(name, shape, shard) for name in places}
    wanted = list(checkpoint.common(pieces, boxes.__getitem__))
    copied = Progress(
        progress, sum(checkpoint.size(both) * piece.dtype.itemsize for piece, both in wanted)
    )
    with torch.no_grad():
        for piece, both in wanted:
            checkpoint.copy(piece, both, places[piece.parameter], boxes[piece.parameter])
            copied.add(checkpoint.size(both) * piece.dtype.itemsize)
    return facts(source, shape)


def facts(source: Checkpoint, shape: LlamaShape) -> dict[str, Any]:
    """Where weights came from, for the record."""
    headers = source.headers
    out = checkpoint.facts(headers, checkpoint.elements(shape))
    return (
        out
        if headers.iteration is None
        else out | {"tp": headers.tp, "iteration": headers.iteration}
    )


def copy_to_hf(model: Llama, parameters: dict[str, Tensor]) -> None:
    """The same weights into a Hugging Face model's parameters, by name; biases we do not have
    become zero.
    """
    parts = huggingface.parts(model.shape)
    with torch.no_grad():
        for name, parameter in parameters.items():
            if name in parts:
                part = parts[name]
                view = placements.logical_view(
                    part.parameter, model.get_parameter(part.parameter), model.shape, WHOLE
                )
                parameter.copy_(
                    view[tuple(slice(*span) for span in part.box)].reshape(parameter.shape)
                )
            elif name.endswith("o_proj.bias"):
                parameter.zero_()
            elif not (model.shape.tied and name == "lm_head.weight"):
                raise ValueError(f"parameter {name!r} is none of a Llama's")
