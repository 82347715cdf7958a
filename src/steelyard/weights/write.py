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

from steelyard.files import synced
from steelyard.models.llama import LlamaShape
from steelyard.models.placements import Shard
from steelyard.models.shapes import padded_vocab_rows
from steelyard.weights import huggingface, megatron, megatron_args
from steelyard.weights.checkpoint import DTYPES, TensorPart
from steelyard.weights.hf_config import CONFIG_NAME, INDEX_NAME, SINGLE_NAME
from steelyard.weights.hf_families import written, written_as
from steelyard.weights.megatron_args import ROOT, STACKS, theirs
from steelyard.weights.torch_files import read as read_saved

MAX_FILE_BYTES = 5 << 30  # of a safetensors file with more than one tensor

Make = Callable[["Planned"], Tensor]
Tell = Callable[["Planned"], None]
DtypeOf = Callable[[TensorPart], str]


@dataclass(frozen=True)
class Planned:
    """A tensor that is to be written: its name in the file, the box of a parameter it holds, and
    its dtype such as `BF16`.
    """

    name: str
    part: TensorPart
    dtype: str

    @property
    def nbytes(self) -> int:
        """Return the tensor's size in bytes, padding included."""
        return torch.Size(self.part.logical_shape).numel() * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Planning:
    """What a plan is made from, whatever the source's format: the model's shape, a function that
    returns the dtype of each tensor, and iteration and step of the source (`iteration` is None if
    it has none).
    """

    shape: LlamaShape
    dtype_of: DtypeOf
    iteration: str | None
    step: int


@dataclass(frozen=True)
class File:
    """A file that is to be written. `write` is called with its path, this object, a function that
    makes a tensor's values, and one that is called after each written tensor.
    """

    name: str
    tensors: tuple[Planned, ...]
    write: Callable[[Path, "File", Make, Tell], None]

    @property
    def nbytes(self) -> int:
        """Return the size of the file's tensors in bytes."""
        return sum(planned.nbytes for planned in self.tensors)


