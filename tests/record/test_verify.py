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
from fixtures.records import SPECS, rewrite_record
from fixtures.requests import make_even_loop, make_generation_record
from fixtures.requests import make_samples as make_request_samples_of
from steelyard import cli
from steelyard.metrics import metric_table, verify
from steelyard.record import ceilings_record, record

RESULTS = Path(__file__).resolve().parents[2] / "results"


def find_published(name: str) -> Path:
    """Return the smallest published record whose file name holds this text."""
    return min(RESULTS.rglob(f"*{name}*.json"), key=lambda path: path.stat().st_size)


def copy_published(name: str, folder: Path) -> Path:
    """Copy a published record into a folder and return the copy's path."""
    folder.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy(find_published(name), folder))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that runs a command in this process and returns exit code, stdout and
    stderr.
    """

    def run_command(*arguments: object) -> tuple[int, str, str]:
        handler_before = signal.getsignal(signal.SIGTERM)
        monkeypatch.setattr(sys, "argv", ["steelyard", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_info:
            cli.main()
        signal.signal(signal.SIGTERM, handler_before)
        out, err = capsys.readouterr()
        assert isinstance(exit_info.value.code, int)
        return exit_info.value.code, out, err

    return run_command


def replace_case_fields(path: Path, **case: Any) -> Path:
    """Replace these fields of the record's `case` section, seal the record again and return its
    path.
    """
    run_record = record.read_record(path)
    path.write_bytes(
        record.to_canonical_bytes(
            record.record_to_json(
                record.seal_record(
                    run_record.model_copy(update={"case": run_record.case.model_copy(update=case)})
                )
            )
        )
    )
    return path


def change_seed(path: Path) -> tuple[Path, str, str]:
    """Change the seed of a record's question; return its path, its new key and that of the shipped
    case.
    """
    run_record = record.read_record(path)
    question = {**run_record.case.question, "seed": 7}
    key = verify.compute_question_key(question, run_record.fingerprint)
    return replace_case_fields(path, question=question, key=key), key, run_record.case.key


def test_key_that_differs_from_the_shipped_case_is_remarked(tmp_path: Path, run: Any) -> None:
    path, key, shipped = change_seed(copy_published("mmlu-smoke-closed", tmp_path))
    remark = (
        f"the question is not that of the shipped case llama2-7b-mmlu: the key is {key}, that of"
        f" the shipped case with these data {shipped}"
    )
    assert key != shipped
    assert (verify.verify_record(path), verify.list_remarks(path)) == ([], [remark])
    assert run("verify", path) == (0, f"ok  {path}\n  remark: {remark}\n  not signed\n", "")
    code, out, _ = run("verify", path, "--json")
    signature = {
        "state": "none",
        "name": None,
        "key_type": None,
        "fingerprint": None,
        "detail": None,
    }
    expected = {
        "path": str(path),
        "ok": True,
        "wrong": [],
        "remarks": [remark],
        "signature": signature,
    }
    assert (code, json.loads(out)) == (0, {"records": [expected]})


def test_a_shipped_case_gets_no_remark(tmp_path: Path) -> None:
    path = copy_published("mmlu-smoke-closed", tmp_path)
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
def test_question_that_no_shipped_case_asks_is_remarked(
    case: dict[str, str], said: str, tmp_path: Path
) -> None:
    assert verify.list_remarks(
        replace_case_fields(copy_published("mmlu-smoke-closed", tmp_path), **case)
    ) == [said]


def test_peak_that_was_never_shipped_is_remarked(tmp_path: Path, run: Any) -> None:
    path = copy_published("mmlu-full-closed-bf16-torch", tmp_path)

    def halve_peak(table: dict[str, Any]) -> None:
        table["environment"]["hardware"]["peak"]["flops_per_s"]["bf16"] /= 2

    mfu = record.read_record(path).metrics["mfu"].value
    rewrite_record(path, halve_peak)
    assert record.read_record(path).metrics["mfu"].value == pytest.approx(2 * mfu)
    remark = golden(
        "the-datasheet-figure-was-never-shipped",
        *("bf16 peak", "NVIDIA H200", "4.947e+14 FLOP/s", "9.894e+14"),
    )
    code, out, _ = run("verify", path)
    assert (code, out.splitlines()[:2]) == (0, [f"ok  {path}", f"  remark: {remark}"])
    code, out, _ = run("verify", path, "--json")
    [printed] = json.loads(out)["records"]
    assert (code, printed["ok"], printed["wrong"], printed["remarks"]) == (0, True, [], [remark])


def test_peak_of_a_spec_record_is_compared(tmp_path: Path, run: Any) -> None:
    path = Path(shutil.copy(SPECS[0], tmp_path))
    spec_record = ceilings_record.read_spec_record(path)
    hardware = spec_record.environment.hardware
    device = hardware.devices[0].model_copy(update={"name": "NVIDIA H2000"})
    renamed = hardware.model_copy(update={"devices": [device]})
    environment = spec_record.environment.model_copy(update={"hardware": renamed})
    sealed = ceilings_record.seal_spec_record(
        spec_record.model_copy(update={"environment": environment})
    )
    path.write_bytes(record.to_canonical_bytes(ceilings_record.spec_record_to_json(sealed)))
    assert run("verify", SPECS[0]) == (0, f"ok  {SPECS[0]}\n  not signed\n", "")
    remark = golden("the-datasheet-peak-does-not-come", "NVIDIA H2000")
    assert run("verify", path) == (0, f"ok  {path}\n  remark: {remark}\n  not signed\n", "")


def test_folders_are_searched_without_checkpoints(tmp_path: Path, run: Any) -> None:
    shallow, deep = (
        copy_published("mmlu-smoke-closed", tmp_path / "a"),
        copy_published("lambada-smoke", tmp_path / "b" / "c"),
    )
    checkpoint_folder = tmp_path / "b" / "checkpoints" / "0f3c9a7e" / "step-30"
    checkpoint_folder.mkdir(parents=True)
    (checkpoint_folder / "state.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("no record")
    code, out, err = run("verify", tmp_path)
    assert (code, [line for line in out.splitlines() if not line.startswith("  ")], err) == (
        0,
        [f"ok  {shallow}", f"ok  {deep}"],
        "",
    )
    code, out, err = run("verify", checkpoint_folder.parent.parent)  # searched if named
    assert (code, out, err.splitlines()) == (
        2,
        "",
        [f"error: {checkpoint_folder / 'state.json'}: schema is None; this version reads 1"],
    )


def test_malformed_file_among_records_is_wrong(tmp_path: Path, run: Any) -> None:
    good, bad = copy_published("mmlu-smoke-closed", tmp_path), tmp_path / "bad.json"
    bad.write_text("{}")
    code, out, err = run("verify", good, bad)
    assert (code, out, err) == (
        1,
        f"ok  {good}\n  not signed\nWRONG  {bad}\n  {bad}: schema is None; this version reads 1\n",
        "",
    )


def test_formula_that_raises_is_reported_as_a_bug(
    tmp_path: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raises(_: record.Record) -> Any:
        raise ZeroDivisionError("nobody thought of it")

    path = copy_published("mmlu-smoke-closed", tmp_path)
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


def write_generation(folder: Path) -> Path:
    """Write a made-up record of generation into a folder, with what follows from its samples, and
    return its path.
    """
    samples = make_request_samples_of(make_even_loop(2, 40))
    wall_s = float(samples.table.end_s.max())
    kept = {"numbers": [3, 5, 8, 9], "tokens": [[1, 2, 3, 4]] * 4}
    checked = {"numbers": [3, 5, 8, 9], "compared": [4] * 4, "exact": [4] * 4, "largest": [0.0] * 4}
    made = make_generation_record(
        samples,
        ranks=[{"rank": 0, "host": "a", "device": "chip:0", "status": "done"}],
        budget={"imports": 10.0, "generate": wall_s},
        outputs={"passes": {"generate": kept, "check": checked}},
    )
    key = verify.compute_question_key(made.case.question, made.fingerprint)
    made = made.model_copy(update={"case": made.case.model_copy(update={"key": key})})
    path = folder / "made.json"
    path.write_bytes(record.to_canonical_bytes(record.record_to_json(made)))
    return rewrite_record(path, lambda contents: None)


def test_everything_of_generation_follows_from_its_samples(tmp_path: Path) -> None:
    path = write_generation(tmp_path)
    assert verify.verify_record(path) == []
    assert record.read_record(path).status == "valid"


@pytest.mark.parametrize("name", ["ttft_p50", "output_tokens_per_s", "interactivity", "mbu"])
def test_a_changed_metric_of_generation_is_found(tmp_path: Path, name: str) -> None:
    path = write_generation(tmp_path)
    made = record.read_record(path)
    value = made.metrics[name].model_copy(update={"value": 0.001})
    changed = made.model_copy(update={"metrics": {**made.metrics, name: value}})
    path.write_bytes(record.to_canonical_bytes(record.record_to_json(record.seal_record(changed))))
    assert [text.split(" is ")[0] for text in verify.verify_record(path)] == [f"metric {name}"]


def test_shorter_times_of_requests_follow_no_more(tmp_path: Path) -> None:
    path = write_generation(tmp_path)
    made = record.read_record(path)
    faster = make_request_samples_of(make_even_loop(2, 40, time_s=0.5))
    changed = made.model_copy(update={"requests": [faster]})
    path.write_bytes(record.to_canonical_bytes(record.record_to_json(record.seal_record(changed))))
    problems = verify.verify_record(path)
    assert any(text.startswith("metric tpot_p50 is 0.25; recomputed") for text in problems)


def test_a_record_without_its_requests_is_noticed(tmp_path: Path) -> None:
    path = write_generation(tmp_path)
    assert not any("request samples" in text for text in verify.list_remarks(path))

    def strip(contents: dict[str, Any]) -> None:
        del contents["requests"]

    rewrite_record(path, strip)
    assert verify.verify_record(path) == []
    assert [reason.code for reason in record.read_record(path).reasons] == ["requests", "few_steps"]
    assert any("the record lacks request samples" in text for text in verify.list_remarks(path))
