"""Types and functions that all checkpoint formats share: stored tensors, and the boxes of
parameters that they cover.

A tensor in a file covers a box, a range along every dimension, of one parameter's logical view
(models/llama_placements.py). Loading copies the overlap of each stored tensor's box with the box of
this rank's shard; converting copies its overlap with the box of a tensor in another format. So a
format is a mapping of tensor names to boxes, and one mapping serves reading and writing.

weights/hf_checkpoint.py and weights/megatron_checkpoint.py implement `LlamaCheckpoint`;
weights/llama_weights.py and weights/convert.py use it.
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
from steelyard.models import families, llama_placements
from steelyard.models.llama import LlamaShape
from steelyard.models.llama_placements import Box
from steelyard.models.shapes import VARIANT_FIELDS, LinearRope, Llama3Rope, RopeScaling
from steelyard.schema import FrozenModel, describe_first_problem
from steelyard.weights.torch_archive import TensorRef

ByteProgress = Callable[[int, int], None]

# the journal file in the target folder of a conversion; see weights/convert.py
JOURNAL_NAME = "conversion.json"
MAX_JOURNAL_BYTES = 64 << 20

# The dtypes that are weights; integers and 8-bit floats are quantized and mean nothing without
# their scales.
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# By the type of a field of LlamaShape: types that a file may have, and what is allowed as a text.
FIELD_TYPES: dict[Any, tuple[tuple[type, ...], str]] = {
    int: ((int,), "a whole number above 0"),
    float: ((float, int), "a number above 0"),
    bool: ((bool,), "true or false"),
    int | None: ((int,), "a whole number above 0, or none"),
}
OPTIONAL_FIELDS = ("window", "rope_scaling")  # fields of a shape that may be None
TOP_PARAMETERS = ("embed.weight", "norm.weight")
# Parameters of a layer that not every shape has.
OPTIONAL_WEIGHTS: dict[str, Callable[[LlamaShape], bool]] = {
    "qkv.bias": lambda shape: shape.qkv_bias,
    "q_norm.weight": lambda shape: shape.qk_norm,
    "k_norm.weight": lambda shape: shape.qk_norm,
}
SCALING_ADAPTER: TypeAdapter[LinearRope | Llama3Rope] = TypeAdapter(RopeScaling)


@dataclass(frozen=True)
class TensorPart:
    """Which part of a parameter one tensor of a file format holds: our name of the `parameter`, and
    the `box`, a (begin, end) range along each dimension of its logical view (its shape with heads,
    groups and the like as dimensions of their own).

    `logical_shape` is the tensor's own view in as many dimensions; it is larger than the box if
    rows that pad the vocabulary follow. `shape` is the tensor's shape in the file,
    `view_box(tensor)` a view of the box's size.
    """

    parameter: str
    box: Box
    logical_shape: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of this part's tensor in the file: its logical view flattened to one
        dimension (norms, biases) or two.
        """
        return llama_placements.flatten_logical_shape(self.parameter, self.logical_shape)

    def view_box(self, tensor: Tensor) -> Tensor:
        """Return a tensor of this part in its logical shape, cut to the size of the box: without
        rows that pad a vocabulary. It is a view if the tensor is contiguous.
        """
        return tensor.reshape(self.logical_shape)[
            tuple(slice(0, end - begin) for begin, end in self.box)
        ]


@dataclass(frozen=True)
class CheckpointTensor:
    """A tensor in a checkpoint file (`path`), known from the file's header: its `name` there,
    `dtype` as text (such as `BF16`) and `shape`.

    `open()` maps or reads its values and returns them as a CPU tensor; nothing is read before.
    `str()` gives file, name, dtype and shape for messages.
    """

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    open: Callable[[], Tensor]

    def __str__(self) -> str:
        return f"{self.path}: tensor {short_repr(self.name)} {self.dtype} {list(self.shape)}"


