"""Tests of the command `reproduce`."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fixtures.commands import SMOKE, Shell
from fixtures.golden import golden
from fixtures.records import copy_published_record, rewrite_record
from fixtures.series import write_series
from steelyard.case.request import Request
from steelyard.cli import reproduce as verb
from steelyard.cli.printing import OutputOptions
from steelyard.errors import RequestError
from steelyard.metrics import side_comparison
from steelyard.metrics.verify import read_verified_record, verify_record
from steelyard.run import rerun as again
from steelyard.run.checked_request import check_request
from steelyard.weights import llama_weights

NAME = "llama2-7b-mmlu-smoke-closed"


def make_record_with_weights(folder: Path, header_sha256: str) -> Path:
    """Return a copy of a published record that claims real weights with this header hash."""

    def change(table: dict[str, Any]) -> None:
        table["weights"] = {"source": "huggingface", "header_sha256": header_sha256}

    return rewrite_record(copy_published_record(NAME, folder), change)


def test_reproduce_refuses_to_change_the_request(shell: Shell) -> None:
    path = copy_published_record(NAME, shell.folder)
    result = shell.run_in_process("reproduce", path, "--set", "tune.batch_tokens=4")
    assert (result.code, shell.records()) == (2, [])
    assert result.err == (golden("error-set-tune-batch_tokens-4-reproduce"))
    assert (
        shell.run_in_process("reproduce", path, "--repeat", "0", "--accelerator", "cpu").code == 2
    )
    assert shell.run_in_process("reproduce", path, "--data", "x").code == 2
    assert shell.run_in_process("reproduce", "none.json").code == 2


def test_options_name_paths_hosts_and_time_limits(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record says what is run; options say where, and how long it may take."""
    requests: list[Request] = []

    def reproduce_record(
        base: side_comparison.ComparisonSide, request: Request, *more: object
    ) -> int:
        requests.append(request)
        return 0

    monkeypatch.setattr(verb, "reproduce_record", reproduce_record)
    path = copy_published_record(NAME, shell.folder)
    options = (
        "--out",
        "again",
        "--hang-after",
        "9",
        "--time-limit",
        "60",
        "--weights",
        "w",
        "--data",
        "d",
        "--tokenizer",
        "t",
    )
    assert (
        shell.run_in_process(
            "reproduce",
            path,
            *options,
            "--launcher",
            "ssh",
            "--accelerator",
            "cuda",
            "--site",
            "s.toml",
        ).code
        == 0
    )
    assert shell.run_in_process("reproduce", path).code == 0
    with_options, without_options = requests
    assert (with_options.out, with_options.hang_s, with_options.limit_s) == (
        Path("again"),
        9.0,
        60.0,
    )
    assert (with_options.weights, with_options.data, with_options.tokenizer, with_options.site) == (
        Path("w"),
        Path("d"),
        Path("t"),
        Path("s.toml"),
    )
    assert (with_options.launcher, with_options.accelerator, with_options.engine) == (
        "ssh",
        "cuda",
        "torch",
    )
    assert (
        without_options.launcher,
        without_options.accelerator,
        without_options.out,
        without_options.hang_s,
    ) == (None, "cpu", Path("records"), 1800.0)
    assert with_options.resolved == without_options.resolved


def test_a_folder_of_different_runs_is_refused(shell: Shell) -> None:
    for name in (NAME, "llama2-7b-mmlu-smoke-open"):
        copy_published_record(name, shell.folder / "both")
    result = shell.run_in_process("reproduce", "both")
    assert (result.code, "question.division: closed / open" in result.err) == (2, True)


@pytest.mark.full
def test_other_weights_are_refused_before_the_run(shell: Shell) -> None:
    from fixtures import huggingface

    other_path = make_record_with_weights(shell.folder / "other", "ab" * 32)
    (shell.folder / "hf").mkdir()
    huggingface.write_hf_folder(
        shell.folder / "hf",
        llama_weights.get_llama_shape(read_verified_record(other_path).question.model),
    )
    header_sha256 = shell("weights", "inspect", "hf", "--json").json()["header_sha256"]
    result = shell.run_in_process("reproduce", other_path, "--weights", "hf")
    assert (result.code, shell.records()) == (2, [])
    assert result.err == (
        golden("error-other-weights-weights-header_sha-256", "ab" * 32, header_sha256)
    )
    equal_record = read_verified_record(
        make_record_with_weights(shell.folder / "same", header_sha256)
    )
    verb._check_same_weights(
        equal_record,
        check_request(replace(again.make_request(equal_record), weights=shell.folder / "hf")),
    )
    (shell.folder / "none").mkdir()
    refused = shell.run_in_process("reproduce", other_path, "--weights", "none")
    assert (refused.code, len(refused.lines)) == (2, 1)


