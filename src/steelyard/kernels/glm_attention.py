"""All attention of a GLM in Triton, for 16-bit types: contexts on themselves, spans on their context and on their own past.

Tokens are in the order of `Joint`, every context with its spans behind it, and are read as one long row: of each token it is
known where its row begins, where the context in it ends, where its own span begins, and where the row ends. A token sees its
context, and its own span up to itself. A tile of queries reads the keys from the beginning of its first row to the last that it
sees. Gradients are written where the matmul before reads them, and nothing is added up by several programs: results are the
same in every run. Exponents are to base 2.

What is dropped is a hash of a seed, the head, the query and the key, and is hashed again backward.
"""

import torch
from torch import Tensor

from steelyard.errors import RequestError
from steelyard.kernels.glm_norm import Dropout, reduce_parts
from steelyard.kernels.jit import blocks, constexpr, power_of_2, tensor, tl, varied

LOG2_E = 1.4426950408889634
COUNTED = 2**31 - 1  # numbers: addresses are 32-bit offsets
LEAST = 16  # numbers of a head that a matrix unit takes at once
# Queries of a program, keys that it reads at once, warps, stages.
FORWARD = (64, 64, 4, 3)
# Tokens whose gradients a program makes; then what each of the two kernels reads at once, warps, stages.
TILE = 64
BACK_QUERIES = (64, 4, 2)
BACK_KEYS = (64, 4, 3)


