"""Tests of the command `verify`: remarks on valid records, folders of records, and bugs of this
program.
"""

import json
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fixtures.golden import golden
from steelyard import cli
from steelyard.metrics import metric_table, verify
from steelyard.record import record

RESULTS = Path(__file__).resolve().parents[2] / "results"


def published(name: str) -> Path:
    """Return the smallest published record whose file name holds this text."""
    return min(RESULTS.rglob(f"*{name}*.json"), key=lambda path: path.stat().st_size)


def copied(name: str, folder: Path) -> Path:
    """Copy a published record into a folder and return the copy's path."""
    folder.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy(published(name), folder))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that runs a command in this process and returns exit code, stdout and
    stderr.
    """

    def one(*arguments: object) -> tuple[int, str, str]:
        before = signal.getsignal(signal.SIGTERM)
        monkeypatch.setattr(sys, "argv", ["steelyard", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        signal.signal(signal.SIGTERM, before)
        out, err = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, out, err

    return one


def other(path: Path, **case: Any) -> Path:
    """Replace these fields of the record's `case` section, seal the record again and return its
    path.
    """
    found = record.read_record(path)
    path.write_bytes(
        record.to_canonical_bytes(
            record.record_to_json(
                record.seal_record(
                    found.model_copy(update={"case": found.case.model_copy(update=case)})
                )
            )
        )
    )
    return path


def reseeded(path: Path) -> tuple[Path, str, str]:
    """Change the seed of a record's question; return its path, its new key and that of the shipped
    case.
    """
    found = record.read_record(path)
    question = {**found.case.question, "seed": 7}
    key = verify.compute_question_key(question, found.fingerprint)
    return other(path, question=question, key=key), key, found.case.key


def test_another_key_than_the_shipped_cases_is_a_remark(tmp_path: Path, run: Any) -> None:
    path, key, shipped = reseeded(copied("mmlu-smoke-closed", tmp_path))
    said = f"the key is {key}; that of the shipped case llama2-7b-mmlu with these data is {shipped}"
    assert key != shipped
    assert (verify.verify_record(path), verify.list_remarks(path)) == ([], [said])
    assert run("verify", path) == (0, f"ok  {path}\n  {said}\n  not signed\n", "")
    code, out, _ = run("verify", path, "--json")
    told = {"state": "none", "name": None, "key_type": None, "fingerprint": None, "detail": None}
    wanted = {"path": str(path), "ok": True, "wrong": [], "remarks": [said], "signature": told}
    assert (code, json.loads(out)) == (0, {"records": [wanted]})


def test_a_shipped_case_gets_no_remark(tmp_path: Path) -> None:
    path = copied("mmlu-smoke-closed", tmp_path)
    assert (verify.verify_record(path), verify.list_remarks(path)) == ([], [])


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ({"name": "my-own"}, "no case 'my-own' comes with this version"),
        (
            {"size": "huge"},
            (
                "the shipped case llama2-7b-mmlu has no such question: size 'huge' is not known;"
                " allowed: smoke, full"
            ),
        ),
    ],
)
def test_what_no_shipped_case_asks_is_a_remark(
    case: dict[str, str], said: str, tmp_path: Path
) -> None:
    assert verify.list_remarks(other(copied("mmlu-smoke-closed", tmp_path), **case)) == [said]


def test_folders_are_searched_without_checkpoints(tmp_path: Path, run: Any) -> None:
    near, far = (
        copied("mmlu-smoke-closed", tmp_path / "a"),
        copied("lambada-smoke", tmp_path / "b" / "c"),
    )
    tables = tmp_path / "b" / "checkpoints" / "0f3c9a7e" / "step-30"
    tables.mkdir(parents=True)
    (tables / "state.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("no record")
    code, out, err = run("verify", tmp_path)
    assert (code, [line for line in out.splitlines() if not line.startswith("  ")], err) == (
        0,
        [f"ok  {near}", f"ok  {far}"],
        "",
    )
    code, out, err = run("verify", tables.parent.parent)  # searched if named
    assert (code, out, err.splitlines()) == (
        2,
        "",
        [f"error: {tables / 'state.json'}: schema is None; this version reads 1"],
    )


def test_of_several_records_one_that_is_none_is_wrong(tmp_path: Path, run: Any) -> None:
    good, bad = copied("mmlu-smoke-closed", tmp_path), tmp_path / "bad.json"
    bad.write_text("{}")
    code, out, err = run("verify", good, bad)
    assert (code, out, err) == (
        1,
        f"ok  {good}\n  not signed\nWRONG  {bad}\n  {bad}: schema is None; this version reads 1\n",
        "",
    )


def test_a_formula_that_raises_is_our_defect(
    tmp_path: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raises(_: record.Record) -> Any:
        raise ZeroDivisionError("nobody thought of it")

    path = copied("mmlu-smoke-closed", tmp_path)
    monkeypatch.setattr(
        metric_table,
        "RATES",
        (replace(metric_table.RATES[0], formula=raises), *metric_table.RATES[1:]),
    )
    for verb in ("verify", "report"):
        code, out, err = run(verb, path)
        assert (code, out) == (70, "")
        lines = [line for line in err.splitlines() if line]
        assert lines[0] == "Traceback (most recent call last):"
        assert lines[-2] == "ZeroDivisionError: nobody thought of it"
        assert lines[-1].startswith("error: a bug in steelyard ")
        assert lines[-1].endswith(golden("not-in-your-request-please-report"))
