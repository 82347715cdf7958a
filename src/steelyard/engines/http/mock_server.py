"""A server of OpenAI's interface with known delays and scripted faults, which generates nothing.

Started as `python -m steelyard.engines.http.mock_server [--NAME VALUE]...`, on loopback alone; its
first line on stdout is JSON with its `port`. The client is measured with it before each pass, and
tests let it fail. It needs the standard library alone, so that its delays are its own.
"""

import argparse
import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any

from steelyard.engines.http.precise_loop import make_loop

LOOPBACK = "127.0.0.1"
MAX_BODY_BYTES = 64 << 20
FLOOD_BYTES = 64 << 10  # of one write
DRIP_S = 0.02  # between the pieces of what does not end
FIRST_ID = 10
WORDS = 100  # that texts are made of


@dataclass(frozen=True)
class Script:
    """What the server does with a request. `ttft_s` until the first token, `tpot_s` between tokens,
    `chunk_tokens` in a chunk; `usage` in a chunk of its own ("own"), in the last one with tokens
    ("same"), or in none ("none"); `ids`: tokens have ids where they are asked for, `stamps`: the
    ids are the microseconds of the loop's clock when a chunk is written. `early`: so many tokens
    fewer than asked; `channel`: the field of a chat's text; `cached`: tokens of each prompt that
    its cache is said to have had; `vocab`: the first id that it does not generate; `distance`: by
    how many nats another token is likelier than the first; `template_tokens`: of a chat; `linger_s`
    until a connection is free again after the last event.

    `fault`, after `fault_after` requests: "status" (answer with `status`), "die", "hang" (no answer
    at all), "slow" (headers after `slow_s`), "cut" (in the midst of the stream), "garbage",
    "silence" (after one token), "flood" (`flood_bytes` in one line, or in "lines"), "empty" (a role
    and no token), "error" (an error object in the stream), "interim" (headers that are never the
    last), "drip" (answer with `status`, whose text does not end). `rejects`: names of fields, with
    commas between, or "ids", that are answered with status 422; `key`: what the client must know.
    """

    port: int = 0
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    chunk_tokens: int = 1
    usage: str = "own"
    ids: int = 1
    stamps: int = 0
    early: int = 0
    channel: str = "content"
    cached: int = -1
    distance: float = 0.0
    template_tokens: int = 0
    linger_s: float = 0.0
    vocab: int = 1 << 30
    fault: str = ""
    fault_after: int = 0
    status: int = 500
    slow_s: float = 0.0
    flood_bytes: int = 1 << 30
    rejects: str = ""
    key: str = ""


@dataclass(frozen=True)
class _Received:
    """A request that was read: its method, path, headers (names in lower case) and body."""

    method: str
    path: str
    headers: dict[str, str]
    body: dict[str, Any]


