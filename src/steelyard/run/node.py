"""The node agent: one process per host, which starts the ranks, samples telemetry and forwards what
ranks leave to the parent.

It ends all its workers when the parent asks for it or is gone, or when a signal ends the agent
itself. It imports no framework. Started by a launcher as `python -P -m steelyard.run.node`; it
exchanges the messages of run/messages.py with the parent over stdin and stdout.
"""

import errno
import os
import queue
import signal
import socket
import sys
import threading
from contextlib import suppress
from typing import Any, BinaryIO

from steelyard import files
from steelyard.errors import MORE_MEMORY_HINT, is_out_of_memory
from steelyard.run import messages, processes
from steelyard.run.clock import now, sleep
from steelyard.run.failure import Failure, format_signal
from steelyard.run.host import Host
from steelyard.run.messages import (
    TO_AGENT,
    ByeMessage,
    MessageError,
    OpenMessage,
    PingMessage,
    PongMessage,
    ProtocolMessage,
    ReachedMessage,
    ReachMessage,
    StartMessage,
    StopMessage,
    SweepMessage,
)
from steelyard.run.ranks import HostRanks

POLL_S = 0.1
OPEN_S = 60.0  # longest wait for the first message
REACH_S = 5.0
ALONE_S = 30.0  # time to end after the parent is gone: twice what it takes
FLUSH_S = 5.0  # for the parent to read the last messages
PARENT_GONE = Failure("parent_gone", "the parent is gone")
WAKE = b""  # put among the parent's lines, of which none is empty, to end a wait for one


class AgentExit(Exception):  # noqa: N818  no error: the way out of the loop
    """Raised to leave the loop of the node agent. `failure` says why the agent ends by itself; it
    is None if all workers ended or the parent asked for it. `with_stacks`: workers write their
    stacks before they are ended.
    """

    def __init__(self, failure: Failure | None = None, with_stacks: bool = False) -> None:
        super().__init__(failure)
        self.failure, self.with_stacks = failure, with_stacks


class MessageSender:
    """Sends the node agent's messages to the parent from a thread of its own: `send` queues one,
    `flush` waits at the end.

    A parent that is suspended, or behind a broken network, reads nothing more once the pipe is
    full, and the agent must not block on it. `is_connected` becomes False when the pipe is broken;
    messages are then lost without an error.
    """

    def __init__(self, out: BinaryIO) -> None:
        """Start the thread that writes queued messages to `out`."""
        self.is_connected = True  # False after a write failed
        self._out = out
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write_lines, daemon=True)
        self._thread.start()

    def send(self, message: ProtocolMessage) -> None:
        """Queue a message for the thread that writes to the parent; never blocks. It is lost if the
        pipe is broken.
        """
        self._lines.put(messages.encode_message(message))

    def _write_lines(self) -> None:
        """Write the queued lines to the parent, flushing each, until None is queued; on a write
        error set `is_connected` to False and end without raising. Runs in the thread.
        """
        try:
            while (line := self._lines.get()) is not None:
                self._out.write(line)
                self._out.flush()
        except OSError:
            self.is_connected = False

    def flush(self, timeout_s: float) -> None:
        """End the sending thread once all queued messages are written, and wait up to `timeout_s`
        seconds for it; returns also if they are not. Messages queued later are never written.
        """
        self._lines.put(None)
        self._thread.join(timeout_s)


