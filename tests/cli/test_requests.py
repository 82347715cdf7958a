"""Tests of the requests that a command line makes: settings, devices, and the label of each run."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from fixtures.commands import CASE
from steelyard import accelerators
from steelyard.accelerators import Accelerator, DetectedDevice
from steelyard.case import resolve
from steelyard.case.request import Request
from steelyard.cli import app, execute_runs
from steelyard.cli.printing import OutputOptions
from steelyard.engine import engine_rows
from steelyard.engine.default_engine import choose_default_engine
from steelyard.errors import RequestError
from steelyard.run.checked_request import check_request


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Request]]:
    """Return a function that makes the requests of `steelyard run` with these arguments, without
    running them.
    """

    def run_and_collect(*arguments: str) -> list[Request]:
        requested: list[Request] = []

        def collect_requests(requests: list[Request], output: OutputOptions) -> int:
            requested.extend(requests)
            return 0

        monkeypatch.setattr("steelyard.cli.execute_runs.run_each", collect_requests)
        assert app(["run", *arguments], standalone_mode=False) == 0
        return requested

    return run_and_collect


def set_case_devices(monkeypatch: pytest.MonkeyPatch, *numbers: int) -> None:
    """Let every case name these numbers of devices, as if its file did."""
    real = resolve.resolve_case

    def resolve_with_devices(*arguments: Any) -> resolve.ResolvedCase:
        resolved = real(*arguments)
        return replace(resolved, case=resolved.case.model_copy(update={"devices": list(numbers)}))

    monkeypatch.setattr(resolve, "resolve_case", resolve_with_devices)


def fake_machine(monkeypatch: pytest.MonkeyPatch, devices: int, divisible: bool = False) -> None:
    """Pretend that this machine has this many devices of a fake accelerator, besides its CPU."""
    fake_devices = [DetectedDevice("Abacus", None, None, i, None) for i in range(devices)]
    row = Accelerator("abacus", lambda: fake_devices, accelerators.CPU.sources, {}, divisible)
    monkeypatch.setattr(
        accelerators, "load_accelerators", lambda: {row.name: row, "cpu": accelerators.CPU}
    )


CollectRequests = Callable[..., list[Request]]


def test_parallel_option_sets_tune_parallel(asked: CollectRequests) -> None:
    (request,) = asked(
        CASE,
        "--size",
        "smoke",
        "--parallel",
        "TP2DP4",
        "--devices",
        "8",
        "--set",
        "tune.batch_tokens=99",
    )
    assert (request.resolved.case.tune.parallel, request.resolved.case.tune.batch_tokens) == (
        "TP2DP4",
        99,
    )
    assert request.resolved.origins["tune.parallel"] == "command line"
    (last_option_wins,) = asked(CASE, "--set", "tune.parallel=DP", "--parallel", "TP")
    assert last_option_wins.resolved.case.tune.parallel == "TP"
    (without_option,) = asked(CASE)
    assert without_option.resolved == resolve.resolve_case(CASE)
    assert {
        request.resolved.case.tune.parallel
        for request in asked("smoke", "--parallel", "TP2", "--devices", "2")
    } == {"TP2"}


def test_devices_default_to_one(asked: CollectRequests, monkeypatch: pytest.MonkeyPatch) -> None:
    set_case_devices(monkeypatch, 1, 2)
    fake_machine(monkeypatch, 8)
    assert [request.devices for request in asked(CASE)] == [1]
    assert [request.devices for request in asked(CASE, "--size", "smoke")] == [1]
    assert [request.devices for request in asked(CASE, "--devices", "4")] == [4]
    assert {request.devices for request in asked("smoke", "--devices", "4")} == {4}


def list_default_divisions(name: str) -> list[str]:
    """Return the divisions of a shipped case that the engine has which runs it by default."""
    case = resolve.resolve_case(name, "smoke").case
    engine = engine_rows.find_engine(choose_default_engine(case))
    return [division for division in case.divisions if division in engine.divisions]


def list_default_numbers(name: str, run: list[int]) -> list[int]:
    """Return the device counts of `run` over which the default engine of a shipped case divides its
    work; one device if it divides none.
    """
    kind = resolve.resolve_case(name, "smoke").case.question.kind_row
    return run if kind.replicas else [1]


@pytest.mark.parametrize(
    ("options", "generates"),
    [
        ((), True),
        (("--precision", "bf16"), True),
        (("--precision", "tf32"), False),
        (("--precision", "fp8"), True),
        (("--steps", "2"), False),
        (("--explain",), False),
        (("--devices", "2"), False),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_smoke_leaves_generation_out_where_an_option_is_none_for_it(
    asked: CollectRequests, options: tuple[str, ...], generates: bool
) -> None:
    requests = asked("smoke", *options)
    kinds = {request.resolved.case.question.kind for request in requests}
    assert kinds == {"score", "train"} | ({"generate"} if generates else set())
    engines = {
        request.engine for request in requests if request.resolved.case.question.load is not None
    }
    assert engines == ({"torch"} if generates else set())


@pytest.mark.parametrize(
    ("arguments", "loads"),
    [
        (("--sweep", "load.concurrency=1,4"), ["C1", "C4"]),
        (("--sweep", "question.load.rate=2,8"), ["2 req/s", "8 req/s"]),
        (("--set", "load.rate=8"), ["8 req/s"]),
        (("--set", "load.mode=offline"), ["offline"]),
        (
            ("--sweep", "load.arrivals=poisson,constant", "--set", "load.rate=8"),
            ["8 req/s", "8 req/s constant"],
        ),
    ],
)
def test_each_load_is_a_question_of_its_own(
    asked: CollectRequests,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    loads: list[str],
) -> None:
    """A number of another mode than the case's implies that mode; every point has its own key."""
    monkeypatch.setattr(
        "steelyard.cli.execute_runs.run_sweep",
        lambda requests, axes, times, output: execute_runs.run_each(requests, output),
    )
    requests = asked("llama3-8b-generate", "--size", "smoke", *arguments)
    cases = [request.resolved.case for request in requests]
    assert [case.question.load.name for case in cases if case.question.load] == loads
    assert len({case.compute_key("f") for case in cases}) == len(loads)


