"""Engine transformers with models of any type: answers equal those of a plain loop, FLOPs those
that torch counts.
"""

import json
from contextlib import nullcontext
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from fixtures.own_models import MODEL_TYPES, SIZES, make_own_case, save_random_model
from steelyard.accelerators.cpu_torch import CpuTorchDevice
from steelyard.case.resolve import ResolvedCase
from steelyard.engine import engine_rows
from steelyard.engine.job import Job
from steelyard.engine.work import Work
from steelyard.engines.torch.tensor_parallel import TensorParallelGroup
from steelyard.engines.transformers import auto_model, probe
from steelyard.errors import RequestError
from steelyard.plan import degrees, flops
from steelyard.plan.degrees import Plan
from steelyard.tasks.task import Sources
from steelyard.weights import hf_folder

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("one_thread")
GENERATED_DATA = {
    "mmlu": (
        "question.data.made={subjects = 2, questions = 4}",
        "question.data.subjects=2",
        "question.data.context=200",
    ),
    "lambada": ("question.data.made={passages = 6}", "question.data.rows=6"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One saved model of each type, by name."""
    parent = tmp_path_factory.mktemp("models")
    return {name: save_random_model(name, parent) for name in MODEL_TYPES}


def build_engine(resolved: ResolvedCase, weights: Path | None) -> Any:
    """Build engine transformers for one rank on a CPU, with generated data."""
    case, plan = resolved.case, Plan(nodes=1, devices=1, tp=1, pp=1, dp=1, launcher="local")
    question = case.question
    job = Job(
        case=case,
        work=question.task_row.work,
        inputs=question.task_row.prepare(
            question.describe_for_task(Sources(None, None, None), None, True, {})
        ).inputs,
        weights=weights,
        device=CpuTorchDevice(0, monotonic),
        rank=0,
        world=1,
        plan=plan,
        place=degrees.find_position(plan, 0),
        group=TensorParallelGroup(),
        steps=None,
    )
    return engine_rows.load_engine("transformers", question.task_row.work)(job)


def run_infer_pass(engine: Any) -> dict[str, Any]:
    """Run the infer pass and return its outputs, ordered by item."""
    engine.prepare("infer", lambda part: nullcontext())
    assert sum(isinstance(item, Work) for item in engine.work("infer")) == engine.total("infer")
    table: dict[str, Any] = engine.outputs("infer")
    order = sorted(range(len(table["items"])), key=table["items"].__getitem__)
    return {name: [column[i] for i in order] for name, column in table.items()}


def load_hf_model(folder: Path) -> Any:
    """Load a model by transformers alone, in fp32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("name", MODEL_TYPES)
def test_choices_equal_a_loop_over_single_prompts(name: str, folders: dict[str, Path]) -> None:
    """The engine pads prompts of several lengths to a batch; the loop takes one prompt at a
    time.
    """
    scoring_engine = build_engine(
        make_own_case(folders[name], "mmlu", *GENERATED_DATA["mmlu"], "tune.batch_tokens=800"),
        folders[name],
    )
    outputs, texts, model = (
        run_infer_pass(scoring_engine),
        scoring_engine.job.inputs,
        load_hf_model(folders[name]),
    )
    assert len({len(row) for row in texts.rows}) > 4
    assert len(scoring_engine.batches.in_pass) > 1
    for i, row in enumerate(texts.rows):
        with torch.inference_mode():
            logits = model(torch.tensor([row])).logits[0, -1]
        assert outputs["best"][i] == int(logits.argmax())
        assert outputs["choice"][i] == int(logits[list(texts.letters)].argmax())
    assert scoring_engine.weights["source"] == "huggingface"


@pytest.mark.parametrize("name", MODEL_TYPES)
def test_losses_equal_a_loop_over_single_passages(name: str, folders: dict[str, Path]) -> None:
    scoring_engine = build_engine(
        make_own_case(
            folders[name], "lambada", *GENERATED_DATA["lambada"], "tune.batch_tokens=300"
        ),
        folders[name],
    )
    outputs, texts, model = (
        run_infer_pass(scoring_engine),
        scoring_engine.job.inputs,
        load_hf_model(folders[name]),
    )
    for i, row in enumerate(texts.rows):
        with torch.inference_mode():
            logits = model(torch.tensor([row])).logits[0].double().log_softmax(-1)
        expected = -sum(
            float(logits[position - 1, row[position]]) for position in range(1, len(row))
        )
        assert outputs["nll"][i] == pytest.approx(expected, rel=1e-5)
    assert len({round(loss, 3) for loss in outputs["nll"]}) == len(texts.rows)


@pytest.mark.parametrize("name", MODEL_TYPES)
def test_flops_equal_those_that_torch_counts_in_a_forward(
    name: str, folders: dict[str, Path]
) -> None:
    """On a CPU with real values, where experts are chosen, and for a length that was not used for
    counting.
    """
    shape = make_own_case(folders[name], "mmlu").case.question.model
    tokens = 40
    model = auto_model.make_causal_lm(
        auto_model.config_of_model(shape),
        experts="batched_mm" if shape.config.get("num_experts_per_tok") else None,
    )
    # eager attention is counted as matmuls; fused CPU kernels are not counted
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        model(torch.arange(tokens)[None] + 3, use_cache=False)
    counts = {
        "tokens": tokens,
        "logits": tokens,
        "square": tokens**2,
        "pairs": tokens * (tokens + 1) // 2,
    }
    assert flops.count_profiled_flops(shape, counts) == counter.get_total_flops()
    assert flops.count_model_parameters(shape) == sum(
        parameter.numel() for parameter in model.parameters()
    )
    assert flops.count_causal_flops(shape, counts) < flops.count_profiled_flops(shape, counts)


def test_random_weights_depend_on_the_seed_alone(folders: dict[str, Path]) -> None:
    resolved = make_own_case(folders["olmo2"], "mmlu", *GENERATED_DATA["mmlu"])
    first, second = (build_engine(resolved, None) for _ in range(2))
    assert run_infer_pass(first) == run_infer_pass(second)
    assert first.weights == {"source": "random", "seed": 0}
    assert first.details()["flops"] == auto_model.COUNTED_BY
    assert first.details()["class"] == "Olmo2ForCausalLM"


def test_a_case_with_wrong_flops_is_refused(folders: dict[str, Path]) -> None:
    """Otherwise a record could claim more work than the model does."""
    resolved = make_own_case(folders["gpt2"], "mmlu", *GENERATED_DATA["mmlu"])
    question = resolved.case.question
    model = question.model.model_copy(update={"token_flops": question.model.token_flops * 2})
    case = resolved.case.model_copy(
        update={"question": question.model_copy(update={"model": model})}
    )
    with pytest.raises(
        RequestError,
        match=r"question\.model\.token_flops is \d+, but \d+ were counted here",
    ):
        build_engine(ResolvedCase(case, {}, ""), None).prepare("infer", lambda part: nullcontext())


def test_weights_of_another_model_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    resolved = make_own_case(folders["gpt2"], "mmlu", *GENERATED_DATA["mmlu"])
    check = resolved.case.question.check_weights
    check(folders["gpt2"])
    with pytest.raises(
        RequestError,
        match=r"not the case's model \(model_type 'phi3'\): .*the case's model_type is 'gpt2'",
    ):
        check(folders["phi3"])
    deeper_folder = save_random_model("gpt2", tmp_path, n_layer=3)
    with pytest.raises(
        RequestError, match=r"not the case's model: .*n_layer is 3, the case's is 2"
    ):
        check(deeper_folder)


def test_a_missing_tensor_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    """transformers would fill it with random numbers."""
    resolved, source = (
        make_own_case(folders["olmo2"], "mmlu", *GENERATED_DATA["mmlu"]),
        folders["olmo2"],
    )
    tensors = load_file(source / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    with pytest.raises(RequestError, match=r"missing keys: model\.layers\.1\.mlp\.up_proj\.weight"):
        build_engine(resolved, tmp_path).prepare("infer", lambda part: nullcontext())


def test_types_without_a_causal_model_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit"}))
    with pytest.raises(
        RequestError,
        match=r"model_type is 'vit', and transformers .* has no causal language model of that type",
    ):
        probe.describe_folder(tmp_path)


def test_config_keys_that_override_a_default_with_null_are_listed(tmp_path: Path) -> None:
    """TOML has no null, so a key that is null against its default is listed by name."""
    folder = save_random_model("gemma2", tmp_path, final_logit_softcapping=None)
    path = folder / "config.json"
    assert json.loads(path.read_text())["final_logit_softcapping"] is None
    description = probe.describe_folder(folder)["model"]
    assert description["null"] == ["final_logit_softcapping"]
    assert (
        auto_model.make_library_config(
            "gemma2", description["config"], description["null"]
        ).final_logit_softcapping
        is None
    )
    assert (
        auto_model.make_library_config("gemma2", description["config"], []).final_logit_softcapping
        == 30.0
    )


def change_config(folder: Path, **changes: Any) -> Path:
    """Change keys of the folder's config.json and return the folder."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def test_a_config_of_an_older_transformers_is_kept_as_written(tmp_path: Path) -> None:
    """transformers moves rope_theta into rope_scaling; a case keeps what the folder says."""
    scaled = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256}
    folder = save_random_model("llama", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config.pop("rope_parameters")
    (folder / "config.json").write_text(
        json.dumps(config | {"rope_theta": 20000.0, "rope_scaling": scaled})
    )
    model = make_own_case(folder, "mmlu").case.question.model
    assert (model.config["rope_theta"], model.config["rope_scaling"]) == (20000.0, scaled)
    hf_folder.check_auto_folder(folder, model)


def test_auto_map_is_ignored_if_the_library_has_the_class(tmp_path: Path) -> None:
    folder = change_config(
        save_random_model("phi3", tmp_path),
        auto_map={"AutoConfig": "configuration_phi3.Phi3Config"},
    )
    model = make_own_case(folder, "mmlu").case.question.model
    hf_folder.check_auto_folder(folder, model)
    assert "auto_map" not in model.config


def test_quantized_weights_are_refused(tmp_path: Path) -> None:
    folder = save_random_model("olmo2", tmp_path)
    model = make_own_case(folder, "mmlu").case.question.model
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.mlp.up_proj.weight"
    save_file(tensors | {name: tensors[name].to(torch.float8_e4m3fn)}, path, {"format": "pt"})
    with pytest.raises(
        RequestError,
        match=f"{name} is stored in F8_E4M3, allowed: F64, F32, F16, BF16; give weights that are"
        " not quantized",
    ):
        auto_model.load_auto_model(model, folder, CPU, torch.float32, 0)
    change_config(folder, quantization_config={"quant_method": "fp8"})
    for check in (
        lambda: hf_folder.check_auto_folder(folder, model),
        lambda: hf_folder.read_hf_folder(folder),
    ):
        with pytest.raises(RequestError, match="its weights are quantized, which is not supported"):
            check()


def test_a_model_without_causal_attention_is_refused(tmp_path: Path) -> None:
    config = auto_model.make_library_config("bert", {**SIZES, "is_decoder": False}, [])
    with pytest.raises(
        RequestError, match="tokens see later tokens: it is not a causal language model"
    ):
        auto_model.split_model(auto_model.make_causal_lm(config), CPU)


def test_flops_of_models_without_a_pair_mask_are_counted() -> None:
    config = {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "ffn_dim": 48,
        "vocab_size": 512,
    }
    config |= {"max_position_embeddings": 512, "word_embed_proj_dim": 32}
    counted = auto_model.count_model(auto_model.make_library_config("opt", config, []))
    assert (counted.token_flops, counted.pair_flops) == (
        2 * 2 * (4 * 32 * 32 + 2 * 32 * 48),
        2 * 4 * 32,
    )


def test_a_config_that_the_class_refuses_gives_one_line() -> None:
    scaled = {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}
    with pytest.raises(
        RequestError, match="transformers does not take this configuration of 'phi3': "
    ):
        auto_model.make_library_config(
            "phi3", {**SIZES, "rope_scaling": scaled, "original_max_position_embeddings": 64}, []
        )
