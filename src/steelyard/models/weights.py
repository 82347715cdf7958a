"""Weights of a Llama: random ones from a seed, or a Hugging Face folder of safetensors, streamed.

Loading reads one tensor at a time from the mapped file straight into its place in the model, so host memory never holds
a second copy. All headers are checked before the first byte of data is copied: a wrong folder fails at once.

What `header_sha256` covers: for every safetensors file, in order of name, its size and the sha256 of its header; and
the name, dtype and shape of every tensor, in order of name. It does not cover the values (hashing all of a
large model takes long): two trainings of one architecture saved by the same tool have the same `header_sha256`.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from steelyard import case
from steelyard.errors import RequestError
from steelyard.models.llama import Llama, LlamaShape

Progress = Callable[[int, int], None]

MAX_JSON_BYTES = 64 << 20  # of config.json and of the index, each

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")

# What models/llama.py computes: another model_type or rope type of the same dimensions would load and answer wrongly.
COMPUTED: dict[str, tuple[Any, ...]] = {
    "model_type": ("llama", "aquila"),
    "hidden_act": ("silu",),
    "mlp_bias": (False,),
    "rope_type": ("default",),
    "type": ("default",),  # the older spelling of rope_type
    "partial_rotary_factor": (1.0,),
}

# Bytes of the dtypes that are weights; integers and 8-bit floats are quantised and mean nothing without their scales.
DTYPES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True)
class Setting:
    """A key of config.json, the field of the shape it must equal, and what Hugging Face takes if the key is absent."""

    key: str
    field: str
    absent: Callable[[LlamaShape], Any] = lambda shape: None


# head_dim comes after the two rows that give its default. Defaults: LlamaConfig of transformers.
SETTINGS = (
    Setting("hidden_size", "hidden"),
    Setting("num_hidden_layers", "layers"),
    Setting("num_attention_heads", "heads"),
    Setting("num_key_value_heads", "kv_heads", lambda shape: shape.heads),
    Setting("intermediate_size", "ffn"),
    Setting("vocab_size", "vocab"),
    Setting("rope_theta", "rope_base", lambda shape: 10000.0),
    Setting("rms_norm_eps", "norm_eps", lambda shape: 1e-6),
    Setting("tie_word_embeddings", "tied", lambda shape: False),
    Setting("attention_bias", "qkv_bias", lambda shape: False),
    Setting("head_dim", "head_dim", lambda shape: shape.head_dim),
)


@dataclass(frozen=True)
class Slot:
    """Where a checkpoint's tensor goes: one of our parameters, and which part of it (a row of PARTS)."""

    parameter: str
    part: str = "whole"


def _by_group(fused: Tensor, shape: LlamaShape) -> Tensor:
    """QKV as [key group, query heads of the group + key + value, head_dim, ...]."""
    return fused.view(shape.kv_heads, -1, shape.head_dim, *fused.shape[1:])


# Every row is a view, so that writing to it writes to the parameter.
PARTS: dict[str, Callable[[Tensor, LlamaShape], Tensor]] = {
    "whole": lambda parameter, shape: parameter,
    "query": lambda parameter, shape: _by_group(parameter, shape)[:, :-2],
    "key": lambda parameter, shape: _by_group(parameter, shape)[:, -2],
    "value": lambda parameter, shape: _by_group(parameter, shape)[:, -1],
    "gate": lambda parameter, shape: parameter[: shape.ffn],
    "up": lambda parameter, shape: parameter[shape.ffn :],
}

# Hugging Face's names, less their prefix, and where each goes in a block.
LAYER = {
    "input_layernorm.weight": Slot("attention_norm.weight"),
    "self_attn.q_proj.weight": Slot("qkv.weight", "query"),
    "self_attn.k_proj.weight": Slot("qkv.weight", "key"),
    "self_attn.v_proj.weight": Slot("qkv.weight", "value"),
    "self_attn.o_proj.weight": Slot("out.weight"),
    "post_attention_layernorm.weight": Slot("ffn_norm.weight"),
    "mlp.gate_proj.weight": Slot("gate_up.weight", "gate"),
    "mlp.up_proj.weight": Slot("gate_up.weight", "up"),
    "mlp.down_proj.weight": Slot("down.weight"),
}
LAYER_BIAS = {
    "self_attn.q_proj.bias": Slot("qkv.bias", "query"),
    "self_attn.k_proj.bias": Slot("qkv.bias", "key"),
    "self_attn.v_proj.bias": Slot("qkv.bias", "value"),
}


