"""Tests of the command `spec` on this machine's CPU, with real workers."""

import signal
import time
from pathlib import Path

import pytest

from fixtures.commands import Shell
from fixtures.golden import golden
from fixtures.specs import make_bench, make_spec_record
from steelyard import accelerators
from steelyard.errors import names_exception
from steelyard.plan.ceiling_shapes import CEILING_GROUPS
from steelyard.record import ceilings_record
from steelyard.record.ceilings_record import SpecRecord
from steelyard.record.record import FailureFacts, Reason
from steelyard.run import ceilings_parent
from steelyard.words import Message

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
        assert word in shell("report", path, "--lang", lang, "--full").out


@pytest.mark.full
def test_quick_ceilings_are_printed_on_one_screen(shell: Shell):
    result = shell(*QUICK, "--out", shell.out)
    (path,) = Path(shell.out).glob("*-spec-cpu-*.json")
    assert (result.code, result.lines[-1]) == (0, f"valid: {path}")
    lines = result.out.splitlines()
    assert len(lines) < 30
    assert "memory read" in result.out
    assert lines[-1] == f"All rows: steelyard report {path} --full"
    assert not names_exception(result.out)
    assert not any(
        isinstance(bench.reason, str) and names_exception(bench.reason)
        for bench in ceilings_record.read_spec_record(path).benches
    )


class FakeCeilingsRun:
    """A run of `spec` that measures nothing: it writes `record` into the folder `out`."""

    record = make_spec_record()

    def __init__(self, accelerator: str | None, devices: int, quick: bool, out: Path, _: object):
        self.accelerator, self.out = accelerators.find_accelerator("cpu"), out

    def run_and_record(self, *callbacks: object) -> tuple[SpecRecord, Path]:
        self.out.mkdir(parents=True, exist_ok=True)
        return self.record, ceilings_record.write_spec_record(self.record, self.out)


@pytest.fixture
def use_record(monkeypatch: pytest.MonkeyPatch):
    """Return a function that makes `spec` write a given record instead of measuring."""

    def use(record: SpecRecord) -> None:
        monkeypatch.setattr(FakeCeilingsRun, "record", record)
        monkeypatch.setattr(ceilings_parent, "CeilingsRun", FakeCeilingsRun)

    return use


RAW = "RuntimeError: CUDA error: no kernel image is available"


def test_spec_prints_one_screen_and_everything_with_full(shell: Shell, use_record):
    absent = [
        make_bench(
            name=f"square {i}", reason=Message("ceiling.memory"), error_text=RAW, stretches=[]
        )
        for i in range(100)
    ]
    record = make_spec_record(make_bench(), *absent)
    use_record(record)
    brief = shell.run_in_process("spec", "--out", shell.out)
    (path,) = Path(shell.out).glob("*-spec-*.json")
    assert (brief.code, brief.lines) == (0, [f"valid: {path}"])
    assert len(brief.out.splitlines()) + 1 <= 30
    assert brief.out.splitlines()[-1] == f"All rows: steelyard report {path} --full"
    assert "100 of 101 benchmarks: not enough memory (100)" in " ".join(brief.out.split())
    assert not names_exception(brief.out)
    for command in (("spec", "--full", "--out", shell.out / "again"), ("report", path, "--full")):
        full = shell.run_in_process(*command)
        shown = " ".join(full.out.split())
        assert full.code == 0
        assert all(f"square {i} bf16" in shown for i in range(100))
        assert "not enough memory: square 0 bf16" in shown
        assert f"square 99 bf16: “{RAW}”" in shown
    told = shell.run_in_process("spec", "--json", "--out", shell.out / "third").json()
    assert told == {"records": [ceilings_record.spec_record_to_english_json(record)]}
    assert told["records"][0]["benches"][1]["reason"] == "not enough memory"


def test_failed_spec_quotes_the_exception_with_full_only(shell: Shell, use_record):
    use_record(
        make_spec_record(
            status="failed",
            reasons=[Reason(code="raised", text=f"rank 0: {RAW}")],
            failure=FailureFacts(rank=0, exit_code=1, error=RAW, stderr_tail=""),
        )
    )
    brief = shell.run_in_process("spec", "--out", shell.out)
    assert brief.code == 1
    assert brief.out.splitlines()[0] == "raised: A worker raised an error"
    assert not names_exception(brief.out + brief.err)
    full = shell.run_in_process("spec", "--full", "--out", shell.out / "again")
    assert full.code == 1
    assert RAW in full.err


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_report_of_a_spec_record_is_short_but_in_files_complete(
    shell: Shell, tmp_path: Path, lang: str
):
    benches = [make_bench(name=f"square {i}") for i in range(100)]
    path = ceilings_record.write_spec_record(make_spec_record(*benches), tmp_path)
    assert len(shell.run_in_process("report", path, "--lang", lang).out.splitlines()) <= 30
    for options in (("--full",), ("--format", "md"), ("--format", "html")):
        page = shell.run_in_process("report", path, "--lang", lang, *options).out
        assert all(f"square {i}" in page for i in range(100))


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
