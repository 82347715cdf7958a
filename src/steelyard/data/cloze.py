"""Cloze samples whose candidates have several tokens, as GLM reads them: a context with a mask, and
candidates generated in its place.

Context token i has position i and block position 0. A candidate of n tokens is a span of n + 1
inputs, the start-of-piece token and the n tokens, all at the mask's position and at block positions
1 to n + 1; the targets are the n tokens and the end-of-piece token. ("Block position" is GLM's term
and has nothing to do with transformer blocks.)

In division closed every candidate has its own copy of the context; in open the candidates of a
sample share one. `tasks/superglue_record` makes the samples, the engines train on a `ClozeDataset`.
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
    """One tokenized cloze sample: a context with one [MASK], the candidates for it, and which of
    them are right.
    """

    context: tuple[int, ...]
    mask: int  # index of [MASK] in the context
    candidates: tuple[tuple[int, ...], ...]  # token ids, no special ones
    right: tuple[int, ...]  # indices of the candidates that are answers
    texts: tuple[str, ...]  # the candidates as text
    answers: tuple[str, ...]
    name: str  # identifies the query in messages


@dataclass(frozen=True)
class Pack:
    """Cloze samples computed in one forward, laid end to end: all contexts, then all candidate
    spans, both in the order of the samples.
    """

    tokens: Ids
    positions: Ids
    blocks: Ids
    contexts: list[int]  # lengths of the contexts
    spans: list[int]  # lengths of the spans, candidate by candidate
    groups: list[int]  # per context, how many consecutive spans attend to it
    targets: Ids  # one per token of the spans
    candidates: list[int]  # per sample, its number of candidates
    right: Ids  # per sample, the index of its first right candidate; -1 if none
    counts: dict[str, int]


def pack(samples: list[Cloze], division: Division, start: int, end: int) -> Pack:
    """Lay samples end to end for one forward. Raises ValueError if there are none.

    In division closed the context is repeated for each candidate. `start_token` and `end_token` are
    the ids of start-of-piece and end-of-piece. The counts treat a context as fully visible to
    itself and a span as causal.
    """
    if not samples:
        raise ValueError("a pack of no samples")
    # each sample with the number of its contexts
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
    """The samples to train on, in global batches over endless shuffled epochs, and the samples to
    evaluate.

    Samples are named by their index in the training or in the evaluation set; `held_out` True means
    the evaluation set. `start_token` and `end_token` are the ids of start-of-piece and
    end-of-piece.
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
        """Raises RequestError if there are no training samples or the global batch is below 1."""
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
        """Return the indices of the training samples in the global batch of a step (counted from
        0), longest first.

        The batch is the same for every parallel plan. Each epoch is its own permutation of all
        training samples.
        """
        count = len(self._samples[False])
        return self._sorted(
            batch_of_step(step, self._batch, count, f"record:{self._seed}"), held=False
        )

    def held_out(self) -> list[int]:
        """Return the indices of all evaluation samples, longest first."""
        return self._sorted(range(len(self._samples[True])), held=True)

    def _sorted(self, keys: Iterable[int], held: bool) -> list[int]:
        """Sort sample indices by token count, longest first, then by index."""
        return sorted(keys, key=lambda key: (-self.size(key, held), key))

    def pack(self, keys: list[int], held: bool) -> Pack:
        """Lay the samples with these indices end to end for one forward."""
        return pack([self.sample(key, held) for key in keys], self.division, self._start, self._end)

    def sample(self, key: int, held: bool) -> Cloze:
        """Return one sample of the training set, or of the evaluation set if `held_out`."""
        return self._samples[held][key]

    def size(self, key: int, held: bool) -> int:
        """Return the number of tokens that a sample is computed with in this division: all
        candidate spans and one context, or in closed one context per candidate.
        """
        one = self.sample(key, held)
        spans = sum(len(piece) + 1 for piece in one.candidates)
        return spans + len(one.context) * (len(one.candidates) if self.division == "closed" else 1)
