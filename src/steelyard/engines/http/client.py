"""The client: one asyncio loop that sends requests over shared connections and reports what arrives
to the loop of requests (run/requests.py), which stamps it.

The loop runs only inside `wait`, in the thread of the caller. Bytes are neither decompressed nor
kept, so that no answer can fill the memory.
"""

import asyncio
import json
import resource
import ssl
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import aiohttp

from steelyard.data.prompts import GenerationRequest
from steelyard.data.request_outcomes import Outcome
from steelyard.engine.generation import RequestEnd, RequestSink
from steelyard.engines.http.answer import Answer
from steelyard.engines.http.event_stream import StreamError
from steelyard.engines.http.key_mask import mask_key
from steelyard.engines.http.logprobs import DistanceSum
from steelyard.engines.http.precise_loop import make_loop
from steelyard.engines.http.send_mark import SendMark, trace_sending
from steelyard.engines.http.word_vocabulary import format_words

READ_BYTES = 1 << 20  # of the buffer of a connection: a smaller one slows long prompts down
IDLE_S = 2.0  # a connection is not used again after this: servers close theirs after 5 s
CONNECT_S = 30.0
DRAIN_S = 1.0  # for what follows the end of an answer, so that its connection can be used again
MAX_BODY_BYTES = 4 << 20
MAX_SHOWN_CHARS = 300
MAX_ERROR_BYTES = 8 << 10  # that are read of what a server says of a request it refuses
HEADERS = {"Content-Type": "application/json", "Accept-Encoding": "identity"}


@dataclass(frozen=True)
class RequestFormat:
    """How requests are written: for which `api` ("completions" or "chat") and `model`; prompts as
    token ids (`sends_ids`) or text; with `is_exact` the end of a text is ignored; `asks_ids` asks
    for the ids of the output, `asks_logprobs` for log-probabilities. With `word_width` a prompt is
    written in words of that width (word_vocabulary.py), as answers are read. `template_tokens` is
    how many tokens the server's template of a chat adds to each prompt.
    """

    api: str
    model: str
    sends_ids: bool
    is_exact: bool
    asks_ids: bool = False
    asks_logprobs: bool = False
    word_width: int = 0
    template_tokens: int = 0

    @property
    def path(self) -> str:
        """The path of the interface behind the endpoint."""
        return "/chat/completions" if self.api == "chat" else "/completions"

    def make_body(self, request: GenerationRequest) -> bytes:
        """Return the JSON body of a request."""
        prompt: Any = list(request.prompt)
        if not self.sends_ids:
            words = format_words(request.prompt, self.word_width) if self.word_width else None
            prompt = request.text if words is None else words
        body: dict[str, Any] = {"model": self.model}
        if self.api == "chat":
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        body |= {"max_tokens": request.output_tokens, "temperature": 0, "stream": True}
        body["stream_options"] = {"include_usage": True}
        if self.is_exact:
            body |= {"ignore_eos": True, "min_tokens": request.output_tokens}
        if self.asks_ids:
            body["return_token_ids"] = True
        if self.asks_logprobs:
            chat = {"logprobs": True, "top_logprobs": 1}
            body |= chat if self.api == "chat" else {"logprobs": 1}
        return json.dumps(body).encode()


@dataclass
class PassSums:
    """Facts that the answers of a pass state beside their tokens, by the number of the request: how
    many tokens of its prompt came from a cache (`cached`), and its `distances`. Requests whose
    answer does not state them are missing.
    """

    cached: dict[int, int] = field(default_factory=dict)
    distances: dict[int, DistanceSum] = field(default_factory=dict)

    @property
    def cached_tokens(self) -> int | None:
        """The cached tokens of all prompts; None if no answer states any."""
        return sum(self.cached.values()) if self.cached else None

    def add(self, number: int, answer: Answer) -> None:
        """Store the facts that the answer to a request states, in place of earlier ones."""
        if answer.cached_tokens is not None:
            self.cached[number] = answer.cached_tokens
        if answer.distances.compared:
            self.distances[number] = answer.distances


