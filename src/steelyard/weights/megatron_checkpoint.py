"""Open Megatron checkpoints with a Llama: one torch.save file per tensor-parallel shard, read
without running code from it, values on demand.

File i of n holds the same box of every parameter as shard i of n of our model, except for the
vocabulary, which is padded at its end to a size that only the file tells.

The digest covers, for every shard, its size, its iteration, and name, dtype and shape of every
tensor of its model. It does not cover the values.
"""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from steelyard import files
from steelyard.errors import RequestError, short_repr
from steelyard.models import llama_placements
from steelyard.models.llama import LlamaShape
from steelyard.models.llama_placements import Box, Shard
from steelyard.models.shapes import count_vocab_rows
from steelyard.schema import to_canonical_json
from steelyard.weights import checkpoint_tensors, megatron_args, setting_checks
from steelyard.weights.checkpoint_tensors import (
    CheckpointHeaders,
    CheckpointTensor,
    TensorPart,
    TensorPiece,
    make_checkpoint_tensor,
)
from steelyard.weights.megatron_args import NAME_ROOT, to_megatron_name, to_our_name
from steelyard.weights.torch_files import read_torch_file as read_saved

TRACKER_NAME = "latest_checkpointed_iteration.txt"
# the iteration, in the tracker and as folder name, of a checkpoint that was converted, not trained
RELEASE = "release"
TRACKER_FOLDERS = ("", "ckpts", "checkpoints")  # subfolders that may have the tracker
SHARD_FILE_NAME = "model_optim_rng.pt"
MAX_DEPTH = 8  # of nested dicts in a model
OLDEST_VERSION = 2.0  # earlier versions order the rows of QKV differently

BIASES = ("qkv.bias", "out.bias", "gate_up.bias", "down.bias")
IGNORED_SUFFIXES = ("_extra_state", "rotary_pos_emb.inv_freq")  # computed again, or of fp8 scaling

_ITERATION_FOLDER = re.compile(r"iter_([0-9]{7,})", re.ASCII)
_SHARD_FOLDER = re.compile(r"mp_rank_[0-9]{2,3}", re.ASCII)
_STAGE_FOLDER = re.compile(r"mp_rank_[0-9]+(_[0-9]+)*", re.ASCII)


@dataclass(frozen=True)
class MegatronShard:
    """One tensor-parallel shard of a Megatron checkpoint, from the headers of its file (`path`,
    `size_bytes`).

    `tensors` (CheckpointTensor) are by our names of the parameters; `args` are the plain training
    arguments by Megatron's names, empty if there are none; `iteration` is the step that the file
    states, None if it states none; `has_optimizer` is whether the file holds an optimizer's state
    too.
    """

    path: Path
    size_bytes: int
    iteration: int | None
    args: dict[str, Any]
    tensors: dict[str, CheckpointTensor]
    has_optimizer: bool


def locate_shard_tensor(
    name: str, shape: LlamaShape, shard: Shard, rows: int
) -> tuple[Box, tuple[int, ...]]:
    """Return the box of a parameter (our name) that a shard's tensor covers, and the shape of the
    tensor's logical view.

    For embedding and output the view has `rows` rows, those of one shard with padding, and the box
    ends at the vocabulary's end: it may be smaller than the view, or empty.
    """
    box = llama_placements.find_shard_box(name, shape, shard)
    logical_shape = tuple(end - begin for begin, end in box)
    if name not in ("embed.weight", "output.weight"):
        return box, logical_shape
    row_range = (min(shard.index * rows, shape.vocab), min((shard.index + 1) * rows, shape.vocab))
    return (row_range, *box[1:]), (rows, *logical_shape[1:])


def map_shard_tensors(shape: LlamaShape, shard: Shard, rows: int) -> dict[str, TensorPart]:
    """Return for each parameter of a model of this shape, by our name, the part of it that a
    tensor-parallel shard holds; `rows` is the number of vocabulary rows per shard, padding
    included.
    """
    return {
        name: TensorPart(name, *locate_shard_tensor(name, shape, shard, rows))
        for name in checkpoint_tensors.list_parameter_names(shape)
    }


