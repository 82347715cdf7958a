"""Show progress on stderr while something runs: phase, done of total, rate, time left.

On a terminal it is one line that changes, elsewhere a line every 30 seconds. `cli/execute_runs.py`
passes `ProgressDisplay.show` to the parent of a run as its progress callback.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rich import console as rich_console
from rich.console import Console
from rich.live import Live
from rich.text import Text

from steelyard.cli.printing import print_stderr, to_one_line
from steelyard.run import clock as clocks
from steelyard.run.clock import now
from steelyard.run.session import STARTING, PhaseProgress

MAX_BAR_WIDTH, MIN_BAR_WIDTH = 24, 4
LINE_INTERVAL_S = 30.0  # seconds between two lines without a terminal


class ProgressDisplay:
    """A context manager that prints a title on stderr and below it the latest progress that `show`
    got: one changing line on a terminal, elsewhere a line every 30 seconds; nothing if the console
    is quiet.

    Without a terminal, the title is printed only if `alone` is False (several runs follow one
    another). `clock` returns seconds.
    """

    def __init__(
        self, console: Console, title: str, alone: bool = True, clock: Callable[[], float] = now
    ) -> None:
        """Store title and console of this display; nothing is printed before it is entered. `alone`
        is whether this is the only run of the command; `clock` returns seconds.
        """
        self._console, self._title, self._now = console, to_one_line(title), clock
        self._shows_title = not console.quiet and (console.is_terminal or not alone)
        self._begin_s = self._printed_s = self._now()
        self._latest: PhaseProgress | None = None
        can_update = console.is_terminal and not console.is_dumb_terminal and not console.quiet
        self._live = (
            Live(console=console, transient=True, refresh_per_second=4, get_renderable=self._render)
            if can_update
            else None
        )

    def __enter__(self) -> Self:
        """Print the title of this display on stderr, if it is shown, and on a terminal start the
        live line. Time counts from here.
        """
        if self._shows_title:
            print_stderr(self._title)
        self._begin_s = self._printed_s = self._now()
        if self._live is not None:
            self._live.start(refresh=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Remove the live line of this display, if there is one; an error of the block is passed
        on.
        """
        if self._live is not None:
            self._live.stop()

    def show(self, progress: PhaseProgress) -> None:
        """Take the latest progress of the run: on a terminal for the live line, which another
        thread draws; elsewhere print it on stderr, if the last line is at least 30 seconds old.
        """
        self._latest = progress
        if (
            self._live is None
            and not self._console.quiet
            and self._now() - self._printed_s >= LINE_INTERVAL_S
        ):
            self._printed_s = self._now()
            print_stderr(f"  {format_progress(progress, bar=False)}")

    def _render(self) -> Text:
        """Return the live line of this display, cut to the width of the console; before any
        progress it says that the run is starting, with the time since.
        """
        latest = self._latest or PhaseProgress(STARTING, 0, 0, self._now() - self._begin_s)
        return Text(format_progress(latest, self._console.width), no_wrap=True, overflow="ellipsis")


@contextmanager
def show_bytes_progress(title: str, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """Return a context manager that shows a title and the progress of bytes, in MiB, on stderr;
    nothing if `quiet`. It yields the callback to call with bytes done and bytes in total.
    """
    with ProgressDisplay(rich_console.Console(stderr=True, quiet=quiet), title) as display:
        begin_s = clocks.now()
        yield lambda done, total: display.show(
            PhaseProgress("MiB", done >> 20, -(-total >> 20), clocks.now() - begin_s)
        )


def format_progress(progress: PhaseProgress, columns: int = 80, bar: bool = True) -> str:
    """Format a progress as one line of at most `columns` characters as far as the bar can shrink:
    phase, bar, done/total, rate per second, time spent and time left.

    Without a total it is phase and time spent. The bar is left out if `bar` is False or there is no
    room for it.
    """
    spent, phase = format_duration(progress.elapsed_s), to_one_line(progress.phase)
    if progress.total <= 0:
        return f"{phase}  {spent}"
    done_of_total = f"{progress.done}/{progress.total}"
    if progress.done == 0 or progress.elapsed_s <= 0:
        parts = [phase, done_of_total, spent]
    else:
        rate = progress.done / progress.elapsed_s
        remaining = format_duration(max(0, progress.total - progress.done) / rate)
        parts = [phase, done_of_total, f"{rate:.2f}/s", f"{spent}, {remaining} left"]
    bar_width = min(MAX_BAR_WIDTH, columns - 1 - len("  ".join(parts)) - 2)
    if bar and bar_width >= MIN_BAR_WIDTH:
        filled = min(bar_width, bar_width * progress.done // progress.total)
        parts.insert(1, "━" * filled + "╌" * (bar_width - filled))
    return "  ".join(parts)


def format_duration(seconds: float) -> str:
    """Format seconds as `h:mm:ss`, or `m:ss` below an hour."""
    minutes, rest_s = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest_s:02}" if hours else f"{minutes}:{rest_s:02}"
