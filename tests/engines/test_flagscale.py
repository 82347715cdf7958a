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

from fixtures.commands import CommandResult, Shell
from fixtures.golden import golden

FAKE_CHECKOUT = Path(__file__).parents[1] / "fixtures" / "flagscale"
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
    shutil.copy(FAKE_CHECKOUT / "run.py", folder)
    shutil.copy(FAKE_CHECKOUT / "train_gpt.py", folder / "flagscale" / "train")
    shutil.copy(FAKE_CHECKOUT / "launcher.py", folder / "torch" / "distributed" / "run.py")
    for package in ("torch", "torch/distributed"):
        (folder / package / "__init__.py").touch()
    return folder


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """A shell in a folder of its own, beside the checkout."""
    (tmp_path / "shell").mkdir()
    new_shell = Shell(tmp_path / "shell")
    yield new_shell
    new_shell.clean()


def run_flagscale(
    shell: Shell, checkout: Path, *options: str, fault: str = ""
) -> tuple[CommandResult, dict[str, Any]]:
    """Run the case with the fake checkout and return the finished command and its first record, {}
    if there is none.

    `fault` is passed to the fake program, such as `crash@5`. Processes or temporary folders that
    are left over fail the test.
    """
    done = shell(
        *RUN,
        f"--set=engine.checkout={checkout}",
        *options,
        "--out",
        shell.out,
        FAKE_FLAGSCALE=fault,
    )
    assert shell.wait_until_ended(within_s=5.0)
    assert list(shell.tmp.glob("steelyard-*")) == []
    return done, (shell.records() or [{}])[0]


def reason_codes(record: dict[str, Any]) -> list[str]:
    """Return the codes of a record's reasons."""
    return [reason["code"] for reason in record["reasons"]]


def commit_all_files(folder: Path) -> str:
    """Make the folder a git repository, commit all files, and return the commit's hash."""
    git = ("git", "-C", folder, "-c", "user.name=a", "-c", "user.email=a@b.c")
    subprocess.run([*git[:3], "init", "-q"], check=True)
    subprocess.run([*git, "add", "-A"], check=True)
    subprocess.run([*git, "commit", "-qm", "all"], check=True)
    return subprocess.run(
        [*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True
    ).stdout.strip()


def test_a_run_records_what_the_program_reports(shell: Shell, checkout: Path) -> None:
    commit_id = commit_all_files(checkout)
    done, record = run_flagscale(shell, checkout)
    assert (done.code, record["status"]) == (0, "valid"), (done.err, record["reasons"])
    assert record["clock"] == "reported"
    assert "drawn" not in record
    steps = record["samples"]
    assert [step["pass"] for step in steps] == ["train"] * STEPS
    assert {json.dumps(step["phases"]) for step in steps} == {"{}"}
    assert {step["counts"]["tokens"] for step in steps} == {TOKENS}
    assert [step["values"]["loss"] for step in steps] == pytest.approx(
        [5.5 - n / 100 for n in range(1, STEPS + 1)]
    )
    assert {step["values"]["grad_norm"] for step in steps} == {1.25}
    times = [step["end_s"] - step["start_s"] for step in steps]
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
    assert details["program"] == {"name": "FlagScale", "commit": commit_id, "dirty": False}
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
    assert "the record lacks" not in checked.out
    assert shell("report", shell.out).code == 0


def test_reported_times_that_disagree_with_the_clock_invalidate_the_run(
    shell: Shell, checkout: Path
) -> None:
    done, record = run_flagscale(shell, checkout, fault="half")
    assert (done.code, record["status"]) == (1, "invalid")
    assert reason_codes(record) == ["reported"]
    text = record["reasons"][0]["text"]
    assert (text["code"], text["values"]["most"]) == ("check.reported.bad", 0.02)


def test_a_nan_loss_ends_the_program(shell: Shell, checkout: Path) -> None:
    """The program's line then has no loss; the engine ends the program at that iteration."""
    done, record = run_flagscale(shell, checkout, fault="nan@5")
    assert (done.code, record["status"], reason_codes(record)[0]) == (1, "invalid", "nan")
    assert record["reasons"][0]["text"] == {"code": "check.finite_loss.bad", "values": {"step": 4}}
    assert len(record["samples"]) == 5
    assert record["engine"]["details"]["exit_code"] is None


def test_a_skipped_iteration_does_not_count_as_a_step(shell: Shell, checkout: Path) -> None:
    done, record = run_flagscale(shell, checkout, fault="skip@5")
    assert (done.code, record["status"], reason_codes(record)) == (1, "invalid", ["coverage"])
    values = {"rank": 0, "taken": STEPS - 1, "wanted": STEPS}
    assert record["reasons"][0]["text"] == {"code": "check.steps.bad", "values": values}
    assert record["engine"]["details"]["skipped_iterations"] == 1


@pytest.mark.full
def test_a_hanging_program_fails_the_run(shell: Shell, checkout: Path) -> None:
    done, record = run_flagscale(shell, checkout, "--hang-after", "3", fault="hang@5")
    assert (done.code, record["status"], reason_codes(record)[0]) == (1, "failed", "hang")
    assert "_read_iteration" in record["failure"]["stacks"]["0"]


@pytest.mark.parametrize(
    ("fault", "code", "said"),
    [
        ("crash@5", "raised", "ended with exit code 1 after 4 of 40 iterations"),
        ("memory@5", "out_of_memory", "CUDA out of memory. Tried to allocate 2.00 GiB"),
        pytest.param(
            "batch@5",
            "raised",
            "a batch of 9 rows and 40 in all; expected: 8 and 40",
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_failing_program_fails_the_run_with_its_error(
    shell: Shell, checkout: Path, fault: str, code: str, said: str
) -> None:
    done, record = run_flagscale(shell, checkout, fault=fault)
    assert (done.code, record["status"], reason_codes(record)[0]) == (1, "failed", code)
    assert said in record["failure"]["error"]
    assert "iteration        4/      40" in record["failure"]["stderr_tail"]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (
            "script",
            (
                "the dry run's script has no plain torchrun command: it contains ';'; nothing"
                " was started"
            ),
        ),
        ("dryrun", "its dry run ended with exit code 1: No module named 'hydra'"),
    ],
)
def test_an_unusable_dry_run_is_refused(
    shell: Shell, checkout: Path, fault: str, said: str
) -> None:
    done, record = run_flagscale(shell, checkout, fault=fault)
    assert (done.code, record) == (2, {})
    assert said in done.err
    assert len(done.lines) == 1, done.err


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ((), "engine flagscale runs a checkout of FlagScale; name it: --set engine.checkout=DIR"),
        (
            ("--set=engine.checkout=none",),
            "engine.checkout 'none' has no run.py; name a checkout of FlagScale",
        ),
        (
            ("--engine", "torch", "--set=engine.checkout=none"),
            "engine.checkout: engine torch needs no checkout; leave it out",
        ),
        (
            ("{}", "--nodes", "2"),
            "--nodes 2: engine flagscale runs on one host; allowed: --nodes 1",
        ),
        (("{}", "--passes", "before,train"), "--passes: no pass 'before'; allowed: train"),
        (
            ("{}", "--precision", "bf16-pure"),
            "engine flagscale does not train in bf16-pure; allowed: fp32, fp16, bf16",
        ),
    ],
)
def test_wrong_requests_are_refused_in_one_line(
    shell: Shell, checkout: Path, more: tuple[str, ...], said: str
) -> None:
    done = shell.run_in_process(
        *RUN,
        *(option.replace("{}", f"--set=engine.checkout={checkout}") for option in more),
        "--out",
        shell.out,
    )
    assert (done.code, done.lines) == (2, [f"error: {said}"])


