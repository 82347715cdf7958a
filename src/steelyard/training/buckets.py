"""Pad micro-batches of a cloze up to a few sizes, so that one recorded CUDA graph serves many of
them.

The padding tokens form contexts of their own that no candidate attends to and no loss reads, so
their gradients are exactly zero. They are counted as padding. The remaining capacity is filled with
rows of no tokens, and with logits that belong to no candidate. Used by `ClozeBatches`
(cloze_training.py); graph_replay.py records and replays.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from steelyard.data.cloze import ClozeRows, Pack
from steelyard.models.glm_attention import Room

GRAIN = 128  # tokens: matmul kernels work in tiles
# tokens of a micro-batch beyond which the device takes much longer than the host needs to launch
# its kernels (about 0.1 s), so that graphs gain nothing
LARGE = 49152
MOST = 40  # graphs are recorded for each bucket, which takes some tenths of a second
ROW = 128  # at most, of a context that is padding


@dataclass(frozen=True)
class Size:
    """How large one or several cloze samples are when computed in one micro-batch: the counts of
    tokens, logits (tokens of spans), contexts, spans and samples, and the longest rows.
    """

    tokens: int
    logits: int
    contexts: int
    spans: int
    samples: int
    candidates: int  # most of one sample
    longest: tuple[int, int, int]  # tokens of: a context, all spans of a context, a span
    row: int  # tokens of the longest context with its spans


def size_of(rows: ClozeRows, key: int) -> Size:
    """Return the size of one training sample. In division closed every candidate has a copy of the
    context; in division open all candidates share one.
    """
    one = rows.sample(key, held=False)
    spans = [len(piece) + 1 for piece in one.candidates]
    alone = rows.division == "closed"  # each candidate has a copy of the context
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
    """Return the size of all these samples in one micro-batch: counts are added up, longest lengths
    are maxima. With `combine=max` counts are maxima too, which gives a size that has room for any
    of them. Raises ValueError if there are no sizes.
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
    """The size that a micro-batch is padded to. Micro-batches of one bucket have tensors of equal
    shapes.
    """

    tokens: int
    samples: int
    candidates: int
    room: Room


@dataclass(frozen=True)
class FilledPack:
    """The arrays of a micro-batch, and the bucket that they were padded to; `bucket` is None if
    they were not padded.
    """

    pack: Pack
    bucket: Bucket | None

    @property
    def counts(self) -> dict[str, int]:
        """Return the counts of the pack: tokens, samples, padded, logits, pairs and square."""
        return self.pack.counts


class Buckets:
    """The buckets of all micro-batches of a pass. Buckets differ in their number of tokens and of
    samples only; their capacity for logits, contexts, spans and candidates is the same.
    """

    def __init__(self, sizes: Iterable[Size]) -> None:
        """Choose the buckets from the sizes of all micro-batches of the pass: token counts are
        rounded up to a multiple of 128, doubled until there are at most `MAX_BUCKETS` different
        buckets.
        """
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
        """Return the tokens of a size, rounded up to `token_multiple`."""
        return -(-size.tokens // self.grain) * self.grain

    def of(self, size: Size) -> Bucket:
        """Return the bucket of a micro-batch of the pass."""
        return Bucket(self._tokens(size), size.samples, self.candidates, self.room)


def fill(pack: Pack, bucket: Bucket) -> Pack:
    """Return the pack padded to the bucket: padding tokens (id 0) stand after the contexts, as
    contexts of at most 128 tokens, and rows of length 0 fill up contexts and spans. Targets and
    candidates are not padded here; `send_cloze_batch` does that.

    `counts["padded"]` becomes the number of padding tokens. Raises ValueError if the pack does not
    fit into the bucket.
    """
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
