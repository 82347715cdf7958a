"""Watch a server's counters in a pass: tokens from its cache, its longest queue, preemptions."""

import asyncio
from collections.abc import Sequence
from typing import Any

from steelyard.engine.server_rows import MetricNames
from steelyard.engines.http.client import HttpClient
from steelyard.engines.http.server_metrics import ServerCounters, parse_counters

EVERY_S = 1.0


class MetricsWatch:
    """Reads the counters of a server before and after a pass, and its queue every second in it.
    `begin` reads them first, `watch` is a coroutine for the time between, `end` returns what was
    found as details for the record: empty for a server without counters.
    """

    def __init__(self, client: HttpClient, root: str, names: Sequence[MetricNames]) -> None:
        self._client, self._address, self._names = client, f"{root}/metrics", names
        self._before = ServerCounters()
        self._queue_peak: int | None = None

    def begin(self) -> None:
        """Read the counters before the pass."""
        self._before = self._client.loop.run_until_complete(self._read())

    async def watch(self) -> None:
        """Read the queue again and again; returns at once for a server that has none."""
        while self._before.queue is not None:
            await asyncio.sleep(EVERY_S)
            await self._read()

    def end(self) -> dict[str, Any]:
        """Read the counters after the pass, and return what changed: `cached_tokens`,
        `queue_peak`, `preemptions`, each only where it is known.
        """
        before = self._before
        if before == ServerCounters():
            return {}
        after = self._client.loop.run_until_complete(self._read())
        found = {
            "cached_tokens": _subtract(after.cached_tokens, before.cached_tokens),
            "queue_peak": self._queue_peak,
            "preemptions": _subtract(after.preemptions, before.preemptions),
        }
        return {name: value for name, value in found.items() if value is not None}

    async def _read(self) -> ServerCounters:
        """Return the counters now, all None if they cannot be read."""
        answer = await self._client.fetch(self._address)
        if answer is None or answer[0] != 200:
            return ServerCounters()
        counters = parse_counters(answer[1].decode("utf-8", "replace"), self._names)
        if counters.queue is not None:
            self._queue_peak = max(self._queue_peak or 0, counters.queue)
        return counters


def _subtract(after: int | None, before: int | None) -> int | None:
    """Return by how much a counter has grown; None if it is not known, or began anew."""
    return None if after is None or before is None or after < before else after - before
