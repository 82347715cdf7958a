"""Tests of the conformity check against engine torch: the shipped engines conform, and those that
lie do not.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fixtures import report
from fixtures.attacks import Attacks
from fixtures.commands import CASE, SMOKE, Shell, install_faulty_engine
from fixtures.liars import install_liar_engine
from steelyard.cli import conform_runs
from steelyard.engine import engine_rows
from steelyard.engine.engine_rows import TRANSFORMERS, EngineRow, FrameworkRow
from steelyard.metrics.proportion_checks import SAVING_NAME
from steelyard.record.record import Reason, Record
from steelyard.run import conformity, environment
from steelyard.run.checked_request import CheckedRequest

OPENWEBTEXT = "llama1-7b-openwebtext"


def run_conform(shell: Shell, *arguments: str, **variables: str) -> tuple[int, dict[str, Any]]:
    """Run `steelyard conform` with a cache of this test, and return its exit code and JSON
    answer.
    """
    result = shell(
        "conform", *arguments, "--json", XDG_CACHE_HOME=str(shell.folder / "cache"), **variables
    )
    return result.code, result.json()


def failed_rows(answer: dict[str, Any]) -> set[str]:
    """Return what a comparison found to be wrong."""
    return {row["what"] for row in answer["rows"] if row["ok"] is False}


@pytest.mark.full
@pytest.mark.parametrize(
    "arguments",
    [
        ("reference",),
        pytest.param(("transformers", "--case", OPENWEBTEXT), marks=pytest.mark.long),
        pytest.param(("transformers",), marks=pytest.mark.long),
    ],
    ids=" ".join,
)
def test_shipped_engines_conform(shell: Shell, arguments: tuple[str, ...]) -> None:
    code, answer = run_conform(shell, *arguments)
    assert (code, answer["conforms"]) == (0, True), failed_rows(answer)
    assert {row["what"] for row in answer["rows"]} >= {
        "status",
        "weights",
        "parameters",
        "train counts",
        "step 1 loss",
        "step 2 grad_norm",
        "CPU s per TFLOP",
    }
    results_file = shell.folder / "cache" / "steelyard" / "conform.json"
    # that an engine conforms is stored only if all cases were compared
    assert results_file.exists() == ("--case" not in arguments)
    if results_file.exists():
        stored = json.loads(results_file.read_text())[arguments[0]]["untested"]
        assert len(stored) == sum(row["ok"] is None for row in answer["rows"])


@pytest.mark.full
def test_engine_transformers_generates_what_torch_finds_likeliest(shell: Shell) -> None:
    code, answer = run_conform(shell, "transformers", "--case", "llama3-8b-generate")
    assert (code, answer["conforms"]) == (0, True), failed_rows(answer)
    assert {row["what"]: row["ok"] for row in answer["rows"]} == {
        "status": True,
        "weights": True,
        "parameters": True,
        "checked requests": True,
        "likeliest tokens": True,
        "distance in nats": True,
        "same answers, under another load": True,
        "CPU s per TFLOP": None,
    }


@pytest.mark.full
def test_an_engine_that_trains_on_half_of_a_batch_does_not_conform(
    tmp_path: Path, attacks: Attacks
) -> None:
    """The engine names all rows, so its record alone is valid; only its loss and gradients show
    that it used other rows.
    """
    shell = Shell(tmp_path, (install_liar_engine(tmp_path / "package"),))
    code, answer = run_conform(shell, "liar", "--case", OPENWEBTEXT, LIAR="half_hidden")
    assert (code, answer["conforms"]) == (1, False)
    assert {"step 1 loss", "step 1 grad_norm"} <= failed_rows(answer)
    assert not failed_rows(answer) & {"status", "train counts"}
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


AGAIN = "after other rows"
# lie → what `conform` finds, and nothing else
SCORING_LIES = {
    "replay_half": {f"val answers, {AGAIN}", f"infer answers, {AGAIN}"},
    "replay_third": {f"val answers, {AGAIN}", f"infer answers, {AGAIN}"},
    "skip_last": {f"val answers, {AGAIN}", f"infer answers, {AGAIN}"},
    "trained": {"status", f"status, {AGAIN}", "weights"},
    "parameters": {"parameters"},
    "clock": {"status", f"status, {AGAIN}"},
}
LIE_TITLES = {
    "replay_half": "answers half of the rows of a pass from the pass before",
    "replay_third": "answers a third of the rows of a pass from the pass before",
    "skip_last": "answers the last rows of a pass from the pass before",
    "trained": "calls random weights trained",
    "parameters": "states another number of parameters",
    "clock": "slows the clocks of its process during a pass",
}


QUICKLY_SHOWN = ("replay_half",)  # the others take as long, and show less


@pytest.mark.full
@pytest.mark.parametrize(
    "lie",
    [
        pytest.param(lie, marks=() if lie in QUICKLY_SHOWN else pytest.mark.long)
        for lie in SCORING_LIES
    ],
)
def test_a_scoring_engine_that_lies_does_not_conform(
    lie: str, tmp_path: Path, attacks: Attacks
) -> None:
    """Each engine answers correctly as long as both passes have the same rows in the same order, so
    its record alone is valid; those that lie about weights and time are invalid.
    """
    shell = Shell(tmp_path, (install_liar_engine(tmp_path / "package"),))
    code, answer = run_conform(shell, "liar", "--case", CASE, LIAR=lie)
    assert (code, answer["conforms"], failed_rows(answer)) == (1, False, SCORING_LIES[lie])
    attacks.add(f"engine that scores: {LIE_TITLES[lie]}", 1, "`valid`", "`conforms: false`")


@pytest.mark.full
@pytest.mark.long
def test_an_engine_that_knows_rows_again_does_not_conform(tmp_path: Path) -> None:
    """It answers half of the rows that an earlier pass had, known by their tokens, from there: all
    its answers are right, and only its time shows it.
    """
    shell = Shell(tmp_path, (install_liar_engine(tmp_path / "package"),))
    code, answer = run_conform(shell, "liar", "--case", CASE, LIAR="memo")
    untested = [row["untested"] for row in answer["rows"] if row["ok"] is None]
    if untested:
        pytest.skip(untested[0])
    assert code == 1
    assert failed_rows(answer) <= {"status, timed runs", SAVING_NAME}


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

    def run_case(request: object, **_: object) -> tuple[Record, Path]:
        runs.append(request)
        return failed, Path()

    monkeypatch.setattr("steelyard.cli.conform_runs.run_case", run_case)
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
        (("http",), "engine 'http' asks a server with weights of its own"),
        (("reference", "--case", OPENWEBTEXT), f"engine 'reference' does not run {OPENWEBTEXT}"),
    ],
)
def test_engines_that_cannot_be_compared_are_refused(
    shell: Shell, arguments: tuple[str, ...], said: str
) -> None:
    result = shell.run_in_process("conform", *arguments)
    assert (result.code, said in result.err) == (2, True), result.err


def make_matching_record() -> Record:
    """Return a valid fp32 training record that conforms to itself."""
    record = report.make_training_record().model_copy(update={"status": "valid", "reasons": []})
    precision = record.case.question["precision"] | {"matmul": "fp32"}
    question = record.case.question | {"precision": precision}
    weights = record.weights.model_copy(update={"source": "random"})
    return record.model_copy(
        update={
            "case": record.case.model_copy(update={"question": question}),
            "weights": weights,
        }
    )


@pytest.mark.parametrize(
    ("identities", "stored"), [(("a", "a"), True), (("a", "b"), False), ((None, None), False)]
)
def test_result_is_stored_only_for_code_that_stays_the_same(
    identities: tuple[str | None, str | None],
    stored: bool,
    shell: Shell,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All runs of the engine must have one identity, and each is asked for it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(shell.folder / "cache"))
    asked: list[bool] = []

    def run_case(checked: CheckedRequest, **_: object) -> tuple[Record, Path]:
        record = make_matching_record()
        if checked.request.engine == "transformers":
            asked.append(checked.request.identify)
            facts = {"name": "transformers", "identity": identities[len(asked) % 2]}
            engine = record.engine.model_copy(update=facts)
            record = record.model_copy(update={"engine": engine})
        return record, Path()

    monkeypatch.setattr("steelyard.cli.conform_runs.run_case", run_case)
    monkeypatch.setattr(
        "steelyard.cli.conform._resolve_cases",
        lambda row, names: [conform_runs.resolve_smoke(OPENWEBTEXT)] * 2,
    )
    result = shell.run_in_process("conform", "transformers", "--json")
    assert (result.code, result.json()["conforms"]) == (0, True)
    assert len(asked) >= 2
    assert all(asked)
    version = conformity.hash_engine(TRANSFORMERS, "a") if stored else None
    assert result.json()["version"] == version
    assert bool(list((shell.folder / "cache").rglob("conform.json"))) is stored
    assert ("result not stored: the engine's code changed" in result.err) is not stored
    assert conformity.read_conformity(TRANSFORMERS, "a") is (True if stored else None)


ROW = EngineRow(
    name="mine", framework="torch", works={"train_rows": "mine_engine:Mine"}, families=("llama",)
)


def test_conformity_result_holds_for_one_engine_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert (conformity.is_tested(ROW), conformity.read_conformity(ROW, "1234")) == (False, None)
    conformity.write_conformity(TRANSFORMERS, ["a"], True, "1234")
    assert not conformity.is_tested(ROW)
    for is_conform in (False, True):
        conformity.write_conformity(ROW, ["a", "b"], is_conform, "1234")
        assert conformity.read_conformity(ROW, "1234") is is_conform
    assert conformity.read_conformity(TRANSFORMERS, "1234") is True
    assert conformity.is_tested(ROW)
    assert conformity.read_conformity(ROW, "5678") is None
    assert conformity.read_conformity(ROW, None) is None
    monkeypatch.setattr(environment, "hash_package", lambda: "another")
    assert conformity.read_conformity(ROW, "1234") is None


def test_result_of_an_unknown_version_never_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file without a version, as an identity that is not known would give, matches nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "steelyard").mkdir(mode=0o700)
    results = {"mine": {"version": None, "conforms": True}}
    (tmp_path / "steelyard" / conformity.RESULTS_FILE).write_text(json.dumps(results))
    assert conformity.read_conformity(ROW, None) is None


@pytest.mark.parametrize(
    ("identities", "merged"),
    [(["a", "a"], "a"), (["a", "b"], None), (["a", None], None), ([None], None), ([], None)],
)
def test_hosts_and_runs_must_have_one_identity(
    identities: list[str | None], merged: str | None
) -> None:
    assert conformity.merge_identities(identities) == merged


def test_modules_of_the_engine_and_its_framework_are_identified(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Modules of this package are left out: the hash of its files covers them."""
    row = replace(ROW, works=ROW.works | {"score_choices": "steelyard.engines.x:X"})
    assert conformity.list_modules(row) == ["mine_engine"]
    frameworks = {"torch": FrameworkRow("torch", "mine_framework.torch:Mine")}
    monkeypatch.setattr(engine_rows, "load_framework_rows", lambda: frameworks)
    assert conformity.list_modules(row) == ["mine_engine", "mine_framework.torch"]
    assert conformity.list_modules(replace(row, framework="unknown")) == ["mine_engine"]
    assert conformity.list_modules(TRANSFORMERS) == ["mine_framework.torch"]


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"mine": 3}', '{"mine": {"version": []}}', "[" * 5000]
)
def test_damaged_conformity_file_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "steelyard").mkdir(mode=0o700)
    (tmp_path / "steelyard" / conformity.RESULTS_FILE).write_text(text)
    assert conformity.read_conformity(ROW, "1234") is None


