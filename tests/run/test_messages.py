"""Tests of the protocol between parent and agents: one line per message, and none is accepted
without the run's token.
"""

import json
from typing import Any

import pytest

from steelyard.run import messages
from steelyard.run.messages import (
    TO_AGENT,
    TO_PARENT,
    MessageError,
    PingMessage,
    PongMessage,
    StopMessage,
)

TOKEN = "a" * 32


def encode_line(**fields: Any) -> bytes:
    """Return the fields as one line of JSON."""
    return json.dumps(fields).encode() + b"\n"


def test_message_round_trips_through_one_line() -> None:
    sent = PingMessage(token=TOKEN, sent_s=1.5)
    raw = messages.encode_message(sent)
    assert raw.count(b"\n") == 1
    assert messages.decode_message(raw, TO_AGENT, TOKEN) == sent
    assert messages.decode_message(raw, TO_AGENT, None) == sent  # before a token is known


@pytest.mark.parametrize(
    "raw,why",
    [
        (encode_line(kind="stop", token="b" * 32), "the token is wrong"),
        (encode_line(kind="stop"), "the token is wrong or missing"),
        (encode_line(kind="stop", token=7), "the token is wrong"),
        (b"Welcome to host north!\n", "not JSON"),
        (b"[1, 2]\n", "the token is wrong or missing"),
        (b"[" * 100_000 + b"\n", "not JSON"),
        (encode_line(kind="reboot", token=TOKEN), "kind"),
        (encode_line(kind="stop", token=TOKEN, command="rm"), "command"),
        (encode_line(kind="ping", token=TOKEN, sent_s="soon"), "sent_s"),
        (b'{"kind":"ping","token":"' + TOKEN.encode() + b'","sent_s":NaN}', "sent_s"),
    ],
)
def test_malformed_message_is_refused(raw: bytes, why: str) -> None:
    with pytest.raises(MessageError, match=why):
        messages.decode_message(raw, TO_AGENT, TOKEN)


def test_messages_for_the_other_side_are_refused() -> None:
    with pytest.raises(MessageError):
        messages.decode_message(messages.encode_message(StopMessage(token=TOKEN)), TO_PARENT, TOKEN)
    with pytest.raises(MessageError):
        messages.decode_message(
            messages.encode_message(PongMessage(token=TOKEN, sent_s=0.0, at_s=0.0)), TO_AGENT, TOKEN
        )


def test_line_beyond_the_size_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "MAX_LINE_BYTES", 10)
    with pytest.raises(MessageError, match="more than 10 bytes"):
        messages.decode_message(b"x" * 11, TO_AGENT, TOKEN)


def test_rank_file_that_changed_in_transit_is_detected() -> None:
    message = messages.make_rank_file_message(TOKEN, 3, '{"rank": 3}')
    assert messages.is_intact(message)
    assert not messages.is_intact(message.model_copy(update={"text": '{"rank": 4}'}))


def test_tokens_are_unique() -> None:
    assert len({messages.make_token() for _ in range(8)}) == 8
