"""The client against the mock server in its own loop: by counts and outcomes, never by times."""

import json
import socket
from pathlib import Path

import aiohttp
import pytest

from fixtures.serving import CHAT, IDS, TEXT, RecordingSink, make_request, open_client, send
from fixtures.web import make_certificate
from steelyard.engine.generation import RequestEnd
from steelyard.engines.http.answer import Answer
from steelyard.engines.http.client import RequestFormat
from steelyard.engines.http.event_stream import StreamError
from steelyard.engines.http.mock_server import Script


@pytest.mark.parametrize(
    ("script", "form", "chunks", "counted_by"),
    [
        (Script(), IDS, [(1, (i,)) for i in range(10, 15)], "ids"),
        (Script(chunk_tokens=2), IDS, [(2, (10, 11)), (2, (12, 13)), (1, (14,))], "ids"),
        (Script(ids=0), IDS, [(1, ())] * 5, "usage"),
        (Script(ids=0, chunk_tokens=3), TEXT, [(1, ())] * 2, "usage"),
        (Script(usage="same"), TEXT, [(1, ())] * 5, "usage"),
        (Script(usage="none"), TEXT, [(1, ())] * 5, "chunks"),
        (Script(), CHAT, [(1, ())] * 5, "usage"),
        (Script(channel="reasoning_content"), CHAT, [(1, ())] * 5, "usage"),
        (Script(early=2), TEXT, [(1, ())] * 3, "usage"),
    ],
)
def test_every_token_of_many_streams_arrives_once(
    script: Script, form: RequestFormat, chunks: list, counted_by: str
) -> None:
    with open_client(script) as client:
        sink = send(client, [make_request(number) for number in range(40)], form)
    assert sink.chunks == dict.fromkeys(range(40), chunks)
    assert {(end.outcome, end.counted_by) for end in sink.ends.values()} == {("ok", counted_by)}


def test_a_thousand_streams_at_a_time() -> None:
    """All are open together: the server's first token comes after the last request was sent."""
    requests = [make_request(number) for number in range(1000)]
    with open_client(Script(ttft_s=2.0)) as client:
        sink = send(client, requests, IDS)
    assert {end.outcome for end in sink.ends.values()} == {"ok"}
    assert [sum(tokens for tokens, _ in sink.chunks[number]) for number in range(1000)] == [
        sum(tokens for tokens, _ in sink.chunks[0])
    ] * 1000


def test_a_request_is_marked_once_when_it_begins_to_be_sent() -> None:
    """Not when it is submitted, and also if there is nobody to send it to."""
    with open_client(Script()) as client:
        sink = RecordingSink()
        port = client.make_port(sink, client.loop.time, IDS)
        for number in range(20):
            port.submit(make_request(number))
        assert sink.sent == []
        while len(sink.ends) < 20:
            port.wait(None)
        assert client.get(f"{client.endpoint}/models") is not None  # which is no request
        port.close()
        assert sorted(sink.sent) == [*range(20)]
    with open_client(Script(fault="hang"), timeout_s=0.2) as client:
        assert send(client, [make_request(0)]).sent == [0]
    with open_client(Script(), port=1) as client:
        assert send(client, [make_request(0)]).sent == [0]


def test_the_time_to_connect_is_not_the_client_s_lateness() -> None:
    """A request is sent from the moment its connection is opened, or the open one is used again."""
    with open_client(Script()) as client:
        sink = RecordingSink()
        port = client.make_port(sink, client.loop.time, IDS)
        connect, sent = client.loop.sock_connect, []

        async def note_and_connect(*arguments):
            sent.append([*sink.sent])
            return await connect(*arguments)

        client.loop.sock_connect = note_and_connect
        for number in range(2):
            port.submit(make_request(number))
            while number not in sink.ends:
                port.wait(None)
        port.close()
    assert (sent, sink.sent) == ([[0]], [0, 1])


def test_connections_are_shared() -> None:
    with open_client(Script()) as client:
        for _ in range(5):
            send(client, [make_request(number) for number in range(3)])
        connections = sum(len(pool) for pool in client.session.connector._conns.values())
    assert connections == 3


