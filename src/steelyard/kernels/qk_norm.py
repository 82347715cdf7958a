"""RMSNorm of every query and key head (QK norm, as in Qwen3) inside the QKV matrix, and its
gradient; values are left as they are. Computed in fp32.

QKV is [tokens, groups · (queries + 2) · D]: for each key group its query heads, then its key, then
its value. Called by models/llama_fused.py before the rotation.
"""

import torch
from torch import Tensor

from steelyard.kernels.add_norm import PROGRAMS
from steelyard.kernels.jit import (
    constexpr,
    jit,
    jit_without_specializing,
    next_power_of_2,
    tensor,
    tl,
)

TILE = 4096  # elements of one operand that a program loads at a time


def norm_heads(qkv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, queries: int) -> Tensor:
    """Return a copy of `qkv` [tokens, groups · (queries + 2) · D] with the RMSNorm of each query
    head, times `q_weight`, and of each key head, times `k_weight` ([D] both); values are unchanged.
    `queries` is the number of query heads of a key group.
    """
    grouped = qkv.unflatten(-1, (-1, queries + 2, len(q_weight)))  # type: ignore[no-untyped-call]
    wide = _widen_to_fp32(grouped[:, :, :-1])
    normed = (
        wide * _compute_rms_factor(wide, eps) * _stack_weights(q_weight, k_weight, queries)
    ).to(qkv.dtype)
    return torch.cat((normed, grouped[:, :, -1:]), dim=2).flatten(1)


