"""The table of accelerators: what this machine has, how to watch it, and how a worker drives it.

Nothing heavy is imported here. The parent process finds and watches devices without torch; a worker loads the object
that drives its device from the row's `device`. Third parties add rows through the entry-point group
`steelyard.accelerators`: each entry point names an `Accelerator`.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

from steelyard.errors import RequestError

if TYPE_CHECKING:
    import torch

    from steelyard.run.measure import Event
    from steelyard.run.telemetry import Sampler

GROUP = "steelyard.accelerators"


@dataclass(frozen=True)
class Found:
    """A device as its driver shows it. Its place in the list is its user's local rank; `index` is the driver's own."""

    name: str
    uuid: str | None
    memory_bytes: int | None
    index: int
    driver: str | None


class Device(Protocol):
    """What a worker needs of its device. It is a `measure.Timeline`, too."""

    @property
    def backend(self) -> str:
        """The name of torch's collective library for this device."""

    @property
    def matmul_shape(self) -> int:
        """The side of the square matmul whose rate stands for what is achievable here."""

    @property
    def torch_device(self) -> "torch.device": ...

    def event(self) -> "Event": ...

    def synchronize(self) -> None: ...

    def reset_memory(self) -> None: ...

    def release_memory(self) -> None:
        """Give back what the framework holds and nobody uses, so that `mem` shows what a run needs."""

    def memory(self) -> dict[str, int | None]:
        """`allocated_bytes` and `reserved_bytes`: the framework's peaks since the last reset."""

    def identity(self) -> dict[str, Any]:
        """`name`, `uuid`, `memory_bytes`, `capability`, `multiprocessors`."""

    def versions(self) -> dict[str, str | None]:
        """`cuda`, `cudnn`, `nccl`."""

    def attention(self, dtype_name: str, shared: bool) -> str:
        """The fastest row of `attention.KERNELS` for this type; `shared` where rows see a common prefix."""

    def set_precision(self, matmul: str) -> None:
        """Make fp32 matmuls run in `matmul`: TF32 only where it is asked for."""


@dataclass(frozen=True)
class Accelerator:
    """A row. `find` and `telemetry` run in the parent; `device` is the `module:Class` that a worker makes.

    `telemetry` takes the devices in use, the root of the run's processes, and its start on the clock of `measure`.
    """

    name: str
    find: Callable[[], list[Found]]
    telemetry: "Callable[[list[Found], int, float], Sampler]"
    device: str
    divisible: bool = False  # several workers may share one device

    def most(self, found: list[Found]) -> int:
        """How many workers its devices can serve."""
        return max(len(found), os.cpu_count() or 1, 8) if self.divisible else len(found)


def _find_cuda() -> list[Found]:
    from steelyard.accelerators import nvml

    return nvml.find(os.environ.get("CUDA_VISIBLE_DEVICES"))


def _watch_cuda(found: list[Found], root_pid: int, origin_s: float) -> "Sampler":
    from steelyard.accelerators import nvml
    from steelyard.run.telemetry import Sampler

    return Sampler(nvml.sources(found), root_pid, origin_s)


def _find_cpu() -> list[Found]:
    from steelyard.accelerators import cpu

    return cpu.find()


def _watch_cpu(found: list[Found], root_pid: int, origin_s: float) -> "Sampler":
    from steelyard.accelerators import cpu
    from steelyard.run.telemetry import Sampler

    return Sampler([cpu.source()], root_pid, origin_s)


CUDA = Accelerator("cuda", _find_cuda, _watch_cuda, "steelyard.accelerators.cuda:Device")
CPU = Accelerator("cpu", _find_cpu, _watch_cpu, "steelyard.accelerators.cpu:Device", divisible=True)


def table() -> dict[str, Accelerator]:
    """All rows by name, in the order of preference: the CPU, which every machine has, is last."""
    rows: dict[str, Accelerator] = {CUDA.name: CUDA}
    for row in [*_third_party(), CPU]:
        if row.name in rows:
            raise RequestError(f"accelerator {row.name!r} is there twice; uninstall one of the packages that bring it")
        rows[row.name] = row
    return rows


def _third_party() -> list[Accelerator]:
    from importlib.metadata import entry_points

    rows = []
    for entry in entry_points(group=GROUP):
        about = f"accelerator {entry.name!r} ({entry.value})"
        try:
            row = entry.load()
        except (ImportError, AttributeError) as error:
            raise RequestError(f"{about}: {error}; mend or uninstall its package") from error
        if not isinstance(row, Accelerator):
            raise RequestError(f"{about} is no Accelerator; mend or uninstall its package")
        rows.append(row)
    return rows


def named(name: str) -> Accelerator:
    rows = table()
    if name not in rows:
        raise RequestError(f"accelerator {name!r} is unknown; known are {', '.join(rows)}")
    return rows[name]


def detect() -> Accelerator:
    """The first row with a device on this machine."""
    return next((row for row in table().values() if row.find()), CPU)


def load_device(name: str, local_rank: int) -> Device:
    """The worker's object for its device; this imports torch."""
    from importlib import import_module

    module, _, attribute = named(name).device.partition(":")
    return cast(Device, getattr(import_module(module), attribute)(local_rank))
