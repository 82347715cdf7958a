"""Tests of names that must mean one thing: the name of a precision preset, and that of a shipped
case.
"""

import re
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import pytest

from fixtures.cases import OWN_CASE, write_own_case
from fixtures.commands import SMOKE, Shell
from fixtures.golden import golden
from fixtures.records import RESULTS, RUNS, copy_published_record, rewrite_record
from steelyard import report
from steelyard.case.precision import load_presets, name_precision
from steelyard.case.resolve import list_shipped_cases, resolve_case
from steelyard.metrics import validity, verify
from steelyard.metrics.metric_table import derive_metrics
from steelyard.metrics.shipped_cases import list_later_fields, list_modified_parts
from steelyard.record import record
from steelyard.report.numbered_runs import group_by_case
from steelyard.report.published_rows import find_published_rows as published_rows

CASE = "llama2-7b-mmlu"
# Published records, by the last eight characters of their file names, that lack fields which their
# shipped case has set since.
FIELDS_ADDED_SINCE = {
    name: ["question.data.joint", "question.data.last_target"]
    for name in ("304a1447", "86b8f8f0", "44b1216e")
}


@pytest.mark.parametrize(
    ("case", "parts", "name"),
    [
        (CASE, '{name="fp32",matmul="fp16",weights="fp32"}', "matmul fp16, weights fp32"),
        (
            CASE,
            '{name="fp32",matmul="fp32",weights="fp32",states="bf16"}',
            "matmul fp32, weights fp32, states bf16",
        ),
        (CASE, '{name="mine",matmul="fp32",weights="fp32"}', "fp32"),
        (CASE, '{matmul="tf32",weights="fp32"}', "tf32"),
        (
            "llama1-7b-openwebtext",
            '{name="bf16",matmul="fp16",weights="fp32",gradients="bf16",states="fp32"}',
            "matmul fp16, weights fp32, gradients bf16, states fp32",
        ),
    ],
)
def test_precision_is_named_by_its_parts(case: str, parts: str, name: str) -> None:
    resolved = resolve_case(case, "smoke", settings=[f"question.precision={parts}"])
    assert resolved.case.question.precision.name == name
    assert resolved.origins["question.precision.name"] == "of its parts"


def test_precision_of_a_case_file_is_named_by_its_parts(tmp_path: Path) -> None:
    precision_text = '\n[question.precision]\nname = "bf16"\nmatmul = "tf32"\nweights = "bf16"\n'
    path = write_own_case(tmp_path, OWN_CASE + precision_text, ('precision = "fp16"\n', ""))
    assert resolve_case(path).case.question.precision.name == "matmul tf32, weights bf16"


@pytest.mark.parametrize("kind", load_presets())
def test_every_preset_is_named_after_itself(kind: str) -> None:
    assert {
        name: name_precision(kind, row.model_dump()) for name, row in load_presets()[kind].items()
    } == {n: n for n in load_presets()[kind]}


@pytest.mark.parametrize("name", list_shipped_cases())
def test_shipped_cases_use_preset_precisions(name: str) -> None:
    precision = resolve_case(name).case.question.precision
    kind = resolve_case(name).case.question.kind
    assert load_presets()[kind][precision.name] == precision


def test_a_record_that_calls_fp16_fp32_does_not_verify(tmp_path: Path) -> None:
    path = copy_published_record("mmlu-smoke-closed", tmp_path)
    assert verify.verify_record(path) == []

    def claim_fp32(table: dict) -> None:
        table["case"]["question"]["precision"]["matmul"] = "fp16"
        table["case"]["key"] = verify.compute_question_key(
            table["case"]["question"], table["data"]["fingerprint"]
        )

    assert golden("the-precision-is-called-fp-32") in verify.verify_record(
        rewrite_record(path, claim_fp32)
    )


def no_gate(table: dict) -> None:
    """Remove the quality gate of the case."""
    table["case"]["gate"] = None


def loose(table: dict) -> None:
    """Raise the allowed confidence interval to 50 %."""
    table["case"]["max_interval"] = 0.5


def other_question(table: dict) -> None:
    """Add a layer to the question's model, as a user's case file can, and correct the key."""
    table["case"]["question"]["model"]["layers"] += 1
    table["case"]["key"] = verify.compute_question_key(
        table["case"]["question"], table["data"]["fingerprint"]
    )


