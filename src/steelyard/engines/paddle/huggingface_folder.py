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
from steelyard.engines.paddle.host_weights import Array, whole_shape
from steelyard.errors import RequestError, short_repr
from steelyard.models.shapes import LlamaModel
from steelyard.weights import hf_config

ALLOWED_DTYPES = ("F64", "F32", "F16", "BF16")
OUTER_TENSORS = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
# A parameter of a layer, and the tensors that make it, in their order.
LAYER_TENSORS = {
    "attention_norm.weight": ("input_layernorm.weight",),
    "qkv.weight": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "qkv.bias": ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    "out.weight": ("self_attn.o_proj.weight",),
    "ffn_norm.weight": ("post_attention_layernorm.weight",),
    "gate_up.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "down.weight": ("mlp.down_proj.weight",),
}
IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)  # from the rope base; old checkpoints store it


@dataclass(frozen=True)
class TensorHeader:
    """A tensor in a safetensors file, as the file's header describes it: `path` of the file,
    `dtype` by safetensors' name (F32, BF16, ...), `shape`. Made by `_read_header`; the tensor's
    numbers are not read.
    """

    path: Path
    dtype: str
    shape: list[int]


class HuggingFaceFolder:
    """A checked Hugging Face folder of a Llama with safetensors: `read_parameter(name)` reads a
    whole parameter as an fp32 array by this package's name, `describe_source()` returns the
    weights' source for the record, `parameter_names` and `source_names` list names of parameters
    and of the tensors that make them up. `files` are the safetensors files, `tensors` the
    `TensorHeader`s by name.

    Constructing it reads the config and all headers, and raises RequestError if the folder has no
    config or safetensors, a file is missing or damaged, the config differs from `model`, or a
    tensor is missing, foreign, of another shape or of a dtype other than F64, F32, F16 and BF16.
    """

    def __init__(self, folder: Path, model: LlamaModel) -> None:
        """Read and check config, file list, headers and tensors of the folder against `model`; sets
        `files` and `tensors`. Raises RequestError as the class says. No tensor's numbers are read.
        """
        self.folder, self.model = folder, model
        if not (folder / hf_config.CONFIG_NAME).is_file():
            raise RequestError(
                f"weights {str(folder)!r}: engine paddle reads Hugging Face folders"
                f" ({hf_config.CONFIG_NAME} and safetensors); convert others with steelyard weights"
                " convert"
            )
        path = folder / hf_config.CONFIG_NAME
        fields = model.model_dump() | {"head_dim": model.hidden // model.heads}
        hf_config.check_config(path, hf_config.read_hf_json(path), fields)
        self.files = self._find_files()
        self.tensors = {
            name: header for file in self.files for name, header in _read_header(file).items()
        }
        self._check_tensors()

    def _find_files(self) -> list[Path]:
        """Return the safetensors files of this folder: the single one if it exists, else those that
        the index names, sorted by name; these may be missing. Raises RequestError if there is
        neither file nor index.
        """
        single, index = self.folder / hf_config.SINGLE_NAME, self.folder / hf_config.INDEX_NAME
        if single.is_file():
            return [single]
        if not index.is_file():
            raise RequestError(
                f"weights folder {str(self.folder)!r} has neither {single.name} nor {index.name}"
            )
        return [
            self.folder / name for name in sorted(set(hf_config.read_weight_map(index).values()))
        ]

    def source_names(self, name: str) -> list[str]:
        """Return the names of the checkpoint's tensors that make up a parameter of this package, in
        order: those of q, k and v for `layers.0.qkv.weight`, for example. Raises KeyError or
        ValueError for an unknown name.
        """
        if name in OUTER_TENSORS:
            return [OUTER_TENSORS[name]]
        _, layer, leaf = name.split(".", 2)
        return [f"model.layers.{layer}.{tensor}" for tensor in LAYER_TENSORS[leaf]]

    def parameter_names(self) -> list[str]:
        """Return this package's names of all parameters of the whole model, layer by layer after
        the outer ones; without the output if it is tied, and without biases if it has none.
        """
        outer = [
            name for name in OUTER_TENSORS if not (self.model.tied and name == "output.weight")
        ]
        inside = [
            name for name in LAYER_TENSORS if self.model.qkv_bias or not name.endswith("bias")
        ]
        return outer + [f"layers.{i}.{name}" for i in range(self.model.layers) for name in inside]

    def _source_shapes(self, name: str) -> list[list[int]]:
        """Return the expected shapes of the checkpoint's tensors that make up a parameter, in the
        order of `source_names`: QKV by numbers of heads, gate and up as halves.
        """
        size, dim = whole_shape(name, self.model), self.model.hidden // self.model.heads
        if ".qkv." in name:
            rows = [self.model.heads * dim, self.model.kv_heads * dim, self.model.kv_heads * dim]
        else:
            rows = [size[0] // len(self.source_names(name))] * len(self.source_names(name))
        return [[row_count, *size[1:]] for row_count in rows]

    def _check_tensors(self) -> None:
        """Raise RequestError for a tensor of the folder that does not belong to the model, or has
        another shape or an unsupported dtype, then for one that is missing. A tied model may store
        its output too, of any shape, and stored rotary frequencies are ignored; their dtypes are
        checked as well.
        """
        expected = {
            source: size
            for name in self.parameter_names()
            for source, size in zip(self.source_names(name), self._source_shapes(name), strict=True)
        }
        optional = {"lm_head.weight"} if self.model.tied else set()  # it is the embedding once more
        for name, header in self.tensors.items():
            subject = f"{header.path}: tensor {short_repr(name)}"
            if (
                name not in expected
                and name not in optional
                and not name.endswith(IGNORED_SUFFIXES)
            ):
                raise RequestError(f"{subject} does not belong to this model; give other weights")
            if name in expected and header.shape != expected[name]:
                raise RequestError(
                    f"{subject} has shape {header.shape}, and the case's model {expected[name]};"
                    " give"
                    " other weights"
                )
            if header.dtype not in ALLOWED_DTYPES:
                raise RequestError(
                    f"{subject} has dtype {short_repr(header.dtype)}; allowed:"
                    f" {', '.join(ALLOWED_DTYPES)}"
                )
        missing = sorted(expected.keys() - self.tensors.keys())
        if missing:
            raise RequestError(
                f"{self.folder}: tensor {missing[0]} is missing; give a complete Hugging Face"
                " folder"
            )

    def read_parameter(self, name: str) -> Array:
        """Read a whole parameter, by this package's name, as an fp32 array [outputs, inputs] or
        [outputs]. QKV rows are interleaved by key group: the group's queries, its key, its value.
        Gate and up stand one after the other. Raises RequestError if a file can no longer be read.
        """
        arrays = [self._read_tensor(source) for source in self.source_names(name)]
        if ".qkv." not in name:
            return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
        groups, dim = self.model.kv_heads, self.model.hidden // self.model.heads
        trailing_shape = arrays[0].shape[1:]
        return np.concatenate(
            [array.reshape(groups, -1, dim, *trailing_shape) for array in arrays], axis=1
        ).reshape(-1, *trailing_shape)

    def _read_tensor(self, name: str) -> Array:
        """Read one tensor of the checkpoint, by its name there, as an fp32 array; raise
        RequestError if the file can no longer be read.
        """
        path = self.tensors[name].path
        try:
            with safe_open(path, framework="paddle", device="cpu") as file:
                array: Array = file.get_tensor(name).astype("float32").numpy()
        except (SafetensorError, OSError) as error:
            raise RequestError(
                f"{path}: cannot be read any more ({short_repr(str(error))}); the file changed"
                " after its header was checked"
            ) from error
        return array

    def describe_source(self) -> dict[str, Any]:
        """Return the source of the weights for the record, equal for every engine that reads this
        folder: `source` "huggingface", `files` with names and sizes in bytes, `header_sha256` over
        the headers, and `parameters`, the number of elements of the whole model.
        """
        sizes = {file: file.stat().st_size for file in self.files}
        tensors = [(name, header.dtype, header.shape) for name, header in self.tensors.items()]
        return {
            "source": "huggingface",
            "files": [{"name": file.name, "bytes": size} for file, size in sizes.items()],
            "header_sha256": hf_config.hash_headers(
                [(size, _header_sha256(file)) for file, size in sizes.items()], tensors
            ),
            "parameters": sum(
                prod(whole_shape(name, self.model)) for name in self.parameter_names()
            ),
        }


def _read_header(path: Path) -> dict[str, TensorHeader]:
    """Read the header of a safetensors file and return its tensors by name. Raises RequestError if
    the file is missing or damaged, or its header longer than `MAX_HEADER_BYTES`.
    """
    try:
        if _header_bytes(path) > hf_config.MAX_HEADER_BYTES:
            raise RequestError(
                f"{path}: a header of {_header_bytes(path)} bytes; at most"
                f" {hf_config.MAX_HEADER_BYTES}"
                " are read"
            )
        # checks the header against the file's size
        with safe_open(path, framework="np", device="cpu") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            return {
                name: TensorHeader(path, str(tensor.get_dtype()), list(tensor.get_shape()))
                for name, tensor in slices.items()
            }
    except (SafetensorError, OSError) as error:
        raise RequestError(
            f"{path}: is not a whole safetensors file ({short_repr(str(error))}); download it again"
        ) from error


def _header_bytes(path: Path) -> int:
    """Return the length in bytes of a safetensors file's header, from the file's first 8 bytes."""
    with files.open_regular(path) as raw:
        return int.from_bytes(raw.read(8), "little")


def _header_sha256(path: Path) -> str:
    """Return the SHA-256 of the bytes of a safetensors file's header, without the 8 bytes of its
    length, in hex.
    """
    with files.open_regular(path) as raw:
        return hashlib.sha256(raw.read(int.from_bytes(raw.read(8), "little"))).hexdigest()
