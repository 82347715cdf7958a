"""Tests of runs that fail, with real processes: one record says what happened, and no process or
file is left behind.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from fixtures.commands import (
    CASE,
    SMOKE,
    CommandResult,
    Shell,
    send_sigkill,
    wait_for,
    wait_for_result,
)
from fixtures.golden import golden
from fixtures.records import format_sentence
from steelyard.run.failure import ILLEGAL_HINT

FAULTY = (*SMOKE, "--engine", "faulty")


def check_sole_record(shell: Shell, result: CommandResult) -> dict[str, Any]:
    """Check what every ended run must leave and return its record: exit code 1, one record that
    verifies, no process and no temporary file.
    """
    assert result.code == 1, result.err
    (record,) = shell.records()
    assert shell.wait_until_ended(), [process.cmdline() for process in shell.processes()]
    assert list(shell.tmp.iterdir()) == []
    verified = shell("verify", shell.out)
    assert (verified.code, verified.err) == (0, ""), verified.out
    assert "the record lacks" not in verified.out
    assert "Traceback" not in result.err
    return record


def run_faulty(shell: Shell, fault: str, *options: str, **variables: str) -> dict[str, Any]:
    """Run the faulty engine with this fault, check the printed status and reasons, and return the
    only record.
    """
    result = shell(
        *FAULTY, "--out", shell.out, *options, FAULTY=fault, FAULTY_CHILDREN="1", **variables
    )
    record = check_sole_record(shell, result)
    status = (
        f"{record['status']}: records"
        if not shell.out.is_absolute()
        else f"{record['status']}: {shell.out}"
    )
    assert result.lines[0].startswith(status)
    assert result.lines[1:] == [
        f"  {reason['code']}: {format_sentence(reason['text'])}" for reason in record["reasons"]
    ]
    return record


def first_reason(record: dict[str, Any]) -> tuple[str, str, str]:
    """Return the status of a record, and the code and text of its first reason."""
    return (
        record["status"],
        record["reasons"][0]["code"],
        format_sentence(record["reasons"][0]["text"]),
    )


def test_third_party_engine_runs_and_its_children_end(faulty: Shell) -> None:
    result = faulty(*FAULTY, "--out", faulty.out, FAULTY_CHILDREN="1")
    assert result.code == 0, result.err
    (record,) = faulty.records()
    assert (record["status"], record["engine"]["name"]) == ("valid", "faulty")
    assert record["failure"] is None
    assert faulty.wait_until_ended()
    assert list(faulty.tmp.iterdir()) == []


@pytest.mark.full
@pytest.mark.parametrize(
    "fault,code,text",
    [
        ("raises@prepare", "raised", "rank 0: ArithmeticError: the engine broke"),
        ("raises@work", "raised", "rank 0: ArithmeticError: the engine broke"),
        ("memory@work", "out_of_memory", "rank 0: MemoryError: no more of it"),
        (
            "torch_memory@prepare",
            "out_of_memory",
            "rank 0: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
        ),
        ("kills@work", "killed", "rank 0 was ended by SIGKILL"),
        ("exits@work", "killed", "rank 0 wrote no result; exit code 0"),
    ],
)
def test_engine_that_ends_early_leaves_a_failed_record(
    faulty: Shell, fault: str, code: str, text: str
) -> None:
    record = run_faulty(faulty, fault)
    assert first_reason(record) == ("failed", code, text)
    assert record["failure"]["error"] == text
    assert record["failure"]["exit_code"] == {"kills@work": -9, "exits@work": 0}.get(fault, 1)
    if fault.startswith("raises"):
        assert "a line before the end\n" in record["failure"]["stderr_tail"]
        assert "Traceback" in record["failure"]["stderr_tail"]
        assert record["failure"]["rank"] == 0
        assert record["ranks"][0]["status"] == "raised"
    assert record["metrics"]["p_infer_whole"]["value"] is None
    assert record["metrics"]["e2e_time"]["value"] == pytest.approx(sum(record["budget"].values()))


def test_refused_allocation_is_out_of_memory(faulty: Shell) -> None:
    record = run_faulty(faulty, "allocates@work")
    status, code, text = first_reason(record)
    assert (status, code) == ("failed", "out_of_memory")
    assert "DefaultCPUAllocator" in text
    assert len(text.splitlines()) == 1


@pytest.mark.full
def test_only_the_tail_of_stderr_is_recorded(faulty: Shell) -> None:
    record = run_faulty(faulty, "floods@prepare")
    assert first_reason(record)[:2] == ("failed", "raised")
    tail = record["failure"]["stderr_tail"]
    assert len(tail) <= 4000
    assert "\nthe last line\nTraceback" in tail


@pytest.mark.full
def test_hang_is_reported_as_failure(faulty: Shell) -> None:
    record = run_faulty(
        faulty, "waits@work", "--hang-after", "10", FAULTY_MARK=str(faulty.folder / "mark")
    )
    assert first_reason(record) == ("failed", "hang", golden("nothing-was-heard-of-the-workers"))


@pytest.mark.full
def test_time_limit_is_reported_as_failure(faulty: Shell) -> None:
    record = run_faulty(
        faulty, "waits@prepare", "--time-limit", "12", FAULTY_MARK=str(faulty.folder / "mark")
    )
    expected = "the run took longer than its limit of 12 s, in phase 'warmup val'"
    assert first_reason(record) == ("failed", "time_limit", expected)


def run_and_send_signals(shell: Shell, fault: str, *numbers: int) -> CommandResult:
    """Run the faulty engine, send these signals 0.4 s apart once it has started to work, and return
    the result.
    """
    mark = shell.folder / "mark"
    process = shell.start(
        *FAULTY,
        "--repeat",
        "2",
        "--out",
        shell.out,
        FAULTY=fault,
        FAULTY_CHILDREN="1",
        FAULTY_MARK=str(mark),
    )
    assert wait_for(mark.exists)
    for number in numbers:
        process.send_signal(number)
        wait_for(lambda: False, 0.4)
    return wait_for_result(process)


@pytest.mark.parametrize(
    ("number", "who"), [(signal.SIGINT, "the user"), (signal.SIGTERM, "SIGTERM")]
)
def test_interrupted_run_leaves_a_record(faulty: Shell, number: int, who: str) -> None:
    record = check_sole_record(faulty, run_and_send_signals(faulty, "waits@work", number))
    status, code, text = first_reason(record)
    phases = [
        f"interrupted by {who}, in phase {name!r}" for name in ("val", "calibrate", "prepare val")
    ]  # the last phase that was reported
    assert (status, code, text in phases) == ("failed", "interrupted", True), text
    assert record["budget"]["val"] > 0.0  # time until the interrupt
    assert [entry["code"] for entry in record["reasons"]] == ["interrupted"]
    assert record["failure"]["exit_code"] is None  # the agent ended it


@pytest.mark.full
def test_rank_without_work_does_not_invalidate_a_run(shell: Shell) -> None:
    """With one question for two ranks, the second rank has no work to account for."""
    result = shell(*SMOKE, "--devices", "2", "--sample", "1", "--out", shell.out)
    assert (result.code, [record["status"] for record in shell.records()]) == (0, ["valid"])


@pytest.mark.full
def test_repeated_interrupts_leave_one_record(faulty: Shell) -> None:
    """The second Ctrl-C arrives while a worker that ignores signals is given time to end."""
    result = run_and_send_signals(
        faulty, "stubborn@work", signal.SIGINT, signal.SIGINT, signal.SIGTERM
    )
    assert first_reason(check_sole_record(faulty, result))[1] == "interrupted"


@pytest.mark.full
@pytest.mark.parametrize(
    "fault,code,text",
    [
        ("nan", "nan", "val: 1 of 48 questions have logits that are not finite"),
        ("nan_value", "nan", "val: step 3 on rank 0 has a value that is not finite"),
        ("twice", "coverage", "val: of 48 questions, 1 have no answer and 1 have more than one"),
        (
            "leaves_out",
            "coverage",
            "val: of 48 questions, 1 have no answer and 0 have more than one",
        ),
        ("tokens", "tokens", None),
        ("hides", "unaccounted", None),
    ],
)
def test_wrong_answers_are_invalid(faulty: Shell, fault: str, code: str, text: str | None) -> None:
    record = run_faulty(faulty, fault)
    status, reason_code, reason_text = first_reason(record)
    assert (status, reason_code) == ("invalid", code)
    assert text is None or reason_text == text
    timing_codes = {"implausible"}  # on a busy machine the matmul may be timed too slow
    assert {entry["code"] for entry in record["reasons"]} - timing_codes == {code}
    assert record["failure"] is None
    if fault == "tokens":
        tokens = record["data"]["tokens"]
        assert (
            reason_text
            == f"infer: the samples count {tokens + 1:,} tokens; the data have {tokens:,}"
        )
    if fault == "hides":
        assert "of the pass; at least 95% is required" in reason_text


SLOW_FAULTS = [
    pytest.param(fault, marks=pytest.mark.full)
    for fault in ("no_such_letter", "lengths", "no_table", "no_numbers")
]


@pytest.mark.full
@pytest.mark.parametrize("fault", ["no_such_question", "odd_detail", *SLOW_FAULTS])
def test_unreadable_answers_fail_the_run(faulty: Shell, fault: str) -> None:
    """The record of an engine with unreadable answers is failed, and the parent does not crash."""
    record = run_faulty(faulty, fault)
    assert first_reason(record)[:2] == ("failed", "raised")
    assert "engine" in first_reason(record)[2]


@pytest.mark.full
def test_engine_without_all_counts_fails(faulty: Shell) -> None:
    record = run_faulty(faulty, "few_counts")
    assert first_reason(record)[:2] == ("failed", "raised")
    assert "logits" in first_reason(record)[2]


def test_killed_parent_leaves_an_unfinished_record_and_no_processes(faulty: Shell) -> None:
    """An unfinished record is written at the start of a run. The agent notices that its parent is
    gone and ends the workers and their children.

    This holds even while the dead parent is a zombie, as in containers whose first process reaps no
    children.
    """
    mark = faulty.folder / "mark"
    process = faulty.start(
        *FAULTY,
        "--out",
        faulty.out,
        pipes=False,
        FAULTY="waits@work",
        FAULTY_CHILDREN="1",
        FAULTY_MARK=str(mark),
    )
    assert wait_for(mark.exists)
    send_sigkill(process)
    assert faulty.wait_until_ended(within_s=8.0), [
        worker.cmdline() for worker in faulty.processes()
    ]
    assert process.wait() == -signal.SIGKILL
    (record,) = faulty.records()
    assert first_reason(record)[:2] == ("failed", "unfinished")
    assert faulty("verify", faulty.out).code == 0
    assert list(faulty.tmp.iterdir()) == []


def test_bad_data_is_a_bad_request(shell: Shell) -> None:
    data = shell.folder / "mmlu"
    for split in ("dev", "test"):
        (data / split).mkdir(parents=True)
        (data / split / f"physics_{split}.csv").write_text("only,three,columns\n")
    result = shell(*SMOKE, "--data", data, "--out", shell.out)
    assert (result.code, result.out) == (2, "")
    assert result.lines == [golden("error-dev-physics_dev-csv-row-1")]
    assert shell.records() == []
    assert shell.wait_until_ended()


@pytest.mark.parametrize("division", ["closed", pytest.param("open", marks=pytest.mark.full)])
def test_two_devices_give_the_answers_of_one(
    shell: Shell, smoke: dict[str, Path], division: str
) -> None:
    result = shell(*SMOKE, "--devices", "2", "--division", division, "--out", shell.out, "--json")
    assert (result.code, result.err) == (0, "")
    (on_two_devices,) = result.json()["records"]
    from steelyard.record import record

    on_one_device = record.record_to_json(record.read_record(smoke[division]))
    assert on_two_devices["outputs"] == on_one_device["outputs"]
    assert on_two_devices["case"]["key"] == on_one_device["case"]["key"]
    assert on_two_devices["plan"] == {
        "nodes": 1,
        "devices": 2,
        "tp": 1,
        "pp": 1,
        "dp": 2,
        "launcher": "local",
    }
    assert {(s["pass"], s["rank"]) for s in on_two_devices["samples"]} == {
        ("val", 0),
        ("val", 1),
        ("infer", 0),
        ("infer", 1),
    }
    assert [rank["device"] for rank in on_two_devices["ranks"]] == ["cpu:0", "cpu:1"]
    tokens = {
        n: sum(s["counts"].get("tokens", 0) for s in r["samples"] if s["pass"] == "val")
        for n, r in ((1, on_one_device), (2, on_two_devices))
    }
    assert tokens[2] == tokens[1] or division == "open"
    assert shell("verify", shell.out).code == 0
    assert shell.wait_until_ended()


def test_killed_rank_of_two_is_named(faulty: Shell) -> None:
    record = run_faulty(faulty, "kills@work", "--devices", "2", FAULTY_RANK="1")
    assert first_reason(record)[:2] == ("failed", "killed")
    assert first_reason(record)[2].startswith("rank 1 was ended by SIGKILL")
    assert (record["failure"]["rank"], record["failure"]["exit_code"]) == (1, -9)


@pytest.mark.full
def test_rank_that_failed_first_is_named(faulty: Shell) -> None:
    """The rank that failed first is named, not the one that lost its peer."""
    record = run_faulty(faulty, "raises@work", "--devices", "2", FAULTY_RANK="1")
    assert first_reason(record) == ("failed", "raised", "rank 1: ArithmeticError: the engine broke")


def test_killed_agent_is_reported_and_its_workers_end(faulty: Shell) -> None:
    """Workers run in sessions of their own; without their agent they end themselves and their
    children.
    """
    record = run_faulty(faulty, "kills_parent@work", "--devices", "2", FAULTY_RANK="1")
    assert first_reason(record) == (
        "failed",
        "agent_killed",
        golden("host-localhost-its-agent-ended-without"),
    )


def test_output_folder_that_is_a_file_is_refused(shell: Shell) -> None:
    shell.out.write_text("in the way")
    for out in (shell.out, shell.out / "below"):
        result = shell(*SMOKE, "--out", out)
        assert (result.code, result.out) == (2, "")
        assert result.lines[0].startswith(f"error: output folder {str(out)!r} cannot be written: ")
        assert result.lines[0].endswith("; choose another with --out")
        assert len(result.lines) == 1
    assert shell.out.read_text() == "in the way"
    assert list(shell.tmp.iterdir()) == []


@pytest.mark.parametrize(
    "options", [("--nodes", "2"), ("--devices", "0"), ("--passes", "bare"), ("--hang-after", "0")]
)
def test_wrong_requests_write_nothing(shell: Shell, options: tuple[str, ...]) -> None:
    result = shell(*SMOKE, *options, "--out", shell.out)
    assert (result.code, len(result.lines)) == (2, 1)
    assert not shell.out.exists()


@pytest.mark.parametrize("small_disk", ["8k"], indirect=True)
def test_full_disk_is_refused_before_the_run(shell: Shell, small_disk: Path) -> None:
    result = shell(*SMOKE, "--out", small_disk)
    assert (result.code, result.out) == (2, "")
    assert result.lines == [
        f"error: output folder {str(small_disk)!r} cannot be written: No space left on device;"
        " choose another with --out"
    ]
    assert list(small_disk.iterdir()) == []
    assert shell.wait_until_ended()


PROGRAM_WITH_FILE_SIZE_LIMIT = """
import resource, sys
from pathlib import Path
from steelyard import cli
from steelyard.record import record
from steelyard.run import parent as run
found = record.read_record(Path(sys.argv[1]))
def run_case(ready, *more):
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    return found, record.write_record(found, ready.request.out)
run.run_case = run_case
sys.argv = ["steelyard", *sys.argv[2:]]
cli.main()
"""


def test_half_written_record_is_removed(shell: Shell, smoke: dict[str, Path]) -> None:
    shell.out.mkdir()
    command = [
        sys.executable,
        "-c",
        PROGRAM_WITH_FILE_SIZE_LIMIT,
        str(smoke["closed"]),
        *SMOKE,
        "--out",
        str(shell.out),
    ]
    result = subprocess.run(
        command, env=shell.env(), capture_output=True, text=True, check=False, cwd=shell.folder
    )
    assert (result.returncode, result.stdout) == (1, "")
    assert (
        result.stderr
        == f"error: the record cannot be written to {str(shell.out)!r}: File too large; the record"
        " is lost\n"
    )
    assert list(shell.out.iterdir()) == []


def test_only_run_needs_torch(tmp_path: Path, smoke: dict[str, Path]) -> None:
    """Every command but `run` works, and `run` says what to install."""
    site = tmp_path / "site"
    site.mkdir()
    program = "import importlib.machinery, sys\nreal = importlib.machinery.PathFinder.find_spec\n"
    program += "def find_spec(name, path=None, target=None):\n"
    program += (
        "    return None if name.partition('.')[0] == 'torch' else real(name, path, target)\n"
    )
    program += "importlib.machinery.PathFinder.find_spec = staticmethod(find_spec)\n"
    (site / "sitecustomize.py").write_text(program)
    shell = Shell(tmp_path, (site,))
    for verb in (
        ("list",),
        ("show", CASE),
        ("report", smoke["closed"]),
        ("verify", smoke["closed"]),
        ("schema",),
    ):
        result = shell(*verb)
        assert (result.code, result.err) == (0, ""), verb
    result = shell(*SMOKE, "--out", shell.out)
    assert (result.code, result.out) == (2, "")
    assert result.lines == [golden("error-torch-is-not-installed-and")]
    assert not shell.out.exists()


def test_modules_in_the_current_folder_are_not_imported(shell: Shell) -> None:
    """A worker must not import a `torch.py` that happens to be in the current folder."""
    for name in ("torch", "json", "numpy"):
        (shell.folder / f"{name}.py").write_text("raise RuntimeError('not mine')\n")
    result = shell(*SMOKE, "--passes", "val", "--out", shell.out)
    assert result.code == 0, result.err


def test_record_file_name_stays_in_its_folder(faulty: Shell) -> None:
    """A case file may be hostile, and the name of its precision is part of the record's file
    name.
    """
    from importlib import resources

    text = (resources.files("steelyard") / "cases" / f"{CASE}.toml").read_text()
    hostile_precision = (
        '[smoke.question.precision]\nname = "../../evil/x"\nmatmul = "fp32"\nweights = "fp32"\n'
    )
    text = text.replace('[smoke.question]\nprecision = "fp32"\n', hostile_precision)
    (faulty.folder / "mine.toml").write_text(text)
    result = faulty(
        "run",
        "mine.toml",
        "--size",
        "smoke",
        "--accelerator",
        "cpu",
        "--engine",
        "faulty",
        "--out",
        faulty.out,
    )
    assert result.code == 0, result.err
    (path,) = faulty.out.iterdir()
    assert path.name.startswith("20")


@pytest.mark.parametrize("devices", ["1", pytest.param("2", marks=pytest.mark.full)])
def test_illegal_instruction_is_reported_with_a_hint(faulty: Shell, devices: str) -> None:
    record = run_faulty(faulty, "illegal@work", "--devices", devices, FAULTY_RANK="0")
    assert first_reason(record) == (
        "failed",
        "illegal_instruction",
        f"rank 0 was ended by SIGILL: {ILLEGAL_HINT}",
    )
    assert "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16" in ILLEGAL_HINT


def test_check_for_leftover_processes_sees_one(faulty: Shell) -> None:
    """The check for leftover processes is itself tested: it sees a process that is there."""
    sleeper = subprocess.Popen(["sleep", "30"], env=faulty.env())
    try:
        assert [process.pid for process in faulty.processes()] == [sleeper.pid]
    finally:
        sleeper.kill()
        sleeper.wait()
    assert faulty.wait_until_ended()
    assert psutil.pid_exists(os.getpid())
