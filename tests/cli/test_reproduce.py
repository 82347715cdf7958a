"""Tests of the command `reproduce`."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fixtures.commands import SMOKE, Shell
from fixtures.golden import golden
from fixtures.records import changed, published
from fixtures.series import series
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


def trained(folder: Path, header_sha256: str) -> Path:
    """Return a copy of a published record that claims real weights with this header hash."""

    def change(table: dict[str, Any]) -> None:
        table["weights"] = {"source": "huggingface", "header_sha256": header_sha256}

    return changed(published(NAME, folder), change)


def test_what_is_asked_cannot_be_changed(shell: Shell) -> None:
    path = published(NAME, shell.folder)
    done = shell.ask("reproduce", path, "--set", "tune.batch_tokens=4")
    assert (done.code, shell.records()) == (2, [])
    assert done.err == (golden("error-set-tune-batch_tokens-4-reproduce"))
    assert shell.ask("reproduce", path, "--repeat", "0", "--accelerator", "cpu").code == 2
    assert shell.ask("reproduce", path, "--data", "x").code == 2
    assert shell.ask("reproduce", "none.json").code == 2


def test_where_things_are_is_asked_here(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record says what is run; options say where, and how long it may take."""
    asked: list[Request] = []

    def reproduce_record(
        base: side_comparison.ComparisonSide, request: Request, *more: object
    ) -> int:
        asked.append(request)
        return 0

    monkeypatch.setattr(verb, "reproduce_record", reproduce_record)
    path = published(NAME, shell.folder)
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
        shell.ask(
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
    assert shell.ask("reproduce", path).code == 0
    named, plain = asked
    assert (named.out, named.hang_s, named.limit_s) == (Path("again"), 9.0, 60.0)
    assert (named.weights, named.data, named.tokenizer, named.site) == (
        Path("w"),
        Path("d"),
        Path("t"),
        Path("s.toml"),
    )
    assert (named.launcher, named.accelerator, named.engine) == ("ssh", "cuda", "torch")
    assert (plain.launcher, plain.accelerator, plain.out, plain.hang_s) == (
        None,
        "cpu",
        Path("records"),
        1800.0,
    )
    assert named.resolved == plain.resolved


def test_a_folder_of_different_runs_is_refused(shell: Shell) -> None:
    for name in (NAME, "llama2-7b-mmlu-smoke-open"):
        published(name, shell.folder / "both")
    done = shell.ask("reproduce", "both")
    assert (done.code, "question.division: closed / open" in done.err) == (2, True)


@pytest.mark.full
def test_other_weights_are_refused_before_the_run(shell: Shell) -> None:
    from fixtures import huggingface

    other = trained(shell.folder / "other", "ab" * 32)
    (shell.folder / "hf").mkdir()
    huggingface.write(
        shell.folder / "hf",
        llama_weights.get_llama_shape(read_verified_record(other).question.model),
    )
    digest = shell("weights", "inspect", "hf", "--json").json()["header_sha256"]
    done = shell.ask("reproduce", other, "--weights", "hf")
    assert (done.code, shell.records()) == (2, [])
    assert done.err == (golden("error-other-weights-weights-header_sha-256", "ab" * 32, digest))
    same = read_verified_record(trained(shell.folder / "same", digest))
    verb._check_same_weights(
        same, check_request(replace(again.make_request(same), weights=shell.folder / "hf"))
    )
    (shell.folder / "none").mkdir()
    wrong = shell.ask("reproduce", other, "--weights", "none")
    assert (wrong.code, len(wrong.lines)) == (2, 1)


def test_after_the_run_what_differs_is_named(tmp_path: Path) -> None:
    [one] = series(tmp_path / "a", [1.0])
    [other] = series(tmp_path / "b", [1.0], day=2, weights__seed=3)
    base = side_comparison.make_side("record", [read_verified_record(one)])
    with pytest.raises(RequestError) as caught:
        verb._print_comparison(base, [read_verified_record(other)], (), 0.01, OutputOptions(), 1)
    assert str(caught.value) == golden("not-the-same-run-weights-seed")


def test_the_comparison_is_printed_and_its_exit_code_is_compares(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = side_comparison.make_side(
        "record", [read_verified_record(path) for path in series(tmp_path / "a", [1.0, 1.001])]
    )
    slow = [read_verified_record(path) for path in series(tmp_path / "b", [1.5, 1.501], day=2)]
    assert verb._print_comparison(base, slow, (), 0.01, OutputOptions(), 2) == 1
    assert "slower: significant" in capsys.readouterr().out
    assert (
        verb._print_comparison(base, list(base.records), (), 0.01, OutputOptions(json=True), 2) == 0
    )
    told = json.loads(capsys.readouterr().out)
    assert sorted(told) == ["comparison", "here", "records", "remarks"]
    assert told["comparison"]["ratio"]["value"] == 1.0
    # two of the three requested runs ended
    assert verb._print_comparison(base, list(base.records), (), 0.01, OutputOptions(), 3) == 1


@pytest.mark.full
def test_a_run_is_reproduced_whole(shell: Shell) -> None:
    made = shell(
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
    assert made.code == 0, made.err
    [first] = (shell.folder / "first").iterdir()
    done = shell("reproduce", first, "--out", "second", "--json")
    assert done.code == 0, done.err
    [second] = (shell.folder / "second").iterdir()
    assert verify_record(second) == []
    told = done.json()
    ours, theirs = read_verified_record(first), read_verified_record(second)
    assert [one["id"] for one in told["records"]] == [theirs.id]
    assert (theirs.case, theirs.tune, theirs.plan, theirs.scope) == (
        ours.case,
        ours.tune,
        ours.plan,
        ours.scope,
    )
    assert [window.pass_name for window in theirs.passes] == ["infer"]
    assert theirs.tune.batch_tokens == 2048
    assert told["here"] == []
    assert told["comparison"]["ratio"]["verdict"] == "not tested"
    assert told["comparison"]["answers"]["new"]["chosen"] == {
        "items": 24,
        "other": 0,
        "largest": None,
        "tokens": 0,
    }
    assert told["comparison"]["differs"] == []


@pytest.mark.full
def test_a_case_that_does_not_ship_is_asked_again(shell: Shell) -> None:
    """Only the record is left; the case file was deleted."""
    from steelyard.case import resolve

    shipped = (Path(resolve.__file__).parents[1] / "cases" / "llama2-7b-mmlu.toml").read_text()
    mine = shell.folder / "mine.toml"
    mine.write_text(shipped.replace('name = "llama2-7b-mmlu"', 'name = "mine"'))
    made = shell(
        "run",
        mine,
        "--size",
        "smoke",
        "--accelerator",
        "cpu",
        "--passes",
        "infer",
        "--out",
        "first",
    )
    assert made.code == 0, made.err
    mine.unlink()
    [first] = (shell.folder / "first").iterdir()
    done = shell("reproduce", first, "--out", "second")
    assert done.code == 0, done.err
    assert done.lines[0] == golden("no-case-mine-comes-with-this")
    [second] = (shell.folder / "second").iterdir()
    assert read_verified_record(second).case.key == read_verified_record(first).case.key
