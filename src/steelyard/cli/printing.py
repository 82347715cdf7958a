"""The only functions that print: answers on stdout, progress, warnings and errors on stderr.

A command may find its streams closed, full or broken, or its terminal suspended. None of this may
end a run, delay it or change how it ends: its record is on disk. All text is escaped, because
titles, file names and errors come from strangers.
"""

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
    from steelyard.record.ceilings_record import SpecRecord
    from steelyard.record.record import Record
    from steelyard.report import Page

MAX_WAITING = 2000  # pieces waiting for a terminal that does not read; later ones are dropped
FINISH_TIMEOUT_S = 1.0  # seconds to wait at the end for pieces to be written
DEFAULT_WIDTH = 80  # if the width of lines is not known
MIN_WIDTH = 40
SIZE_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))

# Characters that steer a terminal or change how the text around them looks: controls except tab and
# line feed, zero-width marks, direction overrides, line separators, and lone surrogates, which no
# encoding has.
_CONTROL_CHARACTERS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f"
    "\ufeff\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)


# Colours (SGR codes of ECMA-48) of the words that a line on stderr begins with.
_COLOURS = {"error": 31, "failed": 31, "invalid": 31, "warning": 33, "unproven": 33, "valid": 32}


@dataclass(frozen=True)
class OutputOptions:
    """The options of a command on printing: `json` prints one JSON document instead of tables,
    `quiet` leaves out progress, `wide` shows all columns of tables. `silent` is whether no progress
    is printed: with `json` or `quiet`.
    """

    json: bool = False
    quiet: bool = False
    wide: bool = False

    @property
    def silent(self) -> bool:
        """Return whether no progress is printed: --json or --quiet is given."""
        return self.json or self.quiet


def escape_controls(text: str) -> str:
    """Return the text with control characters, direction overrides and other invisible characters
    escaped as JSON does (tab and line feed stay), so that JSON keeps its value and no text can
    steer a terminal.
    """
    return _CONTROL_CHARACTERS.sub(lambda match: json.dumps(match[0])[1:-1], text)


def print_stdout(text: str) -> None:
    """Print a text on stdout, escaped (`escape_controls`), with a line feed at its end, and flush.
    Raise LostError or BrokenPipeError if stdout cannot be written.
    """
    print_verbatim(escape_controls(text))


def print_verbatim(text: str) -> None:
    """Print a text on stdout without escaping it, for output whose bytes matter, such as CSV: the
    caller has escaped it. A line feed is added if it does not end in one, and stdout is flushed.

    Raise BrokenPipeError if nobody reads stdout, LostError if it cannot be written for another
    reason. Stdout's descriptor then points to /dev/null.
    """
    try:
        sys.stdout.write(text if text.endswith("\n") else text + "\n")
        sys.stdout.flush()
    except OSError as error:
        # Otherwise the buffered rest would fail again, with a traceback, at the interpreter's exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise BrokenPipeError("stdout is closed") from error
        raise LostError(f"stdout cannot be written: {error.strerror}") from error


def print_run_result(text: str) -> None:
    """Print the result of a run on stdout. If that fails, print a warning on stderr and go on: the
    record is on disk.
    """
    try:
        print_stdout(text)
    except (LostError, BrokenPipeError) as error:
        print_stderr(f"warning: {error}; the records are written")


def print_stderr(text: str) -> None:
    """Print a text on stderr, escaped, with a line feed. If the text begins with a status, `error`
    or `warning` and a colon, this word is coloured where the terminal has colours.
    """
    text = escape_controls(text)
    word, colon, rest = text.partition(":")
    if word in _COLOURS and colon and has_colours(sys.stderr):
        text = f"\x1b[{_COLOURS[word]}m{word}\x1b[0m:{rest}"
    sys.stderr.write(f"{text}\n")


