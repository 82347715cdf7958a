"""Tests of runs that run out of memory with an automatic size: they are tried once more with a
smaller one, in the same record.
"""

import json
from typing import Any

import pytest

from fixtures.commands import SMOKE, Done, Shell
from fixtures.golden import golden

AUTO = (*SMOKE, "--engine", "faulty", "--passes", "infer", "--set", "tune.batch_tokens=auto")
ERROR = "rank 0: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
TRIED = {"tried": ["batch_tokens=65536"], "ran": ["batch_tokens=32768"]}
NOTE_ZH = (
    "首次尝试以 batch_tokens=65536（auto）运行时内存不足；本结果为第二次尝试，batch_tokens=32768"
)


def run(shell: Shell, where: str, most: int, *options: str) -> tuple[Done, dict[str, Any]]:
    """Run the faulty engine, which runs out of memory above `max_tokens` tokens in phase `phase`;
    return the result and the only record, which verifies.
    """
    done = shell(
        *AUTO,
        "--out",
        shell.out,
        *options,
        FAULTY=f"above@{where}",
        FAULTY_ABOVE=str(most),
        FAULTY_CHILDREN="1",
    )
    (record,) = shell.records()
    assert shell.nothing_left(), [one.cmdline() for one in shell.processes()]
    assert list(shell.tmp.iterdir()) == []
    checked = shell("verify", shell.out)
    assert (checked.code, checked.err) == (0, ""), checked.out
    return done, record


@pytest.mark.full
@pytest.mark.parametrize("where", ["prepare", "work"])
def test_a_size_that_was_chosen_steps_down_once(faulty: Shell, where: str) -> None:
    done, record = run(faulty, where, 32768)
    assert (done.code, record["status"]) == (0, "valid"), done.err
    assert record["tune"]["batch_tokens"] == 32768
    assert record["case"]["origins"]["tune.batch_tokens"] == "auto (command line)"
    assert record["stepped_down"] == {"tune": {"batch_tokens": 65536}, "error": ERROR}
    assert {"code": "note.stepped_down", "values": TRIED} in record["notes"]
    assert golden("warning-out-of-memory-with-tune") in done.err
    parts = record["budget"]
    assert list(parts)[:2] == ["first_attempt", "start"]
    assert record["metrics"]["e2e_time"]["value"] == pytest.approx(sum(parts.values()))
    assert 0 < parts["first_attempt"] < sum(parts.values())
    assert record["passes"][0]["start_s"] > parts["first_attempt"]
    page = faulty("report", faulty.out, "--full", "--lang", "zh", "--format", "md")
    assert NOTE_ZH in page.out.replace("\\", "")
    assert "batch_tokens=32768 (auto)" in page.out.replace("\\", "")


@pytest.mark.full
def test_it_steps_down_only_once(faulty: Shell) -> None:
    done, record = run(faulty, "prepare", 16384)
    assert (done.code, record["status"]) == (1, "failed")
    assert record["reasons"][0] == {"code": "out_of_memory", "text": ERROR}
    assert record["tune"]["batch_tokens"] == 32768
    assert record["stepped_down"]["tune"] == {"batch_tokens": 65536}


def test_a_size_that_was_typed_does_not(faulty: Shell) -> None:
    done, record = run(faulty, "prepare", 1, "--set", "tune.batch_tokens=2048")
    assert (done.code, record["status"], record["reasons"][0]["code"]) == (
        1,
        "failed",
        "out_of_memory",
    )
    assert "stepped_down" not in record
    assert "first_attempt" not in record["budget"]


def test_nor_does_another_failure(faulty: Shell) -> None:
    done = faulty(*AUTO, "--out", faulty.out, FAULTY="raises@prepare")
    (record,) = faulty.records()
    assert (done.code, record["reasons"][0]["code"]) == (1, "raised")
    assert "stepped_down" not in record


@pytest.mark.full
def test_a_reproduced_run_has_the_number(faulty: Shell) -> None:
    run(faulty, "prepare", 32768)
    (path,) = faulty.out.glob("*.json")
    again = faulty(
        "reproduce",
        path,
        "--out",
        faulty.folder / "again",
        FAULTY="above@prepare",
        FAULTY_ABOVE="32768",
    )
    # code 1 if the rerun is slower, which is chance for runs of milliseconds
    assert again.code in (0, 1), again.err
    (found,) = (faulty.folder / "again").glob("*.json")
    made = json.loads(found.read_text())
    assert made["tune"]["batch_tokens"] == 32768
    assert made["case"]["origins"]["tune.batch_tokens"] == "record"
    assert "stepped_down" not in made


@pytest.mark.full
def test_a_sweep_tells_auto_from_the_number_it_stands_for(faulty: Shell) -> None:
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
    again = faulty(*sweep, "--out", faulty.out)
    assert (again.code, again.err.count("already there: ")) == (0, 3)
    assert len(faulty.records()) == 3
