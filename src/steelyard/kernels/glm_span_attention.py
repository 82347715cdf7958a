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

from steelyard.kernels.glm_norm_gelu import PROGRAMS, Dropout, reduce_parts
from steelyard.kernels.jit import constexpr, jit_without_specializing, next_power_of_2, tensor, tl

TILE = 16  # tokens of a tile: the smallest side in tl.dot


@dataclass(frozen=True)
class RowOffsets:
    """Where packed rows begin and end: `cu_lengths`, int32 [rows + 1] on the device, is 0 and the
    end of each row; `max_length` is the length of the longest row, or an upper bound of it.
    """

    cu_lengths: Tensor  # int32 [rows + 1], on the device: 0 and the rows' ends
    max_length: int


@dataclass(frozen=True)
class InterleavedLayout:
    """The tokens of a cloze micro-batch in another order, every context followed by its spans: a
    context and its spans are then one row of queries on the context's keys. Made by
    `ClozeLayout.interleaved`; T is the number of tokens, and positions are in this order.

    `order` [T] gives the index in `ClozeLayout` of the token at each position, `row_offsets` the
    rows; `context_positions` (-1 pads) and `span_positions` (0 pads) are the positions of contexts'
    and spans' tokens, `context_index` [T] the number among context tokens (-1: a span's),
    `span_starts` and `span_lengths` are for each span, `max_span` is the longest. `token_ranges`,
    int32 [3, T], has for each token the begin of its row, the end of its context and the begin of
    its span (T for a context's token); `programs`, int32 [2, P], the first token of each Triton
    program and the end of its row.
    """

    order: Tensor  # int64 [T]: the index in `ClozeLayout` of the token at each position
    row_offsets: RowOffsets  # one row for each context with its spans
    context_positions: Tensor  # int32: positions of the contexts' tokens; -1 pads it
    context_index: Tensor  # int32 [T]: number among the contexts' tokens; -1 for a span's token
    span_positions: Tensor  # int64: positions of the spans' tokens; 0 pads it
    span_starts: Tensor  # int32 [spans]: first position of each span
    span_lengths: Tensor  # int32 [spans]; 0 pads it
    max_span: int  # length of the longest span
    # int32 [3, T]: begin of the token's row, end of its context, begin of its span (T: in no span)
    token_ranges: Tensor
    # int32 [2, P]: first token of each Triton program, and end of its row; equal if it has none
    programs: Tensor


def gather_context_keys_values(qkv: Tensor, layout: InterleavedLayout) -> Tensor:
    """Return keys and values of the contexts' tokens, end to end: [n, 2, H, D] from `qkv` [T, 3, H,
    D]. Rows that pad the layout stay uninitialized.
    """
    heads, dim = qkv.shape[2:]
    out = qkv.new_empty(len(layout.context_positions), 2, heads, dim)
    _context_keys_values[(len(out),)](
        qkv,
        out,
        layout.context_positions,
        2 * heads * dim,
        next_power_of_2(2 * heads * dim),
        num_warps=4,
    )
    return out


def attend_spans(
    qkv: Tensor, out: Tensor, lse: Tensor, layout: InterleavedLayout, dropout: Dropout
) -> None:
    """Continue the spans' softmax with the spans' own keys, in place, by a Triton kernel.

    `qkv` is [T, 3, H, D]. `out` [T, H, D] and `lse` fp32 [H, T] (natural logarithm) come in as
    attention of all queries on contexts, and leave as attention on the context and on the own span
    up to the query; rows of context tokens do not change. All are contiguous. Probabilities of own
    keys are dropped by Philox numbers of `dropout.seed` + `dropout.site`.
    """
    tokens, _, heads, dim = qkv.shape
    inputs = (
        qkv,
        out,
        lse,
        layout.span_starts,
        layout.span_lengths,
        *_get_seed_and_site(dropout),
        tokens,
        layout.max_span,
        dropout.share,
        dim**-0.5,
    )
    sizes = heads, dim, max(TILE, next_power_of_2(dim)), TILE
    _attend_spans[_make_span_grid(layout, heads)](*inputs, dropout.share > 0, *sizes, num_warps=1)


