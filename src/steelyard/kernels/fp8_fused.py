"""Operations between a transformer block's matmuls (add and RMSNorm, SwiGLU, SwiGLU's gradient)
whose results are written in fp8, for the matmul that follows.

Values are rounded to the type of the residual stream before they are quantized, so that a fused
kernel gives what the separate steps give one after the other. Called by models/llama_fp8.py.
"""

import torch
from torch import Tensor

from steelyard.kernels import add_norm, swiglu
from steelyard.kernels.fp8 import E4M3, LARGEST, ROW, TINY, Fp8, empty, rows, warps
from steelyard.kernels.jit import blocks, constexpr, jit, power_of_2, tensor, tl

BACK = 4096  # gate columns that a program of SwiGLU's gradient loads at a time


def add_norm_fp8(
    x: Tensor, delta: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Fp8, Tensor]:
    """Return x + delta, its RMSNorm in fp8 (E4M3, a scale per token), and the norm's factors 1 /
    sqrt(mean square + eps), [tokens, 1]; see `add_norm`.
    """
    x, normed, scale = add_norm.add_norm(x, delta, weight, eps)
    return x, rows(normed), scale


def renorm(x: Tensor, scale: Tensor, weight: Tensor) -> Tensor:
    """Return the RMSNorm of x again, in the type of x, from the factors that `add_norm_fp8`
    returned; for the backward pass.
    """
    return (x.float() * scale * weight).to(x.dtype)


def gated_fp8(gate_up: Tensor, block: int) -> Fp8:
    """Return `swiglu_interleaved` of `gate_up` in fp8 (E4M3, a scale per token)."""
    return rows(swiglu.gated(gate_up, block))


def gated_backward_fp8(
    gate_up: Tensor, grad: Tensor, block: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Fp8]:
    """Return the gradient of `gate_up`, the SwiGLU computed again, and the gradient once more in
    fp8 of type `dtype` with a scale per token.
    """
    back, wide = swiglu.gated_backward(gate_up, grad, block)
    return back, wide, rows(back, dtype)


def triton_add_norm_fp8(
    x: Tensor, delta: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Fp8, Tensor]:
    """Compute `add_norm_fp8` by one kernel, a program per token."""
    tokens, width = x.shape
    out, made = torch.empty_like(x), empty(tokens, width, E4M3, x.device)
    norm = x.new_empty(tokens, 1, dtype=torch.float32)
    padded = power_of_2(width)
    given = (x.contiguous(), delta.contiguous(), weight, out, *made, norm, eps, width)
    _add_norm[(tokens,)](*given, LARGEST[E4M3], TINY, padded, num_warps=warps(padded))
    return out, made, norm


def triton_renorm(x: Tensor, scale: Tensor, weight: Tensor) -> Tensor:
    """Compute `renorm` by one kernel, a program per token. `x` is contiguous."""
    out = torch.empty_like(x)
    padded = power_of_2(x.shape[1])
    _renorm[(len(x),)](x, scale, weight, out, x.shape[1], padded, num_warps=warps(padded))
    return out


