"""Marks on a device's timeline."""

from collections.abc import Callable
from typing import Protocol

Clock = Callable[[], float]


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
