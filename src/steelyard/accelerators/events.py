"""Events: points in time on a device's stream, or on a host's clock, between which the measured
loop takes durations.
"""

from collections.abc import Callable
from typing import Any, Literal, Protocol

Clock = Callable[[], float]
ClockName = Literal["device", "host", "reported"]  # whose clock the times of a pass are from
DIFFERENT_CLOCKS = "events on different clocks cannot be compared"


class Event(Protocol):
    """A point in time of a device (a protocol): `elapsed_s(later)` returns the seconds to a later
    one. Only events of the same kind can be compared.
    """

    def elapsed_s(self, later: "Event") -> float:
        """Return the seconds from this event to a later one; both must have happened. Raises
        TypeError for an event of another kind.
        """


class Timeline(Protocol):
    """Protocol of a device that the measured loop (run/measure.py) times: `event` marks a point
    in its stream, `synchronize` waits for all its work. Every FrameworkDevice has both.
    """

    def event(self) -> Event:
        """Return an event on the framework's current stream; the host does not wait for it."""

    def synchronize(self) -> None:
        """Wait until the device has finished all its work."""


class _ClockEvent:
    """A reading of a clock, in seconds (`time_s`); base of HostEvent and ReportedEvent. Two of the
    same class are on the same clock; `elapsed_s` refuses others.
    """

    def __init__(self, time_s: float) -> None:
        self.time_s = time_s

    def elapsed_s(self, later: Event) -> float:
        """Return the seconds from this clock reading to a later one, negative if that is earlier.
        Raises TypeError for an event of another class.
        """
        if type(later) is not type(self):
            raise TypeError(DIFFERENT_CLOCKS)
        return later.time_s - self.time_s


class ReportedEvent(_ClockEvent):
    """A point, in seconds (`time_s`), of the time that an external program reports that it took;
    used where this package does not time the device itself. `elapsed_s(later)` refuses events of
    another class with TypeError.
    """


class HostEvent(_ClockEvent):
    """An event of a synchronous device, such as a CPU: a reading, in seconds (`time_s`), of the
    given clock at construction. `elapsed_s(later)` refuses events of another class with TypeError.
    """

    def __init__(self, clock: Clock) -> None:
        """Read the clock now."""
        super().__init__(clock())


class StreamEvent:
    """An event in a device's stream: wraps a framework's own event, made with timing and already
    recorded, whose `elapsed_time` is in milliseconds; the host does not wait for it.
    `elapsed_s(later)` returns seconds, and raises TypeError for an event that is no StreamEvent.
    """

    def __init__(self, event: Any) -> None:
        self._event = event

    def elapsed_s(self, later: Event) -> float:
        """Return the seconds on the device from this stream event to a later one; both must have
        happened. Raises TypeError for an event that is not a StreamEvent.
        """
        if not isinstance(later, StreamEvent):
            raise TypeError(DIFFERENT_CLOCKS)
        time_ms: float = self._event.elapsed_time(later._event)
        return time_ms / 1000


def get_clock_name(event: Event) -> ClockName:
    """Return whose clock an event is on: "host" for a HostEvent, "reported" for a ReportedEvent
    (times that an external program reported), "device" for any other.
    """
    return (
        "host"
        if isinstance(event, HostEvent)
        else "reported"
        if isinstance(event, ReportedEvent)
        else "device"
    )
