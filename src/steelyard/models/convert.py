"""What a checkpoint holds, and the same weights in another layout or other shards.

A conversion makes one tensor at a time, whatever the size of the model, and keeps a journal in its target: run again, it
goes on after the last complete file. The files that make a folder a checkpoint come last, and then the journal goes.
"""

import json
import math
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from steelyard import case
from steelyard.errors import LostError, RequestError
from steelyard.models import layouts, weights, writing
from steelyard.models.layouts import JOURNAL, Checkpoint, Part, Piece, Progress
from steelyard.models.llama import LlamaShape
from steelyard.models.writing import PART, File, Plan, Planned, Planning
from steelyard.question import Model

MAX_JOURNAL_BYTES = 64 << 20
SHOWN = {"F64": "fp64", "F32": "fp32", "F16": "fp16", "BF16": "bf16"}


@dataclass(frozen=True)
class Inspection:
    """A checkpoint as its files describe it. Sizes are of the files; what a shape's fields are not told is None."""

    layout: str
    tp: int
    iteration: str | None
    dtype: str
    parameters: int
    size_bytes: int
    files: list[tuple[str, int]]
    shape: dict[str, Any]
    notes: list[str]


@dataclass(frozen=True)
class Conversion:
    """The files of a finished conversion, and how many of them an earlier run had finished."""

    files: list[tuple[str, int]]
    size_bytes: int
    kept: int


def inspect(folder: Path) -> Inspection:
    """What a folder holds. What keeps it from being used as it is, is a note."""
    source = weights.open_folder(folder)
    told = source.told()
    notes = source.notes()
    dtypes, parameters = Counter[str](), 0
    for stored in source.tensors:
        dtypes[SHOWN.get(stored.dtype, stored.dtype.lower())] += math.prod(stored.shape)
        parameters += math.prod(stored.shape)
    try:
        shape = _shape(source, told, None)
        source.pieces(shape)
        parameters = layouts.elements(shape)
    except RequestError as error:
        notes.append(str(error))
    return Inspection(
        layout=source.layout,
        tp=source.tp,
        iteration=source.iteration,
        dtype="+".join(name for name, _ in dtypes.most_common()),
        parameters=parameters,
        size_bytes=sum(size for _, size in source.files),
        files=source.files,
        shape={field: value for field, value in told.items() if field != "head_dim"},
        notes=notes,
    )


def convert(
    source: Path, target: Path, to: str, tp: int, model: Model | None = None, progress: Progress | None = None
) -> Conversion:
    """Write a checkpoint's weights to a folder, bit for bit. `progress` is told the bytes of tensors that are written,
    kept ones included, and those in all, after every tensor."""
    checkpoint = weights.open_folder(source)
    shape = _shape(checkpoint, checkpoint.told(), model)
    _check_request(to, tp, shape)
    pieces = layouts.by_parameter(checkpoint.pieces(shape))
    checkpoint.check_values(shape)
    plan = writing.PLANS[to](Planning(shape, lambda p: _dtype(p, pieces), checkpoint.iteration, checkpoint.step), tp)
    _check_apart(target, (source, *checkpoint.folders))
    journal = Journal.open(target, {"source": checkpoint.digest(), "to": to, "tp": tp, "shape": asdict(shape)})
    kept = [file for file in plan.files if journal.finished(file.name)]
    _check_room(target, plan, kept)
    journal.begin()
    try:
        _write(target, plan, journal, lambda planned: _make(planned, pieces), progress)
    except OSError as error:
        raise LostError(
            f"{error.filename or target}: cannot be written ({error.strerror}); make room for it, then convert again: "
            "complete files are kept"
        ) from error
    files = [(name, (target / name).stat().st_size) for name in (*(file.name for file in plan.files), *plan.last)]
    return Conversion(files, sum(size for _, size in files), len(kept))


def _shape(source: Checkpoint, told: dict[str, Any], model: Model | None) -> LlamaShape:
    """The whole model's: the case's, or what the files tell."""
    if model is not None:
        shape = weights.shape_of(model)
        return replace(shape, positions=told["positions"] or shape.positions)
    missing = [field for field, value in told.items() if value is None]
    where = source.folders[0]
    if missing:
        raise RequestError(f"{where}: does not tell {', '.join(missing)} of its model; name the case of the model with --case")
    if told["layers"] > len(source.tensors):  # a number of a stranger, before anything is made of that many
        raise RequestError(f"{where}: tells of {told['layers']} layers and has {len(source.tensors)} tensors; fetch it again")
    return LlamaShape(**told)


def _check_request(to: str, tp: int, shape: LlamaShape) -> None:
    if to not in writing.PLANS:
        raise RequestError(f"layout {to!r} is not known; allowed: {', '.join(writing.PLANS)}")
    if tp < 1 or (to == "hf" and tp != 1):
        raise RequestError(f"tensor parallel size {tp} is not possible for {to}; allowed: 1, for megatron more")
    for what, size in (("kv_heads", shape.kv_heads), ("ffn", shape.ffn)):
        if size % tp:
            raise RequestError(f"{what} {size} cannot be divided by {tp}; give a tensor parallel size that divides it")


