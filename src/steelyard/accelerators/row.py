"""What an accelerator is: one row that says what the host can see of it, and which class drives it
in each framework.
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
State = dict[str, float | int | str | list[str] | None]
Severity = Literal["nothing", "note", "invalidates"]


@dataclass(frozen=True)
class Found:
    """A device as its driver shows it. Its place in the list is its user's local rank; `index` is
    the driver's own.
    """

    name: str
    uuid: str | None
    memory_bytes: int | None
    index: int
    driver: str | None


@dataclass(frozen=True)
class Source:
    """A device and its reading now, the same columns every time. `read` takes the run's workers on
    this host. It may leave a slow column None most of the time; `whole` never does, and is asked
    first and last."""

    device: str
    read: Callable[[tuple[int, ...]], Reading]
    whole: Callable[[tuple[int, ...]], Reading] | None = field(default=None, kw_only=True)


class FrameworkDevice(Protocol):
    """A device class for any framework, made with the local rank and the clock of the measured
    loop.
    """

    @property
    def backend(self) -> str:
        """The name of the framework's collective library for this device."""

    @property
    def matmul_shape(self) -> int:
        """The side of the square matmul whose rate stands for what is achievable here."""

    def event(self) -> Event:
        """A mark in the device's current stream."""

    def synchronize(self) -> None: ...

    def reset_memory(self) -> None: ...

    def memory(self) -> dict[str, int | None]:
        """`allocated_bytes` and `reserved_bytes`: the framework's peaks since the last reset."""

    def identity(self) -> dict[str, Any]:
        """`name`, `uuid`, `memory_bytes`, `capability`, `multiprocessors`."""

    def versions(self) -> dict[str, str | None]:
        """Versions of the row's `libraries` and `collectives`, as the framework knows them."""

    def set_precision(self, matmul: str) -> None:
        """Make fp32 matmuls run in `matmul`; refuse what the device cannot do."""


class TorchDevice(FrameworkDevice, Protocol):
    """A device class for framework torch."""

    @property
    def torch_device(self) -> "torch.device": ...

    def release_memory(self) -> None:
        """Give back what the framework holds and nobody uses, so that `mem` shows what a run needs."""

    def attention(self, dtype_name: str, shared: bool) -> str:
        """The fastest row of `attention.KERNELS` for this type; `shared` where rows see a common
        prefix.
        """

    # A device class may leave out what follows.

    @property
    def triton(self) -> bool:
        """Whether Triton compiles for this device; a class without it is taken not to have it."""

    def recorder(self) -> Callable[[Callable[[], None]], Any]:
        """What calls a function and records what that launches, as an object to `replay`."""

    # For `steelyard spec` alone; a device class without it is taken to lack nothing.

    @property
    def lacks(self) -> Mapping[str, str]:
        """What it has not, with the reason: names of precisions, `copies` from and to the host,
        `peers`.
        """

    def capacity(self) -> tuple[int, str] | None:
        """Bytes that a process can have, where that is told and not tried, and who tells it. None:
        found by allocating.
        """


class PaddleDevice(FrameworkDevice, Protocol):
    """A device class for framework paddle."""

    @property
    def place(self) -> str:
        """As `paddle.set_device` takes it: cpu, gpu:0."""

    @property
    def lacks(self) -> Mapping[str, str]:
        """What Paddle cannot do on it, with the reason: `tp`, `pp`, `sharding 2`, `copies of
        shards`, `flash`.
        """

    def threads(self) -> int: ...


@dataclass(frozen=True)
class Accelerator:
    """A row. All but `devices` runs in the parent and in node agents, which import no framework."""

    name: str
    find: Callable[[], list[Found]]
    # what is read off the devices in use while a run goes on
    sources: Callable[[list[Found]], list[Source]]
    devices: Mapping[str, str]  # framework → `module:Class` that a worker makes
    divisible: bool = False  # several workers may share one device
    is_host: bool = False  # its device is the host's own cores, which all other processes use too
    peaks: tuple[Peak, ...] = ()  # datasheet rows that come with it
    # what each slowdown reason means; others are a note
    severity: Mapping[str, Severity] = field(default_factory=dict)
    # its runtime and libraries: a record states their versions, null where none is known
    libraries: tuple[str, ...] = ()
    collectives: str | None = None  # its library for collectives, whose version workers report too
    # Python packages that belong to it: a record states their versions
    packages: tuple[str, ...] = ()
    # full names of variables that can change a result: a record keeps their values
    variables: tuple[str, ...] = ()
    tune_variables: tuple[str, ...] = ()  # that `tune.env` and a site file may set
    site_variables: tuple[str, ...] = ()  # that a site file alone may set
    # that workers do not inherit: they run a precision as another
    ignored_variables: tuple[str, ...] = ()
    worker_variables: Mapping[str, str] = field(default_factory=dict)  # what workers get in any run
    # what they get too with tune.deterministic
    deterministic_variables: Mapping[str, str] = field(default_factory=dict)
    # name → value, with {} for the network interface
    interface_variables: Mapping[str, str] = field(default_factory=dict)
    # bytes of their memory, now
    free: Callable[[list[Found]], list[int | None]] = lambda found: [None] * len(found)
    # variables for workers on it, by what matmuls run in
    environment: Callable[[str], dict[str, str]] = lambda matmul: {}
    # version of its runtime that the installed torch was built for
    torch_build: Callable[[], str | None] = lambda: None
    # what can make the same device another one, by setting
    states: Callable[[list[Found]], list[State]] = lambda found: []
    # what helps against a finding of `steelyard check`, by its key
    steps: Mapping[str, Message] = field(default_factory=dict)

    def most(self, found: list[Found]) -> int:
        """How many workers its devices can serve."""
        return max(len(found), os.cpu_count() or 1, 8) if self.divisible else len(found)
