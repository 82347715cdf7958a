"""Runs too short for an interval of their rate, on the command line: exit code 0 with a warning
that names the least number of steps; a sweep counts them as done; they are never compared.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from fixtures.commands import Shell
from fixtures.engines import make_scoring_record
from fixtures.golden import golden
from fixtures.records import copy_published_record, rewrite_record
from fixtures.report import WITHOUT_INTERVAL, make_training_record
from steelyard.case.request import Request
from steelyard.case.resolve import resolve_case
from steelyard.cli import reproduce
from steelyard.cli.printing import OutputOptions, print_run_status
from steelyard.metrics import side_comparison
from steelyard.record.record import Record, read_record
from steelyard.run import rerun
from steelyard.run.checked_request import CheckedRequest, check_request

TRAIN = ("run", "llama1-7b-openwebtext", "--size", "smoke", "--accelerator", "cpu")
SHORT_TIMES = ((2.0, *[1.0] * 4),)  # five steps, of which the first is no part of the rate
SPREAD = ("spread", "of", "the", "runs")
WARNING = f"warning: few_steps: {golden('rate-rests-on-few-steps', 4, 6)}"


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[CheckedRequest]:
    """Return the list of runs that are requested, with nothing run: each ends as a training run of
    five steps, each run one percent of a second a step slower than the one before.
    """
    runs: list[CheckedRequest] = []

    def run_case(checked: CheckedRequest, *more: object) -> tuple[Record, Path]:
        runs.append(checked)
        seconds = 1 + len(runs) / 100
        run_record = make_training_record(
            ((2.0, *[seconds] * 4),), id=f"{len(runs):032}", formulas=5, wording=3
        )
        assert run_record.status == "unproven"
        return run_record, Path(f"{len(runs)}.json")

    monkeypatch.setattr("steelyard.run.parent.run_case", run_case)
    return runs


def test_an_unproven_run_ends_with_exit_code_0_and_a_warning(
    shell: Shell, ended: list[CheckedRequest]
) -> None:
    result = shell.run_in_process(*TRAIN, "--out", shell.out)
    assert (result.code, result.lines) == (0, ["unproven: 1.json", WARNING])
    assert "at least 6 are needed" in WARNING
    assert "unproven: few_steps" in result.out
    assert len(ended) == 1


def test_the_warning_is_printed_with_quiet_and_its_text_is_in_the_json(
    shell: Shell, ended: list[CheckedRequest]
) -> None:
    quiet = shell.run_in_process(*TRAIN, "--out", shell.out, "--quiet")
    assert (quiet.code, quiet.lines) == (0, ["unproven: 1.json", WARNING])
    result = shell.run_in_process(*TRAIN, "--out", shell.out, "--json")
    assert (result.code, result.err) == (0, "")
    [entry] = result.json()["records"]
    assert (entry["status"], entry["reasons"]) == (
        "unproven",
        [{"code": "few_steps", "text": golden("rate-rests-on-few-steps", 4, 6)}],
    )


def test_three_repeats_have_a_proven_rate(shell: Shell, ended: list[CheckedRequest]) -> None:
    result = shell.run_in_process(*TRAIN, "--out", shell.out, "--repeat", "3", "--wide")
    assert (result.code, result.lines.count(WARNING), len(ended)) == (0, 3, 3)
    runs, repeats = result.out.split("\n\nRepeats: ")
    assert runs.count("unproven: few_steps") == 3
    [rate] = [line.split() for line in repeats.splitlines() if line.startswith("rate ")]
    # 100 tokens in 1.01, 1.02 and 1.03 s
    assert rate == ["rate", "3", "98.05", "95.66", "–", "100.4", *SPREAD, "0.98%", "97.09", "99.01"]
    two = shell.run_in_process(*TRAIN, "--out", shell.out, "--repeat", "2", "--wide")
    assert two.code == 0
    assert not any(line.startswith("rate ") for line in two.out.splitlines())


def test_a_sweep_of_unproven_points_ends_with_exit_code_0(
    shell: Shell, ended: list[CheckedRequest]
) -> None:
    result = shell.run_in_process(*TRAIN, "--out", shell.out, "--sweep", "warmup=0,1")
    assert (result.code, len(ended)) == (0, 2)
    assert result.lines == [
        "point 1 of 2: tune.warmup=0",
        "unproven: 1.json",
        WARNING,
        "point 2 of 2: tune.warmup=1",
        "unproven: 2.json",
        WARNING,
    ]


def test_reasons_of_an_invalid_run_are_no_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    stopped = make_training_record(
        SHORT_TIMES, formulas=5, wording=3, losses=[9.0, 8.0, None, 6.0, 5.0]
    )
    print_run_status(stopped, "1.json")
    assert capsys.readouterr().err.splitlines() == [
        "invalid: 1.json",
        "  nan: step 2: the loss is not finite",
        f"  {WARNING.removeprefix('warning: ')}",
    ]


def write_short_record(folder: Path, formulas: int) -> Path:
    """Write a copy of a published training run of four steps, made with this version of the
    formulas, and return its path.
    """
    path = copy_published_record("123d6c07", folder)
    return rewrite_record(path, lambda table: table.update(formulas=formulas, wording=3))


@pytest.mark.parametrize(("formulas", "status"), [(4, "valid"), (5, "unproven")])
def test_a_sweep_counts_an_unproven_record_as_done(
    formulas: int, status: str, tmp_path: Path
) -> None:
    path = write_short_record(tmp_path, formulas)
    short = read_record(path)
    assert short.status == status
    asked = check_request(
        Request(resolve_case("llama1-7b-openwebtext", "smoke"), accelerator="cpu")
    )
    request = replace(
        asked.request, resolved=rerun.make_request(short).resolved, data=Path("corpus")
    )
    asked = replace(
        asked,
        request=request,
        accelerator=None,
        plan=short.plan,
        scope=short.scope,
        passes=tuple(dict.fromkeys(window.pass_name for window in short.passes)),
    )
    assert rerun.is_run_of(short, asked)
    assert rerun.find_answering_records(tmp_path, [asked]) == ([[(path, short)]], [])
    for other in ("invalid", "failed"):
        assert not rerun.is_run_of(short.model_copy(update={"status": other}), asked)


def make_side(name: str, *rates: float) -> side_comparison.ComparisonSide:
    """Return a side of unproven runs with these rates."""
    return side_comparison.make_side(
        name,
        [
            make_scoring_record("torch", "A" * 8, rate, id=f"{name[:4]}{i}", **WITHOUT_INTERVAL)
            for i, rate in enumerate(rates)
        ],
    )


def reproduce_runs(
    capsys: pytest.CaptureFixture[str], base: side_comparison.ComparisonSide, *rates: float
) -> tuple[int, str]:
    """Return exit code and first line of the comparison of unproven new runs with a record's."""
    records = list(make_side("reproduced", *rates).records)
    code = reproduce._print_comparison(
        base, records, (), 0.01, OutputOptions(wide=True), len(rates)
    )
    return code, capsys.readouterr().out.splitlines()[3]