@dataclass(frozen=True)
class MegatronCheckpoint:
    """An opened Megatron checkpoint: `headers` in all, and `shards`, the headers of each
    tensor-parallel shard in order of their number; no values were read. Pipeline stages are refused
    when it is opened. Implements `LlamaCheckpoint` (`read_dimensions`, `count_parameters`,
    `list_pieces`, `check_values`); `open_megatron_checkpoint` makes it.
    """

    headers: CheckpointHeaders
    shards: list[MegatronShard]

    def read_dimensions(self) -> dict[str, Any]:
        """Return the dimensions of a Megatron checkpoint's model by the fields of LlamaShape, from
        the first shard's arguments, else from its tensors' shapes; None for those that neither
        tells. Raise RequestError if a value has a wrong type or is not above 0.
        """
        shard = self.shards[0]
        shapes = {name: stored.shape for name, stored in shard.tensors.items()}
        return checkpoint_tensors.parse_shape_fields(
            shard.path, megatron_args.derive_shape_fields(shard.args, shapes, self.headers.tp)
        )

    def list_pieces(self, shape: LlamaShape) -> list[TensorPiece]:
        """Return the pieces of all tensor-parallel shards, which cover a model of this shape once;
        tensors that every shard holds whole are taken from the first. QKV is two pieces if the
        arguments have rotary_interleaved_patch.

        Only headers are used. Raise RequestError if arguments, names, shapes or dtypes are not
        those of a model of this shape, or the shape has a feature that this format lacks (QK norms,
        window, scaled rotary positions).
        """
        megatron_args.check_shape_supported(shape)
        for shard in self.shards:
            megatron_args.check_args(shard.path, shard.args, shape, self.headers.tp)
        rows = self._count_vocab_rows(shape)
        all_pieces: list[TensorPiece] = []
        for i, shard in enumerate(self.shards):
            expected_parts = map_shard_tensors(shape, Shard(i, self.headers.tp), rows)
            _check_shard_tensors(shard, expected_parts, shape)
            for name, part in expected_parts.items():
                if i == 0 or llama_placements.find_placement(name).split is not None:
                    all_pieces += _split_into_pieces(
                        shard.tensors[name],
                        part,
                        shard.args.get("rotary_interleaved_patch") is True,
                    )
        return all_pieces

    def _count_vocab_rows(self, shape: LlamaShape) -> int:
        """Return the number of vocabulary rows in each shard of this checkpoint, padding included:
        those of the first shard's embedding, or what our own model would have if that is missing.

        Raise RequestError if the shards do not divide `kv_heads` or `ffn`, hold fewer rows than the
        vocabulary, or `padded_vocab_size` in the arguments is not the rows of all shards.
        """
        first, tp = self.shards[0], self.headers.tp
        stored = first.tensors.get("embed.weight")
        for dimension, size in (("kv_heads", shape.kv_heads), ("ffn", shape.ffn)):
            if size % tp:
                raise RequestError(
                    f"{first.path}: is one of {tp} shards, and the case's {dimension} {size}"
                    " cannot be"
                    f" divided by {tp}; give weights of the case's model"
                )
        rows = stored.shape[0] if stored is not None and len(stored.shape) == 2 else 0
        if stored is not None and rows * tp < shape.vocab:
            raise RequestError(
                f"{stored}: {tp} shards of it hold {rows * tp} rows, the case's vocab is"
                f" {shape.vocab}; give weights of the case's model, or the case of theirs"
            )
        for shard in self.shards:
            setting_checks.check_setting_allowed(
                shard.path, "padded_vocab_size", shard.args.get("padded_vocab_size"), (rows * tp,)
            )
        return rows or count_vocab_rows(shape.vocab, tp)

    def check_values(self, shape: LlamaShape) -> None:
        """Read values of the checkpoint, and raise RequestError if a tensor that every shard holds
        whole (norms) has other bytes in another shard, or if a bias that a model of this shape
        lacks is not zero.
        """
        for name in checkpoint_tensors.list_parameter_names(shape):
            if llama_placements.find_placement(name).split is None:
                self._check_equal_in_shards(name)
        for shard in self.shards:
            for name, stored in shard.tensors.items():
                if _is_redundant_bias(name, shape) and bool(stored.open().count_nonzero()):
                    raise RequestError(
                        f"{stored} is not zero, and this model has no such bias; give other weights"
                    )

    def _check_equal_in_shards(self, name: str) -> None:
        """Read a parameter (our name) from every shard, and raise RequestError if its bytes differ
        from those in the first.
        """
        first = _view_bytes(self.shards[0].tensors[name])
        for shard in self.shards[1:]:
            if not torch.equal(_view_bytes(shard.tensors[name]), first):
                raise RequestError(
                    f"{shard.tensors[name]} differs from the one in"
                    f" {self.shards[0].path.parent.name}, and every shard holds all of it; fetch"
                    " the"
                    " shards of one checkpoint"
                )

    def count_parameters(self) -> int:
        """Return how many parameters the Llama of this Megatron checkpoint has. Raise RequestError
        if the shards are not a complete model.
        """
        return checkpoint_tensors.count_checkpoint_parameters(self)


