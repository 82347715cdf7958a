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

from fixtures.commands import CASE, SMOKE, Done, Shell, finish, kill_hard, wait_for
from fixtures.golden import golden
from fixtures.records import sentence
from steelyard.run.failure import ILLEGAL_HINT

FAULTY = (*SMOKE, "--engine", "faulty")


def sole_record(shell: Shell, done: Done) -> dict[str, Any]:
    """Check what every ended run must leave and return its record: exit code 1, one record that
    verifies, no process and no temporary file.
    """
    assert done.code == 1, done.err
    (record,) = shell.records()
    assert shell.nothing_left(), [one.cmdline() for one in shell.processes()]
    assert list(shell.tmp.iterdir()) == []
    checked = shell("verify", shell.out)
    assert (checked.code, checked.err) == (0, ""), checked.out
    assert "Traceback" not in done.err
    return record


def run_faulty(shell: Shell, fault: str, *options: str, **variables: str) -> dict[str, Any]:
    """Run the faulty engine with this fault, check the printed status and reasons, and return the
    only record.
    """
    done = shell(
        *FAULTY, "--out", shell.out, *options, FAULTY=fault, FAULTY_CHILDREN="1", **variables
    )
    record = sole_record(shell, done)
    status = (
        f"{record['status']}: records"
        if not shell.out.is_absolute()
        else f"{record['status']}: {shell.out}"
    )
    assert done.lines[0].startswith(status)
    assert done.lines[1:] == [
        f"  {reason['code']}: {sentence(reason['text'])}" for reason in record["reasons"]
    ]
    return record


def reason(record: dict[str, Any]) -> tuple[str, str, str]:
    """Return the status of a record, and the code and text of its first reason."""
    return record["status"], record["reasons"][0]["code"], sentence(record["reasons"][0]["text"])


def test_third_party_engine_runs_and_its_children_end(faulty: Shell) -> None:
    done = faulty(*FAULTY, "--out", faulty.out, FAULTY_CHILDREN="1")
    assert done.code == 0, done.err
    (record,) = faulty.records()
    assert (record["status"], record["engine"]["name"]) == ("valid", "faulty")
    assert record["failure"] is None
    assert faulty.nothing_left()
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
        ("exits@work", "killed", "rank 0 left no result; exit code 0"),
    ],
)
def test_engine_that_ends_early(faulty: Shell, fault: str, code: str, text: str) -> None:
    record = run_faulty(faulty, fault)
    assert reason(record) == ("failed", code, text)
    assert record["failure"]["error"] == text
    assert record["failure"]["exit_code"] == {"kills@work": -9, "exits@work": 0}.get(fault, 1)
    if fault.startswith("raises"):
        assert "a line before the end\n" in record["failure"]["stderr_tail"]
        assert "Traceback" in record["failure"]["stderr_tail"]
        assert record["failure"]["rank"] == 0
        assert record["ranks"][0]["status"] == "raised"
    assert record["metrics"]["p_infer_whole"]["value"] is None
    assert record["metrics"]["e2e_time"]["value"] == pytest.approx(sum(record["budget"].values()))


def test_allocator_that_refuses(faulty: Shell) -> None:
    record = run_faulty(faulty, "allocates@work")
    status, code, text = reason(record)
    assert (status, code) == ("failed", "out_of_memory")
    assert "DefaultCPUAllocator" in text
    assert len(text.splitlines()) == 1


@pytest.mark.full
def test_a_flood_on_stderr_leaves_its_tail(faulty: Shell) -> None:
    record = run_faulty(faulty, "floods@prepare")
    assert reason(record)[:2] == ("failed", "raised")
    tail = record["failure"]["stderr_tail"]
    assert len(tail) <= 4000
    assert "\nthe last line\nTraceback" in tail


@pytest.mark.full
def test_hang(faulty: Shell) -> None:
    record = run_faulty(
        faulty, "waits@work", "--hang-after", "10", FAULTY_MARK=str(faulty.folder / "mark")
    )
    assert reason(record) == ("failed", "hang", golden("nothing-was-heard-of-the-workers"))