@pytest.mark.parametrize(
    ("script", "outcome", "error", "chunks"),
    [
        (Script(fault="status"), "refused", 'status 500: {"error": "as the script says"}', 0),
        (Script(fault="status", status=422), "refused", "status 422: ", 0),
        (Script(fault="cut"), "cut", "", 2),
        (Script(fault="garbage"), "garbage", "not a line of a stream of events: '<html>", 0),
        (Script(fault="error"), "failed", "the server reports: ", 0),
        (Script(fault="empty"), "empty", "a regular end without any token", 0),
        (Script(fault="silence"), "timeout", "no chunk for longer than engine.timeout_s", 1),
        (Script(fault="hang"), "timeout", "no chunk for longer than engine.timeout_s", 0),
        (Script(fault="slow", slow_s=30.0), "timeout", "no chunk for longer", 0),
        (Script(fault="interim"), "timeout", "no chunk for longer", 0),
        (
            Script(fault="drip", status=503),
            "timeout",
            "status 503, and its text did not end within engine.timeout_s",
            0,
        ),
        (Script(fault="flood", flood_bytes=1 << 24), "flooded", "an event of more than 1,0", 0),
        (Script(fault="lines", flood_bytes=1 << 24), "flooded", "more than 74 tokens", 74),
    ],
    ids=lambda value: value.fault if isinstance(value, Script) else "",
)
def test_each_fault_of_a_server_has_its_outcome(
    script: Script, outcome: str, error: str, chunks: int
) -> None:
    with open_client(script, timeout_s=0.3) as client:
        sink = send(client, [make_request(0), make_request(1)])
    for end in sink.ends.values():
        assert (end.outcome, (end.error or "").startswith(error)) == (outcome, True), end
    assert sum(tokens for tokens, _ in sink.chunks.get(0, ())) <= chunks


def test_a_fault_ends_its_request_alone() -> None:
    with open_client(Script(fault="status", fault_after=3)) as client:
        sink = send(client, [make_request(number) for number in range(5)])
    assert sorted(end.outcome for end in sink.ends.values()) == ["ok"] * 3 + ["refused"] * 2


def test_a_port_where_nobody_listens_is_unreachable() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with open_client(Script(), port=unused.getsockname()[1]) as client:
            assert send(client, [make_request(0)]).ends[0].outcome == "unreachable"
            assert client.get(f"{client.endpoint}/models") is None


def test_a_key_is_sent_and_shown_nowhere() -> None:
    key = "secret-0123456789"
    with open_client(Script(key=key), key=key) as client:
        assert send(client, [make_request(0)]).ends[0].outcome == "ok"
    with open_client(Script(key=key), key="wrong-secret") as client:  # which the server repeats
        end = send(client, [make_request(0)]).ends[0]
    assert (end.outcome, end.error) == (
        "refused",
        'status 401: {"error": "wrong key: Bearer ***"}',
    )


SECRET = 'sk-"Zt4Qx9Lw7Rv2\\\\Mn5B'


@pytest.mark.parametrize(
    "text",
    [
        f"x{SECRET}y",
        f"a {SECRET}",
        json.dumps({"wrong": f"Bearer {SECRET}"}),
        repr(f"Bearer {SECRET}'"),
        *("." * dots + SECRET for dots in range(280, 301)),  # cut off within the key
        f"a line that was cut off: {SECRET[:9]}...",
        (SECRET + " ") * 100,
    ],
)
def test_no_part_of_a_key_is_shown(text: str) -> None:
    with open_client(Script(), key=SECRET) as client:
        shown = client.hide_key(text)
    assert (SECRET[:8] in shown, json.dumps(SECRET)[1:9] in shown) == (False, False)
    assert "Mn5B" not in shown
    assert len(shown) <= 300


def test_texts_are_one_short_line_without_a_key() -> None:
    with open_client(Script()) as client:
        assert client.hide_key("a\n\tb  c") == "a b c"
        assert client.hide_key("x" * 400) == "x" * 300
    with open_client(Script(), key="x") as client:
        assert client.hide_key("a x") == "a ***"
        assert client.hide_key("\ud800 \U0001f600x") == "? \U0001f600***"


