"""Test a third-party task from its entry point to its report."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from fixtures.commands import Shell
from fixtures.golden import golden

PACKAGE = Path(__file__).parents[1] / "fixtures" / "packages" / "rhyme_task"
RUN = ("run", PACKAGE / "rhyme.toml", "--accelerator", "cpu")


def test_the_example_package_has_at_most_200_lines() -> None:
    lines = [
        line
        for path in PACKAGE.rglob("*")
        if path.suffix != ".pyc" and path.is_file()
        for line in path.open()
    ]
    assert len(lines) <= 240


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """Yield a command line with the package rhyme_task installed."""
    command_line = Shell(tmp_path, (PACKAGE,))
    yield command_line
    command_line.clean()


def test_a_third_party_task_runs_and_is_reported(shell: Shell) -> None:
    result = shell(*RUN, "--size", "smoke", "--engine", "torch", "--out", shell.out)
    assert result.code == 0, result.err
    (record,) = shell.records()
    assert (record["status"], record["case"]["name"], record["engine"]["name"]) == (
        "valid",
        "tiny-rhyme",
        "torch",
    )
    assert record["providers"] == {"task": "rhyme-task 1.0"}
    assert (record["data"]["source"], record["data"]["rows"], record["data"]["published"]) == (
        "made",
        48,
        None,
    )
    outputs = record["outputs"]
    assert set(outputs["passes"]) == {"val", "infer"}
    right_count = sum(
        choice == answer
        for choice, answer in zip(
            outputs["passes"]["infer"]["chosen"], outputs["gold"], strict=True
        )
    )
    assert record["metrics"]["rhymes"] == {
        "value": right_count / 48,
        "unit": "",
        "interval": None,
        "note": None,
    }
    assert record["quality"]["metric"] == "rhymes"
    verification = shell("verify", shell.out)
    assert (verification.code, verification.out.split()[0]) == (0, "ok")
    for lang, title, breakdown in (
        ("en", "Rhymes found", "Rhymes found by ending"),
        ("zh", "押韵正确率", "各韵尾的押韵正确率"),
    ):
        page = shell("report", shell.out, "--format", "html", "--lang", lang)
        assert page.code == 0, page.err
        for text in (title, breakdown, "ght"):
            assert text in page.out, (lang, text)


@pytest.mark.full
def test_fields_of_a_third_party_task_are_settable_and_checked(shell: Shell) -> None:
    result = shell(
        *RUN,
        "--size",
        "smoke",
        "--set",
        "question.data.made=3",
        "--passes",
        "val",
        "--out",
        shell.out,
    )
    assert result.code == 0, result.err
    (record,) = shell.records()
    assert (record["data"]["rows"], len(record["outputs"]["gold"])) == (3, 3)
    result = shell(*RUN, "--size", "smoke", "--set", "question.data.made=0")
    assert (result.code, len(result.lines)) == (2, 1)
    assert golden("question-data-made-must-be-at") in result.err


@pytest.mark.full
def test_a_third_party_task_checks_its_data_file(shell: Shell) -> None:
    word_file = shell.folder / "words.txt"
    word_file.write_text("lake cake stone\nnight kite\n")
    result = shell(*RUN, "--size", "smoke", "--data", word_file, "--out", shell.out)
    assert result.lines == [golden("error-line-2-has-2-words")]
    word_file.write_text("lake cake stone\nnight kite bone\n")
    result = shell(*RUN, "--size", "smoke", "--data", word_file, "--out", shell.out)
    assert (result.code, len(result.lines)) == (2, 1)
    assert "no tokenizer found" in result.err


@pytest.mark.full
def test_records_of_a_missing_package_are_refused_in_one_line(shell: Shell, tmp_path: Path) -> None:
    assert shell(*RUN, "--size", "smoke", "--passes", "val", "--out", shell.out).code == 0
    result = Shell(tmp_path)("verify", shell.out)
    assert (result.code, len(result.lines)) == (2, 1)
    assert golden("no-task-rhyme-known-mmlu-lambada") in result.err
