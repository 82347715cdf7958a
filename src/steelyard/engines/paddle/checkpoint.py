"""Weights of a Hugging Face folder as fp32 arrays of the host, for engine `paddle`. The config, all
headers and shapes are checked before the first tensor is read.
"""

import hashlib
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from steelyard import files
from steelyard.engines.paddle.weights import Array, whole_shape
from steelyard.errors import RequestError, short_repr
from steelyard.models.shapes import LlamaModel
from steelyard.weights import hf_config

DTYPES = ("F64", "F32", "F16", "BF16")
TOP = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
# A parameter of a layer, and the tensors that make it, in their order.
LAYER = {
    "attention_norm.weight": ("input_layernorm.weight",),
    "qkv.weight": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "qkv.bias": ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    "out.weight": ("self_attn.o_proj.weight",),
    "ffn_norm.weight": ("post_attention_layernorm.weight",),
    "gate_up.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "down.weight": ("mlp.down_proj.weight",),
}
COMPUTED = ("rotary_emb.inv_freq",)  # from the rope base; old checkpoints store it


@dataclass(frozen=True)
class Stored:
    """A tensor in a safetensors file, as the header describes it: file, dtype name (F32, BF16,
    ...), shape.
    """

    path: Path
    dtype: str
    shape: list[int]