def print_run_status(
    record: "Record | SpecRecord", path: object, with_reasons: bool = True
) -> None:
    """Print on stderr the status of a record and `path`, where it was written; then, if
    `with_reasons`, one line for each of its reasons, indented, or as a warning if the run is
    unproven, which is no error.
    """
    from steelyard import words

    print_stderr(f"{record.status}: {path}")
    for reason in record.reasons if with_reasons else []:
        text = to_one_line(f"{reason.code}: {words.render_text(reason.text)}")
        print_stderr(f"warning: {text}" if record.status == "unproven" else f"  {text}")


def print_start_line(activity: str, output: OutputOptions) -> None:
    """Print on stderr what the command is about to do, before slow imports; only on a terminal and
    unless output is silent.
    """
    if not output.silent and is_terminal(sys.stderr):
        print_stderr(f"steelyard {__version__}: {activity} …")


def format_page(page: "Page", wide: bool = False) -> str:
    """Return a report page as text, as wide as the terminal or, if `wide`, without a limit of
    width.
    """
    from steelyard import report

    return report.render_text(page, find_width(wide))


def print_json(value: Any, print_text: Callable[[str], None] = print_stdout) -> None:
    """Print a value as indented JSON by `print_text`: `print_stdout`, or a function that handles a
    failing stdout otherwise, such as `print_run_result`.
    """
    print_text(json.dumps(value, indent=2, ensure_ascii=False))


def to_one_line(value: object) -> str:
    """Return any value as text on one line, with white space collapsed and everything unprintable
    escaped or blanked. For names and values from files and command lines.
    """
    shown = escape_controls(" ".join(str(value).split()))
    return "".join(c if c.isprintable() else " " for c in shown)


def format_descriptions(pairs: Sequence[tuple[str, str]], margin: str = "") -> list[str]:
    """Return lines for pairs of name and text: names padded to one width, the text beside them,
    wrapped to the terminal's width.

    `margin` stands before each name. Words longer than a line, such as hashes, stay whole; lines
    that continue a text that begins with an arrow are indented.
    """
    indent = len(margin) + max((len(name) for name, _ in pairs), default=0) + 2
    text_width = max(1, (find_width() or DEFAULT_WIDTH) - indent)
    lines = []
    for name, text in pairs:
        continuation = "  " if text.startswith("→") else ""
        wrap = textwrap.TextWrapper(
            text_width,
            subsequent_indent=continuation,
            break_long_words=False,
            break_on_hyphens=False,
        )
        first, *more = wrap.wrap(to_one_line(text)) or [""]
        lines += [
            f"{margin + name:<{indent}}{first}".rstrip(),
            *(" " * indent + line for line in more),
        ]
    return lines


def format_value(value: Any) -> str:
    """Format a value for a list: text as it is, None as `/`, everything else as JSON."""
    return (
        "/"
        if value is None
        else value
        if isinstance(value, str)
        else json.dumps(value, ensure_ascii=False)
    )


def align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a line for each row of cells, columns padded to equal width and separated by two
    spaces. Raise ValueError if rows have different numbers of cells.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def format_file_sizes(files: Sequence[tuple[str, int]]) -> list[str]:
    """Return a line for each file, from its name and its size in bytes."""
    return align_columns(
        [(to_one_line(name), format_size(size_bytes)) for name, size_bytes in files]
    )


def format_size(size_bytes: int) -> str:
    """Format a number of bytes as GiB, MiB or KiB with two decimals, or as bytes below 1 KiB."""
    for unit, unit_bytes in SIZE_UNITS:
        if size_bytes >= unit_bytes:
            return f"{size_bytes / unit_bytes:.2f} {unit}"
    return f"{size_bytes} bytes"


