"""A GLM's whole attention in Triton, for 16-bit types: context tokens attend to their context, span
tokens to their context and to earlier tokens of their own span.

This is kernel `packed` of models/cloze_attention.py; `attend_cloze` with kernel `padded` is its
plain meaning. Tokens are in the order of `InterleavedLayout`, every context followed by its spans.
For each token `ranges` holds where its row (context with spans) begins, where the context in it
ends, and where its own span begins. A program has up to `TILE` tokens of one row, so it reads only
keys of that row. No two programs add to one number, so results are the same in every run. Gradients
are written into the layout of QKV, which the matmul before reads. Exponents are to base 2.

Dropped probabilities are decided by a hash of seed, head, query and key, computed again in the
backward pass. Called by models/glm_fused.py.
"""

from typing import Any

import torch
from torch import Tensor

from steelyard.errors import RequestError
from steelyard.kernels.glm_norm import Dropout, reduce_parts
from steelyard.kernels.jit import constexpr, power_of_2, tensor, tl, varied
from steelyard.kernels.pair_dropout import kept, keys_of, of_keys, of_queries
from steelyard.kernels.tiles import described, read_tile, tiles

LOG2_E = 1.4426950408889634
COUNTED = 2**31 - 1  # of a tensor: offsets are 32-bit
LEAST = 16  # the smallest side of a tile in tl.dot
TILE = 64  # tokens of one program, at most
# Tokens of the other operand that a program loads at a time, warps, pipeline stages.
FORWARD = (32, 4, 3)
BACK_QUERIES = (32, 4, 3)
BACK_KEYS = (32, 4, 2)


def attend(
    qkv: Tensor, borders: Tensor, programs: Tensor, dropout: Dropout
) -> tuple[Tensor, Tensor]:
    """Return the attention output [T, H, D] and the base-2 logarithm of each softmax's sum, fp32
    [H, T], of `qkv` [T, 3, H, D].

    `ranges` is int32 [3, T] (`token_ranges`) and `programs` int32 [2, P] of `InterleavedLayout`.
    Raises RequestError if `qkv` has more than 2^31 - 1 elements, because offsets are 32-bit.
    """
    if qkv.numel() > COUNTED:
        raise RequestError(
            f"tune.attention='packed' counts to {COUNTED}, not to {qkv.numel()} numbers; choose a"
            " smaller tune.micro_batch"
        )
    tokens, _, heads, dim = qkv.shape
    out, lse = qkv.new_empty(tokens, heads, dim), qkv.new_empty(heads, tokens, dtype=torch.float32)
    keys, warps, stages = FORWARD
    (read,), by_descriptor = _read(keys, qkv.flatten(1, 2))
    _forward[(programs.shape[1], heads)](
        qkv, read, out, lse, borders, programs, *_drawn(dropout), tokens,
        dim**-0.5 * LOG2_E, *_dropped(dropout), dropout.share > 0, heads,
        dim, max(LEAST, power_of_2(dim)), TILE, keys, by_descriptor, num_warps=warps,
        num_stages=stages,
    )  # fmt: skip
    return out, lse