@pytest.mark.full
def test_run_states_conformity_of_unchanged_code_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attacks: Attacks
) -> None:
    """The agent of a run identifies the engine with the Python and search path of the workers; the
    stored result holds for that identity alone.
    """
    package = install_faulty_engine(tmp_path / "package")
    shell = Shell(tmp_path, (package,))
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    monkeypatch.setenv("XDG_CACHE_HOME", cache["XDG_CACHE_HOME"])
    row = replace(ROW, name="faulty", works={"score_choices": "faulty_engine:Faulty"})

    def run_engine() -> dict[str, Any]:
        answer = shell(*SMOKE, "--engine", "faulty", "--json", "--out", shell.out, **cache).json()
        engine: dict[str, Any] = answer["records"][0]["engine"]
        return engine

    never_tested = run_engine()
    assert (never_tested["conforms"], "identity" in never_tested) == (None, False)
    modules = conformity.list_modules(row)
    identity = environment.identify_engine(sys.executable, modules, shell.env()).hash
    assert identity is not None
    conformity.write_conformity(row, ["a"], True, identity)
    tested = run_engine()
    assert (tested["conforms"], tested["identity"]) == (True, identity)
    (package / "sitecustomize.py").write_text("import time\n")
    changed = run_engine()
    assert changed["conforms"] is None
    assert changed["identity"] != identity
    attacks.add(
        "engine changed after `conform`: code that runs as Python starts",
        1,
        "`conforms: true`",
        "`conforms: null`",
    )
