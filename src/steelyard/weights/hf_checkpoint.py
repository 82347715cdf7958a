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
from steelyard.models import llama_placements
from steelyard.models.llama import LlamaShape
from steelyard.schema import to_canonical_json
from steelyard.weights import checkpoint_tensors
from steelyard.weights.checkpoint_tensors import (
    CheckpointHeaders,
    CheckpointTensor,
    TensorPart,
    TensorPiece,
    make_checkpoint_tensor,
)
from steelyard.weights.hf_config import (
    CONFIG_NAME,
    INDEX_NAME,
    MAX_HEADER_BYTES,
    SINGLE_NAME,
    check_config,
    get_first_values,
    hash_headers,
    read_hf_json,
    read_weight_map,
)
from steelyard.weights.torch_files import read_torch_file as read_saved

# files that may be weights but have no standard name; named in the error message only
OTHER_WEIGHTS_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True)
class WeightsFile:
    """One file of weights, as its header describes it: `path`, `size_bytes`, `header_sha256`
    (SHA-256 of the header's bytes, or of a torch.save file's names, dtypes, shapes and offsets),
    and the `tensors` (CheckpointTensor) by name. Made by a `WeightsFormat`'s `read_header`.
    """

    path: Path
    size_bytes: int
    header_sha256: str
    tensors: dict[str, CheckpointTensor]


@dataclass(frozen=True)
class WeightsFormat:
    """A file format of weights in Hugging Face folders (safetensors, or torch.save's
    pytorch_model.bin): `single`, the name of a single file, `index`, that of the index of several,
    `suffix`, how the file names in the index end, and `read_header`, which reads one file's header.
    `is_present_in(folder)` returns whether single file or index is there.
    """

    single: str
    index: str
    suffix: str  # of the names in the index
    read_header: Callable[[Path], WeightsFile]

    def is_present_in(self, folder: Path) -> bool:
        """Return whether a folder has the single file or the index of this format."""
        return (folder / self.single).is_file() or (folder / self.index).is_file()


