"""Marks on a device's timeline."""

from collections.abc import Callable
from typing import Literal, Protocol

Clock = Callable[[], float]
ClockName = Literal["device", "host", "reported"]  # whose times the samples of a pass have


class Event(Protocol):
    def elapsed_s(self, later: "Event") -> float:
        """Seconds between this event and a later one; both must have happened."""


class Timeline(Protocol):
    """What the measured loop needs of a device."""

    def event(self) -> Event:
        """A mark on the framework's own stream; the host does not wait for it."""

    def synchronize(self) -> None: ...


class HostEvent:
    """An event of a device that works when it is told to, such as a CPU: a reading of the host's clock."""

    def __init__(self, clock: Clock) -> None:
        self.at_s = clock()

    def elapsed_s(self, later: Event) -> float:
        if not isinstance(later, HostEvent):
            raise TypeError("events of two kinds of device have no distance")
        return later.at_s - self.at_s


class ReportedEvent:
    """A mark in the time that another program says it took."""

    def __init__(self, at_s: float) -> None:
        self.at_s = at_s

    def elapsed_s(self, later: Event) -> float:
        if not isinstance(later, ReportedEvent):
            raise TypeError("events of two kinds of device have no distance")
        return later.at_s - self.at_s


def clock_of(event: Event) -> ClockName:
    """Whose clock an event is on."""
    return "host" if isinstance(event, HostEvent) else "reported" if isinstance(event, ReportedEvent) else "device"
