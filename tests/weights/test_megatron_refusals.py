"""Test Megatron checkpoints that are refused: each in one line that names the file and says what to
do.
"""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fixtures.huggingface import write_hf_folder
from fixtures.megatron import CPU, FILE, SHAPE, SHAPES, ShardChange, make_args, write_megatron
from fixtures.megatron_loads import load_megatron_shard
from steelyard.errors import RequestError
from steelyard.models.llama import LlamaShape
from steelyard.models.llama_placements import Shard
from steelyard.weights import convert
from steelyard.weights import llama_weights as weights


def change_second_shard(**changes: Any) -> ShardChange:
    """Return a change of shard 1's encoder: entries by name, with two underscores for each dot;
    None removes an entry.
    """

    def change(index: int, file: dict[str, Any]) -> None:
        encoder = file["model"]["language_model"]["encoder"]
        for key, value in changes.items():
            if index == 1 and value is None:
                del encoder[key.replace("__", ".")]
            elif index == 1:
                encoder[key.replace("__", ".")] = value

    return change


def assert_refused(folder: Path, *fragments: str, shape: LlamaShape = SHAPE) -> None:
    """Assert that loading is refused in one line that holds the fragments and a next step."""
    with pytest.raises(RequestError) as error:
        weights.load_llama(weights.build_llama(shape, CPU, torch.float32), folder, shape, Shard())
    line = str(error.value)
    assert "\n" not in line
    assert "; " in line, f"no next step in: {line}"
    for fragment in fragments:
        assert fragment in line, f"{fragment!r} is not in: {line}"


FIRST_QKV = "layers__0__self_attention__query_key_value__weight"
TENSOR_ERRORS: dict[str, tuple[ShardChange, str]] = {
    "missing": (
        change_second_shard(**{FIRST_QKV: None}),
        f"tensor 'language_model.encoder.{FIRST_QKV.replace('__', '.')}' is none, in mp_rank_00 it",
    ),
    "shape": (
        change_second_shard(**{FIRST_QKV: torch.ones(32, 64)}),
        "is F32 [32, 64], in mp_rank_00 it is F32 [64, 64]; ",
    ),
    "dtype": (
        change_second_shard(**{FIRST_QKV: torch.ones(64, 64).half()}),
        "is F16 [64, 64], in mp_rank_00 it is F32 [64, 64]; ",
    ),
    "unknown": (
        change_second_shard(layers__0__extra__weight=torch.ones(2)),
        "tensor 'language_model.encoder.layers.0.extra.weight' F32 [2]: this model has",
    ),
    "twice": (
        change_second_shard(final_norm__weight=torch.ones(64)),
        "is also stored as 'language_model.encoder.final_layernorm.weight'; ",
    ),
    "norm": (
        change_second_shard(final_layernorm__weight=torch.ones(64)),
        "final_layernorm.weight' F32 [64] differs from the one in mp_rank_00",
    ),
    "object": (
        change_second_shard(final_layernorm__weight=3),
        "'language_model.encoder.final_layernorm.weight' is not a tensor; ",
    ),
}


@pytest.mark.parametrize("name", TENSOR_ERRORS)
def test_a_shard_that_differs_from_the_first_is_refused(name: str, tmp_path: Path) -> None:
    change, fragment = TENSOR_ERRORS[name]
    assert_refused(
        write_megatron(tmp_path, change=change),
        f"{tmp_path}/iter_0135000/mp_rank_01/{FILE}: ",
        fragment,
    )


def change_every_shard(change: ShardChange) -> ShardChange:
    """Return the change of change_second_shard for every shard."""
    return lambda index, file: change(1, file)


