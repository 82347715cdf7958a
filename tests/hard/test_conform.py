"""Tests of the conformity check against engine torch: the shipped engines conform, and those that
lie do not.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from fixtures import report
from fixtures.attacks import Attacks
from fixtures.commands import Shell
from fixtures.liars import install_liar_engine
from steelyard.engine.engine_rows import TRANSFORMERS, EngineRow
from steelyard.metrics.conform_checks import ConformCheck, check_conformity
from steelyard.record.record import Reason, Record
from steelyard.run import conformity

OPENWEBTEXT = "llama1-7b-openwebtext"


def run_conform(shell: Shell, *arguments: str, **variables: str) -> tuple[int, dict[str, Any]]:
    """Run `steelyard conform` with a cache of this test, and return its exit code and JSON
    answer.
    """
    result = shell(
        "conform", *arguments, "--json", XDG_CACHE_HOME=str(shell.folder / "cache"), **variables
    )
    return result.code, result.json()


@pytest.mark.full
@pytest.mark.parametrize(
    "arguments",
    [
        ("reference",),
        ("transformers", "--case", OPENWEBTEXT),
        pytest.param(("transformers",), marks=pytest.mark.long),
    ],
    ids=" ".join,
)
def test_shipped_engines_conform(shell: Shell, arguments: tuple[str, ...]) -> None:
    code, answer = run_conform(shell, *arguments)
    assert (code, answer["conforms"]) == (0, True), [row for row in answer["rows"] if not row["ok"]]
    assert {row["what"] for row in answer["rows"]} >= {
        "status",
        "train counts",
        "step 1 loss",
        "step 1 grad_norm",
    }
    results_file = shell.folder / "cache" / "steelyard" / "conform.json"
    # that an engine conforms is stored only if all cases were compared
    assert results_file.exists() == ("--case" not in arguments)


@pytest.mark.full
def test_an_engine_that_trains_on_half_of_a_batch_does_not_conform(
    tmp_path: Path, attacks: Attacks
) -> None:
    """The engine names all rows, so its record alone is valid; only its loss and gradients show
    that it used other rows.
    """
    shell = Shell(tmp_path, (install_liar_engine(tmp_path / "package"),))
    code, answer = run_conform(shell, "liar", "--case", OPENWEBTEXT, LIAR="half_hidden")
    failed_rows = {row["what"] for row in answer["rows"] if not row["ok"]}
    assert (code, answer["conforms"]) == (1, False)
    assert {"step 1 loss", "step 1 grad_norm"} <= failed_rows
    assert not failed_rows & {"status", "train counts"}
    results = json.loads((tmp_path / "cache" / "steelyard" / "conform.json").read_text())
    assert (results["liar"]["conforms"], results["liar"]["version"]) == (False, answer["version"])
    command = (
        "run",
        OPENWEBTEXT,
        "--size",
        "smoke",
        "--accelerator",
        "cpu",
        "--steps",
        "2",
        "--engine",
        "liar",
        "--json",
    )
    run_answer = shell(
        *command, "--out", shell.out, LIAR="half_hidden", XDG_CACHE_HOME=str(tmp_path / "cache")
    ).json()
    assert run_answer["records"][0]["engine"]["conforms"] is False
    attacks.add(
        "engine that trains: on half of each batch, and names all rows",
        1,
        "`valid`",
        "`conforms: false`",
    )


@pytest.mark.parametrize(("reasons", "code"), [(("interrupted",), 1), (("out_of_memory",), 1)])
def test_unfinished_run_gives_no_conformity_result(
    reasons: tuple[str, ...], code: int, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C ends the command at once; a run that failed says nothing about the engine's
    answers.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(shell.folder / "cache"))
    failed = report.make_training_record().model_copy(
        update={
            "status": "failed",
            "reasons": [Reason(code=reason_code, text=reason_code) for reason_code in reasons],
        }
    )
    runs: list[object] = []

    def run_case(request: object) -> tuple[Record, Path]:
        runs.append(request)
        return failed, Path()

    monkeypatch.setattr("steelyard.cli.conform.run_case", run_case)
    result = shell.run_in_process("conform", "transformers")
    assert result.code == code
    assert ("interrupted" in result.lines) == (reasons == ("interrupted",))
    assert (len(runs) == 1) == (reasons == ("interrupted",))
    assert not list((shell.folder / "cache").rglob("conform.json"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("torch",), "engine 'torch' is the reference; name another engine"),
        (("none",), "no engine 'none'; known:"),
        (("reference", "--case", OPENWEBTEXT), f"engine 'reference' does not run {OPENWEBTEXT}"),
    ],
)
def test_engines_that_cannot_be_compared_are_refused(
    shell: Shell, arguments: tuple[str, ...], said: str
) -> None:
    result = shell.run_in_process("conform", *arguments)
    assert (result.code, said in result.err) == (2, True), result.err


def failed_comparisons(ours: Record, theirs: Record) -> list[ConformCheck]:
    """Return the comparisons of two records that failed."""
    return [row for row in check_conformity(ours, theirs) if not row.ok]


def change_first_step(record: Record, **values: float) -> Record:
    """Return the record with these values changed in its first training step."""
    first, *rest = record.samples
    return record.model_copy(
        update={"samples": [first.model_copy(update={"values": first.values | values}), *rest]}
    )


def make_training_record(**values: float) -> Record:
    """Return a valid fp32 training record with these values in its first step; loss is 10 and
    grad_norm 4 by default.
    """
    record = report.make_training_record().model_copy(update={"status": "valid", "reasons": []})
    question = record.case.question | {
        "precision": record.case.question["precision"] | {"matmul": "fp32"}
    }
    record = record.model_copy(
        update={"case": record.case.model_copy(update={"question": question})}
    )
    return change_first_step(record, **({"loss": 10.0, "grad_norm": 4.0} | values))


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({}, []),
        ({"loss": 10.0009, "grad_norm": 4.0039}, []),
        ({"loss": 10.0011}, ["step 1 loss"]),
        ({"grad_norm": 3.9959}, ["step 1 grad_norm"]),
    ],
)
def test_first_step_must_agree_within_its_tolerance(
    values: dict[str, float], names: list[str]
) -> None:
    assert [
        row.what
        for row in failed_comparisons(make_training_record(), make_training_record(**values))
    ] == names


def test_counts_must_be_equal() -> None:
    ours = make_training_record()
    first, *rest = ours.samples
    first_with_more_pairs = first.model_copy(
        update={"counts": first.counts | {"pairs": first.counts["pairs"] + 1}}
    )
    assert [
        row.what
        for row in failed_comparisons(
            ours, ours.model_copy(update={"samples": [first_with_more_pairs, *rest]})
        )
    ] == ["train counts"]


def test_invalid_run_does_not_conform() -> None:
    ours = make_training_record()
    assert [
        row.what for row in failed_comparisons(ours, ours.model_copy(update={"status": "invalid"}))
    ] == ["status"]


ROW = EngineRow(
    name="mine", framework="torch", works={"train_rows": "mine_engine:Mine"}, families=("llama",)
)


def test_conformity_result_holds_for_one_engine_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path)
    source = tmp_path / "mine_engine.py"
    source.write_text("class Mine: ...\n")
    assert conformity.read_conformity(ROW) is None
    conformity.write_conformity(TRANSFORMERS, ["a"], True)
    for is_conform in (False, True):
        conformity.write_conformity(ROW, ["a", "b"], is_conform)
        assert conformity.read_conformity(ROW) is is_conform
    assert conformity.read_conformity(TRANSFORMERS) is True
    source.write_text("class Mine: faster = True\n")
    assert conformity.read_conformity(ROW) is None


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"mine": 3}', '{"mine": {"version": []}}', "[" * 5000]
)
def test_damaged_conformity_file_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "steelyard").mkdir(mode=0o700)
    (tmp_path / "steelyard" / conformity.RESULTS_FILE).write_text(text)
    assert conformity.read_conformity(ROW) is None