class HuggingFaceFolder:
    """A checked Hugging Face folder of a Llama with safetensors, from which whole parameters are
    read by this package's names.

    Constructing it reads the config and all headers, and raises RequestError if the folder is none,
    the config differs from `model`, or a tensor is missing, foreign, of another shape or of an
    unsupported dtype.
    """

    def __init__(self, folder: Path, model: LlamaModel) -> None:
        self.folder, self.model = folder, model
        if not (folder / hf_config.CONFIG_NAME).is_file():
            raise RequestError(
                f"weights {str(folder)!r}: engine paddle reads Hugging Face folders"
                f" ({hf_config.CONFIG_NAME} and safetensors); convert others with steelyard weights"
                " convert"
            )
        path = folder / hf_config.CONFIG_NAME
        fields = model.model_dump() | {"head_dim": model.hidden // model.heads}
        hf_config.check_config(path, hf_config.read_json(path), fields)
        self.files = self._files()
        self.tensors = {
            name: stored for file in self.files for name, stored in _header(file).items()
        }
        self._check()

    def _files(self) -> list[Path]:
        """Return the safetensors files: the single one, or those that the index names, sorted.
        Raises RequestError if there is neither.
        """
        single, index = self.folder / hf_config.SINGLE_NAME, self.folder / hf_config.INDEX_NAME
        if single.is_file():
            return [single]
        if not index.is_file():
            raise RequestError(
                f"weights folder {str(self.folder)!r} has neither {single.name} nor {index.name}"
            )
        return [self.folder / name for name in sorted(set(hf_config.weight_map(index).values()))]

    def sources(self, name: str) -> list[str]:
        """Return the names of the checkpoint's tensors that make up a parameter of ours, in order:
        q, k and v for `qkv`, for example.
        """
        if name in TOP:
            return [TOP[name]]
        _, layer, rest = name.split(".", 2)
        return [f"model.layers.{layer}.{one}" for one in LAYER[rest]]

    def names(self) -> list[str]:
        """Return the names of all parameters of the whole model; without the output if it is tied,
        and without biases if it has none.
        """
        top = [name for name in TOP if not (self.model.tied and name == "output.weight")]
        inside = [name for name in LAYER if self.model.qkv_bias or not name.endswith("bias")]
        return top + [f"layers.{i}.{name}" for i in range(self.model.layers) for name in inside]

    def _shapes(self, name: str) -> list[list[int]]:
        """Return the expected shapes of the checkpoint's tensors that make up a parameter, in the
        order of `source_names`.
        """
        size, dim = whole_shape(name, self.model), self.model.hidden // self.model.heads
        if ".qkv." in name:
            rows = [self.model.heads * dim, self.model.kv_heads * dim, self.model.kv_heads * dim]
        else:
            rows = [size[0] // len(self.sources(name))] * len(self.sources(name))
        return [[one, *size[1:]] for one in rows]

    def _check(self) -> None:
        """Raise RequestError for a tensor that is missing, does not belong to the model, or has
        another shape or an unsupported dtype. A tied model may store its output too, and stored
        rotary frequencies are ignored.
        """
        wanted = {
            source: size
            for name in self.names()
            for source, size in zip(self.sources(name), self._shapes(name), strict=True)
        }
        spare = {"lm_head.weight"} if self.model.tied else set()  # it is the embedding once more
        for name, stored in self.tensors.items():
            about = f"{stored.path}: tensor {short_repr(name)}"
            if name not in wanted and name not in spare and not name.endswith(COMPUTED):
                raise RequestError(f"{about} does not belong to this model; give other weights")
            if name in wanted and stored.shape != wanted[name]:
                raise RequestError(
                    f"{about} has shape {stored.shape}, and the case's model {wanted[name]}; give"
                    " other weights"
                )
            if stored.dtype not in DTYPES:
                raise RequestError(
                    f"{about} is of {short_repr(stored.dtype)}; allowed: {', '.join(DTYPES)}"
                )
        missing = sorted(wanted.keys() - self.tensors.keys())
        if missing:
            raise RequestError(
                f"{self.folder}: tensor {missing[0]} is missing; give a complete Hugging Face"
                " folder"
            )

    def whole(self, name: str) -> Array:
        """Read a whole parameter as an fp32 array. QKV rows are interleaved by key group: the
        group's queries, its key, its value. Gate and up are one after the other.
        """
        found = [self._read(source) for source in self.sources(name)]
        if ".qkv." not in name:
            return found[0] if len(found) == 1 else np.concatenate(found)
        groups, dim = self.model.kv_heads, self.model.hidden // self.model.heads
        rest = found[0].shape[1:]
        return np.concatenate(
            [one.reshape(groups, -1, dim, *rest) for one in found], axis=1
        ).reshape(-1, *rest)

    def _read(self, name: str) -> Array:
        """Read one tensor of the checkpoint as an fp32 array; raise RequestError if the file can no
        longer be read.
        """
        path = self.tensors[name].path
        try:
            with safe_open(path, framework="paddle", device="cpu") as file:
                found: Array = file.get_tensor(name).astype("float32").numpy()
        except (SafetensorError, OSError) as error:
            raise RequestError(
                f"{path}: cannot be read ({short_repr(str(error))}); it changed since it was read"
            ) from error
        return found

    def facts(self) -> dict[str, Any]:
        """Return the source of the weights for the record, the same for every engine: file names
        and sizes, a hash over the headers, and the number of parameters.
        """
        sizes = {file: file.stat().st_size for file in self.files}
        tensors = [(name, stored.dtype, stored.shape) for name, stored in self.tensors.items()]
        return {
            "source": "huggingface",
            "files": [{"name": file.name, "bytes": size} for file, size in sizes.items()],
            "header_sha256": hf_config.digest(
                [(size, _sha256(file)) for file, size in sizes.items()], tensors
            ),
            "parameters": sum(prod(whole_shape(name, self.model)) for name in self.names()),
        }


def _header(path: Path) -> dict[str, Stored]:
    """Read the header of a safetensors file and return its tensors by name; raise RequestError if
    the file is damaged or its header too large.
    """
    try:
        if _length(path) > hf_config.MAX_HEADER_BYTES:
            raise RequestError(
                f"{path}: a header of {_length(path)} bytes; at most {hf_config.MAX_HEADER_BYTES}"
                " are read"
            )
        # checks the header against the file's size
        with safe_open(path, framework="np", device="cpu") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            return {
                name: Stored(path, str(one.get_dtype()), list(one.get_shape()))
                for name, one in slices.items()
            }
    except (SafetensorError, OSError) as error:
        raise RequestError(
            f"{path}: is not a whole safetensors file ({short_repr(str(error))}); download it again"
        ) from error


def _length(path: Path) -> int:
    """Return the length of the header in bytes, from the file's first 8 bytes."""
    with files.open_regular(path) as raw:
        return int.from_bytes(raw.read(8), "little")


def _sha256(path: Path) -> str:
    """Return the SHA-256 of the header's bytes, in hex."""
    with files.open_regular(path) as raw:
        return hashlib.sha256(raw.read(int.from_bytes(raw.read(8), "little"))).hexdigest()
