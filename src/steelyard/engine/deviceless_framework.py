"""The base of frameworks whose own process drives no device: another program does, or a server."""

import os
from collections.abc import Callable
from typing import Any

from steelyard.engine.framework import Meeting
from steelyard.plan.degrees import Plan
from steelyard.plan.matmuls import Matmul


class DevicelessFramework:
    """The framework methods of one process without a device, for frameworks to inherit. Methods
    that join ranks, set numerics or synchronize do nothing, `prepare_all_reduce` raises
    RuntimeError; matmuls, profiler, compile cache and memory counters are None, `identity` and
    `versions` are empty. A subclass adds `device` and `event`.
    """

    device: Any

    def set_precision(self, matmul: str) -> None:
        """Do nothing: the program that drives the device has its own settings."""

    def make_deterministic(self) -> None:
        """Do nothing: the program that drives the device has its own settings."""

    def join_ranks(self, plan: Plan, rank: int, world: int, meet: Meeting | None) -> None:
        """Do nothing and return None: there is one process."""

    def prepare_all_reduce(self) -> tuple[Callable[[], Any], int, Callable[[], str | None]]:
        """Raise RuntimeError: there is one process, which cannot all-reduce; the worker does not
        call it then.
        """
        raise RuntimeError("one process cannot all-reduce")

    def barrier(self) -> None:
        """Do nothing: there is one process."""

    def leave(self) -> None:
        """Do nothing: no ranks were joined here."""

    def prepare_square_matmul(self, precision: str) -> None:
        """Return None, so that no matmul is timed: a second process on the devices would disturb
        the program that drives them.
        """
        return

    def profiler(self) -> None:
        """Return None: there is no profiler."""
        return

    def prepare_matmul(self, precision: str, shape: Matmul) -> None:
        """Return None, so that no matmul is timed: a second process on the devices would disturb
        the program that drives them.
        """
        return

    def synchronize(self) -> None:
        """Do nothing: this process drives no device."""

    def reset_memory(self) -> None:
        """Do nothing: the memory of the devices is not known here."""

    def memory(self) -> dict[str, int | None]:
        """Return `allocated_bytes` and `reserved_bytes` as None: the memory of the devices is not
        known here.
        """
        return {"allocated_bytes": None, "reserved_bytes": None}

    def identity(self) -> dict[str, Any]:
        """Return an empty dict: the device is not known."""
        return {}

    def versions(self) -> dict[str, str | None]:
        """Return an empty dict: no library of a device is used here."""
        return {}

    def compile_cache(self) -> dict[str, int] | None:
        """Return None: what is compiled elsewhere is not known here."""
        return None

    def threads(self) -> int:
        """Return the number of CPUs of the host, 1 if unknown; how many threads the program uses is
        not known.
        """
        return os.cpu_count() or 1
