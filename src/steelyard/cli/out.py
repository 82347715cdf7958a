"""The only functions that print: answers on stdout, progress and errors on stderr.

A command may find its streams closed, full, broken, or a terminal that is stopped. None of it may
end a run, hold it up, or change how it ends: its record is on disk."""

import codecs
import io
import json
import os
import queue
import re
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from steelyard import __version__
from steelyard.errors import LostError

if TYPE_CHECKING:
    from steelyard.record.record import Record
    from steelyard.record.spec import SpecRecord
    from steelyard.report import Page

BACKLOG = 2000  # pieces that wait for a terminal that takes none; what comes after is dropped
LAST_S = 1.0  # for the last of them
COLUMNS = 80  # where nothing says how wide a line may be
NARROWEST = 40
UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))

# What steers a terminal or changes how the text around it looks: controls but tab and line feed,
# marks without a width, overrides of the direction, line separators, and halves of characters,
# which no encoding has.
_STEERING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f"
    "\ufeff\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)


# Of the words that a line on stderr begins with: the colours of select graphic rendition (ECMA-48).
_COLOURS = {"error": 31, "failed": 31, "invalid": 31, "warning": 33, "valid": 32}


@dataclass(frozen=True)
class Output:
    """How much a command shows, and how."""

    json: bool = False
    quiet: bool = False
    wide: bool = False

    @property
    def silent(self) -> bool:
        """Whether nothing is said while it runs."""
        return self.json or self.quiet


def escaped(text: str) -> str:
    """The text as it may be printed: titles, names of files and errors come from strangers. What is
    escaped is written as JSON writes it, so that JSON stays JSON with the same value."""
    return _STEERING.sub(lambda found: json.dumps(found[0])[1:-1], text)


def answer(text: str) -> None:
    """Print an answer to stdout, without what steers a terminal."""
    verbatim(escaped(text))


def verbatim(text: str) -> None:
    """Print an answer whose bytes matter, such as CSV with its line ends: the caller has taken out
    what steers a terminal. Raise LostError or BrokenPipeError if stdout cannot be written."""
    try:
        sys.stdout.write(text if text.endswith("\n") else text + "\n")
        sys.stdout.flush()
    except OSError as error:
        # What is still in the buffer would fail again, with a traceback, when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise BrokenPipeError("nobody reads stdout") from error
        raise LostError(f"stdout cannot be written: {error.strerror}") from error


def tell(text: str) -> None:
    """An answer that is on disk as well: a run's. Where it cannot be printed, that changes nothing
    else.
    """
    try:
        answer(text)
    except (LostError, BrokenPipeError) as error:
        say(f"warning: {error}; the records are written")


def say(text: str) -> None:
    """A line on stderr; its first word in colour where that is a status and the terminal has
    colours.
    """
    text = escaped(text)
    word, colon, rest = text.partition(":")
    if word in _COLOURS and colon and coloured(sys.stderr):
        text = f"\x1b[{_COLOURS[word]}m{word}\x1b[0m:{rest}"
    sys.stderr.write(f"{text}\n")


def say_status(made: "Record | SpecRecord", path: object) -> None:
    """Print on stderr how a run ended, where its record is, and the reasons."""
    from steelyard import words

    say(f"{made.status}: {path}")
    for reason in made.reasons:
        say(f"  {one_line(f'{reason.code}: {words.text(reason.text)}')}")


def begin(what: str, output: Output) -> None:
    """A sign of life on a terminal before anything that takes time is imported or started."""
    if not output.silent and is_terminal(sys.stderr):
        say(f"steelyard {__version__}: {what} …")


def paged(page: "Page", wide: bool = False) -> str:
    """A page as text that fits the terminal."""
    from steelyard import report

    return report.text(page, columns(wide))


def dump(value: Any, out: Callable[[str], None] = answer) -> None:
    out(json.dumps(value, indent=2, ensure_ascii=False))


def one_line(text: object) -> str:
    """Names and values in a text come from files and command lines, and may hold anything."""
    shown = escaped(" ".join(str(text).split()))
    return "".join(c if c.isprintable() else " " for c in shown)


def described(pairs: Sequence[tuple[str, str]], margin: str = "") -> list[str]:
    """Return lines of names, padded to one width, each with its text beside it, wrapped to the
    terminal. A word that is longer, such as a hash, stays whole; lines that continue one that
    begins with an arrow are indented."""
    indent = len(margin) + max((len(name) for name, _ in pairs), default=0) + 2
    room = max(1, (columns() or COLUMNS) - indent)
    out = []
    for name, text in pairs:
        after = "  " if text.startswith("→") else ""
        wrap = textwrap.TextWrapper(
            room, subsequent_indent=after, break_long_words=False, break_on_hyphens=False
        )
        first, *more = wrap.wrap(one_line(text)) or [""]
        out += [
            f"{margin + name:<{indent}}{first}".rstrip(),
            *(" " * indent + line for line in more),
        ]
    return out


def plain(value: Any) -> str:
    """A value as a reader meets it in a list: what is not known is a slash."""
    return (
        "/"
        if value is None
        else value
        if isinstance(value, str)
        else json.dumps(value, ensure_ascii=False)
    )


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines with columns of one width each."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def sized(files: Sequence[tuple[str, int]]) -> list[str]:
    """Return a line for each file: its name, and its size as a reader takes it in."""
    return aligned([(one_line(name), size(size_bytes)) for name, size_bytes in files])


def size(size_bytes: int) -> str:
    for unit, number in UNITS:
        if size_bytes >= number:
            return f"{size_bytes / number:.2f} {unit}"
    return f"{size_bytes} bytes"


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
    """Return the width of lines on stdout, from the terminal or from COLUMNS; None if it is not
    limited.
    """
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
    """The three are what the rest takes them for. What is closed would otherwise be the number of
    the next file opened.
    """
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            # to write to stdout fails, as it should
            os.open(os.devnull, os.O_WRONLY if fd == 2 else os.O_RDONLY)
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
