"""Divide prompts into batches of nearly equal token count, and lay a batch end to end as arrays
without padding.

In division closed each prompt is one row. In division open the tokens that the prompts of a group
begin with are computed once, as a row of their own, and the remaining tokens of each prompt are a
row that attends to them. `scoring/batches.py` plans the batches of a pass with these functions;
`make_sorted_batches` is for engines that pad.
"""

import heapq
import random
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class PromptBatch:
    """The rows of one scoring batch, laid end to end without padding; made by `make_closed_batch`
    and `make_open_batch`.

    `tokens` and `positions` (in the prompt) have one entry per token, `q_lens` and `k_lens` the
    query and key lengths of each row (`k_lens` None: equal). `gather` lists, row after row, where
    each key lies in the concatenation of the cached prefix and this batch; `keep` is the half-open
    token range of a prefix whose keys and values the next batch needs; both are None in division
    closed, `keep` also if there is none. `pick` are the indices of tokens whose logits are needed,
    `items` the prompt of each; `prefixes` the groups whose shared prefix is a row here; `counts` is
    what `count_batch` returns.
    """

    tokens: Ids
    positions: Ids
    q_lens: list[int]
    k_lens: list[int] | None
    gather: Ids | None
    keep: tuple[int, int] | None  # token range whose keys and values the next batch needs
    pick: Ids  # indices of the tokens whose logits are needed
    items: list[int]  # the prompt of each entry of `pick`
    counts: dict[str, int]
    prefixes: tuple[int, ...] = ()  # groups whose shared prefix is a row of this batch


@dataclass(frozen=True)
class PromptPiece:
    """A row of a batch in division open: the prefix that `group` (a number) shares, if `item` is
    None, or the rest of the prompt with index `item` behind that prefix; `length` is its number of
    tokens.
    """

    group: int
    item: int | None  # index of the prompt; None: the shared prefix
    length: int


