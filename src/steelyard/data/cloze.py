"""A cloze whose answers have several tokens, as GLM reads it: a context with a mask, and candidates
generated in its place.

Context token i has position i and block position 0. A candidate of n pieces is a span of n + 1
tokens, start-of-piece and the pieces, all at the mask's position and at block positions 1 to n + 1;
their targets are the pieces and end-of-piece.

In division closed every candidate has a context of its own; in open the candidates of a sample
share one.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from steelyard.data.division import Division
from steelyard.data.rows import Ids
from steelyard.data.sample import batch_of_step
from steelyard.errors import RequestError


@dataclass(frozen=True)
class Cloze:
    """One tokenised sample."""

    context: tuple[int, ...]
    mask: int  # where [MASK] stands in the context
    candidates: tuple[tuple[int, ...], ...]  # the pieces of each, and nothing around them
    right: tuple[int, ...]  # numbers of the candidates that are answers
    texts: tuple[str, ...]  # of the candidates
    answers: tuple[str, ...]
    name: str  # of the query


@dataclass(frozen=True)
class Pack:
    """Samples computed at once, end to end: all contexts, then all spans, both in the order of the
    samples.
    """

    tokens: Ids
    positions: Ids
    blocks: Ids
    contexts: list[int]  # lengths
    spans: list[int]  # lengths, candidate by candidate
    groups: list[int]  # of each context, how many spans see it; they follow each other
    targets: Ids  # of the spans' tokens
    candidates: list[int]  # of each sample, how many
    right: Ids  # of each sample, the first candidate that is right; -1 where none is
    counts: dict[str, int]


def pack(samples: list[Cloze], division: Division, start: int, end: int) -> Pack:
    """`start` and `end` are the tokens that begin and end a piece."""
    if not samples:
        raise ValueError("a pack of no samples")
    # with its number of contexts
    every = [(one, len(one.candidates) if division == "closed" else 1) for one in samples]
    contexts = [len(one.context) for one, times in every for _ in range(times)]
    groups = [len(one.candidates) // times for one, times in every for _ in range(times)]
    pieces = [piece for one in samples for piece in one.candidates]
    spans = [len(piece) + 1 for piece in pieces]
    masks = [one.mask for one in samples for _ in one.candidates]
    seen = [len(one.context) for one in samples for _ in one.candidates]
    size, generated = sum(contexts), sum(spans)
    repeated = [np.tile(np.array(one.context, dtype=np.int64), times) for one, times in every]
    begun = np.array([token for piece in pieces for token in (start, *piece)], dtype=np.int64)
    steps = [np.arange(length, dtype=np.int64) for length in contexts]
    blocks = np.array([i for length in spans for i in range(1, length + 1)], dtype=np.int64)
    square = sum(length * length for length in contexts) + sum(
        a * b for a, b in zip(spans, seen, strict=True)
    )
    return Pack(
        tokens=np.concatenate([*repeated, begun]),
        positions=np.concatenate([*steps, np.repeat(np.array(masks, dtype=np.int64), spans)]),
        blocks=np.concatenate([np.zeros(size, dtype=np.int64), blocks]),
        contexts=contexts,
        spans=spans,
        groups=groups,
        targets=np.array([token for piece in pieces for token in (*piece, end)], dtype=np.int64),
        candidates=[len(one.candidates) for one in samples],
        right=np.array([one.right[0] if one.right else -1 for one in samples], dtype=np.int64),
        counts={
            "tokens": size + generated,
            "samples": len(samples),
            "padded": 0,
            "logits": generated,
            "pairs": square + sum(length * (length + 1) // 2 for length in spans),
            "square": square + sum(length * length for length in spans),
        },
    )


class ClozeRows:
    """Samples to train on, in global batches of an endless sequence of epochs, and samples to
    evaluate.
    """

    def __init__(
        self,
        train: list[Cloze],
        held: list[Cloze],
        division: Division,
        batch: int,
        seed: int,
        start: int,
        end: int,
    ) -> None:
        if not train:
            raise RequestError("no samples to train on; allowed: 1 or more")
        if batch < 1:
            raise RequestError(f"a global batch of {batch} samples; allowed: 1 or more")
        self._samples = {False: train, True: held}
        self.division: Division = division
        self._batch = batch
        self._seed = seed
        self._start = start
        self._end = end

    def batch(self, step: int) -> list[int]:
        """The training samples of a step, counted from 0: the same for every plan, the longest
        first. Each epoch is a permutation of its own, so that lengths are sorted inside a batch and
        nowhere else."""
        count = len(self._samples[False])
        return self._sorted(
            batch_of_step(step, self._batch, count, f"record:{self._seed}"), held=False
        )

    def held_out(self) -> list[int]:
        """All samples of the evaluation, the longest first."""
        return self._sorted(range(len(self._samples[True])), held=True)

    def _sorted(self, keys: Iterable[int], held: bool) -> list[int]:
        return sorted(keys, key=lambda key: (-self.size(key, held), key))

    def pack(self, keys: list[int], held: bool) -> Pack:
        return pack([self.sample(key, held) for key in keys], self.division, self._start, self._end)

    def sample(self, key: int, held: bool) -> Cloze:
        return self._samples[held][key]

    def size(self, key: int, held: bool) -> int:
        """Tokens of a sample in this division."""
        one = self.sample(key, held)
        spans = sum(len(piece) + 1 for piece in one.candidates)
        return spans + len(one.context) * (len(one.candidates) if self.division == "closed" else 1)