class MockServer:
    """The server: `serve` answers one connection after the other, by its `script`. `requests`
    counts those that asked for tokens.
    """

    def __init__(self, script: Script) -> None:
        self.script = script
        self.requests = self.prompt_tokens = self.cached_tokens = 0
        self._loop = asyncio.get_running_loop()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection until the client closes it."""
        with suppress(ConnectionError, asyncio.IncompleteReadError, ValueError):
            while (received := await _read_request(reader)) is not None:
                if not await self._answer(received, writer):
                    break
        writer.close()

    async def _answer(self, received: _Received, writer: asyncio.StreamWriter) -> bool:
        """Answer a request; return whether the connection may be used again."""
        script = self.script
        if script.key and received.headers.get("authorization") != f"Bearer {script.key}":
            shown = received.headers.get("authorization", "none")
            return await _write_json(writer, 401, {"error": f"wrong key: {shown}"})
        pages: dict[str, dict[str, Any]] = {
            "/v1/models": {"data": [{"id": "mock", "owned_by": "steelyard"}]},
            "/version": {"version": "mock-1"},
            "/health": {},
        }
        if received.path == "/metrics":
            return await _write_body(writer, 200, self._format_metrics().encode(), "text/plain")
        if received.method != "POST":
            page = pages.get(received.path)
            return await _write_json(writer, 200 if page is not None else 404, page or {})
        rejected = self._find_rejected(received.body)
        if rejected:
            return await _write_json(writer, 422, {"detail": f"Unexpected fields: {rejected}"})
        self.requests += 1
        prompt = received.body.get("prompt") or ""
        self.prompt_tokens += len(prompt)
        self.cached_tokens += max(0, script.cached)
        is_faulty = bool(script.fault) and self.requests > script.fault_after
        act = getattr(self, f"_act_{script.fault}", None) if is_faulty else None
        if act is not None:
            return bool(await act(received, writer))
        return await self._stream(received, writer, is_faulty)

    def _find_rejected(self, body: dict[str, Any]) -> list[str]:
        """Return the fields of a request that this server does not take."""
        names = [name for name in self.script.rejects.split(",") if name in body]
        if "ids" in self.script.rejects.split(",") and isinstance(body.get("prompt"), list):
            names.append("prompt")
        return names

    def _format_metrics(self) -> str:
        """Return the counters of the server's cache and queue, in Prometheus's text format, by the
        names that vLLM gives them.
        """
        if self.script.cached < 0:
            return ""
        return (
            "# HELP vllm:prefix_cache_hits_total Prefix cache hits, in number of cached tokens.\n"
            "# TYPE vllm:prefix_cache_hits_total counter\n"
            f'vllm:prefix_cache_hits_total{{engine="0",model_name="mock"}} {self.cached_tokens}.0\n'
            f'vllm:prefix_cache_queries_total{{engine="0"}} {self.prompt_tokens}.0\n'
            'vllm:num_requests_waiting{engine="0"} 3.0\n'
            'vllm:num_preemptions_total{engine="0"} 2.0\n'
        )

    async def _act_status(self, received: _Received, writer: asyncio.StreamWriter) -> bool:
        """Answer with the script's status."""
        return await _write_json(writer, self.script.status, {"error": "as the script says"})

    async def _act_die(self, received: _Received, writer: asyncio.StreamWriter) -> bool:
        """End this process at once."""
        os.kill(os.getpid(), signal.SIGKILL)
        return False

    async def _act_hang(self, received: _Received, writer: asyncio.StreamWriter) -> bool:
        """Never answer."""
        await self._loop.create_future()
        return False

    async def _act_slow(self, received: _Received, writer: asyncio.StreamWriter) -> bool:
        """Answer after the script's delay."""
        await asyncio.sleep(self.script.slow_s)
        return await self._stream(received, writer, False)

    async def _act_interim(self, received: _Received, writer: asyncio.StreamWriter) -> bool:
        """Write headers that announce others, again and again."""
        return await self._drip(writer, b"HTTP/1.1 102 Processing\r\n\r\n")

    async def _act_drip(self, received: _Received, writer: asyncio.StreamWriter) -> bool:
        """Answer with the script's status and a text that does not end."""
        status = self.script.status
        writer.write(b"HTTP/1.1 %d Scripted\r\nContent-Length: 1000000\r\n\r\n" % status)
        return await self._drip(writer, b".")

    async def _drip(self, writer: asyncio.StreamWriter, piece: bytes) -> bool:
        """Write a piece every `DRIP_S` seconds, until the client has gone."""
        while True:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(DRIP_S)

    async def _act_flood(self, received: _Received, writer: asyncio.StreamWriter) -> bool:
        """Write the script's bytes as one line that does not end."""
        await _begin_stream(writer)
        return await self._flood(writer, b"data: " + b"x" * FLOOD_BYTES)

    async def _act_lines(self, received: _Received, writer: asyncio.StreamWriter) -> bool:
        """Write the script's bytes as lines of one token each."""
        await _begin_stream(writer)
        line = _format_event({"choices": [{"text": "x", "index": 0}]})
        return await self._flood(writer, line * (FLOOD_BYTES // len(line)))

    async def _flood(self, writer: asyncio.StreamWriter, piece: bytes) -> bool:
        """Write a piece again and again, up to the script's bytes."""
        for _ in range(self.script.flood_bytes // len(piece)):
            _write_chunk(writer, piece)
            await writer.drain()
        return False

    async def _stream(
        self, received: _Received, writer: asyncio.StreamWriter, is_faulty: bool
    ) -> bool:
        """Write the stream of an answer; with a fault of the stream, the part before it."""
        await _begin_stream(writer)
        fault, sent = self.script.fault if is_faulty else "", 0
        async for event in self._make_events(received, fault):
            _write_chunk(writer, event)
            await writer.drain()
            sent += 1
            if fault == "cut" and sent >= 2:
                return False
            if fault == "silence":
                await self._loop.create_future()
        await writer.drain()
        await asyncio.sleep(self.script.linger_s)
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True

    async def _make_events(self, received: _Received, fault: str) -> AsyncIterator[bytes]:
        """Yield the events of an answer, each when it is due."""
        script, body = self.script, received.body
        is_chat = received.path.endswith("/chat/completions")
        asked = max(0, int(body.get("max_tokens", 16)) - script.early)
        prompt_tokens = _count_prompt(body) + (script.template_tokens if is_chat else 0)
        usage: dict[str, Any] = {"prompt_tokens": prompt_tokens, "completion_tokens": asked}
        if script.cached >= 0:
            usage |= {"prompt_tokens_details": {"cached_tokens": script.cached}}
        start_s = self._loop.time()
        if is_chat or fault == "empty":
            yield _format_event({"choices": [{"index": 0, "delta": {"role": "assistant"}}]})
        if fault == "garbage":
            yield b"<html>not a stream of events</html>\n\n"
        if fault == "error":
            yield _format_event({"error": {"message": "the engine died", "code": 500}})
        begin = asked if fault == "empty" else 0
        for done in range(begin, asked, script.chunk_tokens):
            await self._sleep_until(start_s + script.ttft_s + script.tpot_s * done)
            count = min(script.chunk_tokens, asked - done)
            choice = self._make_choice(is_chat, done, count, body)
            if done + count == asked:
                choice["finish_reason"] = "length"
            has_usage = script.usage == "same" and done + count == asked
            yield _format_event({"choices": [choice]} | ({"usage": usage} if has_usage else {}))
        if script.usage == "own":
            yield _format_event({"choices": [], "usage": usage})
        yield b"data: [DONE]\n\n"

    async def _sleep_until(self, due_s: float) -> None:
        """Wait until the loop's clock shows `due_s`."""
        delay_s = due_s - self._loop.time()
        if delay_s > 0:
            await asyncio.sleep(delay_s)

    def _make_choice(
        self, is_chat: bool, first: int, count: int, body: dict[str, Any]
    ) -> dict[str, Any]:
        """Return a choice with `count` tokens, of which the first is the answer's token `first`."""
        tokens = range(first, first + count)
        text = "".join(f"w{token % WORDS} " for token in tokens)
        choice: dict[str, Any] = {"index": 0, "finish_reason": None}
        choice |= {"delta": {self.script.channel: text}} if is_chat else {"text": text}
        if self.script.ids and body.get("return_token_ids"):
            stamp = round(self._loop.time() * 1e6)
            choice["token_ids"] = [
                stamp if self.script.stamps else (FIRST_ID + token) % self.script.vocab
                for token in tokens
            ]
        if body.get("logprobs"):
            tops = [{"a": -0.5, "b": -0.5 + self.script.distance * (not i)} for i in tokens]
            choice["logprobs"] = {"token_logprobs": [-0.5] * count, "top_logprobs": tops}
        return choice


def _count_prompt(body: dict[str, Any]) -> int:
    """Return the number of tokens of a prompt: its ids, or its words."""
    prompt = body.get("prompt")
    if isinstance(prompt, list):
        return len(prompt)
    messages = body.get("messages") or [{"content": prompt or ""}]
    return sum(len(str(message.get("content")).split()) for message in messages)


def _format_event(value: dict[str, Any]) -> bytes:
    """Return an object as an event of a stream."""
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def _write_chunk(writer: asyncio.StreamWriter, piece: bytes) -> None:
    """Write a piece as a chunk of HTTP/1.1."""
    writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))


async def _begin_stream(writer: asyncio.StreamWriter) -> None:
    """Write the headers of a stream of events."""
    writer.write(
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    await writer.drain()


async def _write_json(writer: asyncio.StreamWriter, status: int, value: dict[str, Any]) -> bool:
    """Write a JSON answer, and return True: the connection may be used again."""
    return await _write_body(writer, status, json.dumps(value).encode(), "application/json")


async def _write_body(writer: asyncio.StreamWriter, status: int, body: bytes, kind: str) -> bool:
    """Write an answer with a body, and return True: the connection may be used again."""
    head = f"HTTP/1.1 {status} Scripted\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}"
    writer.write(head.encode() + b"\r\n\r\n" + body)
    await writer.drain()
    return True


async def _read_request(reader: asyncio.StreamReader) -> _Received | None:
    """Read a request; None if the client has closed the connection."""
    head = await reader.readuntil(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    method, path, _ = first.split(" ", 2)
    pairs = [line.partition(":") for line in lines if line]
    headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
    size = int(headers.get("content-length", "0"))
    if size > MAX_BODY_BYTES:
        return None
    body = json.loads(await reader.readexactly(size)) if size else {}
    return _Received(method, path, headers, body)


async def run(script: Script) -> None:
    """Serve on loopback until this process is ended, or its stdin is closed; write the port to
    stdout.
    """
    server = MockServer(script)
    listener = await asyncio.start_server(
        server.serve, LOOPBACK, script.port, limit=MAX_BODY_BYTES, backlog=4096
    )
    port = listener.sockets[0].getsockname()[1]
    os.write(1, json.dumps({"port": port}).encode() + b"\n")
    loop = asyncio.get_running_loop()
    ended = loop.create_future()
    loop.add_reader(0, lambda: None if os.read(0, 1 << 10) else _finish(ended))
    loop.add_signal_handler(signal.SIGTERM, _finish, ended)
    await ended


def _finish(ended: "asyncio.Future[None]") -> None:
    """Set the result of a future, unless it has one."""
    if not ended.done():
        ended.set_result(None)


def parse_script(arguments: list[str]) -> Script:
    """Return the script that the options of a command line describe: one option for each field."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for field in fields(Script):
        name = f"--{field.name.replace('_', '-')}"
        parser.add_argument(name, type=type(field.default), default=field.default)
    return replace(Script(), **vars(parser.parse_args(arguments)))


if __name__ == "__main__":
    import sys

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(run(parse_script(sys.argv[1:])))
