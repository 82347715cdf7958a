"""The parent's end of the pipes to one node agent.

The session (run/session.py) opens one `Connection` per host; the messages are those of
run/messages.py.
"""

import contextlib
import queue
import subprocess
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

from steelyard.run import messages
from steelyard.run.clock import HostClock, PingReading, now
from steelyard.run.messages import (
    HEARTBEAT_S,
    TO_PARENT,
    ByeMessage,
    HelloMessage,
    MessageError,
    PingMessage,
    PongMessage,
    ProtocolMessage,
    ReachedMessage,
    UnknownMessageError,
)

TAIL_LINES = 40
LINE_BYTES = 4000
ENDING_S = 2.0

Inbox = queue.SimpleQueue[tuple["Connection", Any]]


class Connection:
    """A host of the run, through the process that leads to its node agent (the agent itself, ssh or
    srun), which is started here.

    A thread puts each message of the agent, as (connection, message), into `inbox`, and
    (connection, None) when its output ends. `mark` is the text by which all processes that the
    agent starts can be found again. `hello`, `reached`, `bye`, `pongs` and `disconnected` are set
    by the session when it takes a message from the inbox.
    """

    def __init__(self, name: str, command: list[str], token: str, mark: str, inbox: Inbox) -> None:
        """Start `command` with pipes, in a session of its own, and two threads that read its stdout
        and stderr; raises OSError or RuntimeError if that fails.
        """
        self.name, self.token, self.mark = name, token, mark
        self.clock = HostClock()
        self.hello: HelloMessage | None = None
        self.reached: ReachedMessage | None = None
        self.bye: ByeMessage | None = None
        self.pings = self.pongs = 0
        self.disconnected = False
        self.heard_s = self._pinged_s = now()
        self._inbox = inbox
        self._output_lines: deque[bytes] = deque(maxlen=TAIL_LINES)
        # In its own session, Ctrl-C on the terminal reaches only the parent, which then ends the
        # agent in order.
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._threads = [
            threading.Thread(target=target, daemon=True)
            for target in (self._read_messages, self._read_stderr)
        ]
        for thread in self._threads:
            thread.start()

    def _read_messages(self) -> None:
        """Read messages from the agent's stdout until it ends, add the clock reading of each pong,
        and put the messages into the inbox, None last.

        Lines that are no message of this run, such as the output of a login shell, are kept for
        `read_output`; a message of another version ends the reading.
        """
        stream = self.process.stdout
        while stream is not None and (line := stream.readline(messages.MAX_LINE_BYTES + 1)):
            try:
                message = messages.decode_message(line, TO_PARENT, self.token)
            except UnknownMessageError as error:
                self._output_lines.append(str(error).encode())
                break  # later messages would not be understood either
            except MessageError:
                self._output_lines.append(line[:LINE_BYTES])  # such as output of a login shell
                continue
            if isinstance(message, PongMessage):
                self.clock.add(PingReading(message.sent_s, now(), message.at_s))
            self.heard_s = now()
            self._inbox.put((self, message))
        self._inbox.put((self, None))

    def _read_stderr(self) -> None:
        """Keep the last `TAIL_LINES` lines that arrive on stderr."""
        stream = self.process.stderr
        while stream is not None and (line := stream.readline(LINE_BYTES)):
            self._output_lines.append(line)

    def read_output(self) -> str:
        """Return what was printed besides messages, by ssh, srun, a login shell or a failing agent:
        at most the last `TAIL_LINES` lines. Waits up to 2 s for a process that has ended.
        """
        # after the process has ended, all its output can be read
        self._threads[1].join(2.0 if self.process.poll() is not None else 0.2)
        return b"".join(tuple(self._output_lines)).decode("utf-8", "replace").strip()

    def send(self, message: ProtocolMessage) -> None:
        """Write a message to the agent; an agent that is gone is ignored here, because the end of
        its output shows it.
        """
        if self.process.stdin is None:
            return
        # the end of its output shows that the agent is gone
        with contextlib.suppress(OSError, ValueError):
            self.process.stdin.write(messages.encode_message(message))
            self.process.stdin.flush()

    def ping(self, immediately: bool = False) -> None:
        """Send a ping if `HEARTBEAT_S` seconds have passed since the last one, or in any case with
        `immediately`.
        """
        if immediately or now() - self._pinged_s >= HEARTBEAT_S:
            self._pinged_s = now()
            self.pings += 1
            self.send(PingMessage(token=self.token, sent_s=self._pinged_s))

    def wait_for_exit_code(self) -> int | None:
        """Wait up to `ENDING_S` seconds for the process to end and return its exit code, or None if
        it still runs.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(ENDING_S)
        return None

    def close_stdin(self) -> None:
        """Close the agent's stdin: an agent that lives sees it and ends by itself."""
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()

    def wait_and_close_streams(self) -> None:
        """Wait for the process to end, without a limit, and close its streams unless a thread still
        reads them.
        """
        self.process.wait()
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None and not any(thread.is_alive() for thread in self._threads):
                stream.close()


def close_connections(connections: Sequence[Connection]) -> None:
    """End the processes of all connections: close their stdin, then send SIGTERM and SIGKILL to
    those that do not end within `ENDING_S` seconds each.

    They are waited for together, so that many lost hosts take as long as one.
    """
    for connection in connections:
        connection.close_stdin()
    for send_signal in (subprocess.Popen.terminate, subprocess.Popen.kill):
        end_s = now() + ENDING_S
        for connection in connections:
            with contextlib.suppress(subprocess.TimeoutExpired):
                connection.process.wait(max(0.0, end_s - now()))
        for connection in connections:
            if connection.process.poll() is None:
                send_signal(connection.process)
    for connection in connections:
        connection.wait_and_close_streams()
