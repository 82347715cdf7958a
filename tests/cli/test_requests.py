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
from steelyard.errors import RequestError
from steelyard.run.checked_request import check_request


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Request]]:
    """Return a function that makes the requests of `steelyard run` with these arguments, without
    running them.
    """

    def ask(*arguments: str) -> list[Request]:
        made: list[Request] = []

        def keep(requests: list[Request], output: OutputOptions) -> int:
            made.extend(requests)
            return 0

        monkeypatch.setattr("steelyard.cli.execute_runs.run_each", keep)
        assert app(["run", *arguments], standalone_mode=False) == 0
        return made

    return ask


def show_on(monkeypatch: pytest.MonkeyPatch, *numbers: int) -> None:
    """Let every case name these numbers of devices, as if its file did."""
    real = resolve.resolve_case

    def shown(*arguments: Any) -> resolve.ResolvedCase:
        found = real(*arguments)
        return replace(found, case=found.case.model_copy(update={"devices": list(numbers)}))

    monkeypatch.setattr(resolve, "resolve_case", shown)


def machine(monkeypatch: pytest.MonkeyPatch, devices: int, divisible: bool = False) -> None:
    """Pretend that this machine has this many devices of a fake accelerator, besides its CPU."""
    found = [DetectedDevice("Abacus", None, None, i, None) for i in range(devices)]
    row = Accelerator("abacus", lambda: found, accelerators.CPU.sources, {}, divisible)
    monkeypatch.setattr(
        accelerators, "load_accelerators", lambda: {row.name: row, "cpu": accelerators.CPU}
    )


Asked = Callable[..., list[Request]]


def test_parallel_is_a_setting(asked: Asked) -> None:
    (one,) = asked(
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
    assert (one.resolved.case.tune.parallel, one.resolved.case.tune.batch_tokens) == ("TP2DP4", 99)
    assert one.resolved.origins["tune.parallel"] == "command line"
    (late,) = asked(CASE, "--set", "tune.parallel=DP", "--parallel", "TP")
    assert late.resolved.case.tune.parallel == "TP"
    (plain,) = asked(CASE)
    assert plain.resolved == resolve.resolve_case(CASE)
    assert {
        one.resolved.case.tune.parallel
        for one in asked("smoke", "--parallel", "TP2", "--devices", "2")
    } == {"TP2"}


def test_devices_default_to_one(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    show_on(monkeypatch, 1, 2)
    machine(monkeypatch, 8)
    assert [one.devices for one in asked(CASE)] == [1]
    assert [one.devices for one in asked(CASE, "--size", "smoke")] == [1]
    assert [one.devices for one in asked(CASE, "--devices", "4")] == [4]
    assert {one.devices for one in asked("smoke", "--devices", "4")} == {4}


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
def test_smoke_runs_on_the_devices_that_a_case_names(
    asked: Asked,
    monkeypatch: pytest.MonkeyPatch,
    numbers: tuple[int, ...],
    here: int,
    divisible: bool,
    run: list[int],
) -> None:
    show_on(monkeypatch, *numbers)
    machine(monkeypatch, here, divisible)
    wanted = [
        (name, division, number)
        for name in resolve.list_shipped_cases()
        for division in resolve.resolve_case(name, "smoke").case.divisions
        for number in run
    ]
    requests = asked("smoke", "--accelerator", "abacus")
    assert [
        (one.resolved.case.name, one.resolved.case.question.division, one.devices)
        for one in requests
    ] == wanted
    twice = asked("smoke", "--accelerator", "abacus", "--division", "closed", "--repeat", "2")
    assert [one.devices for one in twice] == [
        number for _ in resolve.list_shipped_cases() for number in run for _ in range(2)
    ]


def test_smoke_on_an_accelerator_that_is_unknown(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    show_on(monkeypatch, 1, 2)
    with pytest.raises(RequestError, match="accelerator 'slide-rule' is not known"):
        asked("smoke", "--accelerator", "slide-rule")


def test_label_tells_the_devices() -> None:
    one = Request(resolve.resolve_case(CASE, "smoke"))
    assert execute_runs.format_run_label(one) == f"{CASE} closed fp32 torch"
    assert execute_runs.format_run_label(replace(one, devices=2)) == f"{CASE} closed fp32 torch 1x2"


@pytest.mark.parametrize(
    ("devices", "divisible", "line"),
    [
        (2, False, "--devices 9: 2 abacus device(s) here; allowed: 1 to 2"),
        (1, True, "--devices 9: ranks share the abacus of this host; allowed: 1 to 8"),
    ],
)
def test_more_devices_than_there_are(
    monkeypatch: pytest.MonkeyPatch, devices: int, divisible: bool, line: str
) -> None:
    machine(monkeypatch, devices, divisible)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    request = Request(resolve.resolve_case(CASE, "smoke"), accelerator="abacus", devices=9)
    with pytest.raises(RequestError) as caught:
        check_request(request)
    assert str(caught.value) == line
