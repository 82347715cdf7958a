"""The sum of two streams and its RMSNorm, in one pass over memory each way; all is computed in
fp32.
"""

import torch
from torch import Tensor

from steelyard.kernels.jit import constexpr, jit, power_of_2, tensor, tl, varied

# sums of a norm's weight gradient, one a program: eight for each multiprocessor of a large device
PARTS = 1056


def add_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """x + delta, its RMSNorm, and what that was scaled with."""
    x = x + delta
    wide = _wide(x)
    scale = wide.square().mean(-1, keepdim=True).add(eps).rsqrt()
    return x, (wide * scale * weight).to(x.dtype), scale


def add_norm_backward(
    x: Tensor, scale: Tensor, weight: Tensor, more: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of x and of the weight, from those of the sum and of its norm."""
    unit, grad = _wide(x) * scale, _wide(grad)
    slope = grad * weight
    back = more + scale * (slope - unit * (slope * unit).mean(-1, keepdim=True))
    return back.to(x.dtype), (grad * unit).sum(0).to(weight.dtype)


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype.itemsize < torch.float32.itemsize else x


def triton_add_norm(
    x: Tensor, delta: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
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
        power_of_2(width),
        num_warps=8,
    )
    return out, normed, scale


def triton_add_norm_backward(
    x: Tensor, scale: Tensor, weight: Tensor, more: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor]:
    tokens, width = x.shape
    back = torch.empty_like(x)
    parts = x.new_empty(min(tokens, PARTS), width, dtype=torch.float32)
    given = (x, scale, weight, more.contiguous(), grad.contiguous())
    _add_norm_backward[(len(parts),)](
        *given, back, parts, tokens, width, power_of_2(width), num_warps=8
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
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, padded)
    there = i < width
    at = token * width + i
    total = tl.load(x + at, there, 0.0).to(tl.float32) + tl.load(delta + at, there, 0.0).to(
        tl.float32
    )
    kept = total.to(out.dtype.element_ty)
    tl.store(out + at, kept, there)
    wide = kept.to(tl.float32)
    size = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    tl.store(scale + token, size)
    tl.store(normed + at, wide * size * tl.load(weight + i, there, 0.0).to(tl.float32), there)


@varied("tokens")
def _add_norm_backward(
    x: tensor,
    scale: tensor,
    weight: tensor,
    more: tensor,
    grad: tensor,
    back: tensor,
    parts: tensor,
    tokens: tensor,
    width: tensor,
    padded: constexpr,
) -> None:
    i = tl.arange(0, padded)
    there = i < width
    own = tl.load(weight + i, there, 0.0).to(tl.float32)
    total = tl.zeros([padded], tl.float32)
    for token in range(tl.program_id(0), tokens, tl.num_programs(0)):
        at = tl.cast(token, tl.int64) * width + i
        size = tl.load(scale + token)
        unit = tl.load(x + at, there, 0.0).to(tl.float32) * size
        g = tl.load(grad + at, there, 0.0).to(tl.float32)
        total += g * unit
        g = g * own
        slope = size * (g - unit * (tl.sum(g * unit, 0) / width))
        tl.store(back + at, slope + tl.load(more + at, there, 0.0).to(tl.float32), there)
    tl.store(parts + tl.program_id(0).to(tl.int64) * width + i, total, there)
