"""Tests of runs and spec records in one folder: each command reads its own kind and says in one
line what it leaves out.
"""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from fixtures.commands import Shell
from fixtures.golden import golden
from fixtures.records import copy_published_record
from fixtures.specs import make_spec_record
from steelyard.record import ceilings_record

SMOKE = "mmlu-smoke-closed"


@pytest.fixture
def run(shell: Shell) -> Path:
    """Return the path of a published run record in the output folder."""
    return copy_published_record(SMOKE, shell.out)


@pytest.fixture
def of_spec(shell: Shell) -> Path:
    """Return the path of a spec record in the output folder."""
    shell.out.mkdir(exist_ok=True)
    return ceilings_record.write_spec_record(make_spec_record(), shell.out)


def left_out_message(path: Path) -> str:
    """Return the line that names one spec record as left out."""
    return f"left out: 1 spec record; show it with: steelyard report {path}"


def read_ids(*paths: Path) -> list[str]:
    """Return the ids of these records."""
    return [json.loads(path.read_bytes())["id"] for path in paths]


def test_report_of_mixed_records_shows_the_runs(shell: Shell, run: Path, of_spec: Path) -> None:
    for paths in ((shell.out,), (of_spec, run)):
        result = shell.run_in_process("report", *paths)
        assert (result.code, result.lines) == (0, [left_out_message(of_spec)])
        assert result.out == shell.run_in_process("report", run).out


def test_report_json_is_one_document(shell: Shell, run: Path, of_spec: Path) -> None:
    result = shell.run_in_process("report", shell.out, "--json")
    assert (result.code, result.lines) == (0, [left_out_message(of_spec)])
    assert result.json() == shell.run_in_process("report", run, "--json").json()


@pytest.mark.parametrize("options", [("--format", "csv"), ("--layout", "flagperf"), ("--explain",)])
def test_report_in_other_formats_leaves_out_spec_records(
    shell: Shell, run: Path, of_spec: Path, options: tuple[str, ...]
) -> None:
    result = shell.run_in_process("report", shell.out, *options)
    assert (result.code, result.lines) == (0, [left_out_message(of_spec)])
    assert result.out == shell.run_in_process("report", run, *options).out


def test_report_of_spec_records_alone_shows_them(shell: Shell, of_spec: Path) -> None:
    result = shell.run_in_process("report", shell.out)
    assert (result.code, result.err) == (0, "")
    assert "square 512" in result.out


def test_several_spec_records_are_named_in_one_line(shell: Shell, run: Path, of_spec: Path) -> None:
    other = Path(shutil.copy(of_spec, shell.out / "my spec.json"))
    result = shell.run_in_process("report", shell.out)
    command = f"steelyard report {of_spec} '{other}'"
    assert result.lines == [golden("left-out-2-spec-records-show", command)]


@pytest.mark.parametrize("options", [("--no-index",), ()])
def test_history_leaves_out_spec_records(
    shell: Shell,
    run: Path,
    of_spec: Path,
    options: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(shell.folder / "cache"))
    result = shell.run_in_process("history", shell.out, "--json", *options)
    assert (result.code, result.lines) == (0, [left_out_message(of_spec)])
    [trend] = result.json()["trends"]
    assert [entry["id"] for point in trend["points"] for entry in point["records"]] == read_ids(run)
    assert result.json()["wrong"] == []


def test_history_of_a_folder_of_runs_and_one_of_spec_records(shell: Shell, run: Path) -> None:
    other = shell.folder / "ceilings"
    other.mkdir()
    path = ceilings_record.write_spec_record(make_spec_record(), other)
    result = shell.run_in_process("history", shell.out, other, "--json", "--no-index")
    assert (result.code, result.lines) == (0, [left_out_message(path)])
    assert len(result.json()["trends"]) == 1


def test_compare_leaves_out_spec_records(shell: Shell, run: Path, of_spec: Path) -> None:
    result = shell.run_in_process("compare", run, shell.out, "--json")
    assert result.lines == [left_out_message(of_spec)]
    assert result.json()["new"]["records"] == read_ids(run)


@pytest.mark.parametrize("verb", ["history", "reproduce"])
def test_history_and_reproduce_need_a_run(shell: Shell, of_spec: Path, verb: str) -> None:
    result = shell.run_in_process(verb, shell.out)
    expected = f"error: 1 spec record and no run; show it with: steelyard report {of_spec}"
    assert (result.code, result.out, result.lines) == (2, "", [expected])


def test_compare_needs_runs_on_both_sides(shell: Shell, run: Path, of_spec: Path) -> None:
    result = shell.run_in_process("compare", run, of_spec)
    assert (result.code, result.out) == (2, "")
    command = f"steelyard report {of_spec}"
    assert result.lines == [golden("error-1-spec-record-and-no", command)]


def test_verify_checks_both_kinds_of_records(shell: Shell, run: Path, of_spec: Path) -> None:
    result = shell.run_in_process("verify", shell.out, "--json")
    assert (result.code, result.err) == (0, "")
    assert sorted(entry["path"] for entry in result.json()["records"]) == sorted(
        map(str, (run, of_spec))
    )


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs ssh-keygen of OpenSSH 8.2")
def test_sign_signs_both_kinds_of_records(shell: Shell, run: Path, of_spec: Path) -> None:
    key = shell.folder / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    result = shell.run_in_process("sign", shell.out, "--key", key, "--json")
    assert (result.code, result.err) == (0, "")
    signed = sorted(entry["record"] for entry in result.json()["signed"])
    assert signed == sorted(map(str, (run, of_spec)))
    signers = shell.folder / "signers"
    signers.write_text(f"me {Path(f'{key}.pub').read_text()}")
    assert shell.run_in_process("verify", shell.out, "--signers", signers).code == 0
    of_spec.write_bytes(of_spec.read_bytes().replace(b'"quick":false', b'"quick":true'))
    result = shell.run_in_process("sign", shell.out, "--key", key)
    assert (result.code, len(result.lines)) == (2, 1)
    assert result.lines[0].startswith(f"error: {of_spec}: does not verify: ")


def test_copies_of_a_record_are_no_repeats(shell: Shell, run: Path) -> None:
    for name in ("a.json", "b.json"):
        (shell.out / name).write_bytes(run.read_bytes())
    result = shell.run_in_process("report", shell.out)
    assert (result.code, result.lines) == (0, ["left out: 2 copies of other records"])
    assert result.out == shell.run_in_process("report", run).out
