"""What the tensors of a checkpoint hold, whatever its format: boxes of the whole model's
parameters.

A tensor in a file covers a box of one parameter's logical view (models/placements.py). Loading
copies what the boxes of the stored tensors have in common with the box of a shard; converting
copies what they have in common with the box of a tensor of another format. So a format is a table
of names and boxes, and one table serves reading and writing.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from steelyard import files, plugins
from steelyard.errors import RequestError, short_repr
from steelyard.models import families, placements
from steelyard.models.llama import LlamaShape
from steelyard.models.placements import Box
from steelyard.models.shapes import VARIANTS, LinearRope, Llama3Rope, RopeScaling
from steelyard.schema import Frozen, first_problem
from steelyard.weights.settings import agree as agree
from steelyard.weights.settings import allow as allow
from steelyard.weights.torch_archive import TensorRef

ByteProgress = Callable[[int, int], None]

# in a folder that a conversion writes or has written; see weights/convert.py
JOURNAL = "conversion.json"
MAX_JOURNAL_BYTES = 64 << 20

# The dtypes that are weights; integers and 8-bit floats are quantised and mean nothing without
# their scales.
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
NAMED = {dtype: name for name, dtype in DTYPES.items()}
# What a field of a shape may be in a file, and in words.
KINDS: dict[Any, tuple[tuple[type, ...], str]] = {
    int: ((int,), "a whole number above 0"),
    float: ((float, int), "a number above 0"),
    bool: ((bool,), "true or false"),
    int | None: ((int,), "a whole number above 0, or none"),
}
OPTIONAL = ("window", "rope_scaling")  # fields of a shape that may be None
TOP = ("embed.weight", "norm.weight")
# Parameters of a layer that not every shape has.
OPTIONAL_WEIGHTS: dict[str, Callable[[LlamaShape], bool]] = {
    "qkv.bias": lambda shape: shape.qkv_bias,
    "q_norm.weight": lambda shape: shape.qk_norm,
    "k_norm.weight": lambda shape: shape.qk_norm,
}
SCALING: TypeAdapter[LinearRope | Llama3Rope] = TypeAdapter(RopeScaling)


@dataclass(frozen=True)
class TensorPart:
    """What one tensor of a format covers of a parameter's logical view. The tensor's own is larger
    than its box where rows pad a vocabulary."""

    parameter: str
    box: Box
    logical_shape: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape in the file."""
        return placements.flat_shape(self.parameter, self.logical_shape)

    def inside(self, tensor: Tensor) -> Tensor:
        """A view of the tensor, as large as its box."""
        return tensor.reshape(self.logical_shape)[
            tuple(slice(0, end - begin) for begin, end in self.box)
        ]


@dataclass(frozen=True)
class Stored:
    """A tensor of a checkpoint: where it is, what the file says of it, and its values, mapped when
    they are asked for.
    """

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    open: Callable[[], Tensor]

    def __str__(self) -> str:
        return f"{self.path}: tensor {short_repr(self.name)} {self.dtype} {list(self.shape)}"


def saved_tensor(path: Path, name: str, value: Any) -> Stored:
    """What a file of torch.save holds under a name."""
    if not isinstance(value, TensorRef):
        raise RequestError(
            f"{path}: {short_repr(name)} is no tensor; give a checkpoint that is not quantised"
        )
    dtype = NAMED.get(value.dtype, str(value.dtype).removeprefix("torch."))
    return Stored(path, name, dtype, value.shape, value.open)


@dataclass(frozen=True)
class Piece:
    """A stored tensor, or a part of one, and the box it covers. `view` turns the tensor into one as
    large as the box.
    """

    stored: Stored
    parameter: str
    box: Box
    view: Callable[[Tensor], Tensor]

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.stored.dtype]


@dataclass(frozen=True)
class Headers:
    """The headers of a checkpoint folder, of any family and format."""

    format: str
    tp: int
    iteration: str | None
    step: int  # the iteration as a number; 0 if there is none
    folders: tuple[Path, ...]  # where its files are
    files: list[tuple[str, int]]  # name and size of each
    tensors: list[Stored]  # the model's, each once for every file that holds a part of it
    digest: str
    notes: tuple[str, ...] = ()


