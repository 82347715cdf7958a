"""Cases made from a model's folder: what is read from config.json, what is assumed, and that the
written file reads as the same case.
"""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from fixtures.golden import golden
from steelyard.case import new_case, resolve, toml_writer
from steelyard.cli import model_case
from steelyard.errors import RequestError
from steelyard.models import families

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rope_theta": 100000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
LLAMA = {
    "family": "llama",
    "layers": 30,
    "hidden": 576,
    "heads": 9,
    "kv_heads": 3,
    "ffn": 1536,
    "vocab": 49152,
    "positions": 8192,
    "rope_base": 100000.0,
    "norm_eps": 1e-5,
    "qkv_bias": False,
    "tied": True,
    "qk_norm": False,
}
TASKS = ("alpaca", "generate", "lambada", "mmlu", "openwebtext")


def make_model_folder(parent: Path, **changes: Any) -> Path:
    """Write a model folder with a changed config.json and empty weights, and return it; "absent"
    removes a key.
    """
    folder = parent / "SmolLM2 135M"
    folder.mkdir(exist_ok=True)
    config = {key: value for key, value in {**CONFIG, **changes}.items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").touch()
    return folder


def make_new_case(parent: Path, task: str = "mmlu", **changes: Any) -> new_case.NewCase:
    """Return the case that is made from such a folder for the task."""
    return model_case.make_complete_case(
        make_model_folder(parent, **changes), task, check_tokenizer=False
    )


@pytest.mark.parametrize("task", TASKS)
def test_a_folder_becomes_a_case_of_every_task(task: str, tmp_path: Path) -> None:
    new_case = make_new_case(tmp_path, task)
    full, smoke = (resolve.resolve_case(new_case.source, size).case for size in ("full", "smoke"))
    shipped = resolve.resolve_case(new_case.template).case
    assert full.name == f"smollm2-135m-{task}"
    assert full.question.task_row.name == task == shipped.question.task_row.name
    assert {k: v for k, v in full.question.model.model_dump().items() if v is not None} == LLAMA
    assert full.question.data == shipped.question.data.model_copy(update={"fingerprint": None})
    assert full.question.train == shipped.question.train
    assert full.reference == []
    assert (full.gate is None) == (shipped.question.train is None)
    assert smoke.question.model.hidden == 64
    assert smoke.question.model.rope_base == 100000.0
    assert getattr(smoke.question.data, "made", shipped.question.load) is not None
    assert full.question.load == shipped.question.load
    assert full.question.precision.name == "bf16"


def test_the_file_reads_as_the_case_in_memory(tmp_path: Path) -> None:
    new_case = make_new_case(tmp_path)
    path = tmp_path / "mine.toml"
    path.write_text(new_case.source.text)
    for size in ("full", "smoke"):
        assert (
            resolve.resolve_case(str(path), size).case
            == resolve.resolve_case(new_case.source, size).case
        )
    origins = resolve.resolve_case(new_case.source).origins
    assert origins["question.model.layers"] == "made from config.json"
    assert origins["question.data.shots"] == "made from llama2-7b-mmlu"
    assert origins["question.seed"] == "default"
    assert not any(
        origin.startswith("made from")
        for origin in resolve.resolve_case(str(path)).origins.values()
    )
    assert "layers = 30 # num_hidden_layers\n" in new_case.source.text
    assert "rope_base = 100000.0 # rope_theta\n" in new_case.source.text
    assert all(f"# - {assumption}\n" in new_case.source.text for assumption in new_case.assumed)


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({"model_type": "qwen2"}, {"qkv_bias": True}),
        ({"model_type": "qwen3", "head_dim": 128}, {"qk_norm": True, "head_dim": 128}),
        ({"model_type": "mistral", "sliding_window": 1024}, {"window": 1024}),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 2048,
                }
            },
            {
                "rope_scaling": {
                    "kind": "llama3",
                    "factor": 8.0,
                    "low": 1.0,
                    "high": 4.0,
                    "original_positions": 2048,
                }
            },
        ),
    ],
    ids=["qwen2", "qwen3", "mistral", "llama3"],
)
def test_model_families(changes: dict[str, Any], fields: dict[str, Any], tmp_path: Path) -> None:
    """Each family is checked in both sizes; the tiny model has the same features."""
    new_case = make_new_case(tmp_path, **changes)
    for size in ("full", "smoke"):
        model = resolve.resolve_case(new_case.source, size).case.question.model.model_dump(
            mode="json"
        )
        for name, value in fields.items():
            assert (
                model[name] == value
                if size == "full" or isinstance(value, bool | dict)
                else model[name] is not None
            )


def test_assumptions_are_listed(tmp_path: Path) -> None:
    new_case = make_new_case(tmp_path, max_position_embeddings=1024, dtype="float16")
    assert resolve.resolve_case(new_case.source).case.question.data.context == 1024
    assert resolve.resolve_case(new_case.source).case.question.precision.name == "fp16"
    assert new_case.assumed == (
        golden("data-context-1024-instead-of-2048"),
        golden("precision-fp-16-as-the-weights"),
        golden("no-gate-no-accuracy-of-this"),
        golden("data-training-and-tune-as-in"),
    )
    assert "precision bf16, as in llama2-7b-mmlu" in make_new_case(tmp_path, dtype="absent").assumed
    trained = make_new_case(tmp_path, "openwebtext", max_position_embeddings=512)
    assert resolve.resolve_case(trained.source).case.question.train.length == 512
    assert trained.starts_random
    assert not make_new_case(tmp_path, "alpaca").starts_random


