"""Rotary position embedding of queries and keys while they are split off the QKV matrix, and its
gradient.

QKV is [tokens, groups · (queries + 2) · D]: for each key group its query heads, then its key, then
its value. Written in torch, the gradient is a concatenation, for which a compiler computes all
sides at every element and takes five times as long as the bytes need; hence kernels. They compute
in fp32. Called by models/llama.py and models/llama_fused.py.
"""

import torch
from torch import Tensor

from steelyard.kernels.jit import constexpr, count_tiles, jit, next_power_of_2, tensor, tl

TILE = 1024  # elements of one operand that a program loads at a time


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x [..., D] rotated by cos and sin [..., D/2], in the half-split convention of Hugging
    Face checkpoints: element i is paired with i + D/2.
    """
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def split_rotated_heads(
    qkv: Tensor, cos: Tensor, sin: Tensor, queries: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return rotated queries [T, H, D], rotated keys [T, G, D] and values [T, G, D] of `qkv` [T, G
    · (queries + 2) · D], as new tensors.

    `queries` is the number of query heads of a key group, H = G · queries; cos and sin are [T, 1,
    D/2].
    """
    grouped = qkv.unflatten(-1, (-1, queries + 2, 2 * cos.shape[-1]))  # type: ignore[no-untyped-call]
    q = rotate(grouped[:, :, :-2].flatten(1, 2), cos, sin)
    return q, rotate(grouped[:, :, -2], cos, sin), grouped[:, :, -1].clone()