def make_checkpoint_tensor(path: Path, name: str, value: Any) -> CheckpointTensor:
    """Return the `CheckpointTensor` for a value that `read_torch_file` returned under a name in the
    file at `path`. No values are read.

    The dtype is spelled as in safetensors (`BF16`), or as torch does if it is not one of plain
    weights (`int8`). Raise RequestError if the value is not a `TensorRef`.
    """
    if not isinstance(value, TensorRef):
        raise RequestError(
            f"{path}: {short_repr(name)} is not a tensor; give a checkpoint that is not quantized"
        )
    dtype = DTYPE_NAMES.get(value.dtype, str(value.dtype).removeprefix("torch."))
    return CheckpointTensor(path, name, dtype, value.shape, value.open)


@dataclass(frozen=True)
class TensorPiece:
    """A `stored` tensor (CheckpointTensor), or a part of it, with the `parameter` (our name) it
    belongs to and the `box` (a range along each dimension) of that parameter's logical view that it
    covers.

    `view` turns the tensor that `stored.open()` returns into one of the box's size; `dtype` is
    torch's. Made by `LlamaCheckpoint.list_pieces`.
    """

    stored: CheckpointTensor
    parameter: str
    box: Box
    view: Callable[[Tensor], Tensor]

    @property
    def dtype(self) -> torch.dtype:
        """Return torch's dtype of the stored tensor. Raise KeyError if it is none for weights."""
        return DTYPES[self.stored.dtype]


@dataclass(frozen=True)
class CheckpointHeaders:
    """What the headers of a checkpoint folder say, in any family and format (`format`:
    `huggingface`, `megatron`, `glm`, `safetensors`). `digest` is a SHA-256 over the headers, not
    over the values; `tp` is the number of tensor-parallel shards.

    `iteration` is how the checkpoint is called in its folder (such as `release`, or a number as
    text; None for Hugging Face's files), `step` the same as a number, 0 if there is none and always
    for GLM. `folders` are where its files are, `files` their (name, bytes); `tensors` are the
    model's, once for every file with a part of it; `notes` are remarks for `weights inspect`.
    """

    format: str
    tp: int
    iteration: str | None
    step: int  # the iteration as a number; 0 if there is none
    folders: tuple[Path, ...]  # where its files are
    files: list[tuple[str, int]]  # name and size of each
    tensors: list[CheckpointTensor]  # of the model, once for every file with a part of it
    digest: str
    notes: tuple[str, ...] = ()


class OpenedCheckpoint(Protocol):
    """A checkpoint folder of any family and format, of which only the headers were read. `headers`
    (CheckpointHeaders) says what is there; `read_dimensions()` returns the model's dimensions by
    the field names of its family, None for those not told; `count_parameters()` their number,
    RequestError if the files are not one complete model.
    """

    @property
    def headers(self) -> CheckpointHeaders: ...

    def read_dimensions(self) -> dict[str, Any]:
        """Return the dimensions of the model by the field names of its family; None for those that
        the files do not tell.
        """

    def count_parameters(self) -> int:
        """Return how many parameters the model has. Raise RequestError if the files are not one
        complete model.
        """


class LlamaCheckpoint(OpenedCheckpoint, Protocol):
    """An opened Llama checkpoint, in Hugging Face's or Megatron's format: an `OpenedCheckpoint`, of
    which only the headers were read. Nothing is compared with a model before `list_pieces(shape)`,
    which returns the stored pieces of every parameter and checks headers, and
    `check_values(shape)`, which reads values that must be equal or zero; both raise RequestError
    for another model.
    """

    def list_pieces(self, shape: LlamaShape) -> list[TensorPiece]:
        """Return pieces that cover each element of each parameter of a model of this shape once.
        Raise RequestError if the checkpoint is of another model; no values are read.
        """

    def check_values(self, shape: LlamaShape) -> None:
        """Read the values that must be equal or zero for a model of this shape, such as copies in
        several shards and biases that it lacks, and raise RequestError if they are not.
        """