def norm_heads_backward(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, grad: Tensor, eps: float, queries: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `qkv`, `q_weight` and `k_weight`, each in its tensor's shape and
    type, from the input `qkv` of `norm_heads` and `grad`, the gradient of its result; the values'
    part of `grad` is passed on unchanged.
    """
    grouped, grads = (x.unflatten(-1, (-1, queries + 2, len(q_weight))) for x in (qkv, grad))  # type: ignore[no-untyped-call]
    wide, slope = _widen_to_fp32(grouped[:, :, :-1]), _widen_to_fp32(grads[:, :, :-1])
    scale = _compute_rms_factor(wide, eps)
    unit = wide * scale
    weight_grads = (slope * unit).sum((0, 1))
    slope = slope * _stack_weights(q_weight, k_weight, queries)
    back = (scale * (slope - unit * (slope * unit).mean(-1, keepdim=True))).to(qkv.dtype)
    whole = torch.cat((back, grads[:, :, -1:]), dim=2).flatten(1)
    return whole, weight_grads[:-1].sum(0).to(q_weight.dtype), weight_grads[-1].to(k_weight.dtype)


def _widen_to_fp32(x: Tensor) -> Tensor:
    """Return x in fp32, or unchanged if its type is as wide or wider."""
    return x.float() if x.dtype.itemsize < torch.float32.itemsize else x


def _compute_rms_factor(wide: Tensor, eps: float) -> Tensor:
    """Return 1 / sqrt(mean square + eps) of the last dimension, which is kept with size 1."""
    return wide.square().mean(-1, keepdim=True).add(eps).rsqrt()


def _stack_weights(q_weight: Tensor, k_weight: Tensor, queries: int) -> Tensor:
    """Return the norms' weights of one key group's heads, [queries + 1, D]: `q_weight` for each
    query, then `k_weight`.
    """
    return torch.cat((q_weight.expand(queries, -1), k_weight[None]))


def triton_norm_heads(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, queries: int
) -> Tensor:
    """Compute `norm_heads` by one kernel."""
    qkv = qkv.contiguous()
    out = torch.empty_like(qkv)
    dim = len(q_weight)
    heads = qkv.shape[1] // dim
    padded = next_power_of_2(dim)
    rows = max(1, TILE // padded)
    grid = (len(qkv), -(-heads // rows))
    _norm_heads[grid](qkv, q_weight, k_weight, out, eps, heads, queries, dim, padded, rows)
    return out


def triton_norm_heads_backward(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, grad: Tensor, eps: float, queries: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `norm_heads_backward` by one kernel, followed by a sum of its programs' partial
    weight gradients in torch.
    """
    qkv, grad = qkv.contiguous(), grad.contiguous()
    back = torch.empty_like(qkv)
    tokens, dim = len(qkv), len(q_weight)
    heads = qkv.shape[1] // dim
    padded = next_power_of_2(dim)
    rows = max(1, TILE // padded)
    parts = qkv.new_empty(min(tokens, PROGRAMS), 2, dim, dtype=torch.float32)
    inputs = (qkv, q_weight, k_weight, grad, back, parts, eps, tokens, heads)
    _norm_heads_backward[(len(parts),)](*inputs, queries, dim, padded, rows)
    weight_grads = parts.sum(0)
    return back, weight_grads[0].to(q_weight.dtype), weight_grads[1].to(k_weight.dtype)


@jit
def _norm_heads(
    qkv: tensor,
    q_weight: tensor,
    k_weight: tensor,
    out: tensor,
    eps: tensor,
    heads: tensor,
    queries: constexpr,
    dim: constexpr,
    padded: constexpr,
    rows: constexpr,
) -> None:
    """Compute x / sqrt(mean(x²) + eps) · weight for some heads of one token, and copy values;
    equals `norm_heads`.

    `qkv` and `out` are contiguous [tokens, heads, dim], where `heads` counts queries, keys and
    values: of each key group `queries` queries, a key and a value. Program (i, h) has token i and
    heads h · rows to (h + 1) · rows; `padded` is the power of two that covers `dim`.
    """
    head = tl.program_id(1) * rows + tl.arange(0, rows)[:, None]
    i = tl.arange(0, padded)[None, :]
    part = head % (queries + 2)
    mask = (head < heads) & (i < dim)
    offsets = tl.program_id(0).to(tl.int64) * heads * dim + head * dim + i
    x = tl.load(qkv + offsets, mask, 0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 1)[:, None] / dim + eps)
    q = tl.load(q_weight + i, i < dim, 0.0).to(tl.float32)
    k = tl.load(k_weight + i, i < dim, 0.0).to(tl.float32)
    normed = x * scale * tl.where(part < queries, q, k)
    tl.store(out + offsets, tl.where(part > queries, x, normed), mask)


@jit_without_specializing("tokens")
def _norm_heads_backward(
    qkv: tensor,
    q_weight: tensor,
    k_weight: tensor,
    grad: tensor,
    back: tensor,
    parts: tensor,
    eps: tensor,
    tokens: tensor,
    heads: tensor,
    queries: constexpr,
    dim: constexpr,
    padded: constexpr,
    rows: constexpr,
) -> None:
    """Compute the gradients of `qkv` and of both weights; equals `norm_heads_backward`.

        s = 1 / sqrt(mean(x²) + eps);  u = x s;  g = grad · weight;  back = s (g - u mean(g u))

    `qkv`, `grad` and `back` are contiguous [tokens, heads, dim], as in `_norm_heads`. Program i of
    P has tokens i, i + P, ..., `rows` heads at a time, and writes its sums of grad · u over queries
    and over keys to row i of `parts`, fp32 [P, 2, dim].
    """
    i = tl.arange(0, padded)
    column = i[None, :]
    q = tl.load(q_weight + column, column < dim, 0.0).to(tl.float32)
    k = tl.load(k_weight + column, column < dim, 0.0).to(tl.float32)
    total_q = tl.zeros([padded], tl.float32)
    total_k = tl.zeros([padded], tl.float32)
    for token in range(tl.program_id(0), tokens, tl.num_programs(0)):
        for first in range(0, heads, rows):
            head = first + tl.arange(0, rows)[:, None]
            part = head % (queries + 2)
            mask = (head < heads) & (column < dim)
            offsets = tl.cast(token, tl.int64) * heads * dim + head * dim + column
            x = tl.load(qkv + offsets, mask, 0.0).to(tl.float32)
            g = tl.load(grad + offsets, mask, 0.0).to(tl.float32)
            scale = tl.rsqrt(tl.sum(x * x, 1)[:, None] / dim + eps)
            unit = x * scale
            total_q += tl.sum(tl.where(part < queries, g * unit, 0.0), 0)
            total_k += tl.sum(tl.where(part == queries, g * unit, 0.0), 0)
            slope = g * tl.where(part < queries, q, k)
            head_grad = scale * (slope - unit * (tl.sum(slope * unit, 1)[:, None] / dim))
            tl.store(back + offsets, tl.where(part > queries, g, head_grad), mask)
    target = parts + tl.program_id(0).to(tl.int64) * 2 * dim + i
    tl.store(target, total_q, i < dim)
    tl.store(target + dim, total_k, i < dim)
