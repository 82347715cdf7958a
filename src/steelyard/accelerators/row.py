"""The interface of an accelerator: one row that says how the host finds and watches its devices,
and which class drives it in each framework. docs/accelerators.md shows a complete one.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from steelyard.accelerators.events import Event
from steelyard.accelerators.peaks import Peak
from steelyard.words import Message

if TYPE_CHECKING:
    import torch

Reading = dict[str, float | int | list[str] | None]
DeviceSettings = dict[str, float | int | str | list[str] | None]
Severity = Literal["nothing", "note", "invalidates"]


@dataclass(frozen=True)
class DetectedDevice:
    """A device as its driver shows it, returned by `Accelerator.find`. Its position in that list is
    the local rank of its worker; `index` is the driver's own number, `name` and `uuid` are the
    driver's, `memory_bytes` is its whole memory, `driver` the driver's version. None is unknown.
    """

    name: str
    uuid: str | None
    memory_bytes: int | None
    index: int
    driver: str | None


@dataclass(frozen=True)
class TelemetrySource:
    """A device whose telemetry is read repeatedly while a run goes on; `device` is its name in the
    record, such as cuda:0. Made by `Accelerator.sources`.

    `read(pids)` is given the process ids of the run's workers on this host, and returns the
    readings now as a dict by column, always the same columns. It may leave a slow column None most
    of the time; `read_all(pids)`, which reads all, is called instead for the first and last
    reading; if it is None, `read` is.
    """

    device: str
    read: Callable[[tuple[int, ...]], Reading]
    read_all: Callable[[tuple[int, ...]], Reading] | None = field(default=None, kw_only=True)


class FrameworkDevice(Protocol):
    """Protocol of the device classes of an accelerator, one per framework: `event` and
    `synchronize` to time with, `memory` and `reset_memory` for peaks, `identity` and `versions` for
    the record, `set_precision`, which refuses precisions, `backend` and `matmul_shape`. A worker
    constructs it with its local rank and the clock of the measured loop.
    """

    @property
    def backend(self) -> str:
        """Return the name of the framework's collective library for this device, such as nccl."""

    @property
    def matmul_shape(self) -> int:
        """Return the side of the square matmul whose measured rate stands for what the device can
        reach.
        """

    def event(self) -> Event:
        """Return an event in the device's current stream; the host does not wait for it."""

    def synchronize(self) -> None:
        """Wait until the device has finished all its work."""

    def reset_memory(self) -> None:
        """Reset the framework's peaks of memory."""

    def memory(self) -> dict[str, int | None]:
        """Return `allocated_bytes` and `reserved_bytes`: the framework's peaks since the last
        reset, None if it has none. A device without such peaks may add `in_use_bytes`.
        """

    def identity(self) -> dict[str, Any]:
        """Return `name`, `uuid`, `memory_bytes`, `capability` and `multiprocessors`; None for what
        is unknown.
        """

    def versions(self) -> dict[str, str | None]:
        """Return the versions of the accelerator's `libraries` and `collectives`, as the framework
        knows them.
        """

    def set_precision(self, matmul: str) -> None:
        """Make the framework's fp32 matmuls run in `matmul`. Raises RequestError for a precision
        that the device does not have.
        """


class TorchDevice(FrameworkDevice, Protocol):
    """The device class of an accelerator for framework torch (a protocol): FrameworkDevice with
    `torch_device`, `release_memory` and `attention`. `triton`, `recorder`, `lacks` and `capacity`
    may be left out; the last two are for `steelyard spec`.
    """

    @property
    def torch_device(self) -> "torch.device":
        """Return the device as torch names it."""

    def release_memory(self) -> None:
        """Give back memory that the framework holds and nobody uses, so that metric `mem` shows
        what a run needs.
        """

    def attention(self, dtype_name: str, shared: bool) -> str:
        """Return the fastest kernel of models/attention.py for this dtype; `shared`: rows attend to
        a common prefix.
        """

    # A device class may leave out what follows.

    @property
    def triton(self) -> bool:
        """Return whether Triton compiles for this device; a class without this property is taken
        not to have it.
        """

    def recorder(self) -> Callable[[Callable[[], None]], Any]:
        """Return a function that calls a function, records what it launches, and returns an object
        with `replay`.
        """

    # For `steelyard spec` only; a device class without `lacks` is taken to lack nothing.

    @property
    def lacks(self) -> Mapping[str, str]:
        """Return what the device does not have, with the reason: names of precisions, `copies`
        (from and to the host), `peers`.
        """

    def capacity(self) -> tuple[int, str] | None:
        """Return the bytes that a process can have, and who limits them; None if that must be found
        by allocating.
        """