class ByteCounter:
    """Counts the bytes that were copied or written, of `total_bytes`: `add(bytes)` adds to
    `done_bytes` and calls `on_progress` (bytes done, bytes in total; None: nobody is told).
    `done_bytes` at the start are those of an earlier run.
    """

    def __init__(
        self, on_progress: ByteProgress | None, total_bytes: int, done_bytes: int = 0
    ) -> None:
        self.on_progress, self.total_bytes, self.done_bytes = on_progress, total_bytes, done_bytes

    def add(self, size_bytes: int) -> None:
        """Add the bytes of one tensor to the counter's `done_bytes`, and call its callback, if any,
        with the bytes done and the total.
        """
        self.done_bytes += size_bytes
        if self.on_progress is not None:
            self.on_progress(self.done_bytes, self.total_bytes)


def describe_source(headers: CheckpointHeaders, parameter_count: int) -> dict[str, Any]:
    """Return where weights came from as a record stores it: `source` (the format), `files` (name
    and bytes of each), `header_sha256` and `parameters`, the number that was given.
    """
    return {
        "source": headers.format,
        "files": [{"name": name, "bytes": size_bytes} for name, size_bytes in headers.files],
        "header_sha256": headers.digest,
        "parameters": parameter_count,
    }


@contextmanager
def refuse_unreadable(folder: Path) -> Iterator[None]:
    """Return a context manager that turns an OSError inside it into a RequestError, which says that
    `folder` cannot be read and why.
    """
    try:
        yield
    except OSError as error:
        raise RequestError(
            f"{folder}: cannot be read ({error.strerror}); make it readable, or give another folder"
        ) from error


def read_journal(path: Path) -> dict[str, Any]:
    """Return the content of a conversion's journal; an empty dict if it is not a JSON object or is
    too large. Raise OSError if it cannot be read.
    """
    try:
        journal = files.parse_json(files.read_file(path, MAX_JOURNAL_BYTES))
    except (ValueError, RecursionError, files.TooLargeError):
        return {}
    return journal if isinstance(journal, dict) else {}


def read_shape(source: LlamaCheckpoint) -> LlamaShape:
    """Return the shape of the whole model as the checkpoint's own files tell it. Only headers and
    config are used.

    Raise RequestError if a dimension is not told (`window` and `rope_scaling` may be), or if there
    are fewer tensors than layers.
    """
    config, folder, tensor_count = (
        source.read_dimensions(),
        source.headers.folders[0],
        len(source.headers.tensors),
    )
    missing = [
        field for field, value in config.items() if value is None and field not in OPTIONAL_FIELDS
    ]
    if missing:
        raise RequestError(
            f"{folder}: its files do not state {', '.join(missing)}; name a case with this model:"
            " --case CASE"
        )
    if config["layers"] > tensor_count:  # untrusted: checked before anything is allocated
        raise RequestError(
            f"{folder}: states {config['layers']} layers but has {tensor_count} tensors; download"
            " it"
            " again"
        )
    return LlamaShape(**config)


def count_checkpoint_parameters(source: LlamaCheckpoint) -> int:
    """Return how many parameters the model of a Llama checkpoint has, tied weights once, from its
    headers. Raise RequestError if the files do not tell its shape or are not a complete model of
    it.
    """
    shape = read_shape(source)
    source.list_pieces(shape)
    return count_elements(shape)


def list_parameter_names(shape: LlamaShape) -> list[str]:
    """Return this package's names of all parameters of a whole Llama of this shape, in order:
    `embed.weight`, those of each layer as `layers.N.…`, `norm.weight`, `output.weight`.

    Biases of QKV and norms of Q and K are there only if the shape has them; an output that is tied
    to the embedding is not.
    """
    layer_names = [
        name
        for name in llama_placements.PLACEMENTS
        if name not in (*TOP_PARAMETERS, "output.weight")
    ]
    present_names = [
        name
        for name in layer_names
        if name not in OPTIONAL_WEIGHTS or OPTIONAL_WEIGHTS[name](shape)
    ]
    in_layers = [f"layers.{i}.{name}" for i in range(shape.layers) for name in present_names]
    return ["embed.weight", *in_layers, "norm.weight", *(() if shape.tied else ("output.weight",))]


