"""Micro-batches of a cloze filled up to a few sizes, so that what is recorded for one of them
serves many.

What fills up a micro-batch is a context of its own that no candidate sees and no loss reads: its
gradients are exactly zero. It is counted as padding. Rows of no tokens, and logits of a token that
no candidate has, fill up the rest.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from steelyard.data.cloze import ClozeRows, Pack
from steelyard.models.glm_attention import Room

GRAIN = 128  # tokens: matmul kernels work in tiles
# tokens of a micro-batch, beyond which a device takes much longer than the host needs to launch:
# about 0.1 s
LARGE = 49152
MOST = 40  # numbers of tokens that a pass is recorded for, each some tenths of a second
ROW = 128  # tokens of a context that is padding, at most


@dataclass(frozen=True)
class Size:
    """Of one or more samples."""

    tokens: int
    logits: int
    contexts: int
    spans: int
    samples: int
    candidates: int  # of a sample, at most
    longest: tuple[int, int, int]  # a context, all spans of a context, a span
    row: int  # the longest context with its spans


def size_of(rows: ClozeRows, key: int) -> Size:
    """Of a sample to train on."""
    one = rows.sample(key, held=False)
    spans = [len(piece) + 1 for piece in one.candidates]
    alone = rows.division == "closed"  # a candidate has its context
    beside, contexts = (max(spans), len(spans)) if alone else (sum(spans), 1)
    longest = len(one.context), beside, max(spans)
    return Size(
        rows.size(key, held=False),
        sum(spans),
        contexts,
        len(spans),
        1,
        len(spans),
        longest,
        len(one.context) + beside,
    )


def together(sizes: Iterable[Size], of: Callable[[Iterable[int]], int] = sum) -> Size:
    """Return the size of all these samples in one micro-batch; with `of=max`, the most of each that
    any of them has.
    """
    every = list(sizes)
    context, beside, span = (
        max(part) for part in zip(*(one.longest for one in every), strict=True)
    )
    return Size(
        tokens=of(one.tokens for one in every),
        logits=of(one.logits for one in every),
        contexts=of(one.contexts for one in every),
        spans=of(one.spans for one in every),
        samples=of(one.samples for one in every),
        candidates=max(one.candidates for one in every),
        longest=(context, beside, span),
        row=max(one.row for one in every),
    )


@dataclass(frozen=True)
class Bucket:
    """Sizes that a micro-batch is filled up to."""

    tokens: int
    samples: int
    candidates: int
    room: Room


@dataclass(frozen=True)
class FilledPack:
    """Samples computed at once, and what they were filled up to, if they were."""

    pack: Pack
    bucket: Bucket | None

    @property
    def counts(self) -> dict[str, int]:
        return self.pack.counts


class Buckets:
    """Of the micro-batches of a pass. They have everything in common but the numbers of tokens and
    of samples.
    """

    def __init__(self, sizes: Iterable[Size]) -> None:
        every = list(sizes)
        self.grain = GRAIN
        while len({(one.samples, self._tokens(one)) for one in every}) > MOST:
            self.grain *= 2
        most = together(every, of=max)
        fillers = -(-self.grain // min(ROW, most.longest[0]))
        self.room = Room(
            -(-most.logits // GRAIN) * GRAIN,
            most.contexts + fillers,
            most.spans,
            most.longest,
            most.row,
        )
        self.candidates = most.candidates

    def _tokens(self, size: Size) -> int:
        return -(-size.tokens // self.grain) * self.grain

    def of(self, size: Size) -> Bucket:
        """The bucket of a micro-batch of the pass."""
        return Bucket(self._tokens(size), size.samples, self.candidates, self.room)


def fill(pack: Pack, bucket: Bucket) -> Pack:
    """Up to all that a bucket has, but for targets and candidates."""
    room, n = bucket.room, sum(pack.contexts)
    missing, free = bucket.tokens - len(pack.tokens), room.contexts - len(pack.contexts)
    row = min(ROW, room.longest[0])
    lengths = [min(row, max(0, missing - i * row)) for i in range(free)]
    no_spans = room.spans - len(pack.spans)
    if sum(lengths) != missing or no_spans < 0 or len(pack.targets) > room.logits:
        raise ValueError(
            f"no room for {len(pack.contexts)} contexts and {len(pack.spans)} spans in {bucket}"
        )
    nothing = np.zeros(missing, dtype=np.int64)
    tokens, positions, blocks = (
        np.concatenate((row[:n], nothing, row[n:]))
        for row in (pack.tokens, pack.positions, pack.blocks)
    )
    return replace(
        pack,
        tokens=tokens,
        positions=positions,
        blocks=blocks,
        contexts=[*pack.contexts, *lengths],
        spans=[*pack.spans, *[0] * no_spans],
        groups=[*pack.groups, *[0] * (free - 1), no_spans],
        counts=pack.counts | {"padded": missing},
    )
