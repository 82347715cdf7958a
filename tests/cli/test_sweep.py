"""Tests of sweeps: every point is run once, only missing ones the next time, and mistakes are
refused before the first run.
"""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fixtures.commands import CASE, SMOKE, Shell
from fixtures.engines import make_scoring_record
from fixtures.golden import golden
from steelyard.case import resolve
from steelyard.case.request import Request
from steelyard.case.sweep import SweepAxis
from steelyard.cli import app, execute_runs
from steelyard.cli.printing import OutputOptions
from steelyard.record import record
from steelyard.record.record import Record
from steelyard.run import rerun
from steelyard.run.checked_request import CheckedRequest, check_request

TWO_POINTS = (*SMOKE, "--passes", "infer", "--sweep", "batch_tokens=4096,8192")
TRAIN = ("run", "llama1-7b-openwebtext", "--size", "smoke", "--accelerator", "cpu")


def strip_paths(lines: list[str]) -> list[str]:
    """Return the lines of a sweep without their paths."""
    return [line.partition(": ")[0] if "/" in line else line for line in lines]


@pytest.mark.full
def test_sweep_runs_only_missing_points(shell: Shell) -> None:
    names = ["point 1 of 2: tune.batch_tokens=4096", "point 2 of 2: tune.batch_tokens=8192"]
    first = shell(*TWO_POINTS, "--out", shell.out)
    assert (first.code, strip_paths(first.lines)) == (0, [names[0], "valid", names[1], "valid"])
    output_lines = first.out.splitlines()
    assert output_lines[0].startswith(f"{CASE} · size smoke · ")
    assert output_lines[2].split()[:2] == ["point", "status"]
    assert [row.split()[:2] for row in output_lines if row.startswith("tune")] == [
        [f"tune.batch_tokens={n}", "valid"] for n in (4096, 8192)
    ]
    assert "Verdict: none, because size smoke shows" in first.out
    paths = sorted(shell.out.iterdir())
    assert [json.loads(path.read_text())["tune"]["batch_tokens"] for path in paths] == [4096, 8192]

    second = shell(*TWO_POINTS, "--out", shell.out)  # all points have records
    assert (second.code, second.out) == (0, first.out)
    assert second.lines == [
        names[0],
        f"already there: {paths[0]}",
        names[1],
        f"already there: {paths[1]}",
    ]
    assert sorted(shell.out.iterdir()) == paths

    paths[1].unlink()
    (shell.out / "notes.json").write_text("{}")
    third = shell(*TWO_POINTS, "--out", shell.out, "--json")
    assert third.code == 0
    assert third.lines == [golden("warning-schema-is-none-this-version", shell.out / "notes.json")]
    answer = third.json()
    assert [entry["tune"]["batch_tokens"] for entry in answer["records"]] == [4096, 8192]
    assert answer["records"][0] == record.record_to_english_json(record.read_record(paths[0]))
    assert answer["sweep"]["keys"] == {"tune.batch_tokens": [4096, 8192]}
    assert [(entry["values"], entry["already_there"]) for entry in answer["sweep"]["points"]] == [
        ({"tune.batch_tokens": 4096}, 1),
        ({"tune.batch_tokens": 8192}, 0),
    ]
    assert [entry["records"] for entry in answer["sweep"]["points"]] == [
        [entry["id"]] for entry in answer["records"]
    ]
    assert answer["sweep"]["scaling"] == []
    assert [(one["outcome"], one["ratio"]) for one in answer["verdicts"]] == [("smoke", None)]


