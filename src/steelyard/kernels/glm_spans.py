"""Attention of a GLM in Triton where flash attention has no call: spans on themselves, and what
lies around its calls.

Tokens are in the order of `Joint`, every context with its spans behind it. Flash attention is then
one call, of a context and its spans on the context. Spans on themselves go on with the softmax that
it began: its output and log-sum-exp are where the sum over a span's own keys starts from.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from steelyard.kernels.glm_norm import PARTS, Dropout, reduce_parts
from steelyard.kernels.jit import constexpr, power_of_2, tensor, tl, varied

BLOCK = 16  # tokens of a span at once: the least that a matrix unit takes


@dataclass(frozen=True)
class RowBorders:
    """Borders of rows laid end to end, and the longest of them."""

    cu: Tensor  # int32 [rows + 1], on the device
    longest: int


@dataclass(frozen=True)
class Joint:
    """The same tokens in another order, every context with its spans behind it: a context and its
    spans are then one row of queries on the context's keys."""

    order: Tensor  # int64 [T]: which token stands there
    rows: RowBorders  # contexts, each with its spans
    contexts: Tensor  # int32: where the contexts' tokens stand; -1 where there are no more
    place: Tensor  # int32 [T]: which of the contexts' tokens it is; -1 if it is a span's
    spans: Tensor  # int64: where the spans' tokens stand; the first token where there are no more
    starts: Tensor  # int32: where each span begins
    lengths: Tensor  # int32: of the spans; 0 where there are no more
    longest: int  # of the spans
    # int32 [3, T]: where a token's row begins, its context ends, its span begins (T: in no span)
    borders: Tensor
    # int32 [2, P]: the first of some tokens of a row, and where the row ends; the same where there
    # are none
    programs: Tensor


def context_keys_values(qkv: Tensor, rows: Joint) -> Tensor:
    """Keys and values of the contexts' tokens, end to end: [n, 2, H, D]. What no token stands for
    is left as it is.
    """
    heads, dim = qkv.shape[2:]
    out = qkv.new_empty(len(rows.contexts), 2, heads, dim)
    _context_keys_values[(len(out),)](
        qkv, out, rows.contexts, 2 * heads * dim, power_of_2(2 * heads * dim), num_warps=4
    )
    return out


def attend_spans(qkv: Tensor, out: Tensor, lse: Tensor, rows: Joint, dropout: Dropout) -> None:
    """Go on with spans on themselves: `out` [T, H, D] and `lse` [H, T] are of spans on contexts,
    and then of both.
    """
    tokens, _, heads, dim = qkv.shape
    given = (
        qkv,
        out,
        lse,
        rows.starts,
        rows.lengths,
        *_drawn(dropout),
        tokens,
        rows.longest,
        dropout.share,
        dim**-0.5,
    )
    sizes = heads, dim, max(BLOCK, power_of_2(dim)), BLOCK
    _attend_spans[_grid(rows, heads)](*given, dropout.share > 0, *sizes, num_warps=1)


def attend_spans_backward(
    grad: Tensor,
    qkv: Tensor,
    out: Tensor,
    lse: Tensor,
    dq: Tensor,
    total: Tensor,
    rows: Joint,
    dropout: Dropout,
) -> None:
    """Write the gradients of the spans' keys and values to `total` [T, 3, H, D], and add that of
    their queries to `dq`.
    """
    tokens, _, heads, dim = qkv.shape
    written = (grad, qkv, out, lse, dq, total, rows.starts, rows.lengths)
    given = (*written, *_drawn(dropout), tokens, rows.longest, dropout.share, dim**-0.5)
    sizes = heads, dim, max(BLOCK, power_of_2(dim)), BLOCK
    _attend_spans_backward[_grid(rows, heads)](*given, dropout.share > 0, *sizes, num_warps=1)


def merge_gradients(
    grads: tuple[Tensor, Tensor, Tensor], total: Tensor, rows: Joint, accumulator: Tensor
) -> None:
    """Put the gradients of all queries [T, H, D], and of the contexts' keys and values [n, H, D],
    in `total`, where the spans' keys and values are already. The column sum, a bias's gradient, is
    added to `accumulator`."""
    width = total[0, 0].numel()
    parts = total.new_empty(min(len(total), PARTS), 3, width, dtype=torch.float32)
    _merge_gradients[(len(parts),)](
        *(one.contiguous() for one in grads),
        total,
        rows.place,
        parts,
        len(total),
        width,
        power_of_2(width),
        num_warps=4,
    )
    reduce_parts(parts, [accumulator[i * width : (i + 1) * width] for i in range(3)])


def _drawn(dropout: Dropout) -> tuple[Tensor, int]:
    return dropout.seed, dropout.place


