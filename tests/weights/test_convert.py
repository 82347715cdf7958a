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

from fixtures.conversions import hashes, hf, odd_tensors, refused
from fixtures.golden import golden
from fixtures.huggingface import tensors_of, write
from fixtures.megatron import (
    CPU,
    FILE,
    LARGE,
    LEGACY,
    SHAPE,
    SHAPES,
    Tensors,
    core,
    flat,
    padded,
    shard_of,
    write_large,
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


def model_of(shape: LlamaShape) -> LlamaModel:
    """Return the model of a case with this shape."""
    return LlamaModel(
        family="llama", **{key: value for key, value in asdict(shape).items() if key != "head_dim"}
    )


def assert_same(found: Tensors, wanted: Tensors) -> None:
    """Assert that two tables of tensors have equal names, dtypes, shapes and bits."""
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape, name
        assert torch.equal(
            found[name].contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8)
        ), name


def hf_tensors(folder: Path) -> Tensors:
    """Return all tensors of a folder's safetensors files."""
    return {
        name: t
        for path in sorted(folder.glob("*.safetensors"))
        for name, t in load_file(path).items()
    }


@pytest.mark.parametrize("kind", SHAPES)
def test_round_trip(kind: str, tmp_path: Path) -> None:
    shape = SHAPES[kind]
    first = hf(tmp_path / "first", shape)
    before = hashes(first)
    convert.convert_checkpoint(first, tmp_path / "tp8", "megatron", 8)
    convert.convert_checkpoint(tmp_path / "tp8", tmp_path / "tp2", "megatron", 2)
    done = convert.convert_checkpoint(tmp_path / "tp2", tmp_path / "last", "hf", 1)
    assert_same(hf_tensors(tmp_path / "last"), odd_tensors(shape))
    assert hashes(first) == before
    there = {str(p.relative_to(tmp_path / "last")) for p in (tmp_path / "last").rglob("*")}
    assert there == {"conversion.json", *(name for name, _ in done.files)}
    assert done.files == [
        (name, (tmp_path / "last" / name).stat().st_size)
        for name in ("model.safetensors", "config.json")
    ]
    assert done.size_bytes == sum(size for _, size in done.files)
    assert done.reused == 0
    # Converting a result to its own layout gives the same bytes.
    convert.convert_checkpoint(tmp_path / "last", tmp_path / "again", "hf", 1)
    assert hashes(tmp_path / "again") == hashes(tmp_path / "last")


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("source, target", [(1, 8), (8, 1), (2, 4), (4, 4)])
def test_shards(source: int, target: int, kind: str, tmp_path: Path) -> None:
    shape, tensors = SHAPES[kind], odd_tensors(SHAPES[kind])
    write_megatron(
        tmp_path / "from", shape, source, tensors=tensors, multiple=100, args={"vocab_size": 251}
    )
    convert.convert_checkpoint(tmp_path / "from", tmp_path / "to", "megatron", target)
    assert (tmp_path / "to" / "latest_checkpointed_iteration.txt").read_text().strip() == "135000"
    rows = padded(shape.vocab, target)
    for i in range(target):
        path = tmp_path / "to" / "iter_0135000" / f"mp_rank_{i:02}" / FILE
        wanted = shard_of(tensors, shape, i, target, rows)
        for mmap in (False, True):
            found = torch.load(path, weights_only=False, mmap=mmap)
            assert found["iteration"] == 135000
            assert found["checkpoint_version"] == 3.0
            assert_same(dict(flat(found["model"])), {theirs(name): t for name, t in wanted.items()})
        args = found["args"]
        assert (args.padded_vocab_size, args.vocab_size, args.tensor_model_parallel_size) == (
            rows * target,
            251,
            target,
        )
        assert (args.num_query_groups, args.group_query_attention, args.kv_channels) == (8, True, 4)
        assert args.tensor_model_parallel_rank == i


def theirs(name: str) -> str:
    """Return the name that Megatron checkpoints of 2023 give one of our parameters."""
    top = {
        "embed.weight": "embedding.word_embeddings.weight",
        "output.weight": "output_layer.weight",
    }
    top |= {"norm.weight": "encoder.final_layernorm.weight"}
    if name in top:
        return f"language_model.{top[name]}"
    _, index, leaf = name.split(".", 2)
    return f"language_model.encoder.layers.{index}.{LEGACY[leaf]}"


def test_from_hugging_face_it_is_a_release(tmp_path: Path) -> None:
    convert.convert_checkpoint(hf(tmp_path / "hf"), tmp_path / "to", "megatron", 2)
    assert (tmp_path / "to" / "latest_checkpointed_iteration.txt").read_text().strip() == "release"
    assert (
        torch.load(tmp_path / "to" / "release" / "mp_rank_01" / FILE, weights_only=False)[
            "iteration"
        ]
        == 0
    )
    assert inspect_checkpoint(tmp_path / "to").iteration == "release"


