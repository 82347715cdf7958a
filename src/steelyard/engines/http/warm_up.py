"""Requests before a pass: which way of writing them a server takes, and warming up."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from steelyard.case.request import EngineSettings
from steelyard.data.prompts import GenerationRequest, PromptRequests
from steelyard.engine.generation import RequestEnd
from steelyard.engines.http.client import HttpClient, RequestFormat
from steelyard.engines.http.ready_server import ReadyServer
from steelyard.errors import RequestError

REFUSALS = ("status 400:", "status 422:", "status 404:")


@dataclass
class EndSink:
    """Takes what requests report that are not measured, and keeps their ends in order."""

    ends: list[RequestEnd]

    def add_chunk(self, number: int, tokens: int, ids: Sequence[int] = ()) -> None:
        """Ignore a chunk."""

    def end_request(self, number: int, end: RequestEnd) -> None:
        """Keep an end."""
        self.ends.append(end)

    def add_step(self, work: Any) -> None:
        """Ignore a step."""


def send_requests(
    client: HttpClient, request_format: RequestFormat, requests: Sequence[GenerationRequest]
) -> list[RequestEnd]:
    """Send requests all at once, wait until each has ended, and return how."""
    sink = EndSink([])
    port = client.make_port(sink, client.loop.time, request_format)
    try:
        for request in requests:
            port.submit(request)
        while len(sink.ends) < len(requests):
            port.wait(None)
    finally:
        port.close()
    return sink.ends


def choose_format(
    server: ReadyServer, settings: EngineSettings, requests: PromptRequests
) -> RequestFormat:
    """Return the first way of writing requests that a server takes, which a warm-up request for
    each finds out: prompts as ids before text, and with the ids of outputs if it gives them.

    Raises RequestError if it refuses all, in a line that names natural lengths if only exact ones
    are refused, and if the prompts have no text where it is needed. A request that fails otherwise
    is no refusal: the way it was written is taken.
    """
    request = requests.make_warmup(0)
    formats = list_formats(server, settings, requests, has_text=request.text is not None)
    end = RequestEnd()
    for request_format in formats:
        [end] = send_requests(server.client, request_format, [request])
        if not _is_refusal(end):
            template_tokens = 0
            if request_format.api == "chat" and end.prompt_tokens is not None:
                template_tokens = max(0, end.prompt_tokens - len(request.prompt))
            return replace(request_format, template_tokens=template_tokens)
    why = (end.error or end.outcome).partition("\n")[0]
    if formats[-1].is_exact:
        natural = replace(formats[-1], is_exact=False)
        [natural_end] = send_requests(server.client, natural, [request])
        if not _is_refusal(natural_end):
            raise RequestError(
                "the server cannot ignore the end of a text, so that answers are shorter than asked"
                f" ({why}); run with --set question.data.lengths=natural"
            )
    raise RequestError(f"the server refuses requests of this case: {why}")


def _is_refusal(end: RequestEnd) -> bool:
    """Return whether a server refused a request for how it was written."""
    return end.outcome == "refused" and (end.error or "").startswith(REFUSALS)


def list_formats(
    server: ReadyServer, settings: EngineSettings, requests: PromptRequests, has_text: bool
) -> list[RequestFormat]:
    """Return the ways in which requests may be written, the preferred first; `has_text`: prompts
    have a text of their own. Raises RequestError if there is none.
    """
    can_send_text = has_text or server.word_width > 0
    can_send_ids = settings.api != "chat" and server.takes_ids
    kinds = [
        sends_ids
        for sends_ids, can_send, name in (
            (True, can_send_ids, "ids"),
            (False, can_send_text, "text"),
        )
        if can_send and settings.prompts in ("auto", name)
    ]
    if not kinds:
        have = "texts" if can_send_text else "token ids without a text"
        raise RequestError(
            f"the prompts of this case are {have}, which cannot be sent with"
            f" engine.prompts={settings.prompts} and engine.api={settings.api} to this server;"
            " allowed: prompts with a text (question.data.source=texts, --data and --tokenizer),"
            " or a server that takes token ids"
        )
    plain = RequestFormat(
        api=settings.api,
        model=server.model,
        sends_ids=True,
        is_exact=requests.lengths == "exact",
        asks_logprobs=settings.logprobs,
        word_width=server.word_width,
    )
    return [
        replace(plain, sends_ids=sends_ids, asks_ids=asks_ids)
        for sends_ids in kinds
        for asks_ids in (True, False)
    ]