def test_an_unproven_record_is_reproduced_and_not_compared(
    capsys: pytest.CaptureFixture[str],
) -> None:
    one, three = make_side("record", 100.0), make_side("record", 100.0, 100.5, 99.5)
    assert reproduce_runs(capsys, one, 50.0) == (0, golden("no-ratio-unproven", "record"))
    assert reproduce_runs(capsys, one, 50.0, 51.0, 49.0) == (
        0,
        golden("no-ratio-unproven", "record"),
    )
    assert reproduce_runs(capsys, three, 50.0) == (0, golden("no-ratio-unproven", "reproduced"))
    code, verdict = reproduce_runs(capsys, three, 50.0, 50.2, 49.8)
    assert (code, verdict.endswith("slower: significant")) == (1, True)
    assert reproduce_runs(capsys, three, 100.0, 100.5, 99.5)[0] == 0


@pytest.mark.parametrize(("formulas", "status"), [(4, "valid"), (5, "unproven")])
def test_compare_does_not_compare_unproven_runs(shell: Shell, formulas: int, status: str) -> None:
    """Also one that an earlier version stored as valid."""
    path = write_short_record(shell.folder, formulas).rename(shell.folder / "a.json")
    assert read_record(path).status == status
    result = shell.run_in_process("compare", "a.json", "a.json", "--wide")
    assert (result.code, result.out.splitlines()[3]) == (0, golden("no-ratio-unproven", "a.json"))
    answer = shell.run_in_process("compare", "a.json", "a.json", "--json").json()
    assert (answer["ratio"], answer["outcome"], answer["regressed"]) == (None, "no rate", False)
    identity = read_record(path).id
    assert answer["new"] == answer["new"] | {
        "valid": 0,
        "rate": None,
        "left_out": [{"record": identity, "reasons": ["few_steps"]}],
    }
    [row] = shell.run_in_process("report", path, "--json").json()["summary"]
    assert (row["status"], row["reasons"]) == ("unproven", ["few_steps"])


def test_history_has_no_rate_of_an_unproven_run(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(shell.folder / "cache"))
    write_short_record(shell.folder / "runs", 4)
    result = shell.run_in_process("history", "runs", "--json")
    assert result.code == 0
    [trend] = result.json()["trends"]
    [point] = trend["points"]
    assert (point["rate"], trend["first_bad"]) == (None, None)


def test_single_runs_are_not_tested_in_the_json_of_compare(shell: Shell) -> None:
    path = copy_published_record("662692a0", shell.folder)
    answer = shell.run_in_process("compare", path, path, "--json").json()
    assert answer["ratio"] == {
        "value": 1.0,
        "interval": None,
        "interval_from": None,
        "verdict": "not tested",
    }
    assert answer["new"]["rate_interval"] is not None