class Opened(Protocol):
    """A folder of any family and format whose headers were read."""

    @property
    def headers(self) -> Headers: ...

    def config(self) -> dict[str, Any]:
        """Return the dimensions of the model; None where the files do not tell."""

    def count(self) -> int:
        """Return how many parameters the model has. Raise RequestError if the files are not one
        whole model."""


class Checkpoint(Opened, Protocol):
    """A Llama's. Nothing is compared with a model before `pieces` and `check_values` are called."""

    def pieces(self, shape: LlamaShape) -> list[Piece]:
        """Return every parameter of a model of this shape, each element covered once. Raise
        RequestError if the checkpoint is one of another model."""

    def check_values(self, shape: LlamaShape) -> None:
        """Raise RequestError if values that must be equal or zero are not."""


class Progress:
    """The bytes that are done of all; whoever watches is told after every tensor."""

    def __init__(self, tell: ByteProgress | None, total: int, done: int = 0) -> None:
        self.tell, self.total, self.done = tell, total, done

    def add(self, size_bytes: int) -> None:
        self.done += size_bytes
        if self.tell is not None:
            self.tell(self.done, self.total)


def facts(headers: Headers, parameters: int) -> dict[str, Any]:
    """Return where weights came from, as a record of any family says it."""
    return {
        "source": headers.format,
        "files": [{"name": name, "bytes": size_bytes} for name, size_bytes in headers.files],
        "header_sha256": headers.digest,
        "parameters": parameters,
    }


@contextmanager
def readable(folder: Path) -> Iterator[None]:
    """Say in one line that a folder, or a file in it, cannot be read."""
    try:
        yield
    except OSError as error:
        raise RequestError(
            f"{folder}: cannot be read ({error.strerror}); make it readable, or give another folder"
        ) from error


def read_journal(path: Path) -> dict[str, Any]:
    """A journal as it is; empty if it is none."""
    try:
        found = files.parse(files.read(path, MAX_JOURNAL_BYTES))
    except (ValueError, RecursionError, files.TooLargeError):
        return {}
    return found if isinstance(found, dict) else {}


def shape_in(source: Checkpoint) -> LlamaShape:
    """The whole model's, as its files tell it."""
    config, where, tensors = source.config(), source.headers.folders[0], len(source.headers.tensors)
    missing = [field for field, value in config.items() if value is None and field not in OPTIONAL]
    if missing:
        raise RequestError(
            f"{where}: does not tell {', '.join(missing)} of its model; name the case of the model"
            " with --case"
        )
    if config["layers"] > tensors:  # a number of a stranger, before anything is made of that many
        raise RequestError(
            f"{where}: tells of {config['layers']} layers and has {tensors} tensors; download it"
            " again"
        )
    return LlamaShape(**config)


def count(source: Checkpoint) -> int:
    """How many parameters a checkpoint's model has, if all of it is there."""
    shape = shape_in(source)
    source.pieces(shape)
    return elements(shape)


def parameters(shape: LlamaShape) -> list[str]:
    """The names of a whole model's parameters; a tied output is none."""
    leaves = [name for name in placements.PLACEMENTS if name not in (*TOP, "output.weight")]
    layer = [
        name for name in leaves if name not in OPTIONAL_WEIGHTS or OPTIONAL_WEIGHTS[name](shape)
    ]
    within = [f"layers.{i}.{name}" for i in range(shape.layers) for name in layer]
    return ["embed.weight", *within, "norm.weight", *(() if shape.tied else ("output.weight",))]


def elements(shape: LlamaShape) -> int:
    """How many parameters the whole model has."""
    return sum(
        math.prod(placements.placement(name).logical_shape(shape)) for name in parameters(shape)
    )


def overlap(one: Box, other: Box) -> Box | None:
    both = tuple((max(a[0], b[0]), min(a[1], b[1])) for a, b in zip(one, other, strict=True))
    return both if all(begin < end for begin, end in both) else None


def within(inner: Box, outer: Box) -> tuple[slice, ...]:
    """Where a box lies in a larger one."""
    return tuple(slice(a[0] - b[0], a[1] - b[0]) for a, b in zip(inner, outer, strict=True))


def size(box: Box) -> int:
    return math.prod(end - begin for begin, end in box)