def _grid(rows: Joint, heads: int) -> tuple[int, int, int]:
    return len(rows.starts), heads, -(-rows.longest // BLOCK)


@varied()
def _context_keys_values(
    qkv: tensor, out: tensor, contexts: tensor, width: constexpr, padded: constexpr
) -> None:
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(contexts + token).to(tl.int64)
    i = tl.arange(0, padded)
    there = (i < width) & (row >= 0)
    value = tl.load(qkv + row * (width + width // 2) + width // 2 + i, there)
    tl.store(out + token * width + i, value, there)


@varied("tokens")
def _merge_gradients(
    dq: tensor,
    dk: tensor,
    dv: tensor,
    total: tensor,
    places: tensor,
    parts: tensor,
    tokens: tensor,
    width: constexpr,
    padded: constexpr,
) -> None:
    i = tl.arange(0, padded)
    there = i < width
    of_q = tl.zeros([padded], tl.float32)
    of_k = tl.zeros([padded], tl.float32)
    of_v = tl.zeros([padded], tl.float32)
    place = tl.load(places + tl.program_id(0))
    for token in range(tl.program_id(0), tokens, tl.num_programs(0)):
        ahead = token + tl.num_programs(0)
        following = tl.load(places + ahead, ahead < tokens, 0)
        target = total + tl.cast(token, tl.int64) * 3 * width + i
        source = tl.maximum(place, 0).to(tl.int64) * width + i
        near, far = there & (place >= 0), there & (place < 0)
        q = tl.load(dq + tl.cast(token, tl.int64) * width + i, there, 0.0)
        k = tl.load(dk + source, near, 0.0) + tl.load(target + width, far, 0.0)
        v = tl.load(dv + source, near, 0.0) + tl.load(target + 2 * width, far, 0.0)
        tl.store(target, q, there)
        tl.store(target + width, k, near)
        tl.store(target + 2 * width, v, near)
        of_q += q.to(tl.float32)
        of_k += k.to(tl.float32)
        of_v += v.to(tl.float32)
        place = following
    at = parts + tl.program_id(0) * 3 * width + i
    tl.store(at, of_q, there)
    tl.store(at + width, of_k, there)
    tl.store(at + 2 * width, of_v, there)


@varied()
def _tile(
    base: tensor,
    begin: tensor,
    length: tensor,
    i: tensor,
    row: constexpr,
    dim: constexpr,
    wide: constexpr,
) -> tensor:
    """RowBorders `i` of a span that begins at `begin`, of one head: zero beyond its end."""
    d = tl.arange(0, wide)[None, :]
    at = base + (begin + i).to(tl.int64)[:, None] * row + d
    return tl.load(at, (i < length)[:, None] & (d < dim), 0.0)


@varied()
def _left(
    p: tensor,
    seed: tensor,
    query: tensor,
    key: tensor,
    longest: tensor,
    dropout: tensor,
    dropped: constexpr,
) -> tensor:
    """What dropout leaves of numbers [queries, keys]. `query` counts tokens and heads, `key` the
    tokens of a span.
    """
    if dropped:
        drawn = tl.rand(seed, query[:, None] * longest + key[None, :])
        p = tl.where(drawn >= dropout, p / (1 - dropout), 0.0)
    return p


@varied("place", "tokens", "longest")
def _attend_spans(
    qkv: tensor,
    out: tensor,
    lse: tensor,
    starts: tensor,
    lengths: tensor,
    seed: tensor,
    place: tensor,
    tokens: tensor,
    longest: tensor,
    dropout: tensor,
    factor: tensor,
    dropped: constexpr,
    heads: constexpr,
    dim: constexpr,
    wide: constexpr,
    block: constexpr,
) -> None:
    head, tile = tl.program_id(1), tl.program_id(2)
    begin, length = tl.load(starts + tl.program_id(0)), tl.load(lengths + tl.program_id(0))
    key = tl.load(seed) + place
    i = tile * block + tl.arange(0, block)
    row: constexpr = heads * dim
    here = qkv + head * dim
    q = _tile(here, begin, length, i, 3 * row, dim, wide)
    total = _tile(out + head * dim, begin, length, i, row, dim, wide).to(tl.float32)
    norms = lse + head.to(tl.int64) * tokens + begin + i
    most = tl.load(norms, i < length, 0.0)
    weight = tl.full([block], 1.0, tl.float32)
    if tile * block < length:
        for other in range(tile + 1):
            j = other * block + tl.arange(0, block)
            k = _tile(here + row, begin, length, j, 3 * row, dim, wide)
            v = _tile(here + 2 * row, begin, length, j, 3 * row, dim, wide)
            s = tl.where(j[None, :] <= i[:, None], tl.dot(q, tl.trans(k)) * factor, float("-inf"))
            larger = tl.maximum(most, tl.max(s, 1))
            p = tl.exp(s - larger[:, None])
            fix = tl.exp(most - larger)
            weight = weight * fix + tl.sum(p, 1)
            p = _left(p, key, (begin + i) * heads + head, j, longest, dropout, dropped)
            total = total * fix[:, None] + tl.dot(p.to(v.dtype), v)
            most = larger
    d = tl.arange(0, wide)[None, :]
    at = out + head * dim + (begin + i).to(tl.int64)[:, None] * row + d
    tl.store(at, total / weight[:, None], (i < length)[:, None] & (d < dim))
    tl.store(norms, most + tl.log(weight), i < length)


@varied()
def _slopes(
    q: tensor,
    k: tensor,
    v: tensor,
    g: tensor,
    norm: tensor,
    mean: tensor,
    i: tensor,
    j: tensor,
    begin: tensor,
    head: tensor,
    seed: tensor,
    longest: tensor,
    dropout: tensor,
    factor: tensor,
    dropped: constexpr,
    heads: constexpr,
) -> tuple[tensor, tensor]:
    """The probabilities of queries `i` on keys `j`, less what is dropped, and the gradients of
    their logits.
    """
    s = tl.dot(q, tl.trans(k)) * factor
    p = tl.where(j[None, :] <= i[:, None], tl.exp(tl.minimum(s - norm[:, None], 0.0)), 0.0)
    query = (begin + i) * heads + head
    back = _left(tl.dot(g, tl.trans(v)), seed, query, j, longest, dropout, dropped)
    return _left(p, seed, query, j, longest, dropout, dropped), p * (back - mean[:, None]) * factor


@varied("place", "tokens", "longest")
def _attend_spans_backward(
    grad: tensor,
    qkv: tensor,
    out: tensor,
    lse: tensor,
    dq: tensor,
    total: tensor,
    starts: tensor,
    lengths: tensor,
    seed: tensor,
    place: tensor,
    tokens: tensor,
    longest: tensor,
    dropout: tensor,
    factor: tensor,
    dropped: constexpr,
    heads: constexpr,
    dim: constexpr,
    wide: constexpr,
    block: constexpr,
) -> None:
    """A program has some tokens of a span twice: as queries of the tokens up to them, then as keys
    of those from them on.
    """
    head, tile = tl.program_id(1), tl.program_id(2)
    begin, length = tl.load(starts + tl.program_id(0)), tl.load(lengths + tl.program_id(0))
    key = tl.load(seed) + place
    i = tile * block + tl.arange(0, block)
    row: constexpr = heads * dim
    here, grads, outs = qkv + head * dim, grad + head * dim, out + head * dim
    norms = lse + head.to(tl.int64) * tokens + begin
    d = tl.arange(0, wide)[None, :]
    there = (i < length)[:, None] & (d < dim)
    rows = (begin + i).to(tl.int64)[:, None]
    if tile * block < length:
        q = _tile(here, begin, length, i, 3 * row, dim, wide)
        g = _tile(grads, begin, length, i, row, dim, wide)
        mean = tl.sum(
            g.to(tl.float32) * _tile(outs, begin, length, i, row, dim, wide).to(tl.float32), 1
        )
        norm = tl.load(norms + i, i < length, 0.0)
        at = dq + head * dim + rows * row + d
        of_q = tl.load(at, there, 0.0).to(tl.float32)
        for other in range(tile + 1):
            j = other * block + tl.arange(0, block)
            k = _tile(here + row, begin, length, j, 3 * row, dim, wide)
            v = _tile(here + 2 * row, begin, length, j, 3 * row, dim, wide)
            p, s = _slopes(
                q,
                k,
                v,
                g,
                norm,
                mean,
                i,
                j,
                begin,
                head,
                key,
                longest,
                dropout,
                factor,
                dropped,
                heads,
            )
            of_q += tl.dot(s.to(k.dtype), k)
        tl.store(at, of_q, there)
        k = _tile(here + row, begin, length, i, 3 * row, dim, wide)
        v = _tile(here + 2 * row, begin, length, i, 3 * row, dim, wide)
        of_k = tl.zeros([block, wide], tl.float32)
        of_v = tl.zeros([block, wide], tl.float32)
        for other in range(tile, tl.cdiv(length, block)):
            j = other * block + tl.arange(0, block)
            q = _tile(here, begin, length, j, 3 * row, dim, wide)
            g = _tile(grads, begin, length, j, row, dim, wide)
            mean = tl.sum(
                g.to(tl.float32) * _tile(outs, begin, length, j, row, dim, wide).to(tl.float32), 1
            )
            norm = tl.load(norms + j, j < length, 0.0)
            p, s = _slopes(
                q,
                k,
                v,
                g,
                norm,
                mean,
                j,
                i,
                begin,
                head,
                key,
                longest,
                dropout,
                factor,
                dropped,
                heads,
            )
            of_k += tl.dot(tl.trans(s).to(q.dtype), q)
            of_v += tl.dot(tl.trans(p).to(g.dtype), g)
        at = total + head * dim + rows * 3 * row + d
        tl.store(at + row, of_k, there)
        tl.store(at + 2 * row, of_v, there)
