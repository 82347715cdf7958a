"""Marks on a device's timeline."""

from collections.abc import Callable
from typing import Any, Literal, Protocol

Clock = Callable[[], float]
ClockName = Literal["device", "host", "reported"]  # whose times the samples of a pass have
APART = "events of two kinds of device have no distance"


class Event(Protocol):
    def elapsed_s(self, later: "Event") -> float:
        """Seconds between this event and a later one; both must have happened."""


class Timeline(Protocol):
    """What the measured loop needs of a device."""

    def event(self) -> Event:
        """A mark on the framework's own stream; the host does not wait for it."""

    def synchronize(self) -> None: ...


class _Reading:
    """A reading of a clock. Two of the same kind are on the same clock."""

    def __init__(self, at_s: float) -> None:
        self.at_s = at_s

    def elapsed_s(self, later: Event) -> float:
        if type(later) is not type(self):
            raise TypeError(APART)
        return later.at_s - self.at_s


class ReportedEvent(_Reading):
    """A mark in the time that another program says it took."""


class HostEvent(_Reading):
    """An event of a device that works when it is told to, such as a CPU: a reading of the host's
    clock.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock())


class StreamEvent:
    """A mark in a device's stream, made of a framework's own event that has been recorded; the host
    does not wait for it.
    """

    def __init__(self, event: Any) -> None:
        self._event = event

    def elapsed_s(self, later: Event) -> float:
        if not isinstance(later, StreamEvent):
            raise TypeError(APART)
        time_ms: float = self._event.elapsed_time(later._event)
        return time_ms / 1000


def clock_of(event: Event) -> ClockName:
    """Whose clock an event is on."""
    return (
        "host"
        if isinstance(event, HostEvent)
        else "reported"
        if isinstance(event, ReportedEvent)
        else "device"
    )
