"""Model types of Hugging Face that models/llama.py computes, one row each: which keys of
config.json tell which field of a model, what the type itself tells, and what transformers takes
where a key is absent. Without torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from steelyard.models.shapes import LinearRope, Llama3Rope, real_window

Config = Mapping[str, Any]
Fields = Mapping[str, Any]  # of a model, those told so far

# the newer and the older place of what rotary positions are told
ROPE_TABLES = ("rope_parameters", "rope_scaling")
ROPE_TYPES = ("rope_type", "type")  # the newer and the older spelling
SLIDING = "sliding_attention"


@dataclass(frozen=True)
class ConfigKey:
    """A key of config.json, the field it tells, and what transformers takes without it."""

    key: str
    field: str
    absent: Callable[[Config, Fields], Any] = lambda config, fields: None


def _head_dim(config: Config, fields: Fields) -> int | None:
    hidden, heads = fields["hidden"], fields["heads"]
    return hidden // heads if type(hidden) is int and type(heads) is int and heads else None


def _groups(usual: int | None) -> ConfigKey:
    """Absent, it is the class's; null, or where the class has none, that of the heads."""
    key = "num_key_value_heads"
    return ConfigKey(
        key,
        "kv_heads",
        lambda config, fields: fields["heads"] if usual is None or key in config else usual,
    )


# Rows whose default is made of others come after them.
SIZES = (
    ConfigKey("hidden_size", "hidden"),
    ConfigKey("num_hidden_layers", "layers"),
    ConfigKey("num_attention_heads", "heads"),
    ConfigKey("intermediate_size", "ffn"),
    ConfigKey("vocab_size", "vocab"),
    ConfigKey("rope_theta", "rope_base", lambda config, fields: 10000.0),
    ConfigKey("rms_norm_eps", "norm_eps", lambda config, fields: 1e-6),
    ConfigKey("tie_word_embeddings", "tied", lambda config, fields: False),
)
BIAS = ConfigKey("attention_bias", "qkv_bias", lambda config, fields: False)
HEAD_DIM = ConfigKey("head_dim", "head_dim", _head_dim)


def _never(config: Config, fields: Fields) -> None:
    return None


def _every_layer(config: Config, fields: Fields) -> int | None:
    """Mistral's: 4096 unless told, and null is none."""
    window: int | None = config.get("sliding_window", 4096)
    return window


def sliding_layers(config: Config, layers: Any) -> int:
    """How many layers of a Qwen have a window."""
    if (
        not config.get("use_sliding_window")
        or config.get("sliding_window", 4096) is None
        or type(layers) is not int
    ):
        return 0
    types = config.get("layer_types")
    if isinstance(types, list):
        return types[:layers].count(SLIDING)
    first = config.get("max_window_layers", 28)
    return max(0, layers - first) if type(first) is int else layers


def _some_layers(config: Config, fields: Fields) -> int | None:
    window: int | None = config.get("sliding_window", 4096)
    return window if sliding_layers(config, fields["layers"]) else None


def mixes(config: Config, fields: Fields) -> bool:
    """Whether some layers have a window and others none, and the longest row would show it."""
    layers, window, positions = fields["layers"], fields.get("window"), fields.get("positions")
    if (
        type(window) is not int
        or type(positions) is not int
        or real_window(window, positions) is None
    ):
        return False
    return "use_sliding_window" in config and sliding_layers(config, layers) < layers


@dataclass(frozen=True)
class HfFamily:
    """A model type. `told` are fields that follow from the type alone. A model is written as the
    last row that `writes` it.
    """

    model_type: str
    architecture: str  # the class in transformers
    keys: tuple[ConfigKey, ...]
    positions: int  # where the key is absent
    told: Fields = field(default_factory=dict)
    window: Callable[[Config, Fields], int | None] = _never
    # with biases of queries, keys and values comes one of the output projection, which ours has not
    out_bias: bool = False
    writes: Callable[[Any], bool] = lambda shape: False
    # what config.json says beyond what all types say
    beyond: Callable[[Any], dict[str, Any]] = lambda shape: {}


