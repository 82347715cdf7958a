"""Server-sent events: split where the bytes happen to be cut, and never kept beyond the limits."""

import pytest

from steelyard.engines.http.event_stream import EventStream, StreamError, StreamLimits

STREAM = b': ping\r\ndata: {"a": 1}\r\n\r\nevent: x\nid: 3\ndata:b\ndata: c\n\n'
STREAM += b"retry: 5\n\ndata: [DONE]\n\n"
EVENTS = [b'{"a": 1}', b"b\nc", b"[DONE]"]


def make_stream(line_bytes: int = 1000, stream_bytes: int = 10_000) -> EventStream:
    return EventStream(StreamLimits(line_bytes, stream_bytes))


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_do_not_depend_on_where_the_bytes_are_cut(size: int) -> None:
    stream, events = make_stream(), []
    for start in range(0, len(STREAM), size):
        events += stream.feed(STREAM[start : start + size])
    assert events + stream.finish() == EVENTS


def test_the_end_of_the_stream_ends_its_last_event() -> None:
    stream = make_stream()
    assert stream.feed(b"data: a\n\ndata: b") == [b"a"]
    assert stream.finish() == [b"b"]
    assert stream.finish() == []


@pytest.mark.parametrize(
    ("pieces", "outcome", "text"),
    [
        ([b"x" * 600, b"x" * 600], "flooded", "an event of more than 1,000 bytes"),
        ([b"data: " + b"x" * 600 + b"\n"] * 2, "flooded", "an event of more than 1,000 bytes"),
        ([b"data: x\n\n" * 500] * 3, "flooded", "more than 10,000 bytes"),
        ([b": ping\n" * 800] * 2, "flooded", "more than 10,000 bytes"),
        ([b"<html>\n"], "garbage", "not a line of a stream of events: '<html>'"),
        ([b"\xff\xfe\n"], "garbage", "not a line of a stream of events: '\ufffd\ufffd'"),
    ],
)
def test_what_is_no_stream_or_too_long_ends_it(
    pieces: list[bytes], outcome: str, text: str
) -> None:
    stream = make_stream()
    with pytest.raises(StreamError, match=text.replace("(", r"\(")) as caught:
        for piece in pieces:
            stream.feed(piece)
    assert caught.value.outcome == outcome


def test_a_line_at_the_limit_is_taken() -> None:
    assert make_stream(9).feed(b"data: abc\n\n") == [b"abc"]
    with pytest.raises(StreamError):
        make_stream(8).feed(b"data: abc\n\n")
