"""Answers: tokens by ids, usage or chunks; every channel counts, an empty chunk does not; what is
no answer has an outcome of its own.
"""

import json
import math
from typing import Any

import pytest

from steelyard.engine.generation import RequestEnd
from steelyard.engines.http.answer import Answer, AnswerChunk
from steelyard.engines.http.event_stream import StreamError

USAGE = {"prompt_tokens": 7, "completion_tokens": 3}
DONE = "[DONE]"


def text(text: str, **fields: Any) -> dict[str, Any]:
    """Return a chunk of completions with this text."""
    finish = fields.pop("finish", None)
    usage = fields.pop("usage", None)
    chunk: dict[str, Any] = {"choices": [{"text": text, "finish_reason": finish, **fields}]}
    return chunk | ({} if usage is None else {"usage": usage})


def delta(finish: str | None = None, **fields: Any) -> dict[str, Any]:
    """Return a chunk of a chat with these fields in its delta."""
    return {"choices": [{"delta": fields, "finish_reason": finish}]}


def read(*objects: Any, asked: int = 3, width: int = 0) -> tuple[list[AnswerChunk], RequestEnd]:
    """Return the chunks with tokens, and the end, of a stream of these objects."""
    answer = Answer(asked, 10, width)
    lines = [one if isinstance(one, str) else json.dumps(one) for one in objects]
    chunks = [chunk for line in lines for chunk in answer.feed(f"data: {line}\n\n".encode())]
    return chunks + answer.finish(), answer.end()


@pytest.mark.parametrize(
    ("objects", "tokens", "counted_by", "usage", "said"),
    [
        # usage in a chunk of its own, in the last one with text, and beside the finish reason
        (
            [
                text("a"),
                text("b"),
                text("c", finish="length"),
                {"choices": [], "usage": USAGE},
                DONE,
            ],
            *([1, 1, 1], "usage", 3, "abc"),
        ),
        ([text("a"), text("bc", finish="length", usage=USAGE), DONE], [1, 1], "usage", 3, "abc"),
        ([text("abc"), text("", finish="stop", usage=USAGE), DONE], [1], "usage", 3, "abc"),
        # usage in every chunk: each has as many tokens as it grew by
        (
            [
                text("ab", usage={"completion_tokens": 2}),
                text("c", usage={"completion_tokens": 3}),
                text("", finish="length"),
                DONE,
            ],
            *([2, 1], "usage", 3, "abc"),
        ),
        ([text("abc", finish="length", usage=USAGE), DONE], [3], "usage", 3, "abc"),
        ([text("a"), text("b", finish="stop"), DONE], [1, 1], "chunks", None, "ab"),
        # the end of the connection behind the finish reason is a regular one
        ([text("a", finish="stop")], [1], "chunks", None, "a"),
        # chat: the role is no token, and each channel counts
        (
            [delta(role="assistant", content=""), delta(content="a"), delta(finish="stop"), DONE],
            *([1], "chunks", None, "a"),
        ),
        ([delta(reasoning_content="why"), delta(content="a"), DONE], [1, 1], "chunks", None, None),
        ([delta(reasoning="why"), DONE], [1], "chunks", None, None),
        (
            [delta(tool_calls=[{"function": {"name": "f", "arguments": ""}}]), DONE],
            *([1], "chunks", None, None),
        ),
        (
            [delta(tool_calls=[{"function": {"arguments": "{"}}]), delta(tool_calls=[{}]), DONE],
            *([1], "chunks", None, None),
        ),
        ([delta(refusal="no"), DONE], [1], "chunks", None, None),
    ],
)
def test_tokens_are_counted_as_the_server_tells_them(
    objects: list[Any], tokens: list[int], counted_by: str, usage: int | None, said: str | None
) -> None:
    chunks, end = read(*objects)
    assert [chunk.tokens for chunk in chunks] == tokens
    assert (end.outcome, end.counted_by, end.output_tokens, end.text) == (
        *("ok", counted_by, usage, said),
    )


