"""Engine megatron from the command line: what it refuses, whether it conforms, and what its records
say.
"""

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("megatron") is None:
    pytest.skip(
        "megatron-core is not installed here; run make engine-megatron", allow_module_level=True
    )

from engine_megatron.plans import CORPUS, MMLU, build_engine
from fixtures.commands import Shell
from fixtures.golden import golden
from steelyard.engines.megatron.score import MegatronScore
from steelyard.engines.megatron.train import MegatronTrain
from steelyard.errors import RequestError
from steelyard.plan.degrees import Plan
from steelyard.training import checkpoint_folders
from steelyard.training.checkpoint_folders import CheckpointState, OptimizerScalars

PATCH = Path(__file__).parents[1] / "fixtures" / "megatron_cpu"
SHARDING_REFUSAL = (
    "engine megatron's distributed optimizer divides optimizer states among all replicas; allowed:"
    " tune.sharding=0 or 1, without tune.sharding_degree"
)
CPU_REFUSAL = (
    "engine megatron runs on CUDA devices only; this rank has cpu; choose another --accelerator, or"
    " --engine torch"
)


def make_training_run(**settings: object) -> dict:
    """Return a training run with settings, whose dots are written as two underscores."""
    return {
        "case": CORPUS,
        "settings": {name.replace("__", "."): value for name, value in settings.items()},
    }


@pytest.mark.parametrize(
    ("one", "world", "says"),
    [
        (make_training_run(), 1, CPU_REFUSAL),
        ({"case": MMLU}, 1, CPU_REFUSAL),
        (make_training_run(tune__sharding=2), 2, SHARDING_REFUSAL),
        (make_training_run(tune__sharding=3), 2, SHARDING_REFUSAL),
        (make_training_run(tune__sharding=1, tune__sharding_degree=2), 4, SHARDING_REFUSAL),
        (
            make_training_run(tune__parallel="PP2", question__model__layers=3),
            2,
            "engine megatron needs equal pipeline stages; PP2 does not divide 3; change PP",
        ),
        (
            make_training_run() | {"precision": "bf16-pure"},
            1,
            (
                "engine megatron keeps weights, gradients and states in fp32, and bf16-pure does"
                " not: that takes the optimizer of Transformer Engine; allowed: --precision fp32,"
                " tf32, fp16 or bf16"
            ),
        ),
        (
            {"case": MMLU, "settings": {"tune.batching": "sorted"}},
            1,
            "engine megatron packs sequences; tune.batching='sorted' is for engine transformers",
        ),
        (
            {"case": MMLU, "settings": {"tune.attention": "sdpa"}},
            1,
            (
                "tune.attention='sdpa' is not known; allowed: auto, cudnn, efficient, flash,"
                " packed, rows"
            ),
        ),
    ],
    ids=range(9),
)
def test_unsupported_jobs_are_refused_in_one_line(one: dict, world: int, says: str) -> None:
    """Without the CPU patch, in one process: refusals come before any process group is made."""
    with pytest.raises(RequestError) as caught:
        build_engine(one, 0, world, MegatronScore if one["case"] == MMLU else MegatronTrain)
    assert str(caught.value) == says


def test_a_checkpoint_of_another_plan_is_refused(tmp_path: Path) -> None:
    checkpoint_folder = tmp_path / checkpoint_folders.format_step_folder(6)
    checkpoint_folder.mkdir()
    plan = Plan(nodes=1, devices=2, tp=2, pp=1, dp=1, launcher="local")
    state = CheckpointState(
        step=6, losses=[1.0], numbers=OptimizerScalars(updates=6), plan=plan, weights={}
    )
    checkpoint_folders.write_checkpoint_json(
        checkpoint_folder / checkpoint_folders.STATE_FILE, state
    )
    with pytest.raises(RequestError) as caught:
        build_engine(make_training_run() | {"resume": str(tmp_path)}, 0, 1, MegatronTrain)
    assert str(caught.value) == (golden("resume-engine-megatron-goes-on-under"))


@pytest.fixture
def patched(tmp_path: Path) -> Iterator[Shell]:
    """A shell in which Megatron runs on a CPU."""
    new_shell = Shell(tmp_path, (PATCH,))
    yield new_shell
    new_shell.clean()


def test_a_cpu_is_refused_as_a_wrong_request(shell: Shell) -> None:
    done = shell(
        "run",
        MMLU,
        "--size",
        "smoke",
        "--accelerator",
        "cpu",
        "--engine",
        "megatron",
        "--out",
        shell.out,
    )
    assert done.code == 2
    assert done.lines[-1].endswith(CPU_REFUSAL)


def test_conform_passes(patched: Shell) -> None:
    cache = {"XDG_CACHE_HOME": str(patched.folder / "cache")}
    cases = [word for name in (CORPUS, MMLU) for word in ("--case", name)]
    result = patched("conform", "megatron", *cases, "--json", **cache)
    assert (result.code, result.json()["conforms"]) == (0, True), [
        row for row in result.json()["rows"] if not row["ok"]
    ]
    assert {row["what"] for row in result.json()["rows"]} >= {
        "status",
        "train counts",
        "step 1 grad_norm",
        "infer answers",
    }


def test_a_record_names_library_exchange_and_optimizer_states(patched: Shell) -> None:
    """Two ranks by the launcher, with checkpoints."""
    run = (
        "run",
        CORPUS,
        "--size",
        "smoke",
        "--accelerator",
        "cpu",
        "--engine",
        "megatron",
        "--steps",
        "4",
    )
    options = (
        "--devices",
        "2",
        "--parallel",
        "DP2",
        "--set=tune.sharding=1",
        "--checkpoint-every",
        "2",
        "--out",
        patched.out,
    )
    done = patched(*run, *options, OMP_NUM_THREADS="1")
    assert done.code == 0, done.err
    [path] = patched.out.glob("*.json")
    record = json.loads(path.read_text())
    details = record["engine"]["details"]
    assert details["library"].startswith("megatron-core 0.16.")
    assert details["library"].endswith("without Transformer Engine")
    assert details["exchange"] == "inside"
    assert details["optimizer_states"] < 1.1 * details["parameters"]
    assert record["environment"]["software"]["packages"]["megatron-core"].startswith("0.16.")
    [checkpoint_folder] = (patched.out / "checkpoints").iterdir()
    assert [
        checkpoint.name
        for checkpoint in checkpoint_folders.list_finished_checkpoints(checkpoint_folder)
    ] == ["step-00000004", "step-00000002"]