def count_elements(shape: LlamaShape) -> int:
    """Return how many numbers the parameters of the whole model have; tied weights count once."""
    return sum(
        math.prod(llama_placements.find_placement(name).logical_shape(shape))
        for name in list_parameter_names(shape)
    )


def intersect_boxes(one: Box, other: Box) -> Box | None:
    """Return the box that two boxes of one parameter have in common, or None if they have no
    element in common. Boxes have a (begin, end) range for each dimension; their number must be
    equal.
    """
    common_box = tuple((max(a[0], b[0]), min(a[1], b[1])) for a, b in zip(one, other, strict=True))
    return common_box if all(begin < end for begin, end in common_box) else None


def slices_within(inner: Box, outer: Box) -> tuple[slice, ...]:
    """Return one slice per dimension, with which a tensor of the size of box `outer` is cut to box
    `inner`, which lies inside it.
    """
    return tuple(slice(a[0] - b[0], a[1] - b[0]) for a, b in zip(inner, outer, strict=True))


def count_box_elements(box: Box) -> int:
    """Return the number of elements in a box."""
    return math.prod(end - begin for begin, end in box)


def copy_overlap(
    piece: TensorPiece, overlap_box: Box, target_view: Tensor, target_box: Box
) -> None:
    """Copy the values of `overlap_box` from a piece into `target_view`, a tensor of the size of
    `target_box`, in place; both boxes contain the overlap.

    Opens the stored tensor, which may raise RequestError. Values are moved to the target's device
    and cast to its dtype there.
    """
    target = target_view[slices_within(overlap_box, target_box)]
    source_values = piece.view(piece.stored.open())[slices_within(overlap_box, piece.box)]
    # To the device first: it casts faster than the host does, and without a copy in host memory.
    target.copy_(source_values.to(target.device))


def check_tensors(
    tensors: Iterable[CheckpointTensor],
    parts: dict[str, TensorPart],
    is_redundant: Callable[[str], bool],
) -> None:
    """Check stored tensors by their headers against those that a model has; the first that is wrong
    raises RequestError. Missing ones are not noticed.

    Refused are a tensor whose name in the file is neither in `parts` nor accepted by
    `is_redundant`, a dtype other than F64, F32, F16 and BF16 (of redundant tensors too), and
    another shape than that of its part.
    """
    for stored in tensors:
        if stored.name not in parts and not is_redundant(stored.name):
            raise RequestError(
                f"{stored}: this model has no such tensor; give weights of the case's model"
            )
        if stored.dtype not in DTYPES:
            raise RequestError(
                f"{stored}: allowed dtypes are {', '.join(DTYPES)}; give weights that are not"
                " quantized"
            )
        if stored.name in parts and stored.shape != parts[stored.name].shape:
            expected_shape = list(parts[stored.name].shape)
            raise RequestError(
                f"{stored}: the shape must be {expected_shape}; give weights of the case's model"
            )


def check_none_missing(
    location: Path, present_names: Iterable[str], parts: dict[str, TensorPart]
) -> None:
    """Raise RequestError, with the first name and the number of them, if tensors of `parts` (by
    name in the file) are not among `present_names`. `location` is the file or folder for the
    message.
    """
    missing = sorted(parts.keys() - set(present_names))
    if missing:
        first = f"tensor {missing[0]!r} {list(parts[missing[0]].shape)}"
        raise RequestError(
            f"{location}: {first} is missing, {len(missing)} in all; give a complete folder"
        )