ALL_ERRORS: dict[str, tuple[ShardChange, str]] = {
    "missing": (
        change_every_shard(change_second_shard(**{FIRST_QKV: None})),
        f"{FIRST_QKV.replace('__', '.')}' [64, 64] is missing, 1 in all; ",
    ),
    "shape": (
        change_every_shard(change_second_shard(**{FIRST_QKV: torch.ones(32, 64)})),
        "weight' F32 [32, 64]: the shape must be [64, 64]; ",
    ),
    "int8": (
        change_every_shard(change_second_shard(**{FIRST_QKV: torch.ones(64, 64).char()})),
        "int8 [64, 64]: allowed dtypes are F64, F32, F16, BF16; ",
    ),
    "layer": (
        change_every_shard(
            change_second_shard(layers__2__mlp__dense_4h_to_h__weight=torch.ones(64, 48))
        ),
        "F32 [64, 48]: this model has no such tensor",
    ),
    "bias": (
        change_every_shard(
            change_second_shard(layers__1__mlp__dense_4h_to_h__bias=torch.eye(64)[3])
        ),
        "bias' F32 [64] is not zero, and this",
    ),
    "qkv bias": (
        change_every_shard(
            change_second_shard(layers__1__self_attention__query_key_value__bias=torch.ones(64))
        ),
        "bias' F32 [64] is not zero, and this",
    ),
    "no model": (
        lambda index, file: file.pop("model"),
        "holds no model, a table of that name is expected; ",
    ),
    "list": (
        lambda index, file: file.update(model=[1]),
        "holds no model, a table of that name is expected; ",
    ),
    "empty": (
        lambda index, file: file.update(model={}),
        "holds no model, a table of that name is expected; ",
    ),
    "old": (
        lambda index, file: file.update(checkpoint_version=1.0),
        "checkpoint_version is 1.0, allowed: 2.0 or later; ",
    ),
    "oldest": (
        lambda index, file: file.pop("checkpoint_version"),
        "checkpoint_version is None, allowed: 2.0 or later; ",
    ),
    "iteration": (
        lambda index, file: file.update(iteration=7),
        "is of iteration 7, its folder of 135000; ",
    ),
    "no iteration": (
        lambda index, file: file.pop("iteration"),
        "is of iteration None, its folder of 135000; ",
    ),
}


@pytest.mark.parametrize("name", ALL_ERRORS)
def test_wrong_tensors_and_headers_are_refused(name: str, tmp_path: Path) -> None:
    change, fragment = ALL_ERRORS[name]
    assert_refused(
        write_megatron(tmp_path, change=change),
        f"{tmp_path}/iter_0135000/mp_rank_00/{FILE}: ",
        fragment,
    )


