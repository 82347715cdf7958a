"""Test conversions of checkpoints: exact to the bit, within the memory of one tensor, and
inspections.
"""

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fixtures.conversions import assert_refused, hash_files, make_odd_tensors, write_odd_hf_folder
from fixtures.golden import golden
from fixtures.huggingface import make_tensors, write_hf_folder
from fixtures.megatron import (
    CPU,
    FILE,
    LARGE_SHAPE,
    LEGACY,
    SHAPE,
    SHAPES,
    Tensors,
    count_padded_rows,
    flatten_tables,
    make_core_model,
    make_shard,
    write_large_checkpoint,
    write_megatron,
)
from steelyard.errors import RequestError
from steelyard.models.attention import make_packed_layout
from steelyard.models.llama import LlamaShape
from steelyard.models.llama_init import count_parameters
from steelyard.models.llama_placements import Shard
from steelyard.models.shapes import LlamaModel
from steelyard.weights import checkpoint_writer as writing
from steelyard.weights import convert, llama_weights
from steelyard.weights.inspection import Inspection, inspect_checkpoint


def make_model_config(shape: LlamaShape) -> LlamaModel:
    """Return the model of a case with this shape."""
    return LlamaModel(
        family="llama", **{key: value for key, value in asdict(shape).items() if key != "head_dim"}
    )


