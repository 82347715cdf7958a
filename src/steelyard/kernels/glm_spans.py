"""Triton kernels around flash attention for a GLM: spans on themselves, and copies between the
layouts.

This is the other part of kernel `flash` of models/cloze_attention.py, where Triton runs. Tokens are
in the order of `InterleavedLayout`, every context followed by its spans, so that one call of flash
attention computes all queries on their contexts. `attend_spans` then continues each span's softmax
with the span's own keys, starting from the output and log-sum-exp of that call. Called by
models/glm_fused.py; the layouts are made by models/cloze_attention.py.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from steelyard.kernels.glm_norm import PARTS, Dropout, reduce_parts
from steelyard.kernels.jit import constexpr, power_of_2, tensor, tl, varied

BLOCK = 16  # tokens of a tile: the smallest side in tl.dot


@dataclass(frozen=True)
class RowBorders:
    """Offsets of packed rows (cumulative lengths), and the length of the longest row."""

    cu: Tensor  # int32 [rows + 1], on the device: 0 and the rows' ends
    longest: int


@dataclass(frozen=True)
class Joint:
    """The tokens of a cloze micro-batch in another order, every context followed by its spans: a
    context and its spans are then one row of queries on the context's keys.

    Made by `ClozeLayout.interleaved`. T is the number of tokens.
    """

    order: Tensor  # int64 [T]: the index in `ClozeLayout` of the token at each position
    rows: RowBorders  # one row for each context with its spans
    contexts: Tensor  # int32: positions of the contexts' tokens; -1 pads it
    place: Tensor  # int32 [T]: number among the contexts' tokens; -1 for a span's token
    spans: Tensor  # int64: positions of the spans' tokens; 0 pads it
    starts: Tensor  # int32 [spans]: first position of each span
    lengths: Tensor  # int32 [spans]; 0 pads it
    longest: int  # length of the longest span
    # int32 [3, T]: begin of the token's row, end of its context, begin of its span (T: in no span)
    borders: Tensor
    # int32 [2, P]: first token of each Triton program, and end of its row; equal if it has none
    programs: Tensor


def context_keys_values(qkv: Tensor, rows: Joint) -> Tensor:
    """Return keys and values of the contexts' tokens, end to end: [n, 2, H, D] from `qkv` [T, 3, H,
    D]. Rows that pad the layout stay uninitialized.
    """
    heads, dim = qkv.shape[2:]
    out = qkv.new_empty(len(rows.contexts), 2, heads, dim)
    _context_keys_values[(len(out),)](
        qkv, out, rows.contexts, 2 * heads * dim, power_of_2(2 * heads * dim), num_warps=4
    )
    return out


def attend_spans(qkv: Tensor, out: Tensor, lse: Tensor, rows: Joint, dropout: Dropout) -> None:
    """Continue the spans' softmax with the spans' own keys, in place.

    `out` [T, H, D] and `lse` [H, T] (natural logarithm) come in as attention of all queries on
    contexts, and leave as attention on context and own span; context tokens do not change.
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
    """Write the gradients of the spans' keys and values to `qkv_grad` [T, 3, H, D], and add that of
    the spans' queries on their own spans to `dq` [T, H, D], both in place.
    """
    tokens, _, heads, dim = qkv.shape
    written = (grad, qkv, out, lse, dq, total, rows.starts, rows.lengths)
    given = (*written, *_drawn(dropout), tokens, rows.longest, dropout.share, dim**-0.5)
    sizes = heads, dim, max(BLOCK, power_of_2(dim)), BLOCK
    _attend_spans_backward[_grid(rows, heads)](*given, dropout.share > 0, *sizes, num_warps=1)


def merge_gradients(
    grads: tuple[Tensor, Tensor, Tensor], total: Tensor, rows: Joint, accumulator: Tensor
) -> None:
    """Put the gradients of all queries [T, H, D] and of the contexts' keys and values [n, H, D]
    into `qkv_grad` [T, 3, H, D], where those of the spans' keys and values already are.

    The sum over tokens, the gradient of QKV's bias [3 · H · D], is added to `accumulator` in place.
    """
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
    """Return the dropout's seed tensor and site number, as the kernels take them."""
    return dropout.seed, dropout.place


def _grid(rows: Joint, heads: int) -> tuple[int, int, int]:
    """Return the grid of the span kernels: spans, heads, and tiles of the longest span."""
    return len(rows.starts), heads, -(-rows.longest // BLOCK)


@varied()
def _context_keys_values(
    qkv: tensor, out: tensor, contexts: tensor, width: constexpr, padded: constexpr
) -> None:
    """Copy one context token's keys and values; program i has context token i.

    `qkv` is contiguous [T, 3, heads, dim], `out` [n, 2, heads, dim] and `contexts` int32 [n], the
    token's position or -1 (nothing is written); `width` is 2 · heads · dim. Equals `qkv[contexts,
    1:]`.
    """
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
    """Merge gradients into `qkv_grad` and sum them over tokens; equals assigning dq to qkv_grad[:,
    0], dk and dv to qkv_grad[contexts, 1:], and a sum over tokens.

    `dq` is [tokens, width], `dk` and `dv` [n, width], `qkv_grad` [tokens, 3, width],
    `context_index` int32 [tokens]: the token's row in dk and dv, or -1 for a span's token. Program
    i of P has tokens i, i + P, ... and writes its sums to row i of `parts`, fp32 [P, 3, width].
    """
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
    """Load tokens `i`, counted from `begin`, of one head, [len(i), padded_dim], from a matrix whose
    rows are `width` elements apart; zeros from token `length` and column `dim` on.
    """
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
    """Return `p` [queries, keys] after dropout, or unchanged without `has_dropout`: each element is
    zero or divided by 1 - dropout, by Philox random numbers (`tl.rand`) of seed, query and key.

    `query` numbers tokens and heads, `key` the tokens of a span; the same numbers drop the same
    elements in the backward pass.
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
    """Continue the softmax of one tile of a span's queries with the span's own keys up to each
    query, for one head; reads and writes `out` and `lse` in place.

        m, w, o = lse, 1, out;  for each tile of keys the online-softmax step
        out = o / w;  lse = m + ln w

    Program (s, h, t) has tokens t · tile to (t + 1) · tile of span s, head h. `qkv` is contiguous
    [tokens, 3, heads, dim], `out` [tokens, heads, dim], `lse` fp32 [heads, tokens], `starts` and
    `lengths` int32 [spans]; `factor` is 1 / sqrt(dim), `longest` the length of the longest span,
    `place` the dropout site. With the flash call before it, it equals kernel `padded` of
    models/cloze_attention.py.
    """
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
    """Return, for queries `i` and keys `j` of a span, the probabilities after dropout and the
    gradients of the logits, p (dropout(g vᵀ) - dot) / sqrt(D).
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
    """Compute gradients of a span on itself for one tile and head: first of its tokens as queries
    of earlier ones, then as keys and values of later ones.

        dot = rowsum(grad · out);  ds = p (dropout(grad vᵀ) - dot) / sqrt(D)
        dq += ds k;  dk = dsᵀ q;  dv = dropout(p)ᵀ grad

    `grad`, `out` and `dq` are [tokens, heads, dim], where `dq` already holds the gradient by the
    context's keys; `qkv_grad` is [tokens, 3, heads, dim], of which keys and values are written. The
    rest is as in `_attend_spans`. Equals autograd's gradient of this part of the attention.
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
