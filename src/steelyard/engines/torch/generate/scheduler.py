"""Decide what each step of generation computes: which parts of prompts are prefilled, which
sequences decode, which wait, and which give up their blocks of the cache when it is full.

Pure: it knows numbers of tokens and blocks alone, reads no clock and touches no tensor, so that all
ranks of a tensor-parallel group can run it side by side and decide the same. `Generator`
(generator.py) asks it for a step, computes that, and asks for the next.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from steelyard.errors import RequestError

Admission = Literal["outputs", "prompts"]


@dataclass(eq=False)
class GeneratedSequence:
    """A request on its way: `tokens` are known so far (the prompt, then what was generated), up to
    `limit`, of which the keys and values of the first `cached` are in the cache, in `blocks`.

    `number` is the request's, `slot` the row of the token store that it has from its first
    admission to its end (None before).
    """

    number: int
    prompt_tokens: int
    limit: int
    tokens: int
    cached: int = 0
    slot: int | None = None
    blocks: list[int] = field(default_factory=list)

    @property
    def is_decoding(self) -> bool:
        """Whether all known tokens but the last are cached, and one step gives the next."""
        return self.tokens > self.prompt_tokens and self.cached == self.tokens - 1


@dataclass(frozen=True)
class Chunk:
    """A part of a sequence that a step computes: its tokens from `begin` to before `end`, with the
    `blocks` that it has for it, which may be another's after this step. If `end` is all that is
    known, the step samples the next token (`samples`).
    """

    sequence: GeneratedSequence
    begin: int
    end: int
    blocks: tuple[int, ...]
    samples: bool


@dataclass(frozen=True)
class Step:
    """A step of generation: chunks of prompts, or one token of each decoding sequence."""

    phase: Literal["prefill", "decode"]
    chunks: tuple[Chunk, ...]


class Scheduler:
    """Plans steps over a cache of `blocks` blocks of `block_tokens` tokens each, for at most
    `slots` sequences at a time, with at most `batch_tokens` prompt tokens in a step.

    Requests are admitted in the order of their arrival. After each step that prefills, one decodes
    if any sequence can: so neither waits for more than one step of the other. With `admission`
    `outputs` a request begins once its blocks and those that running sequences will need fit
    together; with `prompts` once its prompt fits. If blocks run out all the same, the sequence
    admitted last gives up its own and is computed again from its tokens (`preemptions`), so the one
    admitted first always goes on.
    """

    def __init__(
        self,
        blocks: int,
        block_tokens: int,
        slots: int,
        batch_tokens: int,
        admission: Admission = "outputs",
    ) -> None:
        self.blocks, self.block_tokens, self.batch_tokens = blocks, block_tokens, batch_tokens
        self.admission = admission
        self.waiting: deque[GeneratedSequence] = deque()
        self.running: list[GeneratedSequence] = []  # in the order of admission
        self.preemptions = 0
        self._free_blocks = list(range(blocks))[::-1]
        self._free_slots = list(range(slots))[::-1]
        self._has_prefilled = False

    @property
    def has_work(self) -> bool:
        """Whether a request waits or has been admitted, and has not all its tokens planned."""
        return bool(self.waiting or self.running)

    @property
    def free_blocks(self) -> int:
        """The number of blocks that no sequence has."""
        return len(self._free_blocks)

    def add(self, number: int, prompt_tokens: int, output_tokens: int) -> GeneratedSequence:
        """Put a request behind those that wait, and return its sequence. Raises RequestError if it
        would not fit into an empty cache.
        """
        sequence = GeneratedSequence(
            number, prompt_tokens, prompt_tokens + output_tokens, prompt_tokens
        )
        needed = self._count_blocks(sequence.limit - 1)  # the last token is never an input
        if needed > self.blocks:
            raise RequestError(
                f"a request of {prompt_tokens} + {output_tokens} tokens needs {needed} blocks of"
                f" the cache, which has {self.blocks}; raise tune.kv_blocks, or ask for less"
            )
        self.waiting.append(sequence)
        return sequence

    def plan_step(self) -> Step | None:
        """Return the next step, with blocks for all that it writes, or None if nothing can be done
        before a request is added. What the step samples counts as known from now on; sequences that
        have all their tokens with it have left.
        """
        step = self._plan_decode() if self._has_prefilled else None
        step = step or self._plan_prefill() or self._plan_decode()
        self._has_prefilled = step is not None and step.phase == "prefill"
        for chunk in () if step is None else step.chunks:
            self._advance(chunk)
        return step

    def finish(self, sequence: GeneratedSequence) -> None:
        """End a sequence before its limit, at the token that ends a text; nothing if it left."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._release(sequence)
        elif sequence in self.waiting:  # preempted meanwhile
            self.waiting.remove(sequence)
            self._release(sequence)

    def _advance(self, chunk: Chunk) -> None:
        """Count a chunk as computed; a sequence that then knows all its tokens leaves."""
        sequence = chunk.sequence
        sequence.cached = chunk.end
        if chunk.samples:
            sequence.tokens += 1
            if sequence.tokens == sequence.limit:
                self.running.remove(sequence)
                self._release(sequence)

    def _release(self, sequence: GeneratedSequence) -> None:
        """Free the slot and the blocks of a sequence that has left."""
        self._free(sequence)
        if sequence.slot is not None:
            self._free_slots.append(sequence.slot)

    def _free(self, sequence: GeneratedSequence) -> None:
        """Free the blocks of a sequence, whose list becomes empty."""
        self._free_blocks.extend(reversed(sequence.blocks))
        sequence.blocks = []

    def _plan_prefill(self) -> Step | None:
        """Return a step of prompt tokens, at most `batch_tokens`: first of sequences that are in
        the cache in part, then of new ones, which are admitted; None if there are none.
        """
        room, chunks = self.batch_tokens, list[Chunk]()
        for sequence in self._iterate_prompts():
            end = min(sequence.tokens, sequence.cached + room)
            chunks.append(_make_chunk(sequence, end))
            room -= end - sequence.cached
            if not room:
                break
        return Step("prefill", tuple(chunks)) if chunks else None

    def _iterate_prompts(self) -> Iterable[GeneratedSequence]:
        """Yield sequences whose prompts are not computed yet, oldest first, and admit those that
        wait, as long as they fit.
        """
        yield from [sequence for sequence in self.running if not sequence.is_decoding]
        while self.waiting and self._fits(self.waiting[0]):
            sequence = self.waiting.popleft()
            if sequence.slot is None:
                sequence.slot = self._free_slots.pop()
            self._take_blocks(sequence, sequence.tokens)
            self.running.append(sequence)
            yield sequence

    def _fits(self, sequence: GeneratedSequence) -> bool:
        """Return whether a waiting sequence can be admitted now."""
        if sequence.slot is None and not self._free_slots:
            return False
        if self._count_blocks(sequence.tokens) > self.free_blocks:
            return False
        return self.admission == "prompts" or self._fit_together([*self.running, sequence])

    def _fit_together(self, sequences: Sequence[GeneratedSequence]) -> bool:
        """Return whether the cache holds these sequences until each has ended, if all get a token
        in every step: at the end of each, those that are left have as many more tokens.
        """
        left = sorted(((one.limit - one.tokens, one.tokens) for one in sequences), reverse=True)
        steps, known = np.array(left, np.int64).T
        count = np.arange(1, len(left) + 1)
        # at the end of each sequence: the last token of one is never an input
        cached = np.cumsum(known) + count * (steps - 1)
        most = (cached + count * (self.block_tokens - 1)) // self.block_tokens
        if (most <= self.blocks).all():
            return True  # even if the last block of each holds a single token
        if (-(-cached // self.block_tokens) > self.blocks).any():
            return False  # even if the last block of each is full
        lengths = np.tril(known[None, :] + steps[:, None] - 1)
        return bool(((-(-lengths // self.block_tokens)).sum(1) <= self.blocks).all())

    def _plan_decode(self) -> Step | None:
        """Return a step with one token of each decoding sequence, oldest first, for which blocks
        are taken; those admitted last are preempted if blocks run out.
        """
        chunks = []
        for sequence in [one for one in self.running if one.is_decoding]:
            # an older one may have taken its blocks
            if sequence.blocks and self._make_room(sequence):
                chunks.append(_make_chunk(sequence, sequence.tokens))
        return Step("decode", tuple(chunks)) if chunks else None

    def _make_room(self, sequence: GeneratedSequence) -> bool:
        """Take the block that the last token of a sequence needs, if it needs one, and return
        whether the sequence still runs: the ones admitted last give up theirs, in the end itself.
        """
        while self._count_blocks(sequence.tokens) - len(sequence.blocks) > self.free_blocks:
            last = self.running.pop()
            self._free(last)
            last.cached = 0
            self.waiting.appendleft(last)
            self.preemptions += 1
            if last is sequence:
                return False
        self._take_blocks(sequence, sequence.tokens)
        return True

    def _take_blocks(self, sequence: GeneratedSequence, tokens: int) -> None:
        """Give a sequence free blocks until it has room for so many tokens."""
        while len(sequence.blocks) < self._count_blocks(tokens):
            sequence.blocks.append(self._free_blocks.pop())

    def _count_blocks(self, tokens: int) -> int:
        """Return how many blocks hold so many tokens."""
        return -(-tokens // self.block_tokens)


def _make_chunk(sequence: GeneratedSequence, end: int) -> Chunk:
    """Return the chunk of a sequence from its first token that is not cached to before `end`."""
    samples = end == sequence.tokens
    return Chunk(sequence, sequence.cached, end, tuple(sequence.blocks), samples)
