"""A program as a child process: its output line by line, and an orderly end where that is possible."""

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
        """What it says, a line as soon as it is there. All goes to stderr too, whose end a record
        keeps of a failure.
        """
        out = self._process.stdout
        while out is not None and (raw := out.readline(LINE_BYTES)):
            self._forward(raw)
            yield raw.decode("utf-8", "replace").rstrip("\n")

    def _forward(self, raw: bytes) -> None:
        os.write(2, raw)
        text = raw.decode("utf-8", "replace").strip()
        self._starved = self._starved or any(word in text for word in STARVED)
        self._last = text or self._last
        self._error = text if ERROR.search(text) else self._error

    def gone(self, where: str) -> Exception:
        """It said its last word before its work was done."""
        code = self._wait(GRACE_S)
        self.end()
        text = (
            f"the program ended with exit code {code} {where}; it said:"
            f" {(self._error or self._last)[:SAID_CHARS]}"
        )
        return MemoryError(text) if self._starved else ProgramError(text)

    def finish(self) -> int | None:
        """After its last iteration: let it end by itself. Returns its exit code; None where it had
        to be ended.
        """
        with suppress(subprocess.TimeoutExpired):
            self._process.communicate(timeout=LAST_S)
            return self._process.returncode
        self.end()
        return None

    def end(self) -> None:
        """End it and all it started: first kindly, for a launcher ends its ranks itself."""
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
        try:
            return self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            return None
