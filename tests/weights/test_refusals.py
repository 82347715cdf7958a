"""Test Hugging Face folders that are refused: each in one line that names the file and says what to
do.
"""

import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fixtures.huggingface import (
    Q0,
    SHAPE,
    TIED,
    assert_holds,
    assert_load_refused,
    load_llama,
    make_tensors,
    write_hf_folder,
    write_hf_index,
    write_hf_shards,
)

ALLOWED_TYPES = "allowed: 'llama', 'aquila', 'mistral', 'qwen2', 'qwen3'; "
CONFIG_ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "hidden": ({"hidden_size": 64}, "hidden_size is 64, the case's hidden is 32; "),
    "layers": ({"num_hidden_layers": 3}, "num_hidden_layers is 3, the case's layers is 2; "),
    "heads": ({"num_attention_heads": 8}, "num_attention_heads is 8, the case's heads is 4; "),
    "groups": ({"num_key_value_heads": 1}, "num_key_value_heads is 1, the case's kv_heads is 2; "),
    "no groups": (
        {"num_key_value_heads": None},
        "num_key_value_heads is 4, the case's kv_heads is 2; ",
    ),
    "ffn": ({"intermediate_size": 47}, "intermediate_size is 47, the case's ffn is 48; "),
    "vocab": ({"vocab_size": 64}, "vocab_size is 64, the case's vocab is 61; "),
    "no vocab": ({"vocab_size": None}, "vocab_size is None, the case's vocab is 61; "),
    "eps": ({"rms_norm_eps": 1e-6}, "rms_norm_eps is 1e-06, the case's norm_eps is 1e-05; "),
    "no eps": ({"rms_norm_eps": None}, "rms_norm_eps is 1e-06, the case's norm_eps is 1e-05; "),
    "tied": (
        {"tie_word_embeddings": True},
        "tie_word_embeddings is True, the case's tied is False; ",
    ),
    "bias": ({"attention_bias": None}, "attention_bias is False, the case's qkv_bias is True; "),
    "head": ({"head_dim": 16}, "head_dim is 16, the case's head_dim is 8; "),
    "theta": ({"rope_theta": 5e5}, "rope_theta is 500000.0, the case's rope_base is 10000.0; "),
    "theta, new": (
        {"rope_theta": None, "rope_parameters": {"rope_theta": 5e5}},
        "rope_theta is 500000.0, ",
    ),
    "theta, old": ({"rope_scaling": {"rope_theta": 5e5}}, "rope_theta is 500000.0, "),
    "scaled, new": (
        {"rope_parameters": {"rope_type": "llama3"}},
        "rope_scaling is {'kind': 'llama3', 'factor': None, ",
    ),
    "scaled, old": (
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        "rope_scaling is {'kind': 'linear', 'factor': 2.0}, the case's rope_scaling is None; ",
    ),
    "dynamic": (
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        (
            "rope_type is 'dynamic' (depends on the length of the batch), allowed: 'default',"
            " 'linear', 'llama3'; "
        ),
    ),
    "yarn": (
        {"rope_parameters": {"rope_type": "yarn"}},
        "rope_type is 'yarn', allowed: 'default', 'linear', 'llama3'; ",
    ),
    "rope": ({"rope_scaling": [1]}, "rope_scaling is [1], not a table; "),
    "partial": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, allowed: 1.0; "),
    "type": ({"model_type": "gemma", "hidden_size": 64}, f"model_type is 'gemma', {ALLOWED_TYPES}"),
    "no type": (
        {"model_type": None, "hidden_size": 64},
        f"model_type is 'absent', {ALLOWED_TYPES}",
    ),
    "mistral": (
        {"model_type": "mistral", "sliding_window": None},
        "qkv_bias of model_type 'mistral' is False, the case's qkv_bias is True; ",
    ),
    "window": (
        {
            "model_type": "qwen2",
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 0,
        },
        "window is 8, ",
    ),
    "half a window": (
        {
            "model_type": "qwen2",
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 1,
        },
        "some layers have a sliding window and others none; ",
    ),
    "act": ({"hidden_act": "gelu"}, "hidden_act is 'gelu', allowed: 'silu'; "),
    "mlp bias": ({"mlp_bias": True}, "mlp_bias is True, allowed: False; "),
    "long": ({"hidden_size": "x\n" * 9999}, "hidden_size is 'x\\nx\\n"),
}


