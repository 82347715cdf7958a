"""One GPU that issues the collectives of several learns what it learns without them, in every
sharding stage.
"""

import json
import os
import sys

import pytest

from fixtures.commands import Shell, wait_for_result

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


def run_and_read_losses(shell: Shell, *settings: str) -> list[float]:
    """Run the case with these settings and return the loss of each step."""
    path = os.pathsep.join(filter(None, sys.path))  # the test's own packages
    before = set(shell.out.glob("*.json"))
    options = [part for item in settings for part in ("--set", item)]
    done = wait_for_result(shell.start(*RUN, *options, "--out", shell.out, PYTHONPATH=path), 200)
    new = set(shell.out.glob("*.json")) - before
    assert len(new) == 1, done
    [record_path] = new
    record = json.loads(record_path.read_text())
    assert {item["code"] for item in record["reasons"]} <= {"interval"}, done.err
    assert record["engine"]["details"].get("distributed", False) == bool(settings)
    return [
        item["values"]["loss"] for item in record["samples"] if "loss" in item.get("values", {})
    ]


def test_collectives_of_a_single_gpu_do_not_change_losses(shell: Shell) -> None:
    alone = run_and_read_losses(shell)
    assert len(alone) == 6
    for sharding in range(4):
        distributed = run_and_read_losses(
            shell, "tune.distributed=true", f"tune.sharding={sharding}"
        )
        assert distributed == pytest.approx(alone, abs=0.01)
