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
    """The clock of an external program, which stands for its device: `time_s` is the seconds that
    it says it took so far. The engine advances it.
    """

    def __init__(self) -> None:
        self.time_s = 0.0

    def synchronize(self) -> None:
        """Do nothing: the state of the device is not known."""


class ProgramFramework:
    """The framework `program` for engines that start an external program: nothing to join and no
    device. `event` gives points of the reported clock (`device`, a ReportedClock); matmuls,
    profiler and memory are unknown (None). The constructor's arguments are ignored.
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
        """Raise RuntimeError: there is one process."""
        raise RuntimeError("one process cannot all-reduce")

    def barrier(self) -> None:
        """Do nothing."""

    def leave(self) -> None:
        """Do nothing."""

    def prepare_square_matmul(self, precision: str) -> None:
        """Return None: a second process on the devices would disturb the program."""
        return

    def profiler(self) -> None:
        """Return None: there is no profiler."""
        return

    def prepare_matmul(self, precision: str, shape: Matmul) -> None:
        """Return None, as `prepare_square_matmul` does."""
        return

    def event(self) -> ReportedEvent:
        """Return an event at the time that the program has reported so far."""
        return ReportedEvent(self.device.time_s)

    def synchronize(self) -> None:
        """Do nothing."""

    def reset_memory(self) -> None:
        """Do nothing."""

    def memory(self) -> dict[str, int | None]:
        """Return the memory counters as unknown (None)."""
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
        """Return None: it is not known."""
        return None

    def threads(self) -> int:
        """Return the number of CPUs of the host."""
        return os.cpu_count() or 1


def _installed_version(name: str) -> str | None:
    """Return the installed version of a Python package, or None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
