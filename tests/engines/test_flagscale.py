"""Engine flagscale with a fake checkout that prints FlagScale's lines: what a record says about a
run, faults and refusals.
"""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fixtures.commands import Done, Shell
from fixtures.golden import golden

FAKE = Path(__file__).parents[1] / "fixtures" / "flagscale"
CORPUS = "llama1-7b-openwebtext"
RUN = ("run", CORPUS, "--size", "smoke", "--accelerator", "cpu", "--engine", "flagscale")
STEPS, TOKENS = 40, 8 * 128


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder laid out like a FlagScale checkout, with a fake program and a fake torch.distributed
    launcher.
    """
    folder = tmp_path / "FlagScale"
    (folder / "flagscale" / "train").mkdir(parents=True)
    (folder / "torch" / "distributed").mkdir(parents=True)
    shutil.copy(FAKE / "run.py", folder)
    shutil.copy(FAKE / "train_gpt.py", folder / "flagscale" / "train")
    shutil.copy(FAKE / "launcher.py", folder / "torch" / "distributed" / "run.py")
    for package in ("torch", "torch/distributed"):
        (folder / package / "__init__.py").touch()
    return folder


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """A shell in a folder of its own, beside the checkout."""
    (tmp_path / "shell").mkdir()
    one = Shell(tmp_path / "shell")
    yield one
    one.clean()


def start(shell: Shell, checkout: Path, *more: str, fault: str = "") -> tuple[Done, dict[str, Any]]:
    """Run the case with the fake checkout and return the finished command and its first record, {}
    if there is none.

    `fault` is passed to the fake program, such as `crash@5`. Processes or temporary folders that
    are left over fail the test.
    """
    done = shell(
        *RUN, f"--set=engine.checkout={checkout}", *more, "--out", shell.out, FAKE_FLAGSCALE=fault
    )
    assert shell.nothing_left(within_s=5.0)
    assert list(shell.tmp.glob("steelyard-*")) == []
    return done, (shell.records() or [{}])[0]


def codes(record: dict[str, Any]) -> list[str]:
    """Return the codes of a record's reasons."""
    return [one["code"] for one in record["reasons"]]


