"""Read the answer to one request from its stream: tokens, ids, usage, and how it ended.

Servers differ: ids of tokens beside the text or none, usage in a chunk of its own or in the last
one, several tokens in a chunk, an empty first chunk that names a role. Text of every channel
counts: content, reasoning, and calls of tools.
"""

import json
from dataclasses import dataclass
from typing import Any

from steelyard.data.request_outcomes import CountedBy
from steelyard.engine.generation import RequestEnd
from steelyard.engines.http.event_stream import (
    MAX_SHOWN_BYTES,
    EventStream,
    StreamError,
    StreamLimits,
)
from steelyard.engines.http.logprobs import DistanceSum
from steelyard.engines.http.word_vocabulary import parse_words

DONE = b"[DONE]"
# Most bytes of an answer: a token takes about 300 in a chunk of its own, and a prompt's ids, which
# a server may send back, up to 8 each.
TOKEN_BYTES, PROMPT_TOKEN_BYTES, BASE_BYTES = 16 << 10, 16, 1 << 20
SPARE_TOKENS = 64  # beyond twice the tokens asked for
# Most bytes of its text, which is kept until the end of the run: few tokens have more than 16.
TOKEN_TEXT_BYTES, BASE_TEXT_BYTES = 64, 4 << 10
MAX_TOKENS = 1 << 31
OTHER_CHANNELS = ("reasoning_content", "reasoning", "refusal")
# A token has a byte of text at least; of tokens without text (special ones, and with random weights
# pieces of characters) an answer has at most so many, or so many in a hundred bytes.
TEXTLESS_TOKENS, TEXTLESS_PERCENT = 32, 100


@dataclass(frozen=True)
class AnswerChunk:
    """A chunk that carries `tokens` tokens, with their `ids` where the server gives them."""

    tokens: int
    ids: tuple[int, ...] = ()


NO_TOKEN = AnswerChunk(0)