@pytest.mark.full
def test_time_limit(faulty: Shell) -> None:
    record = run_faulty(
        faulty, "waits@prepare", "--time-limit", "12", FAULTY_MARK=str(faulty.folder / "mark")
    )
    said = "the run took longer than its limit of 12 s, in phase 'warmup val'"
    assert reason(record) == ("failed", "time_limit", said)


def interrupted(shell: Shell, fault: str, *numbers: int) -> Done:
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
    return finish(process)


@pytest.mark.parametrize(
    ("number", "who"), [(signal.SIGINT, "the user"), (signal.SIGTERM, "SIGTERM")]
)
def test_interrupt(faulty: Shell, number: int, who: str) -> None:
    record = sole_record(faulty, interrupted(faulty, "waits@work", number))
    status, code, text = reason(record)
    phases = [
        f"interrupted by {who}, in phase {name!r}" for name in ("val", "calibrate", "prepare val")
    ]  # the last phase that was reported
    assert (status, code, text in phases) == ("failed", "interrupted", True), text
    assert record["budget"]["val"] > 0.0  # time until the interrupt
    assert [one["code"] for one in record["reasons"]] == ["interrupted"]
    assert record["failure"]["exit_code"] is None  # the agent ended it


@pytest.mark.full
def test_a_rank_without_work_is_no_reason(shell: Shell) -> None:
    """With one question for two ranks, the second rank has no work to account for."""
    done = shell(*SMOKE, "--devices", "2", "--sample", "1", "--out", shell.out)
    assert (done.code, [record["status"] for record in shell.records()]) == (0, ["valid"])


@pytest.mark.full
def test_interrupt_again_and_again(faulty: Shell) -> None:
    """The second Ctrl-C arrives while a worker that ignores signals is given time to end."""
    done = interrupted(faulty, "stubborn@work", signal.SIGINT, signal.SIGINT, signal.SIGTERM)
    assert reason(sole_record(faulty, done))[1] == "interrupted"


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
    status, found, said = reason(record)
    assert (status, found) == ("invalid", code)
    assert text is None or said == text
    timed = {"implausible"}  # on a busy machine the matmul may be timed too slow
    assert {one["code"] for one in record["reasons"]} - timed == {code}
    assert record["failure"] is None
    if fault == "tokens":
        tokens = record["data"]["tokens"]
        assert said == f"infer: the samples count {tokens + 1:,} tokens; the data have {tokens:,}"
    if fault == "hides":
        assert "of the pass; at least 95% is required" in said


SLOW = [
    pytest.param(fault, marks=pytest.mark.full)
    for fault in ("no_such_letter", "lengths", "no_table", "no_numbers")
]


@pytest.mark.full
@pytest.mark.parametrize("fault", ["no_such_question", "odd_detail", *SLOW])
def test_answers_that_make_no_sense(faulty: Shell, fault: str) -> None:
    """The record of an engine with unreadable answers is failed, and the parent does not crash."""
    record = run_faulty(faulty, fault)
    assert reason(record)[:2] == ("failed", "raised")
    assert "engine" in reason(record)[2]


@pytest.mark.full
def test_engine_that_counts_too_little(faulty: Shell) -> None:
    record = run_faulty(faulty, "few_counts")
    assert reason(record)[:2] == ("failed", "raised")
    assert "logits" in reason(record)[2]


def test_parent_killed(faulty: Shell) -> None:
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
    kill_hard(process)
    assert faulty.nothing_left(within_s=8.0), [one.cmdline() for one in faulty.processes()]
    assert process.wait() == -signal.SIGKILL
    (left,) = faulty.records()
    assert reason(left)[:2] == ("failed", "unfinished")
    assert faulty("verify", faulty.out).code == 0
    assert list(faulty.tmp.iterdir()) == []


