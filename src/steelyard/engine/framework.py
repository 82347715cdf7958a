"""The interface of a framework (torch, paddle, an external program): it joins the ranks of a run
and drives one device.

Each worker process has one such object, made by the class that the framework's row names
(engine/engine_rows.py). The worker and the measured loop use nothing else of a framework.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from steelyard.accelerators.events import Event, Timeline
from steelyard.engine.profile import Profiler
from steelyard.plan.degrees import Plan
from steelyard.plan.matmuls import Matmul


class Meeting(Protocol):
    """Where the ranks of a run find each other (a protocol). If all are on one host, `file` is the
    path of the rendezvous file, and the others are None; else `file` is None, and rank 0 serves at
    TCP `address` and `port`.

    With an address, rank 0 serves on `listen_fd`, the descriptor of a socket that is already bound
    to the network interface of the site (None on other ranks); it must not open another port. Other
    ranks only connect.
    """

    @property
    def file(self) -> Path | None:
        """Return the rendezvous file, or None if ranks are on several hosts."""

    @property
    def address(self) -> str | None:
        """Return the address at which rank 0 serves, or None if there is a file."""

    @property
    def port(self) -> int | None:
        """Return the TCP port at which rank 0 serves, or None if there is a file."""

    @property
    def listen_fd(self) -> int | None:
        """Return the file descriptor of the bound socket that rank 0 serves on, or None."""


class DeviceFramework:
    """The framework methods that only pass on to the accelerator's device object, for frameworks to
    inherit; a subclass sets `device`. `set_precision(matmul)`, `event()` (a mark on the stream),
    `synchronize()`, `reset_memory()`, `memory()` (peaks in bytes), `identity()` and `versions()`
    (dicts for the record).
    """

    device: Any

    def set_precision(self, matmul: str) -> None:
        """Make fp32 matmuls on the device run in `matmul` (a precision name such as fp32 or tf32),
        process-wide. Raises RequestError for a precision that the device does not have.
        """
        self.device.set_precision(matmul)

    def event(self) -> Event:
        """Record an event on the device's current stream without waiting, and return it. A device
        without streams returns a reading of the host's clock.
        """
        event: Event = self.device.event()
        return event

    def synchronize(self) -> None:
        """Block the host until the device has finished all queued work."""
        self.device.synchronize()

    def reset_memory(self) -> None:
        """Restart the peak memory counters of the framework's device, which `memory` returns."""
        self.device.reset_memory()

    def memory(self) -> dict[str, int | None]:
        """Return the device's memory counters as a new dict: `allocated_bytes` and
        `reserved_bytes`, peaks since the last reset, None where unknown; a CPU adds `in_use_bytes`.
        """
        return dict(self.device.memory())

    def identity(self) -> dict[str, Any]:
        """Return what the framework's device is as a new dict, for the record: `name`, `uuid`,
        `memory_bytes` and what else the device class knows.
        """
        return dict(self.device.identity())

    def versions(self) -> dict[str, str | None]:
        """Return the versions of the libraries that the device class knows, by library, None where
        unknown.
        """
        return dict(self.device.versions())


class Framework(Timeline, Protocol):
    """What a worker uses of a framework (a protocol); each worker process has one. Constructed with
    the accelerator's device class for this framework (a `module:Class` string, None if it has
    none), the local rank and the clock.

    It joins ranks (`join_ranks`, `barrier`, `leave`), sets numerics (`set_precision`,
    `make_deterministic`), times (`event`, `synchronize`), prepares what is measured beside a pass
    and returns it as a function to call with its bytes or FLOPs (`prepare_all_reduce`;
    `prepare_square_matmul` and `prepare_matmul`, None if it cannot), profiles (`profiler`), and
    describes its device and process for the record (`memory`, `identity`, `versions`,
    `compile_cache`, `threads`). `device` is the device object.
    """

    @property
    def device(self) -> Any:
        """Return the accelerator's device object, which engines get as `Job.device`."""

    def set_precision(self, matmul: str) -> None:
        """Make fp32 matmuls run in precision `matmul`, process-wide; TF32 is used only if `matmul`
        is tf32. Raises RequestError for a precision that the device does not have.
        """

    def make_deterministic(self) -> None:
        """Switch the framework to deterministic kernels for this process, so that every run
        computes the same bits. An operation without such a kernel raises when it runs.
        """

    def join_ranks(self, plan: Plan, rank: int, world: int, meet: Meeting | None) -> Any:
        """Initialize the process group of this run and return the group of ranks that together hold
        one model with this rank, in the framework's own type (it becomes `Job.group`).

        `meet` says where ranks rendezvous; it is None if the run has one rank, which need not
        initialize anything. Blocks until all ranks have joined.
        """

    def prepare_all_reduce(self) -> tuple[Callable[[], Any], int, Callable[[], str | None]]:
        """Prepare a small sum over all ranks, and return (call, size_bytes, check).

        `call` may be called any number of times, by all ranks equally often; `size_bytes` is the
        size of its tensor. `check` returns None if the last result was right, else a text that says
        what is wrong.
        """

    def barrier(self) -> None:
        """Wait until all ranks are here; returns at once if there is one rank."""

    def leave(self) -> None:
        """Leave the process group that `join_ranks` joined; may wait for the other ranks. The last
        call of a worker that finished.
        """

    def prepare_square_matmul(self, precision: str) -> tuple[Callable[[], Any], int] | None:
        """Allocate one large square matmul of random numbers and return (call, FLOPs of a call).
        Its rate is the one that no pass may exceed. None if another program drives the device.
        """

    def prepare_matmul(self, precision: str, shape: Matmul) -> tuple[Callable[[], Any], int] | None:
        """Allocate one matmul of this shape and layout with random numbers, and return (call, FLOPs
        of a call). Timed to find the rate that a case can reach. None if the device lacks the
        memory, or the framework cannot run it.
        """

    def profiler(self) -> Profiler | None:
        """Return a new profiler for this rank's device, or None if the framework has none."""

    def reset_memory(self) -> None:
        """Restart the peaks of the device's memory that `memory` returns."""

    def memory(self) -> dict[str, int | None]:
        """Return `allocated_bytes` and `reserved_bytes`, the peaks since the last reset (None if
        the framework counts none); a device without such peaks, such as a CPU, adds `in_use_bytes`,
        what this process has now.
        """

    def identity(self) -> dict[str, Any]:
        """Return what the device is: `name`, `uuid`, `memory_bytes`, `capability`,
        `multiprocessors`; None for what is unknown.
        """

    def versions(self) -> dict[str, str | None]:
        """Return the versions of libraries that only the framework can tell, such as those that the
        accelerator's row names; None where unknown.
        """

    def compile_cache(self) -> dict[str, int] | None:
        """Return the cache `hits` and `misses` of the compilers in this process so far, or None if
        nothing was compiled.
        """

    def threads(self) -> int:
        """Return how many CPU threads this rank computes with."""