def read_safetensors_header(path: Path) -> WeightsFile:
    """Read and check the header of a safetensors file, but no values, and return it as a
    `WeightsFile`. Raise RequestError if the file is missing, damaged or cut off, or its header
    exceeds `MAX_HEADER_BYTES`.
    """
    try:
        _check_exists(path)
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
                name: CheckpointTensor(
                    path,
                    name,
                    str(s.get_dtype()),
                    tuple(s.get_shape()),
                    partial(_open_safetensor, path, name),
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


def _open_safetensor(path: Path, name: str) -> Tensor:
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


def read_torch_header(path: Path) -> WeightsFile:
    """Return the tensors of a torch.save file as a `WeightsFile`, without running any of it or
    reading values. Its `header_sha256` is the hash of their names, dtypes, shapes and offsets.

    Raise RequestError if the file is missing or damaged, or is not a dict of tensors by name that
    has at least one.
    """
    _check_exists(path)
    content = read_saved(path)
    if (
        not isinstance(content, dict)
        or not content
        or not all(isinstance(name, str) for name in content)
    ):
        raise RequestError(
            f"{path}: is not a table of tensors by name; save the model's state_dict, or give"
            " safetensors"
        )
    tensors = {name: make_checkpoint_tensor(path, name, value) for name, value in content.items()}
    descriptions = sorted(
        (name, stored.dtype, list(stored.shape), content[name].offset_bytes)
        for name, stored in tensors.items()
    )
    return WeightsFile(
        path,
        path.stat().st_size,
        hashlib.sha256(to_canonical_json(descriptions).encode()).hexdigest(),
        tensors,
    )


def _check_exists(path: Path) -> None:
    """Raise RequestError if a file of weights is missing."""
    if not path.is_file():
        raise RequestError(
            f"{path}: shard is missing; download it again, or give a complete Hugging Face folder"
        )


WEIGHTS_FORMATS = (
    WeightsFormat(SINGLE_NAME, INDEX_NAME, ".safetensors", read_safetensors_header),
    WeightsFormat("pytorch_model.bin", "pytorch_model.bin.index.json", ".bin", read_torch_header),
)


def has_weights_files(folder: Path) -> bool:
    """Return whether a folder has a file of weights in a known format, or an index of some."""
    return any(weights_format.is_present_in(folder) for weights_format in WEIGHTS_FORMATS)


def list_tensor_names(folder: Path) -> set[str]:
    """Return the names of a folder's tensors, from the header of the single file or else from the
    index, of safetensors or else of pytorch_model.bin; an empty set if it has none of these. Raise
    RequestError if that file is damaged.
    """
    for weights_format in WEIGHTS_FORMATS:
        if (folder / weights_format.single).is_file():
            return set(weights_format.read_header(folder / weights_format.single).tensors)
        if (folder / weights_format.index).is_file():
            return set(read_weight_map(folder / weights_format.index, weights_format.suffix))
    return set()


def read_weights_files(folder: Path) -> list[WeightsFile]:
    """Read and check the headers of a folder's files of weights, and return them in order of name.
    A single file goes before an index, and safetensors before pytorch_model.bin; the others are
    then ignored.

    Raise RequestError if there are none, one is missing or damaged, or their tensors are not where
    the index says.
    """
    for weights_format in WEIGHTS_FORMATS:
        if (folder / weights_format.single).is_file():
            return [weights_format.read_header(folder / weights_format.single)]
        if (folder / weights_format.index).is_file():
            return _read_indexed_files(folder / weights_format.index, weights_format)
    others = sorted(p.name for pattern in OTHER_WEIGHTS_PATTERNS for p in folder.glob(pattern))
    advice = "give a Hugging Face folder"
    if others:
        known = " and ".join(weights_format.single for weights_format in WEIGHTS_FORMATS)
        advice = f"only {known} are read, convert {others[0]!r} with transformers' save_pretrained"
    raise RequestError(
        f"weights folder {str(folder)!r} has neither {SINGLE_NAME} nor {INDEX_NAME}; {advice}"
    )


def _read_indexed_files(index: Path, weights_format: WeightsFormat) -> list[WeightsFile]:
    """Return the headers of the files that an index names, in order of name. Raise RequestError if
    the index or a file is damaged or missing, or unless every tensor is in exactly the file that
    the index says.
    """
    file_names = read_weight_map(index, weights_format.suffix)
    shards = [
        weights_format.read_header(index.parent / name) for name in sorted(set(file_names.values()))
    ]
    files_with_tensor: dict[str, list[str]] = {}
    for shard in shards:
        for name in shard.tensors:
            files_with_tensor.setdefault(name, []).append(shard.path.name)
    for name in sorted(file_names.keys() | files_with_tensor.keys()):
        if files_with_tensor.get(name) != [file_names.get(name)]:
            raise RequestError(
                f"{index}: tensor {short_repr(name)} should be in"
                f" {short_repr(file_names.get(name))}, it"
                f" is in {short_repr(files_with_tensor.get(name))}; fetch the index and the shards"
                " again"
            )
    return shards


EMBED_NAME = "model.embed_tokens.weight"


def _count_queries_per_group(shape: LlamaShape) -> int:
    """Return how many query heads share one KV head."""
    return shape.heads // shape.kv_heads


@dataclass(frozen=True)
class ParameterSlot:
    """Where a tensor of a Hugging Face file goes: `parameter` of our model (without the layer's
    prefix), and the range of its logical view along `dimension` that `span` returns for a shape;
    all of it if `span` is None. `make_part` returns it as a TensorPart.
    """

    parameter: str
    dimension: int = 0
    span: Callable[[LlamaShape], tuple[int, int]] | None = None

    def make_part(self, shape: LlamaShape, prefix: str = "") -> TensorPart:
        """Return the parameter and the box of it that this slot's tensor covers in a model of this
        shape, as a TensorPart; `prefix` is that of the layer, such as `layers.3.`.
        """
        name = prefix + self.parameter
        box = list(llama_placements.find_shard_box(name, shape, llama_placements.Shard()))
        if self.span is not None:
            box[self.dimension] = self.span(shape)
        return TensorPart(name, tuple(box), tuple(end - begin for begin, end in box))


TOP_SLOTS = {
    EMBED_NAME: ParameterSlot("embed.weight"),
    "model.norm.weight": ParameterSlot("norm.weight"),
    "lm_head.weight": ParameterSlot("output.weight"),
}
# Names in a layer, without the prefix `model.layers.N.`.
LAYER_SLOTS = {
    "input_layernorm.weight": ParameterSlot("attention_norm.weight"),
    "self_attn.q_proj.weight": ParameterSlot(
        "qkv.weight", 1, lambda s: (0, _count_queries_per_group(s))
    ),
    "self_attn.k_proj.weight": ParameterSlot(
        "qkv.weight", 1, lambda s: (_count_queries_per_group(s), _count_queries_per_group(s) + 1)
    ),
    "self_attn.v_proj.weight": ParameterSlot(
        "qkv.weight",
        1,
        lambda s: (_count_queries_per_group(s) + 1, _count_queries_per_group(s) + 2),
    ),
    "self_attn.o_proj.weight": ParameterSlot("out.weight"),
    "post_attention_layernorm.weight": ParameterSlot("ffn_norm.weight"),
    "mlp.gate_proj.weight": ParameterSlot("gate_up.weight", 0, lambda s: (0, 1)),
    "mlp.up_proj.weight": ParameterSlot("gate_up.weight", 0, lambda s: (1, 2)),
    "mlp.down_proj.weight": ParameterSlot("down.weight"),
}
# Tensors that only some shapes have; the names are the same in all model types.
OPTIONAL_SLOTS = {
    f"self_attn.{which}_proj.bias": ParameterSlot(
        "qkv.bias", 1, LAYER_SLOTS[f"self_attn.{which}_proj.weight"].span
    )
    for which in "qkv"
} | {f"self_attn.{which}_norm.weight": ParameterSlot(f"{which}_norm.weight") for which in "qk"}


@dataclass(frozen=True)
class RedundantTensor:
    """A tensor that our model does not have but a Hugging Face folder may.

    `is_harmless` is called with its values and a function that returns the embedding's, and returns
    whether leaving it out changes no result; `refusal` is the message if it does.
    """

    is_harmless: Callable[[Tensor, Callable[[], Tensor]], bool]
    refusal: str


OUT_BIAS = RedundantTensor(
    lambda found, embed: not bool(found.count_nonzero()),
    "is not zero, and this model's output projection has no bias",
)
# computed from the rope base; old checkpoints store it
INV_FREQ = RedundantTensor(lambda found, embed: True, "")
TIED_HEAD = RedundantTensor(
    lambda found, embed: torch.equal(found.to(embed().dtype), embed()),
    "differs from model.embed_tokens.weight, and this model's output is tied to it",
)


def map_hf_tensors(shape: LlamaShape) -> dict[str, TensorPart]:
    """Return all tensors that a Hugging Face checkpoint of this shape must have, by name in the
    file, with the box of our parameter that each covers: together they cover each parameter once.
    Optional ones (biases, QK norms, output) are there if the shape has them.
    """
    layer_slots = LAYER_SLOTS | {
        name: slot
        for name, slot in OPTIONAL_SLOTS.items()
        if checkpoint_tensors.OPTIONAL_WEIGHTS[slot.parameter](shape)
    }
    top_slots = {
        name: slot
        for name, slot in TOP_SLOTS.items()
        if not (shape.tied and name == "lm_head.weight")
    }
    tensor_parts = {name: slot.make_part(shape) for name, slot in top_slots.items()}
    for i in range(shape.layers):
        tensor_parts |= {
            f"model.layers.{i}.{name}": slot.make_part(shape, f"layers.{i}.")
            for name, slot in layer_slots.items()
        }
    return tensor_parts


def map_redundant_tensors(shape: LlamaShape) -> dict[str, RedundantTensor]:
    """Return the tensors that a Hugging Face checkpoint of this shape may have in addition, by name
    in the file: rotary frequencies, biases of output projections, and lm_head if the output is tied
    to the embedding.
    """
    redundant_tensors = {"model.rotary_emb.inv_freq": INV_FREQ} | (
        {"lm_head.weight": TIED_HEAD} if shape.tied else {}
    )
    for i in range(shape.layers):
        redundant_tensors[f"model.layers.{i}.self_attn.o_proj.bias"] = OUT_BIAS
        redundant_tensors[f"model.layers.{i}.self_attn.rotary_emb.inv_freq"] = INV_FREQ
    return redundant_tensors


@dataclass(frozen=True)
class HfCheckpoint:
    """An opened Hugging Face folder with a Llama: config.json (at `path`, parsed in `settings`) and
    the headers of its files of weights (`headers`) were read, and nothing compared with a model.
    Implements `LlamaCheckpoint` (`read_dimensions`, `count_parameters`, `list_pieces`,
    `check_values`); `open_hf_checkpoint` makes it.
    """

    headers: CheckpointHeaders
    path: Path  # of config.json
    settings: dict[str, Any]

    def read_dimensions(self) -> dict[str, Any]:
        """Return the dimensions of a Hugging Face checkpoint's model by the fields of LlamaShape,
        as config.json tells them or transformers' defaults have them; None for those without
        either. Raise RequestError if a value has a wrong type or is not above 0.
        """
        return checkpoint_tensors.parse_shape_fields(
            self.path, get_first_values(self.path, self.settings)
        )

    def list_pieces(self, shape: LlamaShape) -> list[TensorPiece]:
        """Return one piece for each tensor of the files that a model of this shape has; redundant
        tensors are left out. Only headers are used.

        Raise RequestError if config.json, names, shapes or dtypes are not those of a model of this
        shape, or a tensor is missing.
        """
        check_config(self.path, self.settings, vars(shape))
        expected_parts, redundant_tensors, tensors = (
            map_hf_tensors(shape),
            map_redundant_tensors(shape),
            self.headers.tensors,
        )
        checkpoint_tensors.check_tensors(
            tensors, expected_parts, lambda name: name in redundant_tensors
        )
        checkpoint_tensors.check_none_missing(
            self.path.parent, [stored.name for stored in tensors], expected_parts
        )
        covered = [
            (stored, expected_parts[stored.name])
            for stored in tensors
            if stored.name in expected_parts
        ]
        return [
            TensorPiece(stored, part.parameter, part.box, part.view_box) for stored, part in covered
        ]

    def check_values(self, shape: LlamaShape) -> None:
        """Read the tensors of this checkpoint that a model of this shape lacks, and raise
        RequestError if one changes results: a bias of an output projection that is not zero, or a
        tied output that differs from the embedding.
        """
        redundant_tensors = map_redundant_tensors(shape)
        tensors = {stored.name: stored for stored in self.headers.tensors}
        for stored in tensors.values():
            if stored.name in redundant_tensors and not redundant_tensors[stored.name].is_harmless(
                stored.open(), tensors[EMBED_NAME].open
            ):
                about = f"{stored.path}: tensor {stored.name!r} {list(stored.shape)}"
                raise RequestError(
                    f"{about} {redundant_tensors[stored.name].refusal}; give other weights"
                )

    def count_parameters(self) -> int:
        """Return how many parameters the Llama in this Hugging Face folder has. Raise RequestError
        if the folder is not a complete model.
        """
        return checkpoint_tensors.count_checkpoint_parameters(self)


def has_hf_llama(folder: Path) -> bool:
    """Return whether a folder holds a Llama in Hugging Face's format: it has the tensor of its
    embedding. Raise RequestError if its files are damaged.
    """
    return EMBED_NAME in list_tensor_names(folder)


def open_hf_checkpoint(folder: Path) -> HfCheckpoint:
    """Open a Hugging Face folder with a Llama: read config.json and the header of every file of
    weights, but no values. Nothing is compared with a model. Raise RequestError if one is missing
    or damaged.
    """
    path = folder / CONFIG_NAME
    settings, shards = read_hf_json(path), read_weights_files(folder)
    sizes = [(shard.path.name, shard.size_bytes) for shard in shards]
    tensors = [stored for shard in shards for stored in shard.tensors.values()]
    descriptions = [(stored.name, stored.dtype, list(stored.shape)) for stored in tensors]
    header_digest = hash_headers(
        [(shard.size_bytes, shard.header_sha256) for shard in shards], descriptions
    )
    return HfCheckpoint(
        CheckpointHeaders("huggingface", 1, None, 0, (folder,), sizes, tensors, header_digest),
        path,
        settings,
    )
