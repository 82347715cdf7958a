"""Modes that Paddle has for GPUs alone, on CPUs with the calls that it lacks there put in (fixtures/packages/patched_paddle).

It shows that our side of them is right: weights, layers, losses, norms and the order of ranks. It shows no kernel of Paddle's.
"""

import re
from math import prod
from pathlib import Path

import pytest

from engine_paddle.alike import STEPS, assert_alike
from engine_paddle.conftest import CORPUS, MODEL
from fixtures.commands import Shell
from steelyard.record import record
from steelyard.record.record import Record

pytestmark = pytest.mark.full

PACKAGE = Path(__file__).parents[1] / "fixtures" / "packages" / "patched_paddle"
SHARDED = ("tune.sharding=1", "tune.recompute=full")
# Plan → settings; modes that nobody has run as Paddle ships them; numbers on rank 0: parameters, and states.
PLANS = {
    "TP2PP2": ((), ["tp", "pp"], (29_888, 59_776)),
    "TP2DP2": ((), ["tp"], (59_840, 119_680)),
    "PP2DP2": (SHARDED, ["pp"], (59_648, 57_856)),
}
LONG = {
    "TP2": ((), ["tp"], (59_840, 119_680)),
    "PP2": ((), ["pp"], (59_648, 119_296)),
    "DP4": ((*SHARDED, "tune.sharding_degree=2", "tune.micro_batch=1"), ["copies of shards"], (119_360, 119_424)),
}


@pytest.mark.parametrize("plan", [*PLANS, *(pytest.param(one, marks=pytest.mark.long) for one in LONG)])
def test_modes_of_gpus(plan: str, corpus: Record, python: str, tmp_path: Path) -> None:
    settings, never_run, numbers = (PLANS | LONG)[plan]
    (tmp_path / "mail").mkdir()
    shell = Shell(tmp_path, (PACKAGE,))
    words = ["run", CORPUS, "--size", "smoke", "--accelerator", "cpu", "--engine", "patched", "--steps", str(STEPS)]
    words += ["--parallel", plan, "--devices", str(prod(map(int, re.findall(r"\d", plan)))), "--out", str(shell.out)]
    for setting in (*MODEL, *settings, f"engine.python={python}"):
        words += ["--set", setting]
    done = shell(*words, PATCHED_MAIL=str(tmp_path / "mail"))
    assert done.code == 0, done.err
    (path,) = shell.out.glob("*.json")
    found = record.read(path)
    assert_alike(found, corpus)
    details = found.engine.details
    assert details["never_run"] == never_run
    assert (details["parameters"], details["optimizer_states"]) == numbers