class NodeAgent:
    """The node agent of a host: `run` is its loop, which handles the parent's messages, starts the
    ranks of this host, and forwards news of them.

    `lines` is the queue of the parent's lines, None after the last; answers go out by `sender`. The
    agent ends when all workers ended, at `stop` or `sweep`, at SIGTERM, SIGINT or SIGHUP, if memory
    runs out, and if no message comes for `silence_s` seconds of the `open` message (`OPEN_S` before
    it) or the pipe is broken; it ends its workers first.
    """

    def __init__(self, lines: "queue.SimpleQueue[bytes | None]", sender: MessageSender) -> None:
        """Store the queue of the parent's lines and the sender; nothing is read yet."""
        self._lines, self._sender = lines, sender
        self._token: str | None = None
        self._last_message_s = now()
        self._silence_s = OPEN_S
        self._host: Host | None = None
        self._ranks: HostRanks | None = None
        self._signal: int | None = None

    def run(self) -> None:
        """Handle the parent's messages until the agent is to end, then end all workers, send what
        they left and `bye`, wait up to `FLUSH_S` seconds until that is written, and return.

        Installs handlers for SIGTERM, SIGINT and SIGHUP, which end the agent. If memory runs out
        here, `bye` has the failure `out_of_memory`. MessageError (a line that is no message, or
        came at the wrong time) is raised, and then nothing is ended here.
        """
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._remember_signal)
        try:
            while True:
                self._handle_next_message()
                self._forward_news()
        except AgentExit as end:
            self._end_ranks(end.failure, end.with_stacks)
        except MemoryError:
            self._end_ranks(
                Failure("out_of_memory", f"the agent ran out of memory; {MORE_MEMORY_HINT}")
            )
        self._sender.flush(FLUSH_S)

    def _remember_signal(self, number: int, frame: Any) -> None:
        """Store the number of a signal that the agent got, as a signal handler; its loop ends the
        agent for it.
        """
        self._signal = number

    def _handle_next_message(self) -> None:
        """Wait up to `POLL_S` seconds, or until there are news of the workers, for a message of the
        parent and carry it out. Raise AgentExit
        if the parent's lines have ended, the pipe to it is broken, a signal came, or the parent was
        silent too long; MessageError for a line that is no message.
        """
        with suppress(queue.Empty):
            line = self._lines.get(timeout=POLL_S)
            if line is None:
                raise AgentExit(PARENT_GONE)
            if line != WAKE:
                self._handle_message(messages.decode_message(line, TO_AGENT, self._token))
                # read after the message was handled, which may take longer than `silence_s`
                self._last_message_s = now()
        if not self._sender.is_connected:
            raise AgentExit(PARENT_GONE)
        if self._signal is not None:
            raise AgentExit(
                Failure("agent_ended", f"the agent was ended by {format_signal(self._signal)}")
            )
        if now() - self._last_message_s > self._silence_s:
            raise AgentExit(
                Failure("parent_silent", f"no message from the parent for {self._silence_s:g} s")
            )

    def _handle_message(self, message: Any) -> None:
        """Carry out one message of the parent and queue its answer: `open` creates the Host and is
        answered by `hello`, `ping` by `pong`, `reach` by `reached`; `start` starts the ranks.

        `sweep`, instead of `open`, ends what a lost agent left, is answered by `bye`, and raises
        AgentExit, as `stop` does. Raises MessageError for a message that is not expected in this
        state.
        """
        match message:
            case OpenMessage() if self._host is None:
                self._token, self._silence_s = message.token, message.silence_s
                self._host = Host(message)
                self._sender.send(self._host.make_hello())
            case SweepMessage() if self._host is None:
                self._token = message.token
                os.environ.update(message.environment)
                self._sender.send(
                    ByeMessage(
                        token=message.token,
                        exits={},
                        stderr_tails={},
                        ended=processes.sweep_run(message.mark),
                    )
                )
                raise AgentExit
            case PingMessage():
                self._sender.send(
                    PongMessage(token=message.token, sent_s=message.sent_s, at_s=now())
                )
            case ReachMessage():
                self._sender.send(
                    ReachedMessage(token=message.token, problem=_try_connection(message))
                )
            case StartMessage() if self._host is not None and self._ranks is None:
                self._start_ranks(self._host, message)
            case StopMessage():
                raise AgentExit(with_stacks=message.stacks)
            case _:
                raise MessageError(f"unexpected message {message.kind} in this state")

    def _start_ranks(self, host: Host, start: StartMessage) -> None:
        """Start the ranks of this host, keep them in `_ranks`, and queue the messages about it (CPU
        load, `started`); raise AgentExit with the failure `out_of_memory`, `disk_full` or
        `not_started` if the system cannot start them.
        """
        try:
            self._ranks = HostRanks(host, start, lambda: self._lines.put(WAKE))
            for message in self._ranks.start():
                self._sender.send(message)
        # RuntimeError: a thread that cannot be started
        except (OSError, RuntimeError, MemoryError) as error:
            raise AgentExit(_explain_start_error(error)) from error

    def _forward_news(self) -> None:
        """Queue the new progress, readings, rank files and exits of this host's workers for the
        parent; raise AgentExit if all workers have exited. Does nothing before they are started.
        """
        if self._ranks is None:
            return
        for message in self._ranks.read_news():
            self._sender.send(message)
        if self._ranks.is_over:
            raise AgentExit

    def _end_ranks(self, failure: Failure | None, with_stacks: bool = False) -> None:
        """End all workers of this host and queue what they left, last the `bye` message with
        `failure`. Without workers queue only `bye`, and nothing if no `open` came and there is no
        failure, as after a sweep.
        """
        if self._ranks is not None:
            for message in self._ranks.finish(failure, with_stacks):
                self._sender.send(message)
        elif self._token is not None and (self._host is not None or failure is not None):
            self._sender.send(
                ByeMessage(token=self._token, exits={}, stderr_tails={}, failure=failure)
            )


