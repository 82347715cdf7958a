"""Tests of runs that run out of memory with an automatic size: they are tried once more with a
smaller one, in the same record.
"""

import json
from typing import Any

import pytest

from fixtures.commands import SMOKE, CommandResult, Shell
from fixtures.golden import golden

RUN_WITH_AUTO_SIZE = (
    *SMOKE,
    "--engine",
    "faulty",
    "--passes",
    "infer",
    "--set",
    "tune.batch_tokens=auto",
)
ERROR = "rank 0: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
NOTE_VALUES = {"tried": ["batch_tokens=65536"], "ran": ["batch_tokens=32768"]}
NOTE_ZH = (
    "首次尝试以 batch_tokens=65536（auto）运行时内存不足；本结果为第二次尝试，batch_tokens=32768"
)


def run_above_limit(
    shell: Shell, phase: str, max_tokens: int, *options: str
) -> tuple[CommandResult, dict[str, Any]]:
    """Run the faulty engine, which runs out of memory above `max_tokens` tokens in phase `phase`;
    return the result and the only record, which verifies.
    """
    result = shell(
        *RUN_WITH_AUTO_SIZE,
        "--out",
        shell.out,
        *options,
        FAULTY=f"above@{phase}",
        FAULTY_ABOVE=str(max_tokens),
        FAULTY_CHILDREN="1",
    )
    (record,) = shell.records()
    assert shell.wait_until_ended(), [process.cmdline() for process in shell.processes()]
    assert list(shell.tmp.iterdir()) == []
    verified = shell("verify", shell.out)
    assert (verified.code, verified.err) == (0, ""), verified.out
    return result, record


@pytest.mark.full
@pytest.mark.parametrize("where", ["prepare", "work"])
def test_auto_size_steps_down_after_out_of_memory(faulty: Shell, where: str) -> None:
    result, record = run_above_limit(faulty, where, 32768)
    assert (result.code, record["status"]) == (0, "valid"), result.err
    assert record["tune"]["batch_tokens"] == 32768
    assert record["case"]["origins"]["tune.batch_tokens"] == "auto (command line)"
    assert record["stepped_down"] == {"tune": {"batch_tokens": 65536}, "error": ERROR}
    assert {"code": "note.stepped_down", "values": NOTE_VALUES} in record["notes"]
    assert golden("warning-out-of-memory-with-tune") in result.err
    budget = record["budget"]
    assert list(budget)[:2] == ["first_attempt", "start"]
    assert record["metrics"]["e2e_time"]["value"] == pytest.approx(sum(budget.values()))
    assert 0 < budget["first_attempt"] < sum(budget.values())
    assert record["passes"][0]["start_s"] > budget["first_attempt"]
    page = faulty("report", faulty.out, "--full", "--lang", "zh", "--format", "md")
    assert NOTE_ZH in page.out.replace("\\", "")
    assert "batch_tokens=32768 (auto)" in page.out.replace("\\", "")


@pytest.mark.full
def test_auto_size_steps_down_only_once(faulty: Shell) -> None:
    result, record = run_above_limit(faulty, "prepare", 16384)
    assert (result.code, record["status"]) == (1, "failed")
    assert record["reasons"][0] == {"code": "out_of_memory", "text": ERROR}
    assert record["tune"]["batch_tokens"] == 32768
    assert record["stepped_down"]["tune"] == {"batch_tokens": 65536}


def test_size_given_by_the_user_does_not_step_down(faulty: Shell) -> None:
    result, record = run_above_limit(faulty, "prepare", 1, "--set", "tune.batch_tokens=2048")
    assert (result.code, record["status"], record["reasons"][0]["code"]) == (
        1,
        "failed",
        "out_of_memory",
    )
    assert "stepped_down" not in record
    assert "first_attempt" not in record["budget"]


def test_other_failures_do_not_step_down(faulty: Shell) -> None:
    result = faulty(*RUN_WITH_AUTO_SIZE, "--out", faulty.out, FAULTY="raises@prepare")
    (record,) = faulty.records()
    assert (result.code, record["reasons"][0]["code"]) == (1, "raised")
    assert "stepped_down" not in record


@pytest.mark.full
@pytest.mark.long
def test_reproduced_run_uses_the_recorded_size(faulty: Shell) -> None:
    run_above_limit(faulty, "prepare", 32768)
    (path,) = faulty.out.glob("*.json")
    rerun = faulty(
        "reproduce",
        path,
        "--out",
        faulty.folder / "again",
        FAULTY="above@prepare",
        FAULTY_ABOVE="32768",
    )
    # code 1 if the rerun is slower, which is chance for runs of milliseconds
    assert rerun.code in (0, 1), rerun.err
    (record_path,) = (faulty.folder / "again").glob("*.json")
    record = json.loads(record_path.read_text())
    assert record["tune"]["batch_tokens"] == 32768
    assert record["case"]["origins"]["tune.batch_tokens"] == "record"
    assert "stepped_down" not in record


@pytest.mark.full
@pytest.mark.long
def test_sweep_distinguishes_auto_from_its_number(faulty: Shell) -> None:
    sweep = (
        *SMOKE,
        "--engine",
        "faulty",
        "--passes",
        "infer",
        "--sweep",
        "tune.batch_tokens=auto,8192,65536",
    )
    first = faulty(*sweep, "--out", faulty.out)
    assert first.code == 0, first.err
    assert sorted(record["tune"]["batch_tokens"] for record in faulty.records()) == [
        8192,
        65536,
        65536,
    ]
    second = faulty(*sweep, "--out", faulty.out)
    assert (second.code, second.err.count("already there: ")) == (0, 3)
    assert len(faulty.records()) == 3