@pytest.mark.parametrize(
    ("objects", "usage", "most"),
    [
        ([text("x"), text("y")], 256, 2 + 32),
        ([text("x" * 500)], 2000, 500 + 500),
        ([text("é" * 10, finish="length")], 100, 20 + 32),  # a token may be a byte
        ([delta(reasoning_content="why"), delta(content="a")], 100, 4 + 32),
        ([delta(tool_calls=[{"function": {"name": "f", "arguments": "{}"}}])], 100, 3 + 32),
    ],
)
def test_a_usage_beyond_the_bytes_of_the_text_is_not_believed(
    objects: list[Any], usage: int, most: int
) -> None:
    claim = {"choices": [], "usage": {"completion_tokens": most, "prompt_tokens": 9}}
    end = read(*objects, claim, DONE)[1]
    assert (end.outcome, end.output_tokens, end.counted_by) == ("ok", most, "usage")
    for number in (most + 1, usage):
        claim["usage"]["completion_tokens"] = number
        chunks, end = read(*objects, claim, DONE)
        seen = sum(len(str(value).encode()) for value in _find_texts(objects))
        assert (end.outcome, end.error) == (*("garbage", _explain(number, seen)),)
        # the chunks stay as they were counted
        assert (end.output_tokens, end.prompt_tokens, end.counted_by) == (None, 9, "chunks")
        assert len(chunks) == len(objects)


def _explain(tokens: int, size_bytes: int) -> str:
    """Return the error of a usage that cannot be true."""
    return f"usage says {tokens:,} tokens, which a text of {size_bytes:,} bytes cannot have"


def _find_texts(value: Any) -> list[str]:
    """Return all texts of a structure, but not why it finished."""
    if isinstance(value, dict):
        return [t for name in value if name != "finish_reason" for t in _find_texts(value[name])]
    if isinstance(value, list):
        return [one for item in value for one in _find_texts(item)]
    return [value] if isinstance(value, str) else []


def test_usage_is_believed_where_tokens_have_ids() -> None:
    claim = {"choices": [], "usage": {"completion_tokens": 60}}
    assert read(text("x", token_ids=[*range(60)], finish="length"), claim, DONE)[1].outcome == "ok"


def test_half_a_surrogate_pair_is_replaced() -> None:
    lines = ['{"choices": [{"text": "\\ud83d"}]}', '{"choices": [{"text": "\\ude00\\ud800"}]}']
    chunks, end = read(*lines, {"choices": [], "usage": {"completion_tokens": 2}}, DONE)
    assert ([chunk.tokens for chunk in chunks], end.text) == ([1, 1], "\U0001f600\ufffd")


def test_ids_count_before_text_and_usage() -> None:
    chunks, end = read(
        text("a", token_ids=[5, 6]),
        text("", token_ids=[7]),  # its text is held back
        text("bc", finish="length"),  # and comes here
        {"choices": [], "usage": {"completion_tokens": 4, "prompt_tokens": 9}},
        DONE,
    )
    assert chunks == [AnswerChunk(2, (5, 6)), AnswerChunk(1, (7,))]
    assert end == RequestEnd("ok", None, 4, 9, "ids", None)


def test_ids_follow_from_words_of_one_width() -> None:
    chunks, end = read(text("t012"), text(" t3"), text("45 t001 t"), text("002"), DONE, width=4)
    assert chunks == [AnswerChunk(1, (12,)), AnswerChunk(2, (345, 1)), AnswerChunk(1, (2,))]
    assert (end.counted_by, end.text) == ("ids", None)
    with pytest.raises(StreamError, match="not a word of this model's vocabulary: 'x012'"):
        read(text("x012"), width=4)


@pytest.mark.parametrize(
    ("objects", "outcome"),
    [
        ([text("a")], "cut"),
        ([], "cut"),
        ([DONE], "empty"),
        ([delta(role="assistant"), delta(finish="stop", content=""), DONE], "empty"),
        ([text("", finish="stop"), {"choices": [], "usage": USAGE}, DONE], "empty"),
    ],
)
def test_an_end_that_is_none_or_has_no_token_is_no_success(
    objects: list[Any], outcome: str
) -> None:
    assert read(*objects)[1].outcome == outcome


@pytest.mark.parametrize(
    ("line", "outcome"),
    [
        ("{", "garbage"),
        ("[1]", "garbage"),
        ("[" * 100_000, "garbage"),
        ('{"choices": 3}', "garbage"),
        ('{"choices": ["a"]}', "garbage"),
        ('{"message": "hello"}', "garbage"),
        ('{"error": {"message": "out of memory"}}', "failed"),
        ('{"object": "error", "message": "no"}', "failed"),
    ],
)
def test_what_is_no_answer_has_an_outcome(line: str, outcome: str) -> None:
    with pytest.raises(StreamError) as caught:
        read(line)
    assert caught.value.outcome == outcome