@pytest.mark.parametrize("name", CONFIG_ERRORS)
def test_a_config_of_another_model_is_refused(name: str, tmp_path: Path) -> None:
    changes, fragment = CONFIG_ERRORS[name]
    assert_load_refused(write_hf_folder(tmp_path, **changes), f"{tmp_path}/config.json: ", fragment)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": None},
        {"rope_theta": 10000, "rope_scaling": {"rope_type": "default"}},
        {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        {"rms_norm_eps": 9.999999747378752e-06},
        {"head_dim": 8, "hidden_act": "silu", "mlp_bias": False, "model_type": "aquila"},
    ],
)
def test_other_spellings_of_the_same_config_are_accepted(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    load_llama(write_hf_folder(tmp_path, **changes))


JSON_ERRORS: dict[str, tuple[bytes, str]] = {
    "cut": (b'{"hidden_size": 3', "is not JSON ("),
    "bytes": (b"\xff\xfe\x00", "is not JSON ("),
    "deep": (b"[" * 200_000, "is not JSON ("),
    "digits": (b'{"hidden_size": ' + b"9" * 5000 + b"}", "is not JSON ("),
    "list": (b"[]", "is not a JSON object; "),
    "large": (b" " * ((64 << 20) + 1), "is larger than 67108864 bytes, the most allowed; "),
}


@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("name", JSON_ERRORS)
def test_invalid_json_files_are_refused(name: str, file: str, tmp_path: Path) -> None:
    write_hf_shards(tmp_path)
    raw, fragment = JSON_ERRORS[name]
    (tmp_path / file).write_bytes(raw)
    assert_load_refused(tmp_path, f"{tmp_path}/{file}: {fragment}")


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    assert_load_refused(
        tmp_path / "nowhere", f"weights folder '{tmp_path}/nowhere' does not exist; "
    )


def test_a_file_in_place_of_a_folder_is_refused(tmp_path: Path) -> None:
    assert_load_refused(
        write_hf_folder(tmp_path) / "config.json",
        f"weights '{tmp_path}/config.json' is a file; give the folder of the checkpoint",
    )


def test_a_folder_without_a_checkpoint_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "notes.txt").touch()
    monkeypatch.chdir(tmp_path)
    for folder in (tmp_path, Path()):
        assert_load_refused(
            folder,
            f"{tmp_path}: holds no checkpoint, neither ",
            "Hugging Face's (config.json and model.safetensors or model.safetensors.index.json)",
            "Megatron's (latest_checkpointed_iteration.txt or mp_rank_00); ",
        )


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    (write_hf_folder(tmp_path) / "config.json").unlink()
    assert_load_refused(
        tmp_path, f"{tmp_path}/config.json: cannot be read (No such file or directory); "
    )


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (write_hf_folder(tmp_path) / "model.safetensors").unlink()
    neither = "has neither model.safetensors nor model.safetensors.index.json; "
    assert_load_refused(tmp_path, neither + "give a Hugging Face folder")
    (tmp_path / "consolidated.00.pth").write_bytes(b"\x80")
    other_format = (
        "only model.safetensors and pytorch_model.bin are read, convert 'consolidated.00.pth' with"
        " transformers'"
    )
    assert_load_refused(tmp_path, neither + other_format)


Tensors = dict[str, Tensor]


def remove_tensors(*names: str) -> Callable[[Tensors], Tensors]:
    """Return a function that removes tensors by name."""
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name not in names}


def replace_tensors(**changes: Tensor) -> Callable[[Tensors], Tensors]:
    """Return a function that adds or replaces tensors; two underscores in a name stand for a
    dot.
    """
    return lambda tensors: (
        tensors | {name.replace("__", "."): tensor for name, tensor in changes.items()}
    )