def _list_model_tensors(shards: list[MegatronShard]) -> list[CheckpointTensor]:
    """Return the tensors of the model for counting parameters: of every tensor-parallel shard those
    that are split and the QKV biases, of the first shard also those that each shard holds whole.

    Other biases are left out, because our model has none (`check_values` requires zeros).
    """
    first, *others = (
        {k: v for k, v in shard.tensors.items() if k.rpartition(".")[2] != "bias"}
        for shard in shards
    )
    split = [
        s
        for tensors in others
        for name, s in tensors.items()
        if llama_placements.find_placement(name).split is not None
    ]
    biases = [
        s for shard in shards for name, s in shard.tensors.items() if name.endswith("qkv.bias")
    ]
    return [*first.values(), *split, *biases]


def _list_notes(shard: MegatronShard, tp: int) -> Iterator[str]:
    """Yield the remarks that `weights inspect` prints about a checkpoint, from its first shard:
    that there is an optimizer's state, that V rows will be reordered, and to how many rows in `tp`
    shards the vocabulary is padded.
    """
    if shard.has_optimizer:
        yield "the files hold an optimizer's state too; it is not read"
    if shard.args.get("rotary_interleaved_patch") is True:
        yield "rotary_interleaved_patch: the rows of V are put in plain order when they are read"
    embed = shard.tensors.get("embed.weight")
    if embed is not None and embed.shape:
        yield f"the vocabulary is padded to {embed.shape[0] * tp} rows"


def _view_bytes(stored: CheckpointTensor) -> Tensor:
    """Open a stored tensor and return its values as a flat uint8 tensor, so that NaN compares equal
    to itself.
    """
    return stored.open().reshape(-1).contiguous().view(torch.uint8)


def _is_redundant_bias(name: str, shape: LlamaShape) -> bool:
    """Return whether a parameter (our name) is a bias that a model of this shape lacks: that of QKV
    if the shape has none, and always those of the other linear layers. It may be left out if it is
    zero.
    """
    leaf = ".".join(name.rsplit(".", 2)[-2:])
    return leaf in BIASES and not (leaf == "qkv.bias" and shape.qkv_bias)


def _check_shard_tensors(
    shard: MegatronShard, expected_parts: dict[str, TensorPart], shape: LlamaShape
) -> None:
    """Raise RequestError unless a shard's headers list exactly the expected tensors (by our names)
    with their shapes, in dtypes of plain weights; biases that the model lacks may be there too. No
    values are read.
    """
    parts_by_file_name = {
        stored.name: expected_parts[name]
        for name, stored in shard.tensors.items()
        if name in expected_parts
    }
    our_names = {stored.name: name for name, stored in shard.tensors.items()}
    checkpoint_tensors.check_tensors(
        shard.tensors.values(),
        parts_by_file_name,
        lambda name: _is_redundant_bias(our_names[name], shape),
    )
    missing = {
        NAME_ROOT + to_megatron_name(name): part
        for name, part in expected_parts.items()
        if name not in shard.tensors
    }
    checkpoint_tensors.check_none_missing(shard.path, (), missing)