@dataclass(frozen=True)
class Redundant:
    """A tensor without a place in our model, and when it may be left out without changing an answer."""

    harmless: Callable[[Tensor, Llama], bool]
    otherwise: str


OUT_BIAS = Redundant(
    lambda found, model: not bool(found.count_nonzero()), "is not zero, and this model's output projection has no bias"
)
INV_FREQ = Redundant(lambda found, model: True, "")  # computed from the rope base; old checkpoints store it
TIED_HEAD = Redundant(
    lambda found, model: torch.equal(found.to(model.embed.weight), model.embed.weight),
    "differs from model.embed_tokens.weight, and this model's output is tied to it",
)


@dataclass(frozen=True)
class Entry:
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Shard:
    """One safetensors file, as its header describes it."""

    path: Path
    size_bytes: int
    header_sha256: str
    tensors: dict[str, Entry]


def shape_of(model: case.Model) -> LlamaShape:
    """The shape of a case's model."""
    return LlamaShape(**model.model_dump(exclude={"family", "nominal_parameters"}))


def build(shape: LlamaShape, device: torch.device, dtype: torch.dtype) -> Llama:
    """A model on the device, in eval mode, without gradients. Its memory is not initialised: fill or load it next."""
    with torch.device("meta"):
        model = Llama(shape)
    model.to(dtype).to_empty(device=device)
    if shape.tied:  # to_empty makes one new parameter per module
        model.output.weight = model.embed.weight
    return model.requires_grad_(False).eval()


def parameters(model: nn.Module) -> int:
    """How many parameters a model has; tied ones count once."""
    return sum(p.numel() for p in model.parameters())


def fill_random(model: nn.Module, seed: int) -> None:
    """Random weights: N(0, 1 / columns) in matrices, which keeps the scale of what passes through, so that answers depend
    on the whole prompt at any size; ones in norms, zeros in biases. The values of a parameter depend on the
    seed, its name, shape, dtype and kind of device; not on rank, count of ranks or order."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
                generator = torch.Generator(parameter.device).manual_seed(int.from_bytes(digest[:8], "big") >> 1)
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)


def load_hf(model: Llama, folder: Path, progress: Progress | None = None) -> dict[str, Any]:
    """Fill a model from a Hugging Face folder; returns where the weights came from, for the record. `progress` is told
    the bytes copied so far and in all, after every tensor."""
    if not folder.is_dir():
        raise RequestError(f"weights folder {str(folder)!r} does not exist; give a Hugging Face folder, or random")
    _check_config(folder / "config.json", model.shape)
    shards = _shards(folder)
    slots = hf_slots(model.shape)
    redundant = hf_redundant(model.shape)
    _check_tensors(model, shards, slots, redundant)
    with torch.no_grad():
        _fill(model, shards, slots, progress)
    _check_redundant(model, shards, redundant)
    return {
        "source": "huggingface",
        "files": [{"name": shard.path.name, "bytes": shard.size_bytes} for shard in shards],
        "header_sha256": _digest(shards),
        "parameters": parameters(model),
    }


def copy_to_hf(model: Llama, parameters: dict[str, Tensor]) -> None:
    """The same weights into a Hugging Face model's parameters, by name; biases we do not have become zero."""
    slots = hf_slots(model.shape)
    with torch.no_grad():
        for name, parameter in parameters.items():
            if name in slots:
                parameter.copy_(_place(model, slots[name]).reshape(parameter.shape))
            elif name.endswith("o_proj.bias"):
                parameter.zero_()
            elif not (model.shape.tied and name == "lm_head.weight"):
                raise ValueError(f"parameter {name!r} is none of a Llama's")


def hf_slots(shape: LlamaShape) -> dict[str, Slot]:
    """Every tensor a checkpoint of this shape must have, and where it goes: each parameter is covered exactly once."""
    layer = LAYER | (LAYER_BIAS if shape.qkv_bias else {})
    slots = {"model.embed_tokens.weight": Slot("embed.weight"), "model.norm.weight": Slot("norm.weight")}
    if not shape.tied:
        slots["lm_head.weight"] = Slot("output.weight")
    for i in range(shape.layers):
        slots |= {f"model.layers.{i}.{k}": Slot(f"layers.{i}.{s.parameter}", s.part) for k, s in layer.items()}
    return slots