OUT_BIAS = "model__layers__0__self_attn__o_proj__bias"
TENSOR_ERRORS: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "missing": (remove_tensors(Q0), f"tensor '{Q0}' [32, 32] is missing, 1 in all; "),
    "two": (
        remove_tensors("lm_head.weight", "model.norm.weight"),
        "tensor 'lm_head.weight' [61, 32] is missing, 2 in all; ",
    ),
    "bias": (
        remove_tensors("model.layers.1.self_attn.k_proj.bias"),
        "k_proj.bias' [16] is missing, 1 in all; ",
    ),
    "extra": (
        replace_tensors(extra=torch.ones(3)),
        "tensor 'extra' F32 [3]: this model has no such tensor; ",
    ),
    "layer": (
        replace_tensors(model__layers__2__mlp__down_proj__weight=torch.ones(32, 48)),
        "down_proj.weight' F32 [32, 48]: this model has no",
    ),
    "shape": (
        replace_tensors(**{Q0.replace(".", "__"): torch.ones(16, 32)}),
        f"'{Q0}' F32 [16, 32]: the shape must be [32, 32]; ",
    ),
    "flat": (
        replace_tensors(**{Q0.replace(".", "__"): torch.ones(1024)}),
        f"tensor '{Q0}' F32 [1024]: the shape must be [32, 32]; ",
    ),
    "up": (
        replace_tensors(model__layers__0__mlp__up_proj__weight=torch.ones(32, 48)),
        "[32, 48]: the shape must be [48, 32]; ",
    ),
    "int": (
        replace_tensors(model__norm__weight=torch.ones(32, dtype=torch.int8)),
        "'model.norm.weight' I8 [32]: allowed dtypes are",
    ),
    "bool": (
        replace_tensors(model__norm__weight=torch.ones(32, dtype=torch.bool)),
        "BOOL [32]: allowed dtypes are F64, F32, F16, BF16",
    ),
    "out": (
        replace_tensors(**{OUT_BIAS: torch.eye(32)[31].contiguous()}),
        "o_proj.bias' [32] is not zero, and this model's output",
    ),
    "nan": (
        replace_tensors(**{OUT_BIAS: torch.full((32,), torch.nan)}),
        "o_proj.bias' [32] is not zero, and this model's output",
    ),
}


@pytest.mark.parametrize("name", TENSOR_ERRORS)
def test_wrong_tensors_are_refused(name: str, tmp_path: Path) -> None:
    change, fragment = TENSOR_ERRORS[name]
    assert_load_refused(
        write_hf_folder(tmp_path, tensors=change(make_tensors(SHAPE))), str(tmp_path), fragment
    )


def test_rotary_buffers_and_zero_biases_are_ignored(tmp_path: Path) -> None:
    extra = {
        "model.rotary_emb.inv_freq": torch.rand(4),
        "model.layers.1.self_attn.rotary_emb.inv_freq": torch.rand(4),
    }
    extra |= {f"model.layers.{layer}.self_attn.o_proj.bias": torch.zeros(32) for layer in range(2)}
    assert_holds(
        load_llama(write_hf_folder(tmp_path, tensors=make_tensors(SHAPE) | extra)),
        make_tensors(SHAPE),
    )


def test_the_head_of_a_tied_model_must_equal_its_embedding(tmp_path: Path) -> None:
    tensors = make_tensors(TIED)
    head = tensors["model.embed_tokens.weight"].clone()
    assert_holds(
        load_llama(write_hf_folder(tmp_path, TIED, tensors | {"lm_head.weight": head}), TIED),
        tensors,
    )
    head[60, 31] += 1
    write_hf_folder(tmp_path, TIED, tensors | {"lm_head.weight": head})
    assert_load_refused(
        tmp_path,
        "tensor 'lm_head.weight' [61, 32] differs from model.embed_tokens.weight",
        shape=TIED,
    )


def count_header_bytes(raw: bytes) -> int:
    """Return where the header of a safetensors file ends, in bytes."""
    return 8 + int(struct.unpack("<Q", raw[:8])[0])


CUT_POINTS: dict[str, Callable[[bytes], int]] = {
    "empty": lambda raw: 0,
    "in the length": lambda raw: 4,
    "after the length": lambda raw: 8,
    "in the header": lambda raw: count_header_bytes(raw) // 2,
    "after the header": count_header_bytes,
    "in the first tensor": lambda raw: count_header_bytes(raw) + 5,
    "in the middle": lambda raw: (count_header_bytes(raw) + len(raw)) // 2,
    "one byte short": lambda raw: len(raw) - 1,
}