def rotate_heads_in_place(
    qkv: Tensor, cos: Tensor, sin: Tensor, queries: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotate queries and keys inside `qkv` [T, G · (queries + 2) · D], in place, and return views
    of it: queries [T, G, queries, D], keys and values [T, G, D].

    `queries` is the number of query heads of a key group; cos and sin are [T, 1, D/2].
    """
    grouped = qkv.unflatten(-1, (-1, queries + 2, 2 * cos.shape[-1]))  # type: ignore[no-untyped-call]
    grouped[:, :, :-1] = rotate(grouped[:, :, :-1], cos[:, None], sin[:, None])
    return grouped[:, :, :-2], grouped[:, :, -2], grouped[:, :, -1]


def split_rotated_heads_backward(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    """Return the gradient of `qkv` [T, G · (queries + 2) · D] from the gradients `q` [T, H, D] of
    rotated queries, `k` of rotated keys and `v` of values ([T, G, D] both): `q` and `k` are rotated
    back, `v` is copied.
    """
    grouped = rotate(q, cos, -sin).unflatten(1, (k.shape[1], -1))  # type: ignore[no-untyped-call]
    return torch.cat((grouped, rotate(k, cos, -sin)[:, :, None], v[:, :, None]), dim=2).flatten(1)


def triton_split_rotated_heads(
    qkv: Tensor, cos: Tensor, sin: Tensor, queries: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `split_rotated_heads` by one kernel. `qkv`, `cos` and `sin` are contiguous."""
    tokens, dim = len(qkv), 2 * cos.shape[-1]
    groups = qkv.shape[1] // ((queries + 2) * dim)
    q = qkv.new_empty(tokens, groups * queries, dim)
    k, v = (qkv.new_empty(tokens, groups, dim) for _ in range(2))
    _launch_rotate(qkv, q, k, v, cos, sin, True)
    return q, k, v


def triton_rotate_heads_in_place(
    qkv: Tensor, cos: Tensor, sin: Tensor, queries: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `rotate_heads_in_place` by one kernel. `qkv`, `cos` and `sin` are contiguous."""
    half = cos.shape[-1]
    grouped = qkv.unflatten(-1, (-1, queries + 2, 2 * half))  # type: ignore[no-untyped-call]
    groups = grouped.shape[1]
    rows = max(1, TILE // next_power_of_2(half))
    grid = (len(qkv), count_tiles(groups, rows))
    _rotate_in_place[grid](qkv, cos, sin, groups, queries, half, next_power_of_2(half), rows)
    return grouped[:, :, :-2], grouped[:, :, -2], grouped[:, :, -1]


def triton_split_rotated_heads_backward(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    """Compute `split_rotated_heads_backward` by one kernel. `cos` and `sin` are contiguous."""
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    out = k.new_empty(len(k), q[0].numel() + 2 * k[0].numel())
    _launch_rotate(out, q, k, v, cos, sin, False)
    return out


def _launch_rotate(
    qkv: Tensor, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, forward: bool
) -> None:
    """Launch `_rotate` from `qkv` to q, k and v if `forward`, otherwise from the gradients q, k and
    v to `qkv`; the targets are overwritten.
    """
    tokens, groups, dim = k.shape
    half = dim // 2
    rows = max(1, TILE // next_power_of_2(half))
    grid = (tokens, count_tiles(groups, rows))
    _rotate[grid](
        qkv,
        q,
        k,
        v,
        cos,
        sin,
        groups,
        forward,
        q.shape[1] // groups,
        half,
        next_power_of_2(half),
        rows,
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
    forward: constexpr,
    queries: constexpr,
    half: constexpr,
    padded: constexpr,
    rows: constexpr,
) -> None:
    """Copy heads between `qkv` and q, k and v, rotating queries and keys; equals
    `split_rotated_heads` if `forward`, otherwise `split_rotated_heads_backward`.

        forward:  (a, b) -> (a cos - b sin, b cos + a sin);  backward: sin with the other sign

    a and b are the halves of a head; values are copied. `qkv` is contiguous [tokens, groups,
    queries + 2, 2 · half], `q` [tokens, groups · queries, 2 · half], `k` and `v` [tokens, groups, 2
    · half], `cos` and `sin` [tokens, half]. Program (i, g) has token i and `rows` key groups;
    `padded` is the power of two that covers `half`.
    """
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * rows + tl.arange(0, rows)[:, None]
    i = tl.arange(0, padded)[None, :]
    mask = (group < groups) & (i < half)
    c = tl.load(cos + token * half + i, i < half).to(tl.float32)
    s = tl.load(sin + token * half + i, i < half).to(tl.float32)
    head = token * groups + group
    for part in tl.static_range(queries + 2):
        joined = qkv + (head * (queries + 2) + part) * 2 * half + i
        if part < queries:
            separate = q + (head * queries + part) * 2 * half + i
        elif part == queries:
            separate = k + head * 2 * half + i
        else:
            separate = v + head * 2 * half + i
        source = joined if forward else separate
        target = separate if forward else joined
        a = tl.load(source, mask).to(tl.float32)
        b = tl.load(source + half, mask).to(tl.float32)
        if part > queries:  # a value
            x, y = a, b
        elif forward:
            x, y = a * c - b * s, b * c + a * s
        else:
            x, y = a * c + b * s, b * c - a * s
        tl.store(target, x, mask)
        tl.store(target + half, y, mask)


@jit
def _rotate_in_place(
    qkv: tensor,
    cos: tensor,
    sin: tensor,
    groups: tensor,
    queries: constexpr,
    half: constexpr,
    padded: constexpr,
    rows: constexpr,
) -> None:
    """Rotate queries and keys inside `qkv`, in place; equals `rotate_heads_in_place`.

    `qkv` is contiguous [tokens, groups, queries + 2, 2 · half], `cos` and `sin` [tokens, half].
    Program (i, g) has token i and `rows` key groups; `padded` is the power of two that covers
    `half`.
    """
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * rows + tl.arange(0, rows)[:, None]
    i = tl.arange(0, padded)[None, :]
    mask = (group < groups) & (i < half)
    c = tl.load(cos + token * half + i, i < half).to(tl.float32)
    s = tl.load(sin + token * half + i, i < half).to(tl.float32)
    for part in tl.static_range(queries + 1):
        pointers = qkv + ((token * groups + group) * (queries + 2) + part) * 2 * half + i
        a = tl.load(pointers, mask).to(tl.float32)
        b = tl.load(pointers + half, mask).to(tl.float32)
        tl.store(pointers, a * c - b * s, mask)
        tl.store(pointers + half, b * c + a * s, mask)
