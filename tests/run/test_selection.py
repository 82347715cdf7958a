"""Tests of runs with selected subjects or rows, from the command line to the record and its report."""

import json
from pathlib import Path
from typing import Any

import pytest

from fixtures.commands import Shell
from fixtures.engines import scored
from fixtures.golden import golden
from fixtures.report import make
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
TRAINS = "trains on rows in its own order; use --sample N for a part of each batch, or --steps N"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            (*LAMBADA, "--subjects", "a"),
            "--subjects: task lambada has no such choice; allowed: --rows, --sample N",
        ),
        (
            ("run", "llama1-7b-openwebtext", "--subjects", "a"),
            f"--subjects: task openwebtext {TRAINS}",
        ),
        (("run", "aquila2-7b-alpaca", "--rows", "ids"), f"--rows: task alpaca {TRAINS}"),
        (("run", "glm-large-record", "--rows", "ids"), f"--rows: task superglue_record {TRAINS}"),
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
def test_what_makes_no_sense_is_refused_before_anything_starts(
    shell: Shell, words: tuple[str, ...], line: str
) -> None:
    (shell.folder / "ids").write_text("3\n")
    size = () if "smoke" in words else ("--size", "smoke")
    done = shell.ask(*words, *size, "--accelerator", "cpu")
    assert (done.code, len(done.err.splitlines()), shell.records()) == (2, 1, [])
    assert done.err.startswith(f"error: {line}")


def asked(**changes: Any) -> Scope:
    """Return the scope of a smoke request with these changes."""
    return check_request(
        Request(resolve.resolve_case("llama2-7b-mmlu", "smoke"), accelerator="cpu", **changes)
    ).scope


def test_the_scope_says_what_was_named() -> None:
    # without a selection the scope has no other fields, as in earlier records
    assert asked().model_dump() == {"kind": "full", "sample": None, "steps": None}
    assert asked(subjects=("x",), sample=3) == Scope(kind="window", subjects=("x",), sample=3)
    assert asked(rows=("0-4", "x/2"), steps=1) == Scope(kind="window", rows=("0-4", "x/2"), steps=1)


@pytest.mark.parametrize("rows", [[], ["x"], ["3-1"], ["a/b/1"], [7]])
def test_a_record_names_rows_as_they_are_read(rows: list[Any]) -> None:
    with pytest.raises(ValueError, match="scope"):
        make(scope={"kind": "window", "rows": rows})


def named(**scope: Any) -> Record:
    """Return a scored record of engine torch with this window as its scope."""
    return scored("torch", "ABCDABCD", scope={"kind": "window", **scope})


def test_runs_of_other_questions_are_not_compared() -> None:
    one, same, other = named(subjects=["x"]), named(subjects=["x"]), named(rows=["0-7"])
    base = side_comparison.make_side("base", [one])
    assert (
        side_comparison.compare_sides(
            base, side_comparison.make_side("new", [same]), [], 0.01
        ).setting_differences
        == ()
    )
    with pytest.raises(RequestError) as caught:
        side_comparison.compare_sides(base, side_comparison.make_side("new", [other]), [], 0.01)
    assert str(caught.value) == (golden("the-questions-differ-scope-subjects-none"))
    across = side_comparison.compare_sides(
        base, side_comparison.make_side("new", [other]), ["scope"], 0.01
    )
    assert [field.name for field in across.question_differences] == ["scope.subjects", "scope.rows"]
    with pytest.raises(
        RequestError, match=r"these records are not repeats of one run: scope\.subjects"
    ):
        side_comparison.make_side("both", [one, other.model_copy(update={"id": "b"})])


