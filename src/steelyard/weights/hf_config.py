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
from steelyard.models.shapes import LlamaModel, real_window
from steelyard.schema import Frozen, canonical
from steelyard.weights.hf_families import (
    NOT_SCALED,
    PLAIN_ROPE,
    ROPE_TABLES,
    ROPE_TYPES,
    ROWS,
    SCALED,
    HfFamily,
    mixes,
    read_scaling,
)
from steelyard.weights.settings import agree, allow

MAX_JSON_BYTES = 64 << 20  # of config.json and of the index, each

CONFIG_NAME = "config.json"
SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
REQUIRED = ("hidden", "layers", "heads", "ffn", "vocab")  # without a default that fits all models
MAX_HEADER_BYTES = 32 << 20  # about 130 per tensor; a 70B model has 100 KB in all

# Values that models/llama.py computes, whatever the model type: with another activation the weights
# would load and give wrong answers.
COMPUTED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1.0,),
}


@dataclass(frozen=True)
class Told:
    """The value that one key of config.json gives for a field of the model."""

    key: str
    field: str
    value: Any


def tables(path: Path, config: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the objects in which a setting may be: config.json itself, and its object for rotary
    positions in the newer and the older spelling (empty if absent). Raise RequestError if one is
    not an object.
    """
    out = [config]
    for key in ROPE_TABLES:
        table = config.get(key) or {}
        if not isinstance(table, dict):
            raise RequestError(
                f"{path}: {key} is {short_repr(table)}, not a table; download the file again"
            )
        out.append(table)
    return out


def given(path: Path, config: dict[str, Any], key: str) -> list[Any]:
    """Return all values of a key that are not null, from config.json itself first, then from its
    objects for rotary positions.
    """
    return [table[key] for table in tables(path, config) if table.get(key) is not None]


def family_of(config: Mapping[str, Any]) -> HfFamily | None:
    """Return the row of a config's model type, or None if our own Llama cannot compute it."""
    found = config.get("model_type")
    return ROWS.get(found) if isinstance(found, str) else None


def told(path: Path, config: dict[str, Any]) -> list[Told]:
    """Return every field of the model with its value in config.json, sizes first; a field that
    several keys tell is there once for each.

    Where a key is absent, the value is transformers' default for the model type, or None. An
    unknown model type is read as a Llama's.
    """
    row = family_of(config) or ROWS["llama"]
    out: list[Told] = []
    fields: dict[str, Any] = {}

    def tell(key: str, field: str, *values: Any) -> None:
        """Add one entry per value, and remember the first as the field's value for the defaults
        that follow.
        """
        out.extend(Told(key, field, value) for value in values)
        fields[field] = values[0]

    for setting in row.keys:
        # a rope base may be given in several objects
        tell(
            setting.key,
            setting.field,
            *given(path, config, setting.key) or [setting.absent(config, fields)],
        )
    for field, value in row.told.items():
        tell(f"{field} of model_type {row.model_type!r}", field, value)
    tell(
        "max_position_embeddings",
        "positions",
        *given(path, config, "max_position_embeddings")[:1] or [row.positions],
    )
    tell("sliding_window", "window", row.window(config, fields))
    tell("rope_scaling", "rope_scaling", *(_scalings(path, config) or (None,)))
    return out


def _scalings(path: Path, config: dict[str, Any]) -> list[dict[str, Any]]:
    """Return each scaling of rotary positions that config.json gives, in a case's form; kinds that
    are not supported are left out.
    """
    named = [(kind, table) for table in tables(path, config)[1:] for kind in _rope_kinds(table)]
    return [read_scaling(kind, table, config) for kind, table in named if kind in SCALED]


def _rope_kinds(table: dict[str, Any]) -> list[str]:
    """Return the kind of rotary positions that an object names, as a list of one, or an empty list;
    the newer spelling comes first.
    """
    return [str(table[key]) for key in ROPE_TYPES if table.get(key) is not None][:1]


def check_computed(path: Path, config: dict[str, Any]) -> HfFamily:
    """Raise RequestError if our own Llama does not compute what config.json describes: model type,
    activation, biases, rotary positions, or layers of which only some have a sliding window. Return
    the row of the model type.
    """
    row = family_of(config)
    if row is None:
        raise RequestError(
            f"{path}: model_type is {short_repr(config.get('model_type') or 'absent')}, allowed:"
            f" {', '.join(map(repr, ROWS))}; give weights of one of these types"
        )
    for key, allowed in COMPUTED.items():
        for table in tables(path, config):
            allow(path, key, table.get(key), allowed)
    for kind in (kind for table in tables(path, config)[1:] for kind in _rope_kinds(table)):
        if kind not in (PLAIN_ROPE, *SCALED):
            why = f" ({NOT_SCALED[kind]})" if kind in NOT_SCALED else ""
            others = ", ".join(map(repr, (PLAIN_ROPE, *SCALED)))
            raise RequestError(
                f"{path}: rope_type is {short_repr(kind)}{why}, allowed: {others}; give weights of"
                " another model"
            )
    if mixes(config, first_told(path, config)):
        raise RequestError(
            f"{path}: some layers have a sliding window and others none; allowed: all layers alike"
        )
    return row


def first_told(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Return the value of every field of the model; where several keys tell a field, the first."""
    return {one.field: one.value for one in reversed(told(path, config))}


def check_config(path: Path, config: dict[str, Any], model: Mapping[str, Any]) -> None:
    """Raise RequestError if a config.json is not that of a model, given as a mapping of its fields,
    or is one that our own Llama does not compute.

    The number of positions is not compared: no weight depends on it. Windows as long as all
    positions count as none.
    """
    check_computed(path, config)
    for one in told(path, config):
        if one.field == "positions":  # no weight depends on them
            continue
        value: Any = one.value
        wanted: Any = model[one.field]
        wanted = wanted.model_dump() if isinstance(wanted, Frozen) else wanted
        if one.field == "window" and type(value) is int:
            value, wanted = (
                real_window(value, model["positions"]),
                real_window(wanted, model["positions"]),
            )
        agree(path, one.key, value, one.field, wanted)


def model_of(path: Path, config: dict[str, Any]) -> LlamaModel:
    """Return the model that a config.json describes, in the form of a case. Raise RequestError if
    it is not one that our own Llama computes, or lacks a size, or a value is wrong.
    """
    check_computed(path, config)
    fields, keys = first_told(path, config), {one.field: one.key for one in told(path, config)}
    missing = [keys[name] for name in REQUIRED if fields[name] is None]
    if missing:
        raise RequestError(
            f"{path}: does not tell {', '.join(missing)}; give a complete config.json"
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
            f"{path}: {keys[name]} is {short_repr(fields[name])}, no {name} that a model has;"
            " download the file again"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file of a Hugging Face folder, at most `MAX_JSON_BYTES`. Raise RequestError if it
    cannot be read, or is not a JSON object.
    """
    try:
        value = files.parse(files.read(path, MAX_JSON_BYTES))
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
            f"{path}: is not JSON ({short_repr(files.reason(error))}); download the file again"
        ) from error
    if not isinstance(value, dict):
        raise RequestError(f"{path}: is not a JSON object; download the file again")
    return value


def weight_map(index: Path, ending: str = ".safetensors") -> dict[str, str]:
    """Read an index file and return the file name of each tensor by its name. Raise RequestError if
    there are none, or a file name is not plain or does not end in `suffix`: it must not lead out of
    the folder.
    """
    where = read_json(index).get("weight_map")
    if not isinstance(where, dict) or not where:
        raise RequestError(
            f"{index}: has no table weight_map of tensor name to file name; fetch the index again"
        )
    for file in where.values():
        # A plain name cannot leave the folder. A link of that name may: Hugging Face's own cache is
        # made of such links.
        plain = isinstance(file, str) and file.isprintable() and not set(file) & set("/\\")
        if not plain or not file.endswith(ending):
            raise RequestError(
                f"{index}: names the shard {short_repr(file)}, allowed: a plain file name ending in"
                f" {ending}; fetch the index again"
            )
    return where


def digest(shards: Iterable[tuple[int, str]], tensors: Iterable[tuple[str, str, list[int]]]) -> str:
    """Return a SHA-256 over the headers of a checkpoint: `files` are size and header hash of each
    file in order of name, `tensors` are name, dtype and shape of each.
    """
    return hashlib.sha256(
        canonical({"files": list(shards), "tensors": sorted(tensors)}).encode()
    ).hexdigest()
