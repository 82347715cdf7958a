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
from steelyard.models import placements
from steelyard.models.llama import LlamaShape
from steelyard.models.placements import Box, Shard
from steelyard.models.shapes import vocab_rows
from steelyard.schema import canonical
from steelyard.weights import checkpoint, megatron_args
from steelyard.weights.checkpoint import Headers, Piece, Stored, TensorPart, saved_tensor
from steelyard.weights.megatron_args import ROOT, ours, theirs
from steelyard.weights.torch_files import read as read_saved

TRACKER = "latest_checkpointed_iteration.txt"
# the iteration, in the tracker and as folder name, of a checkpoint that was converted, not trained
RELEASE = "release"
BELOW = ("", "ckpts", "checkpoints")  # subfolders that may have the tracker
FILE = "model_optim_rng.pt"
MAX_DEPTH = 8  # of nested dicts in a model
OLDEST = 2.0  # earlier versions order the rows of QKV differently

BIASES = ("qkv.bias", "out.bias", "gate_up.bias", "down.bias")
IGNORED = ("_extra_state", "rotary_pos_emb.inv_freq")  # computed again, or of fp8 scaling

_ITERATION = re.compile(r"iter_([0-9]{7,})", re.ASCII)
_RANK = re.compile(r"mp_rank_[0-9]{2,3}", re.ASCII)
_STAGE = re.compile(r"mp_rank_[0-9]+(_[0-9]+)*", re.ASCII)


@dataclass(frozen=True)
class Rank:
    """One tensor-parallel shard. `tensors` are by our names of the parameters; `args` are the plain
    training arguments; `has_optimizer` is whether the file holds an optimizer's state too.
    """

    path: Path
    size_bytes: int
    iteration: int | None
    args: dict[str, Any]
    tensors: dict[str, Stored]
    optimizer: bool


def box_of(name: str, shape: LlamaShape, shard: Shard, rows: int) -> tuple[Box, tuple[int, ...]]:
    """Return the box that a shard's tensor covers, and the shape of the tensor's logical view. For
    the vocabulary the latter has `rows` rows, padding included, and may be larger than the box.
    """
    box = placements.box(name, shape, shard)
    form = tuple(end - begin for begin, end in box)
    if name not in ("embed.weight", "output.weight"):
        return box, form
    held = (min(shard.index * rows, shape.vocab), min((shard.index + 1) * rows, shape.vocab))
    return (held, *box[1:]), (rows, *form[1:])


def parts(shape: LlamaShape, shard: Shard, rows: int) -> dict[str, TensorPart]:
    """Return all tensors of a shard by our parameter names, with the box that each covers; `rows`
    is the number of vocabulary rows per shard, padding included.
    """
    return {
        name: TensorPart(name, *box_of(name, shape, shard, rows))
        for name in checkpoint.parameters(shape)
    }


