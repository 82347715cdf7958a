"""What Megatron calls our parameters, as tables: of the names for one parameter the first is the one written."""

import re

ROOT = "language_model."
STACKS = ("encoder.", "transformer.", "decoder.")
TOP = {
    "embedding.word_embeddings.weight": "embed.weight",
    "output_layer.weight": "output.weight",
}
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
    # Parameters we do not have: zero, or another model.
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
    """Our name of a Megatron's parameter."""
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
    """The name that a shard is written with, less its root."""
    if parameter in _WRITTEN:
        return _WRITTEN[parameter]
    _, index, leaf = parameter.split(".", 2)
    return f"{STACKS[0]}layers.{index}.{_WRITTEN[leaf]}"