def attend_spans_backward(
    grad: Tensor,
    qkv: Tensor,
    out: Tensor,
    lse: Tensor,
    dq: Tensor,
    qkv_grad: Tensor,
    layout: InterleavedLayout,
    dropout: Dropout,
) -> None:
    """Write the gradients of the spans' keys and values to `qkv_grad` [T, 3, H, D], and add that of
    the spans' queries on their own spans to `dq` [T, H, D], both in place, by a Triton kernel.

    `grad` is the gradient of the output [T, H, D]; `out` and `lse` are those that `attend_spans`
    left, and `dropout` is the same. The queries' part of `qkv_grad` and the rows of context tokens
    are not written.
    """
    tokens, _, heads, dim = qkv.shape
    tensors = (grad, qkv, out, lse, dq, qkv_grad, layout.span_starts, layout.span_lengths)
    inputs = (
        *tensors,
        *_get_seed_and_site(dropout),
        tokens,
        layout.max_span,
        dropout.share,
        dim**-0.5,
    )
    sizes = heads, dim, max(TILE, next_power_of_2(dim)), TILE
    _attend_spans_backward[_make_span_grid(layout, heads)](
        *inputs, dropout.share > 0, *sizes, num_warps=1
    )


def merge_qkv_gradients(
    grads: tuple[Tensor, Tensor, Tensor],
    qkv_grad: Tensor,
    layout: InterleavedLayout,
    accumulator: Tensor,
) -> None:
    """Put `grads` = (dq [T, H, D] of all queries, dk and dv [n, H, D] of the contexts' tokens) into
    `qkv_grad` [T, 3, H, D] in place, where those of the spans' keys and values already are.

    The sum of `qkv_grad` over tokens, the gradient of QKV's bias [3 · H · D], is added to
    `accumulator` in place.
    """
    width = qkv_grad[0, 0].numel()
    parts = qkv_grad.new_empty(min(len(qkv_grad), PROGRAMS), 3, width, dtype=torch.float32)
    _merge_gradients[(len(parts),)](
        *(grad.contiguous() for grad in grads),
        qkv_grad,
        layout.context_index,
        parts,
        len(qkv_grad),
        width,
        next_power_of_2(width),
        num_warps=4,
    )
    reduce_parts(parts, [accumulator[i * width : (i + 1) * width] for i in range(3)])


def _get_seed_and_site(dropout: Dropout) -> tuple[Tensor, int]:
    """Return the dropout's seed tensor and site number, as the kernels take them."""
    return dropout.seed, dropout.site


