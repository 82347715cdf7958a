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
from fixtures.liars import liar_engine
from steelyard.engine.engine_rows import TRANSFORMERS, EngineRow
from steelyard.metrics.conform_checks import ConformCheck, check_conformity
from steelyard.record.record import Reason, Record
from steelyard.run import conformity

OPENWEBTEXT = "llama1-7b-openwebtext"


def conform(shell: Shell, *arguments: str, **variables: str) -> tuple[int, dict[str, Any]]:
    """Run `steelyard conform` with a cache of this test, and return its exit code and JSON answer."""
    done = shell(
        "conform", *arguments, "--json", XDG_CACHE_HOME=str(shell.folder / "cache"), **variables
    )
    return done.code, done.json()


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
    code, found = conform(shell, *arguments)
    assert (code, found["conforms"]) == (0, True), [row for row in found["rows"] if not row["ok"]]
    assert {row["what"] for row in found["rows"]} >= {
        "status",
        "train counts",
        "step 1 loss",
        "step 1 grad_norm",
    }
    kept = shell.folder / "cache" / "steelyard" / "conform.json"
    # that an engine conforms is stored only if all cases were compared
    assert kept.exists() == ("--case" not in arguments)


@pytest.mark.full
def test_an_engine_that_trains_on_half_of_a_batch_does_not_conform(
    tmp_path: Path, attacks: Attacks
) -> None:
    """The engine names all rows, so its record alone is valid; only its loss and gradients show
    that it used other rows.
    """
    shell = Shell(tmp_path, (liar_engine(tmp_path / "package"),))
    code, found = conform(shell, "liar", "--case", OPENWEBTEXT, LIAR="half_hidden")
    wrong = {row["what"] for row in found["rows"] if not row["ok"]}
    assert (code, found["conforms"]) == (1, False)
    assert {"step 1 loss", "step 1 grad_norm"} <= wrong
    assert not wrong & {"status", "train counts"}
    kept = json.loads((tmp_path / "cache" / "steelyard" / "conform.json").read_text())
    assert (kept["liar"]["conforms"], kept["liar"]["version"]) == (False, found["version"])
    run = (
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
    made = shell(
        *run, "--out", shell.out, LIAR="half_hidden", XDG_CACHE_HOME=str(tmp_path / "cache")
    ).json()
    assert made["records"][0]["engine"]["conforms"] is False
    attacks.add(
        "engine that trains: on half of each batch, and names all rows",
        1,
        "`valid`",
        "`conforms: false`",
    )


@pytest.mark.parametrize(("reasons", "code"), [(("interrupted",), 1), (("out_of_memory",), 1)])
def test_a_run_that_did_not_finish_shows_nothing(
    reasons: tuple[str, ...], code: int, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C ends the command at once; a run that failed says nothing about the engine's answers."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(shell.folder / "cache"))
    failed = report.training().model_copy(
        update={"status": "failed", "reasons": [Reason(code=one, text=one) for one in reasons]}
    )
    runs: list[object] = []

    def run_case(request: object) -> tuple[Record, Path]:
        runs.append(request)
        return failed, Path()

    monkeypatch.setattr("steelyard.cli.conform.run_case", run_case)
    done = shell.ask("conform", "transformers")
    assert done.code == code
    assert ("interrupted" in done.lines) == (reasons == ("interrupted",))
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
def test_what_cannot_be_compared_is_refused(
    shell: Shell, arguments: tuple[str, ...], said: str
) -> None:
    done = shell.ask("conform", *arguments)
    assert (done.code, said in done.err) == (2, True), done.err


def wrong(ours: Record, theirs: Record) -> list[ConformCheck]:
    """Return the comparisons of two records that failed."""
    return [row for row in check_conformity(ours, theirs) if not row.ok]


def first_step(record: Record, **values: float) -> Record:
    """Return the record with these values changed in its first training step."""
    first, *rest = record.samples
    return record.model_copy(
        update={"samples": [first.model_copy(update={"values": first.values | values}), *rest]}
    )


def trained(**values: float) -> Record:
    """Return a valid fp32 training record with these values in its first step; loss is 10 and
    grad_norm 4 by default.
    """
    made = report.training().model_copy(update={"status": "valid", "reasons": []})
    question = made.case.question | {
        "precision": made.case.question["precision"] | {"matmul": "fp32"}
    }
    made = made.model_copy(update={"case": made.case.model_copy(update={"question": question})})
    return first_step(made, **({"loss": 10.0, "grad_norm": 4.0} | values))


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({}, []),
        ({"loss": 10.0009, "grad_norm": 4.0039}, []),
        ({"loss": 10.0011}, ["step 1 loss"]),
        ({"grad_norm": 3.9959}, ["step 1 grad_norm"]),
    ],
)
def test_the_first_step_within_its_tolerance(values: dict[str, float], names: list[str]) -> None:
    assert [row.what for row in wrong(trained(), trained(**values))] == names


def test_counts_must_be_the_same() -> None:
    ours = trained()
    first, *rest = ours.samples
    more = first.model_copy(update={"counts": first.counts | {"pairs": first.counts["pairs"] + 1}})
    assert [
        row.what for row in wrong(ours, ours.model_copy(update={"samples": [more, *rest]}))
    ] == ["train counts"]


def test_a_run_that_is_not_valid_shows_nothing() -> None:
    ours = trained()
    assert [row.what for row in wrong(ours, ours.model_copy(update={"status": "invalid"}))] == [
        "status"
    ]


ROW = EngineRow(
    name="mine", framework="torch", works={"train_rows": "mine_engine:Mine"}, families=("llama",)
)


def test_what_was_found_is_of_one_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path)
    source = tmp_path / "mine_engine.py"
    source.write_text("class Mine: ...\n")
    assert conformity.read_conformity(ROW) is None
    conformity.write_conformity(TRANSFORMERS, ["a"], True)
    for verdict in (False, True):
        conformity.write_conformity(ROW, ["a", "b"], verdict)
        assert conformity.read_conformity(ROW) is verdict
    assert conformity.read_conformity(TRANSFORMERS) is True
    source.write_text("class Mine: faster = True\n")
    assert conformity.read_conformity(ROW) is None


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"mine": 3}', '{"mine": {"version": []}}', "[" * 5000]
)
def test_a_damaged_file_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "steelyard").mkdir(mode=0o700)
    (tmp_path / "steelyard" / conformity.RESULTS_FILE).write_text(text)
    assert conformity.read_conformity(ROW) is None
