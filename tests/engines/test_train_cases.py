"""Training from the command line: losses that end a run, weights to start from, sharding and
determinism.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from fixtures.commands import Shell
from steelyard.case.resolve import resolve_case
from steelyard.engines.transformers.score import make_transformers_config

CASE = "llama1-7b-openwebtext"
RUN = ("run", CASE, "--size", "smoke", "--accelerator", "cpu")


def record(shell: Shell) -> dict[str, Any]:
    """Return the only record in the shell's output folder."""
    [path] = shell.out.glob("*.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def steps(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the samples of the train pass."""
    return [s for s in found["samples"] if s["pass"] == "train"]


@pytest.mark.full
def test_a_loss_that_is_no_number_ends_the_run(shell: Shell) -> None:
    done = shell(
        *RUN,
        "--set=question.train.lr=1e30",
        "--set=question.train.warmup_steps=0",
        "--out",
        shell.out,
    )
    assert done.code == 1
    found = record(shell)
    losses = [s["values"]["loss"] for s in steps(found)]
    bad = losses.index(None)
    assert found["status"] == "invalid"
    said = {"code": "check.finite_loss.bad", "values": {"step": bad}}
    assert found["reasons"][0] == {"code": "nan", "text": said}
    assert len(losses) == bad + 1 < 40
    assert found["metrics"]["loss"]["value"] is None
    assert f"nan: step {bad}" in done.err


@pytest.mark.full
def test_a_loss_beyond_its_bound_ends_the_run(shell: Shell) -> None:
    done = shell(*RUN, "--set=question.train.bound=5.0", "--out", shell.out)
    assert done.code == 1
    found = record(shell)
    losses = [s["values"]["loss"] for s in steps(found)]
    assert losses[0] > 5.0
    assert len(losses) == 1
    [reason] = [one for one in found["reasons"] if one["code"] == "loss_bound"]
    told = {"step": 0, "value": str(losses[0]), "bound": "5.0"}
    assert reason["text"] == {"code": "check.loss_bound.bad", "values": told}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A Hugging Face folder with random weights for the case's model."""
    torch.manual_seed(3)
    LlamaForCausalLM(
        make_transformers_config(resolve_case(CASE, "smoke").case.question.model)
    ).save_pretrained(tmp_path / "hf")
    return tmp_path / "hf"


@pytest.mark.full
def test_megatron_shards_train_as_the_folder_they_were_made_of(shell: Shell, saved: Path) -> None:
    """The two shards are loaded by one device and by a pipeline of two."""
    assert (
        shell(
            "weights", "convert", saved, shell.folder / "shards", "--to", "megatron", "--tp", "2"
        ).code
        == 0
    )
    losses = {}
    for number, (weights, more) in enumerate(
        [
            (saved, ()),
            (shell.folder / "shards", ()),
            (shell.folder / "shards", ("--devices", "2", "--parallel", "PP2")),
        ]
    ):
        one = Shell(shell.folder / str(number))
        one.folder.mkdir()
        done = one(*RUN, "--steps", "4", "--weights", weights, *more, "--out", one.out)
        assert done.code == 0, done.err
        found = record(one)
        assert found["weights"]["source"] == ("megatron" if number else "huggingface"), found[
            "weights"
        ]
        losses[number] = [s["values"]["loss"] for s in steps(found) if s["rank"] == 0]
    assert losses[0] == losses[1] == pytest.approx(losses[2], rel=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("sharding", ["1", "3"])
def test_transformers_over_two_devices_trains_as_on_one(shell: Shell, sharding: str) -> None:
    losses, held = [], []
    for devices in ("1", "2"):
        one = Shell(shell.folder / devices)
        one.folder.mkdir()
        more = (
            "--devices",
            devices,
            "--engine",
            "transformers",
            f"--set=tune.sharding={sharding}",
            "--steps",
            "5",
        )
        done = one(*RUN, *more, "--out", one.out)
        assert done.code == 0, done.err
        found = record(one)
        losses.append([s["values"]["loss"] for s in steps(found) if s["rank"] == 0])
        held.append(found["engine"]["details"])
    assert held[1]["sharding"] == int(sharding)
    assert held[0]["optimizer_states"] == 2 * held[0]["parameters"] == 2 * 2 * held[1]["parameters"]
    assert held[1]["optimizer_states"] == held[0]["optimizer_states"] / 2
    assert held[1]["dtypes"] == dict.fromkeys(
        ("parameters", "main_parameters", "gradients", "states"), "fp32"
    )
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.full
def test_transformers_over_two_devices_says_what_to_add(shell: Shell) -> None:
    done = shell(*RUN, "--devices", "2", "--engine", "transformers", "--out", shell.out)
    assert done.code == 2
    assert "add --set tune.sharding=3" in done.lines[-1]


WHICH = """
import time, torch
from steelyard.engines.torch.framework import TorchFramework
before = torch.are_deterministic_algorithms_enabled()
TorchFramework("steelyard.accelerators.cpu_torch:CpuTorchDevice", 0, time.monotonic).make_deterministic()
print(before, torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory)
"""


@pytest.mark.full
def test_the_same_bits_where_asked(shell: Shell) -> None:
    """Runs on a CPU are equal anyway, so a program also checks that torch was told to be
    deterministic.
    """
    told = subprocess.run(
        [sys.executable, "-c", WHICH], env=shell.env(), capture_output=True, text=True, check=True
    )
    assert told.stdout == "False True False\n"
    losses = []
    for name in ("one", "two"):
        one = Shell(shell.folder / name)
        one.folder.mkdir()
        done = one(
            *RUN,
            "--steps",
            "5",
            "--set=tune.deterministic=true",
            "--out",
            one.out,
            OMP_NUM_THREADS="2",
        )
        assert done.code == 0, done.err
        found = record(one)
        losses.append([s["values"] for s in steps(found)])
    assert losses[0] == losses[1]
    assert found["tune"]["deterministic"] is True
