"""Live progress on a terminal: phase, done of total, rate, time left."""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from steelyard.cli.out import one_line
from steelyard.run.session import PhaseProgress

BAR = 24


class Display:
    """One line that changes while a run goes on; nothing at all where there is no terminal."""

    def __init__(self, console: Console, label: str) -> None:
        self._label = one_line(label)
        self._live = Live(Text(""), console=console, transient=True, refresh_per_second=8) if console.is_terminal else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, progress: PhaseProgress) -> None:
        if self._live is not None:
            self._live.update(Text(f"{self._label}  {line(progress)}", no_wrap=True, overflow="ellipsis"))


def line(progress: PhaseProgress) -> str:
    """A progress as text."""
    spent, phase = clock(progress.elapsed_s), one_line(progress.phase)
    if progress.total <= 0:
        return f"{phase}  {spent}"
    filled = min(BAR, BAR * progress.done // progress.total)
    bar = "━" * filled + "╌" * (BAR - filled)
    share = f"{phase}  {bar}  {progress.done}/{progress.total}"
    if progress.done == 0 or progress.elapsed_s <= 0:
        return f"{share}  {spent}"
    rate = progress.done / progress.elapsed_s
    return f"{share}  {rate:.2f}/s  {spent}, {clock(max(0, progress.total - progress.done) / rate)} left"


def clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