def test_more_tokens_than_any_right_answer_are_a_flood() -> None:
    assert read(*[text("a")] * 70, DONE)[1].outcome == "ok"
    with pytest.raises(StreamError, match="more than 70 tokens"):
        read(*[text("a")] * 71, DONE)
    with pytest.raises(StreamError, match="more than 70 tokens"):
        read(text("a", token_ids=[*range(71)]))


@pytest.mark.parametrize(
    "chunk",
    [
        lambda words: text(words),
        lambda words: text(words, token_ids=[5]),
        lambda words: delta(content=words),
        lambda words: delta(reasoning_content=words),
        lambda words: delta(tool_calls=[{"function": {"arguments": words}}]),
    ],
)
def test_more_text_than_any_right_answer_has_is_a_flood(chunk: Any) -> None:
    """For three tokens 70 are allowed, of 64 bytes each, and 4 KiB beside them."""
    most = 70 * 64 + 4096
    assert read(*[chunk("é" * (most // 4))] * 2, DONE)[1].outcome == "ok"
    with pytest.raises(StreamError, match="more than 8,576 bytes of text") as caught:
        read(chunk("é" * (most // 2)), chunk("x"))
    assert caught.value.outcome == "flooded"
    with pytest.raises(StreamError, match="bytes of text"):
        read(*[chunk("x" * 1_000_000)] * 5)


@pytest.mark.parametrize("number", [True, -1, 1.5, "3", 1 << 40, None])
def test_odd_numbers_of_usage_are_ignored(number: Any) -> None:
    usage = {"completion_tokens": number, "prompt_tokens": number}
    end = read(text("a", usage=usage), DONE)[1]
    assert (end.output_tokens, end.prompt_tokens, end.counted_by) == (None, None, "chunks")


def test_cached_tokens_and_distances_are_kept() -> None:
    answer = Answer(3, 10)
    objects = [
        text("a", logprobs={"token_logprobs": [-1.5], "top_logprobs": [{"a": -1.5, "b": -1.0}]}),
        text("b", logprobs={"token_logprobs": [-0.5], "top_logprobs": [{"b": -0.5}]}),
        text("c", logprobs={"token_logprobs": [None], "top_logprobs": [None]}),
        {"choices": [], "usage": USAGE | {"prompt_tokens_details": {"cached_tokens": 6}}},
        delta(content="d") | {},
    ]
    objects[-1]["choices"][0]["logprobs"] = {
        "content": [{"logprob": -2.0, "top_logprobs": [{"logprob": -1.25}, {"logprob": -2.0}]}]
    }
    for value in objects:
        answer.feed(f"data: {json.dumps(value)}\n\n".encode())
    assert answer.cached_tokens == 6
    distances = answer.distances
    assert (distances.compared, distances.exact, distances.largest) == (3, 1, 0.75)


@pytest.mark.parametrize(
    ("chosen", "likeliest"),
    [
        ("NaN", "-1.0"),
        ("-1.0", "NaN"),
        ("NaN", "NaN"),
        ("Infinity", "-1.0"),
        ("-Infinity", "-1.0"),
        ("-1.0", "Infinity"),
        ("-1.0", "-Infinity"),
        ("1" + "0" * 400, "-1.0"),  # no float is as large
        ("-1.0", "-1" + "0" * 400),
    ],
)
def test_a_log_probability_that_is_not_finite_is_no_exact_answer(
    chosen: str, likeliest: str
) -> None:
    top = f'[{{"logprob": -2}}, {{"logprob": {likeliest}}}]'
    spellings = (
        f'{{"token_logprobs": [{chosen}], "top_logprobs": [{{"a": -2, "b": {likeliest}}}]}}',
        f'{{"content": [{{"logprob": {chosen}, "top_logprobs": {top}}}]}}',
    )
    for logprobs in spellings:
        answer = Answer(3, 10)
        line = f'{{"choices": [{{"text": "a", "logprobs": {logprobs}}}]}}'
        answer.feed(f"data: {line}\n\n".encode())
        found = answer.distances
        assert (found.compared, found.exact, found.largest) == (1, 0, math.inf)
