"""Open, check, load and write GLM checkpoints, in the format of GLM's authors or in safetensors,
without running code from the files.

The authors' format is a folder with latest_checkpointed_iteration.txt, which names a folder beside
it with the file mp_rank_00_model_states.pt; the weights are its dict `module`, and all else in it
is ignored. In safetensors all names may begin with `glm.`. The digest covers sizes of files, and
name, dtype and shape of every tensor, not the values. training/glm_trainer.py loads from here.
"""

import hashlib
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from steelyard import files
from steelyard.errors import RequestError, short_repr
from steelyard.models import families
from steelyard.models.glm import Glm
from steelyard.models.shapes import GlmModel
from steelyard.models.tensors import skip_initialization
from steelyard.schema import to_canonical_json
from steelyard.weights import checkpoint_tensors, hf_checkpoint
from steelyard.weights.checkpoint_tensors import (
    ByteProgress,
    CheckpointHeaders,
    CheckpointTensor,
    TensorPart,
    make_checkpoint_tensor,
)
from steelyard.weights.hf_config import INDEX_NAME, SINGLE_NAME
from steelyard.weights.megatron_checkpoint import TRACKER_NAME, iterate_leaves
from steelyard.weights.torch_files import read_torch_file as read_saved

GLM_FILE_NAME = "mp_rank_00_model_states.pt"
SHARD_PATTERN = "mp_rank_[0-9][0-9]*_model_states.pt"
MODULE_KEY = "module"
PREFIX = "glm."
WORD_EMBEDDINGS = "word_embeddings.weight"
POSITIONS = "transformer.position_embeddings.weight"
FFN_WEIGHT = "transformer.layers.0.mlp.dense_h_to_4h.weight"
MATRIX_DIMENSIONS = 2  # dimensions
MAX_SIZE = 1 << 24  # of a dimension; no model is as wide, and products of two fit an int64
MAX_TRACKER_BYTES = 1000

FileSizes = list[tuple[str, int]]  # name and size of each
Notes = tuple[str, ...]

_LAYER = re.compile(
    r"transformer\.layers\.[0-9]{1,6}\.attention\.query_key_value\.weight", re.ASCII
)


@dataclass(frozen=True)
class GlmCheckpoint:
    """An opened GLM checkpoint of which only the `headers` were read: `parameters` are its tensors
    (CheckpointTensor) by the names of the model's parameters, not yet compared with a model.
    `location` is its one file, or its folder, for messages.

    As an `OpenedCheckpoint` it tells the model's dimensions (`read_dimensions`, None for those not
    shown) and number of parameters (`count_parameters`, RequestError if it is no complete GLM) from
    the tensors' shapes.
    """

    headers: CheckpointHeaders
    location: Path
    parameters: dict[str, CheckpointTensor]

    def read_dimensions(self) -> dict[str, Any]:
        """Return the dimensions of a GLM checkpoint's model by the fields of GlmModel, as the
        shapes of its tensors show them; None for those they do not show, and always for `heads`.
        """
        layers = sum(1 for name in self.parameters if _LAYER.fullmatch(name))
        positions = self._get_matrix_size(POSITIONS, 0)
        return {
            "layers": layers or None,
            "hidden": self._get_matrix_size(WORD_EMBEDDINGS, 1),
            "heads": None,  # no tensor's shape depends on it
            "ffn": self._get_matrix_size(FFN_WEIGHT, 0),
            "vocab": self._get_matrix_size(WORD_EMBEDDINGS, 0),
            "positions": (positions or 1) - 1 or None,  # the embedding has one row more
        }

    def _get_matrix_size(self, name: str, dimension: int) -> int | None:
        """Return the size of this checkpoint's tensor `name` along a dimension (0 or 1); None if
        there is no such tensor, it does not have two dimensions, or the size is 0.
        """
        stored = self.parameters.get(name)
        return (
            stored.shape[dimension] or None
            if stored is not None and len(stored.shape) == MATRIX_DIMENSIONS
            else None
        )

    def count_parameters(self) -> int:
        """Return how many parameters the GLM of this checkpoint has. Raise RequestError if its
        tensors are not exactly those of a GLM with the dimensions that they show.
        """
        expected_shapes = get_parameter_shapes(self._make_model())
        check_glm_tensors(self, expected_shapes)
        return sum(math.prod(shape) for shape in expected_shapes.values())

    def _make_model(self) -> GlmModel:
        """Return the GlmModel with the dimensions that this checkpoint's tensors show, and 1 for
        `heads`, which no shape depends on. Raise RequestError if a dimension is unknown or above
        `MAX_SIZE`.
        """
        config = {
            field: value for field, value in self.read_dimensions().items() if field != "heads"
        }
        missing = [field for field, value in config.items() if value is None]
        if missing:
            raise RequestError(
                f"{self.location}: its files do not state {', '.join(missing)}; give a complete"
                " folder"
            )
        for field, value in config.items():
            if value > MAX_SIZE:
                raise RequestError(
                    f"{self.location}: {field} is {value}, allowed: up to {MAX_SIZE}; download it"
                    " again"
                )
        return GlmModel(family="glm", heads=1, **config)