def _make_span_grid(layout: InterleavedLayout, heads: int) -> tuple[int, int, int]:
    """Return the launch grid of the span kernels: number of spans, heads, and tiles of `TILE`
    tokens that cover the longest span.
    """
    return len(layout.span_starts), heads, -(-layout.max_span // TILE)


@jit_without_specializing()
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
    mask = (i < width) & (row >= 0)
    value = tl.load(qkv + row * (width + width // 2) + width // 2 + i, mask)
    tl.store(out + token * width + i, value, mask)


@jit_without_specializing("tokens")
def _merge_gradients(
    dq: tensor,
    dk: tensor,
    dv: tensor,
    qkv_grad: tensor,
    context_index: tensor,
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
    mask = i < width
    q_sum = tl.zeros([padded], tl.float32)
    k_sum = tl.zeros([padded], tl.float32)
    v_sum = tl.zeros([padded], tl.float32)
    index = tl.load(context_index + tl.program_id(0))
    for token in range(tl.program_id(0), tokens, tl.num_programs(0)):
        next_token = token + tl.num_programs(0)
        next_index = tl.load(context_index + next_token, next_token < tokens, 0)
        target = qkv_grad + tl.cast(token, tl.int64) * 3 * width + i
        source = tl.maximum(index, 0).to(tl.int64) * width + i
        is_context, is_span = mask & (index >= 0), mask & (index < 0)
        q = tl.load(dq + tl.cast(token, tl.int64) * width + i, mask, 0.0)
        k = tl.load(dk + source, is_context, 0.0) + tl.load(target + width, is_span, 0.0)
        v = tl.load(dv + source, is_context, 0.0) + tl.load(target + 2 * width, is_span, 0.0)
        tl.store(target, q, mask)
        tl.store(target + width, k, is_context)
        tl.store(target + 2 * width, v, is_context)
        q_sum += q.to(tl.float32)
        k_sum += k.to(tl.float32)
        v_sum += v.to(tl.float32)
        index = next_index
    pointers = parts + tl.program_id(0) * 3 * width + i
    tl.store(pointers, q_sum, mask)
    tl.store(pointers + width, k_sum, mask)
    tl.store(pointers + 2 * width, v_sum, mask)


@jit_without_specializing()
def _load_span_rows(
    base: tensor,
    begin: tensor,
    length: tensor,
    i: tensor,
    width: constexpr,
    dim: constexpr,
    padded_dim: constexpr,
) -> tensor:
    """Load tokens `i`, counted from the span's first token `begin`, of one head, [len(i),
    padded_dim].

    `base` points to the head's first column in a matrix whose rows (tokens) are `width` elements
    apart. Elements are zero from token `length` (of the span) and from column `dim` on.
    """
    d = tl.arange(0, padded_dim)[None, :]
    pointers = base + (begin + i).to(tl.int64)[:, None] * width + d
    return tl.load(pointers, (i < length)[:, None] & (d < dim), 0.0)


@jit_without_specializing()
def _apply_dropout(
    p: tensor,
    seed: tensor,
    query: tensor,
    key: tensor,
    longest: tensor,
    dropout: tensor,
    has_dropout: constexpr,
) -> tensor:
    """Return `p` [queries, keys] after dropout, or unchanged without `has_dropout`: each element is
    zero with probability `dropout`, otherwise divided by 1 - dropout, by Philox random numbers
    (`tl.rand`).

    The random number is that of `seed` (with the site added) and of query · longest + key: `query`
    is token · heads + head, `key` the number of the token in its span, `longest` the length of the
    longest span. The backward pass drops the same elements by the same numbers.
    """
    if has_dropout:
        random = tl.rand(seed, query[:, None] * longest + key[None, :])
        p = tl.where(random >= dropout, p / (1 - dropout), 0.0)
    return p


@jit_without_specializing("place", "tokens", "longest")
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
    has_dropout: constexpr,
    heads: constexpr,
    dim: constexpr,
    padded_dim: constexpr,
    tile: constexpr,
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
    head, index = tl.program_id(1), tl.program_id(2)
    begin, length = tl.load(starts + tl.program_id(0)), tl.load(lengths + tl.program_id(0))
    key = tl.load(seed) + place
    i = index * tile + tl.arange(0, tile)
    width: constexpr = heads * dim
    head_base = qkv + head * dim
    q = _load_span_rows(head_base, begin, length, i, 3 * width, dim, padded_dim)
    value_sum = _load_span_rows(out + head * dim, begin, length, i, width, dim, padded_dim).to(
        tl.float32
    )
    lse_pointers = lse + head.to(tl.int64) * tokens + begin + i
    maximum = tl.load(lse_pointers, i < length, 0.0)
    exp_sum = tl.full([tile], 1.0, tl.float32)
    if index * tile < length:
        for other in range(index + 1):
            j = other * tile + tl.arange(0, tile)
            k = _load_span_rows(head_base + width, begin, length, j, 3 * width, dim, padded_dim)
            v = _load_span_rows(head_base + 2 * width, begin, length, j, 3 * width, dim, padded_dim)
            s = tl.where(j[None, :] <= i[:, None], tl.dot(q, tl.trans(k)) * factor, float("-inf"))
            new_maximum = tl.maximum(maximum, tl.max(s, 1))
            p = tl.exp(s - new_maximum[:, None])
            rescale = tl.exp(maximum - new_maximum)
            exp_sum = exp_sum * rescale + tl.sum(p, 1)
            p = _apply_dropout(p, key, (begin + i) * heads + head, j, longest, dropout, has_dropout)
            value_sum = value_sum * rescale[:, None] + tl.dot(p.to(v.dtype), v)
            maximum = new_maximum
    d = tl.arange(0, padded_dim)[None, :]
    pointers = out + head * dim + (begin + i).to(tl.int64)[:, None] * width + d
    tl.store(pointers, value_sum / exp_sum[:, None], (i < length)[:, None] & (d < dim))
    tl.store(lse_pointers, maximum + tl.log(exp_sum), i < length)


@jit_without_specializing()
def _compute_span_gradients(
    q: tensor,
    k: tensor,
    v: tensor,
    g: tensor,
    lse: tensor,
    dot: tensor,
    i: tensor,
    j: tensor,
    begin: tensor,
    head: tensor,
    seed: tensor,
    longest: tensor,
    dropout: tensor,
    factor: tensor,
    has_dropout: constexpr,
    heads: constexpr,
) -> tuple[tensor, tensor]:
    """Return, for queries `i` and keys `j` of a span (numbers in the span), two fp32 tiles
    [queries, keys]: the probabilities after dropout, and the gradients of the logits, p (dropout(g
    vᵀ) - dot) / sqrt(D).

    `q` and `g` (gradient of the output) are [queries, dim], `k` and `v` [keys, dim]; `lse` is the
    natural log-sum-exp of the whole softmax (context and span), `dot` rowsum(grad · out), `factor`
    1 / sqrt(D), `seed` the seed plus site. Keys after the query give zeros.
    """
    s = tl.dot(q, tl.trans(k)) * factor
    p = tl.where(j[None, :] <= i[:, None], tl.exp(tl.minimum(s - lse[:, None], 0.0)), 0.0)
    query = (begin + i) * heads + head
    p_grad = _apply_dropout(tl.dot(g, tl.trans(v)), seed, query, j, longest, dropout, has_dropout)
    return _apply_dropout(p, seed, query, j, longest, dropout, has_dropout), p * (
        p_grad - dot[:, None]
    ) * factor


@jit_without_specializing("place", "tokens", "longest")
def _attend_spans_backward(
    grad: tensor,
    qkv: tensor,
    out: tensor,
    lse: tensor,
    dq: tensor,
    qkv_grad: tensor,
    starts: tensor,
    lengths: tensor,
    seed: tensor,
    place: tensor,
    tokens: tensor,
    longest: tensor,
    dropout: tensor,
    factor: tensor,
    has_dropout: constexpr,
    heads: constexpr,
    dim: constexpr,
    padded_dim: constexpr,
    tile: constexpr,
) -> None:
    """Compute gradients of a span on itself for one tile and head: first of its tokens as queries
    of earlier ones, then as keys and values of later ones.

        dot = rowsum(grad · out);  ds = p (dropout(grad vᵀ) - dot) / sqrt(D)
        dq += ds k;  dk = dsᵀ q;  dv = dropout(p)ᵀ grad

    `grad`, `out` and `dq` are contiguous [tokens, heads, dim], where `dq` already holds the
    gradient by the context's keys; `qkv_grad` is [tokens, 3, heads, dim], of which keys and values
    are written. The rest, and what a program has, is as in `_attend_spans`. Equals autograd's
    gradient of this part of the attention.
    """
    head, index = tl.program_id(1), tl.program_id(2)
    begin, length = tl.load(starts + tl.program_id(0)), tl.load(lengths + tl.program_id(0))
    key = tl.load(seed) + place
    i = index * tile + tl.arange(0, tile)
    width: constexpr = heads * dim
    head_base, grads, outs = qkv + head * dim, grad + head * dim, out + head * dim
    lse_pointers = lse + head.to(tl.int64) * tokens + begin
    d = tl.arange(0, padded_dim)[None, :]
    mask = (i < length)[:, None] & (d < dim)
    rows = (begin + i).to(tl.int64)[:, None]
    if index * tile < length:
        q = _load_span_rows(head_base, begin, length, i, 3 * width, dim, padded_dim)
        g = _load_span_rows(grads, begin, length, i, width, dim, padded_dim)
        dot_rows = tl.sum(
            g.to(tl.float32)
            * _load_span_rows(outs, begin, length, i, width, dim, padded_dim).to(tl.float32),
            1,
        )
        lse_rows = tl.load(lse_pointers + i, i < length, 0.0)
        pointers = dq + head * dim + rows * width + d
        q_sum = tl.load(pointers, mask, 0.0).to(tl.float32)
        for other in range(index + 1):
            j = other * tile + tl.arange(0, tile)
            k = _load_span_rows(head_base + width, begin, length, j, 3 * width, dim, padded_dim)
            v = _load_span_rows(head_base + 2 * width, begin, length, j, 3 * width, dim, padded_dim)
            p, s = _compute_span_gradients(
                q,
                k,
                v,
                g,
                lse_rows,
                dot_rows,
                i,
                j,
                begin,
                head,
                key,
                longest,
                dropout,
                factor,
                has_dropout,
                heads,
            )
            q_sum += tl.dot(s.to(k.dtype), k)
        tl.store(pointers, q_sum, mask)
        k = _load_span_rows(head_base + width, begin, length, i, 3 * width, dim, padded_dim)
        v = _load_span_rows(head_base + 2 * width, begin, length, i, 3 * width, dim, padded_dim)
        k_sum = tl.zeros([tile, padded_dim], tl.float32)
        v_sum = tl.zeros([tile, padded_dim], tl.float32)
        for other in range(index, tl.cdiv(length, tile)):
            j = other * tile + tl.arange(0, tile)
            q = _load_span_rows(head_base, begin, length, j, 3 * width, dim, padded_dim)
            g = _load_span_rows(grads, begin, length, j, width, dim, padded_dim)
            dot_rows = tl.sum(
                g.to(tl.float32)
                * _load_span_rows(outs, begin, length, j, width, dim, padded_dim).to(tl.float32),
                1,
            )
            lse_rows = tl.load(lse_pointers + j, j < length, 0.0)
            p, s = _compute_span_gradients(
                q,
                k,
                v,
                g,
                lse_rows,
                dot_rows,
                j,
                i,
                begin,
                head,
                key,
                longest,
                dropout,
                factor,
                has_dropout,
                heads,
            )
            k_sum += tl.dot(tl.trans(s).to(q.dtype), q)
            v_sum += tl.dot(tl.trans(p).to(g.dtype), g)
        pointers = qkv_grad + head * dim + rows * 3 * width + d
        tl.store(pointers + width, k_sum, mask)
        tl.store(pointers + 2 * width, v_sum, mask)