@pytest.mark.parametrize("name", CUT_POINTS)
def test_a_truncated_shard_is_refused(name: str, tmp_path: Path) -> None:
    file = sorted(set(write_hf_shards(tmp_path).values()))[1]
    raw = (tmp_path / file).read_bytes()
    (tmp_path / file).write_bytes(raw[: CUT_POINTS[name](raw)])
    assert_load_refused(
        tmp_path, f"{tmp_path}/{file}: is not a whole safetensors file (", "; download it again"
    )


@pytest.mark.parametrize("length", [0, 1, 2**20, 2**27, 2**63, 2**64 - 1])
def test_a_wrong_header_length_is_refused(length: int, tmp_path: Path) -> None:
    path = write_hf_folder(tmp_path) / "model.safetensors"
    path.write_bytes(struct.pack("<Q", length) + path.read_bytes()[8:])
    assert_load_refused(tmp_path, f"{path}: is not a whole safetensors file (")


def test_wrong_offsets_and_trailing_bytes_are_refused(tmp_path: Path) -> None:
    path = write_hf_folder(tmp_path) / "model.safetensors"
    raw = path.read_bytes()
    path.write_bytes(raw + b"\0")
    assert_load_refused(tmp_path, f"{path}: is not a whole safetensors file (")
    path.write_bytes(re.sub(rb'"shape":\[61,32\]', b'"shape":[99,32]', raw, count=1))
    assert_load_refused(tmp_path, f"{path}: is not a whole safetensors file (")


UNSAFE_NAMES = [
    "../x.safetensors",
    "/x.safetensors",
    "a/b.safetensors",
    "a\\b.safetensors",
    "..",
    "",
    "x.bin",
]
UNSAFE_NAMES += ["a\0.safetensors", "a\n.safetensors", "\ud800.safetensors"]


@pytest.mark.parametrize("file", [*UNSAFE_NAMES, 3, None, ["x.safetensors"]], ids=ascii)
def test_an_index_that_names_a_file_outside_the_folder_is_refused(
    file: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    weight_map = write_hf_shards(folder)
    save_file({Q0: torch.ones(32, 32)}, tmp_path / "x.safetensors")
    write_hf_index(folder, weight_map | {Q0: file})
    assert_load_refused(
        folder,
        "model.safetensors.index.json: names the shard ",
        "allowed: a plain file name ending in .safetensors; ",
    )


@pytest.mark.parametrize("where", [None, {}, ["x.safetensors"], "x"])
def test_an_index_without_a_weight_map_is_refused(where: Any, tmp_path: Path) -> None:
    write_hf_shards(tmp_path)
    write_hf_index(tmp_path, where)
    assert_load_refused(
        tmp_path,
        "model.safetensors.index.json: has no table weight_map of tensor name to file name; ",
    )


def test_a_missing_shard_is_refused(tmp_path: Path) -> None:
    file = sorted(set(write_hf_shards(tmp_path).values()))[2]
    (tmp_path / file).unlink()
    assert_load_refused(tmp_path, f"{tmp_path}/{file}: shard is missing; ")
    (tmp_path / file).mkdir()
    assert_load_refused(tmp_path, f"{tmp_path}/{file}: shard is missing; ")


def test_an_index_that_contradicts_its_shards_is_refused(tmp_path: Path) -> None:
    weight_map = write_hf_shards(tmp_path)
    own_file, other_file = (
        weight_map[Q0],
        next(file for file in weight_map.values() if file != weight_map[Q0]),
    )
    write_hf_index(tmp_path, weight_map | {Q0: other_file})
    assert_load_refused(
        tmp_path, f"tensor '{Q0}' should be in '{other_file}', it is in ['{own_file}']; "
    )
    write_hf_index(tmp_path, {name: file for name, file in weight_map.items() if name != Q0})
    assert_load_refused(tmp_path, f"tensor '{Q0}' should be in None, it is in ['{own_file}']; ")
    write_hf_index(tmp_path, weight_map | {"ghost": own_file})
    assert_load_refused(tmp_path, f"tensor 'ghost' should be in '{own_file}', it is in None; ")
    write_hf_index(tmp_path, weight_map)
    save_file(load_file(tmp_path / other_file) | {Q0: torch.ones(32, 32)}, tmp_path / other_file)
    assert_load_refused(
        tmp_path,
        f"tensor '{Q0}' should be in '{own_file}', it is in ['{min(own_file, other_file)}',"
        f" '{max(own_file, other_file)}']; ",
    )


# How much host memory loading needs is tested in tests/weights/test_load.py.
