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
from fixtures.records import published
from fixtures.specs import record
from steelyard.record import ceilings_record

SMOKE = "mmlu-smoke-closed"


@pytest.fixture
def run(shell: Shell) -> Path:
    """Return the path of a published run record in the output folder."""
    return published(SMOKE, shell.out)


@pytest.fixture
def of_spec(shell: Shell) -> Path:
    """Return the path of a spec record in the output folder."""
    shell.out.mkdir(exist_ok=True)
    return ceilings_record.write_spec_record(record(), shell.out)


def left_out(path: Path) -> str:
    """Return the line that names one spec record as left out."""
    return f"left out: 1 spec record; show it with: steelyard report {path}"


def ids(*paths: Path) -> list[str]:
    """Return the ids of these records."""
    return [json.loads(path.read_bytes())["id"] for path in paths]


def test_report_shows_the_runs_of_a_mix(shell: Shell, run: Path, of_spec: Path) -> None:
    for places in ((shell.out,), (of_spec, run)):
        done = shell.ask("report", *places)
        assert (done.code, done.lines) == (0, [left_out(of_spec)])
        assert done.out == shell.ask("report", run).out


def test_report_json_is_one_document(shell: Shell, run: Path, of_spec: Path) -> None:
    done = shell.ask("report", shell.out, "--json")
    assert (done.code, done.lines) == (0, [left_out(of_spec)])
    assert done.json() == shell.ask("report", run, "--json").json()


@pytest.mark.parametrize("options", [("--format", "csv"), ("--layout", "flagperf"), ("--explain",)])
def test_report_in_other_forms(
    shell: Shell, run: Path, of_spec: Path, options: tuple[str, ...]
) -> None:
    done = shell.ask("report", shell.out, *options)
    assert (done.code, done.lines) == (0, [left_out(of_spec)])
    assert done.out == shell.ask("report", run, *options).out


def test_report_of_spec_records_alone_is_their_page(shell: Shell, of_spec: Path) -> None:
    done = shell.ask("report", shell.out)
    assert (done.code, done.err) == (0, "")
    assert "square 512" in done.out


def test_several_spec_records_are_named_in_one_line(shell: Shell, run: Path, of_spec: Path) -> None:
    other = Path(shutil.copy(of_spec, shell.out / "my spec.json"))
    done = shell.ask("report", shell.out)
    shown = f"steelyard report {of_spec} '{other}'"
    assert done.lines == [golden("left-out-2-spec-records-show", shown)]


@pytest.mark.parametrize("options", [("--no-index",), ()])
def test_history_is_of_runs(
    shell: Shell,
    run: Path,
    of_spec: Path,
    options: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(shell.folder / "cache"))
    done = shell.ask("history", shell.out, "--json", *options)
    assert (done.code, done.lines) == (0, [left_out(of_spec)])
    [trend] = done.json()["trends"]
    assert [one["id"] for point in trend["points"] for one in point["records"]] == ids(run)
    assert done.json()["wrong"] == []


def test_history_of_two_folders_one_of_spec_records(shell: Shell, run: Path) -> None:
    other = shell.folder / "ceilings"
    other.mkdir()
    path = ceilings_record.write_spec_record(record(), other)
    done = shell.ask("history", shell.out, other, "--json", "--no-index")
    assert (done.code, done.lines) == (0, [left_out(path)])
    assert len(done.json()["trends"]) == 1


def test_compare_takes_the_runs_of_its_folders(shell: Shell, run: Path, of_spec: Path) -> None:
    done = shell.ask("compare", run, shell.out, "--json")
    assert done.lines == [left_out(of_spec)]
    assert done.json()["new"]["records"] == ids(run)


@pytest.mark.parametrize("verb", ["history", "reproduce"])
def test_a_verb_of_runs_needs_one(shell: Shell, of_spec: Path, verb: str) -> None:
    done = shell.ask(verb, shell.out)
    said = f"error: 1 spec record and no run; show it with: steelyard report {of_spec}"
    assert (done.code, done.out, done.lines) == (2, "", [said])


def test_compare_needs_runs_on_both_sides(shell: Shell, run: Path, of_spec: Path) -> None:
    done = shell.ask("compare", run, of_spec)
    assert (done.code, done.out) == (2, "")
    shown = f"steelyard report {of_spec}"
    assert done.lines == [golden("error-1-spec-record-and-no", shown)]


def test_verify_takes_both(shell: Shell, run: Path, of_spec: Path) -> None:
    done = shell.ask("verify", shell.out, "--json")
    assert (done.code, done.err) == (0, "")
    assert sorted(one["path"] for one in done.json()["records"]) == sorted(map(str, (run, of_spec)))


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs ssh-keygen of OpenSSH 8.2")
def test_sign_takes_both(shell: Shell, run: Path, of_spec: Path) -> None:
    key = shell.folder / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    done = shell.ask("sign", shell.out, "--key", key, "--json")
    assert (done.code, done.err) == (0, "")
    signed = sorted(one["record"] for one in done.json()["signed"])
    assert signed == sorted(map(str, (run, of_spec)))
    signers = shell.folder / "signers"
    signers.write_text(f"me {Path(f'{key}.pub').read_text()}")
    assert shell.ask("verify", shell.out, "--signers", signers).code == 0
    of_spec.write_bytes(of_spec.read_bytes().replace(b'"quick":false', b'"quick":true'))
    done = shell.ask("sign", shell.out, "--key", key)
    assert (done.code, len(done.lines)) == (2, 1)
    assert done.lines[0].startswith(f"error: {of_spec}: does not verify: ")
