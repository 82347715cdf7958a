"""Rows of Hugging Face model types that our own Llama (models/llama.py) computes: which keys of
config.json tell which field, and transformers' default where a key is absent.

One row serves reading a config.json (weights/hf_config.py) and writing one
(weights/checkpoint_writer.py). Imports no torch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from steelyard.models.shapes import LinearRope, Llama3Rope, get_effective_window

Config = Mapping[str, Any]
ModelFields = Mapping[str, Any]  # fields of a model that are known so far

# the newer and the older object of config.json for rotary positions
ROPE_TABLES = ("rope_parameters", "rope_scaling")
ROPE_TYPES = ("rope_type", "type")  # the newer and the older spelling
SLIDING_LAYER = "sliding_attention"


@dataclass(frozen=True)
class ConfigKey:
    """A `key` of config.json, the `field` of LlamaModel that it tells, and `default`: a function of
    the config and the fields known so far that returns what transformers takes if the key is
    absent, or None if it has no default.
    """

    key: str
    field: str
    default: Callable[[Config, ModelFields], Any] = lambda config, fields: None


def _default_head_dim(config: Config, fields: ModelFields) -> int | None:
    """Return the hidden size divided by the number of heads; None if either is unknown or not an
    integer.
    """
    hidden, heads = fields["hidden"], fields["heads"]
    return hidden // heads if type(hidden) is int and type(heads) is int and heads else None


def _make_kv_heads_key(default_kv_heads: int | None) -> ConfigKey:
    """Return the key of the number of KV heads. If it is absent from config.json its value is
    `default_kv_heads`; if it is null there, or that default is None, it is the number of heads.
    """
    key = "num_key_value_heads"
    return ConfigKey(
        key,
        "kv_heads",
        lambda config, fields: (
            fields["heads"] if default_kv_heads is None or key in config else default_kv_heads
        ),
    )


# Keys whose default depends on other fields come after those.
COMMON_KEYS = (
    ConfigKey("hidden_size", "hidden"),
    ConfigKey("num_hidden_layers", "layers"),
    ConfigKey("num_attention_heads", "heads"),
    ConfigKey("intermediate_size", "ffn"),
    ConfigKey("vocab_size", "vocab"),
    ConfigKey("rope_theta", "rope_base", lambda config, fields: 10000.0),
    ConfigKey("rms_norm_eps", "norm_eps", lambda config, fields: 1e-6),
    ConfigKey("tie_word_embeddings", "tied", lambda config, fields: False),
)
BIAS_KEY = ConfigKey("attention_bias", "qkv_bias", lambda config, fields: False)
HEAD_DIM_KEY = ConfigKey("head_dim", "head_dim", _default_head_dim)


# `window` of model types without a sliding window
def _find_no_window(config: Config, fields: ModelFields) -> None:
    return None


def _find_mistral_window(config: Config, fields: ModelFields) -> int | None:
    """Return the sliding window, in tokens, of all layers of a Mistral: 4096 if the key is absent
    from its config, None (no window) if it is null.
    """
    window: int | None = config.get("sliding_window", 4096)
    return window


def count_sliding_layers(config: Config, layers: Any) -> int:
    """Return how many of a Qwen's `layers` have a sliding window: those that `layer_types` marks,
    else those from `max_window_layers` (28 if absent) on. 0 if windows are switched off or null, or
    `layers` is not an integer.
    """
    if (
        not config.get("use_sliding_window")
        or config.get("sliding_window", 4096) is None
        or type(layers) is not int
    ):
        return 0
    types = config.get("layer_types")
    if isinstance(types, list):
        return types[:layers].count(SLIDING_LAYER)
    first_sliding = config.get("max_window_layers", 28)
    return max(0, layers - first_sliding) if type(first_sliding) is int else layers


def _find_qwen_window(config: Config, fields: ModelFields) -> int | None:
    """Return the sliding window, in tokens, of a Qwen if any of its layers has one (4096 if the key
    is absent), else None.
    """
    window: int | None = config.get("sliding_window", 4096)
    return window if count_sliding_layers(config, fields["layers"]) else None


def has_mixed_windows(config: Config, fields: ModelFields) -> bool:
    """Return whether some layers of a Qwen have a sliding window and others none, and the window is
    shorter than the model's positions, so that it matters. False for configs without
    `use_sliding_window`. `fields` are those of LlamaModel.
    """
    layers, window, positions = fields["layers"], fields.get("window"), fields.get("positions")
    if (
        type(window) is not int
        or type(positions) is not int
        or get_effective_window(window, positions) is None
    ):
        return False
    return "use_sliding_window" in config and count_sliding_layers(config, layers) < layers


@dataclass(frozen=True)
class HfFamily:
    """A `model_type` of transformers that our own Llama computes, with its class there
    (`architecture`). `keys` (ConfigKey) tell its fields, `fixed_fields` are those that follow from
    the type alone; `positions` is the default of max_position_embeddings; `window` returns the
    sliding window in tokens from config and fields, None for none.

    For writing: `can_write` is whether this type can express a shape (the last row that can is
    taken), `extra_config` returns the keys that only this type has; `out_bias` is whether a QKV
    bias comes with one of the output projection.
    """

    model_type: str
    architecture: str  # the class in transformers
    keys: tuple[ConfigKey, ...]
    positions: int  # default of max_position_embeddings
    fixed_fields: ModelFields = field(default_factory=dict)
    window: Callable[[Config, ModelFields], int | None] = _find_no_window
    # whether a QKV bias comes with a bias of the output projection, which our model lacks
    out_bias: bool = False
    can_write: Callable[[Any], bool] = lambda shape: False
    # keys of config.json that only this model type has
    extra_config: Callable[[Any], dict[str, Any]] = lambda shape: {}


def _make_qwen_window_config(shape: Any) -> dict[str, Any]:
    """Return the keys about sliding windows in a Qwen's config.json, for a shape of which all
    layers or none have one.
    """
    has_window = shape.window is not None
    return {
        "use_sliding_window": has_window,
        "sliding_window": shape.window,
        "max_window_layers": 0 if has_window else shape.layers,
        "layer_types": [SLIDING_LAYER if has_window else "full_attention"] * shape.layers,
    }


_LLAMA_KEYS = (*COMMON_KEYS, _make_kv_heads_key(None), BIAS_KEY, HEAD_DIM_KEY)
# Defaults: the configuration classes of transformers 5.
HF_FAMILIES = {
    row.model_type: row
    for row in (
        HfFamily(
            "llama",
            "LlamaForCausalLM",
            _LLAMA_KEYS,
            2048,
            {"qk_norm": False},
            out_bias=True,
            can_write=lambda shape: True,
            extra_config=lambda shape: {"attention_bias": shape.qkv_bias, "mlp_bias": False},
        ),
        HfFamily(
            "aquila", "LlamaForCausalLM", _LLAMA_KEYS, 2048, {"qk_norm": False}, out_bias=True
        ),
        HfFamily(
            "mistral",
            "MistralForCausalLM",
            (*COMMON_KEYS, _make_kv_heads_key(8), HEAD_DIM_KEY),
            131072,
            {"qkv_bias": False, "qk_norm": False},
            window=_find_mistral_window,
            can_write=lambda shape: shape.window is not None,
            extra_config=lambda shape: {"sliding_window": shape.window},
        ),
        HfFamily(
            "qwen2",
            "Qwen2ForCausalLM",
            (*COMMON_KEYS, _make_kv_heads_key(32), HEAD_DIM_KEY),
            32768,
            {"qkv_bias": True, "qk_norm": False},
            window=_find_qwen_window,
            can_write=lambda shape: shape.qkv_bias,
            extra_config=_make_qwen_window_config,
        ),
        HfFamily(
            "qwen3",
            "Qwen3ForCausalLM",
            (
                *COMMON_KEYS,
                _make_kv_heads_key(32),
                BIAS_KEY,
                ConfigKey("head_dim", "head_dim", lambda config, fields: 128),
            ),
            32768,
            {"qk_norm": True},
            window=_find_qwen_window,
            out_bias=True,
            can_write=lambda shape: shape.qk_norm,
            extra_config=lambda shape: (
                {"attention_bias": shape.qkv_bias} | _make_qwen_window_config(shape)
            ),
        ),
    )
}


def choose_written_family(shape: Any) -> HfFamily:
    """Return the row of the model type as which a shape is written: the last one that can express
    it.
    """
    return [row for row in HF_FAMILIES.values() if row.can_write(shape)][-1]


ORIGINAL_POSITIONS_KEY = "original_max_position_embeddings"
# Kinds of scaled rotary positions: our name of each number and its key in config.json, for reading
# and writing.
SCALING_KEYS = {
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low": "low_freq_factor",
        "high": "high_freq_factor",
        "original_positions": ORIGINAL_POSITIONS_KEY,
    },
}


def parse_rope_scaling(kind: str, rope_object: Config, config: Config) -> dict[str, Any]:
    """Return scaled rotary positions in a case's form, a dict of `kind` and its numbers, from their
    object in config.json and the whole config.

    `kind` is one of `SCALING_KEYS`. Numbers that are not told are None; original positions default
    to the model's, as in transformers. Nothing is checked.
    """
    # The newer place of the original positions comes first; if both are absent, transformers takes
    # the model's positions.
    original_positions = rope_object.get(ORIGINAL_POSITIONS_KEY, config.get(ORIGINAL_POSITIONS_KEY))
    values = {
        **rope_object,
        ORIGINAL_POSITIONS_KEY: config.get("max_position_embeddings")
        if original_positions is None
        else original_positions,
    }
    return {
        "kind": kind,
        **{ours: values.get(theirs) for ours, theirs in SCALING_KEYS[kind].items()},
    }


def _format_rope_scaling(scaling: LinearRope | Llama3Rope) -> dict[str, Any]:
    """Return scaled rotary positions as config.json spells them."""
    names = SCALING_KEYS[scaling.kind]
    return {
        "rope_type": scaling.kind,
        **{theirs: getattr(scaling, ours) for ours, theirs in names.items()},
    }


def make_hf_config(shape: Any) -> dict[str, Any]:
    """Return the content of config.json for a shape, in the model type that `choose_written_family`
    takes, without its dtype.
    """
    row, scaling = choose_written_family(shape), shape.rope_scaling
    rope_config = None if scaling is None else _format_rope_scaling(scaling)
    return {
        "architectures": [row.architecture],
        "model_type": row.model_type,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.ffn,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.positions,
        "rope_theta": shape.rope_base,
        "rope_scaling": rope_config,
        "rms_norm_eps": shape.norm_eps,
        "tie_word_embeddings": shape.tied,
        "hidden_act": "silu",
        **row.extra_config(shape),
    }


PLAIN_ROPE = "default"
REFUSED_ROPE = {"dynamic": "depends on the length of the batch"}  # kinds that are refused, and why
