"""What verbs that write large files show: how far they are, and what they wrote."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from steelyard.cli.out import one_line

if TYPE_CHECKING:
    from steelyard.run.session import PhaseProgress

UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def watching(show: "Callable[[PhaseProgress], None]") -> Callable[[int, int], None]:
    """Bytes as the display's progress, in MiB."""
    from steelyard.run.clock import now
    from steelyard.run.session import PhaseProgress

    begin_s = now()

    def watch(done: int, total: int) -> None:
        show(PhaseProgress("MiB", done >> 20, -(-total >> 20), now() - begin_s))

    return watch


def aligned(files: list[tuple[str, int]]) -> list[tuple[str, str]]:
    """Names of one width, and sizes as a reader takes them in."""
    shown = [(one_line(name), size(size_bytes)) for name, size_bytes in files]
    width = max((len(name) for name, _ in shown), default=0)
    return [(f"{name:<{width}}", text) for name, text in shown]


def size(size_bytes: int) -> str:
    for unit, number in UNITS:
        if size_bytes >= number:
            return f"{size_bytes / number:.2f} {unit}"
    return f"{size_bytes} bytes"