def hf_redundant(shape: LlamaShape) -> dict[str, Redundant]:
    """Tensors a checkpoint of this shape may have beside its slots."""
    out = {"model.rotary_emb.inv_freq": INV_FREQ} | ({"lm_head.weight": TIED_HEAD} if shape.tied else {})
    for i in range(shape.layers):
        out[f"model.layers.{i}.self_attn.o_proj.bias"] = OUT_BIAS
        out[f"model.layers.{i}.self_attn.rotary_emb.inv_freq"] = INV_FREQ
    return out


def _check_config(path: Path, shape: LlamaShape) -> None:
    config = {"model_type": "absent"} | _read_json(path)
    parts = [config]
    for key in ("rope_parameters", "rope_scaling"):  # newer and older spelling
        table = config.get(key) or {}
        if not isinstance(table, dict):
            raise RequestError(f"{path}: {key} is {_shown(table)}, not a table; fetch the file again")
        parts.append(table)
    for setting in SETTINGS:
        # A rope base may be spelled in several places: each one must be right.
        given = [part[setting.key] for part in parts if part.get(setting.key) is not None]
        wanted = getattr(shape, setting.field)
        for found in given or [setting.absent(shape)]:
            both = isinstance(found, float) and isinstance(wanted, float)  # some tools keep 1e-5 as its fp32
            if not (math.isclose(found, wanted, rel_tol=1e-6) if both else found == wanted):
                raise RequestError(
                    f"{path}: {setting.key} is {_shown(found)}, the case's {setting.field} is {wanted!r}; "
                    "give weights of the case's model, or change question.model with --set"
                )
    for key, allowed in COMPUTED.items():
        for part in parts:
            if part.get(key) not in (*allowed, None):
                raise RequestError(
                    f"{path}: {key} is {_shown(part[key])}, allowed: {', '.join(map(repr, allowed))}; "
                    "give weights of a plain Llama, or save these in that form"
                )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_JSON_BYTES + 1)
    except OSError as error:
        raise RequestError(f"{path}: cannot be read ({error.strerror}); give a complete Hugging Face folder") from error
    if len(raw) > MAX_JSON_BYTES:
        raise RequestError(f"{path}: is larger than {MAX_JSON_BYTES} bytes, the most allowed; fetch the file again")
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:  # ValueError: bad UTF-8, bad JSON, a number of too many digits
        raise RequestError(f"{path}: is not JSON ({_shown(str(error))}); fetch the file again") from error
    if not isinstance(value, dict):
        raise RequestError(f"{path}: is not a JSON object; fetch the file again")
    return value


def _shards(folder: Path) -> list[Shard]:
    """The folder's safetensors files in order of name, each header read and checked."""
    if (folder / SINGLE_NAME).is_file():
        return [_inspect(folder / SINGLE_NAME)]
    index = folder / INDEX_NAME
    if not index.is_file():
        pickles = sorted(p.name for pattern in PICKLES for p in folder.glob(pattern))
        advice = "give a Hugging Face folder"
        if pickles:  # never read: unpickling can run code
            advice = f"only safetensors are read, convert {pickles[0]!r} with transformers' save_pretrained"
        raise RequestError(f"weights folder {str(folder)!r} has neither {SINGLE_NAME} nor {INDEX_NAME}; {advice}")
    where = _weight_map(index)
    shards = [_inspect(folder / name) for name in sorted(set(where.values()))]
    found: dict[str, list[str]] = {}
    for shard in shards:
        for name in shard.tensors:
            found.setdefault(name, []).append(shard.path.name)
    for name in sorted(where.keys() | found.keys()):
        if found.get(name) != [where.get(name)]:
            raise RequestError(
                f"{index}: tensor {_shown(name)} should be in {_shown(where.get(name))}, it is in "
                f"{_shown(found.get(name))}; fetch the index and the shards again"
            )
    return shards


def _weight_map(index: Path) -> dict[str, str]:
    where = _read_json(index).get("weight_map")
    if not isinstance(where, dict) or not where:
        raise RequestError(f"{index}: has no table weight_map of tensor name to file name; fetch the index again")
    for file in where.values():
        # A plain name cannot leave the folder. A link of that name may: Hugging Face's own cache is made of such links.
        plain = isinstance(file, str) and file.isprintable() and not set(file) & set("/\\")
        if not plain or not file.endswith(".safetensors"):
            raise RequestError(
                f"{index}: names the shard {_shown(file)}, allowed: a plain file name ending in .safetensors; "
                "fetch the index again"
            )
    return where


