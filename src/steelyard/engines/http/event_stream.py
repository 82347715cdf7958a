"""Parse a stream of server-sent events as it arrives, within fixed limits of memory.

A stream is lines of `field: value`; an empty line ends an event. Servers of OpenAI's interface send
one JSON object in each event's `data`, and `[DONE]` at the end.
"""

from dataclasses import dataclass

from steelyard.data.request_outcomes import Outcome

FIELDS = (b"data", b"event", b"id", b"retry")
# Of a wrong line: more than is kept, because the client takes out the key before it shortens texts.
MAX_SHOWN_BYTES = 4 << 10


class StreamError(Exception):
    """Raised if a stream cannot be an answer; `outcome` is the outcome of its request."""

    def __init__(self, outcome: Outcome, text: str) -> None:
        super().__init__(text)
        self.outcome: Outcome = outcome


@dataclass(frozen=True)
class StreamLimits:
    """The most bytes of a line, and of a whole stream."""

    line_bytes: int
    stream_bytes: int


class EventStream:
    """Splits a stream of server-sent events into their data: `feed` takes bytes as they arrive and
    returns the data of the events that they complete. It keeps one unfinished event at most, and
    raises StreamError with outcome `flooded` beyond the limits, `garbage` for a line that is none.
    """

    def __init__(self, limits: StreamLimits) -> None:
        self._limits = limits
        self._rest = bytearray()  # of a line whose end has not arrived
        self._data: list[bytes] = []  # of the event whose end has not arrived
        self._bytes = self._event_bytes = 0

    def feed(self, received: bytes) -> list[bytes]:
        """Return the data of each event that ends in these bytes, in order. Raises StreamError."""
        self._bytes += len(received)
        if self._bytes > self._limits.stream_bytes:
            raise StreamError("flooded", f"more than {self._limits.stream_bytes:,} bytes")
        if b"\r" in received:
            received = received.replace(b"\r\n", b"\n").replace(b"\r", b"")
        *lines, rest = received.split(b"\n")
        events: list[bytes] = []
        if lines:
            lines[0] = bytes(self._rest) + lines[0]
            self._rest.clear()
        for line in lines:
            self._add_line(line, events)
        self._rest += rest
        self._check_length(len(self._rest) + self._event_bytes)
        return events

    def finish(self) -> list[bytes]:
        """Return the data of an event that the end of the stream completes, as a list of one or
        none. Raises StreamError.
        """
        events: list[bytes] = []
        self._add_line(bytes(self._rest), events)
        self._rest.clear()
        self._add_line(b"", events)
        return events

    def _check_length(self, length: int) -> None:
        """Raise StreamError if a line, or an event of several, is longer than allowed."""
        if length > self._limits.line_bytes:
            raise StreamError("flooded", f"an event of more than {self._limits.line_bytes:,} bytes")

    def _add_line(self, line: bytes, events: list[bytes]) -> None:
        """Add a line to the current event; an empty one ends it, and adds its data to `events`."""
        if not line:
            if self._data:
                events.append(b"\n".join(self._data))
            self._data, self._event_bytes = [], 0
            return
        if line[0] == 0x3A:  # a colon begins a comment
            return
        name, _, value = line.partition(b":")
        if name not in FIELDS:
            shown = line[:MAX_SHOWN_BYTES].decode("utf-8", "replace")
            raise StreamError("garbage", f"not a line of a stream of events: {shown!r}")
        if name == b"data":
            self._event_bytes += len(line)
            self._check_length(self._event_bytes)
            self._data.append(value.removeprefix(b" "))
