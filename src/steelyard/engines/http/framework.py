"""The framework of engines whose work is done by a server: this process drives no device, and all
times are those of the host's clock.
"""

from steelyard.accelerators.events import Clock, HostEvent
from steelyard.engine.deviceless_framework import DevicelessFramework


class HostFramework(DevicelessFramework):
    """The framework `host` for engines that send requests to a server, in one process (a
    `Framework`): `event()` is a reading of the clock. `device` is None; what is known of the
    server's devices is what the node agent samples.
    """

    def __init__(self, device: str | None, local_rank: int, clock: Clock) -> None:
        self.device = None
        self._clock = clock

    def event(self) -> HostEvent:
        """Return an event at the present time of the host's clock."""
        return HostEvent(self._clock)
