"""Map Megatron's names and training arguments to our model's: parameter names, and what the `args`
in a checkpoint say about the model.

Where several names of Megatron mean one parameter, the first in the mapping is the one that is
written. weights/megatron_checkpoint.py reads with it, weights/checkpoint_writer.py writes.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steelyard.errors import RequestError
from steelyard.models.llama import LlamaShape
from steelyard.models.llama_placements import Shard
from steelyard.weights import setting_checks
from steelyard.weights.torch_files import Stub

NAME_ROOT = "language_model."
STACK_PREFIXES = ("encoder.", "transformer.", "decoder.")
TOP_NAMES = {
    "embedding.word_embeddings.weight": "embed.weight",
    "output_layer.weight": "output.weight",
}
STACK_NAMES = {"final_layernorm.weight": "norm.weight", "final_norm.weight": "norm.weight"}
LAYER_NAMES = {
    "input_layernorm.weight": "attention_norm.weight",
    "input_norm.weight": "attention_norm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "attention_norm.weight",
    "self_attention.query_key_value.weight": "qkv.weight",
    "self_attention.linear_qkv.weight": "qkv.weight",
    "self_attention.query_key_value.bias": "qkv.bias",
    "self_attention.linear_qkv.bias": "qkv.bias",
    "self_attention.dense.weight": "out.weight",
    "self_attention.linear_proj.weight": "out.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "post_attention_norm.weight": "ffn_norm.weight",
    "pre_mlp_layernorm.weight": "ffn_norm.weight",
    "mlp.linear_fc1.layer_norm_weight": "ffn_norm.weight",
    "mlp.dense_h_to_4h.weight": "gate_up.weight",
    "mlp.linear_fc1.weight": "gate_up.weight",
    "mlp.dense_4h_to_h.weight": "down.weight",
    "mlp.linear_fc2.weight": "down.weight",
    # Biases that our model lacks: they must be zero.
    "self_attention.dense.bias": "out.bias",
    "self_attention.linear_proj.bias": "out.bias",
    "mlp.dense_h_to_4h.bias": "gate_up.bias",
    "mlp.linear_fc1.bias": "gate_up.bias",
    "mlp.dense_4h_to_h.bias": "down.bias",
    "mlp.linear_fc2.bias": "down.bias",
}

_IN_LAYER = re.compile(r"layers\.(0|[1-9][0-9]{0,5})\.(.+)", re.ASCII)
_WRITTEN_NAMES = {
    ours: name for names in (LAYER_NAMES, TOP_NAMES) for name, ours in reversed(names.items())
}
_WRITTEN_NAMES |= {ours: STACK_PREFIXES[0] + name for name, ours in reversed(STACK_NAMES.items())}


def to_our_name(name: str) -> str | None:
    """Return our name of a Megatron parameter (older and newer names of Megatron are known, with or
    without `language_model.`), or None if a Llama has no such parameter. Biases that our model
    lacks have a name too, such as `layers.0.out.bias`.
    """
    below_root = name.removeprefix(NAME_ROOT)
    for stack in STACK_PREFIXES:
        if below_root.startswith(stack):
            inner = below_root.removeprefix(stack)
            match = _IN_LAYER.fullmatch(inner)
            if match and match[2] in LAYER_NAMES:
                return f"layers.{match[1]}.{LAYER_NAMES[match[2]]}"
            return STACK_NAMES.get(inner)
    return TOP_NAMES.get(below_root)


def to_megatron_name(parameter: str) -> str:
    """Return the name with which one of our parameters is written to a Megatron shard: Megatron's
    older name, without the leading `language_model.`. Raise KeyError or ValueError for a name that
    no Llama of ours has.
    """
    if parameter in _WRITTEN_NAMES:
        return _WRITTEN_NAMES[parameter]
    _, index, leaf = parameter.split(".", 2)
    return f"{STACK_PREFIXES[0]}layers.{index}.{_WRITTEN_NAMES[leaf]}"


MegatronArgs = dict[str, Any]

SHARD_RANK_KEY = "tensor_model_parallel_rank"  # index of the shard; we write it, Megatron does not


@dataclass(frozen=True)
class MegatronArgument:
    """A training argument of Megatron that tells a `field` of LlamaShape: its possible names
    (`keys`, of which the first that is set counts), and the value that versions without the
    argument used (`default`; None if unknown). `find_value(args)` returns name and value in a
    checkpoint.
    """

    keys: tuple[str, ...]
    field: str
    default: Any = None  # of versions without the argument; None: unknown

    def find_value(self, args: MegatronArgs) -> tuple[str, Any]:
        """Return the name and the value of this argument in a checkpoint's `args`. If it is not
        set: its first name with the default, or with None if `args` is empty.
        """
        set_values = [(key, args[key]) for key in self.keys if args.get(key) is not None]
        return set_values[0] if set_values else (self.keys[0], self.default if args else None)


ARGUMENTS = (
    MegatronArgument(("num_layers",), "layers"),
    MegatronArgument(("hidden_size",), "hidden"),
    MegatronArgument(("num_attention_heads",), "heads"),
    MegatronArgument(("kv_channels",), "head_dim"),
    MegatronArgument(("ffn_hidden_size",), "ffn"),
    MegatronArgument(("true_vocab_size", "vocab_size"), "vocab"),
    MegatronArgument(("norm_epsilon", "layernorm_epsilon"), "norm_eps"),
    MegatronArgument(("rotary_base",), "rope_base", 10000.0),
    MegatronArgument(("add_qkv_bias",), "qkv_bias"),
)
# not compared: no weight depends on it
POSITIONS_ARGUMENT = MegatronArgument(("max_position_embeddings", "seq_length"), "positions")

# Values that models/llama.py computes. None, and an absent argument, are allowed for each.
SUPPORTED_ARGS: dict[str, tuple[Any, ...]] = {
    "swiglu": (True,),
    "quick_geglu": (False,),
    "openai_gelu": (False,),
    "squared_relu": (False,),
    "num_experts": (0, 1, [1]),
    "normalization": ("RMSNorm",),
    "apply_layernorm_1p": (False,),
    "layernorm_zero_centered_gamma": (False,),
    "apply_residual_connection_post_layernorm": (False,),
    "position_embedding_type": ("rope",),
    "rope_type": ("rope",),
    "rotary_interleaved": (False,),
    "rotary_percent": (1.0,),
    "rotary_seq_len_interpolation_factor": (1,),
    "use_rope_scaling": (False,),  # without it the scaling's other arguments mean nothing
    "no_rope_freq": (),
    "qk_layernorm": (False,),
    "qk_l2_norm": (False,),
    "multi_latent_attention": (False,),
    "softmax_type": ("vanilla",),
    "window_size": ((-1, -1),),
    "pipeline_model_parallel_size": (1,),
}
_PLAIN_TYPES = str | int | float | None


def to_plain_args(args: Any) -> MegatronArgs:
    """Return the arguments of a Megatron checkpoint by name, from the `Stub` of a Namespace or a
    dict. Only numbers, strings, None, and lists or tuples of these are taken over; an empty dict if
    `args` is neither.
    """
    state = args.state if isinstance(args, Stub) else args
    if not isinstance(state, dict):
        return {}
    value_lists = {
        key: value if isinstance(value, list | tuple) else (value,) for key, value in state.items()
    }
    return {
        key: state[key]
        for key, values in value_lists.items()
        if all(isinstance(value, _PLAIN_TYPES) for value in values)
    }


def _find_kv_heads(args: MegatronArgs) -> tuple[str, Any]:
    """Return a pair: what tells the number of KV heads, as text for messages, and its value:
    `num_query_groups` if attention is grouped, else the number of attention heads; None if that is
    not set.
    """
    if args.get("group_query_attention") is True:
        return "num_query_groups", args.get("num_query_groups")
    return "num_attention_heads without group_query_attention", args.get("num_attention_heads")


def _find_tied(args: MegatronArgs) -> tuple[str, Any]:
    """Return a pair: what tells whether the output is tied to the embedding, as text for messages,
    and its value, the negation of the argument; None if that is not set.
    """
    untied = args.get("untie_embeddings_and_output_weights")
    return "not untie_embeddings_and_output_weights", None if untied is None else not untied


def check_args(path: Path, args: MegatronArgs, shape: LlamaShape, tp: int) -> None:
    """Raise RequestError if a checkpoint's arguments differ from a model's shape, have values that
    our Llama does not compute (`SUPPORTED_ARGS`), or tell of another number of tensor-parallel
    shards than `tp`. `path` is for the message.

    Arguments that are absent or None pass, but those with a default of older versions are compared
    by it. Positions are not compared.
    """
    argument_values = [(argument.field, argument.find_value(args)) for argument in ARGUMENTS]
    for field, (key, value) in (
        *argument_values,
        ("kv_heads", _find_kv_heads(args)),
        ("tied", _find_tied(args)),
    ):
        if value is not None:
            setting_checks.check_setting_equals(path, key, value, field, getattr(shape, field))
    # The older argument for rope wins over the newer one, which had another default.
    overridden = (
        {"position_embedding_type"} if args.get("use_rotary_position_embeddings") is True else set()
    )
    for key, allowed in (SUPPORTED_ARGS | {"tensor_model_parallel_size": (tp,)}).items():
        if key not in overridden:
            setting_checks.check_setting_allowed(path, key, args.get(key), allowed)


def check_shape_supported(shape: LlamaShape) -> None:
    """Raise RequestError if a shape has QK norms, a sliding window or scaled rotary positions:
    checkpoints of Megatron with these are neither read nor written here.
    """
    for field in ("qk_norm", "window", "rope_scaling"):
        if getattr(shape, field):
            raise RequestError(
                f"a model with {field} has no Megatron checkpoint here; give or write a Hugging"
                " Face folder (--to hf)"
            )


def derive_shape_fields(
    args: MegatronArgs, shapes: dict[str, tuple[int, ...]], tp: int
) -> dict[str, Any]:
    """Return values by field of LlamaShape from Megatron's arguments, and where these say nothing
    from `shapes`, those of the tensors in one of `tp` shards by our names; None for what neither
    tells. Types are not checked.

    From tensors come layers, hidden, ffn, and whether there are QKV biases and a tied output;
    `head_dim` defaults to hidden / heads; `qk_norm` is always False; `window` and `rope_scaling`
    are not in it.
    """
    shape_fields = {
        argument.field: argument.find_value(args)[1]
        for argument in (*ARGUMENTS, POSITIONS_ARGUMENT)
    }
    shape_fields |= {
        "kv_heads": _find_kv_heads(args)[1],
        "tied": _find_tied(args)[1],
        "qk_norm": False,
    }
    norm, gate_up = shapes.get("norm.weight", (None,)), shapes.get("layers.0.gate_up.weight", (0,))
    from_tensors = {
        "layers": len([name for name in shapes if name.endswith(".qkv.weight")]) or None,
        "hidden": norm[0] if norm else None,
        "ffn": gate_up[0] * tp // 2 or None if gate_up else None,
        "qkv_bias": "layers.0.qkv.bias" in shapes,
        "tied": "output.weight" not in shapes,
    }
    shape_fields |= {
        field: value for field, value in from_tensors.items() if shape_fields[field] is None
    }
    are_known = all(
        isinstance(shape_fields[field], int) and shape_fields[field]
        for field in ("hidden", "heads")
    )
    if shape_fields["head_dim"] is None and are_known:
        shape_fields["head_dim"] = shape_fields["hidden"] // shape_fields["heads"]
    return shape_fields


def make_args(shape: LlamaShape, shard: Shard, rows: int, dtype: str) -> MegatronArgs:
    """Return the training arguments that are written with a shard, by Megatron's names: the model's
    dimensions, fixed settings of a Llama, and number and index of the tensor-parallel shard. `rows`
    is the number of vocabulary rows per shard, padding included; `dtype` (such as `BF16`) sets
    `bf16` or `fp16`.
    """
    tp = shard.count
    return {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "group_query_attention": shape.kv_heads != shape.heads,
        "num_query_groups": shape.kv_heads,
        "kv_channels": shape.head_dim,
        "ffn_hidden_size": shape.ffn,
        "padded_vocab_size": rows * tp,
        "vocab_size": shape.vocab,
        "true_vocab_size": shape.vocab,
        "max_position_embeddings": shape.positions,
        "seq_length": shape.positions,
        "layernorm_epsilon": shape.norm_eps,
        "norm_epsilon": shape.norm_eps,
        "rotary_base": shape.rope_base,
        "rotary_percent": 1.0,
        "rotary_interleaved": False,
        "rotary_interleaved_patch": False,
        "position_embedding_type": "rope",
        "use_rotary_position_embeddings": True,
        "add_position_embedding": False,
        "untie_embeddings_and_output_weights": not shape.tied,
        "add_qkv_bias": shape.qkv_bias,
        "add_bias_linear": False,
        "swiglu": True,
        "normalization": "RMSNorm",
        "apply_layernorm_1p": False,
        "tensor_model_parallel_size": tp,
        SHARD_RANK_KEY: shard.index,
        "pipeline_model_parallel_size": 1,
        "bf16": dtype == "BF16",
        "fp16": dtype == "F16",
    }
