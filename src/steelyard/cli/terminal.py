"""stdin, stdout and stderr as a command finds them: closed, full, broken, or a terminal that is stopped. None of it may end a
run, hold it up, or change how it ends: its record is on disk."""

import codecs
import io
import json
import os
import queue
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

BACKLOG = 2000  # pieces that wait for a terminal that takes none; what comes after is dropped
LAST_S = 1.0  # for the last of them
COLUMNS = 80  # where nothing says how wide a line may be
NARROWEST = 40


class Stderr(io.TextIOBase):
    """Written from a thread of its own: whoever says something never waits, and never fails."""

    def __init__(self, fd: int, encoding: str) -> None:
        super().__init__()
        self._fd, self._encoding = fd, encoding
        self._pieces: queue.SimpleQueue[bytes | threading.Event] = queue.SimpleQueue()
        self._gone = False
        threading.Thread(target=self._write, daemon=True).start()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if not self._gone and self._pieces.qsize() < BACKLOG:
            self._pieces.put(text.encode(self._encoding, "backslashreplace"))
        return len(text)

    def finish(self, within_s: float = LAST_S) -> None:
        """Wait until what was said is out; not for ever."""
        out = threading.Event()
        self._pieces.put(out)
        out.wait(within_s)

    def _write(self) -> None:
        while True:
            piece = self._pieces.get()
            if isinstance(piece, threading.Event):
                piece.set()
                continue
            try:
                while piece and not self._gone:
                    piece = piece[os.write(self._fd, piece) :]
            except OSError:
                self._gone = True


def columns(wide: bool = False) -> int | None:
    """How wide lines on stdout may be: as the terminal is, or as COLUMNS says. None: as wide as they like."""
    if wide:
        return None
    told = os.environ.get("COLUMNS", "")
    if told.isascii() and told.isdigit() and int(told) > 0:
        return max(NARROWEST, int(told))
    if not is_terminal(sys.stdout):
        return COLUMNS
    return max(NARROWEST, os.get_terminal_size(sys.stdout.fileno()).columns or COLUMNS)


def is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and not stream.closed and stream.isatty()


def coloured(stream: TextIO | None) -> bool:
    """Only on a terminal that can, and unless NO_COLOR is set (no-color.org)."""
    return is_terminal(stream) and not os.environ.get("NO_COLOR") and not dumb()


def dumb() -> bool:
    """Whether the terminal takes lines and nothing else."""
    return os.environ.get("TERM", "") in ("dumb", "unknown")


@contextmanager
def settled() -> Iterator[None]:
    """The three are what the rest takes them for. What is closed would otherwise be the number of the next file opened."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_WRONLY if fd == 2 else os.O_RDONLY)  # to write to stdout fails, as it should
    codecs.register_error("steelyard", _spelled)
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="steelyard")
    if sys.stderr is not sys.__stderr__:
        yield  # somebody listens already
        return
    sys.stderr = stderr = Stderr(2, getattr(sys.__stderr__, "encoding", None) or "utf-8")
    try:
        yield
    finally:
        stderr.finish()


def _spelled(error: UnicodeError) -> tuple[str, int]:
    """A character that the terminal's encoding lacks, as JSON spells it: JSON stays JSON."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end