def attend_backward(
    grad: Tensor,
    qkv: Tensor,
    out: Tensor,
    lse: Tensor,
    borders: Tensor,
    programs: Tensor,
    dropout: Dropout,
    accumulator: Tensor,
) -> Tensor:
    """Return the gradient of `qkv` [T, 3, H, D], from that of the output [T, H, D] and the output
    and lse of `triton_attend_cloze`.

    Its sum over tokens, the gradient of QKV's bias [3 · H · D], is added to `accumulator` in place.
    `grad` is contiguous.
    """
    tokens, _, heads, dim = qkv.shape
    total, dot = torch.empty_like(qkv), torch.empty_like(lse)
    grid = programs.shape[1], heads
    parts = qkv.new_empty(grid[0], 3, heads * dim, dtype=torch.float32)
    given = (
        out, lse, dot, total, parts, borders, programs, *_drawn(dropout), tokens,
        dim**-0.5, *_dropped(dropout),
    )  # fmt: skip
    sizes = dropout.share > 0, heads, dim, max(LEAST, power_of_2(dim)), TILE
    for kernel, (other, warps, stages) in ((_back_queries, BACK_QUERIES), (_back_keys, BACK_KEYS)):
        (read, read_grad), by_descriptor = _read(other, qkv.flatten(1, 2), grad)
        kernel[grid](
            grad, read_grad, qkv, read, *given, *sizes, other, by_descriptor,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
    reduce_parts(parts, list(accumulator.view(3, -1)))
    return total


def _read(rows: int, *matrices: Tensor) -> tuple[list[Any], bool]:
    """Return the kernel arguments from which tiles of `rows` tokens are loaded, and whether these
    are tensor descriptors.

    They are descriptors only if the device has them and the head dimension needs no padding;
    otherwise the matrices themselves.
    """
    dim = matrices[0].shape[-1]
    whole = described(matrices[0].device) and dim == max(LEAST, power_of_2(dim))
    return (tiles(rows, *matrices) if whole else list(matrices)), whole


def _drawn(dropout: Dropout) -> tuple[Tensor, int]:
    """Return the dropout's seed tensor and site number, as the kernels take them."""
    return dropout.seed, dropout.place


def _dropped(dropout: Dropout) -> tuple[float, int]:
    """Return the factor 1 / (1 - share) that kept probabilities are multiplied by, and the hash
    below which they are dropped.
    """
    return 1 / (1 - dropout.share), dropout.below


@varied()
def _seen(i: tensor, start: tensor, end: tensor, own: tensor, j: tensor) -> tensor:
    """Return whether query `i` sees key `j`: j is in the context, start <= j < end, or in the
    query's own span and not later, span_start <= j <= i.
    """
    return ((j >= start) & (j < end)) | ((j >= own) & (j <= i))


@varied()
def _tile(
    base: tensor, i: tensor, there: tensor, row: constexpr, dim: constexpr, wide: constexpr
) -> tensor:
    """Load rows `i` of one head, [len(i), padded], from a matrix whose rows are `width` elements
    apart; zeros where `mask` is False and beyond `dim` columns.
    """
    d = tl.arange(0, wide)[None, :]
    at = base + i[:, None] * row + d
    if dim == wide:
        return tl.load(at, there[:, None], 0.0)
    return tl.load(at, there[:, None] & (d < dim), 0.0)


@varied()
def _other(
    base: tensor, read: tensor, begin: tensor, side: tensor, upto: tensor, tokens: tensor,
    stride: constexpr, dim: constexpr, wide: constexpr, rows: constexpr,
    by_descriptor: constexpr,
) -> tensor:  # fmt: skip
    """Load `rows` tokens from `begin` on, of the head whose columns begin at `first_column`,
    through a descriptor or pointers.

    Tokens from `stop` on are zeros when loaded through pointers; through a descriptor they may hold
    other rows' values, and callers mask them.
    """
    if by_descriptor:
        return read_tile(read, begin, side, stride, tokens, dim, rows, True)
    else:
        at = begin + tl.arange(0, rows)
        return _tile(base + side, at, at < upto, stride, dim, wide)


@varied()
def _attend_keys(
    q: tensor, qkv: tensor, read: tensor, head: tensor, tokens: tensor, begin: tensor,
    upto: tensor, i: tensor, start: tensor, end: tensor, own: tensor,
    a: tensor, high: tensor, most: tensor, weight: tensor, total: tensor,
    scale: tensor, below: tensor, masked: constexpr, dropped: constexpr, row: constexpr,
    dim: constexpr, wide: constexpr, keys: constexpr, by_descriptor: constexpr,
) -> tuple[tensor, tensor, tensor]:  # fmt: skip
    """Continue an online softmax with one tile of `keys` keys from `begin` on; return the new
    maximum, sum of exponentials and weighted sum of values.

    Without `masked` all queries see all keys of the tile. Dropped probabilities count in the sum of
    exponentials, not in that of values.
    """
    j = begin + tl.arange(0, keys)
    k = _other(
        qkv, read, begin, row + head * dim, upto, tokens, 3 * row, dim, wide, keys,
        by_descriptor,
    )  # fmt: skip
    v = _other(
        qkv, read, begin, 2 * row + head * dim, upto, tokens, 3 * row, dim, wide,
        keys, by_descriptor,
    )  # fmt: skip
    s = tl.dot(q, tl.trans(k)) * scale
    if masked:
        seen = _seen(i[:, None], start[:, None], end[:, None], own[:, None], j[None, :])
        s = tl.where(seen, s, float("-inf"))
    larger = tl.maximum(most, tl.max(s, 1))
    p = tl.exp2(s - larger[:, None])
    fix = tl.exp2(most - larger)
    weight = weight * fix + tl.sum(p, 1)
    if dropped:
        p = tl.where(kept(a[:, None], of_keys(j, high)[None, :], below), p, 0.0)
    return larger, weight, total * fix[:, None] + tl.dot(p.to(v.dtype), v)


@varied("tokens", "place", "below")
def _forward(
    qkv: tensor, read: tensor, out: tensor, lse: tensor, borders: tensor, programs: tensor,
    seed: tensor, place: tensor, tokens: tensor, scale: tensor, inverse: tensor,
    below: tensor, dropped: constexpr, heads: constexpr, dim: constexpr, wide: constexpr,
    tile: constexpr, keys: constexpr, by_descriptor: constexpr,
) -> None:  # fmt: skip
    """Compute softmax(q kᵀ / sqrt(D), visible keys only) v with dropout for one tile of queries and
    one head; equals kernel `padded` of models/cloze_attention.py, but for which probabilities are
    dropped.

    `qkv` is contiguous [tokens, 3, heads, dim], `qkv_tiles` the same for `_load_tile`, `out`
    [tokens, heads, dim], `lse` fp32 [heads, tokens] (base 2), `ranges` int32 [3, tokens],
    `programs` int32 [2, P]. Program (p, h) has the queries programs[0, p] to at most programs[1,
    p], `tile` of them at most, of head h. `scale` is log2(e) / sqrt(dim), `dropout_scale` 1 / (1 -
    share), `place` the dropout site.
    """
    head = tl.program_id(1)
    first, stop = _own_tokens(programs)
    i = first + tl.arange(0, tile)
    there = i < stop
    row: constexpr = heads * dim
    q = _tile(qkv + head * dim, i, there, 3 * row, dim, wide)
    start, end = tl.load(borders + i, there, 0), tl.load(borders + tokens + i, there, 0)
    own = tl.load(borders + 2 * tokens + i, there, tokens)
    low, high = keys_of(seed, place)
    a = of_queries(i, head, heads, low)
    most = tl.full([tile], -1e30, tl.float32)  # finite, because -inf minus -inf is NaN
    weight = tl.zeros([tile], tl.float32)
    total = tl.zeros([tile, wide], tl.float32)
    lowest, whole, upto = _keys_of_queries(borders, tokens, first, stop, tile, keys)
    for begin in range(lowest, whole, keys):
        most, weight, total = _attend_keys(
            q, qkv, read, head, tokens, begin, upto, i, start, end, own,
            a, high, most, weight, total, scale, below, False, dropped,
            row, dim, wide, keys, by_descriptor,
        )  # fmt: skip
    for begin in range(whole, upto, keys):
        most, weight, total = _attend_keys(
            q, qkv, read, head, tokens, begin, upto, i, start, end, own,
            a, high, most, weight, total, scale, below, True, dropped,
            row, dim, wide, keys, by_descriptor,
        )  # fmt: skip
    if dropped:
        total = total * inverse
    d = tl.arange(0, wide)[None, :]
    at = out + head * dim + i[:, None] * row + d
    tl.store(at, total / weight[:, None], there[:, None] & (d < dim))
    tl.store(lse + head * tokens + i, most + tl.log2(weight), there)


@varied()
def _own_tokens(programs: tensor) -> tuple[tensor, tensor]:
    """Return the first token of this program and where its row ends; both are equal if the program
    has no tokens.
    """
    return tl.load(programs + tl.program_id(0)), tl.load(
        programs + tl.num_programs(0) + tl.program_id(0)
    )


@varied()
def _keys_of_queries(
    borders: tensor, tokens: tensor, first: tensor, stop: tensor, tile: constexpr, keys: constexpr
) -> tuple[tensor, tensor, tensor]:
    """Return the range of keys that a tile of queries of one row needs: its first key, the key up
    to which all queries see all keys (in whole steps of `keys`), and its end.
    """
    some = first < stop
    lowest, end = tl.load(borders + first, some, 0), tl.load(borders + tokens + first, some, 0)
    upto = tl.where(some, tl.maximum(end, tl.minimum(first + tile, stop)), 0)
    return lowest, lowest + (end - lowest) // keys * keys, upto


@varied()
def _store(
    parts: tensor, total: tensor, value: tensor, which: constexpr, i: tensor, there: tensor,
    head: tensor, row: constexpr, dim: constexpr, wide: constexpr,
) -> None:  # fmt: skip
    """Write the gradient of this program's queries (`part` 0), keys (1) or values (2) into
    `qkv_grad` [tokens, 3, heads, dim], and its sum over tokens to row program_id(0) of `parts`,
    fp32 [P, 3, heads · dim].
    """
    d = tl.arange(0, wide)
    value = tl.where(there[:, None], value, 0.0)
    at = total + i[:, None] * 3 * row + which * row + head * dim + d[None, :]
    tl.store(at, value, there[:, None] & (d < dim)[None, :])
    tl.store(
        parts + (tl.program_id(0) * 3 + which) * row + head * dim + d, tl.sum(value, 0), d < dim
    )


@varied()
def _queries_back(
    q: tensor, g: tensor, qkv: tensor, read: tensor, head: tensor, tokens: tensor,
    begin: tensor, upto: tensor, i: tensor, start: tensor, end: tensor, own: tensor,
    a: tensor, high: tensor, norm: tensor, mean: tensor, scale: tensor, below: tensor,
    masked: constexpr, dropped: constexpr, row: constexpr, dim: constexpr, wide: constexpr,
    keys: constexpr, by_descriptor: constexpr,
) -> tensor:  # fmt: skip
    """Return what one tile of keys contributes to the gradient of queries, without the factors 1 /
    sqrt(D) and 1 / (1 - share).
    """
    j = begin + tl.arange(0, keys)
    k = _other(
        qkv, read, begin, row + head * dim, upto, tokens, 3 * row, dim, wide, keys,
        by_descriptor,
    )  # fmt: skip
    v = _other(
        qkv, read, begin, 2 * row + head * dim, upto, tokens, 3 * row, dim, wide,
        keys, by_descriptor,
    )  # fmt: skip
    s = tl.dot(q, tl.trans(k)) * (scale * 1.4426950408889634)
    if masked:
        seen = _seen(i[:, None], start[:, None], end[:, None], own[:, None], j[None, :])
        s = tl.where(seen, s, float("-inf"))
    p = tl.exp2(s - norm[:, None])
    slope = tl.dot(g, tl.trans(v))
    if dropped:
        slope = tl.where(kept(a[:, None], of_keys(j, high)[None, :], below), slope, 0.0)
    return tl.dot((p * (slope - mean[:, None])).to(k.dtype), k)


@varied("tokens", "place", "below")
def _back_queries(
    grad: tensor, read_grad: tensor, qkv: tensor, read: tensor, out: tensor, lse: tensor,
    dot: tensor, total: tensor, parts: tensor, borders: tensor, programs: tensor, seed: tensor,
    place: tensor, tokens: tensor, scale: tensor, inverse: tensor, below: tensor,
    dropped: constexpr, heads: constexpr, dim: constexpr, wide: constexpr, tile: constexpr,
    keys: constexpr, by_descriptor: constexpr,
) -> None:  # fmt: skip
    """Compute the gradient of one tile of queries of one head, and write the dot products that
    `_backward_keys` reads; to run first.

        dot = rowsum(grad · out) (1 - share);  p = softmax probabilities from lse
        dq = Σ p (keep · grad vᵀ - dot) k / sqrt(D) / (1 - share)

    `grad` and `out` are [tokens, heads, dim], `dot` fp32 [heads, tokens], `qkv_grad` [tokens, 3,
    heads, dim], `parts` fp32 [P, 3, heads · dim] with sums over each program's tokens; the rest is
    as in `_attend_forward`, but `scale` is 1 / sqrt(dim). Equals autograd's gradient of kernel
    `padded`.
    """
    head = tl.program_id(1)
    first, stop = _own_tokens(programs)
    i = first + tl.arange(0, tile)
    there = i < stop
    row: constexpr = heads * dim
    q = _tile(qkv + head * dim, i, there, 3 * row, dim, wide)
    g = _tile(grad + head * dim, i, there, row, dim, wide)
    mean = (
        tl.sum(
            g.to(tl.float32) * _tile(out + head * dim, i, there, row, dim, wide).to(tl.float32), 1
        )
        / inverse
    )
    tl.store(dot + head * tokens + i, mean, there)
    norm = tl.load(lse + head * tokens + i, there, 0.0)
    start, end = tl.load(borders + i, there, 0), tl.load(borders + tokens + i, there, 0)
    own = tl.load(borders + 2 * tokens + i, there, tokens)
    low, high = keys_of(seed, place)
    a = of_queries(i, head, heads, low)
    back = tl.zeros([tile, wide], tl.float32)
    lowest, whole, upto = _keys_of_queries(borders, tokens, first, stop, tile, keys)
    for begin in range(lowest, whole, keys):
        back += _queries_back(
            q, g, qkv, read, head, tokens, begin, upto, i, start, end, own,
            a, high, norm, mean, scale, below, False, dropped, row, dim,
            wide, keys, by_descriptor,
        )  # fmt: skip
    for begin in range(whole, upto, keys):
        back += _queries_back(
            q, g, qkv, read, head, tokens, begin, upto, i, start, end, own,
            a, high, norm, mean, scale, below, True, dropped, row, dim,
            wide, keys, by_descriptor,
        )  # fmt: skip
    _store(parts, total, back * (scale * inverse), 0, i, there, head, row, dim, wide)


@varied()
def _keys_back(
    k: tensor, v: tensor, grad: tensor, read_grad: tensor, qkv: tensor, read: tensor,
    lse: tensor, dot: tensor, borders: tensor, begin: tensor, upto: tensor, j: tensor,
    b: tensor, low: tensor, head: tensor, tokens: tensor, scale: tensor, below: tensor,
    of_k: tensor, of_v: tensor, masked: constexpr, dropped: constexpr, heads: constexpr,
    dim: constexpr, wide: constexpr, queries: constexpr, by_descriptor: constexpr,
) -> tuple[tensor, tensor]:  # fmt: skip
    """Add what one tile of queries contributes to the gradients of keys and values, without the
    factors 1 / sqrt(D) (of keys) and 1 / (1 - share), and return both sums.
    """
    i = begin + tl.arange(0, queries)
    real = i < upto
    row: constexpr = heads * dim
    q = _other(
        qkv, read, begin, head * dim, upto, tokens, 3 * row, dim, wide, queries,
        by_descriptor,
    )  # fmt: skip
    g = _other(
        grad, read_grad, begin, head * dim, upto, tokens, row, dim, wide, queries,
        by_descriptor,
    )  # fmt: skip
    norms = head * tokens + i
    norm, mean = tl.load(lse + norms, real, 0.0), tl.load(dot + norms, real, 0.0)
    s = tl.dot(k, tl.trans(q)) * (scale * 1.4426950408889634)
    if masked:
        start, end = tl.load(borders + i, real, 0), tl.load(borders + tokens + i, real, 0)
        own = tl.load(borders + 2 * tokens + i, real, tokens)
        seen = _seen(i[None, :], start[None, :], end[None, :], own[None, :], j[:, None])
        s = tl.where(seen, s, float("-inf"))
    p = tl.exp2(s - norm[None, :])
    slope = tl.dot(v, tl.trans(g))
    left = p
    if dropped:
        stays = kept(of_queries(i, head, heads, low)[None, :], b[:, None], below)
        left = tl.where(stays, p, 0.0)
        slope = tl.where(stays, slope, 0.0)
    of_v += tl.dot(left.to(g.dtype), g)
    of_k += tl.dot((p * (slope - mean[None, :])).to(q.dtype), q)
    return of_k, of_v


@varied("tokens", "place", "below")
def _back_keys(
    grad: tensor, read_grad: tensor, qkv: tensor, read: tensor, out: tensor, lse: tensor,
    dot: tensor, total: tensor, parts: tensor, borders: tensor, programs: tensor, seed: tensor,
    place: tensor, tokens: tensor, scale: tensor, inverse: tensor, below: tensor,
    dropped: constexpr, heads: constexpr, dim: constexpr, wide: constexpr, tile: constexpr,
    queries: constexpr, by_descriptor: constexpr,
) -> None:  # fmt: skip
    """Compute the gradients of one tile of keys and values of one head; runs after
    `_backward_queries`, whose `dot` it reads.

        dv = Σ keep · p grad / (1 - share)
        dk = Σ p (keep · grad vᵀ - dot) q / sqrt(D) / (1 - share)

    The sums are over the queries that see a key: of a context's key all tokens of the row, of a
    span's key itself and later tokens of the span. Arguments are as in `_backward_queries`.
    """
    head = tl.program_id(1)
    first, stop = _own_tokens(programs)
    j = first + tl.arange(0, tile)
    there = j < stop
    row: constexpr = heads * dim
    here = qkv + head * dim
    k = _tile(here + row, j, there, 3 * row, dim, wide)
    v = _tile(here + 2 * row, j, there, 3 * row, dim, wide)
    low, high = keys_of(seed, place)
    b = of_keys(j, high)
    of_k = tl.zeros([tile, wide], tl.float32)
    of_v = tl.zeros([tile, wide], tl.float32)
    some = first < stop
    start, end = tl.load(borders + first, some, 0), tl.load(borders + tokens + first, some, 0)
    upto = tl.where(some, stop, 0)
    lowest = tl.where(first < end, start, first)
    inside = tl.minimum(first + tile, stop) <= end  # all keys are the context's
    whole = tl.where(inside & some, lowest + (upto - lowest) // queries * queries, lowest)
    for begin in range(lowest, whole, queries):
        of_k, of_v = _keys_back(
            k, v, grad, read_grad, qkv, read, lse, dot, borders, begin, upto, j,
            b, low, head, tokens, scale, below, of_k, of_v, False, dropped, heads,
            dim, wide, queries, by_descriptor,
        )  # fmt: skip
    for begin in range(whole, upto, queries):
        of_k, of_v = _keys_back(
            k, v, grad, read_grad, qkv, read, lse, dot, borders, begin, upto, j,
            b, low, head, tokens, scale, below, of_k, of_v, True, dropped, heads,
            dim, wide, queries, by_descriptor,
        )  # fmt: skip
    _store(parts, total, of_k * (scale * inverse), 1, j, there, head, row, dim, wide)
    _store(parts, total, of_v * inverse, 2, j, there, head, row, dim, wide)