class PaddleDevice(FrameworkDevice, Protocol):
    """The device class of an accelerator for framework paddle (a protocol): FrameworkDevice with
    `place`, `lacks` and `threads`.
    """

    @property
    def place(self) -> str:
        """Return the device as `paddle.set_device` takes it: cpu, gpu:0."""

    @property
    def lacks(self) -> Mapping[str, str]:
        """Return what Paddle cannot do on the device, with the reason: `tp`, `pp`, `sharding 2`,
        `copies of shards`, `flash`.
        """

    def threads(self) -> int:
        """Return how many CPU threads Paddle uses."""


@dataclass(frozen=True)
class Accelerator:
    """A kind of device, such as cuda or cpu, as a row; other packages add rows through an entry
    point. Its callables run in processes without a framework: `find` lists the devices, `sources`
    their telemetry, `free` their free bytes, `states` their settings (for `steelyard check`, whose
    advice by finding is `steps`), `environment(matmul precision)` variables for workers,
    `torch_build` the runtime version that torch was built for. `devices` maps a framework to the
    `module:Class` that a worker constructs.

    `divisible`: workers may share a device; `is_host`: the device is the host's CPUs; `peaks`:
    datasheet rows; `severity`: what a reason for a low clock means for a run. `libraries`,
    `collectives`, `packages` and `variables` are stated in records. `tune_variables` may be set by
    `tune.env` and site files, `site_variables` by site files only; `ignored_variables` are not
    inherited; `worker_`, `deterministic_` and `interface_variables` are set for workers.
    """

    name: str
    find: Callable[[], list[DetectedDevice]]
    # telemetry of the devices in use, read while a run goes on
    sources: Callable[[list[DetectedDevice]], list[TelemetrySource]]
    devices: Mapping[str, str]  # framework → `module:Class` that a worker constructs
    divisible: bool = False  # several workers may share one device
    is_host: bool = False  # its device is the host's CPUs, which other processes use too
    peaks: tuple[Peak, ...] = ()  # datasheet rows that come with it
    # what each reason for a low clock means for a run; others become a note
    severity: Mapping[str, Severity] = field(default_factory=dict)
    # its runtime and libraries: a record states their versions, null where none is known
    libraries: tuple[str, ...] = ()
    collectives: str | None = None  # its library for collectives, whose version workers report too
    # Python packages that belong to it: a record states their versions
    packages: tuple[str, ...] = ()
    # full names of variables that can change a result: a record states their values
    variables: tuple[str, ...] = ()
    tune_variables: tuple[str, ...] = ()  # that `tune.env` and a site file may set
    site_variables: tuple[str, ...] = ()  # that only a site file may set
    # that workers do not inherit, because they would change the precision
    ignored_variables: tuple[str, ...] = ()
    worker_variables: Mapping[str, str] = field(default_factory=dict)  # set for workers of any run
    # set for workers with tune.deterministic
    deterministic_variables: Mapping[str, str] = field(default_factory=dict)
    # set for workers: name → value, with {} for the network interface
    interface_variables: Mapping[str, str] = field(default_factory=dict)
    # free bytes of each device's memory now, None if unknown
    free: Callable[[list[DetectedDevice]], list[int | None]] = lambda found: [None] * len(found)
    # returns environment variables for workers, by the precision of matmuls
    environment: Callable[[str], dict[str, str]] = lambda matmul: {}
    # returns the version of its runtime that the installed torch was built for
    torch_build: Callable[[], str | None] = lambda: None
    # returns the settings of each device that can change its speed
    states: Callable[[list[DetectedDevice]], list[DeviceSettings]] = lambda found: []
    # what helps against a finding of `steelyard check`, by its key
    steps: Mapping[str, Message] = field(default_factory=dict)

    def count_workers(self, devices: list[DetectedDevice]) -> int:
        """Return how many workers these devices of the accelerator can serve: one each or, if it is
        `divisible` (the CPU), the largest of their number, the host's number of CPUs and 8.
        """
        return max(len(devices), os.cpu_count() or 1, 8) if self.divisible else len(devices)
