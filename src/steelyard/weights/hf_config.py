"""What a Hugging Face folder says of itself: config.json, the index of its shards, a digest of their headers. Without torch."""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steelyard import files
from steelyard.errors import RequestError
from steelyard.schema import canonical
from steelyard.weights.settings import agree, allow, shown

MAX_JSON_BYTES = 64 << 20  # of config.json and of the index, each

CONFIG_NAME = "config.json"
SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
MAX_HEADER_BYTES = 32 << 20  # 130 a tensor; a model of 70B parameters has 100 KB in all

# What models/llama.py computes: another model_type or rope type of the same dimensions would load and answer wrongly.
COMPUTED: dict[str, tuple[Any, ...]] = {
    "model_type": ("llama", "aquila"),
    "hidden_act": ("silu",),
    "mlp_bias": (False,),
    "rope_type": ("default",),
    "type": ("default",),  # the older spelling of rope_type
    "partial_rotary_factor": (1.0,),
}


@dataclass(frozen=True)
class ConfigKey:
    """A key of config.json, the field of the shape it must equal, and what Hugging Face takes if the key is absent."""

    key: str
    field: str
    absent: Callable[[Mapping[str, Any]], Any] = lambda config: None


# Rows whose default is made of others come after them. Defaults: LlamaConfig of transformers.
SETTINGS = (
    ConfigKey("hidden_size", "hidden"),
    ConfigKey("num_hidden_layers", "layers"),
    ConfigKey("num_attention_heads", "heads"),
    ConfigKey("num_key_value_heads", "kv_heads", lambda config: config["heads"]),
    ConfigKey("intermediate_size", "ffn"),
    ConfigKey("vocab_size", "vocab"),
    ConfigKey("rope_theta", "rope_base", lambda config: 10000.0),
    ConfigKey("rms_norm_eps", "norm_eps", lambda config: 1e-6),
    ConfigKey("tie_word_embeddings", "tied", lambda config: False),
    ConfigKey("attention_bias", "qkv_bias", lambda config: False),
    ConfigKey("head_dim", "head_dim", lambda config: config["head_dim"]),
)
POSITIONS = ConfigKey("max_position_embeddings", "positions", lambda config: 2048)  # not compared: no weight depends on it


def tables(path: Path, config: dict[str, Any]) -> list[dict[str, Any]]:
    """Where a setting may be: at the top, or in a table of the newer or the older spelling."""
    out = [{"model_type": "absent"} | config]
    for key in ("rope_parameters", "rope_scaling"):
        table = config.get(key) or {}
        if not isinstance(table, dict):
            raise RequestError(f"{path}: {key} is {shown(table)}, not a table; download the file again")
        out.append(table)
    return out


def given(path: Path, config: dict[str, Any], key: str) -> list[Any]:
    return [table[key] for table in tables(path, config) if table.get(key) is not None]


def check_config(path: Path, config: dict[str, Any], model: Mapping[str, Any]) -> None:
    for setting in SETTINGS:
        # A rope base may be spelled in several places: each one must be right.
        for found in given(path, config, setting.key) or [setting.absent(model)]:
            agree(path, setting.key, found, setting.field, model[setting.field])
    for key, allowed in COMPUTED.items():
        for table in tables(path, config):
            allow(path, key, table.get(key), allowed)


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = files.parse(files.read(path, MAX_JSON_BYTES))
    except OSError as error:
        raise RequestError(f"{path}: cannot be read ({error.strerror}); give a complete Hugging Face folder") from error
    except files.TooLargeError as error:
        raise RequestError(f"{path}: is {error}, the most allowed; download the file again") from error
    except (ValueError, RecursionError) as error:  # ValueError: bad UTF-8, bad JSON, a number of too many digits
        raise RequestError(f"{path}: is not JSON ({shown(files.reason(error))}); download the file again") from error
    if not isinstance(value, dict):
        raise RequestError(f"{path}: is not a JSON object; download the file again")
    return value


def weight_map(index: Path) -> dict[str, str]:
    where = read_json(index).get("weight_map")
    if not isinstance(where, dict) or not where:
        raise RequestError(f"{index}: has no table weight_map of tensor name to file name; fetch the index again")
    for file in where.values():
        # A plain name cannot leave the folder. A link of that name may: Hugging Face's own cache is made of such links.
        plain = isinstance(file, str) and file.isprintable() and not set(file) & set("/\\")
        if not plain or not file.endswith(".safetensors"):
            raise RequestError(
                f"{index}: names the shard {shown(file)}, allowed: a plain file name ending in .safetensors; "
                "fetch the index again"
            )
    return where


def digest(shards: Iterable[tuple[int, str]], tensors: Iterable[tuple[str, str, list[int]]]) -> str:
    """Of files, by their size and the sha256 of their header, in order of name; and of tensors: name, dtype and shape."""
    return hashlib.sha256(canonical({"files": list(shards), "tensors": sorted(tensors)}).encode()).hexdigest()