def _make_checkpoint(
    format: str,
    folder: Path,
    location: Path,
    sizes: FileSizes,
    tensors: dict[str, CheckpointTensor],
    iteration: str | None,
    notes: Notes = (),
) -> GlmCheckpoint:
    """Return a GlmCheckpoint of one shard from its files (`sizes`: name and bytes) and tensors,
    with a SHA-256 of these headers as digest. `iteration` is the name of its folder, None for
    Hugging Face's files; the step is 0.
    """
    descriptions = sorted(
        (name, stored.dtype, list(stored.shape)) for name, stored in tensors.items()
    )
    digest = hashlib.sha256(
        to_canonical_json({"files": sizes, "tensors": descriptions}).encode()
    ).hexdigest()
    headers = CheckpointHeaders(
        format, 1, iteration, 0, (folder,), sizes, list(tensors.values()), digest, notes
    )
    return GlmCheckpoint(headers, location, tensors)


def get_parameter_shapes(model: GlmModel) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter of a GLM by name; the model is made on torch's meta
    device, so no memory is taken for values.
    """
    with skip_initialization(torch.device("meta")):
        return {name: tuple(parameter.shape) for name, parameter in Glm(model).named_parameters()}


def has_glm_checkpoint(folder: Path) -> bool:
    """Return whether a folder holds a GLM checkpoint: the authors' file mp_rank_00_model_states.pt
    in it or one level below, or Hugging Face files with GLM's word embeddings. Raise OSError or
    RequestError if its files cannot be read.
    """
    has_own_format = (folder / GLM_FILE_NAME).is_file() or any(folder.glob(f"*/{GLM_FILE_NAME}"))
    return has_own_format or not {WORD_EMBEDDINGS, PREFIX + WORD_EMBEDDINGS}.isdisjoint(
        hf_checkpoint.list_tensor_names(folder)
    )


def load_glm(model: Glm, folder: Path, progress: ByteProgress | None = None) -> dict[str, Any]:
    """Fill a GLM from a checkpoint folder in place, casting to its dtype on its device, and return
    where the weights came from, for the record: `describe_source`, and `iteration` if there is one.

    All headers are checked before the first value is copied. `progress` is called after every
    tensor with the bytes copied so far and in all. Raise RequestError if the folder has no GLM
    checkpoint, or one of another model.
    """
    source = open_glm_checkpoint(folder)
    parameters = dict(model.named_parameters())
    check_glm_tensors(
        source, {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    )
    copied = checkpoint_tensors.ByteCounter(
        progress, sum(_count_bytes(stored) for stored in source.parameters.values())
    )
    with torch.no_grad():
        for name, parameter in parameters.items():
            stored = source.parameters[name]
            parameter.copy_(stored.open().to(parameter.device))
            copied.add(_count_bytes(stored))
    description = checkpoint_tensors.describe_source(
        source.headers, sum(parameter.numel() for parameter in parameters.values())
    )
    return (
        description
        if source.headers.iteration is None
        else description | {"iteration": source.headers.iteration}
    )


def _count_bytes(stored: CheckpointTensor) -> int:
    """Return a stored tensor's size in bytes."""
    return math.prod(stored.shape) * checkpoint_tensors.DTYPES[stored.dtype].itemsize


def open_glm_checkpoint(folder: Path) -> GlmCheckpoint:
    """Open the GLM checkpoint in a folder, in the format of GLM's authors (tracker,
    mp_rank_00_model_states.pt) or in Hugging Face's files of weights: headers are read, values are
    not.

    Raise RequestError if the folder does not exist or cannot be read, holds no checkpoint, one in
    both formats, one of another family, or a damaged one.
    """
    if not folder.is_dir():
        problem = "is a file, a folder is expected" if folder.is_file() else "does not exist"
        raise RequestError(
            f"weights {str(folder)!r}: {problem}; give the folder of a GLM checkpoint, or random"
        )
    with checkpoint_tensors.refuse_unreadable(folder):
        checkpoint_tensors.check_family(folder, families.GLM.name)
        has_own_format, has_safetensors = (
            (folder / TRACKER_NAME).exists() or (folder / GLM_FILE_NAME).exists(),
            hf_checkpoint.has_weights_files(folder),
        )
        if has_own_format and has_safetensors:
            raise RequestError(
                f"{folder}: holds GLM's own checkpoint and one of safetensors; move one away"
            )
        if not has_own_format and not has_safetensors:
            raise RequestError(
                f"{folder.resolve()}: holds no checkpoint, neither GLM's own ({TRACKER_NAME} or"
                f" {GLM_FILE_NAME})"
                f" nor {SINGLE_NAME} or {INDEX_NAME}; give a folder that does"
            )
        return _open_safetensors(folder) if has_safetensors else _open_own_format(folder)