ARGS_ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "layers": ({"num_layers": 3}, "num_layers is 3, the case's layers is 2; "),
    "hidden": ({"hidden_size": 32}, "hidden_size is 32, the case's hidden is 64; "),
    "heads": ({"num_attention_heads": 8}, "num_attention_heads is 8, the case's heads is 16; "),
    "groups": ({"num_query_groups": 4}, "num_query_groups is 4, the case's kv_heads is 8; "),
    "no groups": (
        {"group_query_attention": False},
        "without group_query_attention is 16, the case's kv_heads is 8; ",
    ),
    "head": ({"kv_channels": 8}, "kv_channels is 8, the case's head_dim is 4; "),
    "ffn": ({"ffn_hidden_size": 48}, "ffn_hidden_size is 48, the case's ffn is 96; "),
    "vocab": ({"vocab_size": 250}, "vocab_size is 250, the case's vocab is 251; "),
    "true vocab": ({"true_vocab_size": 250}, "true_vocab_size is 250, the case's vocab is 251; "),
    "eps": (
        {"layernorm_epsilon": 1e-6},
        "layernorm_epsilon is 1e-06, the case's norm_eps is 1e-05; ",
    ),
    "rope": ({"rotary_base": 500000}, "rotary_base is 500000, the case's rope_base is 10000.0; "),
    "tied": (
        {"untie_embeddings_and_output_weights": False},
        "not untie_embeddings_and_output_weights is True, the case's tied is False; ",
    ),
    "bias": ({"add_qkv_bias": True}, "add_qkv_bias is True, the case's qkv_bias is False; "),
    "swiglu": ({"swiglu": False}, "swiglu is False, allowed: True; "),
    "norm": ({"normalization": "LayerNorm"}, "normalization is 'LayerNorm', allowed: 'RMSNorm'; "),
    "interleaved": ({"rotary_interleaved": True}, "rotary_interleaved is True, allowed: False; "),
    "interpolated": (
        {"rotary_seq_len_interpolation_factor": 4},
        "rotary_seq_len_interpolation_factor is 4, allowed: 1; ",
    ),
    "percent": ({"rotary_percent": 0.5}, "rotary_percent is 0.5, allowed: 1.0; "),
    "positions": (
        {"position_embedding_type": "yarn"},
        "position_embedding_type is 'yarn', allowed: 'rope'; ",
    ),
    "no rope": ({"no_rope_freq": [0, 0, 0, 1]}, "no_rope_freq is [0, 0, 0, 1], allowed: None; "),
    "scaled": ({"use_rope_scaling": True}, "use_rope_scaling is True, allowed: False; "),
    "experts": ({"num_experts": 8}, "num_experts is 8, allowed: 0, 1, [1]; "),
    "gelu": ({"openai_gelu": True}, "openai_gelu is True, allowed: False; "),
    "relu": ({"squared_relu": True}, "squared_relu is True, allowed: False; "),
    "geglu": ({"quick_geglu": True}, "quick_geglu is True, allowed: False; "),
    "1p": ({"apply_layernorm_1p": True}, "apply_layernorm_1p is True, allowed: False; "),
    "qk norm": ({"qk_layernorm": True}, "qk_layernorm is True, allowed: False; "),
    "qk l2": ({"qk_l2_norm": True}, "qk_l2_norm is True, allowed: False; "),
    "latent": (
        {"multi_latent_attention": True},
        "multi_latent_attention is True, allowed: False; ",
    ),
    "window": ({"window_size": (128, 0)}, "window_size is (128, 0), allowed: (-1, -1); "),
    "softmax": (
        {"softmax_type": "off-by-one"},
        "softmax_type is 'off-by-one', allowed: 'vanilla'; ",
    ),
    "newer eps": (
        {"norm_epsilon": 1e-6, "layernorm_epsilon": 1e-5},
        "norm_epsilon is 1e-06, the case's norm_eps is 1e-05; ",
    ),
    "padded": ({"padded_vocab_size": 512}, "padded_vocab_size is 512, allowed: 256; "),
}


@pytest.mark.parametrize(
    "args",
    [
        {
            "rotary_seq_len_interpolation_factor": 1,
            "rotary_percent": 1,
            "num_experts": 0,
            "softmax_type": "vanilla",
        },
        {
            "position_embedding_type": "rope",
            "num_experts": [1],
            "window_size": (-1, -1),
            "add_bias_linear": True,
        },
        {"position_embedding_type": "learned_absolute", "use_rotary_position_embeddings": True},
        {
            "use_rope_scaling": False,
            "rope_scaling_factor": 8.0,
            "apply_query_key_layer_scaling": True,
            "qk_layernorm": False,
        },
    ],
)
def test_args_with_default_values_are_accepted(args: dict[str, Any], tmp_path: Path) -> None:
    load_megatron_shard(write_megatron(tmp_path, args=args), SHAPE, Shard())


@pytest.mark.parametrize("name", ARGS_ERRORS)
def test_args_of_another_model_are_refused(name: str, tmp_path: Path) -> None:
    args, fragment = ARGS_ERRORS[name]
    assert_refused(
        write_megatron(tmp_path, args=args),
        f"{tmp_path}/iter_0135000/mp_rank_00/{FILE}: ",
        fragment,
    )


def test_a_vocabulary_smaller_than_the_cases_is_refused(tmp_path: Path) -> None:
    write_megatron(tmp_path, args={"vocab_size": None})
    assert_refused(
        tmp_path,
        "2 shards of it hold 256 rows, the case's vocab is 300; ",
        shape=replace(SHAPE, vocab=300),
    )