class Answer:
    """What has arrived of an answer: `feed` takes bytes, and returns the chunks with tokens that
    they complete; `finish` does so at the end of the stream, and `end` returns how it ended. Both
    raise StreamError for what is no answer, or is longer than any right one.

    `is_done` is whether the stream has said that it is over; `cached_tokens`, how many tokens of
    the prompt the server took from a cache (None: it does not say); `distances`, what its
    log-probabilities say.
    """

    def __init__(self, asked_tokens: int, prompt_tokens: int, word_width: int = 0) -> None:
        """Limit the answer by the tokens that were asked for and those of the prompt. With
        `word_width` the text of each token is a word of so many characters (word_vocabulary.py),
        and its id follows from it.
        """
        line_bytes = BASE_BYTES + PROMPT_TOKEN_BYTES * prompt_tokens
        stream_bytes = 2 * line_bytes + TOKEN_BYTES * asked_tokens
        self._stream = EventStream(StreamLimits(line_bytes, stream_bytes))
        self._max_tokens = 2 * asked_tokens + SPARE_TOKENS
        self._max_text_bytes = TOKEN_TEXT_BYTES * self._max_tokens + BASE_TEXT_BYTES
        self._word_width = word_width
        self.is_done = False
        self.cached_tokens: int | None = None
        self.distances = DistanceSum()
        self._has_finished = self._has_ids = self._has_other_channel = False
        self._tokens = 0
        self._earlier_usage: int | None = 0  # in the chunk with tokens before
        self._usage_tokens: int | None = None
        self._usage_prompt_tokens: int | None = None
        self._texts: list[str] = []
        self._text_bytes = 0  # of all channels
        self._unread_text = ""

    def feed(self, received: bytes) -> list[AnswerChunk]:
        """Return the chunks with tokens that these bytes complete."""
        return self._read_events(self._stream.feed(received))

    def finish(self) -> list[AnswerChunk]:
        """Return the chunks with tokens that the end of the stream completes."""
        return self._read_events(self._stream.finish())

    def end(self) -> RequestEnd:
        """Return how the answer ended, when the stream is over. With a usage of more tokens than
        its text can have it is no regular end, and that number is not kept.
        """
        counted_by: CountedBy = "chunks"
        if self._has_ids:
            counted_by = "ids"
        elif self._usage_tokens is not None:
            counted_by = "usage"
        has_text = bool(self._texts) and not (self._has_ids or self._has_other_channel)
        facts: dict[str, Any] = {
            "output_tokens": self._usage_tokens,
            "prompt_tokens": self._usage_prompt_tokens,
            "counted_by": counted_by,
            "text": _join_texts(self._texts) if has_text else None,
        }
        if not (self.is_done or self._has_finished):
            return RequestEnd("cut", "the stream ended before the answer did", **facts)
        if not self._tokens:
            return RequestEnd("empty", "a regular end without any token", **facts)
        spare = max(TEXTLESS_TOKENS, self._text_bytes * TEXTLESS_PERCENT // 100)
        if counted_by == "usage" and (self._usage_tokens or 0) > self._text_bytes + spare:
            said = f"usage says {self._usage_tokens:,} tokens"
            said += f", which a text of {self._text_bytes:,} bytes cannot have"
            facts |= {"output_tokens": None, "counted_by": "chunks"}
            return RequestEnd("garbage", said, **facts)
        return RequestEnd(**facts)

    def _read_events(self, events: list[bytes]) -> list[AnswerChunk]:
        """Return the chunks with tokens among the data of these events."""
        chunks = []
        for data in events:
            if data == DONE:
                self.is_done = True
            elif not self.is_done:
                chunk = self._read_object(_parse_object(data))
                self._tokens += chunk.tokens
                if self._tokens > self._max_tokens:
                    raise StreamError("flooded", f"more than {self._max_tokens:,} tokens")
                if chunk.tokens:
                    chunks.append(chunk)
        return chunks

    def _read_object(self, value: dict[str, Any]) -> AnswerChunk:
        """Return the tokens of one object of the stream, and keep what else it says. Raises
        StreamError if it reports an error, or is none of an answer.
        """
        if value.get("error") or value.get("object") == "error":
            shown = json.dumps(value.get("error") or value.get("message"))
            raise StreamError("failed", f"the server reports: {shown}")
        choices, usage = value.get("choices"), self._read_usage(value.get("usage"))
        if not isinstance(choices, list):
            if usage is None:
                raise StreamError("garbage", "an object with neither choices nor usage")
            return NO_TOKEN
        if not choices:
            return NO_TOKEN
        choice = choices[0]
        if not isinstance(choice, dict):
            raise StreamError("garbage", "a choice that is no object")
        self._has_finished = self._has_finished or choice.get("finish_reason") is not None
        self.distances.add_chunk(choice.get("logprobs"))
        return self._count_tokens(choice, usage)

    def _count_tokens(self, choice: dict[str, Any], usage: int | None) -> AnswerChunk:
        """Return the tokens of a choice: as many as it has ids; else, if it has text, as many as
        `usage` grew by where each chunk has one, and one where not. Raises StreamError if the text
        of all channels is longer than any right one.
        """
        text, other = _read_text(choice)
        self._has_other_channel = self._has_other_channel or bool(other)
        self._text_bytes += len((text + other).encode("utf-8", "replace"))
        if self._text_bytes > self._max_text_bytes:
            raise StreamError("flooded", f"more than {self._max_text_bytes:,} bytes of text")
        ids = choice.get("token_ids")
        if isinstance(ids, list) and all(type(token) is int and token >= 0 for token in ids):
            self._has_ids = self._has_ids or bool(ids)
            return AnswerChunk(len(ids), tuple(ids))
        if self._word_width:
            ids = self._read_words(text)
            self._has_ids = self._has_ids or bool(ids)
            return AnswerChunk(len(ids), tuple(ids))
        # with ids before, this text was held back: its tokens have been counted
        if self._has_ids or not (text or other):
            return NO_TOKEN
        if text:
            self._texts.append(text)
        earlier, self._earlier_usage = self._earlier_usage, usage
        grown = 0 if usage is None or earlier != self._tokens else usage - self._tokens
        return AnswerChunk(max(1, grown))

    def _read_words(self, text: str) -> list[int]:
        """Return the ids of text whose every token is a letter and digits of one width; a part of a
        word waits for the rest of it. Raises StreamError for other text.
        """
        unread = self._unread_text + "".join(text.split())
        whole = len(unread) - len(unread) % self._word_width
        self._unread_text = unread[whole:]
        try:
            return parse_words(unread[:whole], self._word_width)
        except ValueError as error:
            raise StreamError("garbage", str(error)) from error

    def _read_usage(self, usage: Any) -> int | None:
        """Keep what usage says of the numbers of tokens, and return that of the output; None where
        it says nothing. Numbers beyond any real one are ignored.
        """
        if not isinstance(usage, dict):
            return None
        details = usage.get("prompt_tokens_details")
        cached = _read_count(details, "cached_tokens")
        self.cached_tokens = self.cached_tokens if cached is None else cached
        output, prompt = (_read_count(usage, n) for n in ("completion_tokens", "prompt_tokens"))
        self._usage_tokens = self._usage_tokens if output is None else output
        self._usage_prompt_tokens = self._usage_prompt_tokens if prompt is None else prompt
        return output


def _join_texts(texts: list[str]) -> str:
    """Return texts as one; a half of a surrogate pair without its other half, which no tokenizer
    takes, becomes the replacement character.
    """
    return "".join(texts).encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _read_count(table: Any, name: str) -> int | None:
    """Return a number of tokens by its name; None if the table does not have one."""
    value = table.get(name) if isinstance(table, dict) else None
    return value if type(value) is int and 0 <= value < MAX_TOKENS else None


def _parse_object(data: bytes) -> dict[str, Any]:
    """Return the JSON object that an event's data hold. Raises StreamError if they hold none."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        shown = data[:MAX_SHOWN_BYTES].decode("utf-8", "replace")
        raise StreamError("garbage", f"not JSON: {shown!r}") from error
    if not isinstance(value, dict):
        raise StreamError("garbage", "an event whose data are no JSON object")
    return value


def _read_text(choice: dict[str, Any]) -> tuple[str, str]:
    """Return the text of a choice of either interface, and that of all other channels: reasoning, a
    refusal, or a call of a tool.
    """
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        text = choice.get("text")
        return text if isinstance(text, str) else "", ""
    calls = delta.get("tool_calls")
    entries = [one for one in (calls if isinstance(calls, list) else []) if isinstance(one, dict)]
    functions = [*(entry.get("function") for entry in entries), delta.get("function_call")]
    fragments = [
        function.get(name)
        for function in functions
        if isinstance(function, dict)
        for name in ("name", "arguments")
    ]
    others = (*(delta.get(name) for name in OTHER_CHANNELS), *fragments)
    text = delta.get("content")
    other = "".join(fragment for fragment in others if isinstance(fragment, str))
    return text if isinstance(text, str) else "", other