def test_groups_are_of_one_scope() -> None:
    one, other = named(subjects=["x"]), named(rows=["0-7"])
    engine = scored("transformers", "A" * 8).engine
    theirs = [record.model_copy(update={"id": "b", "engine": engine}) for record in (one, other)]
    assert [len(group.records) for group in engine_groups.find_engine_groups([one, *theirs])] == [2]
    again = one.model_copy(update={"id": "c"})
    assert [
        len(group.records) for group in repeat_groups.find_repeat_groups([one, again, other])
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
def test_a_trend_is_of_one_scope(scope: dict[str, Any], name: str) -> None:
    assert rate_history._make_entry(named(**scope)).scope == name


def test_a_record_is_run_again_with_its_scope() -> None:
    found = named(subjects=["x"], sample=4)
    request = rerun.make_request(found)
    assert (request.subjects, request.rows, request.sample) == (("x",), None, 4)
    request = rerun.make_request(named(rows=["0-7"]))
    assert (request.subjects, request.rows, request.sample) == (None, ("0-7",), None)


def test_a_page_says_which_questions() -> None:
    few, many = named(subjects=["law", "logic"], sample=8), named(subjects=["a", "b", "c", "d"])
    rows = named(rows=["0-3", *(str(place) for place in range(10, 110, 2))], steps=2)
    en, zh = (report.render([few, many, rows], "md", lang) for lang in report.LANGS)
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


def only(shell: Shell) -> tuple[Path, Record]:
    """Return the path of the only record in the output folder, and the record after it was
    verified.
    """
    [path] = shell.out.glob("*.json")
    return path, verify.read_verified_record(path)


@pytest.mark.full
def test_a_run_of_two_subjects_keeps_their_answers(shell: Shell) -> None:
    done = shell(
        *MMLU, *SMOKE, "--subjects", "made_tides_0,made_orchards_1", "--sample", "10", "--quiet"
    )
    assert done.code == 0, done.err
    assert "p_val_whole" in done.out  # the rate of the only pass
    path, found = only(shell)
    table = json.loads(path.read_text())
    assert table["scope"] == {
        "kind": "window",
        "sample": 10,
        "steps": None,
        "subjects": ["made_orchards_1", "made_tides_0"],
    }
    assert table == record_to_json(found)
    outputs = table["outputs"]
    assert {outputs["subjects"][one] for one in outputs["subject_of"]} == {
        "made_tides_0",
        "made_orchards_1",
    }
    answers = outputs["passes"]["val"]
    assert (outputs["version"], len(answers["argmax"]), answers["argmax"].count("*")) == (
        2,
        10,
        len(answers["others"]),
    )
    assert {"code": "note.selected", "values": {}} in table["notes"]
    assert found.data.model_dump()["rows_in_scope"] == 10
    wrong = shell(*MMLU, *SMOKE, "--subjects", "made_tide_0")
    assert (wrong.code, len(shell.records())) == (2, 1)
    assert wrong.err == golden("error-subjects-made_tide_-0-no-such")


@pytest.mark.full
def test_rows_are_the_same_with_every_engine_and_run_again(shell: Shell) -> None:
    (shell.folder / "ids").write_text("# mine\n7\n1-3\n")
    for engine in ("torch", "transformers"):
        done = shell(
            *LAMBADA,
            *SMOKE,
            "--rows",
            "ids",
            "--engine",
            engine,
            "--set",
            "question.precision=fp32",
        )
        assert done.code == 0, done.err
    ours, theirs = (verify.read_verified_record(path) for path in sorted(shell.out.glob("*.json")))
    assert ours.scope == theirs.scope == Scope(kind="window", rows=("1-3", "7"))
    one, other = ours.outputs, theirs.outputs
    assert one["index"] == other["index"] == [1, 2, 3, 7]
    assert len(one["passes"]["val"]["argmax"]) == sum(one["last"])
    assert one["passes"]["val"]["argmax"] == other["passes"]["val"]["argmax"]
    [path] = shell.out.glob(f"*{ours.id[:8]}*")
    again = shell("reproduce", path, "--json", "--accelerator", "cpu")
    assert again.json()["records"][0]["scope"]["rows"] == ["1-3", "7"]
