"""The files of weights in a Hugging Face folder, of either format, their headers read: safetensors, and what torch.save writes
(`pytorch_model.bin`), which is read without running any of it.

Where a folder has both, safetensors are taken, as transformers does.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from steelyard import files
from steelyard.errors import RequestError
from steelyard.schema import canonical
from steelyard.weights.checkpoint import Stored, saved_tensor, shown
from steelyard.weights.hf_config import INDEX_NAME, MAX_HEADER_BYTES, SINGLE_NAME, weight_map
from steelyard.weights.torch_files import read as read_saved

OTHERS = ("*.bin", "*.pt", "*.pth", "*.ckpt")  # files that may be weights, under names that nobody agreed on


@dataclass(frozen=True)
class WeightsFile:
    """One file, as its header describes it."""

    path: Path
    size_bytes: int
    header_sha256: str
    tensors: dict[str, Stored]


@dataclass(frozen=True)
class Format:
    """How a folder is laid out: one file, or several that an index names."""

    single: str
    index: str
    ending: str  # of the names in the index
    inspect: Callable[[Path], WeightsFile]

    def here(self, folder: Path) -> bool:
        return (folder / self.single).is_file() or (folder / self.index).is_file()


def inspect_safetensors(path: Path) -> WeightsFile:
    try:
        _check_there(path)
        with files.open_regular(path) as raw:  # nothing is parsed before its length is known
            length = int.from_bytes(raw.read(8), "little")
        if MAX_HEADER_BYTES < length <= path.stat().st_size:
            raise RequestError(f"{path}: a header of {length} bytes; at most {MAX_HEADER_BYTES} are read")
        with safe_open(path, framework="pt", device="cpu") as file:  # checks the header against the file's size
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            tensors = {
                name: Stored(path, name, str(s.get_dtype()), tuple(s.get_shape()), partial(_open, path, name))
                for name, s in slices.items()
            }
        with files.open_regular(path) as raw:
            header = raw.read(int.from_bytes(raw.read(8), "little"))
        return WeightsFile(path, path.stat().st_size, hashlib.sha256(header).hexdigest(), tensors)
    except (SafetensorError, OSError) as error:
        raise RequestError(
            f"{path}: is not a whole safetensors file ({shown(str(error))}); download it again and compare its size"
        ) from error


def _open(path: Path, name: str) -> Tensor:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            tensor: Tensor = file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise RequestError(
            f"{path}: cannot be read ({shown(str(error))}); it changed since it was read, start again"
        ) from error
    return tensor


def inspect_saved(path: Path) -> WeightsFile:
    """Its header is what its pickle says of the tensors: name, type, shape and place in the file."""
    _check_there(path)
    table = read_saved(path)
    if not isinstance(table, dict) or not table or not all(isinstance(name, str) for name in table):
        raise RequestError(f"{path}: is no table of tensors by name; save the model's state_dict, or give safetensors")
    tensors = {name: saved_tensor(path, name, value) for name, value in table.items()}
    places = sorted((name, stored.dtype, list(stored.shape), table[name].offset_bytes) for name, stored in tensors.items())
    return WeightsFile(path, path.stat().st_size, hashlib.sha256(canonical(places).encode()).hexdigest(), tensors)


def _check_there(path: Path) -> None:
    if not path.is_file():
        raise RequestError(f"{path}: shard is missing; download it again, or give a complete Hugging Face folder")


FORMATS = (
    Format(SINGLE_NAME, INDEX_NAME, ".safetensors", inspect_safetensors),
    Format("pytorch_model.bin", "pytorch_model.bin.index.json", ".bin", inspect_saved),
)


def present(folder: Path) -> bool:
    """Whether a folder has a file of weights, or an index of some."""
    return any(one.here(folder) for one in FORMATS)


def names_in(folder: Path) -> set[str]:
    """The names of a folder's tensors; none, if it has no weights."""
    for one in FORMATS:
        if (folder / one.single).is_file():
            return set(one.inspect(folder / one.single).tensors)
        if (folder / one.index).is_file():
            return set(weight_map(folder / one.index, one.ending))
    return set()


def shards_in(folder: Path) -> list[WeightsFile]:
    """The folder's files of weights in order of name, each header read and checked."""
    for one in FORMATS:
        if (folder / one.single).is_file():
            return [one.inspect(folder / one.single)]
        if (folder / one.index).is_file():
            return _indexed(folder / one.index, one)
    others = sorted(p.name for pattern in OTHERS for p in folder.glob(pattern))
    advice = "give a Hugging Face folder"
    if others:
        known = " and ".join(one.single for one in FORMATS)
        advice = f"only {known} are read, convert {others[0]!r} with transformers' save_pretrained"
    raise RequestError(f"weights folder {str(folder)!r} has neither {SINGLE_NAME} nor {INDEX_NAME}; {advice}")


def _indexed(index: Path, one: Format) -> list[WeightsFile]:
    where = weight_map(index, one.ending)
    shards = [one.inspect(index.parent / name) for name in sorted(set(where.values()))]
    found: dict[str, list[str]] = {}
    for shard in shards:
        for name in shard.tensors:
            found.setdefault(name, []).append(shard.path.name)
    for name in sorted(where.keys() | found.keys()):
        if found.get(name) != [where.get(name)]:
            raise RequestError(
                f"{index}: tensor {shown(name)} should be in {shown(where.get(name))}, it is in "
                f"{shown(found.get(name))}; fetch the index and the shards again"
            )
    return shards