def parse_shape_fields(path: Path, values: dict[str, Any]) -> dict[str, Any]:
    """Return every field of a LlamaShape by name from what an untrusted file tells (`values`, by
    the same names), converted to its type; None for fields that it does not tell. Other keys are
    ignored.

    Raise RequestError if a value has another type, is a number that is not above 0 or is 2**40 or
    more, or is a `rope_scaling` of no known form. `path` is only for the message.
    """
    parsed: dict[str, Any] = {}
    for field in fields(LlamaShape):
        value = values.get(field.name)
        if field.name == "rope_scaling":
            parsed[field.name] = _parse_scaling(path, value)
            continue
        types, allowed_text = FIELD_TYPES[field.type]
        is_wrong_type = isinstance(value, bool) != (field.type is bool) or not isinstance(
            value, types
        )
        if value is not None and (
            is_wrong_type or (field.type is not bool and not 0 < value < 2**40)
        ):
            raise RequestError(
                f"{path}: {field.name} is {short_repr(value)}, allowed: {allowed_text}; download"
                " the file"
                " again"
            )
        parsed[field.name] = types[0](value) if value is not None else None
    return parsed


def _parse_scaling(path: Path, value: Any) -> LinearRope | Llama3Rope | None:
    """Return `rope_scaling`, a dict from a file, as a model of linear or llama3 scaling; None stays
    None. Raise RequestError, with `path` in the message, if it is neither.
    """
    try:
        return None if value is None else SCALING_ADAPTER.validate_python(value, strict=True)
    except ValidationError as error:
        raise RequestError(
            f"{path}: rope_scaling is {short_repr(value)} ({describe_first_problem(error)});"
            " download the"
            " file again"
        ) from error


def shape_to_json(shape: LlamaShape) -> dict[str, Any]:
    """Return a shape as a dict of JSON data by field, for a conversion's journal. Fields that only
    some models set (`VARIANT_FIELDS`) are left out if they are unset or false.
    """
    plain_values = {
        name: value.model_dump() if isinstance(value, FrozenModel) else value
        for name, value in vars(shape).items()
    }
    return {
        name: value for name, value in plain_values.items() if value or name not in VARIANT_FIELDS
    }


def group_by_parameter(pieces: Iterable[TensorPiece]) -> dict[str, list[TensorPiece]]:
    """Return pieces in lists by the name of their parameter."""
    groups: dict[str, list[TensorPiece]] = {}
    for piece in pieces:
        groups.setdefault(piece.parameter, []).append(piece)
    return groups


def find_overlaps(
    pieces: Iterable[TensorPiece], box_of: Callable[[str], Box]
) -> Iterator[tuple[TensorPiece, Box]]:
    """Yield each piece that overlaps the box wanted of its parameter, with the box that both have
    in common, in the order of the pieces. `box_of` returns the wanted box for a parameter's name.
    """
    for piece in pieces:
        overlap_box = intersect_boxes(piece.box, box_of(piece.parameter))
        if overlap_box is not None:
            yield piece, overlap_box


def detect_family(folder: Path) -> str | None:
    """Return the name of the model family whose checkpoint a folder holds (such as `llama`),
    recognized by names of files and tensors, or None if no family recognizes it.

    Every installed family that has such a test is asked. Raise RequestError if several recognize
    the folder, or if it cannot be read.
    """
    with refuse_unreadable(folder):
        matches = [
            name
            for name, row in families.load_families().items()
            if row.holds and plugins.load_reference(row.holds)(folder)
        ]
    if len(matches) > 1:
        raise RequestError(
            f"{folder}: holds checkpoints of two families, {' and '.join(matches)}; move one away"
        )
    return matches[0] if matches else None


def check_family(folder: Path, family: str) -> None:
    """Raise RequestError if a folder holds a checkpoint of another family than `family`, or of
    several, by the names of files and tensors alone; a folder that no family recognizes passes.
    """
    detected = detect_family(folder)
    if detected not in (None, family):
        raise RequestError(
            f"{folder}: holds a {detected} checkpoint; a {family} checkpoint is needed; give"
            " weights of that family"
        )
