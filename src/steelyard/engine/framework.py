"""What a worker needs of a framework: it joins ranks and drives one device. One object in every
worker.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from steelyard.accelerators.events import Event, Timeline
from steelyard.engine.profile import Profiler
from steelyard.plan.degrees import Plan
from steelyard.plan.matmuls import Matmul


class Meeting(Protocol):
    """Where ranks meet: a file on one host, an address on several. Rank 0 serves `listen_fd`, a
    socket that is already bound to the interface of the site; no other port may be opened for it.
    """

    @property
    def file(self) -> Path | None: ...

    @property
    def address(self) -> str | None: ...

    @property
    def port(self) -> int | None: ...

    @property
    def listen_fd(self) -> int | None: ...


class DeviceFramework:
    """The part of a framework that the accelerator's device class does."""

    device: Any

    def set_precision(self, matmul: str) -> None:
        self.device.set_precision(matmul)

    def event(self) -> Event:
        event: Event = self.device.event()
        return event

    def synchronize(self) -> None:
        self.device.synchronize()

    def reset_memory(self) -> None:
        self.device.reset_memory()

    def memory(self) -> dict[str, int | None]:
        return dict(self.device.memory())

    def identity(self) -> dict[str, Any]:
        return dict(self.device.identity())

    def versions(self) -> dict[str, str | None]:
        return dict(self.device.versions())


class Framework(Timeline, Protocol):
    """Made with the accelerator's device class for this framework (a `module:Class`), the local
    rank and the clock.
    """

    @property
    def device(self) -> Any:
        """The framework's own device object, for engines."""

    def set_precision(self, matmul: str) -> None:
        """Make fp32 matmuls run in `matmul`: TF32 only where it is asked for."""

    def make_deterministic(self) -> None:
        """The same bits in every run; what has no such kernel raises."""

    def join(self, plan: Plan, rank: int, world: int, meet: Meeting | None) -> Any:
        """Meet the other ranks, where `meet` says; returns the group of ranks that hold one model
        together with this one.
        """

    def all_reduce(self) -> tuple[Callable[[], Any], int, Callable[[], str | None]]:
        """A small sum over all ranks that can be made again and again, its bytes, and what is wrong
        with the last result.
        """

    def barrier(self) -> None: ...

    def leave(self) -> None:
        """The last call of a worker that is done."""

    def matmul(self, precision: str) -> tuple[Callable[[], Any], int] | None:
        """One large square matmul on random numbers, and its FLOPs: the rate that no pass may
        exceed. None where another program drives the device."""

    def product(self, precision: str, shape: Matmul) -> tuple[Callable[[], Any], int] | None:
        """One matmul of this shape on random numbers, and its FLOPs: what is timed to know the rate
        that a case can reach. None where the device has no memory left for it, or this framework
        cannot."""

    def profiler(self) -> Profiler | None:
        """A new one for this rank's device; None where the framework has none."""

    def reset_memory(self) -> None: ...

    def memory(self) -> dict[str, int | None]:
        """`allocated_bytes` and `reserved_bytes`: peaks since the last reset; `in_use_bytes` where
        ranks share a device.
        """

    def identity(self) -> dict[str, Any]:
        """The device: `name`, `uuid`, `memory_bytes`, `capability`, `multiprocessors`."""

    def versions(self) -> dict[str, str | None]:
        """Versions of libraries that only the framework knows, such as those that the accelerator's
        row names.
        """

    def compile_cache(self) -> dict[str, int] | None:
        """`hits` and `misses` of the caches of compilers in this process so far; None where nothing
        was compiled.
        """

    def threads(self) -> int:
        """Of the host, for this rank."""