class HttpClient:
    """A client of one server: `endpoint` is its address with the version (`http://…/v1`), `key` the
    secret that it asks for (None: none), which no text has that this object returns. `timeout_s` is
    how long it may be silent. `open` begins, `close` ends all connections; `get` reads a page;
    `make_port` returns a port.
    """

    def __init__(self, endpoint: str, key: str | None, timeout_s: float) -> None:
        self.endpoint = endpoint.rstrip("/")
        self._key, self.timeout_s = key, timeout_s
        self._connect_s = min(CONNECT_S, timeout_s)
        self.loop = make_loop()
        self._session: aiohttp.ClientSession | None = None

    def open(self) -> None:
        """Make the session, and allow this process as many open files as it may have."""
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        with suppress(ValueError, OSError):  # a system with a lower limit of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        self._session = self.loop.run_until_complete(self._make_session())

    async def _make_session(self) -> aiohttp.ClientSession:
        """Return a session with shared connections without limit of their number."""
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=self._connect_s, sock_read=self.timeout_s
        )
        headers = HEADERS | ({} if self._key is None else {"Authorization": f"Bearer {self._key}"})
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0,
                keepalive_timeout=IDLE_S,
                ttl_dns_cache=None,
                # made here: aiohttp makes its own when it is imported
                ssl=ssl.create_default_context() if self.endpoint.startswith("https") else True,
            ),
            timeout=timeout,
            headers=headers,
            read_bufsize=READ_BYTES,
            auto_decompress=False,
            trust_env=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            trace_configs=[trace_sending()],
        )

    @property
    def session(self) -> aiohttp.ClientSession:
        """The open session. Raises RuntimeError before `open` and after `close`."""
        if self._session is None:
            raise RuntimeError("the client is not open")
        return self._session

    def close(self) -> None:
        """Close all connections and the loop; harmless if it was called before."""
        if self.loop.is_closed():
            return
        if self._session is not None:
            self.loop.run_until_complete(self._session.close())
            self._session = None
        self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.close()

    def make_port(
        self, sink: RequestSink, clock: Callable[[], float], request_format: RequestFormat
    ) -> "HttpPort":
        """Return a port that sends requests in a format and reports to a sink."""
        return HttpPort(self, sink, clock, request_format)

    def get(self, address: str, timeout_s: float = 10.0) -> tuple[int, bytes] | None:
        """Return status and body of a page, of at most `MAX_BODY_BYTES`; None if there is no
        answer in time.
        """
        return self.loop.run_until_complete(self.fetch(address, timeout_s))

    async def fetch(self, address: str, timeout_s: float = 10.0) -> tuple[int, bytes] | None:
        """Return status and body of a page as `get` does, inside the loop."""
        try:
            async with asyncio.timeout(timeout_s):
                async with self.session.get(address, allow_redirects=False) as response:
                    return response.status, await _read_body(response, MAX_BODY_BYTES)
        except (aiohttp.ClientError, OSError, TimeoutError):
            return None

    def hide_key(self, text: str) -> str:
        """Return a text of a server without the key in it, in one line and then shortened. Half a
        surrogate pair, which a record cannot hold, becomes a question mark. Every text goes through
        here before it is kept.
        """
        shown = mask_key(text, self._key) if self._key else text
        shown = shown.encode("utf-8", "replace").decode()
        return " ".join(shown.split())[:MAX_SHOWN_CHARS]

    async def carry_out(self, request: GenerationRequest, port: "HttpPort") -> RequestEnd:
        """Send a request, report its chunks to the port's sink, and return how it ended."""
        answer = Answer(request.output_tokens, len(request.prompt), port.request_format.word_width)
        try:
            end = await self._read_answer(request, port, answer)
        except StreamError as error:
            end = _make_failure(answer, error.outcome, str(error))
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            end = _make_failure(answer, *explain_failure(error))
        port.sums.add(request.number, answer)
        return self._complete_end(end, port)

    def _complete_end(self, end: RequestEnd, port: "HttpPort") -> RequestEnd:
        """Return an end without the key in its error, and without the tokens of a template among
        those of its prompt.
        """
        error = None if end.error is None else self.hide_key(end.error)
        prompt_tokens = end.prompt_tokens
        if prompt_tokens is not None:
            prompt_tokens = max(0, prompt_tokens - port.request_format.template_tokens)
        return replace(end, error=error, prompt_tokens=prompt_tokens)

    async def _read_answer(
        self, request: GenerationRequest, port: "HttpPort", answer: Answer
    ) -> RequestEnd:
        """Send a request and read its answer to the end. Raises StreamError, and what aiohttp
        raises.
        """
        path, body = port.request_format.path, port.request_format.make_body(request)
        # of headers as a whole: `sock_read` limits the silence between any two pieces of them
        async with asyncio.timeout(self._connect_s + self.timeout_s):
            response = await self.session.post(
                f"{self.endpoint}{path}",
                data=body,
                allow_redirects=False,
                trace_request_ctx=SendMark(partial(port.sink.mark_sent, request.number)),
            )
        async with response:
            if response.status != 200:
                return await self._read_refusal(response)
            heard_s = self.loop.time()
            async for received in response.content.iter_any():
                chunks = answer.feed(received)
                for chunk in chunks:
                    port.sink.add_chunk(request.number, chunk.tokens, chunk.ids)
                if answer.is_done:
                    # now: the pass may end, and cancel this, before the connection is drained
                    port.sums.add(request.number, answer)
                    port.report_end(request.number, self._complete_end(answer.end(), port))
                    await _drain(response)
                    return answer.end()
                if chunks:
                    heard_s = self.loop.time()
                elif self.loop.time() - heard_s > self.timeout_s:
                    raise TimeoutError
            for chunk in answer.finish():
                port.sink.add_chunk(request.number, chunk.tokens, chunk.ids)
        return answer.end()

    async def _read_refusal(self, response: aiohttp.ClientResponse) -> RequestEnd:
        """Return the end of a request that the server refuses with a status, and what it says of
        it. Raises StreamError if that does not end in time, and what aiohttp raises.
        """
        try:
            async with asyncio.timeout(self.timeout_s):
                text = (await _read_body(response, MAX_ERROR_BYTES)).decode("utf-8", "replace")
        except TimeoutError as error:
            said = f"status {response.status}, and its text did not end within engine.timeout_s"
            raise StreamError("timeout", said) from error
        return RequestEnd("refused", f"status {response.status}: {text}")


