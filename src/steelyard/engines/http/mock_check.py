"""Measure the client on the mock server before a pass: how much later than it was written a chunk
is stamped.

The ids of the mock server's tokens are the time at which it writes them: all processes of a host
have the same monotonic clock. Chunks thus take the same way through the client as those that are
measured.
"""

import json
import subprocess
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from steelyard.data.prompts import GenerationRequest
from steelyard.engine.child_program import end_with_descendants, kill_with_parent
from steelyard.engine.generation import RequestEnd
from steelyard.engines.http.client import HttpClient, RequestFormat

MODULE = "steelyard.engines.http.mock_server"
START_S, MEASURE_S = 30.0, 1.0
CHUNKS_PER_S = 4000.0  # of all streams together: the mock server keeps up with it
MAX_STREAMS = 256
GRACE_S = 2.0
PROMPT = (1, 2, 3)
US = 1_000_000


@dataclass(frozen=True)
class ClientError:
    """By how many microseconds the client stamped chunks later than they were written, over
    `requests` requests: `median_us`, 99th percentile and largest.
    """

    requests: int
    median_us: int
    p99_us: int
    max_us: int

    def to_details(self) -> dict[str, Any]:
        """Return the facts under the names of an engine's details."""
        return {
            "mock_requests": self.requests,
            "mock_error_us": [self.median_us, self.p99_us, self.max_us],
        }


class _StampSink:
    """Takes chunks whose ids are the microseconds at which they were written, and keeps by how much
    later they arrived.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.errors_us: array[int] = array("q")
        self.ended = 0

    def mark_sent(self, number: int) -> None:
        """Ignore when a request is sent."""

    def add_chunk(self, number: int, tokens: int, ids: Sequence[int] = ()) -> None:
        """Keep the error of a chunk."""
        at_us = round(self._clock() * US)
        self.errors_us.extend(max(0, at_us - stamp_us) for stamp_us in ids[:1])

    def end_request(self, number: int, end: RequestEnd) -> None:
        """Count the end of a request."""
        self.ended += 1

    def add_step(self, work: Any) -> None:
        """Ignore a step."""


def measure_client(
    clock: Callable[[], float], streams: int, is_short: bool = False
) -> ClientError | None:
    """Start the mock server, send it requests with so many streams at a time for about a second
    (`is_short`: a tenth of it), and return the error of the client's stamps; None if the mock
    server could not be started or did not answer in time.
    """
    streams = max(1, min(streams, MAX_STREAMS))
    tpot_s = max(0.005, streams / CHUNKS_PER_S)
    tokens = max(2, round((0.1 if is_short else MEASURE_S) / tpot_s))
    arguments = ["--stamps", "1", "--ttft-s", str(tpot_s), "--tpot-s", str(tpot_s)]
    with start_mock_server(arguments) as port:
        if port is None:
            return None
        client = HttpClient(f"http://127.0.0.1:{port}/v1", None, START_S)
        client.open()
        try:
            errors_us = sorted(_collect_errors(client, clock, streams, tokens))
        finally:
            client.close()
    if not errors_us:
        return None
    p99 = errors_us[min(len(errors_us) - 1, int(0.99 * len(errors_us)))]
    return ClientError(streams, errors_us[len(errors_us) // 2], p99, errors_us[-1])


def _collect_errors(
    client: HttpClient, clock: Callable[[], float], streams: int, tokens: int
) -> Sequence[int]:
    """Send one request for each stream, and return the error of every chunk in microseconds."""
    sink = _StampSink(clock)
    request_format = RequestFormat("completions", "mock", True, is_exact=True, asks_ids=True)
    port = client.make_port(sink, clock, request_format)
    try:
        for number in range(streams):
            port.submit(GenerationRequest(number, array("i", PROMPT), None, tokens))
        until_s = clock() + START_S
        while sink.ended < streams and clock() < until_s:
            port.wait(until_s)
    finally:
        port.close()
    return sink.errors_us


@contextmanager
def start_mock_server(arguments: Sequence[str]) -> Iterator[int | None]:
    """Start the mock server as a child process and yield its port, None if it did not start; end it
    behind the block.
    """
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", MODULE, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        preexec_fn=kill_with_parent,
    )
    try:
        line = process.stdout.readline(1 << 10) if process.stdout is not None else b""
        try:
            port = int(json.loads(line)["port"])
        except (ValueError, KeyError, TypeError):
            yield None
        else:
            yield port
    finally:
        end_with_descendants(process, GRACE_S)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