def test_bad_data_is_a_bad_request(shell: Shell) -> None:
    data = shell.folder / "mmlu"
    for split in ("dev", "test"):
        (data / split).mkdir(parents=True)
        (data / split / f"physics_{split}.csv").write_text("only,three,columns\n")
    done = shell(*SMOKE, "--data", data, "--out", shell.out)
    assert (done.code, done.out) == (2, "")
    assert done.lines == [golden("error-dev-physics_dev-csv-row-1")]
    assert shell.records() == []
    assert shell.nothing_left()


@pytest.mark.parametrize("division", ["closed", pytest.param("open", marks=pytest.mark.full)])
def test_two_devices_answer_as_one(shell: Shell, smoke: dict[str, Path], division: str) -> None:
    done = shell(*SMOKE, "--devices", "2", "--division", division, "--out", shell.out, "--json")
    assert (done.code, done.err) == (0, "")
    (two,) = done.json()["records"]
    from steelyard.record import record

    one = record.record_to_json(record.read_record(smoke[division]))
    assert two["outputs"] == one["outputs"]
    assert two["case"]["key"] == one["case"]["key"]
    assert two["plan"] == {"nodes": 1, "devices": 2, "tp": 1, "pp": 1, "dp": 2, "launcher": "local"}
    assert {(s["pass"], s["rank"]) for s in two["samples"]} == {
        ("val", 0),
        ("val", 1),
        ("infer", 0),
        ("infer", 1),
    }
    assert [rank["device"] for rank in two["ranks"]] == ["cpu:0", "cpu:1"]
    tokens = {
        n: sum(s["counts"].get("tokens", 0) for s in r["samples"] if s["pass"] == "val")
        for n, r in ((1, one), (2, two))
    }
    assert tokens[2] == tokens[1] or division == "open"
    assert shell("verify", shell.out).code == 0
    assert shell.nothing_left()


def test_two_devices_one_killed(faulty: Shell) -> None:
    record = run_faulty(faulty, "kills@work", "--devices", "2", FAULTY_RANK="1")
    assert reason(record)[:2] == ("failed", "killed")
    assert reason(record)[2].startswith("rank 1 was ended by SIGKILL")
    assert (record["failure"]["rank"], record["failure"]["exit_code"]) == (1, -9)


@pytest.mark.full
def test_two_devices_one_raises(faulty: Shell) -> None:
    """The rank that failed first is named, not the one that lost its peer."""
    record = run_faulty(faulty, "raises@work", "--devices", "2", FAULTY_RANK="1")
    assert reason(record) == ("failed", "raised", "rank 1: ArithmeticError: the engine broke")


def test_agent_killed(faulty: Shell) -> None:
    """Workers run in sessions of their own; without their agent they end themselves and their
    children.
    """
    record = run_faulty(faulty, "kills_parent@work", "--devices", "2", FAULTY_RANK="1")
    assert reason(record) == (
        "failed",
        "agent_killed",
        golden("host-localhost-its-agent-ended-without"),
    )


def test_folder_of_records_is_a_file(shell: Shell) -> None:
    shell.out.write_text("in the way")
    for out in (shell.out, shell.out / "below"):
        done = shell(*SMOKE, "--out", out)
        assert (done.code, done.out) == (2, "")
        assert done.lines[0].startswith(f"error: output folder {str(out)!r} cannot be written: ")
        assert done.lines[0].endswith("; choose another with --out")
        assert len(done.lines) == 1
    assert shell.out.read_text() == "in the way"
    assert list(shell.tmp.iterdir()) == []


@pytest.mark.parametrize(
    "options", [("--nodes", "2"), ("--devices", "0"), ("--passes", "bare"), ("--hang-after", "0")]
)
def test_wrong_requests_leave_nothing(shell: Shell, options: tuple[str, ...]) -> None:
    done = shell(*SMOKE, *options, "--out", shell.out)
    assert (done.code, len(done.lines)) == (2, 1)
    assert not shell.out.exists()


@pytest.mark.parametrize("small_disk", ["8k"], indirect=True)
def test_full_disk(shell: Shell, small_disk: Path) -> None:
    done = shell(*SMOKE, "--out", small_disk)
    assert (done.code, done.out) == (2, "")
    assert done.lines == [
        f"error: output folder {str(small_disk)!r} cannot be written: No space left on device;"
        " choose another with --out"
    ]
    assert list(small_disk.iterdir()) == []
    assert shell.nothing_left()


