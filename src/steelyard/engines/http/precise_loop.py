"""An asyncio loop that wakes up to the microsecond.

That of the standard library rounds every wait up to the next millisecond, by which requests would
be late, and the mock server's delays longer than stated. Imports the standard library alone.
"""

import asyncio
import select as system_select
import selectors
from typing import Any


class PreciseSelector(selectors.DefaultSelector):
    """A selector that waits by `select` on its own descriptor, which takes microseconds."""

    def select(self, timeout: float | None = None) -> Any:
        """Return the events, after at most so many seconds (None: without limit)."""
        if timeout is not None and timeout > 0:
            system_select.select([self], [], [], timeout)
            timeout = 0
        return super().select(timeout)


def make_loop() -> asyncio.AbstractEventLoop:
    """Return a new loop that wakes up to the microsecond."""
    return asyncio.SelectorEventLoop(PreciseSelector())
