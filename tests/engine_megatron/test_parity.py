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

from engine_megatron.plans import ALPACA, CORPUS, KEEP_EVERY, LAMBADA, MMLU, SETTINGS, answer
from fixtures.huggingface import tensors_of, write
from fixtures.megatron import write_megatron
from steelyard.case import resolve
from steelyard.engines.torch.score import TorchScore
from steelyard.engines.torch.train import TorchTrain
from steelyard.models.llama import LlamaShape
from steelyard.weights import llama_weights

HERE = Path(__file__).parent
TESTS = HERE.parent
NEAR = 1e-5  # relative error of fp32
TIED = {"question.model.tied": "true", "question.model.qkv_bias": "true"}
HUGE = 2.0**24  # the first fp16 steps overflow and are skipped
# one step at a negligible learning rate: weights stay as they were initialized
STILL = {"question.train.steps": 1, "question.train.lr": 1e-12, "question.train.min_lr": 1e-12}
FEW = {"question.train.steps": 4}  # 16-bit matmuls on a CPU are slow


def run(name: str, case: str = CORPUS, /, *, of: dict | None = None, **tune: object) -> dict:
    """Return a run for plans.py. `question` holds settings that engine torch must share; keyword
    arguments are tune settings of Megatron's run alone.
    """
    how = {f"tune.{key}": value for key, value in tune.items()}
    return {"name": name, "case": case, "settings": {**(of or {}), **how}, "asked": of or {}}


RUNS: dict[int, list[dict]] = {
    1: [
        run("single"),
        run("recomputed", recompute="full"),
        run("tied", of=TIED),
        run("compiled", compile="true"),
        run("alpaca", ALPACA),
        run("alpaca unpacked", ALPACA, pack="false"),
        run("lambada", LAMBADA),
        run("read", recompute="none") | {"weights": "hf"},
        run("bf16", of=FEW) | {"precision": "bf16"},
        run("bf16 still", of=STILL) | {"precision": "bf16"},
        run("rounded weights", of=STILL) | {"precision": "bf16", "bug": "rounded_weights"},
        run("fused loss", of=FEW, compile="true") | {"bug": "fused_loss"},
        run("decay everything") | {"bug": "no_scheduler"},
        run("schedule divides", of=FEW) | {"bug": "schedule_divides"},
    ],
    2: [
        run("TP2", parallel="TP2") | {"keep": "tp2"},
        run("PP2", parallel="PP2"),
        run("DP2", parallel="DP2"),
        run("DP2 sharded", parallel="DP2", sharding=1) | {"keep": "dp2"},
        run("TP2 recomputed", ALPACA, parallel="TP2", recompute="selective"),
        run("PP2 recomputed", parallel="PP2", recompute="full") | {"weights": "hf"},
        run("DP2 sharded alpaca", ALPACA, parallel="DP2", sharding=1, recompute="full"),
        run("TP2 read from Megatron", parallel="TP2") | {"weights": "megatron"},
        run("TP2 resumed", parallel="TP2") | {"resume": "tp2"},
        run("DP2 sharded resumed", parallel="DP2", sharding=1) | {"resume": "dp2"},
        run("fp16", parallel="PP2") | {"keep": "fp16", "precision": "fp16", "scale": HUGE},
        run("fp16 resumed", parallel="PP2") | {"resume": "fp16", "precision": "fp16"},
        run("bf16 sharded", of=FEW, parallel="DP2", sharding=1) | {"precision": "bf16"},
        run("bf16 sharded still", of=STILL, parallel="DP2", sharding=1) | {"precision": "bf16"},
        run("TP2 uninitialized", of=FEW, parallel="TP2") | {"bug": "no_initialization"},
        run("DP2 lambada", LAMBADA, parallel="DP2"),
        run("TP2 mmlu", MMLU, parallel="TP2"),
        run("TP2 lambada", LAMBADA, parallel="TP2") | {"weights": "hf"},
    ],
    4: [
        run("TP2PP2", parallel="TP2PP2"),
        run("TP2DP2", parallel="TP2DP2"),
        run("PP2DP2 sharded", parallel="PP2DP2", sharding=1),
    ],
}
WORLD = {one["name"]: world for world, runs in RUNS.items() for one in runs}
NAMED = {one["name"]: one for runs in RUNS.values() for one in runs}
TRAINED = [
    one["name"]
    for one in NAMED.values()
    if one["case"] in (CORPUS, ALPACA) and not one.keys() & {"precision", "bug", "resume"}
]
ROUNDED = [
    one["name"]
    for one in NAMED.values()
    if "precision" in one and not one.keys() & {"bug", "resume"}
]
SCORED = [one["name"] for one in NAMED.values() if one["case"] in (LAMBADA, MMLU)]


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
        write(out / f"hf-{case}", shape, tame(shape))
        write_megatron(out / f"megatron-{case}", shape, 1, tensors=tame(shape))
    for world, runs in RUNS.items():
        launch(out, world, [located(one, out) for one in runs])
    return out