def test_other_names_become_the_older_ones(tmp_path: Path) -> None:
    write_megatron(tmp_path / "from", spell=core, tensors=odd_tensors(SHAPE))
    convert.convert_checkpoint(tmp_path / "from", tmp_path / "to", "megatron", 1)
    found = torch.load(tmp_path / "to" / "iter_0135000" / "mp_rank_00" / FILE, weights_only=False)
    wanted = shard_of(odd_tensors(SHAPE), SHAPE, 0, 1, 256)
    assert_same(dict(flat(found["model"])), {theirs(name): t for name, t in wanted.items()})


def test_patched_values_are_put_in_order(tmp_path: Path) -> None:
    tensors, stored = odd_tensors(SHAPE), odd_tensors(SHAPE)
    for i in range(2):
        name = f"model.layers.{i}.self_attn.v_proj.weight"
        stored[name] = torch.cat([head[[0, 2, 1, 3]] for head in torch.split(tensors[name], 4)])
    write_megatron(tmp_path / "from", tensors=stored, args={"rotary_interleaved_patch": True})
    convert.convert_checkpoint(tmp_path / "from", tmp_path / "tp4", "megatron", 4)
    args = torch.load(tmp_path / "tp4" / "iter_0135000" / "mp_rank_03" / FILE, weights_only=False)[
        "args"
    ]
    assert args.rotary_interleaved_patch is False
    convert.convert_checkpoint(tmp_path / "tp4", tmp_path / "hf", "hf", 1)
    assert_same(hf_tensors(tmp_path / "hf"), tensors)


@pytest.mark.parametrize("kind", SHAPES)
def test_transformers_answers_the_same(kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    shape = replace(SHAPES[kind], rope_base=500000.0, norm_eps=1e-6)
    write_megatron(
        tmp_path / "from", shape, 2, args={"rotary_base": 500000, "layernorm_epsilon": 1e-6}
    )
    convert.convert_checkpoint(tmp_path / "from", tmp_path / "hf", "hf", 1)
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert theirs.config.max_position_embeddings == shape.positions
    ours = llama_weights.build_llama(shape, CPU, torch.float32)
    llama_weights.load_llama(ours, tmp_path / "hf", shape, Shard())
    tokens = torch.arange(0, 240, 10)
    with torch.no_grad():
        wanted = theirs.eval()(tokens[None]).logits[0]
        rows = make_packed_layout([len(tokens)], [len(tokens)], CPU, None)
        found = ours(tokens, torch.arange(len(tokens)), rows, "rows", torch.arange(len(tokens)))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_large_models_are_in_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "MAX_FILE_BYTES", 60_000)
    done = convert.convert_checkpoint(hf(tmp_path / "first"), tmp_path / "to", "hf", 1)
    names = [name for name, _ in done.files]
    count = len(names) - 2
    assert count > 2
    assert names[:2] == [
        f"model-00001-of-{count:05}.safetensors",
        f"model-00002-of-{count:05}.safetensors",
    ]
    assert names[-2:] == ["model.safetensors.index.json", "config.json"]
    assert all(size < 61_000 for name, size in done.files if name.endswith(".safetensors"))
    for path in (tmp_path / "to").glob("*.safetensors"):
        assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0
    assert_same(hf_tensors(tmp_path / "to"), odd_tensors(SHAPE))
    llama_weights.load_llama(
        llama_weights.build_llama(SHAPE, CPU, torch.bfloat16), tmp_path / "to", SHAPE
    )


def test_dtypes_are_kept(tmp_path: Path) -> None:
    tensors = {
        name: t.float() if "norm" in name else t.half() for name, t in tensors_of(SHAPE).items()
    }
    first = hf(tmp_path / "first", tensors=tensors)
    convert.convert_checkpoint(first, tmp_path / "tp4", "megatron", 4)
    convert.convert_checkpoint(tmp_path / "tp4", tmp_path / "last", "hf", 1)
    assert_same(hf_tensors(tmp_path / "last"), tensors)
    assert json.loads((tmp_path / "last" / "config.json").read_text())["torch_dtype"] == "float16"
    assert (
        inspect_checkpoint(tmp_path / "tp4").dtype == inspect_checkpoint(first).dtype == "fp16+fp32"
    )
    tensors["model.layers.0.self_attn.k_proj.weight"] = tensors[
        "model.layers.0.self_attn.k_proj.weight"
    ].bfloat16()
    refused(
        lambda: convert.convert_checkpoint(
            hf(tmp_path / "mixed", tensors=tensors), tmp_path / "x", "megatron", 2
        ),
        "(BF16, F16); ",
    )
    assert not (tmp_path / "x").exists()


