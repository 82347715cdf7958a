"""Read and check what a Hugging Face folder says of itself: config.json and the index of its
shards. Imports no torch.

config.json tells the model's dimensions under keys that differ by model type
(weights/hf_families.py). Commands call this before a run, and weights/hf_checkpoint.py when it
loads.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from steelyard import files
from steelyard.errors import RequestError, short_repr
from steelyard.models.shapes import LlamaModel, get_effective_window
from steelyard.schema import FrozenModel, to_canonical_json
from steelyard.weights.hf_families import (
    HF_FAMILIES,
    PLAIN_ROPE,
    REFUSED_ROPE,
    ROPE_TABLES,
    ROPE_TYPES,
    SCALING_KEYS,
    HfFamily,
    has_mixed_windows,
    parse_rope_scaling,
)
from steelyard.weights.setting_checks import check_setting_allowed, check_setting_equals

MAX_JSON_BYTES = 64 << 20  # of config.json and of the index, each

CONFIG_NAME = "config.json"
SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
REQUIRED_FIELDS = (
    "hidden",
    "layers",
    "heads",
    "ffn",
    "vocab",
)  # without a default that fits all models
MAX_HEADER_BYTES = 32 << 20  # about 130 per tensor; a 70B model has 100 KB in all

# Values that models/llama.py computes, whatever the model type: with another activation the weights
# would load and give wrong answers.
SUPPORTED_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1.0,),
}


@dataclass(frozen=True)
class ConfigValue:
    """What config.json, or a default of transformers, gives for a field of LlamaModel: the `key` in
    the file (a text for messages where it is no real key), the `field`, and the `value`.
    """

    key: str
    field: str
    value: Any


def list_setting_objects(path: Path, config: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the three dicts in which a setting may be: config.json itself, and its object for
    rotary positions in the newer (`rope_parameters`) and the older spelling (`rope_scaling`), empty
    if absent. Raise RequestError if one is not an object.
    """
    objects = [config]
    for key in ROPE_TABLES:
        table = config.get(key) or {}
        if not isinstance(table, dict):
            raise RequestError(
                f"{path}: {key} is {short_repr(table)}, not a table; download the file again"
            )
        objects.append(table)
    return objects


def find_values(path: Path, config: dict[str, Any], key: str) -> list[Any]:
    """Return all values of a key that are not null: from config.json itself first, then from its
    two objects for rotary positions; an empty list if there are none. Raise RequestError if one of
    these is not an object.
    """
    return [
        table[key] for table in list_setting_objects(path, config) if table.get(key) is not None
    ]


def find_hf_family(config: Mapping[str, Any]) -> HfFamily | None:
    """Return the row of the model type that a config.json names, or None if our own Llama does not
    compute that type or it names none.
    """
    model_type = config.get("model_type")
    return HF_FAMILIES.get(model_type) if isinstance(model_type, str) else None


def list_config_values(path: Path, config: dict[str, Any]) -> list[ConfigValue]:
    """Return every field of LlamaModel with its value in config.json, in the order of the model
    type's keys, sizes first; a field that several places tell is there once for each.

    Where a key is absent, the value is transformers' default for the model type, or None. An
    unknown model type is read as a Llama's. Raise RequestError if an object for rotary positions is
    not one.
    """
    row = find_hf_family(config) or HF_FAMILIES["llama"]
    config_values: list[ConfigValue] = []
    fields: dict[str, Any] = {}

    def add_values(key: str, field: str, *values: Any) -> None:
        """Append one ConfigValue per value (at least one) to the result, and remember the first as
        the field's value for the defaults of later keys.
        """
        config_values.extend(ConfigValue(key, field, value) for value in values)
        fields[field] = values[0]

    for setting in row.keys:
        # a rope base may be given in several objects
        add_values(
            setting.key,
            setting.field,
            *find_values(path, config, setting.key) or [setting.default(config, fields)],
        )
    for field, value in row.fixed_fields.items():
        add_values(f"{field} of model_type {row.model_type!r}", field, value)
    add_values(
        "max_position_embeddings",
        "positions",
        *find_values(path, config, "max_position_embeddings")[:1] or [row.positions],
    )
    add_values("sliding_window", "window", row.window(config, fields))
    add_values("rope_scaling", "rope_scaling", *(_parse_scalings(path, config) or (None,)))
    return config_values


def _parse_scalings(path: Path, config: dict[str, Any]) -> list[dict[str, Any]]:
    """Return each scaling of rotary positions that config.json gives, at most two, as a dict with
    `kind` and the fields of a case; kinds that are not supported are left out.
    """
    kinds = [
        (kind, table)
        for table in list_setting_objects(path, config)[1:]
        for kind in _find_rope_kind(table)
    ]
    return [
        parse_rope_scaling(kind, table, config) for kind, table in kinds if kind in SCALING_KEYS
    ]


def _find_rope_kind(table: dict[str, Any]) -> list[str]:
    """Return the kind of rotary positions that an object names, as a list of one, or an empty list;
    the newer spelling comes first.
    """
    return [str(table[key]) for key in ROPE_TYPES if table.get(key) is not None][:1]