def _qwen_window(shape: Any) -> dict[str, Any]:
    slides = shape.window is not None
    return {
        "use_sliding_window": slides,
        "sliding_window": shape.window,
        "max_window_layers": 0 if slides else shape.layers,
        "layer_types": [SLIDING if slides else "full_attention"] * shape.layers,
    }


_LLAMA = (*SIZES, _groups(None), BIAS, HEAD_DIM)
# Defaults: the configuration classes of transformers 5.
ROWS = {
    row.model_type: row
    for row in (
        HfFamily(
            "llama",
            "LlamaForCausalLM",
            _LLAMA,
            2048,
            {"qk_norm": False},
            out_bias=True,
            writes=lambda shape: True,
            beyond=lambda shape: {"attention_bias": shape.qkv_bias, "mlp_bias": False},
        ),
        HfFamily("aquila", "LlamaForCausalLM", _LLAMA, 2048, {"qk_norm": False}, out_bias=True),
        HfFamily(
            "mistral",
            "MistralForCausalLM",
            (*SIZES, _groups(8), HEAD_DIM),
            131072,
            {"qkv_bias": False, "qk_norm": False},
            window=_every_layer,
            writes=lambda shape: shape.window is not None,
            beyond=lambda shape: {"sliding_window": shape.window},
        ),
        HfFamily(
            "qwen2",
            "Qwen2ForCausalLM",
            (*SIZES, _groups(32), HEAD_DIM),
            32768,
            {"qkv_bias": True, "qk_norm": False},
            window=_some_layers,
            writes=lambda shape: shape.qkv_bias,
            beyond=_qwen_window,
        ),
        HfFamily(
            "qwen3",
            "Qwen3ForCausalLM",
            (
                *SIZES,
                _groups(32),
                BIAS,
                ConfigKey("head_dim", "head_dim", lambda config, fields: 128),
            ),
            32768,
            {"qk_norm": True},
            window=_some_layers,
            out_bias=True,
            writes=lambda shape: shape.qk_norm,
            beyond=lambda shape: {"attention_bias": shape.qkv_bias} | _qwen_window(shape),
        ),
    )
}


def written_as(shape: Any) -> HfFamily:
    """The type in whose words a model is written."""
    return [row for row in ROWS.values() if row.writes(shape)][-1]


ORIGINAL = "original_max_position_embeddings"
# Kinds of scaled rotary positions: our name of each number, and that in config.json, for reading
# and writing.
SCALED = {
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low": "low_freq_factor",
        "high": "high_freq_factor",
        "original_positions": ORIGINAL,
    },
}


def read_scaling(kind: str, table: Config, config: Config) -> dict[str, Any]:
    """Return scaled rotary positions as a case tells them, from their table and all of
    config.json."""
    # The newer place of the original positions first; where neither tells, transformers takes those
    # of the model.
    told = table.get(ORIGINAL, config.get(ORIGINAL))
    known = {**table, ORIGINAL: config.get("max_position_embeddings") if told is None else told}
    return {"kind": kind, **{ours: known.get(theirs) for ours, theirs in SCALED[kind].items()}}


def _written_scaling(scaling: LinearRope | Llama3Rope) -> dict[str, Any]:
    names = SCALED[scaling.kind]
    return {
        "rope_type": scaling.kind,
        **{theirs: getattr(scaling, ours) for ours, theirs in names.items()},
    }


def written(shape: Any) -> dict[str, Any]:
    """What config.json says of a shape."""
    row, scaling = written_as(shape), shape.rope_scaling
    told = None if scaling is None else _written_scaling(scaling)
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
        "rope_scaling": told,
        "rms_norm_eps": shape.norm_eps,
        "tie_word_embeddings": shape.tied,
        "hidden_act": "silu",
        **row.beyond(shape),
    }


PLAIN_ROPE = "default"
NOT_SCALED = {"dynamic": "depends on the length of the batch"}  # of kinds that are refused, why
