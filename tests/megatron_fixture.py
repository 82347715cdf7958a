"""Megatron checkpoints as Megatron writes them, with torch.save and not with our converter, and the shares of a model that
they must fill, made head by head."""

import argparse
import enum
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from steelyard.models.llama import LlamaShape
from test_weights import sizes_of, tensors_of

CPU = torch.device("cpu")
SHAPE = LlamaShape(layers=2, hidden=64, heads=16, kv_heads=8, head_dim=4, ffn=96, vocab=251, positions=32)
SHAPES = {"plain": SHAPE, "bias": replace(SHAPE, qkv_bias=True), "tied": replace(SHAPE, tied=True)}
DEGREES = (1, 2, 4, 8)
FILE = "model_optim_rng.pt"
Tensors = dict[str, Tensor]

# Our name of a leaf and what Megatron calls it, three times over.
LEGACY = {
    "attention_norm.weight": "input_layernorm.weight",
    "qkv.weight": "self_attention.query_key_value.weight",
    "qkv.bias": "self_attention.query_key_value.bias",
    "out.weight": "self_attention.dense.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "gate_up.weight": "mlp.dense_h_to_4h.weight",
    "down.weight": "mlp.dense_4h_to_h.weight",
}
NORMS = LEGACY | {"attention_norm.weight": "input_norm.weight", "ffn_norm.weight": "post_attention_norm.weight"}
CORE = {
    "attention_norm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "qkv.weight": "self_attention.linear_qkv.weight",
    "qkv.bias": "self_attention.linear_qkv.bias",
    "out.weight": "self_attention.linear_proj.weight",
    "ffn_norm.weight": "mlp.linear_fc1.layer_norm_weight",
    "gate_up.weight": "mlp.linear_fc1.weight",
    "down.weight": "mlp.linear_fc2.weight",
}
PLAIN_CORE = CORE | {"attention_norm.weight": "input_layernorm.weight", "ffn_norm.weight": "pre_mlp_layernorm.weight"}


class ModelType(enum.Enum):
    encoder_or_decoder = 1


def shard_of(tensors: Tensors, shape: LlamaShape, index: int, count: int, rows: int) -> Tensors:
    """The parameters of one share, from Hugging Face's tensors, with a vocabulary of so many rows."""

    def vocabulary(name: str) -> Tensor:
        part = tensors[name][index * rows : (index + 1) * rows]
        return torch.cat((part, part.new_zeros(rows - len(part), shape.hidden)))

    def piece(tensor: Tensor, dim: int) -> Tensor:
        return tensor.chunk(count, dim)[index]

    out = {"embed.weight": vocabulary("model.embed_tokens.weight"), "norm.weight": tensors["model.norm.weight"]}
    if not shape.tied:
        out["output.weight"] = vocabulary("lm_head.weight")
    each, groups = shape.heads // shape.kv_heads, shape.kv_heads // count
    for i in range(shape.layers):
        theirs, mine = f"model.layers.{i}.", f"layers.{i}."
        for kind in ("weight", "bias") if shape.qkv_bias else ("weight",):
            q, k, v = (torch.split(tensors[f"{theirs}self_attn.{x}_proj.{kind}"], shape.head_dim) for x in "qkv")
            heads: list[Tensor] = []
            for g in range(index * groups, (index + 1) * groups):
                heads += [*q[g * each : (g + 1) * each], k[g], v[g]]
            out[f"{mine}qkv.{kind}"] = torch.cat(heads)
        gate, up = (piece(tensors[f"{theirs}mlp.{x}_proj.weight"], 0) for x in ("gate", "up"))
        out[f"{mine}gate_up.weight"] = torch.cat((gate, up))
        out[f"{mine}out.weight"] = piece(tensors[f"{theirs}self_attn.o_proj.weight"], 1).contiguous()
        out[f"{mine}down.weight"] = piece(tensors[f"{theirs}mlp.down_proj.weight"], 1).contiguous()
        out[f"{mine}attention_norm.weight"] = tensors[f"{theirs}input_layernorm.weight"]
        out[f"{mine}ffn_norm.weight"] = tensors[f"{theirs}post_attention_layernorm.weight"]
    return out


def in_blocks(shard: Tensors, shape: LlamaShape) -> Tensors:
    """The same share as our model keeps it: gate and up in alternating blocks of rows."""
    out = dict(shard)
    for name, fused in shard.items():
        if name.endswith("gate_up.weight"):
            gate, up = (half.split(shape.ffn_block) for half in fused.chunk(2))
            out[name] = torch.cat([block for pair in zip(gate, up, strict=True) for block in pair])
    return out


def padded(vocab: int, count: int, multiple: int = 64) -> int:
    return math.ceil(vocab / (multiple * count)) * multiple