@pytest.mark.parametrize(
    "numbers,here,divisible,run",
    [
        ((1, 2), 2, False, [1, 2]),
        ((1, 2), 1, False, [1]),
        ((1, 2, 4), 3, False, [1, 2]),
        ((2, 4), 2, False, [2]),
        ((2,), 1, False, [1]),
        ((1, 2), 0, False, [1]),  # refused later, when devices are checked
        ((1, 2), 1, True, [1, 2]),
        ((1,), 8, False, [1]),
    ],
)
def test_smoke_runs_on_the_device_counts_of_its_case(
    asked: CollectRequests,
    monkeypatch: pytest.MonkeyPatch,
    numbers: tuple[int, ...],
    here: int,
    divisible: bool,
    run: list[int],
) -> None:
    set_case_devices(monkeypatch, *numbers)
    fake_machine(monkeypatch, here, divisible)
    expected = [
        (name, division, number)
        for name in resolve.list_shipped_cases()
        for division in list_default_divisions(name)
        for number in list_default_numbers(name, run)
    ]
    requests = asked("smoke", "--accelerator", "abacus")
    assert [
        (request.resolved.case.name, request.resolved.case.question.division, request.devices)
        for request in requests
    ] == expected
    repeated = asked("smoke", "--accelerator", "abacus", "--division", "closed", "--repeat", "2")
    assert [request.devices for request in repeated] == [
        number
        for name in resolve.list_shipped_cases()
        for number in list_default_numbers(name, run)
        for _ in range(2)
    ]


def test_smoke_on_an_unknown_accelerator_is_refused(
    asked: CollectRequests, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_case_devices(monkeypatch, 1, 2)
    with pytest.raises(RequestError, match="accelerator 'slide-rule' is not known"):
        asked("smoke", "--accelerator", "slide-rule")


def test_run_label_names_the_devices() -> None:
    request = Request(resolve.resolve_case(CASE, "smoke"))
    assert execute_runs.format_run_label(request) == f"{CASE} closed fp32 torch"
    assert (
        execute_runs.format_run_label(replace(request, devices=2))
        == f"{CASE} closed fp32 torch 1x2"
    )


@pytest.mark.parametrize(
    ("devices", "divisible", "line"),
    [
        (2, False, "--devices 9: 2 abacus device(s) here; allowed: 1 to 2"),
        (1, True, "--devices 9: ranks share the abacus of this host; allowed: 1 to 8"),
    ],
)
def test_more_devices_than_available_are_refused(
    monkeypatch: pytest.MonkeyPatch, devices: int, divisible: bool, line: str
) -> None:
    fake_machine(monkeypatch, devices, divisible)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    request = Request(resolve.resolve_case(CASE, "smoke"), accelerator="abacus", devices=9)
    with pytest.raises(RequestError) as caught:
        check_request(request)
    assert str(caught.value) == line
