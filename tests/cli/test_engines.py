"""Tests of `run --engine all`, which runs all engines on one question."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fixtures.commands import CASE, SMOKE, Shell
from fixtures.engines import make_scoring_record
from fixtures.golden import golden
from fixtures.report import WITHOUT_INTERVAL
from steelyard.case.request import EngineSettings, Request
from steelyard.case.resolve import resolve_case
from steelyard.cli import execute_runs as verb
from steelyard.cli.printing import OutputOptions
from steelyard.cli.requests import split_engines_and_settings
from steelyard.engine import engine_rows
from steelyard.errors import RequestError

SERVERS = ("http", "transformers-serve", "vllm")
OTHER_WORK = ("paddle", "flagscale", *SERVERS)  # engines that do not score


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that megatron and paddle are not installed, and all other modules are."""
    monkeypatch.setattr(
        engine_rows.plugins,
        "is_installed",
        lambda module: not module.startswith(("megatron", "paddle")),
    )


def make_requests(
    *changes: str,
    case: str = CASE,
    division: str | None = None,
    precision: str | None = None,
    **options: Any,
) -> list[Request]:
    """Return a smoke request on the CPU for each known engine; `changes` are settings of the
    case.
    """
    resolved = resolve_case(case, "smoke", precision, division, list(changes))
    engines = split_engines_and_settings("all", [])[0]
    return [
        Request(resolved, engine=name, accelerator="cpu", out=Path("records"), **options)
        for name, _ in engines
    ]


@pytest.mark.parametrize(
    ("requests", "able", "reasons"),
    [
        (
            make_requests(),
            ["torch", "transformers"],
            {
                "reference": (
                    f"engine 'reference' does not run {CASE}; allowed: torch, transformers,"
                    " megatron"
                ),
                "megatron": (
                    "megatron.core is not installed, and engine megatron needs it; pip install"
                    " 'steelyard[megatron]', then run again"
                ),
                **{
                    name: (
                        f"engine {name!r} does not run {CASE}; allowed: torch, transformers,"
                        " megatron"
                    )
                    for name in OTHER_WORK
                },
            },
        ),
        (
            make_requests(division="open"),
            ["torch"],
            {
                "transformers": (
                    f"{CASE} has no division 'open' with engine transformers; allowed: closed"
                ),
                "reference": (
                    f"engine 'reference' does not run {CASE}; allowed: torch, transformers,"
                    " megatron"
                ),
                "megatron": f"{CASE} has no division 'open' with engine megatron; allowed: closed",
                **{
                    name: (
                        f"engine {name!r} does not run {CASE}; allowed: torch, transformers,"
                        " megatron"
                    )
                    for name in OTHER_WORK
                },
            },
        ),
    ],
    ids=["closed", "open"],
)
def test_engines_that_cannot_run_are_named_with_the_reason(
    requests: list[Request], able: list[str], reasons: dict[str, str]
) -> None:
    runs, left_out = verb.check_engine_requests(requests)
    assert [entry.engine.name for entry in runs] == able
    assert {entry.engine: entry.reason for entry in left_out} == reasons
    assert {entry.case for entry in left_out} == {CASE}


def test_engine_that_cannot_divide_the_plan_is_left_out() -> None:
    runs, left_out = verb.check_engine_requests(
        make_requests("tune.parallel=TP2", case="aquila2-34b-lambada", devices=2)
    )
    assert [entry.engine.name for entry in runs] == ["torch"]
    assert left_out[0].engine == "transformers"
    assert left_out[0].reason.startswith(golden("engine-transformers-holds-whole-model-on"))


def test_engine_that_does_not_train_in_the_precision_is_left_out() -> None:
    runs, left_out = verb.check_engine_requests(
        make_requests(case="llama1-7b-openwebtext", precision="bf16-pure")
    )
    assert [entry.engine.name for entry in runs] == ["torch", "transformers"]
    reasons = {entry.engine: entry.reason for entry in left_out}
    assert reasons["paddle"] == golden("engine-paddle-does-not-train-in")


