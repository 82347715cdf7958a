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

from steelyard.data.division import Division, check_division
from steelyard.data.seeded_draws import draw_step_batch
from steelyard.data.training_rows import Ids
from steelyard.errors import RequestError


@dataclass(frozen=True)
class ClozeSample:
    """One tokenized cloze sample: `context`, token ids with one [MASK], which stands at index
    `mask`; `candidates` for it as token ids without special ones, and as `texts`; `right`, the
    indices of the candidates that are answers; `answers`, the texts of the answers (in evaluation
    also those that are no candidate); and `name`, which identifies the query in messages.
    """

    context: tuple[int, ...]
    mask: int  # index of [MASK] in the context
    candidates: tuple[tuple[int, ...], ...]  # token ids, no special ones
    right: tuple[int, ...]  # indices of the candidates that are answers
    texts: tuple[str, ...]  # the candidates as text
    answers: tuple[str, ...]
    name: str  # identifies the query in messages


@dataclass(frozen=True)
class ClozePack:
    """Cloze samples computed in one forward, laid end to end: all contexts, then all candidate
    spans, both in the order of the samples. Made by `pack_samples`.

    `tokens`, `positions` and `blocks` (GLM's block positions) have one entry per token. `contexts`
    are the contexts' lengths: one per candidate in division closed, one per sample in open;
    `groups` says of each how many consecutive spans attend to it. `spans` are the spans' lengths,
    `targets` one token id per token of the spans. Per sample, `candidates` is its number of
    candidates and `right` the index of its first right one, -1 if none. `counts` has `COUNT_NAMES`
    and `padded`.
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


def pack_samples(
    samples: list[ClozeSample], division: Division, start_token: int, end_token: int
) -> ClozePack:
    """Lay cloze samples end to end for one forward. Raises ValueError if there are none,
    or the division is unknown.

    In division closed the context is repeated for each candidate. `start_token` and `end_token` are
    the ids of start-of-piece and end-of-piece. In the counts, `logits` are the tokens of the spans,
    `pairs` the visible query-key pairs (a context sees itself whole, a span its context and itself
    causally), `square` the same without the causal mask; `padded` is 0.
    """
    check_division(division)
    if not samples:
        raise ValueError("no samples to pack")
    # each sample with the number of its contexts
    repeats = [
        (sample, len(sample.candidates) if division == "closed" else 1) for sample in samples
    ]
    contexts = [len(sample.context) for sample, times in repeats for _ in range(times)]
    groups = [len(sample.candidates) // times for sample, times in repeats for _ in range(times)]
    pieces = [piece for sample in samples for piece in sample.candidates]
    spans = [len(piece) + 1 for piece in pieces]
    masks = [sample.mask for sample in samples for _ in sample.candidates]
    context_lens = [len(sample.context) for sample in samples for _ in sample.candidates]
    size, generated = sum(contexts), sum(spans)
    context_tokens = [
        np.tile(np.array(sample.context, dtype=np.int64), times) for sample, times in repeats
    ]
    span_tokens = np.array(
        [token for piece in pieces for token in (start_token, *piece)], dtype=np.int64
    )
    context_positions = [np.arange(length, dtype=np.int64) for length in contexts]
    blocks = np.array([i for length in spans for i in range(1, length + 1)], dtype=np.int64)
    square = sum(length * length for length in contexts) + sum(
        a * b for a, b in zip(spans, context_lens, strict=True)
    )
    return ClozePack(
        tokens=np.concatenate([*context_tokens, span_tokens]),
        positions=np.concatenate(
            [*context_positions, np.repeat(np.array(masks, dtype=np.int64), spans)]
        ),
        blocks=np.concatenate([np.zeros(size, dtype=np.int64), blocks]),
        contexts=contexts,
        spans=spans,
        groups=groups,
        targets=np.array(
            [token for piece in pieces for token in (*piece, end_token)], dtype=np.int64
        ),
        candidates=[len(sample.candidates) for sample in samples],
        right=np.array(
            [sample.right[0] if sample.right else -1 for sample in samples], dtype=np.int64
        ),
        counts={
            "tokens": size + generated,
            "samples": len(samples),
            "padded": 0,
            "logits": generated,
            "pairs": square + sum(length * (length + 1) // 2 for length in spans),
            "square": square + sum(length * length for length in spans),
        },
    )


class ClozeDataset:
    """The cloze samples to train on, in global batches over endless shuffled epochs, and the
    samples to evaluate.

    A sample's key is its index in the training or in the evaluation set; `held_out` True means the
    evaluation set. `batch` and `held_out` return keys, `pack` lays samples out for a forward.
    `batch_size` counts samples; `start_token` and `end_token` are the ids of start-of-piece and
    end-of-piece.
    """

    def __init__(
        self,
        train_samples: list[ClozeSample],
        evaluation_samples: list[ClozeSample],
        division: Division,
        batch_size: int,
        seed: int,
        start_token: int,
        end_token: int,
    ) -> None:
        """Keep the samples and settings of a cloze data set. Raises RequestError if there are no
        training samples or the global batch is below 1; there may be no evaluation samples.
        """
        if not train_samples:
            raise RequestError("no samples to train on; allowed: 1 or more")
        if batch_size < 1:
            raise RequestError(f"a global batch of {batch_size} samples; allowed: 1 or more")
        self._samples = {False: train_samples, True: evaluation_samples}
        self.division: Division = division
        self._batch_size = batch_size
        self._seed = seed
        self._start_token = start_token
        self._end_token = end_token

    def batch(self, step: int) -> list[int]:
        """Return the indices of the training samples in the global batch of a step (counted from
        0), those with most tokens first.

        The batch is the same for every parallel plan. Each epoch is its own seeded permutation of
        all training samples; a batch may span two.
        """
        count = len(self._samples[False])
        return self._sort_by_size(
            draw_step_batch(step, self._batch_size, count, f"record:{self._seed}"), held_out=False
        )

    def held_out(self) -> list[int]:
        """Return the indices of all evaluation samples, those with most tokens first."""
        return self._sort_by_size(range(len(self._samples[True])), held_out=True)

    def _sort_by_size(self, keys: Iterable[int], held_out: bool) -> list[int]:
        """Return sample indices of the training set, or of the evaluation set if `held_out`, sorted
        by token count in the data set's division, highest first, then by index.
        """
        return sorted(keys, key=lambda key: (-self.count_tokens(key, held_out), key))

    def pack(self, keys: list[int], held_out: bool) -> ClozePack:
        """Lay the cloze samples with these indices of the training set, or of the evaluation set if
        `held_out`, end to end for one forward, in this order and the data set's division. Raises
        ValueError if there are none.
        """
        return pack_samples(
            [self.sample(key, held_out) for key in keys],
            self.division,
            self._start_token,
            self._end_token,
        )

    def sample(self, key: int, held_out: bool) -> ClozeSample:
        """Return the cloze sample with this index in the training set, or in the evaluation set if
        `held_out`.
        """
        return self._samples[held_out][key]

    def count_tokens(self, key: int, held_out: bool) -> int:
        """Return the number of tokens that a cloze sample is computed with in the data set's
        division: all candidate spans, each with its start token, and in division closed one context
        per candidate, in open one in all. `key` is the sample's index in the training set, or in
        the evaluation set if `held_out`.
        """
        sample = self.sample(key, held_out)
        spans = sum(len(piece) + 1 for piece in sample.candidates)
        return spans + len(sample.context) * (
            len(sample.candidates) if self.division == "closed" else 1
        )
