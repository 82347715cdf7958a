"""Test a third-party task from its entry point to its report."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from fixtures.commands import Shell
from fixtures.golden import golden

PACKAGE = Path(__file__).parents[1] / "fixtures" / "packages" / "rhyme_task"
RUN = ("run", PACKAGE / "rhyme.toml", "--accelerator", "cpu")


def test_the_example_is_short() -> None:
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
    one = Shell(tmp_path, (PACKAGE,))
    yield one
    one.clean()


def test_the_example_runs_and_is_reported(shell: Shell) -> None:
    done = shell(*RUN, "--size", "smoke", "--engine", "torch", "--out", shell.out)
    assert done.code == 0, done.err
    (record,) = shell.records()
    assert (record["status"], record["case"]["name"], record["engine"]["name"]) == (
        "valid",
        "tiny-rhyme",
        "torch",
    )
    assert (record["data"]["source"], record["data"]["rows"], record["data"]["published"]) == (
        "made",
        48,
        None,
    )
    outputs = record["outputs"]
    assert set(outputs["passes"]) == {"val", "infer"}
    right = sum(
        told == gold
        for told, gold in zip(outputs["passes"]["infer"]["chosen"], outputs["gold"], strict=True)
    )
    assert record["metrics"]["rhymes"] == {
        "value": right / 48,
        "unit": "",
        "interval": None,
        "note": None,
    }
    assert record["quality"]["metric"] == "rhymes"
    checked = shell("verify", shell.out)
    assert (checked.code, checked.out.split()[0]) == (0, "ok")
    for lang, title, breakdown in (
        ("en", "Rhymes found", "Rhymes found by ending"),
        ("zh", "押韵正确率", "各韵尾的押韵正确率"),
    ):
        page = shell("report", shell.out, "--format", "html", "--lang", lang)
        assert page.code == 0, page.err
        for text in (title, breakdown, "ght"):
            assert text in page.out, (lang, text)


@pytest.mark.full
def test_its_fields_are_settable_and_checked(shell: Shell) -> None:
    done = shell(
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
    assert done.code == 0, done.err
    (record,) = shell.records()
    assert (record["data"]["rows"], len(record["outputs"]["gold"])) == (3, 3)
    done = shell(*RUN, "--size", "smoke", "--set", "question.data.made=0")
    assert (done.code, len(done.lines)) == (2, 1)
    assert golden("question-data-made-must-be-at") in done.err


@pytest.mark.full
def test_its_own_data(shell: Shell) -> None:
    words = shell.folder / "words.txt"
    words.write_text("lake cake stone\nnight kite\n")
    done = shell(*RUN, "--size", "smoke", "--data", words, "--out", shell.out)
    assert done.lines == [golden("error-line-2-has-2-words")]
    words.write_text("lake cake stone\nnight kite bone\n")
    done = shell(*RUN, "--size", "smoke", "--data", words, "--out", shell.out)
    assert (done.code, len(done.lines)) == (2, 1)
    assert "no tokenizer found" in done.err


@pytest.mark.full
def test_without_the_package_its_records_are_refused_in_one_line(
    shell: Shell, tmp_path: Path
) -> None:
    assert shell(*RUN, "--size", "smoke", "--passes", "val", "--out", shell.out).code == 0
    done = Shell(tmp_path)("verify", shell.out)
    assert (done.code, len(done.lines)) == (2, 1)
    assert golden("no-task-rhyme-known-mmlu-lambada") in done.err
