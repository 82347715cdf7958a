"""Engines that generate by a server of OpenAI's interface: one that the user names (`http`), or one
that is started here by its row (`transformers-serve`, `vllm`).

The server computes; here is its client. A server that was not started here has weights that nobody
here knows, on a device that the user declares.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import Any

from steelyard import plugins
from steelyard.data.prompts import PromptRequests
from steelyard.engine import engine_rows
from steelyard.engine.generation import RequestSink
from steelyard.engine.job import Job, Part
from steelyard.engines.http.client import HttpPort, PassSums, RequestFormat
from steelyard.engines.http.metrics_watch import MetricsWatch
from steelyard.engines.http.mock_check import ClientError, measure_client
from steelyard.engines.http.ready_server import (
    ReadyServer,
    connect_server,
    count_slots,
    start_server,
)
from steelyard.engines.http.warm_up import choose_format, send_requests

MAX_WARMUP_STREAMS, MAX_MOCK_STREAMS = 64, 256


class HttpGenerate:
    """The engine of all servers (a `GenerationEngine`). `prepare` connects to the server, or starts
    it if the engine's row names one, finds out how it takes prompts, and sends warm-up requests;
    `open_port` measures the client on the mock server, once, and runs a pass; `close` ends what was
    started. `report_distances` returns how far tokens are from the likeliest ones by the server's
    own log-probabilities, if they were asked for.
    """

    def __init__(self, job: Job) -> None:
        """Store the job; nothing is started."""
        self.job = job
        self.inputs: PromptRequests = job.inputs
        self._server: ReadyServer | None = None
        self._format: RequestFormat | None = None
        self._client_error: ClientError | None = None
        self._has_measured_client = False
        self._pass_details: dict[str, Any] = {}
        self._sums = PassSums()

    @property
    def weights(self) -> dict[str, Any]:
        """Return the source of the weights for the record: "unknown" if the server was not started
        here.
        """
        return {} if self._server is None else self._server.weights

    @property
    def written_weights(self) -> Path | None:
        """The folder of random weights that was written for the server; None if none was."""
        return None if self._server is None else self._server.written_weights

    def prepare(self, name: str, part: Part) -> None:
        """Make the server ready before the first pass, and send `tune.warmup` rounds of warm-up
        requests, one for each slot. Those that fail are no error: requests of the pass will.
        Raises RequestError if the server is not there or refuses what the case asks for,
        ServerError or MemoryError if it cannot be started.
        """
        if self._server is None:
            row = engine_rows.find_engine(self.job.engine)
            if row.server:
                self._server = start_server(self.job, plugins.load_reference(row.server), part)
            else:
                with part("server"):
                    self._server = connect_server(self.job)
        server = self._server
        with part(f"warmup_{name}"):
            if self._format is None:
                self._format = choose_format(server, self.job.settings, self.inputs)
            rounds, slots = self.job.case.tune.warmup, self._count_streams(MAX_WARMUP_STREAMS)
            for number in range(rounds):
                numbers = range(number * slots, (number + 1) * slots)
                requests = [self.inputs.make_warmup(number) for number in numbers]
                send_requests(server.client, self._format, requests)
        if server.process is not None:
            server.process.check_running("while warm-up requests were sent")

    def _count_streams(self, limit: int) -> int:
        """Return how many requests the load has in flight, at most `limit`."""
        return count_slots(self.job.case, self.inputs, limit)

    @contextmanager
    def open_port(
        self, name: str, sink: RequestSink, clock: Callable[[], float]
    ) -> Iterator[HttpPort]:
        """Measure the client on the mock server before the first pass, then open the port of a
        pass, which reports to `sink`. Raises RuntimeError before `prepare`.
        """
        server, request_format = self._server, self._format
        if server is None or request_format is None:
            raise RuntimeError("open_port before prepare")
        if not self._has_measured_client:
            self._has_measured_client = True
            streams = self._count_streams(MAX_MOCK_STREAMS)
            is_short = self.job.case.size == "smoke"
            self._client_error = measure_client(clock, streams, is_short)
        watch = MetricsWatch(server.client, server.root, server.metrics)
        watch.begin()
        port = server.client.make_port(sink, clock, request_format)
        port.start(watch.watch())
        try:
            yield port
        finally:
            port.close()
            self._sums = port.sums
            self._pass_details = merge_counters(port.sums.cached_tokens, watch.end())
            if server.process is not None and server.process.exit_code is not None:
                self._pass_details["server_exit_code"] = server.process.exit_code
                said = server.client.hide_key(server.process.read_last_error())
                self._pass_details["server_said"] = said

    def close(self) -> None:
        """Close the connections, and end the server if it was started here; harmless if it was
        done before.
        """
        if self._server is not None:
            self._server.close()

    def report_distances(self) -> dict[str, Any] | None:
        """Return how far the generated tokens are from the likeliest ones by the server's own
        log-probabilities, for each request; None if it reported none.
        """
        rows = sorted(self._sums.distances.items())
        if not self.job.settings.logprobs or not rows:
            return None
        return {
            "numbers": [number for number, _ in rows],
            "compared": [row.compared for _, row in rows],
            "exact": [row.exact for _, row in rows],
            "largest": [row.largest if isfinite(row.largest) else None for _, row in rows],
        }

    def details(self) -> dict[str, Any]:
        """Return what is known of the server, how requests were written, what its counters said
        of the pass, and the error of this client on the mock server.
        """
        details = {} if self._server is None else dict(self._server.details)
        if self._format is not None:
            details["api"] = self._format.api
            if self._format.api == "chat":
                details["template_tokens"] = self._format.template_tokens
            as_text = "words" if self._format.word_width else "text"
            details["prompts"] = "ids" if self._format.sends_ids else as_text
        details["scheduling"] = "server"
        if self.job.settings.logprobs:
            details["logprobs"] = True
        if self._client_error is not None:
            details |= self._client_error.to_details()
        return details | self._pass_details


def merge_counters(cached_tokens: int | None, counters: dict[str, Any]) -> dict[str, Any]:
    """Return what the counters of /metrics said of a pass, with the larger of their cached tokens
    and those that usage reported (None: it did not): either may leave some out.
    """
    said = (cached_tokens, counters.get("cached_tokens"))
    known = [number for number in said if number is not None]
    return counters | ({"cached_tokens": max(known)} if known else {})