def as_smoke(table: dict) -> None:
    """Claim that a full run was one of size smoke."""
    table["case"]["size"] = "smoke"


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (no_gate, "gate"),
        (loose, "max_interval"),
        (other_question, "question"),
        (as_smoke, "question"),
    ],
)
def test_modified_case_is_noted(change: Callable, parts: str, tmp_path: Path) -> None:
    path = rewrite_record(copy_published_record("mmlu-full-closed-bf16-torch", tmp_path), change)
    modified_record = verify.read_verified_record(path)
    assert f"case: modified: not the {parts} of the shipped case {CASE}" in modified_record.notes
    if change is not other_question:
        assert (
            modified_record.case.key
            == record.read_record(
                copy_published_record("mmlu-full-closed-bf16-torch", tmp_path / "whole")
            ).case.key
        )
    page = report.render_text(report.build_summary_page([modified_record]))
    assert "case: modified" in page
    original = verify.read_verified_record(
        copy_published_record("mmlu-full-closed-bf16-torch", tmp_path / "whole")
    )
    assert [
        run.label for runs in group_by_case([original, modified_record]).values() for run in runs
    ] == ["#1", "#1"]


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem[-8:])
def test_published_records_are_of_the_shipped_cases(path: Path) -> None:
    """A record may also be of an earlier version of a shipped case, which is then noted."""
    run_record = record.read_record(path)
    assert list_modified_parts(run_record) == []
    assert list_later_fields(run_record) == FIELDS_ADDED_SINCE.get(path.stem[-8:], [])


def test_records_of_earlier_questions_are_published(tmp_path: Path) -> None:
    assert set(FIELDS_ADDED_SINCE) <= {path.stem[-8:] for path in RESULTS.rglob("*.json")}


@pytest.mark.parametrize("name", FIELDS_ADDED_SINCE)
def test_record_of_an_earlier_question_verifies_with_a_note(name: str) -> None:
    path = next(RESULTS.rglob(f"*-{name}.json"))
    fields = "question.data.joint, question.data.last_target"
    assert verify.verify_record(path) == []
    run_record = verify.read_verified_record(path)
    assert verify.list_remarks(path) == [
        golden("the-key-is-of-aquila-2", run_record.case.key, fields)
    ]
    note = (
        f"case: earlier: the shipped case aquila2-7b-alpaca has another question now: {fields} came"
        " later"
    )
    assert note in validity.judge_record(run_record, derive_metrics(run_record))[2]
    for lang, word in (("en", "case: earlier"), ("zh", "旧版用例")):
        assert (
            word in report.build_summary_page([run_record], lang).elements[1].rows[0].cells[0].text
        )
    assert [*group_by_case([run_record])] == [
        ("aquila2-7b-alpaca", run_record.case.size, f"case: earlier (without {fields})")
    ]
    # published rows belong to the current question only
    assert published_rows(group_by_case([run_record]).popitem()[1]) == []


def test_case_file_that_spells_out_defaults_is_modified(tmp_path: Path) -> None:
    """Only a record without the fields is earlier than they are."""
    path = copy_published_record("alpaca-smoke", tmp_path)

    def spell_out_defaults(table: dict) -> None:
        table["case"]["question"]["data"] |= {"joint": "\n", "last_target": False}

    run_record = verify.read_verified_record(rewrite_record(path, spell_out_defaults))
    assert (
        run_record.case.key == record.read_record(next(RESULTS.rglob("*-44b1216e.json"))).case.key
    )
    assert (list_modified_parts(run_record), list_later_fields(run_record)) == (["question"], [])


def test_earlier_question_with_another_change_is_modified(tmp_path: Path) -> None:
    path = rewrite_record(copy_published_record("alpaca-smoke", tmp_path), other_question)
    assert (
        list_modified_parts(verify.read_verified_record(path)),
        list_later_fields(verify.read_verified_record(path)),
    ) == (["question"], [])


def test_command_line_can_ask_the_earlier_question(tmp_path: Path) -> None:
    resolved = resolve_case(
        "aquila2-7b-alpaca",
        precision="bf16-pure",
        settings=['question.data.joint="\\n"', "question.data.last_target=false"],
    )
    run_record = record.read_record(next(RESULTS.rglob("*-304a1447.json")))
    assert (
        resolved.case.compute_key(run_record.fingerprint)
        == run_record.case.key
        == "4c8d255b4e04c557"
    )


@pytest.mark.full
def test_user_case_file_with_a_shipped_name_is_noted_as_modified(
    tmp_path: Path, shell: Shell
) -> None:
    text = (resources.files("steelyard") / f"cases/{CASE}.toml").read_text()
    path = tmp_path / "mine.toml"
    path.write_text(re.sub(r"(?ms)^\[gate\]\n.*?\n\n", "", text))
    result = shell("run", path, *SMOKE[2:], "--passes", "val", "--out", shell.out)
    assert result.code == 0, result.err
    notes = [note for note in shell.records()[0]["notes"] if note["code"] == "note.modified"]
    assert notes == [{"code": "note.modified", "values": {"parts": ["gate"], "case": CASE}}]
    assert "case: modified" in result.out
