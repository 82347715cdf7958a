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
from steelyard.models.placements import Shard
from steelyard.weights import checkpoint
from steelyard.weights.torch_files import Stub

ROOT = "language_model."
STACKS = ("encoder.", "transformer.", "decoder.")
TOP = {"embedding.word_embeddings.weight": "embed.weight", "output_layer.weight": "output.weight"}
STACK = {"final_layernorm.weight": "norm.weight", "final_norm.weight": "norm.weight"}
LAYER = {
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
_WRITTEN = {ours: name for names in (LAYER, TOP) for name, ours in reversed(names.items())}
_WRITTEN |= {ours: STACKS[0] + name for name, ours in reversed(STACK.items())}


def ours(name: str) -> str | None:
    """Return our name of a Megatron parameter, or None if our model has no such parameter."""
    rest = name.removeprefix(ROOT)
    for stack in STACKS:
        if rest.startswith(stack):
            inner = rest.removeprefix(stack)
            found = _IN_LAYER.fullmatch(inner)
            if found and found[2] in LAYER:
                return f"layers.{found[1]}.{LAYER[found[2]]}"
            return STACK.get(inner)
    return TOP.get(rest)


def theirs(parameter: str) -> str:
    """Return the name with which a parameter is written to a Megatron shard, without the leading
    `language_model.`.
    """
    if parameter in _WRITTEN:
        return _WRITTEN[parameter]
    _, index, leaf = parameter.split(".", 2)
    return f"{STACKS[0]}layers.{index}.{_WRITTEN[leaf]}"


Args = dict[str, Any]

RANK = "tensor_model_parallel_rank"  # index of the shard; we write it, Megatron does not


@dataclass(frozen=True)
class Argument:
    """A training argument of Megatron: its names, of which the first that is set counts, the field
    of the shape that it must equal, and the value that older versions without it used (`default`;
    None if unknown).
    """

    keys: tuple[str, ...]
    field: str
    absent: Any = None  # of versions without the argument; None: unknown

    def found(self, args: Args) -> tuple[str, Any]:
        """Return the name and value of the argument; the first name with the default if it is not
        set, and None as value if there are no arguments at all.
        """
        told = [(key, args[key]) for key in self.keys if args.get(key) is not None]
        return told[0] if told else (self.keys[0], self.absent if args else None)


ARGUMENTS = (
    Argument(("num_layers",), "layers"),
    Argument(("hidden_size",), "hidden"),
    Argument(("num_attention_heads",), "heads"),
    Argument(("kv_channels",), "head_dim"),
    Argument(("ffn_hidden_size",), "ffn"),
    Argument(("true_vocab_size", "vocab_size"), "vocab"),
    Argument(("norm_epsilon", "layernorm_epsilon"), "norm_eps"),
    Argument(("rotary_base",), "rope_base", 10000.0),
    Argument(("add_qkv_bias",), "qkv_bias"),
)
# not compared: no weight depends on it
POSITIONS = Argument(("max_position_embeddings", "seq_length"), "positions")

# Values that models/llama.py computes. None, and an absent argument, are allowed for each.
COMPUTED: dict[str, tuple[Any, ...]] = {
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
_PLAIN = str | int | float | None


def plain(args: Any) -> Args:
    """Return the arguments of an unpickled Namespace as a dict of numbers, strings, None and lists
    or tuples of these. Everything else in it is dropped; an empty dict if it is no Namespace.
    """
    state = args.state if isinstance(args, Stub) else args
    if not isinstance(state, dict):
        return {}
    rows = {
        key: value if isinstance(value, list | tuple) else (value,) for key, value in state.items()
    }
    return {
        key: state[key]
        for key, row in rows.items()
        if all(isinstance(value, _PLAIN) for value in row)
    }


def _groups(args: Args) -> tuple[str, Any]:
    """Return the argument that tells the number of KV heads, and its value: the number of heads
    unless attention is grouped.
    """
    if args.get("group_query_attention") is True:
        return "num_query_groups", args.get("num_query_groups")
    return "num_attention_heads without group_query_attention", args.get("num_attention_heads")


def _tied(args: Args) -> tuple[str, Any]:
    """Return the argument that tells whether the output is tied to the embedding, and its value;
    None if it is not set.
    """
    untied = args.get("untie_embeddings_and_output_weights")
    return "not untie_embeddings_and_output_weights", None if untied is None else not untied


def check(path: Path, args: Args, shape: LlamaShape, tp: int) -> None:
    """Raise RequestError if arguments differ from a model's shape or from what our own Llama
    computes, or are of another number of shards than `tp`. Arguments that are absent pass.
    """
    found = [(argument.field, argument.found(args)) for argument in ARGUMENTS]
    for field, (key, value) in (*found, ("kv_heads", _groups(args)), ("tied", _tied(args))):
        if value is not None:
            checkpoint.agree(path, key, value, field, getattr(shape, field))
    # The older argument for rope wins over the newer one, which had another default.
    older = (
        {"position_embedding_type"} if args.get("use_rotary_position_embeddings") is True else set()
    )
    for key, allowed in (COMPUTED | {"tensor_model_parallel_size": (tp,)}).items():
        if key not in older:
            checkpoint.allow(path, key, args.get(key), allowed)


def check_plain(shape: LlamaShape) -> None:
    """Raise RequestError if a shape has QK norms, a sliding window or scaled rotary positions,
    which are neither read nor written in this format.
    """
    for field in ("qk_norm", "window", "rope_scaling"):
        if getattr(shape, field):
            raise RequestError(
                f"a model with {field} has no Megatron checkpoint here; give or write a Hugging"
                " Face folder (--to hf)"
            )


def config(args: Args, shapes: dict[str, tuple[int, ...]], tp: int) -> dict[str, Any]:
    """Return the fields of a shape from the arguments, and where these say nothing from the shapes
    of the tensors in one of `tp` shards, by our names; None for what neither tells.
    """
    out = {argument.field: argument.found(args)[1] for argument in (*ARGUMENTS, POSITIONS)}
    out |= {"kv_heads": _groups(args)[1], "tied": _tied(args)[1], "qk_norm": False}
    norm, gate_up = shapes.get("norm.weight", (None,)), shapes.get("layers.0.gate_up.weight", (0,))
    from_tensors = {
        "layers": len([name for name in shapes if name.endswith(".qkv.weight")]) or None,
        "hidden": norm[0] if norm else None,
        "ffn": gate_up[0] * tp // 2 or None if gate_up else None,
        "qkv_bias": "layers.0.qkv.bias" in shapes,
        "tied": "output.weight" not in shapes,
    }
    out |= {field: value for field, value in from_tensors.items() if out[field] is None}
    whole = all(isinstance(out[field], int) and out[field] for field in ("hidden", "heads"))
    if out["head_dim"] is None and whole:
        out["head_dim"] = out["hidden"] // out["heads"]
    return out


def written(shape: LlamaShape, shard: Shard, rows: int, dtype: str) -> Args:
    """Return the arguments that are written with a shard. `rows` is the number of vocabulary rows
    per shard, padding included.
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
        RANK: shard.index,
        "pipeline_model_parallel_size": 1,
        "bf16": dtype == "BF16",
        "fp16": dtype == "F16",
    }
