"""The parent's end of the pipes to one node agent."""

import contextlib
import queue
import subprocess
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

from steelyard.run import messages
from steelyard.run.clock import HostClock, Reading, now
from steelyard.run.messages import (
    HEARTBEAT_S,
    TO_PARENT,
    Bye,
    Hello,
    Message,
    MessageError,
    Ping,
    Pong,
    Reached,
    UnknownError,
)

TAIL_LINES = 40
LINE_BYTES = 4000
ENDING_S = 2.0

Inbox = queue.SimpleQueue[tuple["Connection", Any]]


class Connection:
    """A host, by the process that leads to its agent. What it says is put into the inbox; None
    after its last word. `mark` is what all that the agent starts is found by."""

    def __init__(self, name: str, command: list[str], token: str, mark: str, inbox: Inbox) -> None:
        self.name, self.token, self.mark = name, token, mark
        self.clock = HostClock()
        self.hello: Hello | None = None
        self.reached: Reached | None = None
        self.bye: Bye | None = None
        self.pings = self.pongs = 0
        self.closed = False
        self.heard_s = self._pinged_s = now()
        self._inbox = inbox
        self._said: deque[bytes] = deque(maxlen=TAIL_LINES)
        # A session of its own: Ctrl-C on a terminal is for the parent, which ends the agent in
        # order.
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._threads = [
            threading.Thread(target=target, daemon=True)
            for target in (self._listen, self._overhear)
        ]
        for one in self._threads:
            one.start()

    def _listen(self) -> None:
        stream = self.process.stdout
        while stream is not None and (line := stream.readline(messages.MAX_LINE_BYTES + 1)):
            try:
                message = messages.decode(line, TO_PARENT, self.token)
            except UnknownError as error:
                self._said.append(str(error).encode())
                break  # and no more of what follows it would be understood
            except MessageError:
                self._said.append(line[:LINE_BYTES])  # what a login shell prints, or a stranger
                continue
            if isinstance(message, Pong):
                self.clock.add(Reading(message.sent_s, now(), message.at_s))
            self.heard_s = now()
            self._inbox.put((self, message))
        self._inbox.put((self, None))

    def _overhear(self) -> None:
        stream = self.process.stderr
        while stream is not None and (line := stream.readline(LINE_BYTES)):
            self._said.append(line)

    def said(self) -> str:
        """What came beside messages: from ssh, srun, a login shell, or an agent that broke."""
        # what has ended has said all, once it is read
        self._threads[1].join(2.0 if self.process.poll() is not None else 0.2)
        return b"".join(tuple(self._said)).decode("utf-8", "replace").strip()

    def send(self, message: Message) -> None:
        if self.process.stdin is None:
            return
        # whoever is gone, or closed, is heard to be gone
        with contextlib.suppress(OSError, ValueError):
            self.process.stdin.write(messages.encode(message))
            self.process.stdin.flush()

    def ping(self, at_once: bool = False) -> None:
        """The heartbeat, where it is due."""
        if at_once or now() - self._pinged_s >= HEARTBEAT_S:
            self._pinged_s = now()
            self.pings += 1
            self.send(Ping(token=self.token, sent_s=self._pinged_s))

    def exit_code(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(ENDING_S)
        return None

    def close_stdin(self) -> None:
        """Close the agent's stdin: an agent that lives sees it and ends by itself."""
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()

    def close(self) -> None:
        """Wait for the process to end, and close its streams unless a thread still reads them."""
        self.process.wait()
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None and not any(one.is_alive() for one in self._threads):
                stream.close()


def close(connections: Sequence[Connection]) -> None:
    """Close stdin of all agents, then send SIGTERM and SIGKILL to those that do not end. They are
    waited for together: many lost hosts take as long as one."""
    for one in connections:
        one.close_stdin()
    for end in (subprocess.Popen.terminate, subprocess.Popen.kill):
        end_s = now() + ENDING_S
        for one in connections:
            with contextlib.suppress(subprocess.TimeoutExpired):
                one.process.wait(max(0.0, end_s - now()))
        for one in connections:
            if one.process.poll() is None:
                end(one.process)
    for one in connections:
        one.close()
