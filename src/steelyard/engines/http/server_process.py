"""Start a server as a child process on loopback, wait until it is ready, and end it with all its
children.

It has a process group of its own and carries the run's mark in its environment, so that the node
agent finds and ends it, whatever becomes of this process.
"""

import os
import socket
import subprocess
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from steelyard.engine.child_program import (
    end_with_descendants,
    kill_with_parent,
    wait_for_exit,
)
from steelyard.engine.server_rows import ServerRow
from steelyard.engines.http.client import HttpClient
from steelyard.engines.http.servers import LOOPBACK
from steelyard.errors import RequestError

TAIL_BYTES = 16 << 10
GRACE_S = 10.0
POLL_S = 0.25
MAX_ERROR_CHARS = 500
OUT_OF_MEMORY_TEXTS = ("OutOfMemoryError", "out of memory", "MemoryError")


class ServerError(Exception):
    """Raised if a server that was started here ends, or does not become ready."""


class ServerProcess:
    """A server that was started here; `wait_until_ready` waits for its health, `end` ends it with
    all its children, `exit_code` is None while it runs. The end of its output is kept, and written
    to this process's stderr when it fails.
    """

    def __init__(
        self,
        row: ServerRow,
        python: str,
        arguments: Sequence[str],
        hidden_variables: Sequence[str] = (),
    ) -> None:
        """Start the server's module in a Python, without these variables of the environment. Raises
        RequestError if that Python cannot be started.
        """
        variables = {k: v for k, v in os.environ.items() if k not in hidden_variables}
        self._row = row
        try:
            self._process = subprocess.Popen(
                [python, "-P", "-m", row.module, *arguments],
                env=variables | dict(row.variables),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                process_group=0,
                preexec_fn=kill_with_parent,  # it only makes a system call
            )
        except OSError as error:
            raise RequestError(
                f"engine.python {python!r} cannot be started: {error.strerror}"
            ) from error
        self._tail: deque[bytes] = deque()
        self._reader = threading.Thread(target=self._read_output, daemon=True)
        self._reader.start()

    def _read_output(self) -> None:
        """Keep the last `TAIL_BYTES` of the server's output, until it ends. Runs in a thread."""
        out, size = self._process.stdout, 0
        while out is not None and (piece := os.read(out.fileno(), 1 << 14)):
            self._tail.append(piece)
            size += len(piece)
            while size - len(self._tail[0]) >= TAIL_BYTES:
                size -= len(self._tail.popleft())

    @property
    def exit_code(self) -> int | None:
        """The exit code of the server; None while it runs."""
        return self._process.poll()

    def wait_until_ready(self, client: HttpClient, limit_s: float) -> None:
        """Wait until the server's health page answers with status 200. Raises ServerError, or
        MemoryError if it reports that memory ran out, as soon as it has ended, or after `limit_s`
        seconds.
        """
        address = f"{client.endpoint.removesuffix('/v1')}{self._row.health_path}"
        end_s = client.loop.time() + limit_s
        while client.loop.time() < end_s:
            if wait_for_exit(self._process, POLL_S) is not None:
                raise self._explain_end("before it was ready")
            answer = client.get(address, timeout_s=5.0)
            if answer is not None and answer[0] == 200:
                return
        raise self._explain_end(f"not ready after {limit_s:g} s")

    def check_running(self, moment: str) -> None:
        """Raise ServerError, or MemoryError if it reports that memory ran out, if the server has
        ended; `moment` is a phrase for the text.
        """
        if self.exit_code is not None:
            raise self._explain_end(moment)

    def read_last_error(self) -> str:
        """Write the end of the server's output to stderr, and return its last line that names an
        error, or else its last line.
        """
        tail = self._read_tail()
        os.write(2, tail.encode())
        lines = [line.strip() for line in tail.splitlines() if line.strip()]
        named = [line for line in lines if "Error" in line]
        return (named or lines or ["nothing"])[-1][:MAX_ERROR_CHARS]

    def _read_tail(self) -> str:
        """Return the end of the server's output."""
        self._reader.join(0.5)
        return b"".join(tuple(self._tail))[-TAIL_BYTES:].decode("utf-8", "replace")

    def _explain_end(self, moment: str) -> Exception:
        """Write the end of the server's output to stderr, end what is left of it, and return the
        exception that says what became of it.
        """
        said, tail, code = self.read_last_error(), self._read_tail(), self.exit_code
        self.end()
        state = "still runs" if code is None else f"ended with exit code {code}"
        text = f"the server {self._row.name} {state} {moment}; it said: {said}"
        is_memory = any(word in tail for word in OUT_OF_MEMORY_TEXTS)
        return MemoryError(text) if is_memory else ServerError(text)

    def end(self) -> None:
        """End the server and all processes it started; harmless if it has ended."""
        end_with_descendants(self._process, GRACE_S)


def find_free_port() -> int:
    """Return a loopback TCP port that is free now; it is not held."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind((LOOPBACK, 0))
        port: int = listener.getsockname()[1]
        return port


def read_package_version(python: str, package: str) -> str | None:
    """Return the version of a package in a Python, None if it is not known there."""
    program = "import importlib.metadata as m, sys; sys.stdout.write(m.version(sys.argv[1]))"
    try:
        done = subprocess.run(
            [python, "-P", "-c", program, package],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip()[:100] or None if done.returncode == 0 else None


def hide_paths(value: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return a table with the name of a folder in place of its path."""
    return {
        name: text.replace(str(folder), folder.name) if isinstance(text, str) else text
        for name, text in value.items()
    }
