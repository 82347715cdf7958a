"""Causal attention over packed rows and its gradient in Triton, for 16-bit types.

The rows of a layout are read as one long row: of every token it is known where its own row begins and ends, and a tile of
queries reads the keys from the first beginning in it on, whatever the number of rows. Queries, keys and values are
[T, heads, D] and contiguous; D is a power of two. Exponents are to base 2.
"""

from typing import Any

import torch
from torch import Tensor

from steelyard.errors import RequestError
from steelyard.kernels.jit import constexpr, jit, serve, tensor, tl

LOG2_E = 1.4426950408889634
# Tiles of queries and of keys, warps, stages.
FORWARD = (64, 64, 4, 3)
BACK_QUERIES = (128, 128, 8, 2)
BACK_KEYS = (64, 64, 4, 2)
DIMS = (32, 64, 128)  # of a head: what these tiles leave room for
MOST = 2**31 - 1  # addresses are 32-bit offsets


def serves(device: torch.device, dtype: torch.dtype, dim: int) -> bool:
    return serve(device) and dtype.itemsize == torch.bfloat16.itemsize and dim in DIMS


def attend(q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> Tensor:
    """Attention inside rows with these cumulative lengths."""
    if not serves(q.device, q.dtype, q.shape[-1]):
        raise RequestError("tune.attention='packed' needs a GPU with Triton, a 16-bit precision and heads of 32, 64 or 128")
    if q.numel() > MOST:
        raise RequestError(f"tune.attention='packed' counts to {MOST}, and queries are {q.numel()}; lower tune.micro_batch")
    out: Tensor = PackedAttention.apply(q, k, v, *borders(cu, len(q)))  # type: ignore[no-untyped-call]
    return out


class PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, q: Tensor, k: Tensor, v: Tensor, begin: Tensor, end: Tensor) -> Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
        tokens, heads, dim = q.shape
        tile, keys, warps, stages = FORWARD
        grid = (-(-tokens // tile), heads)
        options = {"num_warps": warps, "num_stages": stages}
        _forward[grid](
            q, k, v, out, lse, begin, dim**-0.5 * LOG2_E, tokens, heads, heads // k.shape[1], dim, tile, keys, **options
        )
        context.save_for_backward(q, k, v, out, lse, begin, end)
        return out

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, out, lse, begin, end = context.saved_tensors
        grad = grads[0].contiguous()
        tokens, heads, dim = q.shape
        groups, scale = k.shape[1], dim**-0.5
        dot = torch.empty_like(lse)
        _dot[(-(-tokens * heads // 64),)](out, grad, dot, tokens * heads, dim, 64)
        back_q, back_k, back_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        given = (q, k, v, grad, lse, dot)
        tile, keys, warps, stages = BACK_KEYS
        sizes = (scale, scale * LOG2_E, tokens, heads, heads // groups, dim)
        _back_keys[(-(-tokens // keys), groups)](
            *given, back_k, back_v, end, *sizes, tile, keys, num_warps=warps, num_stages=stages
        )
        tile, keys, warps, stages = BACK_QUERIES
        _back_queries[(-(-tokens // tile), heads)](
            *given, back_q, begin, *sizes, tile, keys, num_warps=warps, num_stages=stages
        )
        return back_q, back_k, back_v, None, None


def borders(cu: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Of every token, where its row begins and where it ends, from cumulative lengths."""
    row = torch.searchsorted(cu, torch.arange(tokens, dtype=cu.dtype, device=cu.device), right=True)
    return cu[row - 1], cu[row]


@jit
def _forward(
    q: tensor,
    k: tensor,
    v: tensor,
    out: tensor,
    lse: tensor,
    begin: tensor,
    scale: tensor,
    tokens: tensor,
    heads: tensor,
    ratio: constexpr,
    dim: constexpr,
    tile: constexpr,
    keys: constexpr,
) -> None:
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * tile
    head = tl.program_id(1)
    row = first + tl.arange(0, tile)
    d = tl.arange(0, dim)
    there = row < tokens
    at = (row[:, None] * heads + head) * dim + d[None, :]
    query = tl.load(q + at, there[:, None], 0.0)
    start = tl.load(begin + row, there, 0)
    lowest = tl.load(begin + first)
    last = tl.minimum(first + tile, tokens)
    highest = tl.load(begin + last - 1)
    groups = heads // ratio
    side = (tl.arange(0, keys)[:, None] * groups + head // ratio) * dim + d[None, :]
    most = tl.full([tile], -1e30, tl.float32)
    total = tl.zeros([tile], tl.float32)
    sums = tl.zeros([tile, dim], tl.float32)
    for low in range(lowest // keys * keys, last, keys):
        column = low + tl.arange(0, keys)
        base = low * groups * dim
        known = (column < tokens)[:, None]
        key = tl.load(k + base + side, known, 0.0)
        score = tl.dot(query, tl.trans(key)) * scale
        if (low + keys > first) | (low < highest):
            seen = (column[None, :] <= row[:, None]) & (column[None, :] >= start[:, None])
            score = tl.where(seen, score, -1e30)
        more = tl.maximum(most, tl.max(score, 1))
        weight = tl.exp2(score - more[:, None])
        less = tl.exp2(most - more)
        total = total * less + tl.sum(weight, 1)
        value = tl.load(v + base + side, known, 0.0)
        sums = tl.dot(weight.to(value.dtype), value, sums * less[:, None])
        most = more
    tl.store(out + at, sums / total[:, None], there[:, None])
    tl.store(lse + row * heads + head, most + tl.log2(total), there)


@jit
def _dot(out: tensor, grad: tensor, dot: tensor, count: tensor, dim: constexpr, tile: constexpr) -> None:
    row = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    at = row[:, None] * dim + tl.arange(0, dim)[None, :]
    there = row < count
    product = tl.load(out + at, there[:, None], 0.0).to(tl.float32) * tl.load(grad + at, there[:, None], 0.0).to(tl.float32)
    tl.store(dot + row, tl.sum(product, 1), there)


@jit
def _back_keys(
    q: tensor,
    k: tensor,
    v: tensor,
    grad: tensor,
    lse: tensor,
    dot: tensor,
    back_k: tensor,
    back_v: tensor,
    end: tensor,
    scale: tensor,
    scale2: tensor,
    tokens: tensor,
    heads: tensor,
    ratio: constexpr,
    dim: constexpr,
    tile: constexpr,
    keys: constexpr,
) -> None:
    first = tl.program_id(0) * keys
    group = tl.program_id(1)
    column = first + tl.arange(0, keys)
    d = tl.arange(0, dim)
    there = column < tokens
    at = (column[:, None] * (heads // ratio) + group) * dim + d[None, :]
    key = tl.load(k + at, there[:, None], 0.0)
    value = tl.load(v + at, there[:, None], 0.0)
    stop = tl.load(end + column, there, 0)
    soonest = tl.load(end + first)
    last = tl.load(end + tl.minimum(first + keys, tokens) - 1)
    sums_k = tl.zeros([keys, dim], tl.float32)
    sums_v = tl.zeros([keys, dim], tl.float32)
    for one in range(ratio):
        head = group * ratio + one
        for low in range(first // tile * tile, last, tile):
            row = low + tl.arange(0, tile)
            known = row < tokens
            side = (row[:, None] * heads + head) * dim + d[None, :]
            query = tl.load(q + side, known[:, None], 0.0)
            above = tl.load(lse + row * heads + head, known, 0.0)
            score = tl.dot(key, tl.trans(query)) * scale2
            if (low < first + keys) | (low + tile > soonest):
                seen = (row[None, :] >= column[:, None]) & (row[None, :] < stop[:, None])
                score = tl.where(seen, score, -1e30)
            weight = tl.exp2(score - above[None, :])
            slope = tl.load(grad + side, known[:, None], 0.0)
            sums_v = tl.dot(weight.to(slope.dtype), slope, sums_v)
            part = tl.load(dot + row * heads + head, known, 0.0)
            change = weight * (tl.dot(value, tl.trans(slope)) - part[None, :])
            sums_k = tl.dot(change.to(query.dtype), query, sums_k)
    tl.store(back_k + at, sums_k * scale, there[:, None])
    tl.store(back_v + at, sums_v, there[:, None])


@jit
def _back_queries(
    q: tensor,
    k: tensor,
    v: tensor,
    grad: tensor,
    lse: tensor,
    dot: tensor,
    back_q: tensor,
    begin: tensor,
    scale: tensor,
    scale2: tensor,
    tokens: tensor,
    heads: tensor,
    ratio: constexpr,
    dim: constexpr,
    tile: constexpr,
    keys: constexpr,
) -> None:
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * tile
    head = tl.program_id(1)
    row = first + tl.arange(0, tile)
    d = tl.arange(0, dim)
    there = row < tokens
    at = (row[:, None] * heads + head) * dim + d[None, :]
    query = tl.load(q + at, there[:, None], 0.0)
    slope = tl.load(grad + at, there[:, None], 0.0)
    start = tl.load(begin + row, there, 0)
    above = tl.load(lse + row * heads + head, there, 0.0)
    part = tl.load(dot + row * heads + head, there, 0.0)
    lowest = tl.load(begin + first)
    last = tl.minimum(first + tile, tokens)
    highest = tl.load(begin + last - 1)
    groups = heads // ratio
    side = (tl.arange(0, keys)[:, None] * groups + head // ratio) * dim + d[None, :]
    sums = tl.zeros([tile, dim], tl.float32)
    for low in range(lowest // keys * keys, last, keys):
        column = low + tl.arange(0, keys)
        base = low * groups * dim
        known = (column < tokens)[:, None]
        key = tl.load(k + base + side, known, 0.0)
        score = tl.dot(query, tl.trans(key)) * scale2
        if (low + keys > first) | (low < highest):
            seen = (column[None, :] <= row[:, None]) & (column[None, :] >= start[:, None])
            score = tl.where(seen, score, -1e30)
        weight = tl.exp2(score - above[:, None])
        value = tl.load(v + base + side, known, 0.0)
        change = weight * (tl.dot(slope, tl.trans(value)) - part[:, None])
        sums = tl.dot(change.to(key.dtype), key, sums)
    tl.store(back_q + at, sums * scale, there[:, None])
