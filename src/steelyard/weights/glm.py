"""Open, check, load and write GLM checkpoints, in the format of GLM's authors or in safetensors,
without running code from the files.

The authors' format is a folder with latest_checkpointed_iteration.txt, which names a folder beside
it with the file mp_rank_00_model_states.pt; the weights are its dict `module`, and all else in it
is ignored. In safetensors all names may begin with `glm.`. The digest covers sizes of files, and
name, dtype and shape of every tensor, not the values. training/glm.py loads from here.
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
from steelyard.models.tensors import without_values
from steelyard.schema import canonical
from steelyard.weights import checkpoint, huggingface
from steelyard.weights.checkpoint import ByteProgress, Headers, Stored, TensorPart, saved_tensor
from steelyard.weights.hf_config import INDEX_NAME, SINGLE_NAME
from steelyard.weights.megatron import TRACKER, leaves
from steelyard.weights.torch_files import read as read_saved

FILE = "mp_rank_00_model_states.pt"
OTHERS = "mp_rank_[0-9][0-9]*_model_states.pt"
MODULE = "module"
PREFIX = "glm."
WORDS = "word_embeddings.weight"
POSITIONS = "transformer.position_embeddings.weight"
FFN = "transformer.layers.0.mlp.dense_h_to_4h.weight"
MATRIX = 2  # dimensions
MAX_SIZE = 1 << 24  # of a dimension; no model is as wide, and products of two fit an int64
MAX_TRACKER_BYTES = 1000

Files = list[tuple[str, int]]  # name and size of each
Notes = tuple[str, ...]

_LAYER = re.compile(
    r"transformer\.layers\.[0-9]{1,6}\.attention\.query_key_value\.weight", re.ASCII
)


@dataclass(frozen=True)
class GlmCheckpoint:
    """A GLM checkpoint of which only the headers were read: its tensors by the names of the model's
    parameters. `location` is its one file, or its folder.
    """

    headers: Headers
    where: Path
    parameters: dict[str, Stored]

    def config(self) -> dict[str, Any]:
        """Return the model's dimensions as the shapes of tensors show them; None for those they do
        not show, and always for `heads`.
        """
        layers = sum(1 for name in self.parameters if _LAYER.fullmatch(name))
        positions = self._size(POSITIONS, 0)
        return {
            "layers": layers or None,
            "hidden": self._size(WORDS, 1),
            "heads": None,  # no tensor's shape depends on it
            "ffn": self._size(FFN, 0),
            "vocab": self._size(WORDS, 0),
            "positions": (positions or 1) - 1 or None,  # the embedding has one row more
        }

    def _size(self, name: str, dimension: int) -> int | None:
        """Return the size of a matrix along a dimension; None if there is no such tensor, it is not
        a matrix, or the size is 0.
        """
        stored = self.parameters.get(name)
        return (
            stored.shape[dimension] or None
            if stored is not None and len(stored.shape) == MATRIX
            else None
        )

    def count(self) -> int:
        """Return how many parameters the model has. Raise RequestError if the tensors are not
        exactly those of a GLM.
        """
        wanted = shapes_of(self._model())
        check(self, wanted)
        return sum(math.prod(shape) for shape in wanted.values())

    def _model(self) -> GlmModel:
        """Return a model with the dimensions of the tensors, and 1 for `heads`, which no shape
        depends on. Raise RequestError if a dimension is unknown or above `MAX_SIZE`.
        """
        config = {field: value for field, value in self.config().items() if field != "heads"}
        missing = [field for field, value in config.items() if value is None]
        if missing:
            raise RequestError(
                f"{self.where}: does not tell {', '.join(missing)} of its model; give a complete"
                " folder"
            )
        for field, value in config.items():
            if value > MAX_SIZE:
                raise RequestError(
                    f"{self.where}: {field} is {value}, allowed: up to {MAX_SIZE}; download it"
                    " again"
                )
        return GlmModel(family="glm", heads=1, **config)


def _opened(
    format: str,
    folder: Path,
    where: Path,
    sizes: Files,
    tensors: dict[str, Stored],
    iteration: str | None,
    notes: Notes = (),
) -> GlmCheckpoint:
    """Return a checkpoint from its tensors and files, with a digest of the headers. `iteration` is
    None for safetensors.
    """
    told = sorted((name, stored.dtype, list(stored.shape)) for name, stored in tensors.items())
    digest = hashlib.sha256(canonical({"files": sizes, "tensors": told}).encode()).hexdigest()
    headers = Headers(
        format, 1, iteration, 0, (folder,), sizes, list(tensors.values()), digest, notes
    )
    return GlmCheckpoint(headers, where, tensors)


def shapes_of(model: GlmModel) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter of a model by name; no memory is taken for values."""
    with without_values(torch.device("meta")):
        return {name: tuple(parameter.shape) for name, parameter in Glm(model).named_parameters()}


def holds(folder: Path) -> bool:
    """Return whether a folder holds a GLM checkpoint, in the authors' format or in safetensors.
    Raise OSError or RequestError if its files cannot be read.
    """
    own = (folder / FILE).is_file() or any(folder.glob(f"*/{FILE}"))
    return own or not {WORDS, PREFIX + WORDS}.isdisjoint(huggingface.names_in(folder))


