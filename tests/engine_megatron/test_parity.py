"""Engine megatron against engine torch, over real processes: losses, gradient norms and scores are
equal under every plan.

Needs megatron-core, which has a virtual environment of its own: `make engine-megatron`.
"""

import json
import math
import os
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

if find_spec("megatron") is None:
    pytest.skip(
        "megatron-core is not installed here; run make engine-megatron", allow_module_level=True
    )

from engine_megatron.plans import ALPACA, CORPUS, KEEP_EVERY, LAMBADA, MMLU, SETTINGS, run_engine
from fixtures.huggingface import make_tensors, write_hf_folder
from fixtures.megatron import write_megatron
from steelyard.case import resolve
from steelyard.engines.torch.score import TorchScore
from steelyard.engines.torch.train import TorchTrain
from steelyard.models.llama import LlamaShape
from steelyard.weights import llama_weights

HERE = Path(__file__).parent
TESTS = HERE.parent
RELATIVE_TOLERANCE = 1e-5  # relative error of fp32
TIED = {"question.model.tied": "true", "question.model.qkv_bias": "true"}
OVERFLOWING_SCALE = 2.0**24  # the first fp16 steps overflow and are skipped
# one step at a negligible learning rate: weights stay as they were initialized
WITHOUT_TRAINING = {
    "question.train.steps": 1,
    "question.train.lr": 1e-12,
    "question.train.min_lr": 1e-12,
}
FEW_STEPS = {"question.train.steps": 4}  # 16-bit matmuls on a CPU are slow


def make_run(
    name: str, case: str = CORPUS, /, *, question: dict | None = None, **tune: object
) -> dict:
    """Return a run for plans.py. `question` holds settings that engine torch must share; keyword
    arguments are tune settings of Megatron's run alone.
    """
    tune_settings = {f"tune.{key}": value for key, value in tune.items()}
    return {
        "name": name,
        "case": case,
        "settings": {**(question or {}), **tune_settings},
        "asked": question or {},
    }