def check_supported(path: Path, config: dict[str, Any]) -> HfFamily:
    """Return the row of config.json's model type. Raise RequestError if our own Llama does not
    compute what it describes: model type, activation, MLP biases, partial or unknown kinds of
    rotary positions, or layers of which only some have a sliding window. Dimensions are not
    checked.
    """
    row = find_hf_family(config)
    if row is None:
        raise RequestError(
            f"{path}: model_type is {short_repr(config.get('model_type') or 'absent')}, allowed:"
            f" {', '.join(map(repr, HF_FAMILIES))}; give weights of one of these types"
        )
    for key, allowed in SUPPORTED_VALUES.items():
        for table in list_setting_objects(path, config):
            check_setting_allowed(path, key, table.get(key), allowed)
    for kind in (
        kind for table in list_setting_objects(path, config)[1:] for kind in _find_rope_kind(table)
    ):
        if kind not in (PLAIN_ROPE, *SCALING_KEYS):
            reason = f" ({REFUSED_ROPE[kind]})" if kind in REFUSED_ROPE else ""
            allowed_kinds = ", ".join(map(repr, (PLAIN_ROPE, *SCALING_KEYS)))
            raise RequestError(
                f"{path}: rope_type is {short_repr(kind)}{reason}, allowed: {allowed_kinds}; give"
                " weights of"
                " another model"
            )
    if has_mixed_windows(config, get_first_values(path, config)):
        raise RequestError(
            f"{path}: some layers have a sliding window and others none; allowed: all layers alike"
        )
    return row


def get_first_values(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Return the value of every field of the model; where several keys tell a field, the first."""
    return {
        config_value.field: config_value.value
        for config_value in reversed(list_config_values(path, config))
    }


def check_config(path: Path, config: dict[str, Any], model: Mapping[str, Any]) -> None:
    """Raise RequestError if a config.json (`config`, read from `path`) is not that of `model`, a
    mapping of LlamaModel's or LlamaShape's fields, or is one that our own Llama does not compute.

    The number of positions is not compared: no weight depends on it. Windows as long as all
    positions count as none.
    """
    check_supported(path, config)
    for config_value in list_config_values(path, config):
        if config_value.field == "positions":  # no weight depends on them
            continue
        value: Any = config_value.value
        expected: Any = model[config_value.field]
        expected = expected.model_dump() if isinstance(expected, FrozenModel) else expected
        if config_value.field == "window" and type(value) is int:
            value, expected = (
                get_effective_window(value, model["positions"]),
                get_effective_window(expected, model["positions"]),
            )
        check_setting_equals(path, config_value.key, value, config_value.field, expected)


def parse_hf_model(path: Path, config: dict[str, Any]) -> LlamaModel:
    """Return the model that a config.json describes, as the LlamaModel of a case. Raise
    RequestError if it is not one that our own Llama computes, lacks a size, or has a wrong value;
    `path` is only for the message.
    """
    check_supported(path, config)
    fields, keys = (
        get_first_values(path, config),
        {config_value.field: config_value.key for config_value in list_config_values(path, config)},
    )
    missing = [keys[name] for name in REQUIRED_FIELDS if fields[name] is None]
    if missing:
        raise RequestError(
            f"{path}: does not state {', '.join(missing)}; give a complete config.json"
        )
    try:
        return LlamaModel.model_validate(fields | {"family": "llama"}, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else None
        if name is None:
            raise RequestError(
                f"{path}: {first['msg'].removeprefix('Value error, ')}; download the file again"
            ) from error
        raise RequestError(
            f"{path}: {keys[name]} is {short_repr(fields[name])}, which is not a valid value;"
            " download the file again"
        ) from error


def read_hf_json(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file of a Hugging Face folder, at most `MAX_JSON_BYTES`. Raise
    RequestError if it cannot be read, is larger, is not JSON or repeats a key, or is not a JSON
    object.
    """
    try:
        value = files.parse_json(files.read_file(path, MAX_JSON_BYTES))
    except OSError as error:
        raise RequestError(
            f"{path}: cannot be read ({error.strerror}); give a complete Hugging Face folder"
        ) from error
    except files.TooLargeError as error:
        raise RequestError(
            f"{path}: is {error}, the most allowed; download the file again"
        ) from error
    # ValueError: bad UTF-8, bad JSON, a number of too many digits
    except (ValueError, RecursionError) as error:
        raise RequestError(
            f"{path}: is not JSON ({short_repr(files.explain_json_error(error))}); download the"
            " file again"
        ) from error
    if not isinstance(value, dict):
        raise RequestError(f"{path}: is not a JSON object; download the file again")
    return value


def read_weight_map(index: Path, suffix: str = ".safetensors") -> dict[str, str]:
    """Return the `weight_map` of an index file: for each tensor's name the name of its file, which
    need not exist.

    Raise RequestError if the index cannot be read or has no such map, or a file name is not plain
    or does not end in `suffix`: it must not lead out of the folder.
    """
    file_names = read_hf_json(index).get("weight_map")
    if not isinstance(file_names, dict) or not file_names:
        raise RequestError(
            f"{index}: has no table weight_map of tensor name to file name; fetch the index again"
        )
    for file in file_names.values():
        # A plain name cannot leave the folder. A link of that name may: Hugging Face's own cache is
        # made of such links.
        is_plain = isinstance(file, str) and file.isprintable() and not set(file) & set("/\\")
        if not is_plain or not file.endswith(suffix):
            raise RequestError(
                f"{index}: names the shard {short_repr(file)}, allowed: a plain file name ending in"
                f" {suffix}; fetch the index again"
            )
    return file_names


def hash_headers(
    files: Iterable[tuple[int, str]], tensors: Iterable[tuple[str, str, list[int]]]
) -> str:
    """Return the SHA-256 in hexadecimal over the headers of a checkpoint: `files` are size and
    header hash of each file in order of name, `tensors` are name, dtype and shape of each in any
    order.
    """
    return hashlib.sha256(
        to_canonical_json({"files": list(files), "tensors": sorted(tensors)}).encode()
    ).hexdigest()