@dataclass(frozen=True)
class Megatron:
    """A Megatron checkpoint of which only the headers were read. Its iteration is a number, or
    `release` as in its folder's name. Implements `LlamaCheckpoint`.
    """

    headers: Headers
    ranks: list[Rank]

    def config(self) -> dict[str, Any]:
        """Return the model's dimensions by the fields of LlamaShape, from the first shard's
        arguments, else from its tensors; None for those neither tells. Raise RequestError if a
        value has a wrong type.
        """
        rank = self.ranks[0]
        shapes = {name: stored.shape for name, stored in rank.tensors.items()}
        return checkpoint.typed(rank.path, megatron_args.config(rank.args, shapes, self.headers.tp))

    def pieces(self, shape: LlamaShape) -> list[Piece]:
        """Return the pieces of all shards; tensors that every shard holds whole are taken from the
        first. Raise RequestError if arguments or headers are not those of a model of this shape.
        """
        megatron_args.check_plain(shape)
        for rank in self.ranks:
            megatron_args.check(rank.path, rank.args, shape, self.headers.tp)
        rows = self._rows(shape)
        out: list[Piece] = []
        for i, rank in enumerate(self.ranks):
            wanted = parts(shape, Shard(i, self.headers.tp), rows)
            _check_tensors(rank, wanted, shape)
            for name, part in wanted.items():
                if i == 0 or placements.placement(name).split is not None:
                    out += _pieces(
                        rank.tensors[name], part, rank.args.get("rotary_interleaved_patch") is True
                    )
        return out

    def _rows(self, shape: LlamaShape) -> int:
        """Return the number of vocabulary rows in each shard, padding included. Raise RequestError
        if a model of this shape cannot have these shards.
        """
        first, tp = self.ranks[0], self.headers.tp
        stored = first.tensors.get("embed.weight")
        for what, many in (("kv_heads", shape.kv_heads), ("ffn", shape.ffn)):
            if many % tp:
                raise RequestError(
                    f"{first.path}: is one of {tp} shards, and the case's {what} {many} cannot be"
                    f" divided by {tp}; give weights of the case's model"
                )
        rows = stored.shape[0] if stored is not None and len(stored.shape) == 2 else 0
        if stored is not None and rows * tp < shape.vocab:
            raise RequestError(
                f"{stored}: {tp} shards of it hold {rows * tp} rows, the case's vocab is"
                f" {shape.vocab}; give weights of the case's model, or the case of theirs"
            )
        for rank in self.ranks:
            checkpoint.allow(
                rank.path, "padded_vocab_size", rank.args.get("padded_vocab_size"), (rows * tp,)
            )
        return rows or vocab_rows(shape.vocab, tp)

    def check_values(self, shape: LlamaShape) -> None:
        """Read values, and raise RequestError if tensors that every shard holds whole differ
        between shards, or a bias that the model lacks is not zero.
        """
        for name in checkpoint.parameters(shape):
            if placements.placement(name).split is None:
                self._check_whole(name)
        for rank in self.ranks:
            for name, stored in rank.tensors.items():
                if _redundant(name, shape) and bool(stored.open().count_nonzero()):
                    raise RequestError(
                        f"{stored} is not zero, and this model has no such bias; give other weights"
                    )

    def _check_whole(self, name: str) -> None:
        """Raise RequestError if a parameter's bytes differ between shards."""
        first = _bytes(self.ranks[0].tensors[name])
        for rank in self.ranks[1:]:
            if not torch.equal(_bytes(rank.tensors[name]), first):
                raise RequestError(
                    f"{rank.tensors[name]} differs from the one in"
                    f" {self.ranks[0].path.parent.name}, and every shard holds all of it; fetch the"
                    " shards of one checkpoint"
                )

    def count(self) -> int:
        """Return how many parameters the model has. Raise RequestError if the shards are not a
        complete model.
        """
        return checkpoint.count(self)


def _tensors(ranks: list[Rank]) -> list[Stored]:
    """Return the tensors of the model for counting: split ones and QKV biases of every shard,
    others of the first only; other biases are left out.
    """
    first, *others = (
        {k: v for k, v in rank.tensors.items() if k.rpartition(".")[2] != "bias"} for rank in ranks
    )
    split = [
        s
        for tensors in others
        for name, s in tensors.items()
        if placements.placement(name).split is not None
    ]
    biases = [s for rank in ranks for name, s in rank.tensors.items() if name.endswith("qkv.bias")]
    return [*first.values(), *split, *biases]


def _notes(rank: Rank, tp: int) -> Iterator[str]:
    """Yield the remarks that `weights inspect` prints: an optimizer's state, reordered V rows, a
    padded vocabulary.
    """
    if rank.optimizer:
        yield "the files hold an optimizer's state too; it is not read"
    if rank.args.get("rotary_interleaved_patch") is True:
        yield "rotary_interleaved_patch: the rows of V are put in plain order when they are read"
    embed = rank.tensors.get("embed.weight")
    if embed is not None and embed.shape:
        yield f"the vocabulary is padded to {embed.shape[0] * tp} rows"