class BackgroundStderr(io.TextIOBase):
    """A replacement of sys.stderr that writes to file descriptor `fd` from a daemon thread, so that
    printing never blocks and never fails.

    Text is dropped while `MAX_WAITING` pieces wait (a suspended terminal), and after a write has
    failed. `finish` waits for what is queued.
    """

    def __init__(self, fd: int, encoding: str) -> None:
        """Start the daemon thread that writes queued text to descriptor `fd`; `encoding` is that of
        the bytes.
        """
        super().__init__()
        self._fd, self._encoding = fd, encoding
        self._pieces: queue.SimpleQueue[bytes | threading.Event] = queue.SimpleQueue()
        self._broken = False
        threading.Thread(target=self._write_queued, daemon=True).start()

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
        """Queue a text for the thread that writes to stderr, or drop it if too much is waiting or a
        write has failed. Return its length in any case.
        """
        if not self._broken and self._pieces.qsize() < MAX_WAITING:
            self._pieces.put(text.encode(self._encoding, "backslashreplace"))
        return len(text)

    def finish(self, timeout_s: float = FINISH_TIMEOUT_S) -> None:
        """Wait until all text queued for stderr before this call is written, at most `timeout_s`
        seconds; nothing is raised if it is not.
        """
        reached = threading.Event()
        self._pieces.put(reached)
        reached.wait(timeout_s)

    def _write_queued(self) -> None:
        """Write queued pieces to stderr's descriptor forever, in the writer thread; drop them after
        the first failed write. An Event in the queue is set when it is reached.
        """
        while True:
            piece = self._pieces.get()
            if isinstance(piece, threading.Event):
                piece.set()
                continue
            try:
                while piece and not self._broken:
                    piece = piece[os.write(self._fd, piece) :]
            except OSError:
                self._broken = True


def find_width(wide: bool = False) -> int | None:
    """Return the width of lines on stdout in characters: from the variable COLUMNS or else that of
    the terminal, at least 40, or 80 if stdout is no terminal. None, for no limit, if `wide`.
    """
    if wide:
        return None
    variable = os.environ.get("COLUMNS", "")
    if variable.isascii() and variable.isdigit() and int(variable) > 0:
        return max(MIN_WIDTH, int(variable))
    if not is_terminal(sys.stdout):
        return DEFAULT_WIDTH
    return max(MIN_WIDTH, os.get_terminal_size(sys.stdout.fileno()).columns or DEFAULT_WIDTH)


def is_terminal(stream: TextIO | None) -> bool:
    """Return whether a stream is open and a terminal; False for None."""
    return stream is not None and not stream.closed and stream.isatty()


def has_colours(stream: TextIO | None) -> bool:
    """Return whether colours may be printed on a stream: it is a terminal that is not dumb, and
    NO_COLOR is not set (no-color.org).
    """
    return is_terminal(stream) and not os.environ.get("NO_COLOR") and not is_dumb_terminal()


def is_dumb_terminal() -> bool:
    """Return whether TERM names a terminal that takes plain lines only."""
    return os.environ.get("TERM", "") in ("dumb", "unknown")


@contextmanager
def protect_streams() -> Iterator[None]:
    """Return a context manager that makes the standard streams safe, for the whole process.

    File descriptors 0 to 2 that are closed are opened on /dev/null, because the next file opened
    would get their number. Characters that stdout's encoding lacks are escaped. sys.stderr is
    replaced by a `BackgroundStderr`, whose text is written out at the end but which stays in place;
    a stderr that somebody else replaced is left alone.
    """
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            # stdout is opened read-only: writing to it fails, as it should
            os.open(os.devnull, os.O_WRONLY if fd == 2 else os.O_RDONLY)
    codecs.register_error("steelyard", _escape_unencodable)
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="steelyard")
    if sys.stderr is not sys.__stderr__:
        yield  # replaced already, for example by a test
        return
    sys.stderr = stderr = BackgroundStderr(2, getattr(sys.__stderr__, "encoding", None) or "utf-8")
    try:
        yield
    finally:
        stderr.finish()


def _escape_unencodable(error: UnicodeError) -> tuple[str, int]:
    """Return the characters that an encoding lacks escaped as JSON does, so that JSON keeps its
    value, and the position to go on at. An error handler for codecs; errors other than of encoding
    are raised again.
    """
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end
