"""The framework of external programs: this process drives no device, and all times are those that
the program prints.
"""

from importlib.metadata import PackageNotFoundError, version

from steelyard.accelerators.events import Clock, ReportedEvent
from steelyard.engine.deviceless_framework import DevicelessFramework

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


class ProgramFramework(DevicelessFramework):
    """The framework `program` for engines that start an external program, in one process (a
    `Framework`): `device` is a `ReportedClock`, `event()` a point of it, `versions` those of Python
    packages that the program shares. The constructor's arguments are ignored.
    """

    def __init__(self, device: str | None, local_rank: int, clock: Clock) -> None:
        self.device = ReportedClock()

    def event(self) -> ReportedEvent:
        """Return an event at the time that the program has reported so far."""
        return ReportedEvent(self.device.time_s)

    def versions(self) -> dict[str, str | None]:
        """Return the versions by name of those of torch, megatron-core and transformer-engine that
        are installed in this Python, which the program shares.
        """
        return {
            name: installed
            for name in PACKAGES
            if (installed := _installed_version(name)) is not None
        }


def _installed_version(name: str) -> str | None:
    """Return the installed version of a Python package, or None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