def load(model: Glm, folder: Path, progress: ByteProgress | None = None) -> dict[str, Any]:
    """Fill a model from a checkpoint folder in place, and return where the weights came from, for
    the record. All headers are checked before the first value is copied.

    `progress` is called after every tensor with the bytes copied so far and in all. Raise
    RequestError if the checkpoint is not of this model.
    """
    found = read(folder)
    places = dict(model.named_parameters())
    check(found, {name: tuple(place.shape) for name, place in places.items()})
    copied = checkpoint.Progress(
        progress, sum(_bytes(stored) for stored in found.parameters.values())
    )
    with torch.no_grad():
        for name, place in places.items():
            stored = found.parameters[name]
            place.copy_(stored.open().to(place.device))
            copied.add(_bytes(stored))
    out = checkpoint.facts(found.headers, sum(place.numel() for place in places.values()))
    return out if found.headers.iteration is None else out | {"iteration": found.headers.iteration}


def _bytes(stored: Stored) -> int:
    """Return a stored tensor's size in bytes."""
    return math.prod(stored.shape) * checkpoint.DTYPES[stored.dtype].itemsize


def read(folder: Path) -> GlmCheckpoint:
    """Open the GLM checkpoint in a folder, in either format: headers are read, values are not.

    Raise RequestError if the folder does not exist or cannot be read, holds no checkpoint, one in
    both formats, or one of another family.
    """
    if not folder.is_dir():
        what = "is a file, a folder is expected" if folder.is_file() else "does not exist"
        raise RequestError(
            f"weights {str(folder)!r}: {what}; give the folder of a GLM checkpoint, or random"
        )
    with checkpoint.readable(folder):
        checkpoint.check_family(folder, families.GLM.name)
        own, safe = (
            (folder / TRACKER).exists() or (folder / FILE).exists(),
            huggingface.present(folder),
        )
        if own and safe:
            raise RequestError(
                f"{folder}: holds GLM's own checkpoint and one of safetensors; move one away"
            )
        if not own and not safe:
            raise RequestError(
                f"{folder.resolve()}: holds no checkpoint, neither GLM's own ({TRACKER} or {FILE})"
                f" nor {SINGLE_NAME} or {INDEX_NAME}; give a folder that does"
            )
        return _read_safetensors(folder) if safe else _read_own(folder)


def check(found: GlmCheckpoint, wanted: dict[str, tuple[int, ...]]) -> None:
    """Raise RequestError unless a checkpoint has exactly the tensors of a model with parameters of
    these shapes, in dtypes of plain weights.
    """
    words = found.parameters.get(WORDS)
    if words is not None and len(words.shape) == 2 and words.shape[0] != wanted[WORDS][0]:
        raise RequestError(
            f"{words.path}: {short_repr(words.name)} has {words.shape[0]} rows, the case's vocab is"
            f" {wanted[WORDS][0]}; give weights of the case's model, or the case of theirs"
        )
    parts = {
        name: TensorPart(name, tuple((0, size) for size in shape), shape)
        for name, shape in wanted.items()
    }
    spelled = {
        stored.name: parts[name] for name, stored in found.parameters.items() if name in parts
    }
    checkpoint.check_entries(found.parameters.values(), spelled, lambda name: False)
    checkpoint.check_missing(found.where, found.parameters, parts)


def _read_own(folder: Path) -> GlmCheckpoint:
    """Open a checkpoint in the authors' format: the file in the folder itself, or in the one that
    the tracker names.

    Raise RequestError if the file is missing, has no weights, or is one of several shards.
    """
    iteration = None if (folder / FILE).exists() else _tracked(folder / TRACKER)
    inside = folder if iteration is None else folder / iteration
    others = sorted(path.name for path in inside.glob(OTHERS) if path.name != FILE)
    if others:
        raise RequestError(
            f"{inside / others[0]}: a model divided over ranks is not read; merge it to one {FILE}"
        )
    path = inside / FILE
    if not path.is_file():
        raise RequestError(
            f"{path}: is missing, and {TRACKER} names its folder; fetch it, or give a complete"
            " checkpoint"
        )
    table = read_saved(path)
    module = table.get(MODULE) if isinstance(table, dict) else None
    if not isinstance(module, dict) or not module:
        raise RequestError(
            f"{path}: holds no weights, a table {MODULE!r} is expected; give a checkpoint of GLM"
        )
    own = [(str(path.relative_to(folder)), path.stat().st_size)]
    name = iteration or inside.resolve().name
    tensors = {key: saved_tensor(path, key, value) for key, value in leaves(module)}
    notes = (
        ("the file holds an optimizer's state too; it is not read",) if "optimizer" in table else ()
    )
    return _opened("glm", folder, path, own, tensors, name, notes)


def _tracked(path: Path) -> str:
    """Return the folder name that a tracker file contains. Raise RequestError if it is not a plain
    name.
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


def _read_safetensors(folder: Path) -> GlmCheckpoint:
    """Open a checkpoint in Hugging Face's files; a prefix `glm.` that all names have is removed."""
    shards = huggingface.shards_in(folder)
    every = {name: stored for shard in shards for name, stored in shard.tensors.items()}
    if every and all(name.startswith(PREFIX) for name in every):
        every = {name.removeprefix(PREFIX): stored for name, stored in every.items()}
    sizes = [(shard.path.name, shard.size_bytes) for shard in shards]
    return _opened("safetensors", folder, folder, sizes, every, None)


def write(model: Glm, folder: Path, iteration: int) -> None:
    """Write a model as a checkpoint in the authors' format into `folder/ITERATION`, which is
    created. The tracker file is written once the checkpoint is complete.
    """
    inside = folder / str(iteration)
    inside.mkdir(parents=True, exist_ok=True)
    module = {
        name: parameter.detach().cpu().clone() for name, parameter in model.named_parameters()
    }
    files.write(
        inside / FILE, lambda file: torch.save({MODULE: module, "iteration": iteration}, file)
    )
    files.write(folder / TRACKER, f"{iteration}\n".encode())
