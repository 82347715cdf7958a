"""The contract between the loop of requests and an engine that generates.

The loop (run/requests.py) holds the clock and the schedule: it hands requests to a `RequestPort`
when they are due, and the port reports chunks of tokens to the loop's `RequestSink` the moment they
arrive. An engine never reads a clock.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from steelyard.data.prompts import GenerationRequest
from steelyard.data.request_outcomes import CountedBy, Outcome
from steelyard.engine.job import Part
from steelyard.engine.work import Work


@dataclass(frozen=True)
class RequestEnd:
    """How a request ended: `outcome` ("ok", or what went wrong with a short `error` text),
    `output_tokens` and `prompt_tokens` as the server's `usage` counts them (None: it does not say),
    `counted_by`, where the counts of its chunks came from, and the generated `text` (None: not
    kept; ids were given).
    """

    outcome: Outcome = "ok"
    error: str | None = None
    output_tokens: int | None = None
    prompt_tokens: int | None = None
    counted_by: CountedBy = "ids"
    text: str | None = None


class RequestSink(Protocol):
    """What a port reports to: the loop of requests (a protocol). Every call is stamped with the
    loop's clock, so a port calls it at once, in the thread that runs `RequestPort.wait`.
    """

    def mark_sent(self, number: int) -> None:
        """Report that a request is handed to the socket at this moment. A port in this process,
        where submitting is sending, does not call it.
        """

    def add_chunk(self, number: int, tokens: int, ids: Sequence[int] = ()) -> None:
        """Report a chunk of a request that carries `tokens` tokens (1 if the port does not know:
        `RequestEnd.output_tokens` then corrects the sum), with their `ids` if they are known.
        Chunks without a token, such as one that only names a role, are not reported.
        """

    def end_request(self, number: int, end: RequestEnd) -> None:
        """Report that a request has ended. Later chunks of it are an error."""

    def add_step(self, work: Work) -> None:
        """Report that an engine in this process finished a step, with its counts: `sequences`,
        `context_tokens` (keys that its decoding sequences read), `prefill_tokens`, beside the usual
        ones. The loop takes a device event.
        """


class RequestPort(Protocol):
    """Where the loop hands in requests (a protocol); an engine opens one for each pass.

    `is_separate` is whether the engine works outside of this process, so that the CPU time of this
    process is the client's alone.
    """

    is_separate: bool

    def submit(self, request: GenerationRequest) -> None:
        """Begin a request; return at once."""

    def wait(self, until_s: float | None) -> None:
        """Let requests proceed, and report what arrives to the sink, until the clock shows
        `until_s` (None: no limit) or a request has ended, whichever comes first.
        """


class GenerationEngine(Protocol):
    """What generates tokens, on one rank (a protocol); constructed with a `Job` whose inputs are
    `data.prompts.PromptRequests`.

    `prepare(name, part)` loads, compiles, starts servers and sends warm-up requests, whose prompts
    come from `inputs.make_warmup`; `open_port(name, sink, clock)` is a context manager over the
    pass; `close()` frees the model or ends the server, so that answers can be checked on the same
    device. `weights` and `details()` are as in `Engine`.
    """

    @property
    def weights(self) -> Mapping[str, Any]:
        """Return where the weights came from, for the record, as in `Engine`."""

    def prepare(self, name: str, part: Part) -> None:
        """Make the engine ready for a pass, as in `Engine`."""

    def open_port(
        self, name: str, sink: RequestSink, clock: Any
    ) -> AbstractContextManager[RequestPort]:
        """Return a context manager that opens the port of a pass and closes it behind it. `clock`
        returns the loop's seconds, for `RequestPort.wait`.
        """

    def close(self) -> None:
        """Free the device: let go of the model, or end the server and all its children. Called
        once after the last pass of requests; harmless if it was called before.
        """

    def details(self) -> dict[str, Any]:
        """Return what the engine chose or found by itself, as in `Engine`. `cached_tokens` is the
        number of prompt tokens that a server took from its cache in the pass, where it says so.
        """