def test_conversations_are_refused(shell: Shell, checkout: Path) -> None:
    done = shell.run_in_process(
        "run",
        "aquila2-7b-alpaca",
        *RUN[2:],
        f"--set=engine.checkout={checkout}",
        "--out",
        shell.out,
    )
    message = (
        "engine 'flagscale' does not run aquila2-7b-alpaca: its global batch counts samples,"
        " several to a row that do not see each other; allowed: torch, transformers, megatron,"
        " paddle"
    )
    assert (done.code, done.lines) == (2, [f"error: {message}"])


def test_conform_refuses_an_engine_with_its_own_weights(shell: Shell, checkout: Path) -> None:
    done = shell.run_in_process("conform", "flagscale", f"--set=engine.checkout={checkout}")
    message = "engine 'flagscale' has its own weights and rows, so its steps cannot be compared"
    assert (done.code, done.lines) == (2, [f"error: {message}"])


def test_list_shows_its_cases_and_the_checkout_it_needs(shell: Shell) -> None:
    listing = " ".join(shell.run_in_process("list").out.split())
    assert golden("flagscale-llama-1-13-openwebtext-llama") in listing
    assert golden("needs-set-engine-checkout-dir-checkout") in listing


@pytest.mark.full
def test_one_worker_reports_for_two_ranks_of_torchrun(shell: Shell, checkout: Path) -> None:
    """torch's real launcher starts both ranks."""
    shutil.rmtree(checkout / "torch")
    done, record = run_flagscale(
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
    assert [entry["device"] for entry in record["ranks"]] == ["cpu:0", "cpu:1"]
    assert [entry["status"] for entry in record["ranks"]] == ["done", "done"]
    assert {entry["rank"] for entry in record["samples"]} == {0}
    total = sum(entry["counts"]["tokens"] for entry in record["samples"])
    assert total == 10 * TOKENS
    assert record["engine"]["details"]["micro_batches"] == 1
    assert record["engine"]["details"]["program"]["commit"] is None
