"""Tests of runs with selected subjects or rows, from the command line to the record and its
report.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from fixtures.commands import Shell
from fixtures.engines import make_scoring_record
from fixtures.golden import golden
from fixtures.report import make_record
from steelyard import report
from steelyard.case import resolve
from steelyard.case.request import Request
from steelyard.errors import RequestError
from steelyard.metrics import engine_groups, rate_history, repeat_groups, side_comparison, verify
from steelyard.record.record import Record, Scope, record_to_json
from steelyard.run import rerun
from steelyard.run.checked_request import check_request

MMLU, LAMBADA = ("run", "llama2-7b-mmlu"), ("run", "aquila2-34b-lambada")
SMOKE = ("--size", "smoke", "--accelerator", "cpu", "--passes", "val")
TRAINING_REFUSAL = (
    "trains on rows in its own order; use --sample N for a part of each batch, or --steps N"
)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            (*LAMBADA, "--subjects", "a"),
            "--subjects: task lambada has no such choice; allowed: --rows, --sample N",
        ),
        (
            ("run", "llama1-7b-openwebtext", "--subjects", "a"),
            f"--subjects: task openwebtext {TRAINING_REFUSAL}",
        ),
        (("run", "aquila2-7b-alpaca", "--rows", "ids"), f"--rows: task alpaca {TRAINING_REFUSAL}"),
        (
            ("run", "glm-large-record", "--rows", "ids"),
            f"--rows: task superglue_record {TRAINING_REFUSAL}",
        ),
        (
            (*MMLU, "--rows", "ids", "--subjects", "a"),
            "--rows and --subjects: the rows say which questions are asked; leave --subjects out",
        ),
        (
            (*MMLU, "--rows", "ids", "--sample", "2"),
            "--rows and --sample: the rows say which questions are asked; leave --sample out",
        ),
        (
            (*MMLU, "--subjects", "a,"),
            "--subjects 'a,': names subjects with commas between, such as anatomy,virology",
        ),
        ((*MMLU, "--rows", "none"), "none: cannot be read: No such file or directory"),
        (("run", "smoke", "--subjects", "a"), "--subjects: task"),
    ],
)
def test_impossible_selections_are_refused_before_the_run(
    shell: Shell, words: tuple[str, ...], line: str
) -> None:
    (shell.folder / "ids").write_text("3\n")
    size = () if "smoke" in words else ("--size", "smoke")
    result = shell.run_in_process(*words, *size, "--accelerator", "cpu")
    assert (result.code, len(result.err.splitlines()), shell.records()) == (2, 1, [])
    assert result.err.startswith(f"error: {line}")


def resolve_scope(**changes: Any) -> Scope:
    """Return the scope of a smoke request with these changes."""
    return check_request(
        Request(resolve.resolve_case("llama2-7b-mmlu", "smoke"), accelerator="cpu", **changes)
    ).scope


def test_scope_holds_the_named_subjects_and_rows() -> None:
    # without a selection the scope has no other fields, as in earlier records
    assert resolve_scope().model_dump() == {"kind": "full", "sample": None, "steps": None}
    assert resolve_scope(subjects=("x",), sample=3) == Scope(
        kind="window", subjects=("x",), sample=3
    )
    assert resolve_scope(rows=("0-4", "x/2"), steps=1) == Scope(
        kind="window", rows=("0-4", "x/2"), steps=1
    )


@pytest.mark.parametrize("rows", [[], ["x"], ["3-1"], ["a/b/1"], [7]])
def test_scope_with_malformed_rows_is_refused(rows: list[Any]) -> None:
    with pytest.raises(ValueError, match="scope"):
        make_record(scope={"kind": "window", "rows": rows})


def make_scored_record(**scope: Any) -> Record:
    """Return a scored record of engine torch with this window as its scope."""
    return make_scoring_record("torch", "ABCDABCD", scope={"kind": "window", **scope})


def test_runs_of_other_questions_are_not_compared() -> None:
    base_record, equal_record, other_record = (
        make_scored_record(subjects=["x"]),
        make_scored_record(subjects=["x"]),
        make_scored_record(rows=["0-7"]),
    )
    base = side_comparison.make_side("base", [base_record])
    assert (
        side_comparison.compare_sides(
            base, side_comparison.make_side("new", [equal_record]), [], 0.01
        ).setting_differences
        == ()
    )
    with pytest.raises(RequestError) as caught:
        side_comparison.compare_sides(
            base, side_comparison.make_side("new", [other_record]), [], 0.01
        )
    assert str(caught.value) == (golden("the-questions-differ-scope-subjects-none"))
    comparison = side_comparison.compare_sides(
        base, side_comparison.make_side("new", [other_record]), ["scope"], 0.01
    )
    assert [field.name for field in comparison.question_differences] == [
        "scope.subjects",
        "scope.rows",
    ]
    with pytest.raises(
        RequestError, match=r"these records are not repeats of one run: scope\.subjects"
    ):
        side_comparison.make_side(
            "both", [base_record, other_record.model_copy(update={"id": "b"})]
        )


def test_groups_hold_records_of_one_scope() -> None:
    first, other_scope = make_scored_record(subjects=["x"]), make_scored_record(rows=["0-7"])
    engine = make_scoring_record("transformers", "A" * 8).engine
    other_engine = [
        record.model_copy(update={"id": "b", "engine": engine}) for record in (first, other_scope)
    ]
    assert [
        len(group.records) for group in engine_groups.find_engine_groups([first, *other_engine])
    ] == [2]
    repeated = first.model_copy(update={"id": "c"})
    assert [
        len(group.records)
        for group in repeat_groups.find_repeat_groups([first, repeated, other_scope])
    ] == [2]


@pytest.mark.parametrize(
    ("scope", "name"),
    [
        ({"subjects": ["x", "y"], "sample": 3}, "subjects x,y, sample 3"),
        ({"rows": ["0-7"]}, "rows 0-7"),
        ({"rows": [f"{i}" for i in range(0, 200, 2)]}, "rows 100 18711f10"),
        ({"steps": 3}, "window"),
    ],
)
def test_history_entry_names_its_scope(scope: dict[str, Any], name: str) -> None:
    assert rate_history._make_entry(make_scored_record(**scope)).scope == name


def test_rerun_request_keeps_the_scope() -> None:
    record = make_scored_record(subjects=["x"], sample=4)
    request = rerun.make_request(record)
    assert (request.subjects, request.rows, request.sample) == (("x",), None, 4)
    request = rerun.make_request(make_scored_record(rows=["0-7"]))
    assert (request.subjects, request.rows, request.sample) == (None, ("0-7",), None)


def test_report_names_the_selected_questions() -> None:
    few_subjects, many_subjects = (
        make_scored_record(subjects=["law", "logic"], sample=8),
        make_scored_record(subjects=["a", "b", "c", "d"]),
    )
    named_rows = make_scored_record(rows=["0-3", *(str(row) for row in range(10, 110, 2))], steps=2)
    en, zh = (
        report.render([few_subjects, many_subjects, named_rows], "md", lang)
        for lang in report.LANGS
    )
    assert "window: 8 samples, of law, logic" in en
    assert "window: of 4 subjects" in en
    assert "- Subjects: a, b, c, d\n" in en
    assert "window: 54 named rows, 2 steps" in en
    assert "- Rows: 0-3, 10, 12," in en
    assert "84, 86 … (51)\n" in en
    assert "窗口：8 个样本，学科 law，logic" in zh
    assert "窗口：4 个学科" in zh
    assert "窗口：指定的 54 行，2 步" in zh
    assert "- 学科: a, b, c, d\n" in zh


def read_only_record(shell: Shell) -> tuple[Path, Record]:
    """Return the path of the only record in the output folder, and the record after it was
    verified.
    """
    [path] = shell.out.glob("*.json")
    return path, verify.read_verified_record(path)


@pytest.mark.full
def test_run_of_two_subjects_records_only_their_answers(shell: Shell) -> None:
    result = shell(
        *MMLU, *SMOKE, "--subjects", "made_tides_0,made_orchards_1", "--sample", "10", "--quiet"
    )
    assert result.code == 0, result.err
    assert "p_val_whole" in result.out  # the rate of the only pass
    path, record = read_only_record(shell)
    document = json.loads(path.read_text())
    assert document["scope"] == {
        "kind": "window",
        "sample": 10,
        "steps": None,
        "subjects": ["made_orchards_1", "made_tides_0"],
    }
    assert document == record_to_json(record)
    outputs = document["outputs"]
    assert {outputs["subjects"][position] for position in outputs["subject_of"]} == {
        "made_tides_0",
        "made_orchards_1",
    }
    answers = outputs["passes"]["val"]
    assert (outputs["version"], len(answers["argmax"]), answers["argmax"].count("*")) == (
        2,
        10,
        len(answers["others"]),
    )
    assert {"code": "note.selected", "values": {}} in document["notes"]
    assert record.data.model_dump()["rows_in_scope"] == 10
    refused = shell(*MMLU, *SMOKE, "--subjects", "made_tide_0")
    assert (refused.code, len(shell.records())) == (2, 1)
    assert refused.err == golden("error-subjects-made_tide_-0-no-such")


@pytest.mark.full
@pytest.mark.long
def test_named_rows_are_equal_across_engines_and_reruns(shell: Shell) -> None:
    (shell.folder / "ids").write_text("# mine\n7\n1-3\n")
    for engine in ("torch", "transformers"):
        result = shell(
            *LAMBADA,
            *SMOKE,
            "--rows",
            "ids",
            "--engine",
            engine,
            "--set",
            "question.precision=fp32",
        )
        assert result.code == 0, result.err
    torch_record, transformers_record = (
        verify.read_verified_record(path) for path in sorted(shell.out.glob("*.json"))
    )
    assert (
        torch_record.scope == transformers_record.scope == Scope(kind="window", rows=("1-3", "7"))
    )
    torch_outputs, transformers_outputs = torch_record.outputs, transformers_record.outputs
    assert torch_outputs["index"] == transformers_outputs["index"] == [1, 2, 3, 7]
    assert len(torch_outputs["passes"]["val"]["argmax"]) == sum(torch_outputs["last"])
    assert (
        torch_outputs["passes"]["val"]["argmax"] == transformers_outputs["passes"]["val"]["argmax"]
    )
    [path] = shell.out.glob(f"*{torch_record.id[:8]}*")
    rerun = shell("reproduce", path, "--json", "--accelerator", "cpu")
    assert rerun.json()["records"][0]["scope"]["rows"] == ["1-3", "7"]
