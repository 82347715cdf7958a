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
    """A host of the run as the session sees it, through the `process` that leads to its node agent
    (the agent itself, ssh or srun), which is started on creation. `send` and `ping` write messages;
    `read_output` returns what was printed besides messages; `close_connections` ends it.

    A thread puts each message of the agent, as (connection, message), into the session's inbox, and
    (connection, None) when its output ends; it also sets `heard_s`, the time of the last message,
    and adds the answers to pings to `clock` (`HostClock`). `mark` is the text by which all
    processes that the agent starts can be found again. The session sets `hello`, `reached` and
    `bye` (None before they came), `pongs` and `disconnected` when it takes a message from the
    inbox.
    """

    def __init__(self, name: str, command: list[str], token: str, mark: str, inbox: Inbox) -> None:
        """Start `command`, which leads to the agent on host `name`, with pipes and in a session of
        its own, and two threads that read its stdout and stderr; raises OSError or RuntimeError if
        that fails. `token` is the run's, without which a line is no message; messages go into
        `inbox`. No message is sent.
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
        """Read the agent's messages from its stdout until it ends, set `heard_s` and add the clock
        reading of each pong, and put each message with this connection into the inbox, (connection,
        None) last. Runs in a thread.

        Lines that are no message of this run, such as the output of a login shell, are kept for
        `read_output`; a message of another version is kept as an error text and ends the reading.
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
        """Read stderr of the process that leads to the agent until it ends, and keep its lines for
        `read_output`, of which the last `TAIL_LINES` stay. Runs in a thread.
        """
        stream = self.process.stderr
        while stream is not None and (line := stream.readline(LINE_BYTES)):
            self._output_lines.append(line)

    def read_output(self) -> str:
        """Return as text what was printed besides messages, by ssh, srun, a login shell or a
        failing agent: at most the last `TAIL_LINES` lines, stripped; empty if there are none. Waits
        for the rest of stderr: up to 2 s if the process has ended, else 0.2 s.
        """
        # after the process has ended, all its output can be read
        self._threads[1].join(2.0 if self.process.poll() is not None else 0.2)
        return b"".join(tuple(self._output_lines)).decode("utf-8", "replace").strip()

    def send(self, message: ProtocolMessage) -> None:
        """Write a message to the agent's stdin and flush it, which blocks while the pipe is full;
        errors of an agent that is gone are ignored, because the end of its output shows it.
        """
        if self.process.stdin is None:
            return
        # the end of its output shows that the agent is gone
        with contextlib.suppress(OSError, ValueError):
            self.process.stdin.write(messages.encode_message(message))
            self.process.stdin.flush()

    def ping(self, immediately: bool = False) -> None:
        """Send the agent a ping, and count it in `pings`, if `HEARTBEAT_S` seconds have passed
        since the last one, or in any case with `immediately`. The answer is not waited for.
        """
        if immediately or now() - self._pinged_s >= HEARTBEAT_S:
            self._pinged_s = now()
            self.pings += 1
            self.send(PingMessage(token=self.token, sent_s=self._pinged_s))

    def wait_for_exit_code(self) -> int | None:
        """Wait up to `ENDING_S` seconds for the process that leads to the agent to end, and return
        its exit code (negative: killed by that signal), or None if it still runs.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(ENDING_S)
        return None

    def close_stdin(self) -> None:
        """Close the stdin of the process that leads to the agent, ignoring errors: an agent that
        lives sees it and ends by itself. Nothing is waited for.
        """
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()

    def wait_and_close_streams(self) -> None:
        """Wait for the process that leads to the agent to end, without a limit, and close its
        stdout and stderr unless one of the reading threads is still alive.
        """
        self.process.wait()
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None and not any(thread.is_alive() for thread in self._threads):
                stream.close()


def close_connections(connections: Sequence[Connection]) -> None:
    """End the processes that lead to the agents: close their stdin, send SIGTERM to those that
    still run after `ENDING_S` seconds, and SIGKILL after as long again; then wait for all, and
    close their streams.

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