def args_of(shape: LlamaShape, tp: int, rows: int) -> dict[str, Any]:
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
        "max_position_embeddings": shape.positions,
        "seq_length": shape.positions,
        "layernorm_epsilon": shape.norm_eps,
        "untie_embeddings_and_output_weights": not shape.tied,
        "add_qkv_bias": shape.qkv_bias,
        "swiglu": True,
        "normalization": "RMSNorm",
        "tensor_model_parallel_size": tp,
        "rotary_interleaved": False,
        "rotary_interleaved_patch": False,
        "params_dtype": torch.bfloat16,
        "model_type": ModelType.encoder_or_decoder,
        "data_path": ["a", "b"],
        "rank": 3,
    }


def legacy(local: Tensors, names: dict[str, str] = LEGACY, stack: str = "encoder", final: str = "final_layernorm") -> Any:
    """The tables of a file of the older kind."""
    inner = {f"{final}.weight": local["norm.weight"], "_extra_state": None}
    for name, tensor in local.items():
        if name.startswith("layers."):
            _, index, leaf = name.split(".", 2)
            inner[f"layers.{index}.{names[leaf]}"] = tensor
    model: dict[str, Any] = {"embedding": {"word_embeddings": {"weight": local["embed.weight"]}}, stack: inner}
    if "output.weight" in local:
        model["output_layer"] = {"weight": local["output.weight"]}
    return {"language_model": model | {"rotary_pos_emb.inv_freq": torch.rand(4)}}


def core(local: Tensors, names: dict[str, str] = CORE) -> Any:
    """The one flat table of a file of Megatron-core."""
    out: dict[str, Any] = {"embedding.word_embeddings.weight": local["embed.weight"]}
    out["decoder.final_layernorm.weight"] = local["norm.weight"]
    if "output.weight" in local:
        out["output_layer.weight"] = local["output.weight"]
    for name, tensor in local.items():
        if name.startswith("layers."):
            _, index, leaf = name.split(".", 2)
            out[f"decoder.layers.{index}.{names[leaf]}"] = tensor
            out[f"decoder.layers.{index}.self_attention._extra_state"] = torch.rand(3)
    return out


def file_of(model: Any, args: dict[str, Any] | None, iteration: int = 135000) -> dict[str, Any]:
    """Everything that Megatron keeps beside the model."""
    state = {"optimizer": {"param_groups": [{"lr": 1e-4}], "state": {0: {"exp_avg": torch.rand(7)}}}}
    rng = {"random_rng_state": random.getstate(), "np_rng_state": np.random.get_state(), "torch_rng_state": torch.rand(3)}
    return {
        "args": None if args is None else argparse.Namespace(**args),
        "checkpoint_version": 3.0,
        "iteration": iteration,
        "model": model,
        "optimizer": state,
        "opt_param_scheduler": {"max_lr": 1e-4},
        "rng_state": [rng],
    }


Change = Callable[[int, dict[str, Any]], None]


def write_megatron(
    folder: Path,
    shape: LlamaShape = SHAPE,
    tp: int = 2,
    *,
    spell: Callable[[Tensors], Any] = legacy,
    multiple: int = 64,
    tensors: Tensors | None = None,
    args: dict[str, Any] | None = None,
    where: str = "iter_0135000",
    change: Change = lambda index, file: None,
) -> Path:
    """A checkpoint; `args` are changed ones, None to leave one out; `change` is called with every shard's table."""
    tensors = tensors_of(shape) if tensors is None else tensors
    rows = padded(shape.vocab, tp, multiple)
    told = {key: value for key, value in (args_of(shape, tp, rows) | (args or {})).items() if value is not None}
    for i in range(tp):
        local = {name: tensor.clone() for name, tensor in shard_of(tensors, shape, i, tp, rows).items()}
        file = file_of(spell(local), told)
        change(i, file)
        path = folder / where / f"mp_rank_{i:02}" / FILE
        path.parent.mkdir(parents=True)
        torch.save(file, path)
    (folder / "latest_checkpointed_iteration.txt").write_text(where.removeprefix("iter_").lstrip("0"))
    return folder


def flat(table: dict[str, Any], prefix: str = "") -> list[tuple[str, Tensor]]:
    out: list[tuple[str, Tensor]] = []
    for key, value in table.items():
        if isinstance(value, dict):
            out += flat(value, f"{prefix}{key}.")
        elif value is not None and not key.endswith("inv_freq"):
            out.append((prefix + key, value))
    return out


LARGE = LlamaShape(layers=8, hidden=2048, heads=16, kv_heads=16, head_dim=128, ffn=8192, vocab=100008, positions=64)


def write_large(folder: Path, tp: int) -> int:
    """A checkpoint of 2 GB in bf16, its values the same over and over; returns its largest tensor."""
    tensors = {name: torch.ones(1, dtype=torch.bfloat16).expand(size) for name, size in sizes_of(LARGE).items()}
    write_megatron(folder, LARGE, tp, tensors=tensors, args={"model_type": None})  # which other processes cannot import
    return padded(LARGE.vocab, tp) * LARGE.hidden * 2
