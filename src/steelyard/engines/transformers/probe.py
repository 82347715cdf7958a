"""Describes a model's folder by the transformers library, in a process of its own, for a parent
that never imports it.

Started as `python -m steelyard.engines.transformers.probe FOLDER ANSWER`; the answer is JSON in a
file.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from steelyard.engines.transformers import auto_model
from steelyard.errors import RequestError, short_repr
from steelyard.models.auto_shape import remove_unwanted_keys
from steelyard.weights import hf_config, hf_folder

# A model of the same kind that is tiny, in the words that configurations have in common; each class
# maps them to its own.
TINY: dict[str, int] = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 160,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "sliding_window": 64,
    "query_pre_attn_scalar": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# lists with an entry for each layer
PER_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers")


def describe_folder(folder: Path) -> dict[str, Any]:
    """Return the model of a Hugging Face folder as a case's [question.model] table (`model`), and a
    tiny model of its type (`smoke`); if none can be made, `smoke` is None and `why` has the reason,
    else `why` is None.

    Raises RequestError if config.json cannot be read, names code of the folder itself for an
    unknown type, the library has no causal language model of that type, or cannot build or count
    it. No weights are read.
    """
    config = hf_config.read_hf_json(folder / hf_config.CONFIG_NAME)
    model_type = str(config.get("model_type"))
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        hf_folder.check_no_remote_code(folder, config)
        raise RequestError(
            f"{folder / hf_config.CONFIG_NAME}: model_type is"
            f" {short_repr(config.get('model_type'))}, and transformers {_library_version()} has no"
            " causal language model of that type; give another model, or install a newer"
            " transformers"
        )
    fields = {
        key: value for key, value in remove_unwanted_keys(config).items() if key != "model_type"
    }
    library_config = auto_model.make_library_config(model_type, fields, [])
    null = [
        key
        for key, value in config.items()
        if value is None and getattr(library_config, key, None) is not None
    ]
    null = [
        key
        for key in null
        if key not in ("dtype", "torch_dtype", "pad_token_id", "bos_token_id", "eos_token_id")
    ]
    out: dict[str, Any] = {
        "model": make_model_table(model_type, fields, null),
        "smoke": None,
        "why": None,
    }
    try:
        out["smoke"] = make_model_table(model_type, shrink_config(library_config, fields), null)
    except (RequestError, RuntimeError, ValueError, TypeError, IndexError, KeyError) as error:
        out["why"] = str(error)
    return out


def _library_version() -> str:
    """Return the version of transformers."""
    import transformers

    return str(transformers.__version__)


def make_model_table(model_type: str, config: dict[str, Any], null: list[str]) -> dict[str, Any]:
    """Return a case's [question.model] table of family `auto` for a configuration: the usual sizes,
    counted parameters and FLOPs, and `config` itself. `null` are keys that config.json sets to null
    though the library's default is not: TOML has no null, so they are listed, if there are any.

    Raises RequestError if the model cannot be built or counted, or its number of positions is
    unknown.
    """
    library_config = auto_model.make_library_config(model_type, config, null)
    text = library_config.get_text_config()
    counted = auto_model.count_model(library_config)
    return {
        "family": "auto",
        "model_type": model_type,
        "layers": text.num_hidden_layers,
        "hidden": text.hidden_size,
        "heads": text.num_attention_heads,
        "vocab": text.vocab_size,
        "positions": _find_positions(text),
        "tied": bool(getattr(library_config, "tie_word_embeddings", False)),
        **asdict(counted),
        **({"null": null} if null else {}),
        "config": config,
    }


def _find_positions(text: Any) -> int:
    """Return the largest number of positions of a text model's configuration, from the first of the
    usual field names that has a positive integer; raise RequestError if none has.
    """
    for name in ("max_position_embeddings", "max_seq_len", "seq_length", "n_positions"):
        value = getattr(text, name, None)
        if isinstance(value, int) and value > 0:
            return value
    raise RequestError(
        "its configuration does not say how many positions it has (max_position_embeddings); give"
        " another model"
    )


def shrink_config(library_config: Any, config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration fields of a tiny model of the same type: `config` with sizes
    replaced by those of TINY, as far as `library_config` has them (under its own names for them),
    and per-layer lists cut to two layers.
    """
    names = {name: library_config.attribute_map.get(name, name) for name in TINY}
    sizes = {
        names[name]: value
        for name, value in TINY.items()
        if getattr(library_config, name, None) is not None
    }
    lists = {
        key: config[key][: TINY["num_hidden_layers"]]
        for key in PER_LAYER
        if isinstance(config.get(key), list)
    }
    return {**config, **sizes, **lists}


def main() -> None:
    """Describe the folder in argv[1] and write the answer as JSON to the file in argv[2]; a
    RequestError becomes {"error": text}, other errors are raised. Limits torch to one thread.
    """
    torch.set_num_threads(1)
    folder, answer = map(Path, sys.argv[1:3])
    try:
        description = describe_folder(folder)
    except RequestError as error:
        description = {"error": str(error)}
    answer.write_text(json.dumps(description), encoding="utf-8")


if __name__ == "__main__":
    main()