def _bytes(stored: Stored) -> Tensor:
    """Return a stored tensor's values as a flat tensor of bytes."""
    return stored.open().reshape(-1).contiguous().view(torch.uint8)


def _redundant(name: str, shape: LlamaShape) -> bool:
    """Return whether a parameter is a bias that a model of this shape lacks; it may be left out if
    it is zero.
    """
    leaf = ".".join(name.rsplit(".", 2)[-2:])
    return leaf in BIASES and not (leaf == "qkv.bias" and shape.qkv_bias)


def _check_tensors(rank: Rank, wanted: dict[str, TensorPart], shape: LlamaShape) -> None:
    """Raise RequestError unless a shard's headers list exactly the expected tensors with their
    shapes; biases that the model lacks are allowed.
    """
    spelled = {stored.name: wanted[name] for name, stored in rank.tensors.items() if name in wanted}
    names = {stored.name: name for name, stored in rank.tensors.items()}
    checkpoint.check_entries(
        rank.tensors.values(), spelled, lambda name: _redundant(names[name], shape)
    )
    missing = {
        ROOT + theirs(name): part for name, part in wanted.items() if name not in rank.tensors
    }
    checkpoint.check_missing(rank.path, (), missing)


def _pieces(stored: Stored, part: TensorPart, patched: bool) -> Iterator[Piece]:
    """Yield the piece that a stored tensor is, or for QKV with `is_patched` (argument
    rotary_interleaved_patch) two: Q and K as they are, and V with its rows put in plain order.
    """
    if not patched or not part.parameter.endswith(("qkv.weight", "qkv.bias")):
        yield Piece(stored, part.parameter, part.box, part.inside)
        return
    groups, (_, last), *rest = part.box
    plain = replace(part, box=(groups, (0, last - 1), *rest))
    yield Piece(stored, part.parameter, plain.box, plain.inside)
    value: Box = (groups, (last - 1, last), *rest)
    yield Piece(
        stored, part.parameter, value, lambda tensor: _unpatched(part.inside(tensor)[:, -1:])
    )