LIMITED = """
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


def test_write_that_stops_half_way(shell: Shell, smoke: dict[str, Path]) -> None:
    shell.out.mkdir()
    command = [sys.executable, "-c", LIMITED, str(smoke["closed"]), *SMOKE, "--out", str(shell.out)]
    done = subprocess.run(
        command, env=shell.env(), capture_output=True, text=True, check=False, cwd=shell.folder
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert (
        done.stderr
        == f"error: the record cannot be written to {str(shell.out)!r}: File too large; the record"
        " is lost\n"
    )
    assert list(shell.out.iterdir()) == []


def test_without_torch(tmp_path: Path, smoke: dict[str, Path]) -> None:
    """Every command but `run` works, and `run` says what to install."""
    site = tmp_path / "site"
    site.mkdir()
    hide = "import importlib.machinery, sys\nreal = importlib.machinery.PathFinder.find_spec\n"
    hide += "def find_spec(name, path=None, target=None):\n"
    hide += "    return None if name.partition('.')[0] == 'torch' else real(name, path, target)\n"
    hide += "importlib.machinery.PathFinder.find_spec = staticmethod(find_spec)\n"
    (site / "sitecustomize.py").write_text(hide)
    shell = Shell(tmp_path, (site,))
    for verb in (
        ("list",),
        ("show", CASE),
        ("report", smoke["closed"]),
        ("verify", smoke["closed"]),
        ("schema",),
    ):
        done = shell(*verb)
        assert (done.code, done.err) == (0, ""), verb
    done = shell(*SMOKE, "--out", shell.out)
    assert (done.code, done.out) == (2, "")
    assert done.lines == [golden("error-torch-is-not-installed-and")]
    assert not shell.out.exists()


def test_files_beside_the_user_are_not_imported(shell: Shell) -> None:
    """A worker must not import a `torch.py` that happens to be in the current folder."""
    for name in ("torch", "json", "numpy"):
        (shell.folder / f"{name}.py").write_text("raise RuntimeError('not mine')\n")
    done = shell(*SMOKE, "--passes", "val", "--out", shell.out)
    assert done.code == 0, done.err


def test_names_cannot_leave_the_folder(faulty: Shell) -> None:
    """A case file may be hostile, and the name of its precision is part of the record's file name."""
    from importlib import resources

    text = (resources.files("steelyard") / "cases" / f"{CASE}.toml").read_text()
    odd = '[smoke.question.precision]\nname = "../../evil/x"\nmatmul = "fp32"\nweights = "fp32"\n'
    text = text.replace('[smoke.question]\nprecision = "fp32"\n', odd)
    (faulty.folder / "mine.toml").write_text(text)
    done = faulty(
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
    assert done.code == 0, done.err
    (path,) = faulty.out.iterdir()
    assert path.name.startswith("20")


@pytest.mark.parametrize("devices", ["1", pytest.param("2", marks=pytest.mark.full)])
def test_a_worker_that_dies_of_an_illegal_instruction(faulty: Shell, devices: str) -> None:
    record = run_faulty(faulty, "illegal@work", "--devices", devices, FAULTY_RANK="0")
    assert reason(record) == (
        "failed",
        "illegal_instruction",
        f"rank 0 was ended by SIGILL: {ILLEGAL_HINT}",
    )
    assert "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16" in ILLEGAL_HINT


def test_no_process_of_ours_before_we_start(faulty: Shell) -> None:
    """The check for leftover processes is itself tested: it sees a process that is there."""
    sleeper = subprocess.Popen(["sleep", "30"], env=faulty.env())
    try:
        assert [one.pid for one in faulty.processes()] == [sleeper.pid]
    finally:
        sleeper.kill()
        sleeper.wait()
    assert faulty.nothing_left()
    assert psutil.pid_exists(os.getpid())
