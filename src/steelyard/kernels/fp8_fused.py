"""Operations between a transformer block's matmuls (add and RMSNorm, SwiGLU, SwiGLU's gradient)
whose results are written in fp8, for the matmul that follows.

Values are rounded to the type of the residual stream before they are quantized, so that a fused
kernel gives what the separate steps give one after the other. Called by models/llama_fp8.py.
"""

import torch
from torch import Tensor

from steelyard.kernels import add_norm, swiglu
from steelyard.kernels.fp8 import (
    E4M3,
    FP8_MAX,
    ROW,
    TINY,
    Fp8Matrix,
    count_warps,
    make_empty_fp8,
    quantize_rows,
)
from steelyard.kernels.jit import constexpr, count_tiles, jit, next_power_of_2, tensor, tl

BACKWARD_TILE = 4096  # gate columns that a program of SwiGLU's gradient loads at a time


def add_norm_fp8(
    x: Tensor, delta: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Fp8Matrix, Tensor]:
    """Return x + delta [tokens, width], its RMSNorm times `weight` in fp8 (E4M3, a scale per
    token), and the norm's factors 1 / sqrt(mean square + eps), [tokens, 1]; `add_norm` followed by
    `quantize_rows`.
    """
    x, normed, scale = add_norm.add_norm(x, delta, weight, eps)
    return x, quantize_rows(normed), scale


def renorm(x: Tensor, scale: Tensor, weight: Tensor) -> Tensor:
    """Return x · scale · weight in the type of x: the RMSNorm computed again for the backward pass,
    from the sum `x` [tokens, width] and the factors `scale` [tokens, 1] that `add_norm_fp8`
    returned.
    """
    return (x.float() * scale * weight).to(x.dtype)


def swiglu_fp8(gate_up: Tensor, chunk: int) -> Fp8Matrix:
    """Return silu(gate) · up, [tokens, width], in fp8 (E4M3, a scale per token), of `gate_up`
    [tokens, 2 · width] in alternating chunks of `chunk` columns; `swiglu_interleaved` followed by
    `quantize_rows`.
    """
    return quantize_rows(swiglu.swiglu_interleaved(gate_up, chunk))


def swiglu_backward_fp8(
    gate_up: Tensor, grad: Tensor, chunk: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Fp8Matrix]:
    """Return the gradient of `gate_up` [tokens, 2 · width], the SwiGLU [tokens, width] computed
    again, and the gradient once more in fp8 of type `dtype` with a scale per token.

    `grad` is the gradient of the SwiGLU, [tokens, width]; gate and up are in alternating chunks of
    `chunk` columns.
    """
    back, activated = swiglu.swiglu_interleaved_backward(gate_up, grad, chunk)
    return back, activated, quantize_rows(back, dtype)


def triton_add_norm_fp8(
    x: Tensor, delta: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Fp8Matrix, Tensor]:
    """Compute `add_norm_fp8` by one Triton kernel, a program per token; the factors returned are
    fp32 [tokens, 1].
    """
    tokens, width = x.shape
    out, quantized = torch.empty_like(x), make_empty_fp8(tokens, width, E4M3, x.device)
    norm = x.new_empty(tokens, 1, dtype=torch.float32)
    padded = next_power_of_2(width)
    inputs = (x.contiguous(), delta.contiguous(), weight, out, *quantized, norm, eps, width)
    _add_norm_fp8[(tokens,)](*inputs, FP8_MAX[E4M3], TINY, padded, num_warps=count_warps(padded))
    return out, quantized, norm


def triton_renorm(x: Tensor, scale: Tensor, weight: Tensor) -> Tensor:
    """Compute `renorm` by one kernel, a program per token. `x` is contiguous."""
    out = torch.empty_like(x)
    padded = next_power_of_2(x.shape[1])
    _renorm[(len(x),)](x, scale, weight, out, x.shape[1], padded, num_warps=count_warps(padded))
    return out