@pytest.mark.parametrize("fault", ["status", "garbage", "not json", "error"])
@pytest.mark.parametrize("dots", [0, 40, 70, 255, 265, 280])
def test_a_server_that_repeats_the_key_puts_it_into_no_error(fault: str, dots: int) -> None:
    """Wherever its text is cut off: nothing of the key is left."""
    key = "sk-Zt4Qx9Lw7Rv2Mn5B"
    said = "." * dots + key
    lines = {
        "garbage": f"{said}\n\n",
        "not json": f"data: {said}\n\n",
        "error": f"data: {json.dumps({'error': said})}\n\n",
    }
    with open_client(Script(key="another"), key=key) as client:
        if fault == "status":
            client.session.headers["Authorization"] = f"Bearer {said}"
            end = send(client, [make_request(0)]).ends[0]
        else:
            with pytest.raises(StreamError) as caught:
                Answer(3, 3).feed(lines[fault].encode())
            end = RequestEnd("garbage", client.hide_key(str(caught.value)))
    assert "sk-Z" not in str(end.error)
    assert "..." in str(end.error) or not dots


@pytest.mark.process
def test_only_certificates_that_the_system_trusts_are_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate = make_certificate(tmp_path)
    with open_client(Script(), certificate=certificate) as client:
        end = send(client, [make_request(0)]).ends[0]
    assert end.outcome == "unreachable"
    assert "CERTIFICATE_VERIFY_FAILED" in str(end.error)
    monkeypatch.setenv("SSL_CERT_FILE", f"{certificate}.crt")
    with open_client(Script(), certificate=certificate) as client:
        assert send(client, [make_request(0)]).ends[0].outcome == "ok"


def test_wait_returns_at_its_time_and_goes_on_later() -> None:
    with open_client(Script(ttft_s=0.05)) as client:
        sink = RecordingSink()
        port = client.make_port(sink, client.loop.time, IDS)
        port.submit(make_request(0))
        until_s = client.loop.time() + 0.01
        port.wait(until_s)
        assert client.loop.time() >= until_s
        assert sink.ends == {}
        port.wait(client.loop.time() - 1.0)  # a time that has passed: at once
        port.wait(None)
        assert sink.ends[0].outcome == "ok"
        port.submit(make_request(1))
        port.close()  # a request that has not ended is given up
    assert [*sink.ends] == [0]


def test_a_defect_of_the_sink_is_raised_by_wait() -> None:
    class BrokenSink(RecordingSink):
        def add_chunk(self, number, tokens, ids=()):
            raise KeyError(number)

    with open_client(Script()) as client:
        port = client.make_port(BrokenSink(), client.loop.time, IDS)
        port.submit(make_request(3))
        with pytest.raises(KeyError):
            port.wait(None)
        port.close()


@pytest.mark.parametrize(
    ("form", "body"),
    [
        (
            IDS,
            {
                "prompt": [11, 12, 13],
                "ignore_eos": True,
                "min_tokens": 5,
                "return_token_ids": True,
            },
        ),
        (TEXT, {"prompt": "a b c"}),
        (CHAT, {"messages": [{"role": "user", "content": "a b c"}]}),
        (
            RequestFormat("chat", "mock", False, False, asks_logprobs=True),
            {
                "messages": [{"role": "user", "content": "a b c"}],
                "logprobs": True,
                "top_logprobs": 1,
            },
        ),
        (
            RequestFormat("completions", "mock", False, False, asks_logprobs=True, word_width=4),
            {"prompt": "t011 t012 t013", "logprobs": 1},
        ),
    ],
)
def test_requests_have_these_fields_alone(form: RequestFormat, body: dict) -> None:
    common = {
        "model": "mock",
        "max_tokens": 5,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert json.loads(form.make_body(make_request(0))) == common | body


def test_an_encoded_answer_is_not_inflated() -> None:
    with open_client(Script()) as client:
        assert client.session._auto_decompress is False
        assert client.session.headers["Accept-Encoding"] == "identity"
        assert isinstance(client.session.cookie_jar, aiohttp.DummyCookieJar)