def tame(shape: LlamaShape) -> dict[str, torch.Tensor]:
    """Return weights by Hugging Face name, scaled so that a model can be trained from them."""
    found = tensors_of(shape)
    return {
        name: 1 + one / 8 if one.dim() == 1 else one / math.sqrt(one.shape[-1])
        for name, one in found.items()
    }


def located(one: dict, out: Path) -> dict:
    """Return a run with its checkpoint and weight names replaced by paths."""
    places = {key: str(out / "kept" / one[key]) for key in ("keep", "resume") if key in one}
    weights = {"weights": str(out / f"{one['weights']}-{one['case']}")} if "weights" in one else {}
    return one | places | weights


def launch(out: Path, world: int, runs: list[dict]) -> None:
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
def ranks(folder: Path, name: str) -> list[dict]:
    """Return the results of a run, one dict per rank."""
    world = WORLD[name]
    return [
        json.loads((folder / f"rank-{i}-of-{world}.json").read_text())[name] for i in range(world)
    ]


def by_torch(folder: Path, name: str) -> dict:
    """Return the results of engine torch on the same question, in one process."""
    one = NAMED[name]
    packed = {key: value for key, value in one["settings"].items() if key == "tune.pack"}
    alike = {"settings": {**one["asked"], **packed}} | {
        key: one[key] for key in ("case", "precision", "weights", "scale") if key in one
    }
    return _by_torch(json.dumps(located(alike, folder)))


@cache
def _by_torch(one: str) -> dict:
    return answer(json.loads(one), 0, 1, {"train": TorchTrain, "score": TorchScore})[0]


