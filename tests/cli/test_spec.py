"""Tests of the command `spec` on this machine's CPU, with real workers."""

import signal
import time
from pathlib import Path

import pytest

from fixtures.commands import Shell
from fixtures.golden import golden
from fixtures.specs import record
from steelyard.plan.ceiling_shapes import CEILING_GROUPS
from steelyard.record import ceilings_record

QUICK = ("spec", "--quick", "--accelerator", "cpu")


@pytest.fixture
def shell(tmp_path: Path):
    """Return a shell in the test's folder, and end its processes after the test."""
    one = Shell(tmp_path)
    yield one
    one.clean()


@pytest.mark.full
def test_a_quick_one_on_two_ranks(shell: Shell):
    """Two ranks measure exchanges too. Rows for which a busy machine has no time say so; the others
    are correct, and the record verifies.
    """
    done = shell(*QUICK, "--devices", "2", "--out", shell.out, "--json")
    assert done.code == 0, done.err
    (told,) = done.json()["records"]
    (path,) = Path(shell.out).glob("*-spec-cpu-*.json")
    assert (
        ceilings_record.spec_record_to_english_json(ceilings_record.read_spec_record(path)) == told
    )
    assert (told["kind"], told["status"], told["devices"]) == ("spec", "valid", 2)
    assert {bench["group"] for bench in told["benches"]} == set(CEILING_GROUPS)
    assert {bench["rank"] for bench in told["benches"]} == {0, 1}
    for bench, ceiling in zip(told["benches"], told["ceilings"], strict=True):
        assert (ceiling["value"] is None) <= bool(ceiling["note"]), bench
        assert bench["checked"] is None or bench["checked"]["error"] <= bench["checked"]["bound"], (
            bench
        )
    known = {
        bench["name"]
        for bench, one in zip(told["benches"], told["ceilings"], strict=True)
        if one["value"] is not None
    }
    assert {"memory of one process", "read", "square 512"} <= known
    assert shell("verify", shell.out).out.startswith("ok  ")
    for lang, word in (("en", "Dense matmul"), ("zh", "稠密矩阵乘法")):
        assert word in shell("report", path, "--lang", lang).out


@pytest.mark.full
def test_an_interrupt_leaves_a_record_and_nobody(shell: Shell):
    process = shell.start(*QUICK, "--out", shell.out)
    end = time.monotonic() + 300
    while (
        not any(
            "steelyard.run.ceilings_worker" in " ".join(one.cmdline()) for one in shell.processes()
        )
        and time.monotonic() < end
    ):
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert process.wait(300) == 1
    (path,) = Path(shell.out).glob("*-spec-cpu-*.json")
    found = ceilings_record.read_spec_record(path)
    assert (found.status, [reason.code for reason in found.reasons]) == ("failed", ["interrupted"])
    assert not [one for one in shell.processes() if "steelyard" in " ".join(one.cmdline())]
    assert shell("verify", path).code == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--accelerator", "tpu"), "accelerator 'tpu' is not known; known: cuda, cpu"),
        (("--accelerator", "cpu", "--devices", "0"), "--devices 0: must be 1 to 1000000"),
    ],
)
def test_a_wrong_request_gets_one_line(shell: Shell, options: tuple[str, ...], said: str):
    done = shell("spec", *options, "--out", shell.out)
    assert (done.code, done.out, done.lines) == (2, "", [f"error: {said}"])


def test_its_schema(shell: Shell):
    assert shell("schema", "spec").json()["title"] == "Steelyard spec record"


def test_a_damaged_one_gets_one_line(shell: Shell, tmp_path: Path):
    path = ceilings_record.write_spec_record(record(), tmp_path)
    path.write_bytes(path.read_bytes().replace(b'"group":"matmul"', b'"group":"magic"'))
    for verb in ("verify", "report"):
        done = shell(verb, path)
        assert (done.code, len(done.lines)) == (2, 1)
        assert done.lines[0].startswith(golden("error-not-spec-record-benches-0", path))
