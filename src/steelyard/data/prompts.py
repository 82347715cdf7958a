"""Prompts for generation: requests with a prompt and an output length each, made as they are asked
for, and the salt that keeps caches cold.

A salt of 128 bits is drawn anew for every run. The first tokens of each prompt are replaced by ones
that follow from it, so that no two runs and no two requests begin with the same tokens. It is no
part of the data: fingerprints are taken over prompts without it.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
FIRST_PLAIN_ID = 10  # ids below it are special tokens in many vocabularies
MAX_COUNTED = 1000  # requests that a batch for calibration is derived from
CHECKED_SHARE = 0.1  # of the requests, at size full


@dataclass(frozen=True)
class GenerationRequest:
    """One request: its `number` in the order of the schedule, the `prompt` as token ids (salt
    included), the same as `text` if a tokenizer made it (None: it exists as ids alone), and
    `output_tokens`, how many tokens to generate: exactly so many, or at most with natural lengths.
    """

    number: int
    prompt: Sequence[int]
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
    resembles. `salt` is the run's, `lengths` "exact" or "natural".

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

    def find_lengths(self, number: int) -> tuple[int, int]:
        """Return (prompt tokens, output tokens) of a request."""
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
        if len(salt) >= len(plain):
            raise RequestError(
                f"a prompt of {len(plain)} tokens has no room for a salt of {len(salt)}; ask for"
                " longer prompts (question.data.prompt_tokens)"
            )
        prompt = [*salt, *plain[len(salt) :]]
        return GenerationRequest(number, prompt, self._decode(prompt), output_tokens)

    def _cut_prompt(self, purpose: str, number: int, length: int) -> list[int]:
        """Return the tokens of a prompt before it is salted: a contiguous run of a document that is
        long enough, or drawn ids.
        """
        generator = np.random.default_rng([self.seed, 2 if purpose == "run" else 3, number])
        if not self.source.documents:
            low = min(FIRST_PLAIN_ID, self.vocab // 2)
            return [int(token) for token in generator.integers(low, self.vocab, length)]
        if self.prompt_rule == "data":
            return self.source.documents[number % len(self.source.documents)].tolist()
        fitting = [ids for ids in self.source.documents if len(ids) >= length]
        document = fitting[int(generator.integers(len(fitting)))]
        start = int(generator.integers(len(document) - length + 1))
        return [int(token) for token in document[start : start + length]]

    def _make_salt(self, purpose: str, number: int) -> list[int]:
        """Return the first tokens of a prompt: at least 64 bits that follow from the run's salt,
        the purpose and the number. A tokenizer that can decode encodes them as hex digits, behind
        the token that begins a text; otherwise they are ids.
        """
        digest = hashlib.sha256(f"{self.salt}:{purpose}:{number}".encode()).digest()
        tokenizer = self.source.tokenizer
        if tokenizer is not None and can_decode(tokenizer):
            return tokenizer.encode([f"{digest[: SALT_BITS // 8].hex()} "])[0]
        low = min(FIRST_PLAIN_ID, self.vocab // 2)
        base, value = self.vocab - low, int.from_bytes(digest)
        ids = []
        for _ in range(ceil(SALT_BITS / log2(base))):
            value, digit = divmod(value, base)
            ids.append(low + digit)
        return ids

    def _decode(self, prompt: list[int]) -> str | None:
        """Return the text of a prompt, None if no tokenizer can decode it."""
        tokenizer = self.source.tokenizer
        if tokenizer is None or not can_decode(tokenizer):
            return None
        decode: Callable[[list[int]], str] = tokenizer.decode  # type: ignore[attr-defined]
        return decode(prompt)

    def encode_output(self, text: str) -> list[int] | None:
        """Return the token ids of a generated text, without what begins a text; None without a
        tokenizer.
        """
        tokenizer = self.source.tokenizer
        if tokenizer is None or not can_decode(tokenizer):
            return None
        empty, ids = tokenizer.encode(["", text])
        return ids[len(empty) :]

    def choose_checked(self, sent: int, every: bool) -> list[int]:
        """Return the numbers of the requests whose answers are checked, of the `sent` first ones:
        all if `every`, else a seeded tenth, at least one.
        """
        if every:
            return list(range(sent))
        generator = np.random.default_rng([self.seed, 4])
        count = min(sent, max(1, ceil(sent * CHECKED_SHARE)))
        return sorted(int(number) for number in generator.permutation(sent)[:count])


def can_decode(tokenizer: Tokenizer) -> bool:
    """Return whether a tokenizer turns ids back into text; that of generated data does not."""
    return hasattr(tokenizer, "decode")


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
    if own is None:
        raise RequestError("lengths of the data: this data has none; write them in the case")
    return own[number % len(own)]


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
        """Return the summed counts of the prompts with these numbers; other arguments are ignored.
        """
        lens = [self.requests.find_lengths(int(key))[0] for key in keys]  # type: ignore[arg-type]
        return count_batch(lens, lens, len(lens), window=self.window)

    def count_expected(self, steps: range | None) -> list[dict[str, int]]:
        """Return a list of one table: the counts of the prompts of the first requests, at most
        1,000. `steps` is ignored.
        """
        return [self.count(range(min(self.requests.count, MAX_COUNTED)))]