def triton_gated_fp8(gate_up: Tensor, block: int) -> Fp8:
    """Compute `swiglu_fp8` by one kernel, a program per token. `gate_up` is contiguous."""
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    made = empty(tokens, width, E4M3, gate_up.device)
    each = min(ROW[0], power_of_2(width))
    sizes = (LARGEST[E4M3], TINY, block, each // block, blocks(width, each))
    _gated[(tokens,)](gate_up, *made, width, *sizes, num_warps=warps(each))
    return made


def triton_gated_backward_fp8(
    gate_up: Tensor, grad: Tensor, block: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Fp8]:
    """Compute `swiglu_backward_fp8` by one kernel, a program per token. `gate_up` is contiguous."""
    grad = grad.contiguous()
    tokens, width = grad.shape
    back, wide = torch.empty_like(gate_up), torch.empty_like(grad)
    made = empty(tokens, 2 * width, dtype, grad.device)
    each = min(BACK, power_of_2(width))
    sizes = (LARGEST[dtype], TINY, block, each // block, blocks(width, each))
    _gated_backward[(tokens,)](
        gate_up, grad, back, wide, *made, width, *sizes, num_warps=warps(each)
    )
    return back, wide, made


@jit
def _add_norm(
    x: tensor,
    delta: tensor,
    weight: tensor,
    out: tensor,
    values: tensor,
    scale: tensor,
    norm: tensor,
    eps: tensor,
    width: tensor,
    largest: constexpr,
    tiny: constexpr,
    padded: constexpr,
) -> None:
    """Compute y = x + delta and RMSNorm(y) · weight of one token, and quantize the latter to fp8;
    equals `add_norm_fp8`.

    Program i has token i. `x`, `delta`, `out` (y) and `values` (fp8) are contiguous [tokens,
    width], `weight` [width]; `scale` (of fp8) and `norm` (the factor 1 / sqrt(mean(y²) + eps)) are
    fp32 [tokens]. `padded` is the power of two that covers `width`.
    """
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
    tl.store(norm + token, size)
    normed = wide * size * tl.load(weight + i, there, 0.0).to(tl.float32)
    normed = normed.to(out.dtype.element_ty).to(tl.float32)
    most = tl.maximum(tl.max(tl.abs(normed), 0), tiny)
    tl.store(values + at, (normed * (largest / most)).to(values.dtype.element_ty), there)
    tl.store(scale + token, most / largest)


@jit
def _renorm(
    x: tensor, scale: tensor, weight: tensor, out: tensor, width: tensor, padded: constexpr
) -> None:
    """Write x · scale · weight of one token; equals `renorm`. Program i has token i of contiguous
    `x` and `out` [tokens, width]; `scale` is fp32 [tokens], `weight` [width].
    """
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, padded)
    there = i < width
    wide = tl.load(x + token * width + i, there, 0.0).to(tl.float32)
    own = tl.load(weight + i, there, 0.0).to(tl.float32)
    tl.store(out + token * width + i, wide * tl.load(scale + token) * own, there)


@jit
def _swiglu(gate_up: tensor, n: tensor, i: tensor, there: tensor, block: constexpr) -> tensor:
    """Return silu(gate) · up of the chunks `n` of one token, as fp32 after rounding to the type of
    `gate_up`; `i` are the columns in a chunk of `chunk`, and masked elements are zero.
    """
    gate = tl.load(gate_up + n * 2 * block + i, there, 0.0).to(tl.float32)
    up = tl.load(gate_up + n * 2 * block + block + i, there, 0.0).to(tl.float32)
    return (gate * tl.sigmoid(gate) * up).to(gate_up.dtype.element_ty).to(tl.float32)


@jit
def _gated(
    gate_up: tensor,
    values: tensor,
    scale: tensor,
    width: tensor,
    largest: constexpr,
    tiny: constexpr,
    block: constexpr,
    each: constexpr,
    count: constexpr,
) -> None:
    """Compute the SwiGLU of one token and quantize it to fp8; equals `swiglu_fp8`.

    Program i has token i. `gate_up` is contiguous [tokens, 2 · width] in alternating chunks of
    `chunk` columns, `values` fp8 [tokens, width], `scale` fp32 [tokens]. A row takes `tiles` tiles
    of `chunks` chunks: computed once if one tile holds it, otherwise twice.
    """
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, block)[None, :]
    gate_up += row * 2 * width
    values += row * width
    if count == 1:
        n = tl.arange(0, each)[:, None]
        there = (n * block < width) & (i < block)
        v = _swiglu(gate_up, n, i, there, block)
        most = tl.maximum(tl.max(tl.max(tl.abs(v), 1), 0), tiny)
        tl.store(values + n * block + i, (v * (largest / most)).to(values.dtype.element_ty), there)
    else:
        high = tl.zeros([each, block], tl.float32)
        for c in range(count):
            n = c * each + tl.arange(0, each)[:, None]
            there = (n * block < width) & (i < block)
            high = tl.maximum(high, tl.abs(_swiglu(gate_up, n, i, there, block)))
        most = tl.maximum(tl.max(tl.max(high, 1), 0), tiny)
        for c in range(count):
            n = c * each + tl.arange(0, each)[:, None]
            there = (n * block < width) & (i < block)
            v = _swiglu(gate_up, n, i, there, block)
            tl.store(
                values + n * block + i, (v * (largest / most)).to(values.dtype.element_ty), there
            )
    tl.store(scale + row, most / largest)


@jit
def _gated_backward(
    gate_up: tensor,
    grad: tensor,
    back: tensor,
    wide: tensor,
    values: tensor,
    scale: tensor,
    width: tensor,
    largest: constexpr,
    tiny: constexpr,
    block: constexpr,
    each: constexpr,
    count: constexpr,
) -> None:
    """Compute the gradient of `gate_up` and the SwiGLU of one token, and quantize the gradient to
    fp8; equals `swiglu_backward_fp8`.

    Program i has token i. `gate_up`, `back` (its gradient) and `values` (that in fp8) are
    contiguous [tokens, 2 · width] in alternating chunks of `chunk` columns, `grad` (of the SwiGLU)
    and `activated` (the SwiGLU) [tokens, width], `scale` fp32 [tokens]. The gradient is written in
    `tiles` tiles of `chunks` chunks, and read again once the row's largest magnitude is known.
    """
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, block)[None, :]
    gate_up += row * 2 * width
    back += row * 2 * width
    values += row * 2 * width
    grad += row * width
    wide += row * width
    high = tl.zeros([each, block], tl.float32)
    for c in range(count):
        n = c * each + tl.arange(0, each)[:, None]
        there = (n * block < width) & (i < block)
        gate = tl.load(gate_up + n * 2 * block + i, there, 0.0).to(tl.float32)
        up = tl.load(gate_up + n * 2 * block + block + i, there, 0.0).to(tl.float32)
        g = tl.load(grad + n * block + i, there, 0.0).to(tl.float32)
        share = tl.sigmoid(gate)
        silu = gate * share
        tl.store(wide + n * block + i, silu * up, there)
        of_gate = (g * up * (share + silu * (1 - share))).to(back.dtype.element_ty)
        of_up = (g * silu).to(back.dtype.element_ty)
        tl.store(back + n * 2 * block + i, of_gate, there)
        tl.store(back + n * 2 * block + block + i, of_up, there)
        high = tl.maximum(
            high, tl.maximum(tl.abs(of_gate.to(tl.float32)), tl.abs(of_up.to(tl.float32)))
        )
    most = tl.maximum(tl.max(tl.max(high, 1), 0), tiny)
    tl.debug_barrier()  # `back` is read below, also where other threads wrote it
    j = tl.arange(0, 2 * block)[None, :]
    for c in range(count):
        n = c * each + tl.arange(0, each)[:, None]
        there = (n * block < width) & (j < 2 * block)
        v = tl.load(back + n * 2 * block + j, there, 0.0).to(tl.float32)
        tl.store(
            values + n * 2 * block + j, (v * (largest / most)).to(values.dtype.element_ty), there
        )
    tl.store(scale + row, most / largest)