def check_glm_tensors(source: GlmCheckpoint, expected_shapes: dict[str, tuple[int, ...]]) -> None:
    """Raise RequestError unless a checkpoint has exactly the tensors of a model with parameters of
    these shapes (by name), in dtypes of plain weights. Values are not read.
    """
    embeddings = source.parameters.get(WORD_EMBEDDINGS)
    if (
        embeddings is not None
        and len(embeddings.shape) == 2
        and embeddings.shape[0] != expected_shapes[WORD_EMBEDDINGS][0]
    ):
        raise RequestError(
            f"{embeddings.path}: {short_repr(embeddings.name)} has {embeddings.shape[0]} rows, the"
            " case's vocab is"
            f" {expected_shapes[WORD_EMBEDDINGS][0]}; give weights of the case's model, or the"
            " case of theirs"
        )
    parts = {
        name: TensorPart(name, tuple((0, size) for size in shape), shape)
        for name, shape in expected_shapes.items()
    }
    parts_by_file_name = {
        stored.name: parts[name] for name, stored in source.parameters.items() if name in parts
    }
    checkpoint_tensors.check_tensors(
        source.parameters.values(), parts_by_file_name, lambda name: False
    )
    checkpoint_tensors.check_none_missing(source.location, source.parameters, parts)


def _open_own_format(folder: Path) -> GlmCheckpoint:
    """Open a checkpoint in the authors' format: mp_rank_00_model_states.pt in the folder itself, or
    in the folder below it that the tracker names. Its `iteration` is that folder's name.

    Raise RequestError if the tracker is wrong, the file is missing or has no weights (dict
    `module`), or there are other shards beside it.
    """
    iteration = None if (folder / GLM_FILE_NAME).exists() else _read_tracker(folder / TRACKER_NAME)
    inner_folder = folder if iteration is None else folder / iteration
    others = sorted(
        path.name for path in inner_folder.glob(SHARD_PATTERN) if path.name != GLM_FILE_NAME
    )
    if others:
        raise RequestError(
            f"{inner_folder / others[0]}: a checkpoint split over ranks is not supported; merge it"
            f" into one {GLM_FILE_NAME}"
        )
    path = inner_folder / GLM_FILE_NAME
    if not path.is_file():
        raise RequestError(
            f"{path}: is missing, and {TRACKER_NAME} names its folder; fetch it, or give a complete"
            " checkpoint"
        )
    content = read_saved(path)
    module = content.get(MODULE_KEY) if isinstance(content, dict) else None
    if not isinstance(module, dict) or not module:
        raise RequestError(
            f"{path}: holds no weights, a table {MODULE_KEY!r} is expected; give a checkpoint of"
            " GLM"
        )
    sizes = [(str(path.relative_to(folder)), path.stat().st_size)]
    iteration_name = iteration or inner_folder.resolve().name
    tensors = {
        key: make_checkpoint_tensor(path, key, value) for key, value in iterate_leaves(module)
    }
    notes = (
        ("the file holds an optimizer's state too; it is not read",)
        if "optimizer" in content
        else ()
    )
    return _make_checkpoint("glm", folder, path, sizes, tensors, iteration_name, notes)


def _read_tracker(path: Path) -> str:
    """Return the folder name that a tracker file contains, without surrounding white space. Raise
    RequestError if it is not a plain printable ASCII name of a folder, so that it cannot lead
    elsewhere; OSError if the file cannot be read.
    """
    with files.open_regular(path) as file:
        raw = file.read(MAX_TRACKER_BYTES)
    name = raw.decode("ascii", "replace").strip()
    if (
        not name.isascii()
        or not name.isprintable()
        or set(name) & set("/\\")
        or name in ("", ".", "..")
    ):
        raise RequestError(
            f"{path}: names {short_repr(name)}, allowed: the plain name of a folder beside it;"
            " download it again"
        )
    return name


def _open_safetensors(folder: Path) -> GlmCheckpoint:
    """Open a GLM checkpoint in Hugging Face's files, safetensors or pytorch_model.bin; a prefix
    `glm.` is removed if all names have it. Raise RequestError if the files are damaged or
    incomplete.
    """
    shards = hf_checkpoint.read_weights_files(folder)
    tensors = {name: stored for shard in shards for name, stored in shard.tensors.items()}
    if tensors and all(name.startswith(PREFIX) for name in tensors):
        tensors = {name.removeprefix(PREFIX): stored for name, stored in tensors.items()}
    sizes = [(shard.path.name, shard.size_bytes) for shard in shards]
    return _make_checkpoint("safetensors", folder, folder, sizes, tensors, None)


def write_glm_checkpoint(model: Glm, folder: Path, iteration: int) -> None:
    """Write a GLM's parameters, copied to the CPU, as a checkpoint in the authors' format into
    `folder/ITERATION`, which is created; files that exist are replaced.

    The tracker file in `folder`, which names it, is written once the checkpoint is complete. Raise
    OSError if a file cannot be written.
    """
    inner_folder = folder / str(iteration)
    inner_folder.mkdir(parents=True, exist_ok=True)
    module = {
        name: parameter.detach().cpu().clone() for name, parameter in model.named_parameters()
    }
    files.write_file(
        inner_folder / GLM_FILE_NAME,
        lambda file: torch.save({MODULE_KEY: module, "iteration": iteration}, file),
    )
    files.write_file(folder / TRACKER_NAME, f"{iteration}\n".encode())
