"""Read lines from the pipes of other processes in a thread, and note when each line came.

The node agent (run/ranks.py) watches its workers' pipes with it: its own clock then times what a
worker reports, whatever the worker's clock shows.
"""

import os
import queue
import selectors
from collections.abc import Callable
from dataclasses import dataclass
from threading import Event, Thread

from steelyard.accelerators.events import Clock
from steelyard.run.clock import now

# Between two looks at all pipes: it bounds how long a line can lie unread. Twenty looks a second
# take 0.1 % of a core.
LOOK_S = 0.05
READ_BYTES = 1 << 16
MAX_LINE_BYTES = 1 << 20  # a longer line closes its pipe


@dataclass(frozen=True)
class SeenLine:
    """A line that came through a watched pipe: its `source`, the bytes of the `line` without the
    line feed (None: the pipe ended), `seen_s`, when it was found on the watcher's clock, and
    `within_s`, the most seconds before that at which it can have been written.
    """

    source: int
    line: bytes | None
    seen_s: float
    within_s: float


@dataclass
class _WatchedPipe:
    """A pipe that is watched: the `source` its lines are from, the `fd` of its reading end, when it
    was last known to be empty (`empty_s`), and the bytes of a line that has not ended (`rest`).
    """

    source: int
    fd: int
    empty_s: float
    rest: bytes = b""


class PipeWatcher:
    """Watches the reading ends of pipes in one thread, which `start` starts: `add` adds one, `take`
    returns what came since the last call, and `stop` ends the thread and closes all pipes.

    `on_line` is called in the thread after something came. A line that is longer than
    `MAX_LINE_BYTES` counts as the end of its pipe.
    """

    def __init__(self, on_line: Callable[[], None], clock: Clock = now) -> None:
        """Watch nothing yet; `clock` is read when something came."""
        self._on_line, self._clock = on_line, clock
        self._added: queue.SimpleQueue[_WatchedPipe] = queue.SimpleQueue()
        self._lines: queue.SimpleQueue[SeenLine] = queue.SimpleQueue()
        self._selector = selectors.DefaultSelector()
        self._stopped = Event()
        self._thread = Thread(target=self._watch, name="pipes", daemon=True)

    def start(self) -> None:
        """Start the thread. Raises RuntimeError if it cannot start."""
        self._thread.start()

    def add(self, source: int, fd: int) -> None:
        """Watch the pipe with the reading end `fd`, which is closed when it ends; its lines have
        this `source`.
        """
        os.set_blocking(fd, False)
        self._added.put(_WatchedPipe(source, fd, self._clock()))

    def take(self) -> list[SeenLine]:
        """Return the lines and ends of pipes that were seen since the last call, oldest first."""
        lines = []
        while not self._lines.empty():
            lines.append(self._lines.get())
        return lines

    def stop(self) -> None:
        """End the thread, which takes up to `LOOK_S` seconds, and close all pipes."""
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        """Look at all pipes until `stop`, then close them; runs in the thread."""
        while not self._stopped.is_set():
            self.look()
        for key in list(self._selector.get_map().values()):
            self._close(key.data)
        self._selector.close()

    def look(self) -> None:
        """Look at all pipes once, and wait up to `LOOK_S` seconds for a line if they are empty.

        The first look does not wait: what then comes through a pipe that was empty is at most as
        old as that look.
        """
        while not self._added.empty():
            pipe = self._added.get()
            self._selector.register(pipe.fd, selectors.EVENT_READ, pipe)
        look_s = self._clock()
        ready = self._selector.select(0)
        found = {key.fd for key, _ in ready}
        for key in self._selector.get_map().values():
            if key.fd not in found:
                key.data.empty_s = look_s
        if not ready and self._selector.get_map():
            ready = self._selector.select(LOOK_S)
        elif not ready:
            self._stopped.wait(LOOK_S)
        self._read_pipes(ready)

    def _read_pipes(self, ready: list[tuple[selectors.SelectorKey, int]]) -> None:
        """Read what the `ready` pipes have, and put their lines, and the end of those that ended,
        into the queue; calls `on_line` once if there were any.
        """
        seen_s = self._clock()
        for key, _ in ready:
            pipe: _WatchedPipe = key.data
            chunk = os.read(pipe.fd, READ_BYTES)
            *lines, pipe.rest = (pipe.rest + chunk).split(b"\n")
            within_s = seen_s - pipe.empty_s
            for line in lines:
                self._lines.put(SeenLine(pipe.source, line, seen_s, within_s))
            if not chunk or len(pipe.rest) > MAX_LINE_BYTES:
                self._lines.put(SeenLine(pipe.source, None, seen_s, within_s))
                self._close(pipe)
        if ready:
            self._on_line()

    def _close(self, pipe: _WatchedPipe) -> None:
        """Stop watching a pipe, and close it."""
        self._selector.unregister(pipe.fd)
        os.close(pipe.fd)