def commit(folder: Path) -> str:
    """Make the folder a git repository, commit all files, and return the commit's hash."""
    git = ("git", "-C", folder, "-c", "user.name=a", "-c", "user.email=a@b.c")
    subprocess.run([*git[:3], "init", "-q"], check=True)
    subprocess.run([*git, "add", "-A"], check=True)
    subprocess.run([*git, "commit", "-qm", "all"], check=True)
    return subprocess.run(
        [*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True
    ).stdout.strip()


def test_a_run(shell: Shell, checkout: Path) -> None:
    made = commit(checkout)
    done, record = start(shell, checkout)
    assert (done.code, record["status"]) == (0, "valid"), (done.err, record["reasons"])
    assert record["clock"] == "reported"
    assert "drawn" not in record
    steps = record["samples"]
    assert [one["pass"] for one in steps] == ["train"] * STEPS
    assert {json.dumps(one["phases"]) for one in steps} == {"{}"}
    assert {one["counts"]["tokens"] for one in steps} == {TOKENS}
    assert [one["values"]["loss"] for one in steps] == pytest.approx(
        [5.5 - n / 100 for n in range(1, STEPS + 1)]
    )
    assert {one["values"]["grad_norm"] for one in steps} == {1.25}
    times = [one["end_s"] - one["start_s"] for one in steps]
    # the program reports milliseconds with one decimal
    assert all(abs(t - round(t, 4)) < 1e-9 for t in times)
    metrics = record["metrics"]
    assert (metrics["p_core"]["value"], metrics["p_core"]["note"]["code"]) == (
        None,
        "metric.no_compute",
    )
    assert metrics["mfu_achievable"]["value"] is None
    assert metrics["mfu_achievable"]["note"]["code"] == "metric.no_matmul"
    assert metrics["tokens_per_device_s"]["value"] > 0
    assert metrics["loss_after"]["value"] is None
    assert record["quality"]["evaluated"] is False
    details = record["engine"]["details"]
    assert details["program"] == {"name": "FlagScale", "commit": made, "dirty": False}
    assert (details["parameters"], details["optimizer_states"], details["dtypes"]) == (
        123456,
        None,
        None,
    )
    assert (details["exit_code"], details["skipped_iterations"]) == (0, 0)
    assert details["counts"] == golden("of-the-configuration-the-program-does")
    assert {"code": "note.reported", "values": {}} in record["notes"]
    assert record["weights"] == {"source": "random", "seed": 1, "by": "the program"}
    assert {"data_files", "counts", "dry_run", "program", "train"} <= record["budget"].keys()
    assert str(checkout) not in json.dumps(record)
    checked = shell("verify", shell.out)
    assert (checked.code, checked.err) == (0, ""), checked.out
    assert shell("report", shell.out).code == 0


def test_times_that_are_not_so(shell: Shell, checkout: Path) -> None:
    done, record = start(shell, checkout, fault="half")
    assert (done.code, record["status"]) == (1, "invalid")
    assert codes(record) == ["reported"]
    told = record["reasons"][0]["text"]
    assert (told["code"], told["values"]["most"]) == ("check.reported.bad", 0.02)


def test_a_loss_that_is_no_number(shell: Shell, checkout: Path) -> None:
    """The program's line then has no loss; the engine ends the program at that iteration."""
    done, record = start(shell, checkout, fault="nan@5")
    assert (done.code, record["status"], codes(record)[0]) == (1, "invalid", "nan")
    assert record["reasons"][0]["text"] == {"code": "check.finite_loss.bad", "values": {"step": 4}}
    assert len(record["samples"]) == 5
    assert record["engine"]["details"]["exit_code"] is None


def test_an_iteration_that_changed_nothing_is_no_step(shell: Shell, checkout: Path) -> None:
    done, record = start(shell, checkout, fault="skip@5")
    assert (done.code, record["status"], codes(record)) == (1, "invalid", ["coverage"])
    told = {"rank": 0, "taken": STEPS - 1, "wanted": STEPS}
    assert record["reasons"][0]["text"] == {"code": "check.steps.bad", "values": told}
    assert record["engine"]["details"]["skipped_iterations"] == 1


@pytest.mark.full
def test_a_program_that_hangs(shell: Shell, checkout: Path) -> None:
    done, record = start(shell, checkout, "--hang-after", "3", fault="hang@5")
    assert (done.code, record["status"], codes(record)[0]) == (1, "failed", "hang")
    assert "_next" in record["failure"]["stacks"]["0"]


@pytest.mark.parametrize(
    ("fault", "code", "said"),
    [
        ("crash@5", "raised", "ended with exit code 1 after 4 of 40 iterations"),
        ("memory@5", "out_of_memory", "CUDA out of memory. Tried to allocate 2.00 GiB"),
        pytest.param(
            "batch@5",
            "raised",
            "a batch of 9 rows and 40 in all; asked: 8 and 40",
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_program_that_fails(
    shell: Shell, checkout: Path, fault: str, code: str, said: str
) -> None:
    done, record = start(shell, checkout, fault=fault)
    assert (done.code, record["status"], codes(record)[0]) == (1, "failed", code)
    assert said in record["failure"]["error"]
    assert "iteration        4/      40" in record["failure"]["stderr_tail"]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (
            "script",
            (
                "the dry run's script has no plain torchrun command: there is ';' in it; nothing"
                " was started"
            ),
        ),
        ("dryrun", "its dry run ended with exit code 1: No module named 'hydra'"),
    ],
)
def test_scripts_that_are_not_started(shell: Shell, checkout: Path, fault: str, said: str) -> None:
    done, record = start(shell, checkout, fault=fault)
    assert (done.code, record) == (2, {})
    assert said in done.err
    assert len(done.lines) == 1, done.err


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ((), "engine flagscale runs a checkout of FlagScale; name it: --set engine.checkout=DIR"),
        (("--set=engine.checkout=none",), "engine.checkout 'none': no run.py in it; name a checkout of FlagScale"),
        (
            ("--engine", "torch", "--set=engine.checkout=none"),
            "engine.checkout: engine torch needs no checkout; leave it out",
        ),
        (("{}", "--nodes", "2"), "--nodes 2: engine flagscale runs on one host; allowed: --nodes 1"),
        (("{}", "--passes", "before,train"), "--passes: no pass 'before'; allowed: train"),
        (("{}", "--precision", "bf16-pure"), "engine flagscale does not train in bf16-pure; allowed: fp32, fp16, bf16"),
    ],
)  # fmt: skip
def test_requests_that_are_wrong(
    shell: Shell, checkout: Path, more: tuple[str, ...], said: str
) -> None:
    done = shell.ask(
        *RUN,
        *(one.replace("{}", f"--set=engine.checkout={checkout}") for one in more),
        "--out",
        shell.out,
    )
    assert (done.code, done.lines) == (2, [f"error: {said}"])


def test_conversations_are_refused(shell: Shell, checkout: Path) -> None:
    done = shell.ask(
        "run",
        "aquila2-7b-alpaca",
        *RUN[2:],
        f"--set=engine.checkout={checkout}",
        "--out",
        shell.out,
    )
    said = (
        "engine 'flagscale' does not run aquila2-7b-alpaca: its global batch counts samples,"
        " several to a row that do not see each other; allowed: torch, transformers, megatron,"
        " paddle"
    )
    assert (done.code, done.lines) == (2, [f"error: {said}"])


def test_it_has_no_steps_to_conform(shell: Shell, checkout: Path) -> None:
    done = shell.ask("conform", "flagscale", f"--set=engine.checkout={checkout}")
    said = "engine 'flagscale' has its own weights and rows, so its steps cannot be compared"
    assert (done.code, done.lines) == (2, [f"error: {said}"])


def test_it_is_listed(shell: Shell) -> None:
    told = " ".join(shell.ask("list").out.split())
    assert golden("flagscale-llama-1-13-openwebtext-llama") in told
    assert golden("needs-set-engine-checkout-dir-checkout") in told


@pytest.mark.full
def test_two_ranks_by_torchrun(shell: Shell, checkout: Path) -> None:
    """torch's real launcher starts both ranks."""
    shutil.rmtree(checkout / "torch")
    done, record = start(
        shell,
        checkout,
        "--devices",
        "2",
        "--parallel",
        "DP2",
        "--set=tune.sharding=1",
        "--steps",
        "10",
    )
    assert (done.code, record["status"]) == (0, "valid"), (done.err, record["reasons"])
    assert [one["device"] for one in record["ranks"]] == ["cpu:0", "cpu:1"]
    assert [one["status"] for one in record["ranks"]] == ["done", "done"]
    assert {one["rank"] for one in record["samples"]} == {0}
    total = sum(one["counts"]["tokens"] for one in record["samples"])
    assert total == 10 * TOKENS
    assert record["engine"]["details"]["micro_batches"] == 1
    assert record["engine"]["details"]["program"]["commit"] is None