def _unpatched(value: Tensor) -> Tensor:
    """Return V heads with their rows in plain order; they are stored with the even rows of each
    head first, then the odd ones.
    """
    groups, one, dim, *rest = value.shape
    return value.reshape(groups, one, 2, dim // 2, *rest).transpose(2, 3).reshape(value.shape)


def holds(folder: Path) -> bool:
    """Return whether there is a Megatron shard in a folder, or up to two levels below it, where a
    tracker may point.
    """
    return any(any(folder.glob(f"{below}mp_rank_*/{FILE}")) for below in ("", "*/", "*/*/"))


def find(folder: Path) -> Path | None:
    """Return the folder of shards that a folder means: itself, or the one that a tracker in it or
    in `ckpts` or `checkpoints` names; None if it holds no Megatron checkpoint.

    Raise RequestError if the tracker is wrong, or there are checkpoints but no tracker; OSError if
    the folder cannot be read.
    """
    if _holds_shards(folder):
        return folder
    for below in BELOW:
        tracker = folder / below / TRACKER
        if tracker.is_file():
            return _tracked(tracker)
    near = [
        path for path in folder.iterdir() if _ITERATION.fullmatch(path.name) or path.name == RELEASE
    ]
    loose = sorted(path.name for path in near if path.is_dir() and _holds_shards(path))
    if loose:
        raise RequestError(
            f"{folder}: has no {TRACKER} that says which of its checkpoints to take; give"
            f" {folder / loose[-1]}"
        )
    return None


def _holds_shards(folder: Path) -> bool:
    """Return whether a folder has an entry named like a shard, `mp_rank_...`."""
    return any(_STAGE.fullmatch(path.name) for path in folder.iterdir())


def _tracked(tracker: Path) -> Path:
    """Return the checkpoint folder that a tracker file names. Raise RequestError if its text is
    neither a number nor `release`, or the folder does not exist.
    """
    with files.open_regular(tracker) as file:
        word = file.read(100).decode("ascii", "replace").strip()
    if word != RELEASE and not re.fullmatch("[0-9]{1,12}", word, re.ASCII):
        raise RequestError(
            f"{tracker}: says {short_repr(word)}, allowed: a number or {RELEASE}; write the number"
            " of an iter_ folder"
        )
    chosen = tracker.parent / (RELEASE if word == RELEASE else f"iter_{int(word):07}")
    if not chosen.is_dir():
        raise RequestError(
            f"{tracker}: says {word}, and there is no folder {chosen.name}; fetch it, or give"
            " another one"
        )
    return chosen


def read(folder: Path) -> Megatron:
    """Open the checkpoint in a folder of shards: read the headers of every shard, but no values,
    and compare them.

    Raise RequestError if a shard is missing, damaged, in the folder of another, differs from the
    first in tensors or iteration, or is split over pipeline stages.
    """
    folder = folder.resolve() if not folder.name else folder
    names = {path.name for path in folder.iterdir() if _STAGE.fullmatch(path.name)}
    for name in sorted(names):
        if not _RANK.fullmatch(name):
            raise RequestError(
                f"{folder / name}: is of a checkpoint split over a pipeline, only tensor-parallel"
                " ones are read; save it with pipeline parallel size 1"
            )
    wanted = [f"mp_rank_{i:02}" for i in range(len(names))]
    lost = sorted(set(wanted) - names)
    if lost:
        raise RequestError(
            f"{folder / lost[0]}: shard is missing, there are {len(names)} others; fetch it"
        )
    found = _ITERATION.fullmatch(folder.name)
    ranks = [_rank(folder / name / FILE, int(found[1]) if found else None) for name in wanted]
    _check_count(folder, ranks)
    for rank in ranks[1:]:
        _check_alike(rank, ranks[0])
    _check_order(ranks)
    step = ranks[0].iteration
    told = [
        (
            rank.size_bytes,
            rank.iteration,
            sorted((s.name, s.dtype, list(s.shape)) for s in rank.tensors.values()),
        )
        for rank in ranks
    ]
    headers = Headers(
        format="megatron",
        tp=len(ranks),
        iteration=RELEASE if folder.name == RELEASE or step is None else str(step),
        step=step or 0,
        folders=(folder, *(rank.path.parent for rank in ranks)),
        files=[(str(rank.path.relative_to(folder)), rank.size_bytes) for rank in ranks],
        tensors=_tensors(ranks),
        digest=hashlib.sha256(canonical(told).encode()).hexdigest(),
        notes=tuple(_notes(ranks[0], len(ranks))),
    )
    return Megatron(headers, ranks)


def _rank(path: Path, iteration: int | None) -> Rank:
    """Read the headers of one shard's file. `iteration` is that of its folder's name, None if it
    names none.

    Raise RequestError if the file is missing or damaged, has no model, is of a version before
    `OLDEST_VERSION` or of another iteration, or has a parameter twice or one that no plain Llama
    has.
    """
    if not path.is_file():
        raise RequestError(f"{path}: shard is missing; fetch it, or give a complete checkpoint")
    table = read_saved(path)
    model = table.get("model") if isinstance(table, dict) else None
    if not isinstance(model, dict) or not model:
        raise RequestError(
            f"{path}: holds no model, a table of that name is expected; give a checkpoint of"
            " Megatron"
        )
    version = table.get("checkpoint_version")
    if not isinstance(version, int | float) or not version >= OLDEST:
        told = short_repr(version) if isinstance(version, int | float | None) else "no number"
        raise RequestError(
            f"{path}: checkpoint_version is {told}, allowed: {OLDEST} or later; save it with a"
            " newer Megatron"
        )
    step = table.get("iteration")
    if not (step is None or (isinstance(step, int) and 0 <= step < 2**63)):
        raise RequestError(f"{path}: its iteration is no number of 0 to 2**63; download it again")
    if iteration not in (None, step):
        raise RequestError(
            f"{path}: is of iteration {short_repr(step)}, its folder of {iteration}; download it"
            " again"
        )
    tensors: dict[str, Stored] = {}
    for stored in (saved_tensor(path, name, value) for name, value in leaves(model)):
        name = ours(stored.name)
        if name is None:
            raise RequestError(
                f"{stored} has no place in this model; give weights of a plain Llama"
            )
        if name in tensors:
            raise RequestError(
                f"{stored} is there already as {short_repr(tensors[name].name)}; save the"
                " checkpoint again"
            )
        tensors[name] = stored
    return Rank(
        path,
        path.stat().st_size,
        step,
        megatron_args.plain(table.get("args")),
        tensors,
        "optimizer" in table,
    )


def leaves(table: dict[Any, Any], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield each value in nested dicts that is no dict, with its keys joined by dots. Names that
    end in one of `IGNORED_SUFFIXES` are left out; dicts below `MAX_DEPTH` are yielded as they are.
    """
    for key, value in table.items():
        name = f"{prefix}{key if isinstance(key, str) else type(key).__name__}"
        if isinstance(value, dict) and depth < MAX_DEPTH:
            yield from leaves(value, f"{name}.", depth + 1)
        elif not name.endswith(IGNORED):
            yield name, value


def _check_count(folder: Path, ranks: list[Rank]) -> None:
    """Raise RequestError if the first shard's arguments tell of another number of shards than there
    are files.
    """
    told, here = ranks[0].args.get("tensor_model_parallel_size"), len(ranks)
    if not isinstance(told, int) or told < 1 or told == here:
        return
    about = (
        f"{folder}: {short_repr(told)} shards are told of, {here} are here:"
        f" mp_rank_{min(told, here):02}"
    )
    if told < here:
        raise RequestError(f"{about} is none of them; move it away")
    more = told - here - 1
    raise RequestError(
        about
        + (
            f" and {short_repr(more)} more are missing; fetch them"
            if more
            else " is missing; fetch it"
        )
    )


def _check_order(ranks: list[Rank]) -> None:
    """Raise RequestError if a shard lies in the folder of another, where the files tell its number.

    Files that we wrote tell it. Megatron's tell only the global rank of the training, which is the
    same number if there were no more ranks than shards and each rank wrote its own file.
    """
    numbers = [rank.args.get(megatron_args.RANK) for rank in ranks]
    alone = all(rank.args.get("world_size") == len(ranks) for rank in ranks)
    of_training = [rank.args.get("rank") for rank in ranks]
    if alone and all(i in of_training for i in range(len(ranks))):
        numbers = [
            ours if ours is not None else number
            for ours, number in zip(numbers, of_training, strict=True)
        ]
    for i, (rank, number) in enumerate(zip(ranks, numbers, strict=True)):
        if number not in (None, i):
            raise RequestError(
                f"{rank.path}: is shard {short_repr(number)} of its checkpoint, and its folder is"
                f" {rank.path.parent.name}; put every shard in the folder of its number, or fetch"
                " them again"
            )


def _check_alike(rank: Rank, first: Rank) -> None:
    """Raise RequestError unless a shard has the same tensors, shapes, dtypes and iteration as the
    first.
    """
    if rank.iteration != first.iteration:
        raise RequestError(
            f"{rank.path}: is of iteration {short_repr(rank.iteration)}, "
            f"{first.path.parent.name} of {short_repr(first.iteration)}; "
            "fetch the shards of one checkpoint"
        )
    for name in sorted(rank.tensors.keys() | first.tensors.keys()):
        here, there = (
            None if s is None else (s.dtype, list(s.shape))
            for s in (rank.tensors.get(name), first.tensors.get(name))
        )
        if here != there:
            stored = rank.tensors.get(name) or first.tensors[name]
            told = ["none" if it is None else f"{it[0]} {it[1]}" for it in (here, there)]
            raise RequestError(
                f"{rank.path}: tensor {short_repr(stored.name)} is {told[0]}, in"
                f" {first.path.parent.name} it is {told[1]}; fetch the shards of one checkpoint"
            )
