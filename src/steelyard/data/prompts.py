"""Prompts for generation: requests with a prompt and an output length each, made as they are asked
for, and the salt that keeps caches cold.

A salt of 128 bits is drawn anew for every run. The first tokens of each prompt are replaced by ones
that follow from it, so that no two runs and no two requests begin with the same tokens. It is no
part of the data: fingerprints are taken over prompts without it.
"""

import hashlib
from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, log2
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from steelyard.data.division import Division
from steelyard.data.prompt_batches import count_batch
from steelyard.data.request_outcomes import Lengths
from steelyard.data.tokenizer import Tokenizer
from steelyard.data.training_rows import RowKey
from steelyard.errors import RequestError

LengthRule = int | tuple[int, int] | Literal["data"]  # fixed, uniform between bounds, the data's
SALT_BITS = 64  # of every prompt, at least
SALT_DIGITS = 32  # hex digits of a run's salt
HEX_DIGITS = "0123456789abcdef"  # a text with as many bits as a prompt's salt
LEAST_VOCAB = 4  # ids that salts can be made of
FIRST_PLAIN_ID = 10  # ids below it are special tokens in many vocabularies
MAX_COUNTED = 1000  # requests that a batch for calibration is derived from
CHECKED_SHARE = 0.1  # of the requests, at size full
CONTEXT_CHARS = 64  # of a prompt, with which an output is encoded


@dataclass(frozen=True)
class GenerationRequest:
    """One request: its `number` in the order of the schedule, the `prompt` as token ids (salt
    included), the same as `text` if a tokenizer made it (None: it exists as ids alone), and
    `output_tokens`, how many tokens to generate: exactly so many, or at most with natural lengths.

    Ids are kept in an array of 4 bytes each, as thousands of prompts wait for their time.
    """

    number: int
    prompt: "array[int]"
    text: str | None
    output_tokens: int


@dataclass(frozen=True)
class PromptSource:
    """What prompts are cut from: `documents`, token ids of each (empty: prompts are drawn ids), or
    of a trace or a chat file the `prompt_lens`, `output_lens` and `arrivals_s` (seconds) of its
    rows; None where the source does not have them. `tokenizer` is None for ids.
    """

    documents: tuple[NDArray[np.int64], ...] = ()
    tokenizer: Tokenizer | None = None
    prompt_lens: tuple[int, ...] | None = None
    output_lens: tuple[int, ...] | None = None
    arrivals_s: tuple[float, ...] | None = None