def test_a_sweep_ends_with_a_verdict(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Each point has one record of size full, whose rate is its batch_tokens."""

    def carry_out(checked: CheckedRequest, *_: Any) -> Record:
        tokens = checked.case.tune.batch_tokens
        assert isinstance(tokens, int)
        record = make_scoring_record("torch", "A" * 8, float(tokens), id=f"{tokens:032x}")
        rate = record.metrics["tokens_per_device_s"]
        proven = rate.model_copy(update={"interval": (tokens - 1, tokens + 1)})
        metrics = {**record.metrics, "tokens_per_device_s": proven}
        return record.model_copy(update={"metrics": metrics})

    monkeypatch.setattr(execute_runs, "execute_run", carry_out)
    resolved = [
        resolve.resolve_case(CASE, "smoke", None, None, [f"tune.batch_tokens={tokens}"])
        for tokens in (4096, 8192)
    ]
    requests = [
        Request(
            one,
            accelerator="cpu",
            out=tmp_path,
            point=(("tune.batch_tokens", str(one.case.tune.batch_tokens)),),
        )
        for one in resolved
    ]
    axes = (SweepAxis("tune.batch_tokens", ("4096", "8192")),)
    assert execute_runs.run_sweep(requests, axes, 1, OutputOptions(wide=True)) == 0
    *_, first_line, second_line = capsys.readouterr().out.splitlines()
    assert f"{first_line} {second_line}" == (
        "Verdict: tune.batch_tokens=8192 has the highest rate, 2.000 times that of"
        " tune.batch_tokens=4096, which was not tested (single runs; use --repeat 3)."
    )


@pytest.mark.full
def test_sweep_over_devices_ends_with_the_scaling_table(shell: Shell) -> None:
    result = shell(
        *SMOKE, "--passes", "infer", "--sweep", "devices=1,2", "--out", shell.out, "--wide"
    )
    assert result.code == 0, result.err
    assert result.lines[0] == "point 1 of 2: devices=1"
    scaling_lines = result.out[result.out.index("Scaling: ") :].splitlines()
    assert scaling_lines[0].startswith(
        f"Scaling: {CASE} · smoke · torch · fp32 · closed · whole · "
    )
    assert scaling_lines[2].split() == [
        "config",
        "plan",
        "runs",
        "rate",
        "speed-up",
        "efficiency",
        "interval",
        "from",
    ]
    rows = [line.split() for line in scaling_lines if re.match(r"\dx\d ", line)]
    assert [row[:3] for row in rows] == [["1x1", "TP1PP1DP1", "1"], ["1x2", "TP1PP1DP2", "1"]]
    assert rows[0][4:6] == ["1.000", "100.0%"]

    answer = shell(
        *SMOKE, "--passes", "infer", "--sweep", "devices=1,2", "--out", shell.out, "--json"
    ).json()
    by_devices = {one_device["plan"]["devices"]: one_device for one_device in answer["records"]}
    rates = {
        n: one_device["metrics"]["tokens_per_device_s"]["value"] * n
        for n, one_device in by_devices.items()
    }
    [group] = answer["sweep"]["scaling"]
    one_device, two_devices = group["rows"]
    assert (group["case"], group["unit"], group["key"]) == (
        CASE,
        "tokens/s",
        by_devices[1]["case"]["key"],
    )
    assert (
        one_device["config"],
        one_device["base"],
        one_device["rate"],
        one_device["speedup"],
        one_device["efficiency"],
    ) == ("1x1", True, rates[1], 1.0, 1.0)
    assert (
        two_devices["config"],
        two_devices["base"],
        two_devices["plan"],
        two_devices["rate"],
    ) == ("1x2", False, "TP1PP1DP2", rates[2])
    assert (two_devices["speedup"], two_devices["efficiency"]) == (
        pytest.approx(rates[2] / rates[1]),
        pytest.approx(rates[2] / rates[1] / 2),
    )
    assert (two_devices["speedup_interval"], two_devices["speedup_verdict"]) == (None, "not tested")
    assert (one_device["records"], two_devices["records"]) == (
        [by_devices[1]["id"]],
        [by_devices[2]["id"]],
    )
    page = shell("report", shell.out, "--format", "md")
    assert "### Scaling" in page.out
    assert "| 1x2 | TP1PP1DP2 | 1 |" in page.out


@pytest.mark.parametrize(
    "arguments,said",
    [
        ((*SMOKE, "--sweep", "batch_tokens"), "is not of the form key=value,value"),
        ((*SMOKE, "--sweep", "batch_token=1,2"), "--sweep: no key 'batch_token'; did you mean"),
        ((*SMOKE, "--sweep", "batch_tokens=1,,2"), "a value is empty"),
        (
            (*SMOKE, "--sweep", "pad_to=8", "--sweep", "tune.pad_to=16"),
            "tune.pad_to is swept twice",
        ),
        (
            (*SMOKE, "--sweep", "pad_to=8,16", "--set", "tune.pad_to=4"),
            "tune.pad_to is also set by --set tune.pad_to=4",
        ),
        (
            (*SMOKE, "--sweep", "parallel=TP,DP", "--parallel", "TP2"),
            "tune.parallel is also set by --parallel TP2",
        ),
        (
            (*SMOKE, "--sweep", "devices=1,2", "--devices", "1"),
            "devices is also set by --devices 1",
        ),
        ((*SMOKE, "--sweep", "nodes=1,2", "--nodes", "2"), "nodes is also set by --nodes 2"),
        (
            (*SMOKE, "--sweep", "question.precision=fp32", "--precision", "bf16"),
            "is also set by --precision bf16",
        ),
        (
            (*SMOKE, "--sweep", "question.division=open", "--division", "open"),
            "is also set by --division open",
        ),
        (
            (*TRAIN, "--sweep", "checkpoint_every=1,2", "--checkpoint-every", "1"),
            "is also set by --checkpoint-every 1",
        ),
        (
            (*TRAIN, "--sweep", "micro_batch=1,2", "--resume", "x.json"),
            "--sweep and --resume cannot be combined; drop one",
        ),
        (
            (*SMOKE, "--sweep", "batch_tokens=64,many"),
            (
                "point tune.batch_tokens=many: case 'llama2-7b-mmlu', command line:"
                " tune.batch_tokens: must be a whole number"
            ),
        ),
        (
            (*SMOKE, "--sweep", "devices=2,3", "--sweep", "parallel=TP"),
            (
                "point devices=3 tune.parallel=TP: TP3 does not divide the model's 2 key groups;"
                " allowed: 1, 2"
            ),
        ),
        ((*SMOKE, "--sweep", "devices=1,5000"), "point devices=5000: --devices 5000: "),
        (
            (*SMOKE, "--sweep", "batch_tokens=64,64"),
            "points tune.batch_tokens=64 and tune.batch_tokens=64 are the same run",
        ),
        (
            (*SMOKE, "--sweep", "pad_to=8,0x8"),
            "points tune.pad_to=8 and tune.pad_to=0x8 are the same run; name each value",
        ),
        ((*SMOKE, "--sweep", "pad_to=8,16", "--repeat", "0"), "--repeat 0: must be 1 to 10,000"),
        (("run", "smoke", "--accelerator", "cpu", "--sweep", "devices=7"), "point devices=7: "),
    ],
    ids=lambda value: "_".join(map(str, value))[-40:] if isinstance(value, tuple) else "",
)
def test_wrong_sweeps_get_one_line(shell: Shell, arguments: tuple[str, ...], said: str) -> None:
    result = shell.run_in_process(*arguments)
    assert (result.code, result.out) == (2, ""), result.err
    assert len(result.lines) == 1, result.err
    assert result.err.startswith("error: ")
    assert said in result.err
    assert list(shell.folder.glob("**/*.json")) == []


@pytest.fixture
def carried(monkeypatch: pytest.MonkeyPatch, smoke: dict[str, Path]) -> list[CheckedRequest]:
    """Return the list of runs that sweeps request, with nothing run: each gets its status from
    `STATUSES`, or is valid.
    """
    runs: list[CheckedRequest] = []
    original = record.read_record(smoke["closed"])

    def run_case(checked: CheckedRequest, *more: object) -> tuple[Record, Path]:
        runs.append(checked)
        status, reasons = STATUSES.get(len(runs), ("valid", []))
        run_record = original.model_copy(
            update={
                "status": status,
                "reasons": reasons,
                "id": f"{len(runs):032}",
                "plan": checked.plan,
            }
        )
        return run_record, Path(f"{len(runs)}.json")

    monkeypatch.setattr("steelyard.run.parent.run_case", run_case)
    return runs


STATUSES: dict[int, tuple[str, list[record.Reason]]] = {}


def set_outcome(monkeypatch: pytest.MonkeyPatch, number: int, status: str, *codes: str) -> None:
    """Let the run of this number end with this status and reason codes."""
    monkeypatch.setitem(
        STATUSES, number, (status, [record.Reason(code=code, text="told") for code in codes])
    )


def swept_values(runs: list[CheckedRequest]) -> list[dict[str, str]]:
    """Return the swept values of each run."""
    return [dict(checked.request.point) for checked in runs]


def test_sweep_runs_the_grid_with_repeats(shell: Shell, carried: list[CheckedRequest]) -> None:
    result = shell.run_in_process(
        *SMOKE,
        "--sweep",
        "pad_to=8,16",
        "--sweep",
        "question.seed=0,1",
        "--repeat",
        "2",
        "--out",
        shell.out,
    )
    assert result.code == 0, result.err
    expected = [
        {"tune.pad_to": pad, "question.seed": seed}
        for pad in ("8", "16")
        for seed in ("0", "1")
        for _ in range(2)
    ]
    assert swept_values(carried) == expected
    assert [(checked.case.tune.pad_to, checked.case.question.seed) for checked in carried[::2]] == [
        (8, 0),
        (8, 1),
        (16, 0),
        (16, 1),
    ]
    assert [line for line in result.lines if line.startswith("point")] == [
        "point 1 of 4: tune.pad_to=8 question.seed=0",
        "point 2 of 4: tune.pad_to=8 question.seed=1",
        "point 3 of 4: tune.pad_to=16 question.seed=0",
        "point 4 of 4: tune.pad_to=16 question.seed=1",
    ]
    table, repeats = result.out.split("\n\nRepeats: ")
    assert sum(line.startswith("tune.pad_to=") for line in table.splitlines()) == 8
    assert repeats.startswith(f"{CASE} · smoke · torch · fp32 · closed")


def test_a_column_of_points_does_not_repeat_the_load(
    shell: Shell, carried: list[CheckedRequest]
) -> None:
    generate = ("run", "llama3-8b-generate", *SMOKE[2:], "--out", shell.out)
    alone = shell.run_in_process(*generate, "--sweep", "load.concurrency=1,2")
    assert alone.code == 0, alone.err
    assert "point" not in alone.out
    assert "concurrency" not in alone.out.partition("Verdict")[0]
    grid = shell.run_in_process(
        *generate, "--sweep", "load.concurrency=1,2", "--sweep", "pad_to=8,16"
    )
    cells = [line.split()[0] for line in grid.out.splitlines() if line.startswith("tune.pad_to=")]
    assert cells == ["tune.pad_to=8", "tune.pad_to=16"] * 2


def test_each_case_of_a_sweep_has_all_points(shell: Shell, carried: list[CheckedRequest]) -> None:
    result = shell.run_in_process(
        *TRAIN[:2], *SMOKE[1:], "--sweep", "nodes=1", "--sweep", "warmup=0,1", "--out", shell.out
    )
    assert result.code == 0, result.err
    assert [(checked.case.name, checked.case.tune.warmup) for checked in carried] == [
        (TRAIN[1], 0),
        (TRAIN[1], 1),
        (CASE, 0),
        (CASE, 1),
    ]
    assert result.lines[0] == f"point 1 of 4: {TRAIN[1]} closed nodes=1 tune.warmup=0"
    assert golden("no-scaling-table-it-needs-valid") in result.lines


def test_sweep_goes_on_after_a_failure_but_not_after_an_interrupt(
    shell: Shell, carried: list[CheckedRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_outcome(monkeypatch, 1, "invalid", "interval")
    set_outcome(monkeypatch, 3, "failed", "interrupted")
    result = shell.run_in_process(*SMOKE, "--sweep", "pad_to=1,2,4,8", "--out", shell.out)
    assert (result.code, swept_values(carried)) == (
        1,
        [{"tune.pad_to": "1"}, {"tune.pad_to": "2"}, {"tune.pad_to": "4"}],
    )
    assert result.lines[:3] == [
        "point 1 of 4: tune.pad_to=1",
        "invalid: 1.json",
        "  interval: told",
    ]
    assert result.lines[-3:] == [
        "point 3 of 4: tune.pad_to=4",
        "failed: 3.json",
        "  interrupted: told",
    ]
    assert sum(line.startswith("tune.pad_to=") for line in result.out.splitlines()) == 3


def test_one_invalid_point_is_exit_code_1(
    shell: Shell, carried: list[CheckedRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_outcome(monkeypatch, 1, "invalid", "interval")
    assert shell.run_in_process(*SMOKE, "--sweep", "pad_to=1,2", "--out", shell.out).code == 1
    assert len(carried) == 2


def test_scaling_table_averages_repeats(shell: Shell, carried: list[CheckedRequest]) -> None:
    result = shell.run_in_process(
        *SMOKE, "--sweep", "devices=1,2", "--repeat", "2", "--out", shell.out, "--wide"
    )
    rows = [line.split() for line in result.out.splitlines() if re.match(r"\dx\d ", line)]
    assert [row[:3] for row in rows] == [["1x1", "TP1PP1DP1", "2"], ["1x2", "TP1PP1DP2", "2"]]
    assert [row[4:] for row in rows] == [
        ["1.000", "100.0%", "spread", "of", "the", "runs"],
        ["2.000", "100.0%", "spread", "of", "the", "runs"],
    ]


@pytest.fixture
def asked() -> CheckedRequest:
    """Return the checked request of the smoke fixture's closed run."""
    return check_request(
        Request(resolve.resolve_case(CASE, "smoke", division="closed"), accelerator="cpu")
    )


def test_record_is_recognized_as_a_run_of_its_request(
    asked: CheckedRequest, smoke: dict[str, Path]
) -> None:
    assert rerun.is_run_of(record.read_record(smoke["closed"]), asked)
    assert not rerun.is_run_of(record.read_record(smoke["open"]), asked)


@pytest.mark.parametrize(
    "changes",
    [
        {"settings": ["tune.pad_to=8"]},
        {"settings": ["question.seed=7"]},
        {"settings": ["max_interval=0.5"]},
        {"settings": ["gate.target=0.5"]},
        {"precision": "bf16"},
        {"size": "full"},
    ],
    ids=str,
)
def test_record_is_no_run_of_another_question_or_tune(
    changes: dict[str, Any], asked: CheckedRequest, smoke: dict[str, Path]
) -> None:
    resolved = resolve.resolve_case(CASE, **{"size": "smoke"} | changes)
    other_request = replace(asked, request=replace(asked.request, resolved=resolved))
    assert not rerun.is_run_of(record.read_record(smoke["closed"]), other_request)


def test_record_is_no_run_of_another_plan_scope_engine_or_source(
    asked: CheckedRequest, smoke: dict[str, Path]
) -> None:
    run_record = record.read_record(smoke["closed"])
    plan = asked.plan.model_copy(update={"devices": 2, "dp": 2})
    for other_request in (
        replace(asked, plan=plan),
        replace(asked, scope=record.Scope(kind="window", steps=3)),
        replace(asked, passes=("infer",)),
        replace(asked, engine=replace(asked.engine, name="other")),
        replace(asked, accelerator=replace(asked.accelerator, name="abacus")),
        replace(asked, request=replace(asked.request, weights=Path("w"))),
        replace(asked, request=replace(asked.request, data=Path("d"))),
    ):
        assert not rerun.is_run_of(run_record, other_request)
    assert rerun.is_run_of(run_record.model_copy(update={"status": "unproven"}), asked)
    for status in ("invalid", "failed"):
        assert not rerun.is_run_of(run_record.model_copy(update={"status": status}), asked)
    restart = {"record": None, "step": 1, "plan": "TP1PP1DP1", "losses": []}
    assert not rerun.is_run_of(run_record.model_copy(update={"restarts": [restart]}), asked)


def test_records_that_do_not_verify_are_not_counted(
    asked: CheckedRequest, smoke: dict[str, Path], tmp_path: Path
) -> None:
    original = smoke["closed"].read_text()
    (tmp_path / "b.json").write_text(original)
    (tmp_path / "a.json").write_text(original.replace('"wall_s":', '"wall_s":1', 1))
    (tmp_path / "c.json").write_text(original[:-9])
    (tmp_path / "page.html").write_text("")
    [[first_match]], warnings = rerun.find_answering_records(tmp_path, [asked])
    assert first_match[0].name == "b.json"
    assert [line.partition(": ")[0] for line in warnings] == [
        str(tmp_path / "a.json"),
        str(tmp_path / "c.json"),
    ]
    assert "does not verify" in warnings[0]
    assert rerun.find_answering_records(tmp_path / "none", [asked]) == ([[]], [])


def test_run_without_a_sweep_ignores_existing_records(
    shell: Shell, carried: list[CheckedRequest], smoke: dict[str, Path]
) -> None:
    shell.out.mkdir()
    (shell.out / "there.json").write_bytes(smoke["closed"].read_bytes())
    assert shell.run_in_process(*SMOKE, "--out", shell.out).code == 0
    assert len(carried) == 1
    result = shell.run_in_process(
        *SMOKE, "--sweep", "pad_to=16,8", "--repeat", "2", "--out", shell.out
    )
    assert result.lines[:3] == [
        "point 1 of 2: tune.pad_to=16",
        f"already there: {shell.out / 'there.json'}",
        "valid: 2.json",
    ]
    assert swept_values(carried[1:]) == [
        {"tune.pad_to": "16"},
        {"tune.pad_to": "8"},
        {"tune.pad_to": "8"},
    ]


def test_help_of_run_shows_a_sweep() -> None:
    command = next(registered for registered in app.registered_commands if registered.name == "run")
    assert "--sweep devices=1,2,4,8 --sweep micro_batch=1,2,4" in (command.callback.__doc__ or "")
