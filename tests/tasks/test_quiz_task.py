"""Test a third-party task with multiple-choice questions: it brings a reader of its data and takes
scoring and prompts from the package.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from fixtures.commands import Shell

PACKAGES = Path(__file__).parents[1] / "fixtures" / "packages"
PACKAGE = PACKAGES / "quiz_task"
RUN = (
    "run",
    PACKAGE / "quiz.toml",
    "--accelerator",
    "cpu",
    "--engine",
    "abacus",
    "--size",
    "smoke",
)


def test_the_example_package_has_at_most_120_lines() -> None:
    lines = [
        line
        for path in PACKAGE.rglob("*")
        if path.suffix != ".pyc" and path.is_file()
        for line in path.open()
    ]
    assert len(lines) <= 120


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """Yield a command line with the package quiz_task and a fake framework installed."""
    command_line = Shell(tmp_path, (PACKAGE, PACKAGES / "fake_framework"))
    yield command_line
    command_line.clean()


def test_a_third_party_quiz_has_the_scores_and_breakdown_of_mmlu(shell: Shell) -> None:
    rows = shell.folder / "rows.txt"
    rows.write_text("0-9\n")
    result = shell(*RUN, "--rows", rows, "--out", shell.out)
    assert result.code == 0, result.err
    (record,) = shell.records()
    assert (record["status"], record["case"]["name"], record["data"]["source"]) == (
        "valid",
        "tiny-quiz",
        "made",
    )
    assert (
        record["data"]["subjects"],
        record["data"]["rows"],
        record["data"]["rows_in_scope"],
    ) == (3, 24, 10)
    outputs, metrics = record["outputs"], record["metrics"]
    right_count = sum(
        choice == answer
        for choice, answer in zip(
            outputs["passes"]["infer"]["choices"], outputs["gold"], strict=True
        )
    )
    assert metrics["acc_choice"]["value"] == right_count / 10
    assert {"acc", "acc_se", "acc_macro", "acc_val", "agreement"} <= set(metrics)
    verification = shell("verify", shell.out)
    assert (verification.code, verification.out.split()[0]) == (0, "ok")
    page = shell("report", shell.out, "--format", "html")
    assert page.code == 0, page.err
    assert "Accuracy by subject" in page.out


@pytest.mark.full
def test_a_third_party_quiz_checks_its_data_file(shell: Shell) -> None:
    path = shell.folder / "quiz.jsonl"
    row = {"subject": "lakes", "question": "Which?", "choices": ["a", "b", "c", "d"], "answer": "B"}
    for lines, refusal in (
        ([{**row, "answer": "E"}], "line 1 is no question; a line is"),
        ([row, {**row, "choices": ["a"]}], "line 2 is no question; a line is"),
        ([], "no line in it; a line is"),
        ([row, row], "subject lakes has 2 questions; 2 are its examples, and one is asked"),
        ([row, row, row], "no tokenizer found"),
    ):
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        result = shell(*RUN, "--data", path, "--out", shell.out)
        assert (result.code, len(result.lines)) == (2, 1), result.err
        assert refusal in result.err
