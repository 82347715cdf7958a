"""Runs an external program as a child process: its output line by line, and an orderly end if
possible.
"""

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import suppress

from steelyard.engine.child_program import end_with_descendants, wait_for_exit
from steelyard.engines.flagscale.command import ProgramCommand
from steelyard.engines.flagscale.log_lines import ProgramError

LINE_BYTES = 64 << 10
GRACE_S = 10.0  # for a launcher to end its ranks
EXIT_S = 60.0  # for ranks to take down what they set up, after the last iteration
# the last such line is shown: a launcher prints much after it
ERROR_LINE = re.compile(r"\w(?:Error|Exception): \S")
MAX_ERROR_CHARS = 500
OUT_OF_MEMORY_TEXTS = ("OutOfMemoryError", "out of memory")


class ExternalProgram:
    """A child process, started on construction from a `ProgramCommand`, with stderr joined to
    stdout and no stdin. `lines()` yields its output and copies it to this process's stderr;
    `finish()` waits up to 60 s for its exit and returns the exit code, or None; `end()` ends it
    with all its descendants; `explain_early_end(moment)` returns the exception (ProgramError or
    MemoryError) if it ended too soon. If this process dies, the node agent ends the program.
    """

    def __init__(self, command: ProgramCommand) -> None:
        # It carries the run's mark in its environment, and is a child: whatever becomes of this
        # process, the agent finds it.
        self._process = subprocess.Popen(
            command.arguments,
            cwd=command.folder,
            env=command.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self._out_of_memory = False
        self._last_line = self._error_line = ""

    def lines(self) -> Iterator[str]:
        """Yield the program's output lines (stdout and stderr) as they arrive, without newline, bad
        UTF-8 replaced, until it closes its output; a line of more than 64 KiB comes in pieces. Each
        is also written to this process's stderr, the end of which a record keeps of a failure.
        Remembers the last line, the last that names an error, and whether memory ran out, for
        `explain_early_end`, which does not know lines that were not read here.
        """
        out = self._process.stdout
        while out is not None and (raw := out.readline(LINE_BYTES)):
            self._forward_line(raw)
            yield raw.decode("utf-8", "replace").rstrip("\n")

    def _forward_line(self, raw: bytes) -> None:
        """Copy an output line to this process's stderr, and remember the last line that is not
        empty, the last that names an error (`...Error: ...`), and whether one reports that memory
        ran out.
        """
        os.write(2, raw)
        text = raw.decode("utf-8", "replace").strip()
        self._out_of_memory = self._out_of_memory or any(
            word in text for word in OUT_OF_MEMORY_TEXTS
        )
        self._last_line = text or self._last_line
        self._error_line = text if ERROR_LINE.search(text) else self._error_line

    def explain_early_end(self, moment: str) -> Exception:
        """Wait up to 10 s for the program to exit, end what is left of it, and return, without
        raising it, the exception for a program that ended before its work was done: MemoryError if
        it reported that memory ran out, else ProgramError; the text has its exit code and last
        error line, or last line. `moment` is a phrase for the text, such as "after 3 of 20
        iterations".
        """
        code = wait_for_exit(self._process, GRACE_S)
        self.end()
        text = (
            f"the program ended with exit code {code} {moment}; it said:"
            f" {(self._error_line or self._last_line)[:MAX_ERROR_CHARS]}"
        )
        return MemoryError(text) if self._out_of_memory else ProgramError(text)

    def finish(self) -> int | None:
        """Wait up to 60 s for the program to exit by itself, dropping its remaining output, and
        return its exit code. If it does not, end it and return None.
        """
        with suppress(subprocess.TimeoutExpired):
            self._process.communicate(timeout=EXIT_S)
            return self._process.returncode
        self.end()
        return None

    def end(self) -> None:
        """End the program and all processes it started: SIGTERM, so that a launcher can end its
        ranks, then SIGKILL after 10 s; descendants that remain are killed. Harmless if it has
        exited.
        """
        end_with_descendants(self._process, GRACE_S)