class HttpPort:
    """Where the loop of requests hands in requests for a server (a `RequestPort`): `wait` runs the
    client's loop. `sums` are what the answers of the pass say beside their tokens.
    """

    is_separate = True

    def __init__(
        self,
        client: HttpClient,
        sink: RequestSink,
        clock: Callable[[], float],
        request_format: RequestFormat,
    ) -> None:
        self._client, self.sink, self._clock = client, sink, clock
        self.request_format = request_format
        self.sums = PassSums()
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended: set[int] = set()
        self._defect: BaseException | None = None

    def submit(self, request: GenerationRequest) -> None:
        """Begin a request; it is sent when the loop runs next."""
        self.start(self._carry_out(request))

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine beside the requests, until the port is closed."""
        task = self._client.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._end_task)

    def wait(self, until_s: float | None) -> None:
        """Run the client's loop until the clock shows `until_s` (None: without limit) or a request
        has ended. Raises what a request raised that is a defect of this client.
        """
        loop, timer = self._client.loop, None
        if until_s is not None:
            delay_s = until_s - self._clock()
            if delay_s <= 0:
                loop.call_soon(loop.stop)
            else:
                timer = loop.call_later(delay_s, loop.stop)
        loop.run_forever()
        if timer is not None:
            timer.cancel()
        if self._defect is not None:
            raise self._defect

    def close(self) -> None:
        """Give up the requests that have not ended."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            self._client.loop.run_until_complete(asyncio.wait(set(self._tasks)))

    def report_end(self, number: int, end: RequestEnd) -> None:
        """Report the end of a request to the sink, once, and let `wait` return."""
        if number not in self._ended:
            self._ended.add(number)
            self.sink.end_request(number, end)
            self._client.loop.stop()

    async def _carry_out(self, request: GenerationRequest) -> None:
        """Send a request and report its end."""
        self.report_end(request.number, await self._client.carry_out(request, self))

    def _end_task(self, task: "asyncio.Task[None]") -> None:
        """Forget a task that is over; keep its exception, which is a defect, for `wait`."""
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._defect = task.exception()
            self._client.loop.stop()


def explain_failure(error: Exception) -> tuple[Outcome, str]:
    """Return the outcome of a request that failed with an exception, and the text of its error."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if isinstance(error, aiohttp.ConnectionTimeoutError | aiohttp.ClientConnectorError):
        return "unreachable", text
    if isinstance(error, TimeoutError):
        return "timeout", "no chunk for longer than engine.timeout_s"
    if isinstance(error, aiohttp.ClientResponseError):
        return "garbage", text
    if isinstance(error, aiohttp.ClientPayloadError | aiohttp.ServerConnectionError | OSError):
        return "cut", text
    return "failed", text


def _make_failure(answer: Answer, outcome: Outcome, text: str) -> RequestEnd:
    """Return the end of a request that failed in the midst of an answer."""
    return replace(answer.end(), outcome=outcome, error=text)


async def _read_body(response: aiohttp.ClientResponse, most_bytes: int) -> bytes:
    """Return the body of a response, cut off at so many bytes."""
    body = bytearray()
    async for received in response.content.iter_any():
        body += received
        if len(body) >= most_bytes:
            break
    return bytes(body[:most_bytes])


async def _drain(response: aiohttp.ClientResponse) -> None:
    """Read what follows the end of an answer, a little at most, so that the connection can be used
    again; whatever goes wrong with it does not matter any more.
    """
    with suppress(aiohttp.ClientError, OSError, TimeoutError):
        async with asyncio.timeout(DRAIN_S):
            await _read_body(response, READ_BYTES)
