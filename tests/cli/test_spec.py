"""Tests of the command `spec` on this machine's CPU, with real workers."""

import signal
import time
from pathlib import Path

import pytest

from fixtures.commands import Shell
from fixtures.golden import golden
from fixtures.specs import make_spec_record
from steelyard.plan.ceiling_shapes import CEILING_GROUPS
from steelyard.record import ceilings_record

QUICK = ("spec", "--quick", "--accelerator", "cpu")


@pytest.fixture
def shell(tmp_path: Path):
    """Return a shell in the test's folder, and end its processes after the test."""
    new_shell = Shell(tmp_path)
    yield new_shell
    new_shell.clean()


@pytest.mark.full
def test_quick_ceilings_on_two_ranks_verify(shell: Shell):
    """Two ranks measure exchanges too. Rows for which a busy machine has no time say so; the others
    are correct, and the record verifies.
    """
    result = shell(*QUICK, "--devices", "2", "--out", shell.out, "--json")
    assert result.code == 0, result.err
    (document,) = result.json()["records"]
    (path,) = Path(shell.out).glob("*-spec-cpu-*.json")
    assert (
        ceilings_record.spec_record_to_english_json(ceilings_record.read_spec_record(path))
        == document
    )
    assert (document["kind"], document["status"], document["devices"]) == ("spec", "valid", 2)
    assert {bench["group"] for bench in document["benches"]} == set(CEILING_GROUPS)
    assert {bench["rank"] for bench in document["benches"]} == {0, 1}
    for bench, ceiling in zip(document["benches"], document["ceilings"], strict=True):
        assert (ceiling["value"] is None) <= bool(ceiling["note"]), bench
        assert bench["checked"] is None or bench["checked"]["error"] <= bench["checked"]["bound"], (
            bench
        )
    measured_names = {
        bench["name"]
        for bench, ceiling_row in zip(document["benches"], document["ceilings"], strict=True)
        if ceiling_row["value"] is not None
    }
    assert {"memory of one process", "read", "square 512"} <= measured_names
    assert shell("verify", shell.out).out.startswith("ok  ")
    for lang, word in (("en", "Dense matmul"), ("zh", "稠密矩阵乘法")):
        assert word in shell("report", path, "--lang", lang).out


@pytest.mark.full
def test_interrupt_leaves_a_record_and_no_processes(shell: Shell):
    process = shell.start(*QUICK, "--out", shell.out)
    deadline_s = time.monotonic() + 300
    while (
        not any(
            "steelyard.run.ceilings_worker" in " ".join(process_of_run.cmdline())
            for process_of_run in shell.processes()
        )
        and time.monotonic() < deadline_s
    ):
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert process.wait(300) == 1
    (path,) = Path(shell.out).glob("*-spec-cpu-*.json")
    spec_record = ceilings_record.read_spec_record(path)
    assert (spec_record.status, [reason.code for reason in spec_record.reasons]) == (
        "failed",
        ["interrupted"],
    )
    assert not [
        process_of_run
        for process_of_run in shell.processes()
        if "steelyard" in " ".join(process_of_run.cmdline())
    ]
    assert shell("verify", path).code == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--accelerator", "tpu"), "accelerator 'tpu' is not known; allowed: cuda, cpu"),
        (("--accelerator", "cpu", "--devices", "0"), "--devices 0: must be 1 to 1000000"),
    ],
)
def test_wrong_spec_request_gets_one_line(shell: Shell, options: tuple[str, ...], said: str):
    result = shell("spec", *options, "--out", shell.out)
    assert (result.code, result.out, result.lines) == (2, "", [f"error: {said}"])


def test_schema_of_spec_records_is_printed(shell: Shell):
    assert shell("schema", "spec").json()["title"] == "Steelyard spec record"


def test_damaged_spec_record_gets_one_line(shell: Shell, tmp_path: Path):
    path = ceilings_record.write_spec_record(make_spec_record(), tmp_path)
    path.write_bytes(path.read_bytes().replace(b'"group":"matmul"', b'"group":"magic"'))
    for verb in ("verify", "report"):
        result = shell(verb, path)
        assert (result.code, len(result.lines)) == (2, 1)
        assert result.lines[0].startswith(golden("error-not-spec-record-benches-0", path))
