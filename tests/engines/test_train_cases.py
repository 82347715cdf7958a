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


def read_record(shell: Shell) -> dict[str, Any]:
    """Return the only record in the shell's output folder."""
    [path] = shell.out.glob("*.json")
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def train_steps(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the samples of the train pass."""
    return [s for s in record["samples"] if s["pass"] == "train"]


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
    run_record = read_record(shell)
    losses = [s["values"]["loss"] for s in train_steps(run_record)]
    bad = losses.index(None)
    assert run_record["status"] == "invalid"
    text = {"code": "check.finite_loss.bad", "values": {"step": bad}}
    assert run_record["reasons"][0] == {"code": "nan", "text": text}
    assert len(losses) == bad + 1 < 40
    assert run_record["metrics"]["loss"]["value"] is None
    assert f"nan: step {bad}" in done.err


@pytest.mark.full
def test_a_loss_beyond_its_bound_ends_the_run(shell: Shell) -> None:
    done = shell(*RUN, "--set=question.train.bound=5.0", "--out", shell.out)
    assert done.code == 1
    run_record = read_record(shell)
    losses = [s["values"]["loss"] for s in train_steps(run_record)]
    assert losses[0] > 5.0
    assert len(losses) == 1
    [reason] = [
        candidate for candidate in run_record["reasons"] if candidate["code"] == "loss_bound"
    ]
    values = {"step": 0, "value": str(losses[0]), "bound": "5.0"}
    assert reason["text"] == {"code": "check.loss_bound.bad", "values": values}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A Hugging Face folder with random weights for the case's model."""
    torch.manual_seed(3)
    LlamaForCausalLM(
        make_transformers_config(resolve_case(CASE, "smoke").case.question.model)
    ).save_pretrained(tmp_path / "hf")
    return tmp_path / "hf"


@pytest.mark.full
def test_megatron_shards_train_as_the_folder_they_were_converted_from(
    shell: Shell, saved: Path
) -> None:
    """The two shards are loaded by one device and by a pipeline of two."""
    assert (
        shell(
            "weights", "convert", saved, shell.folder / "shards", "--to", "megatron", "--tp", "2"
        ).code
        == 0
    )
    losses = {}
    for number, (weights, options) in enumerate(
        [
            (saved, ()),
            (shell.folder / "shards", ()),
            (shell.folder / "shards", ("--devices", "2", "--parallel", "PP2")),
        ]
    ):
        run_shell = Shell(shell.folder / str(number))
        run_shell.folder.mkdir()
        done = run_shell(
            *RUN, "--steps", "4", "--weights", weights, *options, "--out", run_shell.out
        )
        assert done.code == 0, done.err
        run_record = read_record(run_shell)
        assert run_record["weights"]["source"] == ("megatron" if number else "huggingface"), (
            run_record["weights"]
        )
        losses[number] = [s["values"]["loss"] for s in train_steps(run_record) if s["rank"] == 0]
    assert losses[0] == losses[1] == pytest.approx(losses[2], rel=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("sharding", [pytest.param("1", marks=pytest.mark.long), "3"])
def test_transformers_over_two_devices_trains_as_on_one(shell: Shell, sharding: str) -> None:
    losses, details = [], []
    for devices in ("1", "2"):
        run_shell = Shell(shell.folder / devices)
        run_shell.folder.mkdir()
        options = (
            "--devices",
            devices,
            "--engine",
            "transformers",
            f"--set=tune.sharding={sharding}",
            "--steps",
            "5",
        )
        done = run_shell(*RUN, *options, "--out", run_shell.out)
        assert done.code == 0, done.err
        run_record = read_record(run_shell)
        losses.append([s["values"]["loss"] for s in train_steps(run_record) if s["rank"] == 0])
        details.append(run_record["engine"]["details"])
    assert details[1]["sharding"] == int(sharding)
    assert (
        details[0]["optimizer_states"]
        == 2 * details[0]["parameters"]
        == 2 * 2 * details[1]["parameters"]
    )
    assert details[1]["optimizer_states"] == details[0]["optimizer_states"] / 2
    assert details[1]["dtypes"] == dict.fromkeys(
        ("parameters", "main_parameters", "gradients", "states"), "fp32"
    )
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.full
def test_transformers_on_two_devices_without_sharding_names_the_missing_option(
    shell: Shell,
) -> None:
    done = shell(*RUN, "--devices", "2", "--engine", "transformers", "--out", shell.out)
    assert done.code == 2
    assert "add --set tune.sharding=3" in done.lines[-1]


DETERMINISM_PROBE = """
import time, torch
from steelyard.engines.torch.framework import TorchFramework
before = torch.are_deterministic_algorithms_enabled()
TorchFramework("steelyard.accelerators.cpu_torch:CpuTorchDevice", 0, time.monotonic).make_deterministic()
print(before, torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory)
"""  # noqa: E501


@pytest.mark.full
def test_deterministic_runs_have_equal_losses(shell: Shell) -> None:
    """Runs on a CPU are equal anyway, so a program also checks that torch was told to be
    deterministic.
    """
    probe = subprocess.run(
        [sys.executable, "-c", DETERMINISM_PROBE],
        env=shell.env(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert probe.stdout == "False True False\n"
    losses = []
    for name in ("one", "two"):
        run_shell = Shell(shell.folder / name)
        run_shell.folder.mkdir()
        done = run_shell(
            *RUN,
            "--steps",
            "5",
            "--set=tune.deterministic=true",
            "--out",
            run_shell.out,
            OMP_NUM_THREADS="2",
        )
        assert done.code == 0, done.err
        run_record = read_record(run_shell)
        losses.append([s["values"] for s in train_steps(run_record)])
    assert losses[0] == losses[1]
    assert run_record["tune"]["deterministic"] is True
