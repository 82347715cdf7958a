"""Weights of a Llama, or of a share of one: random ones from a seed, or a checkpoint's, streamed.

Loading reads one tensor at a time from the mapped file straight into its place in the model, so host memory never holds
a second copy. All headers are checked before the first byte of data is copied: a wrong folder fails at once.
"""

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from steelyard.case.question import GlmModel, Model
from steelyard.errors import RequestError
from steelyard.models import placements
from steelyard.models.llama import Llama, LlamaShape
from steelyard.models.placements import Share
from steelyard.weights import checkpoint, huggingface, megatron
from steelyard.weights.checkpoint import Checkpoint, Progress

__all__ = ["Progress", "build", "copy_to_hf", "fill_random", "load", "open_folder", "parameters", "shape_of"]
WHOLE = Share()


def shape_of(model: Model | GlmModel) -> LlamaShape:
    """The shape of a case's Llama."""
    if not isinstance(model, Model):
        raise TypeError(f"a model of family {model.family!r} is no Llama")
    dims = model.model_dump(exclude={"family", "nominal_parameters"})
    return LlamaShape(**dims, head_dim=model.hidden // model.heads)


def build(shape: LlamaShape, device: torch.device, dtype: torch.dtype, share: Share = WHOLE) -> Llama:
    """A share of a model on the device, in eval mode, without gradients. Its memory is not initialised: fill or load it
    next."""
    with torch.device("meta"):
        model = Llama(placements.local(shape, share))
    model.to(dtype).to_empty(device=device)
    if shape.tied:  # to_empty makes one new parameter per module
        model.output.weight = model.embed.weight
    return model.requires_grad_(False).eval()


def parameters(model: nn.Module) -> int:
    """How many parameters a model has; tied ones count once."""
    return sum(p.numel() for p in model.parameters())


def fill_random(model: nn.Module, seed: int, shape: LlamaShape | None = None, share: Share = WHOLE) -> None:
    """Random weights: N(0, 1 / columns) in matrices, which keeps the scale of what passes through, so that answers depend
    on the whole prompt at any size; ones in norms, zeros in biases. The values of a parameter of the whole model depend
    on the seed, its name, shape, dtype and kind of device; not on rank, count of ranks, order, or the order of its rows
    in memory: they are made in that of its plain form."""
    shape = model.shape if shape is None and isinstance(model, Llama) else shape
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            elif shape is None or (share.count == 1 and not placements.placement(name).swapped):
                _normal(parameter, name, seed)
            else:
                form = placements.placement(name).form(shape)
                whole = _normal(parameter.new_empty(checkpoint.flat(name, form)), name, seed).view(form)
                parameter.zero_()  # rows that pad a vocabulary stay so
                part = whole[tuple(slice(*span) for span in placements.box(name, shape, share))]
                placements.plain(name, parameter, shape, share).copy_(part)


def _normal(parameter: Tensor, name: str, seed: int) -> Tensor:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator(parameter.device).manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)


def open_folder(folder: Path) -> Checkpoint:
    """The checkpoint in a folder, of either layout, its headers read and its tensors not."""
    if folder.is_file():
        raise RequestError(f"weights {str(folder)!r} is a file; give the folder of the checkpoint, or random")
    if not folder.is_dir():
        raise RequestError(f"weights folder {str(folder)!r} does not exist; give a folder of weights, or random")
    try:
        return _open_folder(folder)
    except OSError as error:
        raise RequestError(f"{folder}: cannot be read ({error.strerror}); make it readable, or give another folder") from error


def _open_folder(folder: Path) -> Checkpoint:
    _check_finished(folder)
    if any(folder.glob("*/mp_rank_00_model_states.pt")):
        raise RequestError(
            f"{folder}: holds a GLM in its own layout; run glm-large-record reads it, and what is here is for Llamas"
        )
    shards = megatron.find(folder)
    below = shards is not None and folder not in (shards, shards.parent)
    if shards is None and not huggingface.present(folder) and not (folder / huggingface.CONFIG_NAME).exists():
        raise RequestError(
            f"{folder.resolve()}: holds no checkpoint, neither Hugging Face's ({huggingface.CONFIG_NAME} and "
            f"{huggingface.SINGLE_NAME} or {huggingface.INDEX_NAME}) nor Megatron's ({megatron.TRACKER} or mp_rank_00); "
            "give a folder that does"
        )
    if shards is None or (below and huggingface.present(folder)):
        return huggingface.read(folder)
    if huggingface.present(folder):
        raise RequestError(f"{folder}: holds a Hugging Face and a Megatron checkpoint; give {shards}, or move one away")
    _check_finished(shards.parent)
    return megatron.read(shards)


def _check_finished(folder: Path) -> None:
    path = folder / checkpoint.JOURNAL
    if path.is_file() and checkpoint.read_journal(path).get("finished") is not True:
        raise RequestError(
            f"{path}: says that its folder is not complete; convert the same source to it again, which goes on where it stopped"
        )


def load(
    model: Llama, folder: Path, shape: LlamaShape, share: Share = WHOLE, progress: Progress | None = None
) -> dict[str, Any]:
    """Fill a share of a model of this shape from a checkpoint; returns where the weights came from, for the record.
    `progress` is told the bytes copied so far and in all, after every tensor."""
    source = open_folder(folder)
    pieces = source.pieces(shape)
    source.check_values(shape)
    boxes = {name: placements.box(name, shape, share) for name in checkpoint.parameters(shape)}
    wanted = list(checkpoint.common(pieces, boxes.__getitem__))
    total = sum(checkpoint.size(both) * piece.dtype.itemsize for piece, both in wanted)
    done = 0
    with torch.no_grad():
        for name in {"embed.weight", "output.weight"} & boxes.keys():
            rows = boxes[name][0]
            model.get_parameter(name)[rows[1] - rows[0] :].zero_()
        for piece, both in wanted:
            place = placements.plain(piece.parameter, model.get_parameter(piece.parameter), shape, share)
            checkpoint.copy(piece, both, place, boxes[piece.parameter])
            done += checkpoint.size(both) * piece.dtype.itemsize
            if progress is not None:
                progress(done, total)
    return facts(source, shape)


def facts(source: Checkpoint, shape: LlamaShape) -> dict[str, Any]:
    out: dict[str, Any] = {
        "source": source.layout,
        "files": [{"name": name, "bytes": size_bytes} for name, size_bytes in source.files],
        "header_sha256": source.digest(),
        "parameters": checkpoint.elements(shape),
    }
    return out if source.iteration is None else out | {"tp": source.tp, "iteration": source.iteration}


def copy_to_hf(model: Llama, parameters: dict[str, Tensor]) -> None:
    """The same weights into a Hugging Face model's parameters, by name; biases we do not have become zero."""
    parts = huggingface.parts(model.shape)
    with torch.no_grad():
        for name, parameter in parameters.items():
            if name in parts:
                part = parts[name]
                plain = placements.plain(part.parameter, model.get_parameter(part.parameter), model.shape, WHOLE)
                parameter.copy_(plain[tuple(slice(*span) for span in part.box)].reshape(parameter.shape))
            elif name.endswith("o_proj.bias"):
                parameter.zero_()
            elif not (model.shape.tied and name == "lm_head.weight"):
                raise ValueError(f"parameter {name!r} is none of a Llama's")