def attend(qkv: Tensor, borders: Tensor, dropout: Dropout) -> tuple[Tensor, Tensor]:
    """Attention [T, H, D] and the logarithm of each softmax's sum [H, T]. `borders` is int32 [4, T]."""
    if qkv.numel() > COUNTED:
        raise RequestError(
            f"tune.attention='packed' counts to {COUNTED}, not to {qkv.numel()} numbers; choose a smaller tune.micro_batch"
        )
    tokens, _, heads, dim = qkv.shape
    out, lse = qkv.new_empty(tokens, heads, dim), qkv.new_empty(heads, tokens, dtype=torch.float32)
    tile, keys, warps, stages = FORWARD
    _forward[(blocks(tokens, tile), heads)](
        qkv, out, lse, borders, *_drawn(dropout), tokens, dim**-0.5 * LOG2_E, *_dropped(dropout),
        dropout.share > 0, heads, dim, max(LEAST, power_of_2(dim)), tile, keys, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out, lse


def attend_backward(
    grad: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, borders: Tensor, dropout: Dropout, accumulator: Tensor
) -> Tensor:
    """The gradient of qkv. Its column sum, a bias's gradient, is added to `accumulator`."""
    tokens, _, heads, dim = qkv.shape
    total, dot = torch.empty_like(qkv), torch.empty_like(lse)
    grid = blocks(tokens, TILE), heads
    parts = qkv.new_empty(grid[0], 3, heads * dim, dtype=torch.float32)
    given = (grad, qkv, out, lse, dot, total, parts, borders, *_drawn(dropout), tokens, dim**-0.5, *_dropped(dropout))
    sizes = dropout.share > 0, heads, dim, max(LEAST, power_of_2(dim)), TILE
    for kernel, (other, warps, stages) in ((_back_queries, BACK_QUERIES), (_back_keys, BACK_KEYS)):
        kernel[grid](*given, *sizes, other, num_warps=warps, num_stages=stages)
    reduce_parts(parts, list(accumulator.view(3, -1)))
    return total


def _drawn(dropout: Dropout) -> tuple[Tensor, int]:
    return dropout.seed, dropout.place


def _dropped(dropout: Dropout) -> tuple[float, int]:
    """What the rest is multiplied by, and the share as a number of 31 bit."""
    return 1 / (1 - dropout.share), int(dropout.share * (1 << 31))


@varied()
def _hash(x: tensor) -> tensor:
    """Of 32 bit, by two multiplications: constants from "Hash Prospector" (C. Wellons 2018)."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@varied()
def _keys_of(seed: tensor, place: tensor) -> tuple[tensor, tensor]:
    """Two numbers of 32 bit."""
    key = tl.load(seed) + place
    return (key & 0xFFFFFFFF).to(tl.uint32), (key >> 32).to(tl.uint32)


@varied()
def _of_queries(i: tensor, head: tensor, heads: constexpr, key: tensor) -> tensor:
    return _hash(_hash((i * heads + head).to(tl.uint32)) ^ key)


@varied()
def _of_keys(j: tensor, key: tensor) -> tensor:
    return _hash(j.to(tl.uint32) + key)


@varied()
def _kept(a: tensor, b: tensor, below: tensor) -> tensor:
    """Of a number for each query and one for each key, shaped to be added, which pairs are not dropped. The last step of a hash
    changes low bits alone, and the sign is left out, so that numbers are compared with one of 31 bit."""
    x = a + b
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return (x >> 1).to(tl.int32) >= below


@varied()
def _seen(i: tensor, start: tensor, end: tensor, own: tensor, j: tensor) -> tensor:
    """Whether query `i`, of a row from `start` with a context up to `end` and of a span from `own`, sees key `j`."""
    return ((j >= start) & (j < end)) | ((j >= own) & (j <= i))


@varied()
def _tile(base: tensor, i: tensor, there: tensor, row: constexpr, dim: constexpr, wide: constexpr) -> tensor:
    """Rows `i` of one head, zero where there are none."""
    d = tl.arange(0, wide)[None, :]
    at = base + i[:, None] * row + d
    if dim == wide:
        return tl.load(at, there[:, None], 0.0)
    return tl.load(at, there[:, None] & (d < dim), 0.0)


@varied()
def _attend_keys(
    q: tensor, here: tensor, begin: tensor, upto: tensor, i: tensor, start: tensor, end: tensor, own: tensor, a: tensor,
    high: tensor, most: tensor, weight: tensor, total: tensor, scale: tensor, below: tensor,
    masked: constexpr, dropped: constexpr, row: constexpr, dim: constexpr, wide: constexpr, keys: constexpr,
) -> tuple[tensor, tensor, tensor]:  # fmt: skip
    """Go on with a softmax by some keys, all of which all queries see unless they are `masked`."""
    j = begin + tl.arange(0, keys)
    k = _tile(here + row, j, j < upto, 3 * row, dim, wide)
    v = _tile(here + 2 * row, j, j < upto, 3 * row, dim, wide)
    s = tl.dot(q, tl.trans(k)) * scale
    if masked:
        seen = _seen(i[:, None], start[:, None], end[:, None], own[:, None], j[None, :])
        s = tl.where(seen, s, float("-inf"))
    larger = tl.maximum(most, tl.max(s, 1))
    p = tl.exp2(s - larger[:, None])
    fix = tl.exp2(most - larger)
    weight = weight * fix + tl.sum(p, 1)
    if dropped:
        p = tl.where(_kept(a[:, None], _of_keys(j, high)[None, :], below), p, 0.0)
    return larger, weight, total * fix[:, None] + tl.dot(p.to(v.dtype), v)


@varied("tokens", "place", "below")
def _forward(
    qkv: tensor,
    out: tensor,
    lse: tensor,
    borders: tensor,
    seed: tensor,
    place: tensor,
    tokens: tensor,
    scale: tensor,
    inverse: tensor,
    below: tensor,
    dropped: constexpr,
    heads: constexpr,
    dim: constexpr,
    wide: constexpr,
    tile: constexpr,
    keys: constexpr,
) -> None:
    head = tl.program_id(1)
    first = tl.program_id(0) * tile
    i = first + tl.arange(0, tile)
    there = i < tokens
    row: constexpr = heads * dim
    here = qkv + head * dim
    q = _tile(here, i, there, 3 * row, dim, wide)
    start, end = tl.load(borders + i, there, 0), tl.load(borders + tokens + i, there, 0)
    own = tl.load(borders + 2 * tokens + i, there, tokens)
    low, high = _keys_of(seed, place)
    a = _of_queries(i, head, heads, low)
    most = tl.full([tile], -1e30, tl.float32)  # finite: less itself it must not be NaN
    weight = tl.zeros([tile], tl.float32)
    total = tl.zeros([tile, wide], tl.float32)
    lowest, whole, upto = _keys_of_queries(borders, tokens, first, tile, keys)
    for begin in range(lowest, whole, keys):
        most, weight, total = _attend_keys(
            q, here, begin, upto, i, start, end, own, a, high, most, weight, total, scale, below,
            False, dropped, row, dim, wide, keys,
        )  # fmt: skip
    for begin in range(whole, upto, keys):
        most, weight, total = _attend_keys(
            q, here, begin, upto, i, start, end, own, a, high, most, weight, total, scale, below,
            True, dropped, row, dim, wide, keys,
        )  # fmt: skip
    if dropped:
        total = total * inverse
    d = tl.arange(0, wide)[None, :]
    at = out + head * dim + i[:, None] * row + d
    tl.store(at, total / weight[:, None], there[:, None] & (d < dim))
    tl.store(lse + head * tokens + i, most + tl.log2(weight), there)


@varied()
def _keys_of_queries(
    borders: tensor, tokens: tensor, first: tensor, tile: constexpr, keys: constexpr
) -> tuple[tensor, tensor, tensor]:
    """The first key that a tile of queries sees, up to where all of them see all keys, and the end of those they see. In whole
    steps of `keys`, and only if all queries are of one row."""
    last = tl.minimum(first + tile, tokens) - 1
    lowest, end = tl.load(borders + first), tl.load(borders + tokens + last)
    whole = tl.where(lowest == tl.load(borders + last), lowest + (end - lowest) // keys * keys, lowest)
    return lowest, whole, tl.maximum(end, last + 1)


@varied()
def _store(
    parts: tensor, total: tensor, value: tensor, which: constexpr, i: tensor, there: tensor, head: tensor, row: constexpr,
    dim: constexpr, wide: constexpr,
) -> None:  # fmt: skip
    """Queries', keys' or values' gradient, and the sum of its rows."""
    d = tl.arange(0, wide)
    value = tl.where(there[:, None], value, 0.0)
    at = total + i[:, None] * 3 * row + which * row + head * dim + d[None, :]
    tl.store(at, value, there[:, None] & (d < dim)[None, :])
    tl.store(parts + (tl.program_id(0) * 3 + which) * row + head * dim + d, tl.sum(value, 0), d < dim)


@varied()
def _queries_back(
    q: tensor, g: tensor, here: tensor, begin: tensor, upto: tensor, i: tensor, start: tensor, end: tensor, own: tensor,
    a: tensor, high: tensor, norm: tensor, mean: tensor, scale: tensor, inverse: tensor, below: tensor,
    masked: constexpr, dropped: constexpr, row: constexpr, dim: constexpr, wide: constexpr, keys: constexpr,
) -> tensor:  # fmt: skip
    """The gradient of queries by some keys, but for the scale."""
    j = begin + tl.arange(0, keys)
    k = _tile(here + row, j, j < upto, 3 * row, dim, wide)
    v = _tile(here + 2 * row, j, j < upto, 3 * row, dim, wide)
    s = tl.dot(q, tl.trans(k)) * (scale * 1.4426950408889634)
    if masked:
        seen = _seen(i[:, None], start[:, None], end[:, None], own[:, None], j[None, :])
        s = tl.where(seen, s, float("-inf"))
    p = tl.exp2(s - norm[:, None])
    slope = tl.dot(g, tl.trans(v))
    if dropped:
        slope = tl.where(_kept(a[:, None], _of_keys(j, high)[None, :], below), slope * inverse, 0.0)
    return tl.dot((p * (slope - mean[:, None])).to(k.dtype), k)


@varied("tokens", "place", "below")
def _back_queries(
    grad: tensor,
    qkv: tensor,
    out: tensor,
    lse: tensor,
    dot: tensor,
    total: tensor,
    parts: tensor,
    borders: tensor,
    seed: tensor,
    place: tensor,
    tokens: tensor,
    scale: tensor,
    inverse: tensor,
    below: tensor,
    dropped: constexpr,
    heads: constexpr,
    dim: constexpr,
    wide: constexpr,
    tile: constexpr,
    keys: constexpr,
) -> None:
    """Of queries; writes the dot product of each output with its gradient, too."""
    head = tl.program_id(1)
    first = tl.program_id(0) * tile
    i = first + tl.arange(0, tile)
    there = i < tokens
    row: constexpr = heads * dim
    here = qkv + head * dim
    q = _tile(here, i, there, 3 * row, dim, wide)
    g = _tile(grad + head * dim, i, there, row, dim, wide)
    mean = tl.sum(g.to(tl.float32) * _tile(out + head * dim, i, there, row, dim, wide).to(tl.float32), 1)
    tl.store(dot + head * tokens + i, mean, there)
    norm = tl.load(lse + head * tokens + i, there, 0.0)
    start, end = tl.load(borders + i, there, 0), tl.load(borders + tokens + i, there, 0)
    own = tl.load(borders + 2 * tokens + i, there, tokens)
    low, high = _keys_of(seed, place)
    a = _of_queries(i, head, heads, low)
    back = tl.zeros([tile, wide], tl.float32)
    lowest, whole, upto = _keys_of_queries(borders, tokens, first, tile, keys)
    for begin in range(lowest, whole, keys):
        back += _queries_back(
            q, g, here, begin, upto, i, start, end, own, a, high, norm, mean, scale, inverse, below,
            False, dropped, row, dim, wide, keys,
        )  # fmt: skip
    for begin in range(whole, upto, keys):
        back += _queries_back(
            q, g, here, begin, upto, i, start, end, own, a, high, norm, mean, scale, inverse, below,
            True, dropped, row, dim, wide, keys,
        )  # fmt: skip
    _store(parts, total, back * scale, 0, i, there, head, row, dim, wide)


@varied()
def _keys_back(
    k: tensor, v: tensor, grad: tensor, here: tensor, lse: tensor, dot: tensor, borders: tensor, begin: tensor, upto: tensor,
    j: tensor, b: tensor, low: tensor, head: tensor, tokens: tensor, scale: tensor, inverse: tensor, below: tensor,
    of_k: tensor, of_v: tensor, masked: constexpr, dropped: constexpr, heads: constexpr, dim: constexpr, wide: constexpr,
    queries: constexpr,
) -> tuple[tensor, tensor]:  # fmt: skip
    """Add the gradients of keys, but for the scale, and of values by some queries."""
    i = begin + tl.arange(0, queries)
    real = i < upto
    row: constexpr = heads * dim
    q = _tile(here, i, real, 3 * row, dim, wide)
    g = _tile(grad + head * dim, i, real, row, dim, wide)
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
        kept = _kept(_of_queries(i, head, heads, low)[None, :], b[:, None], below)
        left = tl.where(kept, p * inverse, 0.0)
        slope = tl.where(kept, slope * inverse, 0.0)
    of_v += tl.dot(left.to(g.dtype), g)
    of_k += tl.dot((p * (slope - mean[None, :])).to(q.dtype), q)
    return of_k, of_v


@varied("tokens", "place", "below")
def _back_keys(
    grad: tensor,
    qkv: tensor,
    out: tensor,
    lse: tensor,
    dot: tensor,
    total: tensor,
    parts: tensor,
    borders: tensor,
    seed: tensor,
    place: tensor,
    tokens: tensor,
    scale: tensor,
    inverse: tensor,
    below: tensor,
    dropped: constexpr,
    heads: constexpr,
    dim: constexpr,
    wide: constexpr,
    tile: constexpr,
    queries: constexpr,
) -> None:
    """Of keys and values, after `_back_queries`. A context's key is seen by all of its row, a span's by itself and those behind
    it."""
    head = tl.program_id(1)
    first = tl.program_id(0) * tile
    last = tl.minimum(first + tile, tokens) - 1
    j = first + tl.arange(0, tile)
    there = j < tokens
    row: constexpr = heads * dim
    here = qkv + head * dim
    k = _tile(here + row, j, there, 3 * row, dim, wide)
    v = _tile(here + 2 * row, j, there, 3 * row, dim, wide)
    low, high = _keys_of(seed, place)
    b = _of_keys(j, high)
    of_k = tl.zeros([tile, wide], tl.float32)
    of_v = tl.zeros([tile, wide], tl.float32)
    start, end, upto = tl.load(borders + first), tl.load(borders + tokens + first), tl.load(borders + 3 * tokens + last)
    lowest = tl.where(first < end, start, first)
    whole = tl.where(last < end, lowest + (upto - lowest) // queries * queries, lowest)  # all are of one context
    for begin in range(lowest, whole, queries):
        of_k, of_v = _keys_back(
            k, v, grad, here, lse, dot, borders, begin, upto, j, b, low, head, tokens, scale, inverse, below, of_k, of_v,
            False, dropped, heads, dim, wide, queries,
        )  # fmt: skip
    for begin in range(whole, upto, queries):
        of_k, of_v = _keys_back(
            k, v, grad, here, lse, dot, borders, begin, upto, j, b, low, head, tokens, scale, inverse, below, of_k, of_v,
            True, dropped, heads, dim, wide, queries,
        )  # fmt: skip
    _store(parts, total, of_k * scale, 1, j, there, head, row, dim, wide)
    _store(parts, total, of_v, 2, j, there, head, row, dim, wide)
