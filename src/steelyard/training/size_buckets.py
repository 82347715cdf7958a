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

from steelyard.data.cloze_samples import ClozeDataset, ClozePack
from steelyard.models.cloze_attention import ClozeCapacity

TOKEN_MULTIPLE = 128  # tokens: matmul kernels work in tiles
# tokens of a micro-batch beyond which the device takes much longer than the host needs to launch
# its kernels (about 0.1 s), so that graphs gain nothing
MAX_FILLED_TOKENS = 49152
MAX_BUCKETS = 40  # graphs are recorded for each bucket, which takes some tenths of a second
FILLER_TOKENS = 128  # at most, of a context that is padding


@dataclass(frozen=True)
class ClozeSize:
    """How large one or several cloze samples are in one micro-batch: numbers of `tokens`, `logits`
    (tokens of spans), `contexts`, `spans` (one per candidate) and `samples`; `candidates`, the most
    of one sample; `longest`, the tokens of the longest context, of all spans of a context, and of a
    span; `longest_row`, the tokens of the longest context with its spans. Made by `measure_sample`
    and `combine_sizes`, used to choose a `SizeBucket`.
    """

    tokens: int
    logits: int
    contexts: int
    spans: int
    samples: int
    candidates: int  # most of one sample
    longest: tuple[int, int, int]  # tokens of: a context, all spans of a context, a span
    longest_row: int  # tokens of the longest context with its spans


def measure_sample(rows: ClozeDataset, key: int) -> ClozeSize:
    """Return the size of one training sample, by its key. A candidate's span is its tokens and one
    more. In division closed every candidate has a copy of the context; in division open all
    candidates share one.
    """
    sample = rows.sample(key, held_out=False)
    spans = [len(piece) + 1 for piece in sample.candidates]
    is_closed = rows.division == "closed"  # each candidate has a copy of the context
    spans_per_context, contexts = (max(spans), len(spans)) if is_closed else (sum(spans), 1)
    longest = len(sample.context), spans_per_context, max(spans)
    return ClozeSize(
        rows.count_tokens(key, held_out=False),
        sum(spans),
        contexts,
        len(spans),
        1,
        len(spans),
        longest,
        len(sample.context) + spans_per_context,
    )


def combine_sizes(
    sizes: Iterable[ClozeSize], combine: Callable[[Iterable[int]], int] = sum
) -> ClozeSize:
    """Return the size of all these samples in one micro-batch: counts are added up, longest lengths
    are maxima. With `combine=max` counts are maxima too, which gives a size that has room for any
    of them. Raises ValueError if there are no sizes.
    """
    all_sizes = list(sizes)
    context, spans_per_context, span = (
        max(part) for part in zip(*(size.longest for size in all_sizes), strict=True)
    )
    return ClozeSize(
        tokens=combine(size.tokens for size in all_sizes),
        logits=combine(size.logits for size in all_sizes),
        contexts=combine(size.contexts for size in all_sizes),
        spans=combine(size.spans for size in all_sizes),
        samples=combine(size.samples for size in all_sizes),
        candidates=max(size.candidates for size in all_sizes),
        longest=(context, spans_per_context, span),
        longest_row=max(size.longest_row for size in all_sizes),
    )


@dataclass(frozen=True)
class SizeBucket:
    """A size that micro-batches of cloze samples are padded to, so that those of one bucket have
    tensors of equal shapes: `tokens` in all, `samples` (not padded), `candidates`, the slots of
    each sample, and `capacity`, the sizes of the layout (span tokens, contexts, spans, longest
    lengths). Made by `SizeBuckets.find_bucket`.
    """

    tokens: int
    samples: int
    candidates: int
    capacity: ClozeCapacity


@dataclass(frozen=True)
class FilledPack:
    """The host arrays of a micro-batch of cloze samples (`pack`), and the bucket (size) that they
    were padded to; `bucket` is None if they were not padded. Made by `ClozeBatches.pack`.
    """

    pack: ClozePack
    bucket: SizeBucket | None

    @property
    def counts(self) -> dict[str, int]:
        """Return the counts of the pack: tokens, samples, padded, logits, pairs and square."""
        return self.pack.counts