def test_engine_without_its_program_or_a_pass_is_left_out(tmp_path: Path) -> None:
    runs, left_out = verb.check_engine_requests(make_requests(case="llama1-7b-openwebtext"))
    assert [entry.engine.name for entry in runs] == ["torch", "transformers"]
    reasons = {entry.engine: entry.reason for entry in left_out}
    assert reasons["flagscale"] == golden("engine-flagscale-runs-checkout-of-flagscale")
    (tmp_path / "run.py").touch()
    requests = make_requests(case="llama1-7b-openwebtext", passes=("train", "after"))
    [flagscale] = [request for request in requests if request.engine == "flagscale"]
    others = [request for request in requests if request is not flagscale]
    runs, left_out = verb.check_engine_requests(
        [*others, replace(flagscale, engine_settings=EngineSettings(checkout=tmp_path))]
    )
    assert {entry.engine: entry.reason for entry in left_out}["flagscale"] == golden(
        "passes-no-pass-after-allowed-train"
    )


def test_engines_without_a_server_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server's address is needed, and so are the modules of one that is started here."""
    monkeypatch.setattr(
        engine_rows.plugins, "is_installed", lambda module: module not in ("vllm", "fastapi")
    )
    natural = make_requests("question.data.lengths=natural", case="llama3-8b-generate")
    runs, left_out = verb.check_engine_requests(natural)
    assert [entry.engine.name for entry in runs] == ["torch", "transformers"]
    reasons = {entry.engine: entry.reason for entry in left_out if entry.engine in SERVERS}
    install = "which is not installed here; name a Python that has it: --set engine.python="
    assert reasons == {
        "http": (
            "engine http sends requests to a server; name it: --set"
            " engine.endpoint=http://127.0.0.1:8000/v1"
        ),
        "transformers-serve": (
            "engine transformers-serve starts a server that needs fastapi,"
            f" {install}venv/bin/python"
        ),
        "vllm": f"engine vllm starts a server that needs vllm, {install}venv/bin/python",
    }
    [named] = [request for request in natural if request.engine == "http"]
    settings = EngineSettings(endpoint="http://127.0.0.1:9/v1")
    runs, _ = verb.check_engine_requests([replace(named, engine_settings=settings)])
    assert [entry.engine.name for entry in runs] == ["http"]
    with pytest.raises(RequestError, match=r"engine\.endpoint: engine transformers does not read"):
        verb.check_engine_requests(
            [replace(named, engine="transformers", engine_settings=settings)]
        )


def test_request_that_no_engine_can_run_is_refused() -> None:
    with pytest.raises(RequestError) as caught:
        verb.check_engine_requests(
            [
                request
                for request in make_requests(division="open")
                if request.engine in ("transformers", "paddle")
            ]
        )
    assert str(caught.value) == (golden("no-engine-can-do-it-transformers", CASE, CASE, CASE))


def fake_runs(monkeypatch: pytest.MonkeyPatch, answers: dict[str, str]) -> list[str]:
    """Replace real runs by made-up records with these answers by engine; return the list to which
    each run adds its engine's name.
    """
    names: list[str] = []

    def carry_out(checked: Any, output: Any, allocation: Any, position: Any) -> Any:
        names.append(checked.request.engine)
        return make_scoring_record(
            checked.request.engine, answers[checked.request.engine], id=f"{len(names):032x}"
        )

    monkeypatch.setattr(verb, "execute_run", carry_out)
    return names


def test_repeated_engines_take_turns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = fake_runs(monkeypatch, {"torch": "A" * 8, "transformers": "A" * 7 + "B"})
    assert verb.run_engines(make_requests(), 3, OutputOptions()) == 0
    assert names == ["torch", "transformers"] * 3
    captured = capsys.readouterr()
    assert [line.split(":")[:2] for line in captured.err.splitlines()] == [
        ["left out", f" {name}"] for name in ("reference", "megatron", *OTHER_WORK)
    ]
    assert captured.out.startswith(
        "Engines: llama2-7b-mmlu · full · bf16 · closed · whole · NVIDIA H200\n"
    )
    assert "1 of 8" in captured.out