def copy(piece: Piece, both: Box, place: Tensor, box: Box) -> None:
    """What a piece has in common with a box, into a place as large as that box."""
    target = place[within(both, box)]
    found = piece.view(piece.stored.open())[within(both, piece.box)]
    # To the device first: it casts faster than the host does, and without a copy in host memory.
    target.copy_(found.to(target.device))


def check_entries(
    tensors: Iterable[Stored], parts: dict[str, TensorPart], known: Callable[[str], bool]
) -> None:
    """Every tensor is a part of the model, with its shape and a dtype that is a weight's, or one
    known to be redundant.
    """
    for stored in tensors:
        if stored.name not in parts and not known(stored.name):
            raise RequestError(
                f"{stored} has no place in this model; give weights of the case's model"
            )
        if stored.dtype not in DTYPES:
            raise RequestError(
                f"{stored}: allowed dtypes are {', '.join(DTYPES)}; give weights that are not"
                " quantized"
            )
        if stored.name in parts and stored.shape != parts[stored.name].shape:
            wanted = list(parts[stored.name].shape)
            raise RequestError(
                f"{stored}: the shape must be {wanted}; give weights of the case's model"
            )


def check_missing(where: Path, found: Iterable[str], parts: dict[str, TensorPart]) -> None:
    missing = sorted(parts.keys() - set(found))
    if missing:
        first = f"tensor {missing[0]!r} {list(parts[missing[0]].shape)}"
        raise RequestError(
            f"{where}: {first} is missing, {len(missing)} in all; give a complete folder"
        )


def typed(path: Path, values: dict[str, Any]) -> dict[str, Any]:
    """Fields of a shape as a stranger's file tells them, each of its type; None where it does not."""
    out: dict[str, Any] = {}
    for field in fields(LlamaShape):
        value = values.get(field.name)
        if field.name == "rope_scaling":
            out[field.name] = _scaling(path, value)
            continue
        kinds, words = KINDS[field.type]
        wrong = isinstance(value, bool) != (field.type is bool) or not isinstance(value, kinds)
        if value is not None and (wrong or (field.type is not bool and not 0 < value < 2**40)):
            raise RequestError(
                f"{path}: {field.name} is {short_repr(value)}, allowed: {words}; download the file"
                " again"
            )
        out[field.name] = kinds[0](value) if value is not None else None
    return out


def _scaling(path: Path, value: Any) -> LinearRope | Llama3Rope | None:
    try:
        return None if value is None else SCALING.validate_python(value, strict=True)
    except ValidationError as error:
        raise RequestError(
            f"{path}: rope_scaling is {short_repr(value)} ({first_problem(error)}); download the"
            " file again"
        ) from error


def as_table(shape: LlamaShape) -> dict[str, Any]:
    """A shape as JSON has it, without what it does without."""
    told = {
        name: value.model_dump() if isinstance(value, Frozen) else value
        for name, value in vars(shape).items()
    }
    return {name: value for name, value in told.items() if value or name not in VARIANTS}


def by_parameter(pieces: Iterable[Piece]) -> dict[str, list[Piece]]:
    out: dict[str, list[Piece]] = {}
    for piece in pieces:
        out.setdefault(piece.parameter, []).append(piece)
    return out


def common(pieces: Iterable[Piece], boxes: Callable[[str], Box]) -> Iterator[tuple[Piece, Box]]:
    """The pieces that reach into a parameter's box, each with what they have in common."""
    for piece in pieces:
        both = overlap(piece.box, boxes(piece.parameter))
        if both is not None:
            yield piece, both


def family_of(folder: Path) -> str | None:
    """The one family that knows a folder's names; None, if none does."""
    with readable(folder):
        found = [
            name
            for name, row in families.table().items()
            if row.holds and plugins.load(row.holds)(folder)
        ]
    if len(found) > 1:
        raise RequestError(
            f"{folder}: holds checkpoints of the families {' and '.join(found)}; move one away"
        )
    return found[0] if found else None


def check_family(folder: Path, family: str) -> None:
    """Refuse weights of another family, by the names of files and tensors alone."""
    found = family_of(folder)
    if found not in (None, family):
        raise RequestError(
            f"{folder}: holds a checkpoint of the family {found}, and one of the family {family} is"
            " wanted; give weights of that family"
        )