def assert_equal_tensors(actual: Tensors, expected: Tensors) -> None:
    """Assert that two tables of tensors have equal names, dtypes, shapes and bits."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype
        assert actual[name].shape == tensor.shape, name
        assert torch.equal(
            actual[name].contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8)
        ), name


def read_hf_tensors(folder: Path) -> Tensors:
    """Return all tensors of a folder's safetensors files."""
    return {
        name: tensor
        for path in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


@pytest.mark.parametrize("kind", SHAPES)
def test_a_round_trip_through_megatron_keeps_every_bit(kind: str, tmp_path: Path) -> None:
    shape = SHAPES[kind]
    source = write_odd_hf_folder(tmp_path / "first", shape)
    hashes_before = hash_files(source)
    convert.convert_checkpoint(source, tmp_path / "tp8", "megatron", 8)
    convert.convert_checkpoint(tmp_path / "tp8", tmp_path / "tp2", "megatron", 2)
    conversion = convert.convert_checkpoint(tmp_path / "tp2", tmp_path / "last", "hf", 1)
    assert_equal_tensors(read_hf_tensors(tmp_path / "last"), make_odd_tensors(shape))
    assert hash_files(source) == hashes_before
    names = {str(path.relative_to(tmp_path / "last")) for path in (tmp_path / "last").rglob("*")}
    assert names == {"conversion.json", *(name for name, _ in conversion.files)}
    assert conversion.files == [
        (name, (tmp_path / "last" / name).stat().st_size)
        for name in ("model.safetensors", "config.json")
    ]
    assert conversion.size_bytes == sum(size for _, size in conversion.files)
    assert conversion.reused == 0
    # Converting a result to its own layout gives the same bytes.
    convert.convert_checkpoint(tmp_path / "last", tmp_path / "again", "hf", 1)
    assert hash_files(tmp_path / "again") == hash_files(tmp_path / "last")


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("source, target", [(1, 8), (8, 1), (2, 4), (4, 4)])
def test_megatron_shards_are_redistributed(
    source: int, target: int, kind: str, tmp_path: Path
) -> None:
    shape, tensors = SHAPES[kind], make_odd_tensors(SHAPES[kind])
    write_megatron(
        tmp_path / "from", shape, source, tensors=tensors, multiple=100, args={"vocab_size": 251}
    )
    convert.convert_checkpoint(tmp_path / "from", tmp_path / "to", "megatron", target)
    assert (tmp_path / "to" / "latest_checkpointed_iteration.txt").read_text().strip() == "135000"
    rows = count_padded_rows(shape.vocab, target)
    for rank in range(target):
        path = tmp_path / "to" / "iter_0135000" / f"mp_rank_{rank:02}" / FILE
        expected = make_shard(tensors, shape, rank, target, rows)
        for mmap in (False, True):
            shard = torch.load(path, weights_only=False, mmap=mmap)
            assert shard["iteration"] == 135000
            assert shard["checkpoint_version"] == 3.0
            assert_equal_tensors(
                dict(flatten_tables(shard["model"])),
                {legacy_name(name): tensor for name, tensor in expected.items()},
            )
        args = shard["args"]
        assert (args.padded_vocab_size, args.vocab_size, args.tensor_model_parallel_size) == (
            rows * target,
            251,
            target,
        )
        assert (args.num_query_groups, args.group_query_attention, args.kv_channels) == (8, True, 4)
        assert args.tensor_model_parallel_rank == rank


def legacy_name(name: str) -> str:
    """Return the name that Megatron checkpoints of 2023 give one of our parameters."""
    top_level = {
        "embed.weight": "embedding.word_embeddings.weight",
        "output.weight": "output_layer.weight",
    }
    top_level |= {"norm.weight": "encoder.final_layernorm.weight"}
    if name in top_level:
        return f"language_model.{top_level[name]}"
    _, index, leaf = name.split(".", 2)
    return f"language_model.encoder.layers.{index}.{LEGACY[leaf]}"


def test_a_conversion_from_hugging_face_is_marked_as_a_release(tmp_path: Path) -> None:
    convert.convert_checkpoint(write_odd_hf_folder(tmp_path / "hf"), tmp_path / "to", "megatron", 2)
    assert (tmp_path / "to" / "latest_checkpointed_iteration.txt").read_text().strip() == "release"
    assert (
        torch.load(tmp_path / "to" / "release" / "mp_rank_01" / FILE, weights_only=False)[
            "iteration"
        ]
        == 0
    )
    assert inspect_checkpoint(tmp_path / "to").iteration == "release"


def test_megatron_core_names_become_legacy_names(tmp_path: Path) -> None:
    write_megatron(tmp_path / "from", make_model=make_core_model, tensors=make_odd_tensors(SHAPE))
    convert.convert_checkpoint(tmp_path / "from", tmp_path / "to", "megatron", 1)
    shard = torch.load(tmp_path / "to" / "iter_0135000" / "mp_rank_00" / FILE, weights_only=False)
    expected = make_shard(make_odd_tensors(SHAPE), SHAPE, 0, 1, 256)
    assert_equal_tensors(
        dict(flatten_tables(shard["model"])),
        {legacy_name(name): tensor for name, tensor in expected.items()},
    )


def test_interleaved_rotary_values_are_put_in_order(tmp_path: Path) -> None:
    tensors, stored = make_odd_tensors(SHAPE), make_odd_tensors(SHAPE)
    for layer in range(2):
        name = f"model.layers.{layer}.self_attn.v_proj.weight"
        stored[name] = torch.cat([head[[0, 2, 1, 3]] for head in torch.split(tensors[name], 4)])
    write_megatron(tmp_path / "from", tensors=stored, args={"rotary_interleaved_patch": True})
    convert.convert_checkpoint(tmp_path / "from", tmp_path / "tp4", "megatron", 4)
    args = torch.load(tmp_path / "tp4" / "iter_0135000" / "mp_rank_03" / FILE, weights_only=False)[
        "args"
    ]
    assert args.rotary_interleaved_patch is False
    convert.convert_checkpoint(tmp_path / "tp4", tmp_path / "hf", "hf", 1)
    assert_equal_tensors(read_hf_tensors(tmp_path / "hf"), tensors)


@pytest.mark.parametrize("kind", SHAPES)
def test_transformers_gives_the_same_logits(kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    shape = replace(SHAPES[kind], rope_base=500000.0, norm_eps=1e-6)
    write_megatron(
        tmp_path / "from", shape, 2, args={"rotary_base": 500000, "layernorm_epsilon": 1e-6}
    )
    convert.convert_checkpoint(tmp_path / "from", tmp_path / "hf", "hf", 1)
    hf_model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert hf_model.config.max_position_embeddings == shape.positions
    model = llama_weights.build_llama(shape, CPU, torch.float32)
    llama_weights.load_llama(model, tmp_path / "hf", shape, Shard())
    tokens = torch.arange(0, 240, 10)
    with torch.no_grad():
        expected = hf_model.eval()(tokens[None]).logits[0]
        rows = make_packed_layout([len(tokens)], [len(tokens)], CPU, None)
        logits = model(tokens, torch.arange(len(tokens)), rows, "rows", torch.arange(len(tokens)))
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_large_models_are_written_in_several_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "MAX_FILE_BYTES", 60_000)
    conversion = convert.convert_checkpoint(
        write_odd_hf_folder(tmp_path / "first"), tmp_path / "to", "hf", 1
    )
    names = [name for name, _ in conversion.files]
    count = len(names) - 2
    assert count > 2
    assert names[:2] == [
        f"model-00001-of-{count:05}.safetensors",
        f"model-00002-of-{count:05}.safetensors",
    ]
    assert names[-2:] == ["model.safetensors.index.json", "config.json"]
    assert all(size < 61_000 for name, size in conversion.files if name.endswith(".safetensors"))
    for path in (tmp_path / "to").glob("*.safetensors"):
        assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0
    assert_equal_tensors(read_hf_tensors(tmp_path / "to"), make_odd_tensors(SHAPE))
    llama_weights.load_llama(
        llama_weights.build_llama(SHAPE, CPU, torch.bfloat16), tmp_path / "to", SHAPE
    )


def test_dtypes_are_kept(tmp_path: Path) -> None:
    tensors = {
        name: tensor.float() if "norm" in name else tensor.half()
        for name, tensor in make_tensors(SHAPE).items()
    }
    source = write_odd_hf_folder(tmp_path / "first", tensors=tensors)
    convert.convert_checkpoint(source, tmp_path / "tp4", "megatron", 4)
    convert.convert_checkpoint(tmp_path / "tp4", tmp_path / "last", "hf", 1)
    assert_equal_tensors(read_hf_tensors(tmp_path / "last"), tensors)
    assert json.loads((tmp_path / "last" / "config.json").read_text())["torch_dtype"] == "float16"
    assert (
        inspect_checkpoint(tmp_path / "tp4").dtype
        == inspect_checkpoint(source).dtype
        == "fp16+fp32"
    )
    tensors["model.layers.0.self_attn.k_proj.weight"] = tensors[
        "model.layers.0.self_attn.k_proj.weight"
    ].bfloat16()
    assert_refused(
        lambda: convert.convert_checkpoint(
            write_odd_hf_folder(tmp_path / "mixed", tensors=tensors), tmp_path / "x", "megatron", 2
        ),
        "(BF16, F16); ",
    )
    assert not (tmp_path / "x").exists()


def test_missing_dimensions_are_taken_from_the_case(tmp_path: Path) -> None:
    write_megatron(tmp_path / "a", args={"vocab_size": None}, tensors=make_odd_tensors(SHAPE))
    assert_refused(
        lambda: convert.convert_checkpoint(tmp_path / "a", tmp_path / "to", "hf", 1),
        "its files do not state vocab; name ",
        "--case",
    )
    write_megatron(
        tmp_path / "b", change=lambda index, file: file.pop("args"), tensors=make_odd_tensors(SHAPE)
    )
    missing = (
        "its files do not state heads, kv_heads, head_dim, vocab, positions, rope_base, norm_eps; "
    )
    assert_refused(
        lambda: convert.convert_checkpoint(tmp_path / "b", tmp_path / "to", "hf", 1),
        missing,
        "--case",
    )
    for name in ("a", "b"):
        convert.convert_checkpoint(
            tmp_path / name, tmp_path / f"{name}-hf", "hf", 1, make_model_config(SHAPE)
        )
        assert_equal_tensors(read_hf_tensors(tmp_path / f"{name}-hf"), make_odd_tensors(SHAPE))
    other_model = make_model_config(replace(SHAPE, vocab=250))
    for folder in (tmp_path / "a-hf", write_megatron(tmp_path / "c")):
        with pytest.raises(
            RequestError, match="vocab_size is 251, the case's vocab is 250; give weights of the"
        ) as error:
            convert.convert_checkpoint(folder, tmp_path / "to", "hf", 1, other_model)
        assert "--set" not in str(error.value)  # convert has no option --set
    assert not (tmp_path / "to").exists()


def test_an_impossible_number_of_layers_is_refused(tmp_path: Path) -> None:
    source = write_odd_hf_folder(tmp_path / "first")
    config = json.loads((source / "config.json").read_text())
    for value, fragment in (
        (10**10, "states 10000000000 layers but has 21 tensors; "),
        ("2", "layers is '2', allowed: a whole number above 0; "),
    ):
        (source / "config.json").write_text(json.dumps(config | {"num_hidden_layers": value}))
        assert_refused(
            lambda: convert.convert_checkpoint(source, tmp_path / "to", "hf", 1), fragment
        )


def test_inspection_of_megatron_and_hugging_face(tmp_path: Path) -> None:
    shape = replace(SHAPES["bias"], rope_base=500000.0)
    write_megatron(tmp_path / "m", shape, 2, args={"rotary_base": 500000})
    inspection = inspect_checkpoint(tmp_path / "m")
    left_out = ("head_dim", "qk_norm", "window", "rope_scaling")
    dims = {key: value for key, value in asdict(shape).items() if key not in left_out}
    files = [
        (
            f"mp_rank_{rank:02}/{FILE}",
            (tmp_path / "m/iter_0135000" / f"mp_rank_{rank:02}" / FILE).stat().st_size,
        )
        for rank in range(2)
    ]
    count = count_parameters(llama_weights.build_llama(shape, CPU, torch.float32))
    assert inspection == Inspection(
        layout="megatron",
        tp=2,
        iteration="135000",
        dtype="fp32",
        parameters=count,
        size_bytes=sum(size for _, size in files),
        files=files,
        shape=dims,
        notes=[golden("the-files-hold-an-optimizer-state"), "the vocabulary is padded to 256 rows"],
        header_sha256=llama_weights.open_llama_checkpoint(tmp_path / "m").headers.digest,
    )
    conversion = convert.convert_checkpoint(tmp_path / "m", tmp_path / "hf", "hf", 1)
    hf_inspection = inspect_checkpoint(tmp_path / "hf")
    assert (
        hf_inspection.layout,
        hf_inspection.tp,
        hf_inspection.iteration,
        hf_inspection.dtype,
        hf_inspection.notes,
    ) == ("huggingface", 1, None, "fp32", [])
    assert hf_inspection.shape == dims
    assert hf_inspection.parameters == count
    assert hf_inspection.files == conversion.files[:1]
    load_facts = llama_weights.load_llama(
        llama_weights.build_llama(shape, CPU, torch.float32), tmp_path / "hf", shape
    )
    assert hf_inspection.header_sha256 == load_facts["header_sha256"] != inspection.header_sha256


def test_inspection_of_a_checkpoint_without_args(tmp_path: Path) -> None:
    write_megatron(
        tmp_path, change=lambda index, file: file.pop("args"), tensors=make_odd_tensors(SHAPE)
    )
    inspection = inspect_checkpoint(tmp_path)
    assert inspection.dtype == "bf16"
    assert (
        inspection.parameters
        == count_parameters(llama_weights.build_llama(SHAPE, CPU, torch.float32)) + 2 * 5 * 64
    )
    unknown = dict.fromkeys(("heads", "kv_heads", "vocab", "positions", "rope_base", "norm_eps"))
    assert inspection.shape == unknown | {
        "layers": 2,
        "hidden": 64,
        "ffn": 96,
        "qkv_bias": False,
        "tied": False,
    }
    assert "name a case with this model: --case CASE" in inspection.notes[-1]


def test_inspection_notes_an_unsupported_model(tmp_path: Path) -> None:
    config = {"model_type": "gemma", "max_position_embeddings": 32}
    write_hf_folder(tmp_path, SHAPE, **config)
    assert (
        golden("model_type-is-gemma-allowed-llama-aquila") in inspect_checkpoint(tmp_path).notes[-1]
    )


MEMORY_PROGRAM = """
import json, re, sys, threading, torch
from pathlib import Path
from steelyard.weights import convert

def anonymous():
    text = Path("/proc/self/smaps_rollup").read_text()
    return int(re.search(r"^Anonymous: +([0-9]+) kB", text, re.M).group(1)) * 1024

torch.set_num_threads(1)
before, highest, done = anonymous(), 0, threading.Event()

def watch():
    global highest
    while not done.is_set():
        highest = max(highest, anonymous())

watcher = threading.Thread(target=watch)
watcher.start()
try:
    convert.convert_checkpoint(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
finally:
    done.set()
    watcher.join()
print(highest - before)
"""


@pytest.mark.full
@pytest.mark.skipif(
    not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux's smaps_rollup"
)
@pytest.mark.long
@pytest.mark.parametrize(("to", "tp"), [("megatron", 4), ("hf", 1)])
def test_a_conversion_needs_little_more_host_memory_than_its_largest_tensor(
    to: str, tp: int, tmp_path: Path
) -> None:
    # the Hugging Face layout joins the two shards of the embedding, the largest tensor
    largest_bytes = write_large_checkpoint(tmp_path / "from", 2) * (2 if to == "hf" else 1)
    command = [
        sys.executable,
        "-c",
        MEMORY_PROGRAM,
        str(tmp_path / "from"),
        str(tmp_path / "to"),
        to,
        str(tp),
    ]
    growth_bytes = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert (
        LARGE_SHAPE.vocab * LARGE_SHAPE.hidden * 2 // tp < growth_bytes
    )  # the largest tensor was seen
    assert growth_bytes < 1.3 * largest_bytes, f"{growth_bytes}, largest {largest_bytes}"
