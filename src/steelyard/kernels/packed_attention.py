"""Causal attention over packed rows and its gradient in Triton, for 16-bit types: kernel `packed`
of models/attention.py.

All rows are computed as one long row. For each query `VisibleRanges` says which keys it sees, and a
tile of queries reads from the first of their keys to the last, however many rows that spans.
Queries, keys and values are [T, heads, D] with D in `HEAD_DIMS`. Without gradients they may be
views of one QKV matrix, with queries as [T, groups, heads of a group, D]. Exponents are to base 2.
The plain meaning is kernel `rows` of models/attention.py.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from steelyard.errors import RequestError
from steelyard.kernels.jit import constexpr, has_triton, jit, jit_without_specializing, tensor, tl
from steelyard.kernels.tiles import has_descriptors, make_tile_sources, read_tile

LOG2_E = 1.4426950408889634
# Queries and keys of a tile, warps, pipeline stages.
FORWARD = (64, 64, 4, 3)
BACKWARD_QUERIES = (64, 64, 4, 2)
BACKWARD_KEYS = (64, 64, 4, 2)
HEAD_DIMS = (32, 64, 128)  # head dimensions that these tiles are sized for
MAX_ELEMENTS = 2**31 - 1  # of a tensor: offsets are 32-bit


@dataclass(frozen=True)
class VisibleRanges:
    """Which keys each query of packed rows sees, as int32 tensors on the device: query i sees keys
    `first_key`[i] to `keys_end`[i] - 1, and `queries_end`[j] is one after the last query that sees
    key j (the first is the key's own token). Made by `visible_ranges`; neither of the first two
    decreases from one query to the next, which the kernels rely on.
    """

    first_key: Tensor  # [Tq]: the query's first key
    keys_end: Tensor  # [Tq]: one after the query's last key
    # [Tk]: one after the last query that sees the key; the first is the key's own token
    queries_end: Tensor


def visible_ranges(
    cu_q: Tensor, cu_k: Tensor, queries: int, window: int | None = None
) -> VisibleRanges:
    """Compute each query's half-open range of visible keys from cumulative row lengths, under a
    causal mask and an optional window.

    `cu_q` and `cu_k` are int32 [rows + 1]; in each row the last query sees all keys, and with
    `window` a query sees at most the last `window` of its keys, itself included. `queries` is the
    number of query tokens. `queries_end` is right only where queries and keys are the same tokens
    (no shared prefix); otherwise nothing reads it.
    """
    query = torch.arange(queries, dtype=cu_q.dtype, device=cu_q.device)
    row = torch.searchsorted(cu_q, query, right=True)
    unwindowed = VisibleRanges(cu_k[row - 1], query + 1 + cu_k[row] - cu_q[row], cu_q[row])
    if window is None:
        return unwindowed
    return VisibleRanges(
        torch.maximum(unwindowed.first_key, unwindowed.keys_end - window),
        unwindowed.keys_end,
        torch.minimum(unwindowed.queries_end, query + window),
    )


def is_supported(device: torch.device, dtype: torch.dtype, dim: int) -> bool:
    """Return whether the kernel runs: the device has Triton, the type has 16 bits, and the head
    dimension is 32, 64 or 128.
    """
    return has_triton(device) and dtype.itemsize == torch.bfloat16.itemsize and dim in HEAD_DIMS


def triton_attend_packed_rows(q: Tensor, k: Tensor, v: Tensor, ranges: VisibleRanges) -> Tensor:
    """Return causal attention inside packed rows, [Tq, H, D], differentiable if gradients are
    enabled.

    `ranges` are those of `visible_ranges` for these rows. Raises RequestError if the kernel does
    not support device, type or head dimension, if a tensor spans more than 2^31 - 1 elements, or if
    gradients are enabled and there are more keys than queries (a shared prefix).
    """
    if not is_supported(q.device, q.dtype, q.shape[-1]):
        raise RequestError(
            "tune.attention='packed' needs a GPU with Triton, a 16-bit precision and a head"
            " dimension of 32, 64 or 128"
        )
    reach = max(len(x) * x.stride(0) for x in (q, k, v))
    if reach > MAX_ELEMENTS:
        raise RequestError(
            f"tune.attention='packed' addresses at most {MAX_ELEMENTS} elements, and a batch has"
            f" {reach}; lower"
            " tune.micro_batch or tune.batch_tokens"
        )
    if torch.is_grad_enabled() and len(q) != len(k):
        raise RequestError(
            "tune.attention='packed' computes no gradients of rows with shared prefixes; disable"
            " gradients or choose another kernel"
        )
    if torch.is_grad_enabled():
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    out: Tensor = PackedAttentionFunction.apply(
        q, k, v, ranges.first_key, ranges.keys_end, ranges.queries_end
    )  # type: ignore[no-untyped-call]
    return out


class PackedAttentionFunction(torch.autograd.Function):
    """An autograd function: causal attention over packed rows by Triton kernels, with its own
    backward pass.

    Inputs are q [T, H, D] or [T, G, H / G, D], k and v [Tk, G, D], and the three tensors of
    `VisibleRanges`; the result is [T, H, D]. The backward pass gives gradients of q, k and v, and
    is right only if queries and keys are the same tokens.
    """

    @staticmethod
    def forward(
        context: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        first_key: Tensor,
        keys_end: Tensor,
        queries_end: Tensor,
    ) -> Tensor:
        """Return the causal attention over packed rows, [T, H, D], and save what the backward pass
        needs, with each softmax's log-sum-exp (base 2, fp32 [H, T]).

        `q` is [T, H, D] or [T, G, H / G, D], `k` and `v` are [Tk, G, D], the rest the tensors of
        `VisibleRanges`.
        """
        groups, dim = k.shape[1:]
        q = q.view(len(q), groups, -1, dim) if q.dim() == 3 else q
        heads_per_group = q.shape[2]
        tokens, heads = len(q), groups * heads_per_group
        out, lse = q.new_empty(tokens, heads, dim), q.new_empty(heads, tokens, dtype=torch.float32)
        tile, keys, warps, stages = FORWARD
        strides = [x.stride(i) for x in (q, k, v) for i in (0, 1)]
        sizes = (
            dim**-0.5 * LOG2_E,
            tokens,
            len(k),
            heads,
            heads_per_group,
            dim,
            tile,
            keys,
            has_descriptors(q.device),
        )
        grid = (-(-tokens // tile), heads)
        _attend_forward[grid](
            q,
            *make_tile_sources(keys, k, v),
            *strides,
            out,
            lse,
            first_key,
            keys_end,
            *sizes,
            num_warps=warps,
            num_stages=stages,
        )
        context.save_for_backward(q.flatten(1, 2), k, v, out, lse, first_key, queries_end)
        return out

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        """Return the gradients of q [T, H, D], k and v [T, G, D] of the attention over packed rows,
        and None for the three range tensors. Right only if queries and keys are the same tokens.
        """
        q, k, v, out, lse, first_key, queries_end = context.saved_tensors
        grad = grads[0].contiguous()
        tokens, heads, dim = q.shape
        groups, scale = k.shape[1], dim**-0.5
        dot = torch.empty_like(lse)
        _compute_row_dots[(-(-tokens // 64), heads)](out, grad, dot, tokens, heads, dim, 64)
        back_q, back_k, back_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        sizes = (scale, scale * LOG2_E, tokens, heads, heads // groups, dim)
        tile, keys, warps, stages = BACKWARD_KEYS
        inputs = (
            *make_tile_sources(tile, q, grad),
            k,
            v,
            lse,
            dot,
            back_k,
            back_v,
            queries_end,
            *sizes,
            tile,
            keys,
            has_descriptors(q.device),
        )
        _backward_keys[(-(-tokens // keys), groups)](*inputs, num_warps=warps, num_stages=stages)
        tile, keys, warps, stages = BACKWARD_QUERIES
        inputs = (
            q,
            *make_tile_sources(keys, k, v),
            grad,
            lse,
            dot,
            back_q,
            first_key,
            *sizes,
            tile,
            keys,
            has_descriptors(q.device),
        )
        _backward_queries[(-(-tokens // tile), heads)](*inputs, num_warps=warps, num_stages=stages)
        return back_q, back_k, back_v, None, None, None


@jit_without_specializing("tokens", "count")
def _attend_forward(
    q: tensor,
    k: tensor,
    v: tensor,
    q_row: tensor,
    q_group: tensor,
    k_row: tensor,
    k_group: tensor,
    v_row: tensor,
    v_group: tensor,
    out: tensor,
    lse: tensor,
    first_key: tensor,
    keys_end: tensor,
    scale: tensor,
    tokens: tensor,
    count: tensor,
    heads: tensor,
    heads_per_group: constexpr,
    dim: constexpr,
    tile: constexpr,
    keys: constexpr,
    by_descriptor: constexpr,
) -> None:
    """Compute softmax(q kᵀ / sqrt(D), visible keys only) v for one tile of queries and one head;
    equals kernel `rows` of models/attention.py.

    `q` is [tokens, groups, heads_per_group, dim] with strides `q_row` and `q_group`; `k` and `v`
    are [count, groups, dim] with theirs, or tensor descriptors; `out` is contiguous [tokens, heads,
    dim], `lse` fp32 [heads, tokens] (base 2), `first_key` and `keys_end` int32 [tokens], which must
    not decrease from one token to the next: a tile reads from its first query's first key to its
    last query's end. `scale` is log2(e) / sqrt(dim). Program (p, h) has `tile` queries of head h,
    the last ones first; it reads `keys` keys at a time and masks only tiles that some query does
    not see.
    """
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * tile
    head = tl.program_id(1)
    group = head // heads_per_group
    row = first + tl.arange(0, tile)
    mask = row < tokens
    d = tl.arange(0, dim)[None, :]
    query = tl.load(
        q + row[:, None] * q_row + group * q_group + head % heads_per_group * dim + d,
        mask[:, None],
        0.0,
    )
    start = tl.load(first_key + row, mask, 0)
    bound = tl.load(keys_end + row, mask, 0)
    last_row = tl.minimum(first + tile, tokens) - 1
    lowest = tl.load(first_key + first) // keys * keys
    unmasked_from = tl.load(first_key + last_row)  # from this key on, no query's range begins later
    unmasked_end = tl.load(keys_end + first)  # up to this key, no query's range ends earlier
    keys_stop = tl.load(keys_end + last_row)
    maximum = tl.full([tile], -1e30, tl.float32)
    exp_sum = tl.zeros([tile], tl.float32)
    value_sum = tl.zeros([tile, dim], tl.float32)
    for low in range(lowest, keys_stop, keys):
        column = low + tl.arange(0, keys)
        key = read_tile(k, low, group * k_group, k_row, count, dim, keys, by_descriptor)
        score = tl.dot(query, tl.trans(key)) * scale
        if (low + keys > unmasked_end) | (low < unmasked_from):
            seen = (column[None, :] < bound[:, None]) & (column[None, :] >= start[:, None])
            score = tl.where(seen, score, -1e30)
        new_maximum = tl.maximum(maximum, tl.max(score, 1))
        weight = tl.exp2(score - new_maximum[:, None])
        rescale = tl.exp2(maximum - new_maximum)
        exp_sum = exp_sum * rescale + tl.sum(weight, 1)
        value = read_tile(v, low, group * v_group, v_row, count, dim, keys, by_descriptor)
        value_sum = tl.dot(weight.to(value.dtype), value, value_sum * rescale[:, None])
        maximum = new_maximum
    tl.store(
        out + (row[:, None] * heads + head) * dim + d, value_sum / exp_sum[:, None], mask[:, None]
    )
    tl.store(lse + head * tokens + row, maximum + tl.log2(exp_sum), mask)


@jit_without_specializing("tokens")
def _compute_row_dots(
    out: tensor,
    grad: tensor,
    dot: tensor,
    tokens: tensor,
    heads: tensor,
    dim: constexpr,
    tile: constexpr,
) -> None:
    """Write rowsum(out · grad) of one tile of tokens and one head: `out` and `grad` are contiguous
    [tokens, heads, dim], `dot` fp32 [heads, tokens]. Program (p, h) has `tile` tokens of head h;
    tokens from `tokens` on are masked. Equals `(out * grad).sum(-1).t()` in fp32.
    """
    row = tl.program_id(0) * tile + tl.arange(0, tile)
    head = tl.program_id(1)
    offsets = (row[:, None] * heads + head) * dim + tl.arange(0, dim)[None, :]
    mask = row < tokens
    product = tl.load(out + offsets, mask[:, None], 0.0).to(tl.float32) * tl.load(
        grad + offsets, mask[:, None], 0.0
    ).to(tl.float32)
    tl.store(dot + head * tokens + row, tl.sum(product, 1), mask)


@jit_without_specializing("tokens")
def _backward_keys(
    q: tensor,
    grad: tensor,
    k: tensor,
    v: tensor,
    lse: tensor,
    dot: tensor,
    back_k: tensor,
    back_v: tensor,
    queries_end: tensor,
    scale: tensor,
    scale2: tensor,
    tokens: tensor,
    heads: tensor,
    heads_per_group: constexpr,
    dim: constexpr,
    tile: constexpr,
    keys: constexpr,
    by_descriptor: constexpr,
) -> None:
    """Compute the gradients of one tile of keys and values of one key group, summed over the
    group's query heads.

        p = exp2(scale2 q kᵀ - lse);  dv = Σ p grad;  dk = scale Σ p (grad vᵀ - dot) q

    `q` and `grad` are [tokens, heads, dim] (or descriptors), `k`, `v`, `back_k` and `back_v`
    contiguous [tokens, groups, dim], `lse` and `dot` fp32 [heads, tokens], `queries_end` int32
    [tokens]. A key is seen by queries from itself up to `queries_end`. Program (p, g) has `keys`
    keys of group g and reads `tile` queries at a time. Equals autograd's gradient of kernel `rows`.
    """
    first = tl.program_id(0) * keys
    group = tl.program_id(1)
    column = first + tl.arange(0, keys)
    mask = column < tokens
    offsets = (column[:, None] * (heads // heads_per_group) + group) * dim + tl.arange(0, dim)[
        None, :
    ]
    key = tl.load(k + offsets, mask[:, None], 0.0)
    value = tl.load(v + offsets, mask[:, None], 0.0)
    stop = tl.load(queries_end + column, mask, 0)
    last = tl.load(queries_end + tl.minimum(first + keys, tokens) - 1)
    sums_k = tl.zeros([keys, dim], tl.float32)
    sums_v = tl.zeros([keys, dim], tl.float32)
    for index in range(heads_per_group):
        head = group * heads_per_group + index
        for low in range(first // tile * tile, last, tile):
            row = low + tl.arange(0, tile)
            query_mask = row < tokens
            query = read_tile(q, low, head * dim, heads * dim, tokens, dim, tile, by_descriptor)
            lse_rows = tl.load(lse + head * tokens + row, query_mask, 0.0)
            # Masked in every tile: a branch here costs more than it saves.
            seen = (row[None, :] >= column[:, None]) & (row[None, :] < stop[:, None])
            weight = tl.where(
                seen, tl.exp2(tl.dot(key, tl.trans(query)) * scale2 - lse_rows[None, :]), 0.0
            )
            grad_rows = read_tile(
                grad, low, head * dim, heads * dim, tokens, dim, tile, by_descriptor
            )
            sums_v = tl.dot(weight.to(grad_rows.dtype), grad_rows, sums_v)
            dot_rows = tl.load(dot + head * tokens + row, query_mask, 0.0)
            score_grad = weight * (tl.dot(value, tl.trans(grad_rows)) - dot_rows[None, :])
            sums_k = tl.dot(score_grad.to(query.dtype), query, sums_k)
    tl.store(back_k + offsets, sums_k * scale, mask[:, None])
    tl.store(back_v + offsets, sums_v, mask[:, None])


@jit
def _add_query_gradient(
    query: tensor,
    grad_rows: tensor,
    sums: tensor,
    k: tensor,
    v: tensor,
    lse_rows: tensor,
    dot_rows: tensor,
    row: tensor,
    first_key: tensor,
    begin: tensor,
    end: tensor,
    first_column: tensor,
    stride: tensor,
    scale2: tensor,
    tokens: tensor,
    dim: constexpr,
    keys: constexpr,
    masked: constexpr,
    by_descriptor: constexpr,
) -> tensor:
    """Return `sums` [tile, dim], the gradients of a tile of queries of one head without the factor
    1 / sqrt(D), plus what keys from `begin` to before `end` contribute: Σ p (grad vᵀ - dot) k, with
    p = exp2(scale2 q kᵀ - lse).

    If `masked`, query `row` sees keys `first_key` to `row`; otherwise all queries see all of these
    keys. `k` and `v` are [tokens, groups, dim] (or descriptors), whose columns for this head begin
    at `first_column`; `keys` keys are read at a time. `lse_rows` (base 2) and `dot_rows` are the
    queries' own; `scale2` is log2(e) / sqrt(D).
    """
    for low in range(begin, end, keys):
        key = read_tile(k, low, first_column, stride, tokens, dim, keys, by_descriptor)
        value = read_tile(v, low, first_column, stride, tokens, dim, keys, by_descriptor)
        weight = tl.exp2(tl.dot(query, tl.trans(key)) * scale2 - lse_rows[:, None])
        if masked:
            column = low + tl.arange(0, keys)
            weight = tl.where(
                (column[None, :] <= row[:, None]) & (column[None, :] >= first_key[:, None]),
                weight,
                0.0,
            )
        score_grad = weight * (tl.dot(grad_rows, tl.trans(value)) - dot_rows[:, None])
        sums = tl.dot(score_grad.to(key.dtype), key, sums)
    return sums


@jit_without_specializing("tokens")
def _backward_queries(
    q: tensor,
    k: tensor,
    v: tensor,
    grad: tensor,
    lse: tensor,
    dot: tensor,
    back_q: tensor,
    first_key: tensor,
    scale: tensor,
    scale2: tensor,
    tokens: tensor,
    heads: tensor,
    heads_per_group: constexpr,
    dim: constexpr,
    tile: constexpr,
    keys: constexpr,
    by_descriptor: constexpr,
) -> None:
    """Compute the gradient of one tile of queries of one head: dq = scale Σ p (grad vᵀ - dot) k,
    with p = exp2(scale2 q kᵀ - lse).

    `q`, `grad` and `back_q` are contiguous [tokens, heads, dim], `k` and `v` [tokens, groups, dim]
    (or descriptors), `lse` and `dot` fp32 [heads, tokens], `first_key` int32 [tokens]; a query sees
    keys from `first_key` to itself. Program (p, h) has `tile` queries of head h, the last ones
    first: keys are read in three parts, of which only the middle one, seen by all queries, needs no
    mask. Equals autograd's gradient of kernel `rows`.
    """
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * tile
    head = tl.program_id(1)
    row = first + tl.arange(0, tile)
    mask = row < tokens
    offsets = (row[:, None] * heads + head) * dim + tl.arange(0, dim)[None, :]
    query = tl.load(q + offsets, mask[:, None], 0.0)
    grad_rows = tl.load(grad + offsets, mask[:, None], 0.0)
    start = tl.load(first_key + row, mask, 0)
    lse_rows = tl.load(lse + head * tokens + row, mask, 0.0)
    dot_rows = tl.load(dot + head * tokens + row, mask, 0.0)
    last = tl.minimum(first + tile, tokens)
    lowest = tl.load(first_key + first) // keys * keys
    # between these two all queries of the tile see all keys
    unmasked_from = tl.cdiv(tl.load(first_key + last - 1), keys) * keys
    unmasked_end = first // keys * keys
    first_column = head // heads_per_group * dim
    stride = heads // heads_per_group * dim
    sums = tl.zeros([tile, dim], tl.float32)
    sums = _add_query_gradient(
        query, grad_rows, sums, k, v, lse_rows, dot_rows, row, start, lowest,
        tl.minimum(unmasked_from, unmasked_end), first_column, stride, scale2, tokens, dim, keys,
        True, by_descriptor,
    )  # fmt: skip
    sums = _add_query_gradient(
        query, grad_rows, sums, k, v, lse_rows, dot_rows, row, start, unmasked_from, unmasked_end,
        first_column, stride, scale2, tokens, dim, keys, False, by_descriptor,
    )  # fmt: skip
    sums = _add_query_gradient(
        query, grad_rows, sums, k, v, lse_rows, dot_rows, row, start, unmasked_end, last,
        first_column, stride, scale2, tokens, dim, keys, True, by_descriptor,
    )  # fmt: skip
    tl.store(back_q + offsets, sums * scale, mask[:, None])