RUNS: dict[int, list[dict]] = {
    1: [
        make_run("single"),
        make_run("recomputed", recompute="full"),
        make_run("tied", question=TIED),
        make_run("compiled", compile="true"),
        make_run("alpaca", ALPACA),
        make_run("alpaca unpacked", ALPACA, pack="false"),
        make_run("lambada", LAMBADA),
        make_run("read", recompute="none") | {"weights": "hf"},
        make_run("bf16", question=FEW_STEPS) | {"precision": "bf16"},
        make_run("bf16 still", question=WITHOUT_TRAINING) | {"precision": "bf16"},
        make_run("rounded weights", question=WITHOUT_TRAINING)
        | {
            "precision": "bf16",
            "bug": "rounded_weights",
        },
        make_run("fused loss", question=FEW_STEPS, compile="true") | {"bug": "fused_loss"},
        make_run("decay everything") | {"bug": "no_scheduler"},
        make_run("schedule divides", question=FEW_STEPS) | {"bug": "schedule_divides"},
    ],
    2: [
        make_run("TP2", parallel="TP2") | {"keep": "tp2"},
        make_run("PP2", parallel="PP2"),
        make_run("DP2", parallel="DP2"),
        make_run("DP2 sharded", parallel="DP2", sharding=1) | {"keep": "dp2"},
        make_run("TP2 recomputed", ALPACA, parallel="TP2", recompute="selective"),
        make_run("PP2 recomputed", parallel="PP2", recompute="full") | {"weights": "hf"},
        make_run("DP2 sharded alpaca", ALPACA, parallel="DP2", sharding=1, recompute="full"),
        make_run("TP2 read from Megatron", parallel="TP2") | {"weights": "megatron"},
        make_run("TP2 resumed", parallel="TP2") | {"resume": "tp2"},
        make_run("DP2 sharded resumed", parallel="DP2", sharding=1) | {"resume": "dp2"},
        make_run("fp16", parallel="PP2")
        | {
            "keep": "fp16",
            "precision": "fp16",
            "scale": OVERFLOWING_SCALE,
        },
        make_run("fp16 resumed", parallel="PP2") | {"resume": "fp16", "precision": "fp16"},
        make_run("bf16 sharded", question=FEW_STEPS, parallel="DP2", sharding=1)
        | {"precision": "bf16"},
        make_run("bf16 sharded still", question=WITHOUT_TRAINING, parallel="DP2", sharding=1)
        | {"precision": "bf16"},
        make_run("TP2 uninitialized", question=FEW_STEPS, parallel="TP2")
        | {"bug": "no_initialization"},
        make_run("DP2 lambada", LAMBADA, parallel="DP2"),
        make_run("TP2 mmlu", MMLU, parallel="TP2"),
        make_run("TP2 lambada", LAMBADA, parallel="TP2") | {"weights": "hf"},
    ],
    4: [
        make_run("TP2PP2", parallel="TP2PP2"),
        make_run("TP2DP2", parallel="TP2DP2"),
        make_run("PP2DP2 sharded", parallel="PP2DP2", sharding=1),
    ],
}
WORLD_SIZES = {one["name"]: world for world, runs in RUNS.items() for one in runs}
RUNS_BY_NAME = {one["name"]: one for runs in RUNS.values() for one in runs}
TRAINING_RUNS = [
    one["name"]
    for one in RUNS_BY_NAME.values()
    if one["case"] in (CORPUS, ALPACA) and not one.keys() & {"precision", "bug", "resume"}
]
LOW_PRECISION_RUNS = [
    one["name"]
    for one in RUNS_BY_NAME.values()
    if "precision" in one and not one.keys() & {"bug", "resume"}
]
SCORING_RUNS = [one["name"] for one in RUNS_BY_NAME.values() if one["case"] in (LAMBADA, MMLU)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the results of all runs, executed once by real processes."""
    out = tmp_path_factory.mktemp("megatron")
    for case in (CORPUS, LAMBADA):
        shape = llama_weights.get_llama_shape(
            resolve.resolve_case(case, "smoke", settings=[*SETTINGS[case]]).case.question.model
        )
        for name in ("hf", "megatron"):
            (out / f"{name}-{case}").mkdir()
        write_hf_folder(out / f"hf-{case}", shape, make_trainable_tensors(shape))
        write_megatron(out / f"megatron-{case}", shape, 1, tensors=make_trainable_tensors(shape))
    for world, runs in RUNS.items():
        launch_ranks(out, world, [add_paths(run, out) for run in runs])
    return out


def make_trainable_tensors(shape: LlamaShape) -> dict[str, torch.Tensor]:
    """Return weights by Hugging Face name, scaled so that a model can be trained from them."""
    tensors = make_tensors(shape)
    return {
        name: 1 + tensor / 8 if tensor.dim() == 1 else tensor / math.sqrt(tensor.shape[-1])
        for name, tensor in tensors.items()
    }


def add_paths(run: dict, out: Path) -> dict:
    """Return a run with its checkpoint and weight names replaced by paths."""
    places = {key: str(out / "kept" / run[key]) for key in ("keep", "resume") if key in run}
    weights = {"weights": str(out / f"{run['weights']}-{run['case']}")} if "weights" in run else {}
    return run | places | weights


def launch_ranks(out: Path, world: int, runs: list[dict]) -> None:
    """Execute runs in `world` processes and fail the test if one exits with an error."""
    (out / f"asked-{world}.json").write_text(json.dumps(runs))
    torchrun = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={world}",
        "--max-restarts=0",
    ]
    program = [str(HERE / "plans.py"), str(out / f"asked-{world}.json"), str(out), str(world)]
    command = [sys.executable, *(torchrun if world > 1 else []), *program]
    path = os.pathsep.join(
        map(str, (TESTS / "fixtures" / "megatron_cpu", TESTS.parent / "src", TESTS))
    )
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=600, env=env
    )
    assert done.returncode == 0, done.stderr[-9000:]


@cache
def read_rank_results(folder: Path, name: str) -> list[dict]:
    """Return the results of a run, one dict per rank."""
    world = WORLD_SIZES[name]
    return [
        json.loads((folder / f"rank-{i}-of-{world}.json").read_text())[name] for i in range(world)
    ]


def torch_results(folder: Path, name: str) -> dict:
    """Return the results of engine torch on the same question, in one process."""
    run = RUNS_BY_NAME[name]
    packed = {key: value for key, value in run["settings"].items() if key == "tune.pack"}
    torch_run = {"settings": {**run["asked"], **packed}} | {
        key: run[key] for key in ("case", "precision", "weights", "scale") if key in run
    }
    return _cached_torch_results(json.dumps(add_paths(torch_run, folder)))


@cache
def _cached_torch_results(run_json: str) -> dict:
    return run_engine(json.loads(run_json), 0, 1, {"train": TorchTrain, "score": TorchScore})[0]


def max_relative_error(values: list[float], expected: list[float]) -> float:
    """Return the largest difference as a fraction of the expected value."""
    return max(abs(a - b) / abs(b) for a, b in zip(values, expected, strict=True))


@pytest.mark.parametrize("name", TRAINING_RUNS)
def test_every_plan_learns_what_engine_torch_learns(folder: Path, name: str) -> None:
    expected, results = torch_results(folder, name), read_rank_results(folder, name)
    assert len(expected["losses"]) == 10
    for rank in results:  # every rank reports them
        assert max_relative_error(rank["losses"], expected["losses"]) <= RELATIVE_TOLERANCE
        assert max_relative_error(rank["norms"], expected["norms"]) <= RELATIVE_TOLERANCE
        assert rank["source"] == expected["source"]
        assert rank["phases"] == (
            ["data", "compute"] if len(results) == 1 else ["data", "meet", "compute"]
        )
    replicas = {rank["place"][2]: rank for rank in results}
    for when in ("before", "after"):
        assert all(
            rank[when] == pytest.approx(replicas[rank["place"][2]][when], rel=RELATIVE_TOLERANCE)
            for rank in results
        )
        assert sum(rank[when]["nll"] for rank in replicas.values()) == pytest.approx(
            expected[when]["nll"], rel=RELATIVE_TOLERANCE
        )
        assert sum(rank[when]["targets"] for rank in replicas.values()) == expected[when]["targets"]
    for step, rows in enumerate(expected["rows"]):
        assert sorted(row for rank in replicas.values() for row in rank["rows"][step]) == sorted(
            rows
        )


def test_the_torch_runs_compared_with_learn(folder: Path) -> None:
    for name in ("single", "alpaca", "read", "tied"):
        results = torch_results(folder, name)
        assert results["losses"][-1] < results["losses"][0] - 0.5
        assert results["after"]["nll"] < results["before"]["nll"]
    # clip=2.0 applies to some steps, not to all
    assert (
        max(torch_results(folder, "single")["norms"])
        > 2.0
        > min(torch_results(folder, "single")["norms"])
    )
    first = {
        round(torch_results(folder, name)["losses"][0], 4)
        for name in ("single", "alpaca", "read", "tied")
    }
    assert len(first) == 4


@pytest.mark.parametrize("name", LOW_PRECISION_RUNS)
def test_16_bits_stay_near_engine_torch(folder: Path, name: str) -> None:
    expected = torch_results(folder, name)
    for rank in read_rank_results(folder, name):
        assert max_relative_error(rank["losses"], expected["losses"]) <= 0.01
        taken = [math.isfinite(norm) for norm in rank["norms"]]
        assert taken == [math.isfinite(norm) for norm in expected["norms"]]
        assert all(taken) == (name != "fp16")
        finite_norms = [
            [n for n in norms if math.isfinite(n)] for norms in (rank["norms"], expected["norms"])
        ]
        assert max_relative_error(*finite_norms) <= 0.03
        types = rank["details"]["dtypes"]
        assert types.pop("parameters") == RUNS_BY_NAME[name]["precision"]
        assert types == {"main_parameters": "fp32", "gradients": "fp32", "states": "fp32"}


@pytest.mark.parametrize("name", ["TP2", "DP2 sharded", "fp16"])
def test_training_resumes_from_a_checkpoint(folder: Path, name: str) -> None:
    """If weights, moments, counters or the loss scale were lost, the next losses would differ."""
    for uninterrupted, resumed in zip(
        read_rank_results(folder, name), read_rank_results(folder, f"{name} resumed"), strict=True
    ):
        assert len(resumed["losses"]) == 10 - KEEP_EVERY
        assert max_relative_error(resumed["losses"], uninterrupted["losses"][KEEP_EVERY:]) <= 1e-6
        assert max_relative_error(resumed["norms"], uninterrupted["norms"][KEEP_EVERY:]) <= 1e-6
        assert resumed["after"] == pytest.approx(uninterrupted["after"], rel=1e-6)


def answers_agree(values: list, expected: list) -> bool:
    """Return whether numbers are near each other and lists of tokens equal."""
    return all(
        a == (b if isinstance(b, list) else pytest.approx(b, rel=RELATIVE_TOLERANCE))
        for a, b in zip(values, expected, strict=True)
    )


@pytest.mark.parametrize("name", SCORING_RUNS)
def test_scores_equal_those_of_engine_torch(folder: Path, name: str) -> None:
    expected, results = torch_results(folder, name), read_rank_results(folder, name)
    for when in ("val", "infer"):
        answers: dict[int, list] = {}
        for rank in results:
            outputs = dict(rank[when])
            for item, *values in zip(outputs.pop("items"), *outputs.values(), strict=True):
                assert rank["place"][0] == 0 or answers_agree(answers[item], values)
                answers.setdefault(item, values)
        expected_outputs = dict(expected[when])
        for item, *values in zip(
            expected_outputs.pop("items"), *expected_outputs.values(), strict=True
        ):
            assert answers_agree(answers.pop(item), values)
        assert answers == {}
    assert all(rank["source"] == expected["source"] for rank in results)


def test_details_name_the_library_and_count_what_a_rank_holds(folder: Path) -> None:
    whole = read_rank_results(folder, "single")[0]["details"]
    assert whole["library"].startswith("megatron-core 0.16.")
    assert whole["library"].endswith(", without Transformer Engine")
    assert whole["optimizer"] == "FP32Optimizer of torch.optim.adamw"
    assert whole["dtypes"] == {
        "parameters": "fp32",
        "main_parameters": "fp32",
        "gradients": "fp32",
        "states": "fp32",
    }
    assert whole["optimizer_states"] == 2 * whole["parameters"]
    # norms are replicated: 5 of 64 numbers; both embedding tables are padded from 251 to 256 rows
    norms, padding = 5 * 64, 2 * (256 - 251) * 64
    for rank in read_rank_results(folder, "TP2"):
        assert rank["details"]["parameters"] == (whole["parameters"] - norms + padding) // 2 + norms
    assert (
        sum(rank["details"]["parameters"] for rank in read_rank_results(folder, "PP2"))
        == whole["parameters"]
    )
    sharded = read_rank_results(folder, "DP2 sharded")
    assert {rank["details"]["optimizer"] for rank in sharded} == {
        "DistributedOptimizer of torch.optim.adamw"
    }
    assert {rank["details"]["parameters"] for rank in sharded} == {whole["parameters"]}
    assert sum(rank["held"] for rank in sharded) == whole["parameters"]
    assert sum(rank["details"]["optimizer_states"] for rank in sharded) == whole["optimizer_states"]
    assert (
        max(rank["details"]["optimizer_states"] for rank in sharded)
        < 0.6 * whole["optimizer_states"]
    )
    assert {rank["details"]["optimizer_states"] for rank in read_rank_results(folder, "DP2")} == {
        whole["optimizer_states"]
    }
    score = read_rank_results(folder, "TP2 mmlu")[0]["details"]
    assert (score["library"], score["dtypes"]) == (whole["library"], {"parameters": "fp32"})


def test_tensor_parallel_parameters_are_marked(folder: Path) -> None:
    """`perform_initialization=False` leaves parameters unmarked, and a norm counts those of one
    rank only.
    """
    for rank in read_rank_results(folder, "TP2"):
        assert sum("layernorm" in name for name in rank["marked"]) == 0
        assert len(rank["marked"]) == 4 * 2 + 2
    expected = torch_results(folder, "TP2")
    for rank in read_rank_results(folder, "TP2 uninitialized"):
        assert rank["marked"] == []
        assert max_relative_error(rank["losses"][:1], expected["losses"][:1]) <= RELATIVE_TOLERANCE
        assert max_relative_error(rank["norms"][:1], expected["norms"][:1]) > 0.01


def test_weights_of_norms_have_no_weight_decay(folder: Path) -> None:
    """Megatron's groups express it by a multiplier that only its scheduler reads."""
    [rank] = read_rank_results(folder, "single")
    assert rank["decay"] == [[1.0, 0.5], [0.0, 0.0]]
    [wrong] = read_rank_results(folder, "decay everything")
    expected = torch_results(folder, "single")
    assert wrong["losses"][0] == pytest.approx(expected["losses"][0], rel=RELATIVE_TOLERANCE)
    assert (
        max_relative_error(wrong["losses"][-1:], expected["losses"][-1:]) > 10 * RELATIVE_TOLERANCE
    )


@pytest.mark.parametrize("name", ["bf16 still", "bf16 sharded still"])
def test_main_weights_start_unrounded_in_fp32(folder: Path, name: str) -> None:
    """Megatron by itself copies them from bf16 parameters, which hides updates of less than half a
    step of bf16.
    """
    for rank in read_rank_results(folder, name):
        assert 0 < rank["rounded"] < 0.1 * rank["held"]
    [wrong] = read_rank_results(folder, "rounded weights")
    assert wrong["rounded"] > 0.999 * wrong["held"]  # the step moves weights near 0
    assert wrong["losses"] == read_rank_results(folder, "bf16 still")[0]["losses"]  # not in losses


def test_the_fused_loss_rounds_gradients_to_bf16(folder: Path) -> None:
    """It does so even for fp32 logits; the loss itself is right."""
    [wrong] = read_rank_results(folder, "fused loss")
    expected = torch_results(folder, "fused loss")
    assert wrong["losses"][0] == pytest.approx(expected["losses"][0], rel=RELATIVE_TOLERANCE)
    assert max_relative_error(wrong["norms"][:1], expected["norms"][:1]) > 10 * RELATIVE_TOLERANCE


def test_a_schedule_that_divides_by_micro_batches_gives_wrong_norms(folder: Path) -> None:
    """With `calculate_per_token_loss=False` it divides the returned loss, in place, and all
    gradients by the number of micro-batches.
    """
    [wrong] = read_rank_results(folder, "schedule divides")
    expected = torch_results(folder, "single")
    assert wrong["details"]["micro_batches"] == 4
    # the loss that is reported was cloned before it was divided
    assert wrong["losses"][0] == pytest.approx(expected["losses"][0], rel=RELATIVE_TOLERANCE)
    assert 4 * wrong["norms"][0] == pytest.approx(expected["norms"][0], rel=RELATIVE_TOLERANCE)
