"""The sum of residual stream and block output followed by an RMSNorm, fused into one pass over
memory, and its gradient; computed in fp32.

`add_norm` and `add_norm_backward` are the plain functions; `triton_add_norm` and
`triton_add_norm_backward` give the same by kernels. Called by the blocks of models/llama_fused.py
and models/llama_fp8.py.
"""

import torch
from torch import Tensor

from steelyard.kernels.jit import (
    constexpr,
    jit,
    jit_without_specializing,
    next_power_of_2,
    tensor,
    tl,
)

# programs, each with a partial sum of the weight's gradient: 8 per multiprocessor of an H200 (132)
PROGRAMS = 1056


def add_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return x + delta, its RMSNorm times `weight` (both [tokens, width], in the type of x), and
    each row's factor 1 / sqrt(mean square + eps) as [tokens, 1], fp32 or wider.
    """
    x = x + delta
    wide = _widen_to_fp32(x)
    scale = wide.square().mean(-1, keepdim=True).add(eps).rsqrt()
    return x, (wide * scale * weight).to(x.dtype), scale


def add_norm_backward(
    x: Tensor, scale: Tensor, weight: Tensor, sum_grad: Tensor, norm_grad: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradient of the sum [tokens, width], which is that of x and of delta alike, and
    the gradient of `weight` [width].

    `x` is the sum that `add_norm` returned and `scale` its factors; `sum_grad` is the gradient of
    the sum from later uses, `norm_grad` that of the norm.
    """
    unit, norm_grad = _widen_to_fp32(x) * scale, _widen_to_fp32(norm_grad)
    slope = norm_grad * weight
    back = sum_grad + scale * (slope - unit * (slope * unit).mean(-1, keepdim=True))
    return back.to(x.dtype), (norm_grad * unit).sum(0).to(weight.dtype)


def _widen_to_fp32(x: Tensor) -> Tensor:
    """Return x in fp32, or unchanged if its type is as wide or wider."""
    return x.float() if x.dtype.itemsize < torch.float32.itemsize else x


def triton_add_norm(
    x: Tensor, delta: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `add_norm` by one kernel, a program per token; the returned factors are fp32 [tokens,
    1].
    """
    tokens, width = x.shape
    out, normed = torch.empty_like(x), torch.empty_like(x)
    scale = x.new_empty(tokens, 1, dtype=torch.float32)
    _add_norm[(tokens,)](
        x.contiguous(),
        delta.contiguous(),
        weight,
        out,
        normed,
        scale,
        eps,
        width,
        next_power_of_2(width),
        num_warps=8,
    )
    return out, normed, scale


def triton_add_norm_backward(
    x: Tensor, scale: Tensor, weight: Tensor, sum_grad: Tensor, norm_grad: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute `add_norm_backward` by one kernel, followed by a sum of its programs' partial weight
    gradients in torch. `x` and `scale` are contiguous.
    """
    tokens, width = x.shape
    back = torch.empty_like(x)
    parts = x.new_empty(min(tokens, PROGRAMS), width, dtype=torch.float32)
    inputs = (x, scale, weight, sum_grad.contiguous(), norm_grad.contiguous())
    _add_norm_backward[(len(parts),)](
        *inputs, back, parts, tokens, width, next_power_of_2(width), num_warps=8
    )
    return back, parts.sum(0).to(weight.dtype)


@jit
def _add_norm(
    x: tensor,
    delta: tensor,
    weight: tensor,
    out: tensor,
    normed: tensor,
    scale: tensor,
    eps: tensor,
    width: tensor,
    padded: constexpr,
) -> None:
    """Compute y = x + delta, s = 1 / sqrt(mean(y²) + eps) and y · s · weight of one token; equals
    `add_norm`.

    Program i has token i. `x`, `delta`, `out` (y) and `normed` are contiguous [tokens, width],
    `weight` [width], `scale` (s) fp32 [tokens]. y is rounded to its type before it is normed.
    `padded` is the power of two that covers `width`.
    """
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, padded)
    mask = i < width
    offsets = token * width + i
    total = tl.load(x + offsets, mask, 0.0).to(tl.float32) + tl.load(delta + offsets, mask, 0.0).to(
        tl.float32
    )
    rounded = total.to(out.dtype.element_ty)
    tl.store(out + offsets, rounded, mask)
    wide = rounded.to(tl.float32)
    factor = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    tl.store(scale + token, factor)
    tl.store(normed + offsets, wide * factor * tl.load(weight + i, mask, 0.0).to(tl.float32), mask)


@jit_without_specializing("tokens")
def _add_norm_backward(
    x: tensor,
    scale: tensor,
    weight: tensor,
    sum_grad: tensor,
    norm_grad: tensor,
    back: tensor,
    parts: tensor,
    tokens: tensor,
    width: tensor,
    padded: constexpr,
) -> None:
    """Compute the gradient of one RMSNorm and add that of the residual stream; equals
    `add_norm_backward`.

        u = x · scale;  g = norm_grad · weight;  back = sum_grad + scale (g - u mean(g u))

    `x` (the sum), `sum_grad`, `norm_grad` and `back` are contiguous [tokens, width], `scale` fp32
    [tokens], `weight` [width]. Program i of P has tokens i, i + P, ...; it writes the sum over its
    tokens of norm_grad · u, its part of the weight's gradient, to row i of `parts`, fp32 [P,
    width].
    """
    i = tl.arange(0, padded)
    mask = i < width
    norm_weight = tl.load(weight + i, mask, 0.0).to(tl.float32)
    total = tl.zeros([padded], tl.float32)
    for token in range(tl.program_id(0), tokens, tl.num_programs(0)):
        offsets = tl.cast(token, tl.int64) * width + i
        factor = tl.load(scale + token)
        unit = tl.load(x + offsets, mask, 0.0).to(tl.float32) * factor
        g = tl.load(norm_grad + offsets, mask, 0.0).to(tl.float32)
        total += g * unit
        g = g * norm_weight
        slope = factor * (g - unit * (tl.sum(g * unit, 0) / width))
        tl.store(
            back + offsets, slope + tl.load(sum_grad + offsets, mask, 0.0).to(tl.float32), mask
        )
    tl.store(parts + tl.program_id(0).to(tl.int64) * width + i, total, mask)