def test_a_folder_without_a_tokenizer_becomes_a_case_of_generated_ids(tmp_path: Path) -> None:
    made = model_case.make_complete_case(make_model_folder(tmp_path), "generate")
    assert made.assumed == (
        "data: source ids, which needs no data; with --data as in llama2-7b-generate",
        "precision bf16, as the weights are stored",
        golden("no-gate-no-accuracy-of-this"),
        "data, load and tune: as in the shipped case llama2-7b-generate",
    )
    case = resolve.resolve_case(made.source).case
    assert (case.question.data.source, case.question.data.prompt_tokens) == ("ids", 1024)
    assert case.about == "As llama2-7b-generate, with prompts that need no data."
    assert case.slo is None
    assert "--data" not in made.source.text.split("[question]")[1].split("[tune]")[0]


@pytest.mark.parametrize(
    ("positions", "lengths"),
    [(1280, (1024, 256)), (1279, (1024, 255)), (1000, (800, 200)), (64, (52, 12))],
)
def test_prompt_and_output_are_cut_to_the_positions(
    positions: int, lengths: tuple[int, int], tmp_path: Path
) -> None:
    made = make_new_case(tmp_path, "generate", max_position_embeddings=positions)
    data = resolve.resolve_case(made.source).case.question.data
    assert (data.prompt_tokens, data.output_tokens) == lengths
    cut = [line for line in made.assumed if line.startswith("data.")]
    assert cut == [
        f"data.{name} {length} instead of {before}: the model has no more positions"
        for name, length, before in zip(
            ("prompt_tokens", "output_tokens"), lengths, (1024, 256), strict=True
        )
        if length != before
    ]


@pytest.mark.process
@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"auto_map": {"AutoModelForCausalLM": "modeling.Mine"}, "model_type": "mine"},
            "auto_map names code of the folder",
        ),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            "its weights are quantized, which is not supported",
        ),
        (
            {"num_hidden_layers": "absent"},
            "does not state num_hidden_layers; give a complete config.json",
        ),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "rope_type is 'dynamic', which depends on the length",
        ),
    ],
)
def test_unsupported_models_are_refused(changes: dict[str, Any], line: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=line):
        make_new_case(tmp_path, **changes)


def test_incomplete_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="is not a folder; give a Hugging Face folder"):
        model_case.make_complete_case(tmp_path / "absent", "mmlu")
    with pytest.raises(RequestError, match=r"config\.json: cannot be read"):
        model_case.make_complete_case(tmp_path, "mmlu")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(
        RequestError, match=r"has neither model\.safetensors nor model\.safetensors\.index\.json"
    ):
        model_case.make_complete_case(tmp_path, "mmlu")
    with pytest.raises(RequestError, match="no tokenizer found"):
        model_case.make_complete_case(make_model_folder(tmp_path), "mmlu")
    with pytest.raises(RequestError, match=r"--task 'mmul': did you mean 'mmlu'\?"):
        model_case.make_complete_case(tmp_path, "mmul")


def test_templates_are_one_for_each_task() -> None:
    assert sorted(new_case.find_templates()) == list(TASKS)
    works = families.LLAMA.works
    assert all(
        resolve.resolve_case(name).case.question.task_row.work in works
        for name in new_case.find_templates().values()
    )


def test_case_names_from_folder_names() -> None:
    assert new_case.make_case_name("SmolLM2 135M", "mmlu") == "smollm2-135m-mmlu"
    assert new_case.make_case_name("你好", "mmlu") == "model-mmlu"
    assert len(new_case.make_case_name("x" * 200, "mmlu")) == 64


def test_toml_round_trip() -> None:
    table = {
        "text": 'a "quoted"\nline \x7f \\ 你好 🦙',
        "numbers": [1, -2.5, 1e-06, True],
        "mixed": [{"a": 1, "b.c": "x"}],
        "none": None,
        "inner": {"a key": 1, "deeper": {"empty": {}, "x.z": {"y": 0.1}}},
    }
    text = toml_writer.format_toml(table, {"text": "two\nlines", "inner": "a table"})
    assert "[inner] # a table\n" in text
    assert "# two lines\n" in text
    assert tomllib.loads(text) == {key: value for key, value in table.items() if value is not None}
    with pytest.raises(ValueError, match="a case cannot hold nan"):
        toml_writer.format_toml({"x": float("nan")}, {})


def test_code_in_the_folder_of_a_known_type_is_not_needed(tmp_path: Path) -> None:
    """Folders of Aquila2 name Python code of their own, which Steelyard does not need."""
    new_case = make_new_case(
        tmp_path,
        model_type="aquila",
        auto_map={"AutoModelForCausalLM": "modeling_aquila.AquilaForCausalLM"},
    )
    assert resolve.resolve_case(new_case.source).case.question.model.family == "llama"