class SizeBuckets:
    """The padded sizes (buckets) of all micro-batches of a pass, chosen from their sizes on
    construction: `find_bucket(size)` rounds a size up to its `SizeBucket`. Buckets differ in their
    number of tokens (multiples of `token_multiple`) and of samples only; `capacity` (for span
    tokens, contexts and spans) and `candidates` are those of the largest micro-batch, for all.
    """

    def __init__(self, sizes: Iterable[ClozeSize]) -> None:
        """Choose the buckets from the sizes of all micro-batches of the pass: token counts are
        rounded up to a multiple of 128, which is doubled until there are at most `MAX_BUCKETS`
        different pairs of samples and tokens. Raises ValueError if there are no sizes.
        """
        all_sizes = list(sizes)
        self.token_multiple = TOKEN_MULTIPLE
        while (
            len({(size.samples, self._round_up_tokens(size)) for size in all_sizes}) > MAX_BUCKETS
        ):
            self.token_multiple *= 2
        largest = combine_sizes(all_sizes, combine=max)
        fillers = -(-self.token_multiple // min(FILLER_TOKENS, largest.longest[0]))
        self.capacity = ClozeCapacity(
            -(-largest.logits // TOKEN_MULTIPLE) * TOKEN_MULTIPLE,
            largest.contexts + fillers,
            largest.spans,
            largest.longest,
            largest.longest_row,
        )
        self.candidates = largest.candidates

    def _round_up_tokens(self, size: ClozeSize) -> int:
        """Return the number of tokens of a size, rounded up to a multiple of `token_multiple`."""
        return -(-size.tokens // self.token_multiple) * self.token_multiple

    def find_bucket(self, size: ClozeSize) -> SizeBucket:
        """Return the bucket of a micro-batch of the pass: its tokens rounded up to
        `token_multiple`, its own number of samples, and the capacity and candidates that all
        buckets share. Sizes that were not among those of the construction are not refused.
        """
        return SizeBucket(self._round_up_tokens(size), size.samples, self.candidates, self.capacity)


def fill_pack(pack: ClozePack, bucket: SizeBucket) -> ClozePack:
    """Return a new pack padded to the bucket: padding tokens (id 0) stand after the contexts, as
    contexts of at most 128 tokens, and rows of length 0 fill up contexts and spans. Targets and
    candidates are not padded here; `send_cloze_batch` does that.

    `counts["padded"]` becomes the number of padding tokens. Raises ValueError if the pack does not
    fit into the bucket.
    """
    capacity, context_tokens = bucket.capacity, sum(pack.contexts)
    missing, free_contexts = (
        bucket.tokens - len(pack.tokens),
        capacity.contexts - len(pack.contexts),
    )
    row = min(FILLER_TOKENS, capacity.longest[0])
    lengths = [min(row, max(0, missing - i * row)) for i in range(free_contexts)]
    free_spans = capacity.spans - len(pack.spans)
    if sum(lengths) != missing or free_spans < 0 or len(pack.targets) > capacity.logits:
        raise ValueError(
            f"no room for {len(pack.contexts)} contexts and {len(pack.spans)} spans in {bucket}"
        )
    filler = np.zeros(missing, dtype=np.int64)
    tokens, positions, blocks = (
        np.concatenate((row[:context_tokens], filler, row[context_tokens:]))
        for row in (pack.tokens, pack.positions, pack.blocks)
    )
    return replace(
        pack,
        tokens=tokens,
        positions=positions,
        blocks=blocks,
        contexts=[*pack.contexts, *lengths],
        spans=[*pack.spans, *[0] * free_spans],
        groups=[*pack.groups, *[0] * (free_contexts - 1), free_spans],
        counts=pack.counts | {"padded": missing},
    )