@dataclass(frozen=True)
class PromptRequests:
    """The requests of a generation run: `count` of them at least, more by their number if the run
    takes longer. `make(number)` returns one, `make_warmup(number)` one that no measured request
    resembles; `check` refuses what none can be made of. `salt` is the run's, `lengths` "exact" or
    "natural".

    `prompt_rule` and `output_rule` say how long they are; with "data" the source's rows repeat from
    the beginning when they are used up.
    """

    source: PromptSource
    count: int
    prompt_rule: LengthRule
    output_rule: LengthRule
    lengths: Lengths
    vocab: int
    positions: int
    seed: int
    salt: str

    @property
    def rows(self) -> int | None:
        """The number of rows after which the source repeats; None if it never does."""
        rows = self.source.prompt_lens
        return None if rows is None else len(rows)

    def check(self) -> None:
        """Raise RequestError if a request cannot be made: prompts have no room for a salt, or no
        document is long enough, or a prompt and its output do not fit the model's positions.
        """
        if self.vocab < LEAST_VOCAB:
            raise RequestError(
                f"question.model.vocab={self.vocab} is too small for prompts; allowed:"
                f" {LEAST_VOCAB} or more"
            )
        prompts = _find_bounds(self.prompt_rule, self.source.prompt_lens)
        if prompts[0] <= self.most_salt_tokens:
            raise RequestError(
                f"a prompt of {prompts[0]} tokens has no room for its salt, which takes up to"
                f" {self.most_salt_tokens}; ask for prompts of {self.most_salt_tokens + 1} tokens"
                " or more (question.data.prompt_tokens)"
            )
        longest = max(map(len, self.source.documents), default=prompts[1])
        if self.prompt_rule != "data" and longest < prompts[1]:
            raise RequestError(
                f"no document has {prompts[1]} tokens, the longest has {longest}; ask for shorter"
                " prompts (question.data.prompt_tokens)"
            )
        most = self.find_most_tokens()
        if most > self.positions:
            raise RequestError(
                f"a prompt and its output have up to {most} tokens, more than the model's"
                f" {self.positions} positions; ask for fewer (question.data.output_tokens)"
            )

    def find_most_tokens(self) -> int:
        """Return the most tokens that a request has with its output."""
        prompts = _find_bounds(self.prompt_rule, self.source.prompt_lens)
        outputs = _find_bounds(self.output_rule, self.source.output_lens)
        return self._find_most_tokens(prompts[1], outputs[1])

    def _find_most_tokens(self, prompt: int, output: int) -> int:
        """Return the most tokens of a prompt with its output, whose most are `prompt` and `output`:
        if both are the data's own, those of one row.
        """
        prompts, outputs = self.source.prompt_lens, self.source.output_lens
        if self.prompt_rule == self.output_rule == "data" and prompts and outputs:
            return max(map(sum, zip(prompts, outputs, strict=True)))
        return prompt + output

    def find_lengths(self, number: int) -> tuple[int, int]:
        """Return (prompt tokens, output tokens) of a request."""
        if isinstance(self.prompt_rule, int) and isinstance(self.output_rule, int):
            return self.prompt_rule, self.output_rule
        generator = np.random.default_rng([self.seed, 1, number])
        prompt, output = (
            _draw_length(rule, generator, own, number)
            for rule, own in (
                (self.prompt_rule, self.source.prompt_lens),
                (self.output_rule, self.source.output_lens),
            )
        )
        return prompt, output

    def make(self, number: int) -> GenerationRequest:
        """Return the request of this number, which counts from 0."""
        return self._make("run", number)

    def make_warmup(self, number: int) -> GenerationRequest:
        """Return a request for warming up: of the lengths of request `number`, with other tokens
        and another salt.
        """
        return self._make("warm-up", number)

    def _make(self, purpose: str, number: int) -> GenerationRequest:
        """Return the request of this number and purpose ("run" or "warm-up")."""
        prompt_tokens, output_tokens = self.find_lengths(number)
        plain = self._cut_prompt(purpose, number, prompt_tokens)
        salt = self._make_salt(purpose, number)
        prompt = array("i", salt)
        prompt.frombytes(plain[len(salt) :].astype(np.int32).tobytes())
        return GenerationRequest(number, prompt, self._decode(prompt), output_tokens)

    def _cut_prompt(self, purpose: str, number: int, length: int) -> NDArray[np.int64]:
        """Return the tokens of a prompt before it is salted: drawn ids, or a contiguous run of a
        document that is long enough; the run of a warm-up request is in another order.
        """
        generator = np.random.default_rng([self.seed, 2 if purpose == "run" else 3, number])
        if not self.source.documents:
            return generator.integers(self._first_id, self.vocab, length)
        if self.prompt_rule == "data":
            document, start = self.source.documents[number % len(self.source.documents)], 0
        else:
            lengths, documents = self._documents_by_length
            shortest = bisect_left(lengths, length)
            document = documents[int(generator.integers(shortest, len(documents)))]
            start = int(generator.integers(len(document) - length + 1))
        run = document[start : start + length]
        return run if purpose == "run" else generator.permutation(run)

    @cached_property
    def _documents_by_length(self) -> tuple[list[int], list[NDArray[np.int64]]]:
        """The documents in the order of their lengths, shortest first, and these lengths."""
        documents = sorted(self.source.documents, key=len)
        return [len(document) for document in documents], documents

    @property
    def _first_id(self) -> int:
        """The lowest id that prompts are drawn from."""
        return min(FIRST_PLAIN_ID, self.vocab // 2)

    @property
    def most_salt_tokens(self) -> int:
        """The most tokens that a salt takes."""
        if self._salt_tokenizer is None:
            return ceil(SALT_BITS / log2(self.vocab - self._first_id))
        # at most one token a character, with a space on either side, behind what begins a text
        return len(self._salt_tokenizer.encode([""])[0]) + len(HEX_DIGITS) + 2

    @cached_property
    def _salt_tokenizer(self) -> Tokenizer | None:
        """The tokenizer that encodes salts; None if there is none, or it loses hex digits (its
        vocabulary may lack them).
        """
        tokenizer = self.source.tokenizer
        if tokenizer is None or not can_decode(tokenizer):
            return None
        kept = _decode(tokenizer, tokenizer.encode([HEX_DIGITS])[0])
        return tokenizer if kept.strip() == HEX_DIGITS else None

    def _make_salt(self, purpose: str, number: int) -> list[int]:
        """Return the first tokens of a prompt: at least 64 bits that follow from the run's salt,
        the purpose and the number. A tokenizer that can decode encodes them as hex digits, behind
        the token that begins a text; otherwise they are ids.
        """
        digest = hashlib.sha256(f"{self.salt}:{purpose}:{number}".encode()).digest()
        tokenizer = self._salt_tokenizer
        if tokenizer is not None:
            ids = tokenizer.encode([f"{digest[: SALT_BITS // 8].hex()} "])[0]
            return ids[:-1] if ids[-1] == tokenizer.end else ids  # some end every text
        ids, value = [], int.from_bytes(digest)
        for _ in range(self.most_salt_tokens):
            value, digit = divmod(value, self.vocab - self._first_id)
            ids.append(self._first_id + digit)
        return ids

    def _decode(self, prompt: Sequence[int]) -> str | None:
        """Return the text of a prompt, None if no tokenizer can decode it."""
        tokenizer = self._salt_tokenizer
        return None if tokenizer is None else _decode(tokenizer, list(prompt))

    def encode_prompt(self, text: str) -> list[int] | None:
        """Return the token ids of a prompt's text, as a server encodes it; None without a
        tokenizer that can decode.
        """
        tokenizer = self.source.tokenizer
        if tokenizer is None or not can_decode(tokenizer):
            return None
        return tokenizer.encode([text])[0]

    def encode_output(self, text: str, before: str | None = None) -> list[int] | None:
        """Return the token ids of a text that was generated behind the text `before` (None: at the
        beginning), without what begins or ends a text. None without a tokenizer that can decode, or
        if a token would reach across the border between the two.

        Many tokenizers write the first word of a text in another way than one in its midst.
        """
        tokenizer = self.source.tokenizer
        if tokenizer is None or not can_decode(tokenizer):
            return None
        context = (before or "")[-CONTEXT_CHARS:]
        empty, alone, joined = tokenizer.encode(["", context, context + text])
        pairs = enumerate(zip(empty, joined, strict=False))
        begin = next((i for i, (one, other) in pairs if one != other), len(empty))
        last = len(empty) - begin  # tokens that end every text
        head = alone[: len(alone) - last]
        if joined[: len(head)] != head:
            return None
        return joined[len(head) : max(len(head), len(joined) - last)]

    def order_checked(self, sent: int) -> list[int]:
        """Return the numbers of the `sent` first requests in the order in which their answers are
        checked, drawn by the seed and the run's salt, so that nobody knows it before the run.
        """
        generator = np.random.default_rng([self.seed, 4, int(self.salt or "0", 16)])
        return [int(number) for number in generator.permutation(sent)]


def count_checked(sent: int) -> int:
    """Return of how many of so many requests answers are checked: a tenth, at least one."""
    return min(sent, max(1, ceil(sent * CHECKED_SHARE)))


def can_decode(tokenizer: Tokenizer) -> bool:
    """Return whether a tokenizer turns ids back into text; that of generated data does not."""
    return hasattr(tokenizer, "decode")


def _decode(tokenizer: Tokenizer, ids: list[int]) -> str:
    """Return the text of token ids by a tokenizer that can decode, without special tokens."""
    decode: Callable[[list[int]], str] = tokenizer.decode  # type: ignore[attr-defined]
    return decode(ids)


def _find_bounds(rule: LengthRule, own: tuple[int, ...] | None) -> tuple[int, int]:
    """Return the least and the most tokens that a rule of lengths gives; `own` are those of the
    data's rows. Raises RequestError if the rule is "data" and they are None.
    """
    if isinstance(rule, int):
        return rule, rule
    return rule if isinstance(rule, tuple) else (min(_require(own)), max(_require(own)))


def _require(own: tuple[int, ...] | None) -> tuple[int, ...]:
    """Return the lengths of the data's rows; raise RequestError if there are none."""
    if not own:
        raise RequestError("lengths of the data: this data has none; write them in the case")
    return own


def _draw_length(
    rule: LengthRule, generator: np.random.Generator, own: tuple[int, ...] | None, number: int
) -> int:
    """Return the length of a request's prompt or output: fixed, uniform between the two bounds
    (both included), or `own`, that of the data's row.
    """
    if isinstance(rule, int):
        return rule
    if isinstance(rule, tuple):
        return int(generator.integers(rule[0], rule[1] + 1))
    rows = _require(own)
    return rows[number % len(rows)]


class RequestCounter:
    """Counts the prefill of a run's requests, from which the matmuls of a typical batch are derived
    (a `StepCounter`); generation itself is counted from request samples. `window` is the model's
    attention window, None: full attention.
    """

    def __init__(self, requests: Any, division: Division, window: int | None = None) -> None:
        """Keep the requests and the window; `division` is ignored."""
        self.requests, self.window = requests, window

    def count(
        self, keys: Sequence[RowKey], prefix_groups: Sequence[int] = (), held_out: bool = False
    ) -> dict[str, int]:
        """Return the summed counts of the prompts with these numbers, without other arguments."""
        lens = [self.requests.find_lengths(int(key))[0] for key in keys]
        return count_batch(lens, lens, len(lens), window=self.window)

    def count_expected(self, steps: range | None) -> list[dict[str, int]]:
        """Return a list of one table: the counts of the prompts of the first requests, at most
        1,000. `steps` is ignored.
        """
        return [self.count(range(min(self.requests.count, MAX_COUNTED)))]