def _dtype(part: Part, pieces: dict[str, list[Piece]]) -> str:
    """The dtype of a tensor is that of what it is made of; of all weights', if it is made of nothing."""
    own = pieces.get(part.parameter, [])
    every = own or [piece for of_one in pieces.values() for piece in of_one]
    found = Counter(piece.stored.dtype for piece, _ in layouts.common(own, lambda name: part.box))
    found = found or Counter(piece.stored.dtype for piece in every)
    if own and len(found) > 1:
        first, *_ = own
        raise RequestError(
            f"{first.stored}: is to be joined with tensors of another dtype ({', '.join(sorted(found))}); "
            "save the weights in one dtype"
        )
    return found.most_common(1)[0][0]


def _make(planned: Planned, pieces: dict[str, list[Piece]]) -> Tensor:
    part = planned.part
    whole = torch.zeros(part.form, dtype=layouts.DTYPES[planned.dtype])
    for piece, both in layouts.common(pieces.get(part.parameter, ()), lambda name: part.box):
        layouts.copy(piece, both, part.inside(whole), part.box)
    return whole


def _write(target: Path, plan: Plan, journal: "Journal", make: Callable[[Planned], Tensor], progress: Progress | None) -> None:
    total = sum(file.nbytes for file in plan.files)
    done = sum(file.nbytes for file in plan.files if journal.finished(file.name))

    def tell(planned: Planned) -> None:
        nonlocal done
        done += planned.nbytes
        if progress is not None:
            progress(done, total)

    for file in plan.files:
        path = target / file.name
        temporary = path.with_name(path.name + PART)
        temporary.unlink(missing_ok=True)
        if not journal.finished(file.name):
            path.parent.mkdir(parents=True, exist_ok=True)
            file.write(temporary, file, make, tell)
            writing.move(temporary, path)
            journal.note(file.name)
    for name, content in plan.last.items():
        writing.write_small(target / name, content)
    journal.remove()


def _check_apart(target: Path, sources: tuple[Path, ...]) -> None:
    there = target.resolve()
    for source in sources:
        here = source.resolve()
        if here.is_relative_to(there) or there.is_relative_to(here):
            raise RequestError(f"target {str(target)!r} is the source {str(source)!r}, in it or above it; give another folder")


def _check_room(target: Path, plan: Plan, kept: list[File]) -> None:
    need = sum(file.nbytes for file in plan.files) - sum(file.nbytes for file in kept)
    free = shutil.disk_usage(next(folder for folder in (target, *target.resolve().parents) if folder.is_dir())).free
    if need > free:
        raise RequestError(f"target {str(target)!r} needs {need} bytes and {free} are free; make room, or give another folder")


class Journal:
    """What a conversion is of, and which files of it are complete, in a file of its target."""

    def __init__(self, folder: Path, what: dict[str, Any], files: dict[str, int]) -> None:
        self.path = folder / JOURNAL
        self.what = what
        self.files = files

    @classmethod
    def open(cls, folder: Path, what: dict[str, Any]) -> "Journal":
        """That of an interrupted conversion of the same kind, or a new one in a folder that is absent or empty."""
        path = folder / JOURNAL
        try:
            if path.is_file():
                return cls(folder, what, _resumed(path, what))
            if folder.exists() and any(item.name != JOURNAL + PART for item in folder.iterdir()):
                raise RequestError(f"target {str(folder)!r} is not empty; give a folder that is, or that does not exist")
        except OSError as error:
            raise RequestError(f"target {str(folder)!r} cannot be read ({error.strerror}); give another folder") from error
        return cls(folder, what, {})

    def begin(self) -> None:
        """Prove, before any work, that the folder can be written to."""
        folder = self.path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.write()
        except OSError as error:
            raise RequestError(f"target {str(folder)!r} cannot be written ({error.strerror}); give another folder") from error

    def finished(self, name: str) -> bool:
        path = self.path.parent / name
        return name in self.files and path.is_file() and path.stat().st_size == self.files[name]

    def note(self, name: str) -> None:
        self.files[name] = (self.path.parent / name).stat().st_size
        self.write()

    def write(self) -> None:
        writing.write_small(self.path, case.canonical({**self.what, "files": self.files}).encode())

    def remove(self) -> None:
        self.path.unlink()


def _resumed(path: Path, what: dict[str, Any]) -> dict[str, int]:
    """The finished files that a journal names, if it is of this conversion."""
    with path.open("rb") as file:
        raw = file.read(MAX_JOURNAL_BYTES)
    try:
        found = json.loads(raw)
        files = found.pop("files")
        known = all(isinstance(name, str) and isinstance(size, int) for name, size in files.items())
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError):
        known = False
    if not known:
        raise RequestError(f"{path}: is not the journal of a conversion; give another folder, or empty this one")
    differ = sorted(key for key in what if found.get(key) != what[key])
    if differ:
        raise RequestError(
            f"{path}: is of another conversion ({', '.join(differ)} differ); give another folder, or empty this one"
        )
    return dict(files)
