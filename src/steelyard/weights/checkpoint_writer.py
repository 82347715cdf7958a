"""Plan the files of a checkpoint in Hugging Face's or Megatron's format, and write them one tensor
at a time.

weights/convert.py makes a plan from the model's shape (which tensors each file holds, before any
value is read), and then calls each file's `write` with a function that makes a tensor's values.
"""

import argparse
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from steelyard.files import sync_file
from steelyard.models.llama import LlamaShape
from steelyard.models.llama_placements import Shard
from steelyard.models.shapes import count_padded_vocab_rows
from steelyard.weights import hf_checkpoint, megatron_args, megatron_checkpoint
from steelyard.weights.checkpoint_tensors import DTYPES, TensorPart
from steelyard.weights.hf_config import CONFIG_NAME, INDEX_NAME, SINGLE_NAME
from steelyard.weights.hf_families import choose_written_family, make_hf_config
from steelyard.weights.megatron_args import NAME_ROOT, STACK_PREFIXES, to_megatron_name
from steelyard.weights.torch_files import read_torch_file as read_saved

MAX_FILE_BYTES = 5 << 30  # of a safetensors file with more than one tensor

MakeTensor = Callable[["PlannedTensor"], Tensor]
OnWritten = Callable[["PlannedTensor"], None]
DtypeOf = Callable[[TensorPart], str]


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor that is to be written: its `name` in the file, the `part` (box of a parameter,
    TensorPart) it holds, and its `dtype` such as `BF16`; `nbytes` is its size with padding.
    """

    name: str
    part: TensorPart
    dtype: str

    @property
    def nbytes(self) -> int:
        """Return the tensor's size in bytes, padding included."""
        return torch.Size(self.part.logical_shape).numel() * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class PlanRequest:
    """What a plan of a checkpoint's files is made from, whatever the source's format: the model's
    `shape`; `dtype_of`, which returns the dtype name (`BF16`) of each part that is to be written;
    and the source's `iteration` (a number as text or `release`; None if it has none) and `step` (0
    if none).
    """

    shape: LlamaShape
    dtype_of: DtypeOf
    iteration: str | None
    step: int


@dataclass(frozen=True)
class PlannedFile:
    """A file with `tensors` (PlannedTensor, in order) that is to be written; `name` is its path
    relative to the target folder, `nbytes` the size of its tensors.

    `write` is called with its path, this object, a function that makes a planned tensor's values,
    and one that is called after each written tensor.
    """

    name: str
    tensors: tuple[PlannedTensor, ...]
    write: Callable[[Path, "PlannedFile", MakeTensor, OnWritten], None]

    @property
    def nbytes(self) -> int:
        """Return the size of the file's tensors in bytes."""
        return sum(planned.nbytes for planned in self.tensors)


@dataclass(frozen=True)
class FilePlan:
    """All files of a checkpoint, planned by `plan_hf` or `plan_megatron`: `files`, those with
    tensors, and `small_files` (content by name: config, index, tracker) that are written after them
    and make the folder a checkpoint. `names` lists all in the order of writing.
    """

    files: tuple[PlannedFile, ...]
    small_files: dict[str, bytes]

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of all files of the planned checkpoint, relative to its folder, in the
        order of writing: those with tensors, then the small ones.
        """
        return (*(file.name for file in self.files), *self.small_files)


def _to_json_bytes(value: Any) -> bytes:
    """Return a value as indented JSON bytes with sorted keys and a line feed at the end."""
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()


def plan_hf(request: PlanRequest, tp: int) -> FilePlan:
    """Plan a Hugging Face folder: safetensors files of at most `MAX_FILE_BYTES` of tensors each
    (more only for a single larger one), an index if there are several, and config.json, whose dtype
    is that of most bytes. Nothing is written. `tp` is ignored.

    Where the shape has QKV biases and its model type then has one of the output projection, a zero
    one is added. Raise RequestError as `request.dtype_of` does.
    """
    shape = request.shape
    parts = dict(hf_checkpoint.map_hf_tensors(shape))
    if shape.qkv_bias and choose_written_family(shape).out_bias:
        for i in range(shape.layers):
            zero = TensorPart(f"layers.{i}.out.bias", ((0, 0),), (shape.hidden,))
            parts[f"model.layers.{i}.self_attn.o_proj.bias"] = zero
    groups: list[list[PlannedTensor]] = [[]]
    for planned in (
        PlannedTensor(name, part, request.dtype_of(part)) for name, part in parts.items()
    ):
        if groups[-1] and sum(p.nbytes for p in groups[-1]) + planned.nbytes > MAX_FILE_BYTES:
            groups.append([])
        groups[-1].append(planned)
    count = len(groups)
    names = (
        [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
        if count > 1
        else [SINGLE_NAME]
    )
    files = tuple(
        PlannedFile(name, tuple(group), _write_safetensors)
        for name, group in zip(names, groups, strict=True)
    )
    small_files = {}
    if count > 1:
        file_of_tensor = {planned.name: file.name for file in files for planned in file.tensors}
        index = {
            "metadata": {"total_size": sum(file.nbytes for file in files)},
            "weight_map": file_of_tensor,
        }
        small_files[INDEX_NAME] = _to_json_bytes(index)
    config = make_hf_config(shape) | {
        "torch_dtype": str(DTYPES[_find_most_used_dtype(files)]).removeprefix("torch.")
    }
    return FilePlan(files, small_files | {CONFIG_NAME: _to_json_bytes(config)})


def _find_most_used_dtype(files: tuple[PlannedFile, ...]) -> str:
    """Return the name of the dtype that most bytes of the files' tensors have, such as `BF16`."""
    bytes_by_dtype = Counter[str]()
    for planned in (planned for file in files for planned in file.tensors):
        bytes_by_dtype[planned.dtype] += planned.nbytes
    return bytes_by_dtype.most_common(1)[0][0]