def test_json_has_the_comparison(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_runs(monkeypatch, {"torch": "A" * 8, "transformers": "A" * 7 + "B"})
    assert verb.run_engines(make_requests(), 1, OutputOptions(json=True)) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [entry["id"] for entry in answer["records"]] == [f"{n:032x}" for n in (1, 2)]
    assert [entry["engine"] for entry in answer["engines"]["left_out"]] == [
        "reference",
        "megatron",
        *OTHER_WORK,
    ]
    numbers = {
        "rate": 100.0,
        "rate_interval": [99.0, 101.0],
        "ratio": 1.0,
        "ratio_interval": None,
        "interval_from": "steps",
    }
    numbers |= {"mfu": 0.25, "mem": 10.0, "quality": 0.5, "valid": 1, "engine_mark": "ours"}
    answer_differences = {
        "chosen": {"items": 8, "other": 1, "largest": None, "tokens": None},
        "loss": None,
        "grad_norm": None,
        "quality": 0.0,
    }
    assert answer["engines"]["groups"] == [
        {
            "case": CASE,
            "key": "4be1c0ffee123456",
            "division": "closed",
            "precision": "bf16",
            "unit": "tokens/s",
        }
        | {"quality": "acc", "without": []}
        | {
            "rows": [
                {
                    "engine": "torch",
                    "base": True,
                    "answers": None,
                    **numbers,
                    "ratio_verdict": None,
                    "records": [f"{1:032x}"],
                },
                {
                    "engine": "transformers",
                    "base": False,
                    "answers": answer_differences,
                    **numbers,
                    "ratio_verdict": "not tested",
                    "records": [f"{2:032x}"],
                },
            ]
        }
    ]


def test_engines_end_with_a_verdict(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Records of size full, whose rates are 1 % apart; three runs prove a rate without intervals
    of their own.
    """
    names: list[str] = []
    first_rates = {"torch": 101.0, "transformers": 100.0}

    def carry_out(checked: Any, output: Any, allocation: Any, position: Any) -> Any:
        names.append(checked.request.engine)
        rate = first_rates[checked.request.engine] * (1 + 0.001 * (len(names) // 3))
        return make_scoring_record(names[-1], "A" * 8, rate, id=f"{len(names):032x}")

    monkeypatch.setattr(verb, "execute_run", carry_out)
    verb.run_engines(make_requests(), 3, OutputOptions(wide=True))
    last = " ".join(capsys.readouterr().out.splitlines()[-2:])
    assert last == (
        "Verdict: torch is the fastest: 1.010 times the rate of transformers (significant, 95 %"
        " interval 1.008 – 1.012, 3 runs each)."
    )
    names.clear()
    verb.run_engines(make_requests(), 3, OutputOptions(json=True))
    [verdict] = json.loads(capsys.readouterr().out)["verdicts"]
    assert verdict["text"] == last
    assert (verdict["case"], verdict["size"], verdict["division"]) == (CASE, "full", "closed")
    assert (verdict["outcome"], verdict["best"], verdict["second"]) == (
        *("significant", "torch", "transformers"),
    )
    assert verdict["ratio"]["verdict"] == "significant"
    assert [(one["name"], one["runs"]) for one in verdict["contenders"]] == [
        ("torch", 3),
        ("transformers", 3),
    ]


def test_unproven_engines_end_with_exit_code_0_and_are_not_compared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def carry_out(checked: Any, output: Any, allocation: Any, position: Any) -> Any:
        return make_scoring_record(checked.request.engine, "A" * 8, **WITHOUT_INTERVAL)

    monkeypatch.setattr(verb, "execute_run", carry_out)
    assert verb.run_engines(make_requests(), 1, OutputOptions(json=True)) == 0
    [group] = json.loads(capsys.readouterr().out)["engines"]["groups"]
    assert [
        (row["engine"], row["rate"], row["ratio"], row["ratio_verdict"], row["valid"])
        for row in group["rows"]
    ] == [("torch", None, None, None, 0), ("transformers", None, None, None, 0)]
    assert verb.run_engines(make_requests(), 3, OutputOptions(json=True)) == 0
    [group] = json.loads(capsys.readouterr().out)["engines"]["groups"]
    # equal runs show no spread, so nothing is tested
    assert [(row["rate"], row["ratio_verdict"], row["valid"]) for row in group["rows"]] == [
        (100.0, None, 3),
        (100.0, "not tested", 3),
    ]


def test_an_interrupted_run_is_the_last(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = fake_runs(monkeypatch, {"torch": "A" * 8, "transformers": "A" * 8})
    monkeypatch.setattr(verb, "is_interrupted", lambda record: len(names) == 2)
    assert verb.run_engines(make_requests(), 2, OutputOptions()) == 1
    assert names == ["torch", "transformers"]
    capsys.readouterr()


def test_engine_refused_by_its_worker_is_not_run_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names: list[str] = []

    def carry_out(checked: Any, output: Any, allocation: Any, position: Any) -> Any:
        names.append(checked.request.engine)
        if checked.request.engine in unable:
            raise RequestError("weights of another layout")
        return make_scoring_record(checked.request.engine, "A" * 8)

    monkeypatch.setattr(verb, "execute_run", carry_out)
    unable = {"transformers"}
    assert verb.run_engines(make_requests(), 2, OutputOptions(json=True)) == 0
    assert names == ["torch", "transformers", "torch"]
    captured = capsys.readouterr()
    assert json.loads(captured.out)["engines"]["left_out"][-1] == {
        "engine": "transformers",
        "case": CASE,
        "reason": "weights of another layout",
    }
    assert captured.err.splitlines()[-1] == golden("left-out-transformers-weights-of-another")
    unable = {"torch", "transformers"}
    with pytest.raises(
        RequestError,
        match="no engine can do it: torch: weights of another layout; transformers: weights",
    ):
        verb.run_engines(make_requests(), 2, OutputOptions(json=True))


def test_single_engine_gets_a_table_of_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_runs(monkeypatch, {"torch": "A" * 8})
    assert verb.run_engines(make_requests(division="open"), 1, OutputOptions()) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith(f"{CASE} · size full · closed · torch · bf16\n")
    assert captured.err.splitlines()[-1] == golden("no-engine-table-it-needs-finished")
    assert captured.out.splitlines()[-1] == "Verdict: none, because only torch ran."


def test_engine_settings_may_name_their_engine() -> None:
    chosen, others = split_engines_and_settings(
        "all", ["engine.python=megatron:a/b:c", "tune.warmup=1", "engine.python=torch:d"]
    )
    pythons = {name: settings.python for name, settings in chosen}
    assert pythons == dict.fromkeys(engine_rows.load_engine_rows()) | {
        "megatron": "a/b:c",
        "torch": "d",
    }
    assert others == ["tune.warmup=1"]
    assert split_engines_and_settings("torch", ["engine.python=a:b"]) == (
        [("torch", EngineSettings(python="a:b"))],
        [],
    )


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (
            ("--sweep", "batch_tokens=1,2"),
            "--engine all and --sweep cannot be combined; name one engine, or drop --sweep",
        ),
        (
            ("--resume", "x.json"),
            "--engine all and --resume cannot be combined; name the engine of the checkpoint",
        ),
        (
            ("--set", "engine.python=venv/bin/python"),
            (
                "--set 'engine.python=venv/bin/python': with --engine all a setting names its"
                " engine, such as engine.python=megatron:venv/bin/python; known: torch,"
                " transformers, reference, megatron, paddle, flagscale, http,"
                " transformers-serve, vllm"
            ),
        ),
        (
            ("--set", "engine.python=mine:venv/bin/python"),
            (
                "--set 'engine.python=mine:venv/bin/python': with --engine all a setting names its"
                " engine, such as engine.python=megatron:venv/bin/python; known: torch,"
                " transformers, reference, megatron, paddle, flagscale, http,"
                " transformers-serve, vllm"
            ),
        ),
        (("--steps", "0"), "--steps 0: must be at least 1"),
    ],
)
def test_wrong_requests_for_all_engines_are_refused(
    arguments: tuple[str, ...], reason: str, shell: Shell
) -> None:
    result = shell.run_in_process(*SMOKE, "--engine", "all", *arguments)
    assert (result.code, result.lines[-1]) == (2, f"error: {reason}")


@pytest.mark.full
def test_real_engines_give_equal_answers(shell: Shell) -> None:
    """In real runs torch and transformers give equal answers on one question, and the report of
    their folder says so.
    """
    pytest.importorskip("transformers")
    result = shell(*SMOKE, "--engine", "all", "--passes", "infer", "--out", shell.out, "--json")
    assert result.code == 0, result.err
    answer = result.json()
    [group] = answer["engines"]["groups"]
    rows = {row["engine"]: row for row in group["rows"]}
    assert [entry["engine"]["name"] for entry in answer["records"]][:2] == ["torch", "transformers"]
    assert rows["torch"]["answers"] is None
    assert rows["transformers"]["answers"]["chosen"] == {
        "items": 48,
        "other": 0,
        "largest": None,
        "tokens": 0,
    }
    page = shell("report", shell.out, "--full", "--wide")
    assert (page.code, "other answers" in page.out, "0 of 48" in page.out) == (0, True, True)