def _split_into_pieces(
    stored: CheckpointTensor, part: TensorPart, is_patched: bool
) -> Iterator[TensorPiece]:
    """Yield the one piece that a stored tensor is, with the box of `part`; for QKV with
    `is_patched` (argument rotary_interleaved_patch) two pieces: Q and K as they are, and V, whose
    `view` puts its rows in plain order.
    """
    if not is_patched or not part.parameter.endswith(("qkv.weight", "qkv.bias")):
        yield TensorPiece(stored, part.parameter, part.box, part.view_box)
        return
    groups, (_, last), *other_ranges = part.box
    query_key_part = replace(part, box=(groups, (0, last - 1), *other_ranges))
    yield TensorPiece(stored, part.parameter, query_key_part.box, query_key_part.view_box)
    value_box: Box = (groups, (last - 1, last), *other_ranges)
    yield TensorPiece(
        stored,
        part.parameter,
        value_box,
        lambda tensor: _restore_value_rows(part.view_box(tensor)[:, -1:]),
    )


def _restore_value_rows(value: Tensor) -> Tensor:
    """Return V heads, [groups, 1, head_dim, …], with the rows of each head in plain order; they are
    stored with the even rows first, then the odd ones.
    """
    groups, one, dim, *other_sizes = value.shape
    return (
        value.reshape(groups, one, 2, dim // 2, *other_sizes).transpose(2, 3).reshape(value.shape)
    )


def has_megatron_shards(folder: Path) -> bool:
    """Return whether a file `mp_rank_*/model_optim_rng.pt` is in a folder, or in one up to two
    levels below it, where a tracker may point. Nothing is opened.
    """
    return any(
        any(folder.glob(f"{below}mp_rank_*/{SHARD_FILE_NAME}")) for below in ("", "*/", "*/*/")
    )


def find_shards_folder(folder: Path) -> Path | None:
    """Return the folder with the `mp_rank_…` folders that a given folder means: itself, or the one
    that a tracker (latest_checkpointed_iteration.txt) in it, in `ckpts` or in `checkpoints` names,
    the first that exists; None if it holds no Megatron checkpoint.

    Raise RequestError if the tracker is wrong, or there are checkpoints (`iter_…`, `release`) but
    no tracker; OSError if a folder cannot be read.
    """
    if _has_shard_folders(folder):
        return folder
    for below in TRACKER_FOLDERS:
        tracker = folder / below / TRACKER_NAME
        if tracker.is_file():
            return _read_tracker(tracker)
    checkpoint_folders = [
        path
        for path in folder.iterdir()
        if _ITERATION_FOLDER.fullmatch(path.name) or path.name == RELEASE
    ]
    untracked = sorted(
        path.name for path in checkpoint_folders if path.is_dir() and _has_shard_folders(path)
    )
    if untracked:
        raise RequestError(
            f"{folder}: has no {TRACKER_NAME} that names the checkpoint to use; give"
            f" {folder / untracked[-1]}"
        )
    return None


def _has_shard_folders(folder: Path) -> bool:
    """Return whether a folder has an entry named like a shard, `mp_rank_...`."""
    return any(_STAGE_FOLDER.fullmatch(path.name) for path in folder.iterdir())


def _read_tracker(tracker: Path) -> Path:
    """Return the checkpoint folder beside a tracker file that the file names: `iter_NNNNNNN` for a
    number, or `release`. Raise RequestError if its text is neither, or the folder does not exist;
    OSError if it cannot be read.
    """
    with files.open_regular(tracker) as file:
        iteration = file.read(100).decode("ascii", "replace").strip()
    if iteration != RELEASE and not re.fullmatch("[0-9]{1,12}", iteration, re.ASCII):
        raise RequestError(
            f"{tracker}: says {short_repr(iteration)}, allowed: a number or {RELEASE}; write the"
            " number"
            " of an iter_ folder"
        )
    chosen = tracker.parent / (RELEASE if iteration == RELEASE else f"iter_{int(iteration):07}")
    if not chosen.is_dir():
        raise RequestError(
            f"{tracker}: says {iteration}, and there is no folder {chosen.name}; fetch it, or give"
            " another one"
        )
    return chosen


def open_megatron_checkpoint(folder: Path) -> MegatronCheckpoint:
    """Open the checkpoint in a folder of `mp_rank_NN` folders: read the headers of every
    tensor-parallel shard, but no values, and compare them.

    Raise RequestError if a shard is missing, damaged or in the folder of another, if their number
    is not the one that the arguments tell, if one differs from the first in tensors or iteration,
    or if folders are of pipeline stages; OSError if the folder cannot be read.
    """
    folder = folder.resolve() if not folder.name else folder
    names = {path.name for path in folder.iterdir() if _STAGE_FOLDER.fullmatch(path.name)}
    for name in sorted(names):
        if not _SHARD_FOLDER.fullmatch(name):
            raise RequestError(
                f"{folder / name}: belongs to a pipeline-parallel checkpoint; only tensor-parallel"
                " ones are supported; save it with pipeline parallel size 1"
            )
    expected_names = [f"mp_rank_{i:02}" for i in range(len(names))]
    missing = sorted(set(expected_names) - names)
    if missing:
        raise RequestError(
            f"{folder / missing[0]}: shard is missing, there are {len(names)} others; fetch it"
        )
    match = _ITERATION_FOLDER.fullmatch(folder.name)
    shards = [
        _read_shard(folder / name / SHARD_FILE_NAME, int(match[1]) if match else None)
        for name in expected_names
    ]
    _check_shard_count(folder, shards)
    for shard in shards[1:]:
        _check_same_tensors(shard, shards[0])
    _check_shard_order(shards)
    step = shards[0].iteration
    descriptions = [
        (
            shard.size_bytes,
            shard.iteration,
            sorted((s.name, s.dtype, list(s.shape)) for s in shard.tensors.values()),
        )
        for shard in shards
    ]
    headers = CheckpointHeaders(
        format="megatron",
        tp=len(shards),
        iteration=RELEASE if folder.name == RELEASE or step is None else str(step),
        step=step or 0,
        folders=(folder, *(shard.path.parent for shard in shards)),
        files=[(str(shard.path.relative_to(folder)), shard.size_bytes) for shard in shards],
        tensors=_list_model_tensors(shards),
        digest=hashlib.sha256(to_canonical_json(descriptions).encode()).hexdigest(),
        notes=tuple(_list_notes(shards[0], len(shards))),
    )
    return MegatronCheckpoint(headers, shards)


def _read_shard(path: Path, iteration: int | None) -> MegatronShard:
    """Read the headers of one shard's file without running code from it. `iteration` is the number
    in its folder's name, None if there is none.

    Raise RequestError if the file is missing or damaged, has no model, a checkpoint_version below
    `OLDEST_VERSION` or none, another iteration than its folder, or a parameter twice or one that no
    plain Llama has.
    """
    if not path.is_file():
        raise RequestError(f"{path}: shard is missing; fetch it, or give a complete checkpoint")
    content = read_saved(path)
    model = content.get("model") if isinstance(content, dict) else None
    if not isinstance(model, dict) or not model:
        raise RequestError(
            f"{path}: holds no model, a table of that name is expected; give a checkpoint of"
            " Megatron"
        )
    version = content.get("checkpoint_version")
    if not isinstance(version, int | float) or not version >= OLDEST_VERSION:
        version_text = (
            short_repr(version) if isinstance(version, int | float | None) else "no number"
        )
        raise RequestError(
            f"{path}: checkpoint_version is {version_text}, allowed: {OLDEST_VERSION} or later;"
            " save it with a"
            " newer Megatron"
        )
    step = content.get("iteration")
    if not (step is None or (isinstance(step, int) and 0 <= step < 2**63)):
        raise RequestError(
            f"{path}: its iteration is not a number from 0 to 2**63 - 1; download it again"
        )
    if iteration not in (None, step):
        raise RequestError(
            f"{path}: is of iteration {short_repr(step)}, its folder of {iteration}; download it"
            " again"
        )
    tensors: dict[str, CheckpointTensor] = {}
    for stored in (
        make_checkpoint_tensor(path, name, value) for name, value in iterate_leaves(model)
    ):
        name = to_our_name(stored.name)
        if name is None:
            raise RequestError(
                f"{stored}: this model has no such tensor; give weights of a plain Llama"
            )
        if name in tensors:
            raise RequestError(
                f"{stored} is also stored as {short_repr(tensors[name].name)}; save the"
                " checkpoint again"
            )
        tensors[name] = stored
    return MegatronShard(
        path,
        path.stat().st_size,
        step,
        megatron_args.to_plain_args(content.get("args")),
        tensors,
        "optimizer" in content,
    )


def iterate_leaves(
    nested: dict[Any, Any], prefix: str = "", depth: int = 0
) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) for each value in nested dicts that is no dict, the name being its keys
    joined by dots, after `prefix`.

    Names that end in one of `IGNORED_SUFFIXES` are left out; dicts nested deeper than `MAX_DEPTH`
    are yielded as values; a key that is no text becomes the name of its type. `depth` is that of
    `nested` itself.
    """
    for key, value in nested.items():
        name = f"{prefix}{key if isinstance(key, str) else type(key).__name__}"
        if isinstance(value, dict) and depth < MAX_DEPTH:
            yield from iterate_leaves(value, f"{name}.", depth + 1)
        elif not name.endswith(IGNORED_SUFFIXES):
            yield name, value


def _check_shard_count(folder: Path, shards: list[MegatronShard]) -> None:
    """Raise RequestError if the first shard's argument `tensor_model_parallel_size` is another
    number than there are shards; nothing is checked if it is absent or no positive integer.
    `folder` is for the message.
    """
    expected_count, present_count = shards[0].args.get("tensor_model_parallel_size"), len(shards)
    if not isinstance(expected_count, int) or expected_count < 1 or expected_count == present_count:
        return
    about = (
        f"{folder}: its arguments state {short_repr(expected_count)} shards,"
        f" {present_count} are here:"
        f" mp_rank_{min(expected_count, present_count):02}"
    )
    if expected_count < present_count:
        raise RequestError(f"{about} is not one of them; move it away")
    more = expected_count - present_count - 1
    raise RequestError(
        about
        + (
            f" and {short_repr(more)} more are missing; fetch them"
            if more
            else " is missing; fetch it"
        )
    )


def _check_shard_order(shards: list[MegatronShard]) -> None:
    """Raise RequestError if a shard lies in the folder of another, where the files tell its number;
    `shards` are in the order of their folders.

    Files that we wrote tell it (`tensor_model_parallel_rank`). Megatron's tell only the global rank
    of the training; it is used if there were as many ranks as shards and each rank wrote one file.
    """
    numbers = [shard.args.get(megatron_args.SHARD_RANK_KEY) for shard in shards]
    is_only_tensor_parallel = all(shard.args.get("world_size") == len(shards) for shard in shards)
    global_ranks = [shard.args.get("rank") for shard in shards]
    if is_only_tensor_parallel and all(i in global_ranks for i in range(len(shards))):
        numbers = [
            stored_number if stored_number is not None else number
            for stored_number, number in zip(numbers, global_ranks, strict=True)
        ]
    for i, (shard, number) in enumerate(zip(shards, numbers, strict=True)):
        if number not in (None, i):
            raise RequestError(
                f"{shard.path}: is shard {short_repr(number)} of its checkpoint, and its folder is"
                f" {shard.path.parent.name}; put every shard in the folder of its number, or fetch"
                " them again"
            )


def _check_same_tensors(shard: MegatronShard, first: MegatronShard) -> None:
    """Raise RequestError unless a shard has the iteration of the first shard, and tensors of the
    same names, shapes and dtypes. Values are not compared.
    """
    if shard.iteration != first.iteration:
        raise RequestError(
            f"{shard.path}: is of iteration {short_repr(shard.iteration)}, "
            f"{first.path.parent.name} of {short_repr(first.iteration)}; "
            "fetch the shards of one checkpoint"
        )
    for name in sorted(shard.tensors.keys() | first.tensors.keys()):
        own_header, first_header = (
            None if s is None else (s.dtype, list(s.shape))
            for s in (shard.tensors.get(name), first.tensors.get(name))
        )
        if own_header != first_header:
            stored = shard.tensors.get(name) or first.tensors[name]
            header_texts = [
                "none" if header is None else f"{header[0]} {header[1]}"
                for header in (own_header, first_header)
            ]
            raise RequestError(
                f"{shard.path}: tensor {short_repr(stored.name)} is {header_texts[0]}, in"
                f" {first.path.parent.name} it is {header_texts[1]}; fetch the shards of one"
                " checkpoint"
            )