def plan_megatron(request: PlanRequest, tp: int) -> FilePlan:
    """Plan a Megatron checkpoint of `tp` shards in a folder `iter_NNNNNNN`, or `release` if the
    source has no iteration, with the vocabulary padded as Megatron does, and the tracker file that
    names it. Nothing is written.

    Raise RequestError if the shape has a feature that is not written in this format, or as
    `request.dtype_of` does.
    """
    shape = request.shape
    megatron_args.check_shape_supported(shape)
    rows = count_padded_vocab_rows(shape.vocab, tp)
    iteration = request.iteration or megatron_checkpoint.RELEASE
    folder = iteration if iteration == megatron_checkpoint.RELEASE else f"iter_{int(iteration):07}"
    shard_parts = [
        megatron_checkpoint.map_shard_tensors(shape, Shard(i, tp), rows) for i in range(tp)
    ]
    shards = [
        tuple(
            PlannedTensor(to_megatron_name(name), part, request.dtype_of(part))
            for name, part in parts.items()
        )
        for parts in shard_parts
    ]
    dtype = Counter(p.dtype for p in shards[0]).most_common(1)[0][0]
    files: list[PlannedFile] = []
    for i, shard in enumerate(shards):
        args = argparse.Namespace(**megatron_args.make_args(shape, Shard(i, tp), rows, dtype))
        extras = {"args": args, "checkpoint_version": 3.0, "iteration": request.step}
        files.append(
            PlannedFile(
                f"{folder}/mp_rank_{i:02}/{megatron_checkpoint.SHARD_FILE_NAME}",
                shard,
                partial(_write_shard, extras),
            )
        )
    return FilePlan(tuple(files), {megatron_checkpoint.TRACKER_NAME: f"{iteration}\n".encode()})


PLANNERS: dict[str, Callable[[PlanRequest, int], FilePlan]] = {
    "hf": plan_hf,
    "megatron": plan_megatron,
}


def _write_values(file: BinaryIO, tensor: Tensor) -> None:
    """Write a CPU tensor's bytes at the file's position."""
    file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)


def _write_safetensors(
    path: Path, file: PlannedFile, make_tensor: MakeTensor, on_written: OnWritten
) -> None:
    """Write a safetensors file to `path`, header first, then one tensor at a time as `make_tensor`
    returns it, and sync it to disk. `on_written` is called after each tensor. Raise OSError if it
    cannot be written.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for planned in file.tensors:
        offsets = [offset, offset + planned.nbytes]
        header[planned.name] = {
            "dtype": planned.dtype,
            "shape": list(planned.part.shape),
            "data_offsets": offsets,
        }
        offset = offsets[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for planned in file.tensors:
            _write_values(out, make_tensor(planned))
            on_written(planned)
        sync_file(out)


def _write_shard(
    extras: dict[str, Any],
    path: Path,
    file: PlannedFile,
    make_tensor: MakeTensor,
    on_written: OnWritten,
) -> None:
    """Write a Megatron shard to `path` as torch.save does, one tensor at a time, and sync it to
    disk; `on_written` is called after each.

    The file is first laid out with tensors without values, then each tensor is written at its
    offset. `extras` are the entries besides `model`. Raise OSError if the file cannot be written.
    """
    with FakeTensorMode(), torch.serialization.skip_data(materialize_fake_tensors=True):
        empty = {p.name: torch.empty(p.part.shape, dtype=DTYPES[p.dtype]) for p in file.tensors}
        try:
            torch.save(extras | {"model": {NAME_ROOT.rstrip("."): _nest_names(empty)}}, path)
        except RuntimeError as error:
            raise OSError(0, str(error).partition("\n")[0], str(path)) from error
    tensor_refs = dict(megatron_checkpoint.iterate_leaves(read_saved(path)["model"]))
    with path.open("r+b") as out:
        for planned in file.tensors:
            tensor_ref = tensor_refs[NAME_ROOT + planned.name]
            tensor = make_tensor(planned)
            if tensor_ref.nbytes != tensor.nbytes:
                raise RuntimeError(
                    f"{planned.name} has {tensor.nbytes} bytes, its place {tensor_ref.nbytes}"
                )
            out.seek(tensor_ref.offset_bytes)
            _write_values(out, tensor)
            del tensor  # free it before the next one is made
            on_written(planned)
        sync_file(out)


def _nest_names(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Return tensors (by dotted name) in nested dicts as Megatron's older files have them: below
    `encoder` the rest of the name is one key, all other names are split at each dot.
    """
    nested: dict[str, Any] = {}
    stack = STACK_PREFIXES[0]
    for name, tensor in tensors.items():
        words = (
            [stack[:-1], name.removeprefix(stack)] if name.startswith(stack) else name.split(".")
        )
        level = nested
        for word in words[:-1]:
            level = level.setdefault(word, {})
        level[words[-1]] = tensor
    return nested
