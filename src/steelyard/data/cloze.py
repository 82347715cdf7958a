"""A cloze whose answers have several tokens, as GLM reads it: a context with a mask, and candidates generated in its place.

A context is [CLS] passage query [PAD], with [MASK] for the query's placeholder ([PAD] is also GLM's end of a sequence). The
passage and the query's parts around the placeholder are each encoded on their own. Context token i has position i and block
position 0. A candidate of n pieces is a span of n + 1 tokens, start-of-piece and the pieces, all at the mask's position and at
block positions 1 to n + 1; their targets are the pieces and end-of-piece. The passage loses its end where the context and the
longest candidate's span would not fit. (GLM's own code shortens it for every candidate apart.)

In division closed every candidate has a context of its own; in open the candidates of a sample share one.
"""

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from steelyard.case.case import canonical
from steelyard.case.question import Division
from steelyard.data.rows import Ids
from steelyard.data.tokenizer import WordPieces
from steelyard.errors import RequestError
from steelyard.tasks.superglue_record.queries import PLACEHOLDER, Query

SHUFFLE_SEED = 42  # of GLM's processor
_AT_ONCE = 1024  # samples whose texts are encoded in one call


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
class _Choice:
    """A query with the candidates that are scored for it."""

    query: Query
    texts: tuple[str, ...]
    right: tuple[int, ...]
    answers: tuple[str, ...]


def training(queries: list[Query], tokenizer: WordPieces, positions: int, wrong: int) -> tuple[list[Cloze], int]:
    """A sample for every answer of every query, and how many contexts were shortened.

    The answer is the first candidate; the wrong ones are the entities that are none of the query's answers, sorted. Of more
    than `wrong` the first are taken after a shuffle, and stay in its order. One generator draws for the whole set, as in GLM's
    processor, whose entities are in no order of their own, so that its draws cannot be had again."""
    rng = random.Random(SHUFFLE_SEED)
    choices = []
    for query in queries:
        for answer in query.answers:
            others = [entity for entity in query.entities if entity not in query.answers]
            if len(others) > wrong:
                rng.shuffle(others)
            choices.append(_Choice(query, (answer, *others[:wrong]), (0,), (answer,)))
    return _encoded(choices, tokenizer, positions)


def evaluation(queries: list[Query], tokenizer: WordPieces, positions: int) -> tuple[list[Cloze], int]:
    """A sample for every query, and how many contexts were shortened.

    All entities are candidates, and nothing else: an answer that is none of them cannot be chosen, and a query without any
    other has no right candidate and counts as wrong, as it does in GLM's own evaluation."""
    choices = []
    for query in queries:
        right = tuple(i for i, entity in enumerate(query.entities) if entity in query.answers)
        choices.append(_Choice(query, query.entities, right, query.answers))
    return _encoded(choices, tokenizer, positions)


def _encoded(choices: list[_Choice], tokenizer: WordPieces, positions: int) -> tuple[list[Cloze], int]:
    samples, shortened = [], 0
    same: list[int] = list(range(tokenizer.vocab))  # one object a number: a whole set is tens of millions of them
    for start in range(0, len(choices), _AT_ONCE):
        part = choices[start : start + _AT_ONCE]
        texts = list(dict.fromkeys(text for choice in part for text in (*_parts(choice.query), *choice.texts)))
        encoded = tokenizer.encode(texts)
        ids = {text: tuple(same[i] for i in found) for text, found in zip(texts, encoded, strict=True)}
        contexts: dict[tuple[int, ...], tuple[int, ...]] = {}  # the samples of a query mostly have one
        for choice in part:
            candidates = tuple(ids[text] for text in choice.texts)
            passage, before, after = (ids[text] for text in _parts(choice.query))
            room = positions - 3 - len(before) - len(after) - max(map(len, candidates)) - 1
            if room < 0:
                raise RequestError(
                    f"query {choice.query.name} (its line, and its number there) and its longest candidate need "
                    f"{positions - room} positions without the passage; the model has {positions}"
                )
            shortened += len(passage) > room
            kept = passage[:room]
            context = (tokenizer.cls, *kept, *before, tokenizer.mask, *after, tokenizer.pad)
            context = contexts.setdefault(context, context)
            mask = 1 + len(kept) + len(before)
            samples.append(Cloze(context, mask, candidates, choice.right, choice.texts, choice.answers, choice.query.name))
    return samples, shortened


def _parts(query: Query) -> tuple[str, str, str]:
    """The texts that are encoded each on its own: the passage, the query before its placeholder, and behind it."""
    before, _, after = query.query.partition(PLACEHOLDER)
    return query.passage, before, after


@dataclass(frozen=True)
class Pack:
    """Samples computed at once, end to end: all contexts, then all spans, both in the order of the samples."""

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
    every = [(one, len(one.candidates) if division == "closed" else 1) for one in samples]  # with its number of contexts
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
    square = sum(length * length for length in contexts) + sum(a * b for a, b in zip(spans, seen, strict=True))
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
    """Samples to train on, in global batches of an endless sequence of epochs, and samples to evaluate."""

    def __init__(
        self, train: list[Cloze], held: list[Cloze], division: Division, batch: int, seed: int, start: int, end: int
    ) -> None:
        if not train:
            raise RequestError("no samples to train on; allowed: one and more")
        if batch < 1:
            raise RequestError(f"a global batch of {batch} samples; allowed: 1 and more")
        self._samples = {False: train, True: held}
        self._division: Division = division
        self._batch = batch
        self._seed = seed
        self._start = start
        self._end = end

    def batch(self, step: int) -> list[int]:
        """The training samples of a step, counted from 0: the same for every plan, the longest first. Each epoch is a
        permutation of its own, so that lengths are sorted inside a batch and nowhere else."""
        count = len(self._samples[False])
        places = (divmod(place, count) for place in range(step * self._batch, (step + 1) * self._batch))
        return self._sorted((_permutation(count, f"{self._seed}:{epoch}")[i] for epoch, i in places), held=False)

    def held_out(self) -> list[int]:
        """All samples of the evaluation, the longest first."""
        return self._sorted(iter(range(len(self._samples[True]))), held=True)

    def _sorted(self, keys: Iterator[int], held: bool) -> list[int]:
        return sorted(keys, key=lambda key: (-self.size(key, held), key))

    def pack(self, keys: list[int], held: bool) -> Pack:
        return pack([self.sample(key, held) for key in keys], self._division, self._start, self._end)

    def sample(self, key: int, held: bool) -> Cloze:
        return self._samples[held][key]

    def size(self, key: int, held: bool) -> int:
        """Tokens of a sample in this division."""
        one = self.sample(key, held)
        spans = sum(len(piece) + 1 for piece in one.candidates)
        return spans + len(one.context) * (len(one.candidates) if self._division == "closed" else 1)


@lru_cache(maxsize=4)
def _permutation(count: int, seed: str) -> tuple[int, ...]:
    order = list(range(count))
    random.Random(f"record:{seed}").shuffle(order)
    return tuple(order)


def fingerprint(train: list[Query], held: list[Query], tokenizer: WordPieces) -> str:
    """The hash of all queries, whatever file they were read from, and of the vocabulary they are read with."""
    digest = hashlib.sha256(tokenizer.sha256.encode())
    for queries in (train, held):
        digest.update(f"{len(queries)} queries\n".encode())
        for one in queries:
            digest.update(canonical([one.passage, one.query, one.entities, one.answers]).encode())
    return digest.hexdigest()