@dataclass(frozen=True)
class FilePlan:
    """All files of a checkpoint: those with tensors, and the small ones (`small_files`, content by
    name) that are written after them and make the folder a checkpoint.
    """

    files: tuple[File, ...]
    last: dict[str, bytes]

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of all files, in the order of writing."""
        return (*(file.name for file in self.files), *self.last)


def _json(value: Any) -> bytes:
    """Return a value as indented JSON bytes with sorted keys and a line feed at the end."""
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()


def plan_hf(planning: Planning, tp: int) -> FilePlan:
    """Plan a Hugging Face folder: safetensors files of at most `MAX_FILE_BYTES` (more only for a
    single larger tensor), an index if there are several, and config.json. `tp` is ignored.

    Where the model type has a bias of the output projection, a zero one is written.
    """
    shape = planning.shape
    parts = dict(huggingface.parts(shape))
    if shape.qkv_bias and written_as(shape).out_bias:
        for i in range(shape.layers):
            zero = TensorPart(f"layers.{i}.out.bias", ((0, 0),), (shape.hidden,))
            parts[f"model.layers.{i}.self_attn.o_proj.bias"] = zero
    groups: list[list[Planned]] = [[]]
    for planned in (Planned(name, part, planning.dtype_of(part)) for name, part in parts.items()):
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
        File(name, tuple(group), _write_safetensors)
        for name, group in zip(names, groups, strict=True)
    )
    last = {}
    if count > 1:
        where = {planned.name: file.name for file in files for planned in file.tensors}
        index = {
            "metadata": {"total_size": sum(file.nbytes for file in files)},
            "weight_map": where,
        }
        last[INDEX_NAME] = _json(index)
    config = written(shape) | {"torch_dtype": str(DTYPES[_usual(files)]).removeprefix("torch.")}
    return FilePlan(files, last | {CONFIG_NAME: _json(config)})


def _usual(files: tuple[File, ...]) -> str:
    """Return the dtype name of most of the bytes."""
    count = Counter[str]()
    for planned in (planned for file in files for planned in file.tensors):
        count[planned.dtype] += planned.nbytes
    return count.most_common(1)[0][0]


def plan_megatron(planning: Planning, tp: int) -> FilePlan:
    """Plan a Megatron checkpoint of `tp` shards in a folder `release` or `iter_NNNNNNN`, with the
    vocabulary padded as Megatron does, and the tracker file that names it.

    Raise RequestError if the shape has a feature that is not written in this format.
    """
    shape = planning.shape
    megatron_args.check_plain(shape)
    rows = padded_vocab_rows(shape.vocab, tp)
    word = planning.iteration or megatron.RELEASE
    folder = word if word == megatron.RELEASE else f"iter_{int(word):07}"
    every = [megatron.parts(shape, Shard(i, tp), rows) for i in range(tp)]
    shards = [
        tuple(Planned(theirs(name), part, planning.dtype_of(part)) for name, part in one.items())
        for one in every
    ]
    dtype = Counter(p.dtype for p in shards[0]).most_common(1)[0][0]
    files: list[File] = []
    for i, shard in enumerate(shards):
        args = argparse.Namespace(**megatron_args.written(shape, Shard(i, tp), rows, dtype))
        around = {"args": args, "checkpoint_version": 3.0, "iteration": planning.step}
        files.append(
            File(f"{folder}/mp_rank_{i:02}/{megatron.FILE}", shard, partial(_write_shard, around))
        )
    return FilePlan(tuple(files), {megatron.TRACKER: f"{word}\n".encode()})


PLANS: dict[str, Callable[[Planning, int], FilePlan]] = {"hf": plan_hf, "megatron": plan_megatron}


def _put(file: BinaryIO, tensor: Tensor) -> None:
    """Write a CPU tensor's bytes at the file's position."""
    file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)


def _write_safetensors(path: Path, file: File, make: Make, tell: Tell) -> None:
    """Write a safetensors file, header first, then one tensor at a time, and sync it to disk.
    `on_written` is called after each tensor.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for planned in file.tensors:
        offsets = [at, at + planned.nbytes]
        header[planned.name] = {
            "dtype": planned.dtype,
            "shape": list(planned.part.shape),
            "data_offsets": offsets,
        }
        at = offsets[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for planned in file.tensors:
            _put(out, make(planned))
            tell(planned)
        synced(out)


def _write_shard(around: dict[str, Any], path: Path, file: File, make: Make, tell: Tell) -> None:
    """Write a Megatron shard as torch.save does, one tensor at a time, and sync it to disk.

    The file is first laid out with tensors without values, then each tensor is written at its
    offset. `extras` are the entries besides the model. Raise OSError if torch cannot write the
    file.
    """
    with FakeTensorMode(), torch.serialization.skip_data(materialize_fake_tensors=True):
        empty = {p.name: torch.empty(p.part.shape, dtype=DTYPES[p.dtype]) for p in file.tensors}
        try:
            torch.save(around | {"model": {ROOT.rstrip("."): _nested(empty)}}, path)
        except RuntimeError as error:
            raise OSError(0, str(error).partition("\n")[0], str(path)) from error
    places = dict(megatron.leaves(read_saved(path)["model"]))
    with path.open("r+b") as out:
        for planned in file.tensors:
            place = places[ROOT + planned.name]
            tensor = make(planned)
            if place.nbytes != tensor.nbytes:
                raise RuntimeError(
                    f"{planned.name} has {tensor.nbytes} bytes, its place {place.nbytes}"
                )
            out.seek(place.offset_bytes)
            _put(out, tensor)
            del tensor  # free it before the next one is made
            tell(planned)
        synced(out)


def _nested(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Return tensors in nested dicts as Megatron's older files have them: names in the layer stack
    are one key below it, all others are split at each dot.
    """
    out: dict[str, Any] = {}
    stack = STACKS[0]
    for name, tensor in tensors.items():
        words = (
            [stack[:-1], name.removeprefix(stack)] if name.startswith(stack) else name.split(".")
        )
        table = out
        for word in words[:-1]:
            table = table.setdefault(word, {})
        table[words[-1]] = tensor
    return out