def test_what_the_files_do_not_tell(tmp_path: Path) -> None:
    write_megatron(tmp_path / "a", args={"vocab_size": None}, tensors=odd_tensors(SHAPE))
    refused(
        lambda: convert.convert_checkpoint(tmp_path / "a", tmp_path / "to", "hf", 1),
        "does not tell vocab of its model; name ",
        "--case",
    )
    write_megatron(
        tmp_path / "b", change=lambda index, file: file.pop("args"), tensors=odd_tensors(SHAPE)
    )
    missing = (
        "does not tell heads, kv_heads, head_dim, vocab, positions, rope_base, norm_eps of its"
        " model; "
    )
    refused(
        lambda: convert.convert_checkpoint(tmp_path / "b", tmp_path / "to", "hf", 1),
        missing,
        "--case",
    )
    for name in ("a", "b"):
        convert.convert_checkpoint(
            tmp_path / name, tmp_path / f"{name}-hf", "hf", 1, model_of(SHAPE)
        )
        assert_same(hf_tensors(tmp_path / f"{name}-hf"), odd_tensors(SHAPE))
    wrong = model_of(replace(SHAPE, vocab=250))
    for folder in (tmp_path / "a-hf", write_megatron(tmp_path / "c")):
        with pytest.raises(
            RequestError, match="vocab_size is 251, the case's vocab is 250; give weights of the"
        ) as caught:
            convert.convert_checkpoint(folder, tmp_path / "to", "hf", 1, wrong)
        assert "--set" not in str(caught.value)  # convert has no option --set
    assert not (tmp_path / "to").exists()


def test_layers_of_a_liar(tmp_path: Path) -> None:
    source = hf(tmp_path / "first")
    config = json.loads((source / "config.json").read_text())
    for value, fragment in (
        (10**10, "tells of 10000000000 layers and has 21 tensors; "),
        ("2", "layers is '2', allowed: a whole number above 0; "),
    ):
        (source / "config.json").write_text(json.dumps(config | {"num_hidden_layers": value}))
        refused(lambda: convert.convert_checkpoint(source, tmp_path / "to", "hf", 1), fragment)


def test_inspect(tmp_path: Path) -> None:
    shape = replace(SHAPES["bias"], rope_base=500000.0)
    write_megatron(tmp_path / "m", shape, 2, args={"rotary_base": 500000})
    found = inspect_checkpoint(tmp_path / "m")
    unusual = ("head_dim", "qk_norm", "window", "rope_scaling")
    dims = {key: value for key, value in asdict(shape).items() if key not in unusual}
    files = [
        (
            f"mp_rank_{i:02}/{FILE}",
            (tmp_path / "m/iter_0135000" / f"mp_rank_{i:02}" / FILE).stat().st_size,
        )
        for i in range(2)
    ]
    count = count_parameters(llama_weights.build_llama(shape, CPU, torch.float32))
    assert found == Inspection(
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
    done = convert.convert_checkpoint(tmp_path / "m", tmp_path / "hf", "hf", 1)
    again = inspect_checkpoint(tmp_path / "hf")
    assert (again.layout, again.tp, again.iteration, again.dtype, again.notes) == (
        "huggingface",
        1,
        None,
        "fp32",
        [],
    )
    assert again.shape == dims
    assert again.parameters == count
    assert again.files == done.files[:1]
    told = llama_weights.load_llama(
        llama_weights.build_llama(shape, CPU, torch.float32), tmp_path / "hf", shape
    )
    assert again.header_sha256 == told["header_sha256"] != found.header_sha256


def test_inspect_what_says_little(tmp_path: Path) -> None:
    write_megatron(
        tmp_path, change=lambda index, file: file.pop("args"), tensors=odd_tensors(SHAPE)
    )
    found = inspect_checkpoint(tmp_path)
    assert found.dtype == "bf16"
    assert (
        found.parameters
        == count_parameters(llama_weights.build_llama(SHAPE, CPU, torch.float32)) + 2 * 5 * 64
    )
    unknown = dict.fromkeys(("heads", "kv_heads", "vocab", "positions", "rope_base", "norm_eps"))
    assert found.shape == unknown | {
        "layers": 2,
        "hidden": 64,
        "ffn": 96,
        "qkv_bias": False,
        "tied": False,
    }
    assert "name the case of the model with --case" in found.notes[-1]


def test_inspect_another_model(tmp_path: Path) -> None:
    config = {"model_type": "gemma", "max_position_embeddings": 32}
    write(tmp_path, SHAPE, **config)
    assert (
        golden("model_type-is-gemma-allowed-llama-aquila") in inspect_checkpoint(tmp_path).notes[-1]
    )


MEMORY = """
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
@pytest.mark.parametrize("to, tp", [pytest.param("megatron", 4, marks=pytest.mark.long), ("hf", 1)])
def test_host_memory(to: str, tp: int, tmp_path: Path) -> None:
    # the Hugging Face layout joins the two shards of the embedding, the largest tensor
    largest = write_large(tmp_path / "from", 2) * (2 if to == "hf" else 1)
    command = [
        sys.executable,
        "-c",
        MEMORY,
        str(tmp_path / "from"),
        str(tmp_path / "to"),
        to,
        str(tp),
    ]
    grown = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert LARGE.vocab * LARGE.hidden * 2 // tp < grown  # the largest tensor was seen
    assert grown < 1.3 * largest, f"{grown}, largest {largest}"
