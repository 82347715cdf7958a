"""The framework of external programs: this process drives no device, and all times are those that
the program prints.
"""

import os
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from steelyard.accelerators.events import Clock, ReportedEvent
from steelyard.engine.framework import Meeting
from steelyard.plan.degrees import Plan
from steelyard.plan.matmuls import Matmul

PACKAGES = ("torch", "megatron-core", "transformer-engine")


class ReportedClock:
    """The clock of an external program, which stands for its device as `Job.device`: `time_s` is
    the seconds that the program says it took so far, from 0; the engine adds each iteration's time.
    `synchronize()` does nothing.
    """

    def __init__(self) -> None:
        self.time_s = 0.0

    def synchronize(self) -> None:
        """Do nothing: the state of the device is not known."""


class ProgramFramework:
    """The framework `program` for engines that start an external program, in one process (a
    `Framework`): `device` is a `ReportedClock`, `event()` a point of it. Methods that join ranks or
    set numerics do nothing, `prepare_all_reduce` raises RuntimeError; matmuls, profiler, compile
    cache and memory counters are None, `identity` is empty. `versions` are those of Python packages
    that the program shares. The constructor's arguments are ignored.
    """

    def __init__(self, device: str | None, local_rank: int, clock: Clock) -> None:
        self.device = ReportedClock()

    def set_precision(self, matmul: str) -> None:
        """Do nothing: the program's configuration says its precision."""

    def make_deterministic(self) -> None:
        """Do nothing: the engine refuses determinism."""

    def join_ranks(self, plan: Plan, rank: int, world: int, meet: Meeting | None) -> None:
        """Do nothing and return None: the program joins its own ranks."""

    def prepare_all_reduce(self) -> tuple[Callable[[], Any], int, Callable[[], str | None]]:
        """Raise RuntimeError: there is one process, which cannot all-reduce; the worker does not
        call it then.
        """
        raise RuntimeError("one process cannot all-reduce")

    def barrier(self) -> None:
        """Do nothing: there is one process, and the program joins its own ranks."""

    def leave(self) -> None:
        """Do nothing: no ranks were joined here."""

    def prepare_square_matmul(self, precision: str) -> None:
        """Return None, so that no matmul is timed: a second process on the devices would disturb
        the program.
        """
        return

    def profiler(self) -> None:
        """Return None: there is no profiler."""
        return

    def prepare_matmul(self, precision: str, shape: Matmul) -> None:
        """Return None, so that no matmul is timed: a second process on the devices would disturb
        the program.
        """
        return

    def event(self) -> ReportedEvent:
        """Return an event at the time that the program has reported so far."""
        return ReportedEvent(self.device.time_s)

    def synchronize(self) -> None:
        """Do nothing: this process drives no device; times are those that the program reports."""

    def reset_memory(self) -> None:
        """Do nothing: the memory of the program's devices is not known here."""

    def memory(self) -> dict[str, int | None]:
        """Return `allocated_bytes` and `reserved_bytes` as None: the memory of the program's
        devices is not known here.
        """
        return {"allocated_bytes": None, "reserved_bytes": None}

    def identity(self) -> dict[str, Any]:
        """Return an empty dict: the device is not known."""
        return {}

    def versions(self) -> dict[str, str | None]:
        """Return the versions by name of those of torch, megatron-core and transformer-engine that
        are installed in this Python, which the program shares.
        """
        return {
            name: installed
            for name in PACKAGES
            if (installed := _installed_version(name)) is not None
        }

    def compile_cache(self) -> dict[str, int] | None:
        """Return None: what the program compiles is not known here."""
        return None

    def threads(self) -> int:
        """Return the number of CPUs of the host, 1 if unknown; how many threads the program uses is
        not known.
        """
        return os.cpu_count() or 1


def _installed_version(name: str) -> str | None:
    """Return the installed version of a Python package, or None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