def deal_equal_bins(
    lengths: list[int], budget_tokens: int, seed: int, multiple: int = 1
) -> list[list[int]]:
    """Divide prompts, given by their lengths in tokens, into bins of nearly equal token count, and
    return the prompt indices of each bin.

    There are as few bins as hold about `budget_tokens` each, rounded up to a multiple of
    `multiple`, but never more bins than prompts (no prompts: one empty bin). Prompts are dealt
    longest first into the emptiest bin; then prompts and bins are shuffled with `seed`, so that any
    leading bins are a fair sample.
    """
    count = max(1, -(-sum(lengths) // budget_tokens))
    count = min(-(-count // multiple) * multiple, max(1, len(lengths)))
    rng = random.Random(f"bins:{seed}")
    order = list(range(len(lengths)))
    rng.shuffle(order)
    order.sort(key=lambda i: -lengths[i])
    heap = [(0, number) for number in range(count)]
    bins: list[list[int]] = [[] for _ in range(count)]
    for i in order:
        tokens, number = heapq.heappop(heap)
        bins[number].append(i)
        heapq.heappush(heap, (tokens + lengths[i], number))
    for items in bins:
        rng.shuffle(items)
    rng.shuffle(bins)
    return bins


def make_closed_batch(rows: list[list[int]], items: list[int]) -> PromptBatch:
    """Return the batch of division closed in which each of the prompts `items` (indices into
    `rows`, the token ids of all prompts) is a row of its own. Logits are picked at the last token
    of each. Its counts assume full causal attention. Raises ValueError if `items` is empty.
    """
    lens = [len(rows[i]) for i in items]
    sizes = np.array(lens, dtype=np.int64)
    return PromptBatch(
        tokens=np.concatenate([np.asarray(rows[i], dtype=np.int64) for i in items]),
        positions=np.concatenate([np.arange(n, dtype=np.int64) for n in lens]),
        q_lens=lens,
        k_lens=None,
        gather=None,
        keep=None,
        pick=np.cumsum(sizes) - 1,
        items=items,
        counts=count_batch(lens, lens, len(items)),
    )


def count_batch(
    q_lens: list[int], k_lens: list[int], samples: int, padded: int = 0, window: int | None = None
) -> dict[str, int]:
    """Return the counts of a batch from which its FLOPs are computed: `tokens` (queries),
    `samples`, `padded`, `logits` (one per sample), `pairs` and `square`; `samples` and `padded` are
    those given.

    `pairs` are query-key pairs under the causal mask (and the sliding window of `window` tokens, if
    any), `square` those without a mask. A row has `q_lens[i]` queries, which are the last of its
    `k_lens[i]` keys. Raises ValueError if the two lists differ in length.
    """
    return {
        "tokens": sum(q_lens),
        "samples": samples,
        "padded": padded,
        "logits": samples,
        "pairs": sum(
            count_causal_pairs(k, window) - count_causal_pairs(k - q, window)
            for q, k in zip(q_lens, k_lens, strict=True)
        ),
        "square": sum(q * k for q, k in zip(q_lens, k_lens, strict=True)),
    }


def count_causal_pairs(length: int, window: int | None) -> int:
    """Return the number of query-key pairs of one causal row of `length` tokens: each token attends
    to itself and all before it, or with `window` to the last `window` of these.
    """
    visible = length if window is None else min(length, window)
    return visible * (visible + 1) // 2 + (length - visible) * visible


def count_common_prefix(rows: list[list[int]]) -> int:
    """Return the number of tokens with which all of these rows begin; of one row, its length.
    Raises ValueError if there are no rows.
    """
    low, high = min(rows), max(rows)  # of all pairs, these differ first
    pairs = enumerate(zip(low, high, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(low), len(high)))


def measure_prefixes(rows: list[list[int]], groups: list[int]) -> list[int]:
    """Return a list with, for each group number, how many leading tokens all its prompts share.

    `rows` are the token ids of the prompts, `groups` the group number of each. At least one token
    of every prompt stays outside the prefix; a group of one prompt, or none, has 0.
    """
    members: list[list[int]] = [[] for _ in range(max(groups, default=-1) + 1)]
    for item, group in enumerate(groups):
        members[group].append(item)
    prefix_lens = []
    for items in members:
        group_rows = [rows[i] for i in items]
        limit = min(map(len, group_rows)) - 1 if len(items) > 1 else 0
        prefix_lens.append(min(limit, count_common_prefix(group_rows)) if limit else 0)
    return prefix_lens


def plan_open_bins(
    rows: list[list[int]], groups: list[int], budget_tokens: int, seed: int, replicas: int = 1
) -> list[list[list[PromptPiece]]]:
    """Plan the batches of division open: return, for each replica, its bins of about
    `budget_tokens` tokens as lists of pieces.

    `rows` are the prompts' token ids, `groups` the group of each. Groups come in an order shuffled
    with `seed`, and each replica gets a consecutive part of nearly equal token count. A group that
    does not fit continues in the replica's next bin without computing its prefix again; one that is
    cut between two replicas computes its prefix on both. A replica that gets no prompts has an
    empty list.
    """
    prefix_lens = measure_prefixes(rows, groups)
    rng = random.Random(f"bins:{seed}")
    order = list(range(len(prefix_lens)))
    rng.shuffle(order)
    members: dict[int, list[int]] = {group: [] for group in order}
    for item, group in enumerate(groups):
        members[group].append(item)
    prompts = [
        (group, item, len(rows[item]) - prefix_lens[group])
        for group in order
        for item in members[group]
    ]
    total = sum(prefix_lens) + sum(length for _, _, length in prompts)
    rank_bins: list[list[list[PromptPiece]]] = []
    start = dealt_tokens = 0
    for rank in range(replicas):
        stop = len(prompts) if rank == replicas - 1 else start
        while stop < len(prompts) and dealt_tokens < total * (rank + 1) / replicas:
            group, _, length = prompts[stop]
            dealt_tokens += length + (
                prefix_lens[group] if stop == 0 or prompts[stop - 1][0] != group else 0
            )
            stop += 1
        rank_bins.append(_fill_bins(prompts[start:stop], prefix_lens, budget_tokens))
        start = stop
    return rank_bins


def _fill_bins(
    prompts: list[tuple[int, int, int]], prefix_lens: list[int], budget_tokens: int
) -> list[list[PromptPiece]]:
    """Return one replica's bins from its prompts in order, each (group, prompt, tokens behind the
    prefix); `prefix_lens` has the prefix length of each group.

    The number of bins is that of tokens divided by `budget_tokens`, rounded, at least one; all are
    of nearly equal size, and a bin may exceed it by its last pieces. A group's prefix, if any, is a
    piece before its first prompt only. Empty if there are no prompts.
    """
    tokens = sum(length for _, _, length in prompts) + sum(
        prefix_lens[group] for group in {group for group, _, _ in prompts}
    )
    target = tokens / max(1, round(tokens / budget_tokens))
    bins: list[list[PromptPiece]] = [[]]
    filled = 0.0
    current = None
    for group, item, length in prompts:
        if filled >= target * len(bins) and bins[-1]:
            bins.append([])
        if group != current and prefix_lens[group]:
            bins[-1].append(PromptPiece(group, None, prefix_lens[group]))
            filled += prefix_lens[group]
        current = group
        bins[-1].append(PromptPiece(group, item, length))
        filled += length
    return bins if bins[0] else []


def make_open_batch(
    rows: list[list[int]],
    pieces: list[PromptPiece],
    next_pieces: list[PromptPiece] | None,
    prefix_lens: list[int],
    cache_rows: int,
) -> PromptBatch:
    """Return one bin of division open as a batch. Logits are picked at the last token of each
    prompt.

    `rows` are the token ids of all prompts, `prefix_lens` the prefix length of each group.
    `next_pieces` is the replica's next bin, or None: if it continues a group whose prefix is
    computed here, `keep` names that prefix. `cache_rows` is the number of key/value rows reserved
    for the prefix carried over from an earlier bin; they precede this batch's own in `gather`, and
    prompts whose prefix is not in this bin attend to the first of them.
    """
    starts = np.cumsum([0] + [piece.length for piece in pieces])
    prefix_starts = {
        piece.group: cache_rows + int(starts[i])
        for i, piece in enumerate(pieces)
        if piece.item is None
    }
    tokens, positions, gather, pick, items, k_lens = [], [], [], [], [], []
    first_of = {
        group: next(i for i, g in _list_prompts(pieces) if g == group) for group in prefix_starts
    }
    for i, piece in enumerate(pieces):
        before = 0 if piece.item is None else prefix_lens[piece.group]
        prompt = rows[first_of[piece.group] if piece.item is None else piece.item]
        own_keys = np.arange(cache_rows + starts[i], cache_rows + starts[i + 1], dtype=np.int64)
        tokens.append(np.asarray(prompt[before : before + piece.length], dtype=np.int64))
        positions.append(np.arange(before, before + piece.length, dtype=np.int64))
        prefix_start = prefix_starts.get(piece.group, 0)
        gather += (
            [np.arange(prefix_start, prefix_start + before, dtype=np.int64), own_keys]
            if before
            else [own_keys]
        )
        k_lens.append(before + piece.length)
        if piece.item is not None:
            pick.append(int(starts[i + 1]) - 1)
            items.append(piece.item)
    q_lens = [piece.length for piece in pieces]
    return PromptBatch(
        tokens=np.concatenate(tokens),
        positions=np.concatenate(positions),
        q_lens=q_lens,
        k_lens=k_lens,
        gather=np.concatenate(gather),
        keep=_find_kept_prefix(pieces, next_pieces, starts),
        pick=np.array(pick, dtype=np.int64),
        items=items,
        counts=count_batch(q_lens, k_lens, len(items)),
        prefixes=tuple(piece.group for piece in pieces if piece.item is None),
    )


def _list_prompts(pieces: list[PromptPiece]) -> list[tuple[int, int]]:
    """Return (prompt, group) of each piece that is not a prefix."""
    return [(piece.item, piece.group) for piece in pieces if piece.item is not None]


def _find_kept_prefix(
    pieces: list[PromptPiece], next_pieces: list[PromptPiece] | None, starts: Ids
) -> tuple[int, int] | None:
    """Return the half-open token range, in this batch, of the prefix that the next bin continues to
    use; None if there is no next bin, it begins with a prefix of its own, or the prefix is not in
    this batch. `starts` has where each piece begins, and the end.
    """
    if not next_pieces or next_pieces[0].item is None:
        return None
    for i, piece in enumerate(pieces):
        if piece.item is None and piece.group == next_pieces[0].group:
            return int(starts[i]), int(starts[i + 1])
    return None


def make_sorted_batches(
    lengths: list[int], budget_tokens: int, pad_to: int, seed: int
) -> list[list[int]]:
    """Divide prompts, given by their lengths in tokens, into batches of similar length for padding;
    return the prompt indices of each batch, longest first, the batches in an order shuffled with
    `seed`.

    All prompts of a batch count as long as its longest, rounded up to a multiple of `pad_to`, and
    together at most `budget_tokens`. Exceptions: a prompt longer than that is a batch of its own,
    and a last batch of one prompt joins the batch before if that has several.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    batches: list[list[int]] = []
    width = 0
    for i in order:
        if not batches or (len(batches[-1]) + 1) * width > budget_tokens:
            batches.append([])
            width = -(-lengths[i] // pad_to) * pad_to
        batches[-1].append(i)
    # a compiler would compile once more for a batch of one
    if len(batches) > 1 and len(batches[-1]) == 1 < len(batches[-2]):
        last = batches.pop()
        batches[-1] += last
    random.Random(f"bins:{seed}").shuffle(batches)
    return batches