def test_differences_found_after_the_run_are_an_error(tmp_path: Path) -> None:
    [path] = write_series(tmp_path / "a", [1.0])
    [other_path] = write_series(tmp_path / "b", [1.0], day=2, weights__seed=3)
    base = side_comparison.make_side("record", [read_verified_record(path)])
    with pytest.raises(RequestError) as caught:
        verb._print_comparison(
            base, [read_verified_record(other_path)], (), 0.01, OutputOptions(), 1
        )
    assert str(caught.value) == golden("not-the-same-run-weights-seed")


def test_comparison_is_printed_and_decides_the_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = side_comparison.make_side(
        "record",
        [read_verified_record(path) for path in write_series(tmp_path / "a", [1.0, 1.001])],
    )
    slower_records = [
        read_verified_record(path) for path in write_series(tmp_path / "b", [1.5, 1.501], day=2)
    ]
    assert verb._print_comparison(base, slower_records, (), 0.01, OutputOptions(), 2) == 1
    assert "slower: significant" in capsys.readouterr().out
    assert (
        verb._print_comparison(base, list(base.records), (), 0.01, OutputOptions(json=True), 2) == 0
    )
    answer = json.loads(capsys.readouterr().out)
    assert sorted(answer) == ["comparison", "here", "records", "remarks"]
    assert answer["comparison"]["ratio"]["value"] == 1.0
    # two of the three requested runs ended
    assert verb._print_comparison(base, list(base.records), (), 0.01, OutputOptions(), 3) == 1


@pytest.mark.full
def test_rerun_has_the_same_case_tune_plan_and_scope(shell: Shell) -> None:
    original_run = shell(
        *SMOKE,
        "--set",
        "tune.batch_tokens=2048",
        "--passes",
        "infer",
        "--sample",
        "24",
        "--out",
        "first",
    )
    assert original_run.code == 0, original_run.err
    [first] = (shell.folder / "first").iterdir()
    result = shell("reproduce", first, "--out", "second", "--json")
    assert result.code == 0, result.err
    [second] = (shell.folder / "second").iterdir()
    assert verify_record(second) == []
    answer = result.json()
    original, rerun = read_verified_record(first), read_verified_record(second)
    assert [entry["id"] for entry in answer["records"]] == [rerun.id]
    assert (rerun.case, rerun.tune, rerun.plan, rerun.scope) == (
        original.case,
        original.tune,
        original.plan,
        original.scope,
    )
    assert [window.pass_name for window in rerun.passes] == ["infer"]
    assert rerun.tune.batch_tokens == 2048
    assert answer["here"] == []
    assert answer["comparison"]["ratio"]["verdict"] == "not tested"
    assert answer["comparison"]["answers"]["new"]["chosen"] == {
        "items": 24,
        "other": 0,
        "largest": None,
        "tokens": 0,
    }
    assert answer["comparison"]["differs"] == []


@pytest.mark.full
def test_case_is_rebuilt_when_its_file_is_gone(shell: Shell) -> None:
    """Only the record is left; the case file was deleted."""
    from steelyard.case import resolve

    shipped = (Path(resolve.__file__).parents[1] / "cases" / "llama2-7b-mmlu.toml").read_text()
    case_file = shell.folder / "mine.toml"
    case_file.write_text(shipped.replace('name = "llama2-7b-mmlu"', 'name = "mine"'))
    original_run = shell(
        "run",
        case_file,
        "--size",
        "smoke",
        "--accelerator",
        "cpu",
        "--passes",
        "infer",
        "--out",
        "first",
    )
    assert original_run.code == 0, original_run.err
    case_file.unlink()
    [first] = (shell.folder / "first").iterdir()
    result = shell("reproduce", first, "--out", "second")
    assert result.code == 0, result.err
    assert result.lines[0] == golden("no-case-mine-comes-with-this")
    [second] = (shell.folder / "second").iterdir()
    assert read_verified_record(second).case.key == read_verified_record(first).case.key
