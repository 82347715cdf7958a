"""Batches of prompts, of equal token count and without padding.

Closed: every prompt is a row of its own. Open: the tokens that prompts of a group have in common
are computed once, as a row of their own, and each prompt's remaining tokens are a row that sees
them.
"""

import heapq
import random
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Batch:
    """Rows laid end to end, as arrays. `gather` names each key's row in (cached prefix ++ this
    batch); see models.
    """

    tokens: Ids
    positions: Ids
    q_lens: list[int]
    k_lens: list[int] | None
    gather: Ids | None
    keep: tuple[int, int] | None  # tokens whose keys and values later batches need
    pick: Ids  # where logits are needed
    items: list[int]  # which prompt each pick belongs to
    counts: dict[str, int]
    prefixes: tuple[int, ...] = ()  # groups whose common beginning is a row of its own here


@dataclass(frozen=True)
class PromptPiece:
    """A row of an open batch: the shared prefix of a group, or the rest of one prompt behind it."""

    group: int
    item: int | None  # None for the prefix itself
    length: int


def equal_bins(lengths: list[int], budget: int, seed: int, multiple: int = 1) -> list[list[int]]:
    """Prompts dealt into the fewest bins of about `budget` tokens, a multiple of `multiple` of
    them, of nearly equal token count (longest first, each into the emptiest bin), in seeded random
    order: any prefix of them is a fair sample."""
    count = max(1, -(-sum(lengths) // budget))
    count = min(-(-count // multiple) * multiple, max(1, len(lengths)))
    rng = random.Random(f"bins:{seed}")
    order = list(range(len(lengths)))
    rng.shuffle(order)
    order.sort(key=lambda i: -lengths[i])
    heap = [(0, b) for b in range(count)]
    bins: list[list[int]] = [[] for _ in range(count)]
    for i in order:
        tokens, b = heapq.heappop(heap)
        bins[b].append(i)
        heapq.heappush(heap, (tokens + lengths[i], b))
    for one in bins:
        rng.shuffle(one)
    rng.shuffle(bins)
    return bins


def closed_batch(rows: list[list[int]], items: list[int]) -> Batch:
    """The prompts `items` as rows of their own."""
    lens = [len(rows[i]) for i in items]
    sizes = np.array(lens, dtype=np.int64)
    return Batch(
        tokens=np.concatenate([np.asarray(rows[i], dtype=np.int64) for i in items]),
        positions=np.concatenate([np.arange(n, dtype=np.int64) for n in lens]),
        q_lens=lens,
        k_lens=None,
        gather=None,
        keep=None,
        pick=np.cumsum(sizes) - 1,
        items=items,
        counts=counts(lens, lens, len(items)),
    )


def counts(
    q_lens: list[int], k_lens: list[int], samples: int, padded: int = 0, window: int | None = None
) -> dict[str, int]:
    """What a batch's FLOPs are counted from: tokens, query-key pairs under the causal mask and
    without it, logits.
    """
    return {
        "tokens": sum(q_lens),
        "samples": samples,
        "padded": padded,
        "logits": samples,
        "pairs": sum(
            seen(k, window) - seen(k - q, window) for q, k in zip(q_lens, k_lens, strict=True)
        ),
        "square": sum(q * k for q, k in zip(q_lens, k_lens, strict=True)),
    }


def seen(length: int, window: int | None) -> int:
    """Query-key pairs of a row of so many tokens: each sees itself and what is before it, or the
    window's last ones of that.
    """
    short = length if window is None else min(length, window)
    return short * (short + 1) // 2 + (length - short) * short


def common_prefix(rows: list[list[int]]) -> int:
    """Return the number of tokens with which all of these rows begin."""
    low, high = min(rows), max(rows)  # the two that differ first
    pairs = enumerate(zip(low, high, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(low), len(high)))


def prefixes(rows: list[list[int]], groups: list[int]) -> list[int]:
    """Length of what each group's prompts have in common; at least one token of every prompt is
    left to itself.
    """
    members: list[list[int]] = [[] for _ in range(max(groups, default=-1) + 1)]
    for item, group in enumerate(groups):
        members[group].append(item)
    out = []
    for items in members:
        every = [rows[i] for i in items]
        limit = min(map(len, every)) - 1 if len(items) > 1 else 0
        out.append(min(limit, common_prefix(every)) if limit else 0)
    return out


def open_bins(
    rows: list[list[int]], groups: list[int], budget: int, seed: int, world: int = 1
) -> list[list[list[PromptPiece]]]:
    """Bins of about `budget` tokens for each of `world` ranks. Groups come in seeded random order
    and stay together; one that spills into the next bin is carried on there, and one cut between
    ranks computes its prefix on both."""
    shared = prefixes(rows, groups)
    rng = random.Random(f"bins:{seed}")
    order = list(range(len(shared)))
    rng.shuffle(order)
    members: dict[int, list[int]] = {group: [] for group in order}
    for item, group in enumerate(groups):
        members[group].append(item)
    line = [
        (group, item, len(rows[item]) - shared[group]) for group in order for item in members[group]
    ]
    total = sum(shared) + sum(length for _, _, length in line)
    out: list[list[list[PromptPiece]]] = []
    start = done = 0
    for rank in range(world):
        stop = len(line) if rank == world - 1 else start
        while stop < len(line) and done < total * (rank + 1) / world:
            group, _, length = line[stop]
            done += length + (shared[group] if stop == 0 or line[stop - 1][0] != group else 0)
            stop += 1
        out.append(_fill(line[start:stop], shared, budget))
        start = stop
    return out


def _fill(
    line: list[tuple[int, int, int]], shared: list[int], budget: int
) -> list[list[PromptPiece]]:
    tokens = sum(length for _, _, length in line) + sum(
        shared[group] for group in {group for group, _, _ in line}
    )
    target = tokens / max(1, round(tokens / budget))
    bins: list[list[PromptPiece]] = [[]]
    filled = 0.0
    current = None
    for group, item, length in line:
        if filled >= target * len(bins) and bins[-1]:
            bins.append([])
        if group != current and shared[group]:
            bins[-1].append(PromptPiece(group, None, shared[group]))
            filled += shared[group]
        current = group
        bins[-1].append(PromptPiece(group, item, length))
        filled += length
    return bins if bins[0] else []


def open_batch(
    rows: list[list[int]],
    pieces: list[PromptPiece],
    after: list[PromptPiece] | None,
    shared: list[int],
    cache: int,
) -> Batch:
    """A bin of an open pass. `after` is the next bin: the group it continues must keep its prefix;
    `cache` is the number of rows kept for the carried prefix, which stand before this batch's own.
    """
    starts = np.cumsum([0] + [piece.length for piece in pieces])
    begin = {
        piece.group: cache + int(starts[i]) for i, piece in enumerate(pieces) if piece.item is None
    }
    tokens, positions, gather, pick, items, k_lens = [], [], [], [], [], []
    first_of = {group: next(i for i, g in _items(pieces) if g == group) for group in begin}
    for i, piece in enumerate(pieces):
        before = 0 if piece.item is None else shared[piece.group]
        source = rows[first_of[piece.group] if piece.item is None else piece.item]
        own = np.arange(cache + starts[i], cache + starts[i + 1], dtype=np.int64)
        tokens.append(np.asarray(source[before : before + piece.length], dtype=np.int64))
        positions.append(np.arange(before, before + piece.length, dtype=np.int64))
        at = begin.get(piece.group, 0)
        gather += [np.arange(at, at + before, dtype=np.int64), own] if before else [own]
        k_lens.append(before + piece.length)
        if piece.item is not None:
            pick.append(int(starts[i + 1]) - 1)
            items.append(piece.item)
    q_lens = [piece.length for piece in pieces]
    return Batch(
        tokens=np.concatenate(tokens),
        positions=np.concatenate(positions),
        q_lens=q_lens,
        k_lens=k_lens,
        gather=np.concatenate(gather),
        keep=_keep(pieces, after, starts),
        pick=np.array(pick, dtype=np.int64),
        items=items,
        counts=counts(q_lens, k_lens, len(items)),
        prefixes=tuple(piece.group for piece in pieces if piece.item is None),
    )


def _items(pieces: list[PromptPiece]) -> list[tuple[int, int]]:
    return [(piece.item, piece.group) for piece in pieces if piece.item is not None]


def _keep(
    pieces: list[PromptPiece], after: list[PromptPiece] | None, starts: Ids
) -> tuple[int, int] | None:
    if not after or after[0].item is None:
        return None
    for i, piece in enumerate(pieces):
        if piece.item is None and piece.group == after[0].group:
            return int(starts[i]), int(starts[i + 1])
    return None


def sorted_batches(lengths: list[int], budget: int, pad_to: int, seed: int) -> list[list[int]]:
    """Padded batches of like length, each of at most `budget` tokens with its padding (one prompt
    more where a last batch of one was left over), in seeded random order."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    out: list[list[int]] = []
    width = 0
    for i in order:
        if not out or (len(out[-1]) + 1) * width > budget:
            out.append([])
            width = -(-lengths[i] // pad_to) * pad_to
        out[-1].append(i)
    # a batch of one is a shape of its own to a compiler
    if len(out) > 1 and len(out[-1]) == 1 < len(out[-2]):
        last = out.pop()
        out[-1] += last
    random.Random(f"bins:{seed}").shuffle(out)
    return out
