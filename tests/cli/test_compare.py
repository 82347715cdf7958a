"""Tests of the commands `compare` and `history`, with generated repeats of a published run."""

import json
from pathlib import Path

import pytest

from fixtures.commands import Shell
from fixtures.golden import golden
from fixtures.records import published
from fixtures.series import geometric, series
from steelyard.record import index

EVEN = (1.0, 1.01, 0.99)
SLOW = (1.1, 1.111, 1.089)


@pytest.fixture
def sides(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> Shell:
    """Return a shell with three records in each of the folders `old` and `slow`; those in `slow`
    take 10 % longer.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(shell.folder / "cache"))
    series(shell.folder / "old", EVEN, day=1)
    series(shell.folder / "slow", SLOW, day=2)
    return shell


def own_index(sides: Shell) -> Path:
    """Return the path of the user's index of records."""
    return sides.folder / "cache" / "steelyard" / "index" / index.INDEX_NAME


def test_a_regression_ends_with_exit_code_1(sides: Shell) -> None:
    done = sides.ask("compare", "old", "slow")
    assert done.code == 1
    assert "slower: significant" in done.out
    back = sides.ask("compare", "slow", "old")
    assert (back.code, "faster: significant" in back.out) == (0, True)
    assert sides.ask("compare", "old", "slow", "--threshold", "0.2").code == 0


def test_json_has_the_exact_numbers(sides: Shell) -> None:
    told = sides.ask("compare", "old", "slow", "--json").json()
    assert told["ratio"]["value"] == pytest.approx(geometric(EVEN) / geometric(SLOW), rel=1e-9)
    assert told["ratio"]["verdict"] == "significant"
    assert told["ratio"]["interval"][1] < 1
    assert (told["outcome"], told["regressed"], told["unit"]) == ("slower", True, "tokens/s")
    rate = json.loads((sides.folder / "old" / "01-00.json").read_bytes())["metrics"][
        "tokens_per_device_s"
    ]["value"]
    assert told["base"]["rate"] == pytest.approx(rate * sum(1 / one for one in EVEN) / 3)
    assert [one["valid"] for one in (told["base"], told["new"])] == [3, 3]
    phases = {one["name"]: one["ratio"]["value"] for one in told["phases"]}
    assert phases["compute"] == pytest.approx(1.1)
    assert told["answers"]["new"]["chosen"] == {
        "items": 48,
        "other": 0,
        "largest": None,
        "tokens": None,
    }
    assert told["differs"] == []


def test_one_record_a_side_is_not_tested(sides: Shell) -> None:
    done = sides.ask("compare", "old/01-00.json", "slow/02-00.json", "--json")
    assert done.code == 0
    assert done.json()["ratio"]["verdict"] == "not tested"
    assert done.json()["ratio"]["value"] == pytest.approx(1 / 1.1)


def test_different_questions_end_with_exit_code_2(sides: Shell) -> None:
    published("llama2-7b-mmlu-smoke-open", sides.folder / "open")
    done = sides.ask("compare", "old", "open")
    assert done.code == 2
    assert done.err.startswith(golden("error-the-questions-differ-question-division"))
    across = sides.ask("compare", "old", "open", "--across", "question.division", "--json")
    assert across.json()["across"] == [
        {"field": "question.division", "base": ["closed"], "new": ["open"]}
    ]
    assert across.json()["unit"] == "questions/s"
    typo = sides.ask("compare", "old", "open", "--across", "question.divison")
    assert (typo.code, "did you mean 'question.division'?" in typo.err) == (2, True)


def test_a_record_that_does_not_verify_is_refused(sides: Shell) -> None:
    path = sides.folder / "slow" / "02-01.json"
    path.write_bytes(path.read_bytes().replace(b'"status":"valid"', b'"status":"VALID"'))
    done = sides.ask("compare", "old", "slow")
    assert done.code == 2
    assert "02-01.json" in done.err


def test_a_page_goes_to_a_file(sides: Shell) -> None:
    done = sides.ask(
        "compare", "old", "old", "--format", "html", "--lang", "zh", "--to", "page.html"
    )
    assert (done.code, done.out) == (0, "")
    assert "对比" in (sides.folder / "page.html").read_text()
    told = sides.ask("compare", "old", "old", "--to", "page.md", "--format", "md", "--json").json()
    assert told == {"format": "md", "lang": "en", "page": None, "path": "page.md"}
    assert sides.ask("compare", "old", "old", "--format", "pdf").code == 2
    assert sides.ask("compare", "old", "old", "--threshold", "3").code == 2


def test_history_finds_the_first_bad_point(sides: Shell) -> None:
    series(sides.folder / "slow", EVEN, day=3, environment__source__revision="c" * 40)
    series(sides.folder / "slow", (1.05, 1.0501), day=4, environment__source__revision="d" * 40)
    done = sides.ask("history", "slow", "--json")
    assert done.code == 0, done.err
    [trend] = done.json()["trends"]
    assert [len(point["records"]) for point in trend["points"]] == [3, 3, 2]
    assert trend["points"][1]["to_first"]["value"] == pytest.approx(
        geometric(SLOW) / geometric(EVEN), rel=1e-9
    )
    assert trend["points"][2]["to_before"]["value"] == pytest.approx(
        1 / geometric((1.05, 1.0501)), rel=1e-4
    )
    assert trend["first_bad"]["id"] == "0400" * 8
    assert "First bad record: 04000400" in sides.ask("history", "slow").out


def test_history_reads_a_record_once(sides: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    first = sides.ask("history", "old", "--json")
    assert own_index(sides).is_file()
    assert sorted(path.name for path in (sides.folder / "old").iterdir()) == [
        "01-00.json",
        "01-01.json",
        "01-02.json",
    ]
    from steelyard.metrics import rate_history

    def never(path: Path) -> None:
        raise AssertionError(f"{path} was read again")

    monkeypatch.setattr(rate_history, "summarize_record", never)
    again = sides.ask("history", "old", "--json")
    assert (again.code, again.out) == (0, first.out)


def test_a_corrupted_index_is_rebuilt(sides: Shell) -> None:
    first = sides.ask("history", "old", "--json")
    file = own_index(sides)
    file.write_bytes(file.read_bytes()[:100] + b"\xff" * 5000)
    again = sides.ask("history", "old", "--json")
    assert (again.code, again.out) == (0, first.out)
    assert again.lines[0].startswith(f"warning: index {str(file)!r} is not used (")
    assert sides.ask("history", "old", "--json").lines == []


def test_records_that_do_not_verify_are_listed_and_left_out(sides: Shell) -> None:
    path = sides.folder / "old" / "01-01.json"
    path.write_bytes(path.read_bytes().replace(b'"threads":', b'"threadz":', 1))
    (sides.folder / "old" / "notes.json").write_text("{}")
    told = sides.ask("history", "old", "--json").json()
    assert [Path(one["path"]).name for one in told["wrong"]] == ["01-01.json", "notes.json"]
    assert [len(point["records"]) for point in told["trends"][0]["points"]] == [2]


def test_history_without_an_index_or_with_another(sides: Shell) -> None:
    plain = sides.ask("history", "old", "slow", "--no-index", "--json")
    assert not own_index(sides).exists()
    named = sides.ask("history", "old", "slow", "--index", "all.index", "--json")
    assert plain.out == named.out
    assert (sides.folder / "all.index").is_file()
    assert not own_index(sides).exists()
    both = sides.ask("history", "old", "--no-index", "--index", "all.index")
    assert (both.code, both.err) == (2, golden("error-index-and-no-index-cannot"))
    (sides.folder / "mine.txt").write_text("mine")
    other = sides.ask("history", "old", "--index", "mine.txt")
    assert (other.code, (sides.folder / "mine.txt").read_text()) == (2, "mine")


def test_history_without_a_cache_keeps_no_index(
    sides: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    (sides.folder / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(sides.folder / "file"))
    done = sides.ask("history", "old")
    assert done.code == 0
    assert done.lines[0].startswith("warning: no index is kept: ")
    assert not own_index(sides).exists()


def test_an_empty_folder_is_a_wrong_request(shell: Shell) -> None:
    (shell.folder / "none").mkdir()
    assert shell.ask("history", "nowhere").err == golden("error-nowhere-does-not-exist-give")
    assert shell.ask("history", "none").err == golden("error-no-records-in-none-give")
