"""A framework for external programs: this process drives no device, and all times are those that
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


class Reported:
    """The time that a program says it took so far."""

    def __init__(self) -> None:
        self.at_s = 0.0

    def synchronize(self) -> None:
        """Nothing is known of a device but what the program says."""


class ProgramFramework:
    def __init__(self, device: str | None, local_rank: int, clock: Clock) -> None:
        self.device = Reported()

    def set_precision(self, matmul: str) -> None:
        """The program's own, and in its configuration."""

    def make_deterministic(self) -> None:
        """The engine refuses it."""

    def join(self, plan: Plan, rank: int, world: int, meet: Meeting | None) -> None:
        """The program joins its own ranks."""

    def all_reduce(self) -> tuple[Callable[[], Any], int, Callable[[], str | None]]:
        raise RuntimeError("one process has nobody to exchange with")

    def barrier(self) -> None: ...

    def leave(self) -> None: ...

    def matmul(self, precision: str) -> None:
        """A second process on the devices would be a neighbour to the program."""
        return

    def profiler(self) -> None:
        return

    def product(self, precision: str, shape: Matmul) -> None:
        """Neither."""
        return

    def event(self) -> ReportedEvent:
        return ReportedEvent(self.device.at_s)

    def synchronize(self) -> None: ...

    def reset_memory(self) -> None: ...

    def memory(self) -> dict[str, int | None]:
        return {"allocated_bytes": None, "reserved_bytes": None}

    def identity(self) -> dict[str, Any]:
        return {}

    def versions(self) -> dict[str, str | None]:
        """Of what the program stands on, in the Python that it shares with this process."""
        return {name: found for name in PACKAGES if (found := _version(name)) is not None}

    def compile_cache(self) -> dict[str, int] | None:
        return None

    def threads(self) -> int:
        return os.cpu_count() or 1


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
