"""Runs an external program as a child process: its output line by line, and an orderly end if
possible.
"""

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import suppress

import psutil

from steelyard.engines.flagscale.command import Command
from steelyard.engines.flagscale.lines import ProgramError

LINE_BYTES = 64 << 10
GRACE_S = 10.0  # for a launcher to end its ranks
LAST_S = 60.0  # for ranks to take down what they set up, after the last iteration
# the last one is shown: a launcher says much after it
ERROR = re.compile(r"\w(?:Error|Exception): \S")
SAID_CHARS = 500
STARVED = ("OutOfMemoryError", "out of memory")


class Program:
    """A child process, started on construction, with stderr joined to stdout."""

    def __init__(self, command: Command) -> None:
        # It carries the run's mark in its environment, and is a child: whatever becomes of this
        # process, the agent finds it.
        self._process = subprocess.Popen(
            command.words,
            cwd=command.folder,
            env=command.variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self._starved = False
        self._last = self._error = ""

    def lines(self) -> Iterator[str]:
        """Yield the program's output lines as they arrive, until it closes its output. Each is also
        written to this process's stderr, the end of which a record keeps of a failure.
        """
        out = self._process.stdout
        while out is not None and (raw := out.readline(LINE_BYTES)):
            self._forward(raw)
            yield raw.decode("utf-8", "replace").rstrip("\n")

    def _forward(self, raw: bytes) -> None:
        """Copy a line to stderr, and remember the last line, the last error line, and whether one
        reports that memory ran out.
        """
        os.write(2, raw)
        text = raw.decode("utf-8", "replace").strip()
        self._starved = self._starved or any(word in text for word in STARVED)
        self._last = text or self._last
        self._error = text if ERROR.search(text) else self._error

    def gone(self, where: str) -> Exception:
        """Return, without raising it, the exception for a program that ended before its work was
        done, after ending what is left of it. MemoryError if it reported that memory ran out, else
        ProgramError with its exit code and last error line. `moment` is a phrase for the text, such
        as "after 3 of 20 iterations".
        """
        code = self._wait(GRACE_S)
        self.end()
        text = (
            f"the program ended with exit code {code} {where}; it said:"
            f" {(self._error or self._last)[:SAID_CHARS]}"
        )
        return MemoryError(text) if self._starved else ProgramError(text)

    def finish(self) -> int | None:
        """Wait up to 60 s for the program to exit by itself, and return its exit code. If it does
        not, end it and return None.
        """
        with suppress(subprocess.TimeoutExpired):
            self._process.communicate(timeout=LAST_S)
            return self._process.returncode
        self.end()
        return None

    def end(self) -> None:
        """End the program and all processes it started: SIGTERM, so that a launcher can end its
        ranks, then SIGKILL after 10 s; remaining descendants are killed.
        """
        below: list[psutil.Process] = []
        with suppress(psutil.NoSuchProcess):
            below = psutil.Process(self._process.pid).children(recursive=True)
        self._process.terminate()
        if self._wait(GRACE_S) is None:
            self._process.kill()
            self._process.wait()
        for one in below:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        psutil.wait_procs(below, GRACE_S)

    def _wait(self, within_s: float) -> int | None:
        """Return the exit code if the program exits within so many seconds, else None."""
        try:
            return self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            return None