def furthest(one: list[float], other: list[float]) -> float:
    """Return the largest difference as a fraction of the expected value."""
    return max(abs(a - b) / abs(b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", TRAINED)
def test_every_plan_learns_what_engine_torch_learns(folder: Path, name: str) -> None:
    expected, found = by_torch(folder, name), ranks(folder, name)
    assert len(expected["losses"]) == 10
    for rank in found:  # every rank reports them
        assert furthest(rank["losses"], expected["losses"]) <= NEAR
        assert furthest(rank["norms"], expected["norms"]) <= NEAR
        assert rank["source"] == expected["source"]
        assert rank["phases"] == (
            ["data", "compute"] if len(found) == 1 else ["data", "meet", "compute"]
        )
    replicas = {rank["place"][2]: rank for rank in found}
    for when in ("before", "after"):
        assert all(
            rank[when] == pytest.approx(replicas[rank["place"][2]][when], rel=NEAR)
            for rank in found
        )
        assert sum(rank[when]["nll"] for rank in replicas.values()) == pytest.approx(
            expected[when]["nll"], rel=NEAR
        )
        assert sum(rank[when]["targets"] for rank in replicas.values()) == expected[when]["targets"]
    for step, rows in enumerate(expected["rows"]):
        assert sorted(row for rank in replicas.values() for row in rank["rows"][step]) == sorted(
            rows
        )


def test_what_they_are_compared_with_learns(folder: Path) -> None:
    for name in ("single", "alpaca", "read", "tied"):
        told = by_torch(folder, name)
        assert told["losses"][-1] < told["losses"][0] - 0.5
        assert told["after"]["nll"] < told["before"]["nll"]
    # clip=2.0 applies to some steps, not to all
    assert max(by_torch(folder, "single")["norms"]) > 2.0 > min(by_torch(folder, "single")["norms"])
    first = {
        round(by_torch(folder, name)["losses"][0], 4)
        for name in ("single", "alpaca", "read", "tied")
    }
    assert len(first) == 4


@pytest.mark.parametrize("name", ROUNDED)
def test_16_bits_stay_near_engine_torch(folder: Path, name: str) -> None:
    expected = by_torch(folder, name)
    for rank in ranks(folder, name):
        assert furthest(rank["losses"], expected["losses"]) <= 0.01
        taken = [math.isfinite(norm) for norm in rank["norms"]]
        assert taken == [math.isfinite(norm) for norm in expected["norms"]]
        assert all(taken) == (name != "fp16")
        both = [
            [n for n in norms if math.isfinite(n)] for norms in (rank["norms"], expected["norms"])
        ]
        assert furthest(*both) <= 0.03
        types = rank["details"]["dtypes"]
        assert types.pop("parameters") == NAMED[name]["precision"]
        assert types == {"main_parameters": "fp32", "gradients": "fp32", "states": "fp32"}


@pytest.mark.parametrize("name", ["TP2", "DP2 sharded", "fp16"])
def test_a_checkpoint_is_gone_on_from(folder: Path, name: str) -> None:
    """If weights, moments, counters or the loss scale were lost, the next losses would differ."""
    for kept, resumed in zip(ranks(folder, name), ranks(folder, f"{name} resumed"), strict=True):
        assert len(resumed["losses"]) == 10 - KEEP_EVERY
        assert furthest(resumed["losses"], kept["losses"][KEEP_EVERY:]) <= 1e-6
        assert furthest(resumed["norms"], kept["norms"][KEEP_EVERY:]) <= 1e-6
        assert resumed["after"] == pytest.approx(kept["after"], rel=1e-6)


def alike(one: list, other: list) -> bool:
    """Return whether numbers are near each other and lists of tokens equal."""
    return all(
        a == (b if isinstance(b, list) else pytest.approx(b, rel=NEAR))
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("name", SCORED)
def test_scores_are_those_of_engine_torch(folder: Path, name: str) -> None:
    expected, found = by_torch(folder, name), ranks(folder, name)
    for when in ("val", "infer"):
        table: dict[int, list] = {}
        for rank in found:
            told = dict(rank[when])
            for item, *values in zip(told.pop("items"), *told.values(), strict=True):
                assert rank["place"][0] == 0 or alike(table[item], values)
                table.setdefault(item, values)
        wanted = dict(expected[when])
        for item, *values in zip(wanted.pop("items"), *wanted.values(), strict=True):
            assert alike(table.pop(item), values)
        assert table == {}
    assert all(rank["source"] == expected["source"] for rank in found)


def test_records_say_what_computed_and_what_a_rank_holds(folder: Path) -> None:
    whole = ranks(folder, "single")[0]["details"]
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
    for rank in ranks(folder, "TP2"):
        assert rank["details"]["parameters"] == (whole["parameters"] - norms + padding) // 2 + norms
    assert (
        sum(rank["details"]["parameters"] for rank in ranks(folder, "PP2")) == whole["parameters"]
    )
    sharded = ranks(folder, "DP2 sharded")
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
    assert {rank["details"]["optimizer_states"] for rank in ranks(folder, "DP2")} == {
        whole["optimizer_states"]
    }
    score = ranks(folder, "TP2 mmlu")[0]["details"]
    assert (score["library"], score["dtypes"]) == (whole["library"], {"parameters": "fp32"})


def test_what_is_tensor_parallel_is_marked(folder: Path) -> None:
    """`perform_initialization=False` leaves parameters unmarked, and a norm counts those of one
    rank only.
    """
    for rank in ranks(folder, "TP2"):
        assert sum("layernorm" in name for name in rank["marked"]) == 0
        assert len(rank["marked"]) == 4 * 2 + 2
    expected = by_torch(folder, "TP2")
    for rank in ranks(folder, "TP2 uninitialized"):
        assert rank["marked"] == []
        assert furthest(rank["losses"][:1], expected["losses"][:1]) <= NEAR
        assert furthest(rank["norms"][:1], expected["norms"][:1]) > 0.01


def test_norms_are_not_decayed(folder: Path) -> None:
    """Megatron's groups express it by a multiplier that only its scheduler reads."""
    [rank] = ranks(folder, "single")
    assert rank["decay"] == [[1.0, 0.5], [0.0, 0.0]]
    [wrong] = ranks(folder, "decay everything")
    expected = by_torch(folder, "single")
    assert wrong["losses"][0] == pytest.approx(expected["losses"][0], rel=NEAR)
    assert furthest(wrong["losses"][-1:], expected["losses"][-1:]) > 10 * NEAR


@pytest.mark.parametrize("name", ["bf16 still", "bf16 sharded still"])
def test_main_weights_begin_as_those_of_every_engine(folder: Path, name: str) -> None:
    """Megatron by itself copies them from bf16 parameters, which hides updates of less than half a
    step of bf16.
    """
    for rank in ranks(folder, name):
        assert 0 < rank["rounded"] < 0.1 * rank["held"]
    [wrong] = ranks(folder, "rounded weights")
    assert wrong["rounded"] > 0.999 * wrong["held"]  # the step moves weights near 0
    assert wrong["losses"] == ranks(folder, "bf16 still")[0]["losses"]  # not in losses


def test_the_fused_loss_is_for_bf16_alone(folder: Path) -> None:
    """It does so even for fp32 logits; the loss itself is right."""
    [wrong] = ranks(folder, "fused loss")
    expected = by_torch(folder, "fused loss")
    assert wrong["losses"][0] == pytest.approx(expected["losses"][0], rel=NEAR)
    assert furthest(wrong["norms"][:1], expected["norms"][:1]) > 10 * NEAR


def test_the_schedule_does_not_divide(folder: Path) -> None:
    """With `calculate_per_token_loss=False` it divides the returned loss, in place, and all
    gradients by the number of micro-batches.
    """
    [wrong] = ranks(folder, "schedule divides")
    expected = by_torch(folder, "single")
    assert wrong["details"]["micro_batches"] == 4
    # the loss that is reported was cloned before it was divided
    assert wrong["losses"][0] == pytest.approx(expected["losses"][0], rel=NEAR)
    assert 4 * wrong["norms"][0] == pytest.approx(expected["norms"][0], rel=NEAR)
