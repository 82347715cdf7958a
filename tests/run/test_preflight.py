"""Tests of what the parent checks of hosts before a run, without any process."""

from types import SimpleNamespace
from typing import Any

import pytest

from steelyard.case.resolve import resolve_case
from steelyard.errors import RequestError
from steelyard.plan.degrees import Plan
from steelyard.run import preflight
from steelyard.run.engine_identity import EngineIdentity

GIB = 1 << 30


def make_hello(*memory_gib: int | None, **software: str) -> Any:
    """Return what preflight reads of a hello message: devices with these memories, in GiB (None:
    unknown), and versions of packages.
    """
    devices = [
        SimpleNamespace(
            name="gpu", memory_bytes=gib and gib * GIB, free_bytes=None, busy=None, index=i
        )
        for i, gib in enumerate(memory_gib)
    ]
    versions = SimpleNamespace(python="3.11.2", driver=None, packages=software)
    return SimpleNamespace(
        devices=devices, divisible=False, environment=SimpleNamespace(software=versions)
    )


@pytest.mark.parametrize("memory_gib", [(80, 40), (40, 80), (None, 40)])
def test_a_case_must_fit_the_smallest_used_device(memory_gib: tuple[int | None, ...]) -> None:
    # by its shapes, the case needs 66.6 GiB on each device
    case = resolve_case("aquila2-34b-lambada").case
    plan = Plan(nodes=1, devices=2, tp=1, pp=1, dp=2, launcher="local")
    with pytest.raises(RequestError, match=r"and a device has 40\.0 GiB"):
        preflight._check_memory("north", make_hello(*memory_gib), case, plan)
    unused = make_hello(80, 80, 40)  # the third device is not used
    assert preflight._check_memory("north", unused, case, plan) == []


def test_a_package_that_one_host_lacks_is_named() -> None:
    with_torch, without = make_hello(torch="2.11.0"), make_hello()
    for hello, first, versions in (
        (with_torch, without, "north has torch 2.11.0, and south has no torch"),
        (without, with_torch, "north has no torch, and south has torch 2.11.0"),
    ):
        with pytest.raises(RequestError) as caught:
            preflight._check_software("north", hello, "south", first)
        assert (
            str(caught.value) == f"host {versions}; install the same version on all hosts of a run"
        )


@pytest.mark.parametrize(
    ("identity", "warnings"),
    [
        (None, []),
        (EngineIdentity(hash="0123456789abcdef"), []),
        (
            EngineIdentity(problem="too many files"),
            [
                "host north: whether this version of the engine conforms cannot be known: too many"
                " files"
            ],
        ),
    ],
)
def test_host_without_the_identity_it_was_asked_for_gives_a_warning(
    identity: EngineIdentity | None, warnings: list[str]
) -> None:
    hello: Any = SimpleNamespace(engine_identity=identity)
    assert preflight._check_engine_identity("north", hello) == warnings
