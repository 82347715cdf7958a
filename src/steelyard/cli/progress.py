"""Progress while a run goes on: phase, done of total, rate, time left. On a terminal one line that
changes, elsewhere a line every half a minute."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rich import console as rich_console
from rich.console import Console
from rich.live import Live
from rich.text import Text

from steelyard.cli.out import one_line, say
from steelyard.run import clock as clocks
from steelyard.run.clock import now
from steelyard.run.session import STARTING, PhaseProgress

BAR, SHORTEST_BAR = 24, 4
LINES_S = 30.0  # between two lines where there is no terminal


class Display:
    """A title, then how far it is. Quiet where the console is. Where there is no terminal, the
    title of a run that stands alone is left out: whoever started it knows."""

    def __init__(
        self, console: Console, title: str, alone: bool = True, clock: Callable[[], float] = now
    ) -> None:
        self._console, self._title, self._now = console, one_line(title), clock
        self._titled = not console.quiet and (console.is_terminal or not alone)
        self._begin_s = self._said_s = self._now()
        self._last: PhaseProgress | None = None
        able = console.is_terminal and not console.is_dumb_terminal and not console.quiet
        self._live = (
            Live(console=console, transient=True, refresh_per_second=4, get_renderable=self._render)
            if able
            else None
        )

    def __enter__(self) -> Self:
        if self._titled:
            say(self._title)
        self._begin_s = self._said_s = self._now()
        if self._live is not None:
            self._live.start(refresh=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, progress: PhaseProgress) -> None:
        self._last = progress
        if self._live is None and not self._console.quiet and self._now() - self._said_s >= LINES_S:
            self._said_s = self._now()
            say(f"  {line(progress, bar=False)}")

    def _render(self) -> Text:
        last = self._last or PhaseProgress(STARTING, 0, 0, self._now() - self._begin_s)
        return Text(line(last, self._console.width), no_wrap=True, overflow="ellipsis")


@contextmanager
def showing_bytes(title: str, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """Show a title, and below it, in MiB, what the function that is yielded is called with: bytes
    done, of how many.
    """
    with Display(rich_console.Console(stderr=True, quiet=quiet), title) as display:
        begin_s = clocks.now()
        yield lambda done, total: display.show(
            PhaseProgress("MiB", done >> 20, -(-total >> 20), clocks.now() - begin_s)
        )


def line(progress: PhaseProgress, columns: int = 80, bar: bool = True) -> str:
    """A progress as text. The bar takes what room there is."""
    spent, phase = clock(progress.elapsed_s), one_line(progress.phase)
    if progress.total <= 0:
        return f"{phase}  {spent}"
    share = f"{progress.done}/{progress.total}"
    if progress.done == 0 or progress.elapsed_s <= 0:
        parts = [phase, share, spent]
    else:
        rate = progress.done / progress.elapsed_s
        left = clock(max(0, progress.total - progress.done) / rate)
        parts = [phase, share, f"{rate:.2f}/s", f"{spent}, {left} left"]
    room = min(BAR, columns - 1 - len("  ".join(parts)) - 2)
    if bar and room >= SHORTEST_BAR:
        filled = min(room, room * progress.done // progress.total)
        parts.insert(1, "━" * filled + "╌" * (room - filled))
    return "  ".join(parts)


def clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
