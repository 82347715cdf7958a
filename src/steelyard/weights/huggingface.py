"""Open Hugging Face folders with a Llama, config.json and files of weights, reading headers only
and values on demand.

Files of weights are safetensors, or what torch.save writes (`pytorch_model.bin`), which is read
without running any of it. Where a folder has both, safetensors are taken, as transformers does.

The digest covers, for every file of weights in order of name, its size and the sha256 of its
header; and name, dtype and shape of every tensor. It does not cover the values, because hashing all
of a large model takes long: two trainings of one architecture, saved by the same tool, have the
same digest.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from steelyard import files
from steelyard.errors import RequestError, short_repr
from steelyard.models import placements
from steelyard.models.llama import LlamaShape
from steelyard.schema import canonical
from steelyard.weights import checkpoint
from steelyard.weights.checkpoint import Headers, Piece, Stored, TensorPart, saved_tensor
from steelyard.weights.hf_config import (
    CONFIG_NAME,
    INDEX_NAME,
    MAX_HEADER_BYTES,
    SINGLE_NAME,
    check_config,
    digest,
    first_told,
    read_json,
    weight_map,
)
from steelyard.weights.torch_files import read as read_saved

# files that may be weights but have no standard name; named in the error message only
OTHERS = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True)
class WeightsFile:
    """One file of weights with the tensors that its header lists, by name."""

    path: Path
    size_bytes: int
    header_sha256: str
    tensors: dict[str, Stored]


@dataclass(frozen=True)
class Format:
    """A file format of weights: the name of a single file, that of an index of several, how the
    names in the index end, and the function that reads a file's header.
    """

    single: str
    index: str
    ending: str  # of the names in the index
    inspect: Callable[[Path], WeightsFile]

    def here(self, folder: Path) -> bool:
        """Return whether a folder has the single file or the index of this format."""
        return (folder / self.single).is_file() or (folder / self.index).is_file()


def inspect_safetensors(path: Path) -> WeightsFile:
    """Read and check the header of a safetensors file. Raise RequestError if the file is missing,
    damaged or cut off, or its header exceeds `MAX_HEADER_BYTES`.
    """
    try:
        _check_there(path)
        with files.open_regular(path) as raw:  # nothing is parsed before its length is known
            length = int.from_bytes(raw.read(8), "little")
        if MAX_HEADER_BYTES < length <= path.stat().st_size:
            raise RequestError(
                f"{path}: a header of {length} bytes; at most {MAX_HEADER_BYTES} are read"
            )
        # checks the header against the file's size
        with safe_open(path, framework="pt", device="cpu") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            tensors = {
                name: Stored(
                    path, name, str(s.get_dtype()), tuple(s.get_shape()), partial(_open, path, name)
                )
                for name, s in slices.items()
            }
        with files.open_regular(path) as raw:
            header = raw.read(int.from_bytes(raw.read(8), "little"))
        return WeightsFile(path, path.stat().st_size, hashlib.sha256(header).hexdigest(), tensors)
    except (SafetensorError, OSError) as error:
        raise RequestError(
            f"{path}: is not a whole safetensors file ({short_repr(str(error))}); download it again"
            " and compare its size"
        ) from error


def _open(path: Path, name: str) -> Tensor:
    """Return a tensor of a safetensors file on the CPU. Raise RequestError if the file can no
    longer be read.
    """
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            tensor: Tensor = file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise RequestError(
            f"{path}: cannot be read ({short_repr(str(error))}); it changed since it was read,"
            " start again"
        ) from error
    return tensor


def inspect_saved(path: Path) -> WeightsFile:
    """Read the tensors of a torch.save file without running any of it. Its `header_sha256` is the
    hash of their names, dtypes, shapes and offsets.

    Raise RequestError if the file is missing or damaged, or is not a dict of tensors by name.
    """
    _check_there(path)
    table = read_saved(path)
    if not isinstance(table, dict) or not table or not all(isinstance(name, str) for name in table):
        raise RequestError(
            f"{path}: is no table of tensors by name; save the model's state_dict, or give"
            " safetensors"
        )
    tensors = {name: saved_tensor(path, name, value) for name, value in table.items()}
    places = sorted(
        (name, stored.dtype, list(stored.shape), table[name].offset_bytes)
        for name, stored in tensors.items()
    )
    return WeightsFile(
        path, path.stat().st_size, hashlib.sha256(canonical(places).encode()).hexdigest(), tensors
    )


def _check_there(path: Path) -> None:
    """Raise RequestError if a file of weights is missing."""
    if not path.is_file():
        raise RequestError(
            f"{path}: shard is missing; download it again, or give a complete Hugging Face folder"
        )


FORMATS = (
    Format(SINGLE_NAME, INDEX_NAME, ".safetensors", inspect_safetensors),
    Format("pytorch_model.bin", "pytorch_model.bin.index.json", ".bin", inspect_saved),
)


def present(folder: Path) -> bool:
    """Return whether a folder has a file of weights in a known format, or an index of some."""
    return any(one.here(folder) for one in FORMATS)


def names_in(folder: Path) -> set[str]:
    """Return the names of a folder's tensors, from the header of the single file or from the index;
    an empty set if it has no weights. Raise RequestError if that file is damaged.
    """
    for one in FORMATS:
        if (folder / one.single).is_file():
            return set(one.inspect(folder / one.single).tensors)
        if (folder / one.index).is_file():
            return set(weight_map(folder / one.index, one.ending))
    return set()


def shards_in(folder: Path) -> list[WeightsFile]:
    """Read and check the headers of a folder's files of weights, and return them in order of name.
    Raise RequestError if there are none, one is missing or damaged, or they differ from the index.
    """
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
    raise RequestError(
        f"weights folder {str(folder)!r} has neither {SINGLE_NAME} nor {INDEX_NAME}; {advice}"
    )


def _indexed(index: Path, one: Format) -> list[WeightsFile]:
    """Read the headers of the files that an index names. Raise RequestError unless every tensor is
    in exactly the file that the index says.
    """
    where = weight_map(index, one.ending)
    shards = [one.inspect(index.parent / name) for name in sorted(set(where.values()))]
    found: dict[str, list[str]] = {}
    for shard in shards:
        for name in shard.tensors:
            found.setdefault(name, []).append(shard.path.name)
    for name in sorted(where.keys() | found.keys()):
        if found.get(name) != [where.get(name)]:
            raise RequestError(
                f"{index}: tensor {short_repr(name)} should be in {short_repr(where.get(name))}, it"
                f" is in {short_repr(found.get(name))}; fetch the index and the shards again"
            )
    return shards


EMBED = "model.embed_tokens.weight"


def _queries(shape: LlamaShape) -> int:
    """Return how many query heads share one KV head."""
    return shape.heads // shape.kv_heads


@dataclass(frozen=True)
class Slot:
    """Where a tensor of the file goes: a parameter of our model, and the range of its logical view
    along `dimension` that `span` returns for a shape; all of it if `span` is None.
    """

    parameter: str
    dimension: int = 0
    span: Callable[[LlamaShape], tuple[int, int]] | None = None

    def part(self, shape: LlamaShape, prefix: str = "") -> TensorPart:
        """Return the box that the tensor covers in a model of this shape; `prefix` is that of the
        layer, such as `layers.3.`.
        """
        name = prefix + self.parameter
        box = list(placements.box(name, shape, placements.Shard()))
        if self.span is not None:
            box[self.dimension] = self.span(shape)
        return TensorPart(name, tuple(box), tuple(end - begin for begin, end in box))


TOP = {
    EMBED: Slot("embed.weight"),
    "model.norm.weight": Slot("norm.weight"),
    "lm_head.weight": Slot("output.weight"),
}
# Names in a layer, without the prefix `model.layers.N.`.
LAYER = {
    "input_layernorm.weight": Slot("attention_norm.weight"),
    "self_attn.q_proj.weight": Slot("qkv.weight", 1, lambda s: (0, _queries(s))),
    "self_attn.k_proj.weight": Slot("qkv.weight", 1, lambda s: (_queries(s), _queries(s) + 1)),
    "self_attn.v_proj.weight": Slot("qkv.weight", 1, lambda s: (_queries(s) + 1, _queries(s) + 2)),
    "self_attn.o_proj.weight": Slot("out.weight"),
    "post_attention_layernorm.weight": Slot("ffn_norm.weight"),
    "mlp.gate_proj.weight": Slot("gate_up.weight", 0, lambda s: (0, 1)),
    "mlp.up_proj.weight": Slot("gate_up.weight", 0, lambda s: (1, 2)),
    "mlp.down_proj.weight": Slot("down.weight"),
}
# Tensors that only some shapes have; the names are the same in all model types.
OPTIONAL = {
    f"self_attn.{which}_proj.bias": Slot(
        "qkv.bias", 1, LAYER[f"self_attn.{which}_proj.weight"].span
    )
    for which in "qkv"
} | {f"self_attn.{which}_norm.weight": Slot(f"{which}_norm.weight") for which in "qk"}


@dataclass(frozen=True)
class Redundant:
    """A tensor that our model does not have. `is_harmless` is called with it and a function that
    returns the embedding, and returns whether leaving it out changes no result; `refusal` is the
    message if it does.
    """

    harmless: Callable[[Tensor, Callable[[], Tensor]], bool]
    otherwise: str


OUT_BIAS = Redundant(
    lambda found, embed: not bool(found.count_nonzero()),
    "is not zero, and this model's output projection has no bias",
)
# computed from the rope base; old checkpoints store it
INV_FREQ = Redundant(lambda found, embed: True, "")
TIED_HEAD = Redundant(
    lambda found, embed: torch.equal(found.to(embed().dtype), embed()),
    "differs from model.embed_tokens.weight, and this model's output is tied to it",
)


def parts(shape: LlamaShape) -> dict[str, TensorPart]:
    """Return all tensors that a Hugging Face checkpoint of this shape must have, by name, with the
    box that each covers: together they cover each parameter once.
    """
    layer = LAYER | {
        name: slot
        for name, slot in OPTIONAL.items()
        if checkpoint.OPTIONAL_WEIGHTS[slot.parameter](shape)
    }
    top = {
        name: slot for name, slot in TOP.items() if not (shape.tied and name == "lm_head.weight")
    }
    out = {name: slot.part(shape) for name, slot in top.items()}
    for i in range(shape.layers):
        out |= {
            f"model.layers.{i}.{name}": slot.part(shape, f"layers.{i}.")
            for name, slot in layer.items()
        }
    return out


def redundant(shape: LlamaShape) -> dict[str, Redundant]:
    """Return the tensors that a Hugging Face checkpoint of this shape may have in addition, by
    name.
    """
    out = {"model.rotary_emb.inv_freq": INV_FREQ} | (
        {"lm_head.weight": TIED_HEAD} if shape.tied else {}
    )
    for i in range(shape.layers):
        out[f"model.layers.{i}.self_attn.o_proj.bias"] = OUT_BIAS
        out[f"model.layers.{i}.self_attn.rotary_emb.inv_freq"] = INV_FREQ
    return out


@dataclass(frozen=True)
class HuggingFace:
    """A Hugging Face folder with a Llama, of which config.json (`settings`) and the headers were
    read. Implements `LlamaCheckpoint`.
    """

    headers: Headers
    path: Path  # of config.json
    settings: dict[str, Any]

    def config(self) -> dict[str, Any]:
        """Return the model's dimensions by the fields of LlamaShape, as config.json tells them;
        None for those it does not. Raise RequestError if a value has a wrong type.
        """
        return checkpoint.typed(self.path, first_told(self.path, self.settings))

    def pieces(self, shape: LlamaShape) -> list[Piece]:
        """Return one piece for each tensor that the model has. Raise RequestError if config.json or
        the headers are not those of a model of this shape, or a tensor is missing.
        """
        check_config(self.path, self.settings, vars(shape))
        wanted, known, tensors = parts(shape), redundant(shape), self.headers.tensors
        checkpoint.check_entries(tensors, wanted, lambda name: name in known)
        checkpoint.check_missing(self.path.parent, [stored.name for stored in tensors], wanted)
        here = [(stored, wanted[stored.name]) for stored in tensors if stored.name in wanted]
        return [Piece(stored, part.parameter, part.box, part.inside) for stored, part in here]

    def check_values(self, shape: LlamaShape) -> None:
        """Read the redundant tensors, and raise RequestError if one changes results: an output bias
        that is not zero, or a tied output that differs from the embedding.
        """
        known = redundant(shape)
        every = {stored.name: stored for stored in self.headers.tensors}
        for stored in every.values():
            if stored.name in known and not known[stored.name].harmless(
                stored.open(), every[EMBED].open
            ):
                about = f"{stored.path}: tensor {stored.name!r} {list(stored.shape)}"
                raise RequestError(f"{about} {known[stored.name].otherwise}; give other weights")

    def count(self) -> int:
        """Return how many parameters the model has. Raise RequestError if the folder is not a
        complete model.
        """
        return checkpoint.count(self)


def holds(folder: Path) -> bool:
    """Return whether a folder holds a Llama in Hugging Face's format: it has the tensor of its
    embedding. Raise RequestError if its files are damaged.
    """
    return EMBED in names_in(folder)


def read(folder: Path) -> HuggingFace:
    """Open a Hugging Face folder: read config.json and every header, but no values. Raise
    RequestError if one is missing or damaged.
    """
    path = folder / CONFIG_NAME
    settings, shards = read_json(path), shards_in(folder)
    sizes = [(shard.path.name, shard.size_bytes) for shard in shards]
    tensors = [stored for shard in shards for stored in shard.tensors.values()]
    told = [(stored.name, stored.dtype, list(stored.shape)) for stored in tensors]
    mark = digest([(shard.size_bytes, shard.header_sha256) for shard in shards], told)
    return HuggingFace(
        Headers("huggingface", 1, None, 0, (folder,), sizes, tensors, mark), path, settings
    )
