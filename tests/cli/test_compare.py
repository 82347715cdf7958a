"""Tests of the commands `compare` and `history`, with generated repeats of a published run."""

import json
from pathlib import Path

import pytest

from fixtures.commands import Shell
from fixtures.golden import golden
from fixtures.records import copy_published_record
from fixtures.series import geometric_mean, write_series
from steelyard.record import index

EQUAL_TIMES = (1.0, 1.01, 0.99)
SLOWER_TIMES = (1.1, 1.111, 1.089)


@pytest.fixture
def sides(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> Shell:
    """Return a shell with three records in each of the folders `old` and `slow`; those in `slow`
    take 10 % longer.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(shell.folder / "cache"))
    write_series(shell.folder / "old", EQUAL_TIMES, day=1)
    write_series(shell.folder / "slow", SLOWER_TIMES, day=2)
    return shell


def user_index(sides: Shell) -> Path:
    """Return the path of the user's index of records."""
    return sides.folder / "cache" / "steelyard" / "index" / index.INDEX_NAME


def test_a_regression_ends_with_exit_code_1(sides: Shell) -> None:
    result = sides.run_in_process("compare", "old", "slow")
    assert result.code == 1
    assert "slower: significant" in result.out
    reverse = sides.run_in_process("compare", "slow", "old")
    assert (reverse.code, "faster: significant" in reverse.out) == (0, True)
    assert sides.run_in_process("compare", "old", "slow", "--threshold", "0.2").code == 0


def test_json_has_the_exact_numbers(sides: Shell) -> None:
    answer = sides.run_in_process("compare", "old", "slow", "--json").json()
    assert answer["ratio"]["value"] == pytest.approx(
        geometric_mean(EQUAL_TIMES) / geometric_mean(SLOWER_TIMES), rel=1e-9
    )
    assert answer["ratio"]["verdict"] == "significant"
    assert answer["ratio"]["interval"][1] < 1
    assert (answer["outcome"], answer["regressed"], answer["unit"]) == ("slower", True, "tokens/s")
    rate = json.loads((sides.folder / "old" / "01-00.json").read_bytes())["metrics"][
        "tokens_per_device_s"
    ]["value"]
    assert answer["base"]["rate"] == pytest.approx(
        rate * sum(1 / entry for entry in EQUAL_TIMES) / 3
    )
    assert [entry["valid"] for entry in (answer["base"], answer["new"])] == [3, 3]
    phases = {entry["name"]: entry["ratio"]["value"] for entry in answer["phases"]}
    assert phases["compute"] == pytest.approx(1.1)
    [rate_change] = [one for one in answer["metrics"] if one["name"] == "p_infer_whole"]
    assert (rate_change["outcome"], rate_change["direction"], rate_change["looks_equal"]) == (
        *("worse", "worse"),
        False,
    )
    assert answer["looks_equal"] is False
    assert answer["answers"]["new"]["chosen"] == {
        "items": 48,
        "other": 0,
        "largest": None,
        "tokens": None,
    }
    assert answer["differs"] == []


def test_one_record_a_side_is_not_tested(sides: Shell) -> None:
    result = sides.run_in_process("compare", "old/01-00.json", "slow/02-00.json", "--json")
    assert result.code == 0
    assert result.json()["ratio"]["verdict"] == "not tested"
    assert result.json()["ratio"]["value"] == pytest.approx(1 / 1.1)
    assert {(one["outcome"], one["direction"]) for one in result.json()["metrics"]} == {
        ("not tested", None)
    }
    text = sides.run_in_process("compare", "old/01-00.json", "slow/02-00.json").out
    assert "worse" not in text.partition("Rate: work of all devices")[0]


def test_different_questions_end_with_exit_code_2(sides: Shell) -> None:
    copy_published_record("llama2-7b-mmlu-smoke-open", sides.folder / "open")
    result = sides.run_in_process("compare", "old", "open")
    assert result.code == 2
    assert result.err.startswith(golden("error-the-questions-differ-question-division"))
    allowed = sides.run_in_process(
        "compare", "old", "open", "--across", "question.division", "--json"
    )
    assert allowed.json()["across"] == [
        {"field": "question.division", "base": ["closed"], "new": ["open"]}
    ]
    assert allowed.json()["unit"] == "questions/s"
    mistyped = sides.run_in_process("compare", "old", "open", "--across", "question.divison")
    assert (mistyped.code, "did you mean 'question.division'?" in mistyped.err) == (2, True)


def test_a_record_that_does_not_verify_is_refused(sides: Shell) -> None:
    path = sides.folder / "slow" / "02-01.json"
    path.write_bytes(path.read_bytes().replace(b'"status":"valid"', b'"status":"VALID"'))
    result = sides.run_in_process("compare", "old", "slow")
    assert result.code == 2
    assert "02-01.json" in result.err


def test_page_is_written_to_a_file(sides: Shell) -> None:
    result = sides.run_in_process(
        "compare", "old", "old", "--format", "html", "--lang", "zh", "--to", "page.html"
    )
    assert (result.code, result.out) == (0, "")
    assert "对比" in (sides.folder / "page.html").read_text()
    answer = sides.run_in_process(
        "compare", "old", "old", "--to", "page.md", "--format", "md", "--json"
    ).json()
    assert answer == {"format": "md", "lang": "en", "page": None, "path": "page.md"}
    assert sides.run_in_process("compare", "old", "old", "--format", "pdf").code == 2
    assert sides.run_in_process("compare", "old", "old", "--threshold", "3").code == 2


def test_history_finds_the_first_bad_point(sides: Shell) -> None:
    write_series(sides.folder / "slow", EQUAL_TIMES, day=3, environment__source__revision="c" * 40)
    write_series(
        sides.folder / "slow", (1.05, 1.0501), day=4, environment__source__revision="d" * 40
    )
    result = sides.run_in_process("history", "slow", "--json")
    assert result.code == 0, result.err
    [trend] = result.json()["trends"]
    assert [len(point["records"]) for point in trend["points"]] == [3, 3, 2]
    assert trend["points"][1]["to_first"]["value"] == pytest.approx(
        geometric_mean(SLOWER_TIMES) / geometric_mean(EQUAL_TIMES), rel=1e-9
    )
    assert trend["points"][2]["to_before"]["value"] == pytest.approx(
        1 / geometric_mean((1.05, 1.0501)), rel=1e-4
    )
    assert trend["first_bad"]["id"] == "0400" * 8
    assert "First bad record: 04000400" in sides.run_in_process("history", "slow").out


def test_history_reads_a_record_once(sides: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    first = sides.run_in_process("history", "old", "--json")
    assert user_index(sides).is_file()
    assert sorted(path.name for path in (sides.folder / "old").iterdir()) == [
        "01-00.json",
        "01-01.json",
        "01-02.json",
    ]
    from steelyard.metrics import rate_history

    def refuse_to_read(path: Path) -> None:
        raise AssertionError(f"{path} was read again")

    monkeypatch.setattr(rate_history, "summarize_record", refuse_to_read)
    second = sides.run_in_process("history", "old", "--json")
    assert (second.code, second.out) == (0, first.out)


def test_a_corrupted_index_is_rebuilt(sides: Shell) -> None:
    first = sides.run_in_process("history", "old", "--json")
    file = user_index(sides)
    file.write_bytes(file.read_bytes()[:100] + b"\xff" * 5000)
    second = sides.run_in_process("history", "old", "--json")
    assert (second.code, second.out) == (0, first.out)
    assert second.lines[0].startswith(f"warning: index {str(file)!r} is ignored (")
    assert sides.run_in_process("history", "old", "--json").lines == []


def test_records_that_do_not_verify_are_listed_and_left_out(sides: Shell) -> None:
    path = sides.folder / "old" / "01-01.json"
    path.write_bytes(path.read_bytes().replace(b'"threads":', b'"threadz":', 1))
    (sides.folder / "old" / "notes.json").write_text("{}")
    answer = sides.run_in_process("history", "old", "--json").json()
    assert [Path(entry["path"]).name for entry in answer["wrong"]] == ["01-01.json", "notes.json"]
    assert [len(point["records"]) for point in answer["trends"][0]["points"]] == [2]


def test_history_without_an_index_or_with_another(sides: Shell) -> None:
    without_index = sides.run_in_process("history", "old", "slow", "--no-index", "--json")
    assert not user_index(sides).exists()
    with_named_index = sides.run_in_process(
        "history", "old", "slow", "--index", "all.index", "--json"
    )
    assert without_index.out == with_named_index.out
    assert (sides.folder / "all.index").is_file()
    assert not user_index(sides).exists()
    with_both_options = sides.run_in_process("history", "old", "--no-index", "--index", "all.index")
    assert (with_both_options.code, with_both_options.err) == (
        2,
        golden("error-index-and-no-index-cannot"),
    )
    (sides.folder / "mine.txt").write_text("mine")
    with_foreign_file = sides.run_in_process("history", "old", "--index", "mine.txt")
    assert (with_foreign_file.code, (sides.folder / "mine.txt").read_text()) == (2, "mine")


def test_history_without_a_cache_folder_writes_no_index(
    sides: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    (sides.folder / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(sides.folder / "file"))
    result = sides.run_in_process("history", "old")
    assert result.code == 0
    assert result.lines[0].startswith("warning: the index was not saved: ")
    assert not user_index(sides).exists()


def test_history_of_an_empty_folder_is_refused(shell: Shell) -> None:
    (shell.folder / "none").mkdir()
    assert shell.run_in_process("history", "nowhere").err == golden(
        "error-nowhere-does-not-exist-give"
    )
    assert shell.run_in_process("history", "none").err == golden("error-no-records-in-none-give")