def test_a_case_that_cannot_be_divided_into_the_shards_is_refused(tmp_path: Path) -> None:
    one_kv_head = replace(SHAPE, kv_heads=1, heads=8, head_dim=8)
    no_args = dict.fromkeys(make_args(SHAPE, 2, 1))
    write_megatron(tmp_path, args=no_args)
    assert_refused(
        tmp_path,
        "is one of 2 shards, and the case's kv_heads 1 cannot be divided by 2; ",
        shape=one_kv_head,
    )


def test_an_output_layer_of_a_tied_model_is_refused(tmp_path: Path) -> None:
    write_megatron(tmp_path, args={"untie_embeddings_and_output_weights": None})
    assert_refused(
        tmp_path,
        "tensor 'language_model.output_layer.weight' F32 [128, 64]: this model has no",
        shape=SHAPES["tied"],
    )


def test_shards_of_two_iterations_are_refused(tmp_path: Path) -> None:
    write_megatron(
        tmp_path, subfolder="release", change=lambda index, file: file.update(iteration=index)
    )
    assert_refused(
        tmp_path, f"{tmp_path}/release/mp_rank_01/{FILE}: is of iteration 1, mp_rank_00 of 0; "
    )


def test_missing_shards_are_refused(tmp_path: Path) -> None:
    write_megatron(tmp_path, tp=4)
    folder = tmp_path / "iter_0135000"
    (folder / "mp_rank_02" / FILE).rename(folder / "kept")
    assert_refused(tmp_path, f"{folder}/mp_rank_02/{FILE}: shard is missing; ")
    (folder / "mp_rank_02").rmdir()
    assert_refused(tmp_path, f"{folder}/mp_rank_02: shard is missing, there are 3 others; ")
    (folder / "mp_rank_03").rename(folder / "mp_rank_02")
    assert_refused(
        tmp_path,
        f"{folder}: its arguments state 4 shards, 3 are here: mp_rank_03 is missing; fetch it",
    )
    shutil.rmtree(folder / "mp_rank_02")
    assert_refused(
        tmp_path,
        f"{folder}: its arguments state 4 shards, 2 are here: mp_rank_02 and 1 more are"
        " missing; fetch them",
    )


def test_an_extra_shard_is_refused(tmp_path: Path) -> None:
    folder = write_megatron(tmp_path, tp=2) / "iter_0135000"
    shutil.copytree(folder / "mp_rank_01", folder / "mp_rank_02")
    assert_refused(
        tmp_path,
        f"{folder}: its arguments state 2 shards, 3 are here: mp_rank_02 is not one of"
        " them; move it away",
    )


def swap_shards_1_and_2(folder: Path) -> None:
    """Swap the folders of shards 1 and 2."""
    (folder / "mp_rank_01").rename(folder / "kept")
    (folder / "mp_rank_02").rename(folder / "mp_rank_01")
    (folder / "kept").rename(folder / "mp_rank_02")


def test_swapped_shards_of_a_conversion_are_refused(tmp_path: Path) -> None:
    convert.convert_checkpoint(write_megatron(tmp_path / "from"), tmp_path / "to", "megatron", 4)
    folder = tmp_path / "to" / "iter_0135000"
    swap_shards_1_and_2(folder)
    assert_refused(
        tmp_path / "to",
        f"{folder}/mp_rank_01/{FILE}: is shard 2 of its checkpoint, and its folder is mp_rank_01; ",
    )
    swap_shards_1_and_2(folder)
    load_megatron_shard(tmp_path / "to", SHAPE, Shard())


def test_swapped_shards_of_a_training_are_refused(tmp_path: Path) -> None:
    """Megatron stores the rank of the whole training, which is the shard's number if tensor
    parallelism was the only one.
    """

    def change(index: int, file: dict[str, Any]) -> None:
        file["args"].rank = index

    folder = write_megatron(tmp_path, tp=4, args={"world_size": 4}, change=change) / "iter_0135000"
    load_megatron_shard(tmp_path, SHAPE, Shard())
    swap_shards_1_and_2(folder)
    assert_refused(
        tmp_path,
        f"{folder}/mp_rank_01/{FILE}: is shard 2 of its checkpoint, and its folder is mp_rank_01; ",
    )


