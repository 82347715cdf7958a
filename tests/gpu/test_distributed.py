"""One GPU that issues the collectives of several learns what it learns without them, in every
sharding stage.
"""

import json
import os
import sys

import pytest

from fixtures.commands import Shell, finish

pytestmark = pytest.mark.gpu

RUN = (
    "run",
    "llama1-7b-openwebtext",
    "--size",
    "smoke",
    "--accelerator",
    "cuda",
    "--steps",
    "6",
    "--precision",
    "bf16",
)


def losses(shell: Shell, *settings: str) -> list[float]:
    """Run the case with these settings and return the loss of each step."""
    path = os.pathsep.join(filter(None, sys.path))  # the test's own packages
    before = set(shell.out.glob("*.json"))
    asked = [part for one in settings for part in ("--set", one)]
    done = finish(shell.start(*RUN, *asked, "--out", shell.out, PYTHONPATH=path), 200)
    new = set(shell.out.glob("*.json")) - before
    assert len(new) == 1, done
    [made] = new
    record = json.loads(made.read_text())
    assert {one["code"] for one in record["reasons"]} <= {"interval"}, done.err
    assert record["engine"]["details"].get("distributed", False) == bool(settings)
    return [one["values"]["loss"] for one in record["samples"] if "loss" in one.get("values", {})]


def test_collectives_of_one_change_nothing(shell: Shell) -> None:
    alone = losses(shell)
    assert len(alone) == 6
    for sharding in range(4):
        found = losses(shell, "tune.distributed=true", f"tune.sharding={sharding}")
        assert found == pytest.approx(alone, abs=0.01)