def _inspect(path: Path) -> Shard:
    try:
        if not path.is_file():
            raise RequestError(f"{path}: shard is missing; fetch it again, or give a complete Hugging Face folder")
        with safe_open(path, framework="pt", device="cpu") as file:  # checks the header against the file's size
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            tensors = {name: Entry(str(s.get_dtype()), tuple(s.get_shape())) for name, s in slices.items()}
        with path.open("rb") as raw:
            header = raw.read(int.from_bytes(raw.read(8), "little"))
        return Shard(path, path.stat().st_size, hashlib.sha256(header).hexdigest(), tensors)
    except (SafetensorError, OSError) as error:
        raise RequestError(
            f"{path}: is not a whole safetensors file ({_shown(str(error))}); fetch it again and compare its size"
        ) from error


def _check_tensors(model: Llama, shards: list[Shard], slots: dict[str, Slot], redundant: dict[str, Redundant]) -> None:
    """Every slot has its tensor, with its shape and a dtype that is a weight's, and there is nothing else."""
    for shard in shards:
        for name, entry in shard.tensors.items():
            about = f"{shard.path}: tensor {_shown(name)} {entry.dtype} {list(entry.shape)}"
            if name not in slots and name not in redundant:
                raise RequestError(f"{about} has no place in this model; give weights of the case's model")
            if entry.dtype not in DTYPES:
                raise RequestError(f"{about}: allowed dtypes are {', '.join(DTYPES)}; give weights not quantised")
            wanted = _wanted(model, slots[name]) if name in slots else entry.shape
            if entry.shape != wanted:
                raise RequestError(f"{about}: the shape must be {list(wanted)}; give weights of the case's model")
    missing = sorted(slots.keys() - {name for shard in shards for name in shard.tensors})
    if missing:
        first = f"tensor {missing[0]!r} {list(_wanted(model, slots[missing[0]]))}"
        raise RequestError(f"{shards[0].path.parent}: {first} is missing, {len(missing)} in all; give a complete folder")


def _place(model: Llama, slot: Slot) -> Tensor:
    return PARTS[slot.part](model.get_parameter(slot.parameter), model.shape)


def _wanted(model: Llama, slot: Slot) -> tuple[int, ...]:
    """The shape of a slot's tensor in the checkpoint: its rows are ours, not split by group and head."""
    tail = tuple(model.get_parameter(slot.parameter).shape[1:])
    return (_place(model, slot).numel() // math.prod(tail), *tail)


def _read(shards: list[Shard], names: set[str]) -> Iterator[tuple[Shard, str, Tensor]]:
    """These tensors, one at a time, each backed by the mapped file."""
    for shard in shards:
        here = [name for name in shard.tensors if name in names]
        if not here:
            continue
        with safe_open(shard.path, framework="pt", device="cpu") as file:
            for name in here:
                yield shard, name, file.get_tensor(name)


def _fill(model: Llama, shards: list[Shard], slots: dict[str, Slot], progress: Progress | None) -> None:
    entries = [shard.tensors[name] for shard in shards for name in shard.tensors if name in slots]
    total = sum(math.prod(entry.shape) * DTYPES[entry.dtype] for entry in entries)
    done = 0
    for _, name, found in _read(shards, set(slots)):
        place = _place(model, slots[name])
        # To the device first: it casts faster than the host does, and without a copy in host memory.
        place.copy_(found.to(place.device).view(place.shape))
        done += found.nbytes
        if progress is not None:
            progress(done, total)


def _check_redundant(model: Llama, shards: list[Shard], redundant: dict[str, Redundant]) -> None:
    for shard, name, found in _read(shards, set(redundant)):
        if not redundant[name].harmless(found, model):
            raise RequestError(
                f"{shard.path}: tensor {name!r} {list(found.shape)} {redundant[name].otherwise}; give other weights"
            )


def _digest(shards: list[Shard]) -> str:
    tensors = sorted((name, e.dtype, list(e.shape)) for shard in shards for name, e in shard.tensors.items())
    files = [(shard.size_bytes, shard.header_sha256) for shard in shards]
    return hashlib.sha256(case.canonical({"files": files, "tensors": tensors}).encode()).hexdigest()


def _shown(value: Any) -> str:
    """A value of a stranger's file in a message: on one line, and not a megabyte of it."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