@pytest.mark.parametrize(
    "world, ranks", [(4, (0, 0, 0, 0)), (8, (0, 2, 1, 3)), (None, (0, 2, 1, 3)), (4, (0, 2, 4, 6))]
)
def test_uninformative_ranks_are_ignored(
    world: int | None, ranks: tuple[int, ...], tmp_path: Path
) -> None:
    """Conversion tools write every shard from one process, so their ranks do not number the
    shards.
    """

    def change(index: int, file: dict[str, Any]) -> None:
        file["args"].rank = ranks[index]

    load_megatron_shard(
        write_megatron(tmp_path, tp=4, args={"world_size": world}, change=change), SHAPE, Shard()
    )


def test_a_pipeline_parallel_checkpoint_is_refused(tmp_path: Path) -> None:
    folder = write_megatron(tmp_path) / "iter_0135000"
    (folder / "mp_rank_00").rename(folder / "mp_rank_00_000")
    (folder / "mp_rank_01").rename(folder / "mp_rank_00_001")
    assert_refused(
        tmp_path, f"{folder}/mp_rank_00_000: belongs to a pipeline-parallel checkpoint; "
    )
    assert_refused(folder, f"{folder}/mp_rank_00_000: belongs to a pipeline-parallel checkpoint; ")


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99, 1.0])
def test_a_truncated_shard_is_refused(share: float, tmp_path: Path) -> None:
    path = write_megatron(tmp_path) / "iter_0135000" / "mp_rank_01" / FILE
    raw = path.read_bytes()
    path.write_bytes(raw[: int(len(raw) * share) - (share == 1)])
    assert_refused(tmp_path, f"{path}: ")


def test_an_invalid_tracker_is_refused(tmp_path: Path) -> None:
    tracker = write_megatron(tmp_path) / "latest_checkpointed_iteration.txt"
    for word in ("x", "", "-1", "1" * 99, "iter_0135000"):
        tracker.write_text(word)
        assert_refused(tmp_path, f"{tracker}: says '{word[:90]}", "allowed: a number or release; ")
    tracker.write_bytes(b"\xff\n")
    assert_refused(tmp_path, f"{tracker}: says ")
    tracker.write_text("7")
    assert_refused(tmp_path, f"{tracker}: says 7, and there is no folder iter_0000007; ")
    tracker.unlink()
    assert_refused(
        tmp_path,
        f"{tmp_path}: has no latest_checkpointed_iteration.txt ",
        f"; give {tmp_path}/iter_0135000",
    )
    shutil.rmtree(tmp_path / "iter_0135000")
    assert_refused(tmp_path, str(tmp_path))


def test_a_folder_with_both_layouts_is_refused(tmp_path: Path) -> None:
    write_hf_folder(write_megatron(tmp_path), SHAPE)
    assert_refused(
        tmp_path,
        f"{tmp_path}: holds a Hugging Face and a Megatron checkpoint; give {tmp_path}/iter_0135000",
    )
    load_megatron_shard(tmp_path / "iter_0135000", SHAPE, Shard())


def test_hugging_face_wins_over_megatron_in_a_subfolder(tmp_path: Path) -> None:
    write_megatron(write_hf_folder(tmp_path, SHAPE) / "checkpoints")
    (tmp_path / "release").mkdir()
    model = weights.build_llama(SHAPE, CPU, torch.float32)
    assert weights.load_llama(model, tmp_path, SHAPE, Shard())["source"] == "huggingface"


def test_an_unfinished_conversion_is_refused(tmp_path: Path) -> None:
    (write_megatron(tmp_path) / "conversion.json").write_text("{}")
    for folder in (tmp_path, tmp_path / "iter_0135000"):
        assert_refused(
            folder, f"{tmp_path}/conversion.json: the conversion into this folder is not finished; "
        )