def _explain_start_error(error: OSError | RuntimeError | MemoryError) -> Failure:
    """Return the failure for ranks that could not be started: `out_of_memory` if memory ran out,
    `disk_full` for a full disk, else `not_started`, with the system's text and a hint.
    """
    if is_out_of_memory(error):
        return Failure(
            "out_of_memory",
            f"the ranks could not be started: {os.strerror(errno.ENOMEM)}; {MORE_MEMORY_HINT}",
        )
    why = f"the ranks could not be started: {getattr(error, 'strerror', None) or error}"
    if isinstance(error, OSError) and error.errno in files.DISK_FULL_ERRNOS:
        return Failure("disk_full", f"{why}; set TMPDIR to another folder")
    return Failure("not_started", why)


def _try_connection(message: ReachMessage) -> str | None:
    """Try a TCP connection to address and port of a `reach` message for up to `REACH_S` seconds,
    and close it; return None if it works, else the error's text.
    """
    try:
        socket.create_connection((message.address, message.port), REACH_S).close()
    except OSError as error:
        return str(error)
    return None


def _read_parent_lines(stream: BinaryIO, lines: "queue.SimpleQueue[bytes | None]") -> None:
    """Put all lines of the parent into the queue, then None; then wait 30 s and kill this process
    with exit code 1.

    The kill is for an agent that hangs in a driver or on a disk, would never see that None, and
    would outlive its parent. A line beyond the size limit arrives cut off, and is refused when it
    is decoded.
    """
    while line := stream.readline(messages.MAX_LINE_BYTES + 1):
        lines.put(line)
    lines.put(None)
    sleep(ALONE_S)
    os._exit(1)


def _exit_without_memory(failed: threading.ExceptHookArgs) -> None:
    """Handle an exception that a thread raised (as threading.excepthook): print it to stderr and,
    if it is a MemoryError, exit the process with code 1, because without that thread the agent
    would fall silent without a reason.
    """
    threading.__excepthook__(failed)
    if issubclass(failed.exc_type, MemoryError):
        sys.stderr.flush()
        os._exit(1)


def main() -> None:
    """Run the node agent on stdin and stdout and exit the process: code 0, or 2, with the error on
    stderr, after a line that is no message.

    For everything else, stdout is replaced by stderr, so that what a plug-in prints is not read as
    a message, and stdin by /dev/null. Orphaned descendants become children of this process; SIGCONT
    comes when its parent dies; a thread without memory ends the process.
    """
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a plug-in prints must not be read as a message
    processes.adopt_orphans()
    processes.wake_with_parent()
    threading.excepthook = _exit_without_memory
    lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    threading.Thread(
        target=_read_parent_lines, args=(os.fdopen(os.dup(0), "rb"), lines), daemon=True
    ).start()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    try:
        NodeAgent(lines, MessageSender(out)).run()
    except MessageError as error:
        sys.stderr.write(f"steelyard.run.node: {error}\n")
        sys.stderr.flush()
        os._exit(2)
    os._exit(0)


if __name__ == "__main__":
    main()
