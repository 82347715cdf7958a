"""Report from when a request is being sent, by what aiohttp traces of it."""

from collections.abc import Callable
from typing import Any

import aiohttp


class SendMark:
    """Reports the moment from which a request is being sent: `mark` calls `report` the first time,
    and does nothing after it.

    That is when a connection is opened for the request, or when it is handed to an open one. A new
    connection belongs to the way to the server, as it does for the clients of vLLM and SGLang,
    whose watches start before it; it is no delay of this client.
    """

    def __init__(self, report: Callable[[], None]) -> None:
        self._report, self._is_marked = report, False

    def mark(self) -> None:
        """Report the moment, unless it has been reported."""
        if not self._is_marked:
            self._is_marked = True
            self._report()


def trace_sending() -> aiohttp.TraceConfig:
    """Return a configuration of traces that calls `mark` of the `SendMark` that a request has as
    its `trace_request_ctx`; other requests are left alone.
    """
    tracing = aiohttp.TraceConfig()
    tracing.on_connection_create_start.append(_mark_sent)
    tracing.on_request_chunk_sent.append(_mark_sent)  # just before it is written
    return tracing


async def _mark_sent(session: aiohttp.ClientSession, context: Any, event: Any) -> None:
    """Mark the request of an event of aiohttp as being sent, if it has a mark."""
    mark: SendMark | None = context.trace_request_ctx
    if mark is not None:
        mark.mark()