def triton_swiglu_fp8(gate_up: Tensor, chunk: int) -> Fp8Matrix:
    """Compute `swiglu_fp8` by one Triton kernel, a program per token. `gate_up` is contiguous, and
    `chunk` a power of two.
    """
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    quantized = make_empty_fp8(tokens, width, E4M3, gate_up.device)
    tile = min(ROW[0], next_power_of_2(width))
    sizes = (FP8_MAX[E4M3], TINY, chunk, tile // chunk, count_tiles(width, tile))
    _swiglu_fp8[(tokens,)](gate_up, *quantized, width, *sizes, num_warps=count_warps(tile))
    return quantized


def triton_swiglu_backward_fp8(
    gate_up: Tensor, grad: Tensor, chunk: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Fp8Matrix]:
    """Compute `swiglu_backward_fp8` by one Triton kernel, a program per token. `gate_up` is
    contiguous, and `chunk` a power of two.
    """
    grad = grad.contiguous()
    tokens, width = grad.shape
    back, activated = torch.empty_like(gate_up), torch.empty_like(grad)
    quantized = make_empty_fp8(tokens, 2 * width, dtype, grad.device)
    tile = min(BACKWARD_TILE, next_power_of_2(width))
    sizes = (FP8_MAX[dtype], TINY, chunk, tile // chunk, count_tiles(width, tile))
    _swiglu_backward_fp8[(tokens,)](
        gate_up, grad, back, activated, *quantized, width, *sizes, num_warps=count_warps(tile)
    )
    return back, activated, quantized


@jit
def _add_norm_fp8(
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
    mask = i < width
    offsets = token * width + i
    total = tl.load(x + offsets, mask, 0.0).to(tl.float32) + tl.load(delta + offsets, mask, 0.0).to(
        tl.float32
    )
    rounded = total.to(out.dtype.element_ty)
    tl.store(out + offsets, rounded, mask)
    wide = rounded.to(tl.float32)
    factor = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    tl.store(norm + token, factor)
    normed = wide * factor * tl.load(weight + i, mask, 0.0).to(tl.float32)
    normed = normed.to(out.dtype.element_ty).to(tl.float32)
    row_max = tl.maximum(tl.max(tl.abs(normed), 0), tiny)
    tl.store(values + offsets, (normed * (largest / row_max)).to(values.dtype.element_ty), mask)
    tl.store(scale + token, row_max / largest)


@jit
def _renorm(
    x: tensor, scale: tensor, weight: tensor, out: tensor, width: tensor, padded: constexpr
) -> None:
    """Write x · scale · weight of one token; equals `renorm`. Program i has token i of contiguous
    `x` and `out` [tokens, width]; `scale` is fp32 [tokens], `weight` [width].
    """
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, padded)
    mask = i < width
    wide = tl.load(x + token * width + i, mask, 0.0).to(tl.float32)
    norm_weight = tl.load(weight + i, mask, 0.0).to(tl.float32)
    tl.store(out + token * width + i, wide * tl.load(scale + token) * norm_weight, mask)


@jit
def _load_swiglu(gate_up: tensor, n: tensor, i: tensor, mask: tensor, chunk: constexpr) -> tensor:
    """Return silu(gate) · up, [len(n), chunk], of the chunks `n` [., 1] of one token, as fp32 after
    rounding to the type of `gate_up`.

    `gate_up` points to the token's first column; chunk n has its gate columns at 2 · n · chunk and
    its up columns behind them. `i` [1, .] are the columns in a chunk; masked elements are zero.
    """
    gate = tl.load(gate_up + n * 2 * chunk + i, mask, 0.0).to(tl.float32)
    up = tl.load(gate_up + n * 2 * chunk + chunk + i, mask, 0.0).to(tl.float32)
    return (gate * tl.sigmoid(gate) * up).to(gate_up.dtype.element_ty).to(tl.float32)


@jit
def _swiglu_fp8(
    gate_up: tensor,
    values: tensor,
    scale: tensor,
    width: tensor,
    largest: constexpr,
    tiny: constexpr,
    chunk: constexpr,
    chunks: constexpr,
    tiles: constexpr,
) -> None:
    """Compute the SwiGLU of one token and quantize it to fp8; equals `swiglu_fp8`.

    Program i has token i. `gate_up` is contiguous [tokens, 2 · width] in alternating chunks of
    `chunk` columns, `values` fp8 [tokens, width], `scale` fp32 [tokens]. A row takes `tiles` tiles
    of `chunks` chunks: computed once if one tile holds it, otherwise twice.
    """
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, chunk)[None, :]
    gate_up += row * 2 * width
    values += row * width
    if tiles == 1:
        n = tl.arange(0, chunks)[:, None]
        mask = (n * chunk < width) & (i < chunk)
        v = _load_swiglu(gate_up, n, i, mask, chunk)
        row_max = tl.maximum(tl.max(tl.max(tl.abs(v), 1), 0), tiny)
        tl.store(
            values + n * chunk + i, (v * (largest / row_max)).to(values.dtype.element_ty), mask
        )
    else:
        high = tl.zeros([chunks, chunk], tl.float32)
        for c in range(tiles):
            n = c * chunks + tl.arange(0, chunks)[:, None]
            mask = (n * chunk < width) & (i < chunk)
            high = tl.maximum(high, tl.abs(_load_swiglu(gate_up, n, i, mask, chunk)))
        row_max = tl.maximum(tl.max(tl.max(high, 1), 0), tiny)
        for c in range(tiles):
            n = c * chunks + tl.arange(0, chunks)[:, None]
            mask = (n * chunk < width) & (i < chunk)
            v = _load_swiglu(gate_up, n, i, mask, chunk)
            tl.store(
                values + n * chunk + i, (v * (largest / row_max)).to(values.dtype.element_ty), mask
            )
    tl.store(scale + row, row_max / largest)


@jit
def _swiglu_backward_fp8(
    gate_up: tensor,
    grad: tensor,
    back: tensor,
    activated: tensor,
    values: tensor,
    scale: tensor,
    width: tensor,
    largest: constexpr,
    tiny: constexpr,
    chunk: constexpr,
    chunks: constexpr,
    tiles: constexpr,
) -> None:
    """Compute the gradient of `gate_up` and the SwiGLU of one token, and quantize the gradient to
    fp8; equals `swiglu_backward_fp8`.

    Program i has token i. `gate_up`, `back` (its gradient) and `values` (that in fp8) are
    contiguous [tokens, 2 · width] in alternating chunks of `chunk` columns, `grad` (of the SwiGLU)
    and `activated` (the SwiGLU) [tokens, width], `scale` fp32 [tokens]. The gradient is written in
    `tiles` tiles of `chunks` chunks, and read again once the row's largest magnitude is known.
    """
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, chunk)[None, :]
    gate_up += row * 2 * width
    back += row * 2 * width
    values += row * 2 * width
    grad += row * width
    activated += row * width
    high = tl.zeros([chunks, chunk], tl.float32)
    for c in range(tiles):
        n = c * chunks + tl.arange(0, chunks)[:, None]
        mask = (n * chunk < width) & (i < chunk)
        gate = tl.load(gate_up + n * 2 * chunk + i, mask, 0.0).to(tl.float32)
        up = tl.load(gate_up + n * 2 * chunk + chunk + i, mask, 0.0).to(tl.float32)
        g = tl.load(grad + n * chunk + i, mask, 0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        tl.store(activated + n * chunk + i, silu * up, mask)
        gate_grad = (g * up * (sigmoid + silu * (1 - sigmoid))).to(back.dtype.element_ty)
        up_grad = (g * silu).to(back.dtype.element_ty)
        tl.store(back + n * 2 * chunk + i, gate_grad, mask)
        tl.store(back + n * 2 * chunk + chunk + i, up_grad, mask)
        high = tl.maximum(
            high, tl.maximum(tl.abs(gate_grad.to(tl.float32)), tl.abs(up_grad.to(tl.float32)))
        )
    row_max = tl.maximum(tl.max(tl.max(high, 1), 0), tiny)
    tl.debug_barrier()  # `back` is read below, also where other threads wrote it
    j = tl.arange(0, 2 * chunk)[None, :]
    for c in range(tiles):
        n = c * chunks + tl.arange(0, chunks)[:, None]
        mask = (n * chunk < width) & (j < 2 * chunk)
        v = tl.load(back + n * 2 * chunk + j, mask, 0.0).to(tl.float32)
        tl.store(
            values + n * 2 * chunk + j, (v * (largest / row_max)).to(values.dtype.element_ty), mask
        )
    tl.store(scale + row, row_max / largest)
