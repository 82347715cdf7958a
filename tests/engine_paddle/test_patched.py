"""Modes that Paddle has for GPUs only, on CPUs with the missing calls patched in
(fixtures/packages/patched_paddle).

It tests our side of them: weights, layers, losses, norms and the order of ranks. It tests no kernel
of Paddle.
"""

import re
from collections.abc import Callable
from math import prod
from pathlib import Path

import pytest

from engine_paddle.alike import STEPS, assert_same_training
from engine_paddle.conftest import CORPUS, MODEL
from fixtures.commands import Shell
from steelyard.record import record
from steelyard.record.record import Record

pytestmark = pytest.mark.full

PACKAGE = Path(__file__).parents[1] / "fixtures" / "packages" / "patched_paddle"
SHARDED_SETTINGS = ("tune.sharding=1", "tune.recompute=full")
# Plan → settings; modes that were never run with unpatched Paddle; on rank 0 the numbers of
# parameters and of optimizer states.
PLANS = {
    "TP2PP2": ((), ["tp", "pp"], (29_888, 59_776)),
    "PP2DP2": (SHARDED_SETTINGS, ["pp"], (59_648, 57_856)),
}
LONG_PLANS = {
    "TP2DP2": ((), ["tp"], (59_840, 119_680)),
    "TP2": ((), ["tp"], (59_840, 119_680)),
    "PP2": ((), ["pp"], (59_648, 119_296)),
    "DP4": (
        (*SHARDED_SETTINGS, "tune.sharding_degree=2", "tune.micro_batch=1"),
        ["copies of shards"],
        (119_360, 119_424),
    ),
}


@pytest.fixture
def patched(python: str, tmp_path: Path) -> Callable[..., Record]:
    """A function that runs the patched engine, checks its exit code and returns the record."""

    def run_patched(code: int, devices: int, *options: str) -> Record:
        (tmp_path / "mail").mkdir()
        shell = Shell(tmp_path, (PACKAGE,))
        words = [
            "run",
            CORPUS,
            "--size",
            "smoke",
            "--accelerator",
            "cpu",
            "--engine",
            "patched",
            "--steps",
            str(STEPS),
        ]
        words += [
            "--devices",
            str(devices),
            "--set",
            f"engine.python={python}",
            *options,
            "--out",
            str(shell.out),
        ]
        done = shell(*words, PATCHED_MAIL=str(tmp_path / "mail"))
        assert done.code == code, done.err
        (path,) = shell.out.glob("*.json")
        return record.read_record(path)

    return run_patched


@pytest.mark.parametrize(
    "plan", [*PLANS, *(pytest.param(one, marks=pytest.mark.long) for one in LONG_PLANS)]
)
def test_gpu_plans_train_as_engine_torch(
    plan: str, corpus: Record, patched: Callable[..., Record]
) -> None:
    settings, never_run, numbers = (PLANS | LONG_PLANS)[plan]
    options = [word for setting in (*MODEL, *settings) for word in ("--set", setting)]
    run_record = patched(0, prod(map(int, re.findall(r"\d", plan))), "--parallel", plan, *options)
    assert_same_training(run_record, corpus)
    details = run_record.engine.details.model_dump()
    assert details["never_run"] == never_run
    assert (details["parameters"], details["optimizer_states"]) == numbers


def test_a_precision_that_paddle_silently_ignores_ends_the_run(
    patched: Callable[..., Record],
) -> None:
    """Paddle's level O2 on a CPU stays in fp32; the patch removes the refusal that normally comes
    first.
    """
    run_record = patched(1, 1, "--precision", "bf16-o2")
    error = (
        "rank 0: RuntimeError: precision bf16-o2: parameters must be bfloat16, but Paddle made them"
        " float32"
    )
    assert (
        run_record.status,
        [(reason.code, reason.text) for reason in run_record.reasons][:1],
    ) == ("failed", [("raised", error)])
