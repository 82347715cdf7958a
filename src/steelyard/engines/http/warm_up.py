"""Requests before a pass: which way of writing them a server takes, and warming up."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from steelyard.case.request import EngineSettings
from steelyard.data.prompts import GenerationRequest, PromptRequests
from steelyard.engine.generation import RequestEnd
from steelyard.engine.server_rows import ASK_NATURAL, SEND_TEXTS
from steelyard.engines.http.client import HttpClient, RequestFormat
from steelyard.engines.http.ready_server import ReadyServer
from steelyard.errors import RequestError

NO_EXACT = "the server cannot ignore the end of a text, so that answers are shorter than asked"
NO_IDS = "the server takes no token ids, and the prompts of this case have no text"
PROBE_TEXT = "a b c"  # of a prompt that finds out whether texts are taken


@dataclass
class EndSink:
    """Takes what requests report that are not measured, and keeps their ends in order."""

    ends: list[RequestEnd]

    def mark_sent(self, number: int) -> None:
        """Ignore when a request is sent."""

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

    Raises RequestError if it answers each with an error status, in a line that names what the case
    must ask for instead, if that is found out. A request that fails without a status does not
    refuse: the way it was written is taken.
    """
    request = requests.make_warmup(0)
    formats = list_formats(server, settings, requests, has_text=request.text is not None)
    errors: list[str] = []
    for request_format in formats:
        end = _send_one(server.client, request_format, request)
        if end.outcome != "refused":
            template_tokens = 0
            if request_format.api == "chat" and end.prompt_tokens is not None:
                template_tokens = max(0, end.prompt_tokens - len(request.prompt))
            return replace(request_format, template_tokens=template_tokens)
        errors.append(_shorten(end))
    can_change_prompts = formats[-1].sends_ids and settings.prompts == "auto"
    remedy = _find_remedy(server.client, formats[-1], request, errors[-1], can_change_prompts)
    # the last way asks for least, so that what it is refused for is the reason
    why = f"the server refuses requests of this case: {errors[-1]}"
    if errors[-1].startswith("status 404"):
        why += "; engine.endpoint ends in /v1 on most servers, engine.model is the server's name"
    raise RequestError(remedy or why)


def _send_one(
    client: HttpClient, request_format: RequestFormat, request: GenerationRequest
) -> RequestEnd:
    """Send one request, wait until it has ended, and return how."""
    [end] = send_requests(client, request_format, [request])
    return end


def _shorten(end: RequestEnd) -> str:
    """Return the first line of why a request failed."""
    return (end.error or end.outcome).partition("\n")[0]


def _find_remedy(
    client: HttpClient,
    refused: RequestFormat,
    request: GenerationRequest,
    why: str,
    can_change_prompts: bool,
) -> str | None:
    """Return a line with the settings under which a server takes what it has refused for the reason
    `why`, which one request for each finds out; None if there are none. `can_change_prompts`: ids
    could be texts.
    """
    natural = replace(refused, is_exact=False)
    natural_end = _send_one(client, natural, request) if refused.is_exact else None
    if natural_end is not None and natural_end.outcome != "refused":
        return f"{NO_EXACT} ({why}); run with {ASK_NATURAL}"
    if not can_change_prompts:
        return None
    with_text = replace(request, text=PROBE_TEXT)
    text_end = _send_one(client, replace(refused, sends_ids=False), with_text)
    if text_end.outcome != "refused":
        return f"{NO_IDS} ({why}); run with {SEND_TEXTS}"
    if natural_end is None:
        return None
    both_end = _send_one(client, replace(natural, sends_ids=False), with_text)
    if both_end.outcome == "refused":
        return None
    return (
        f"{NO_EXACT} ({_shorten(text_end)}), and {NO_IDS.removeprefix('the server ')}"
        f" ({_shorten(natural_end)}); run with {ASK_NATURAL} {SEND_TEXTS}"
    )


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
        remedy = "--set engine.prompts=auto" if can_send_text else SEND_TEXTS
        raise RequestError(
            f"the prompts of this case are {have}, which cannot be sent with"
            f" engine.prompts={settings.prompts} and engine.api={settings.api} to this server;"
            f" run with {remedy}"
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
