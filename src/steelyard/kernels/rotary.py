"""Rotary positions: from QKV, stored by key group, to rotated queries and keys, and values; and
back.

A compiler that is given the gradient as torch writes it computes both sides of every concatenation
and keeps one: it then takes five times as long as its bytes. The kernel computes in fp32.
"""

import torch
from torch import Tensor

from steelyard.kernels.jit import blocks, constexpr, jit, power_of_2, tensor, tl

NUMBERS = 1024  # that a program reads at once of one operand


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in the half-split convention of Hugging Face checkpoints."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def split_heads(
    qkv: Tensor, cos: Tensor, sin: Tensor, queries: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys, rotated, and values; `queries` are the query heads of a key group. No two
    share memory with `qkv`.
    """
    grouped = qkv.unflatten(-1, (-1, queries + 2, 2 * cos.shape[-1]))  # type: ignore[no-untyped-call]
    q = rotate(grouped[:, :, :-2].flatten(1, 2), cos, sin)
    return q, rotate(grouped[:, :, -2], cos, sin), grouped[:, :, -1].clone()


def rotate_heads(
    qkv: Tensor, cos: Tensor, sin: Tensor, queries: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys of `qkv` rotated where they lie, and values: views of it, queries by key
    group.
    """
    grouped = qkv.unflatten(-1, (-1, queries + 2, 2 * cos.shape[-1]))  # type: ignore[no-untyped-call]
    grouped[:, :, :-1] = rotate(grouped[:, :, :-1], cos[:, None], sin[:, None])
    return grouped[:, :, :-2], grouped[:, :, -2], grouped[:, :, -1]


def join_heads(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The gradient of qkv from those of queries, keys and values."""
    grouped = rotate(q, cos, -sin).unflatten(1, (k.shape[1], -1))  # type: ignore[no-untyped-call]
    return torch.cat((grouped, rotate(k, cos, -sin)[:, :, None], v[:, :, None]), dim=2).flatten(1)


def triton_split_heads(
    qkv: Tensor, cos: Tensor, sin: Tensor, queries: int
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, dim = len(qkv), 2 * cos.shape[-1]
    groups = qkv.shape[1] // ((queries + 2) * dim)
    q = qkv.new_empty(tokens, groups * queries, dim)
    k, v = (qkv.new_empty(tokens, groups, dim) for _ in range(2))
    _launch(qkv, q, k, v, cos, sin, True)
    return q, k, v


def triton_rotate_heads(
    qkv: Tensor, cos: Tensor, sin: Tensor, queries: int
) -> tuple[Tensor, Tensor, Tensor]:
    half = cos.shape[-1]
    grouped = qkv.unflatten(-1, (-1, queries + 2, 2 * half))  # type: ignore[no-untyped-call]
    groups = grouped.shape[1]
    rows = max(1, NUMBERS // power_of_2(half))
    grid = (len(qkv), blocks(groups, rows))
    _rotate_there[grid](qkv, cos, sin, groups, queries, half, power_of_2(half), rows)
    return grouped[:, :, :-2], grouped[:, :, -2], grouped[:, :, -1]


def triton_join_heads(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    out = k.new_empty(len(k), q[0].numel() + 2 * k[0].numel())
    _launch(out, q, k, v, cos, sin, False)
    return out


def _launch(
    qkv: Tensor, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, forth: bool
) -> None:
    tokens, groups, dim = k.shape
    half = dim // 2
    rows = max(1, NUMBERS // power_of_2(half))
    grid = (tokens, blocks(groups, rows))
    _rotate[grid](
        qkv, q, k, v, cos, sin, groups, forth, q.shape[1] // groups, half, power_of_2(half), rows
    )


@jit
def _rotate(
    qkv: tensor,
    q: tensor,
    k: tensor,
    v: tensor,
    cos: tensor,
    sin: tensor,
    groups: tensor,
    forth: constexpr,
    queries: constexpr,
    half: constexpr,
    padded: constexpr,
    rows: constexpr,
) -> None:
    """From qkv to queries, keys and values, forth, or back: a token's heads of some groups."""
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * rows + tl.arange(0, rows)[:, None]
    i = tl.arange(0, padded)[None, :]
    there = (group < groups) & (i < half)
    c = tl.load(cos + token * half + i, i < half).to(tl.float32)
    s = tl.load(sin + token * half + i, i < half).to(tl.float32)
    head = token * groups + group
    for part in tl.static_range(queries + 2):
        joined = qkv + (head * (queries + 2) + part) * 2 * half + i
        if part < queries:
            apart = q + (head * queries + part) * 2 * half + i
        elif part == queries:
            apart = k + head * 2 * half + i
        else:
            apart = v + head * 2 * half + i
        source = joined if forth else apart
        target = apart if forth else joined
        a = tl.load(source, there).to(tl.float32)
        b = tl.load(source + half, there).to(tl.float32)
        if part > queries:  # a value
            x, y = a, b
        elif forth:
            x, y = a * c - b * s, b * c + a * s
        else:
            x, y = a * c + b * s, b * c - a * s
        tl.store(target, x, there)
        tl.store(target + half, y, there)


@jit
def _rotate_there(
    qkv: tensor,
    cos: tensor,
    sin: tensor,
    groups: tensor,
    queries: constexpr,
    half: constexpr,
    padded: constexpr,
    rows: constexpr,
) -> None:
    """Queries and keys of a token's groups, in place."""
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * rows + tl.arange(0, rows)[:, None]
    i = tl.arange(0, padded)[None, :]
    there = (group < groups) & (i < half)
    c = tl.load(cos + token * half + i, i < half).to(tl.float32)
    s = tl.load(sin + token * half + i, i < half).to(tl.float32)
    for part in tl.static_range(queries + 1):
        at = qkv + ((token * groups + group) * (queries + 2) + part) * 2 * half + i
        a = tl.load(at, there).to(tl.float32)
        b = tl.load(at + half, there).to(tl.float32)
        tl.store(at, a * c - b * s, there)
        tl.store(at + half, b * c + a * s, there)
