"""What stands between the matmuls of a block, made in fp8 by the kernel that makes it.

Values are rounded to the type of the stream before they are scaled, so that a fused kernel gives
what the same steps one after the other give.
"""

import torch
from torch import Tensor

from steelyard.kernels import add_norm, swiglu
from steelyard.kernels.fp8 import E4M3, LARGEST, ROW, TINY, Fp8, empty, rows, warps
from steelyard.kernels.jit import blocks, constexpr, jit, power_of_2, tensor, tl

BACK = 4096  # numbers of gate that a program of SwiGLU's gradient reads at once


def add_norm_fp8(
    x: Tensor, delta: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Fp8, Tensor]:
    """x + delta, its RMSNorm in fp8, and what that was scaled with by the norm."""
    x, normed, scale = add_norm.add_norm(x, delta, weight, eps)
    return x, rows(normed), scale


def renorm(x: Tensor, scale: Tensor, weight: Tensor) -> Tensor:
    """The norm again, of what it was made of."""
    return (x.float() * scale * weight).to(x.dtype)


def gated_fp8(gate_up: Tensor, block: int) -> Fp8:
    """SwiGLU of gate and up in alternating blocks, in fp8."""
    return rows(swiglu.gated(gate_up, block))


def gated_backward_fp8(
    gate_up: Tensor, grad: Tensor, block: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Fp8]:
    """The gradient of gate and up, their SwiGLU again, and that gradient in fp8."""
    back, wide = swiglu.gated_backward(gate_up, grad, block)
    return back, wide, rows(back, dtype)


def triton_add_norm_fp8(
    x: Tensor, delta: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Fp8, Tensor]:
    tokens, width = x.shape
    out, made = torch.empty_like(x), empty(tokens, width, E4M3, x.device)
    norm = x.new_empty(tokens, 1, dtype=torch.float32)
    padded = power_of_2(width)
    given = (x.contiguous(), delta.contiguous(), weight, out, *made, norm, eps, width)
    _add_norm[(tokens,)](*given, LARGEST[E4M3], TINY, padded, num_warps=warps(padded))
    return out, made, norm


def triton_renorm(x: Tensor, scale: Tensor, weight: Tensor) -> Tensor:
    out = torch.empty_like(x)
    padded = power_of_2(x.shape[1])
    _renorm[(len(x),)](x, scale, weight, out, x.shape[1], padded, num_warps=warps(padded))
    return out


def triton_gated_fp8(gate_up: Tensor, block: int) -> Fp8:
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    made = empty(tokens, width, E4M3, gate_up.device)
    each = min(ROW[0], power_of_2(width))
    sizes = (LARGEST[E4M3], TINY, block, each // block, blocks(width, each))
    _gated[(tokens,)](gate_up, *made, width, *sizes, num_warps=warps(each))
    return made


def triton_gated_backward_fp8(
    gate_up: Tensor, grad: Tensor, block: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Fp8]:
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
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, padded)
    there = i < width
    wide = tl.load(x + token * width + i, there, 0.0).to(tl.float32)
    own = tl.load(weight + i, there, 0.0).to(tl.float32)
    tl.store(out + token * width + i, wide * tl.load(scale + token) * own, there)


@jit
def _swiglu(gate_up: tensor, n: tensor, i: tensor, there: tensor, block: constexpr) -> tensor:
    """In the type of its operands, as fp32."""
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
    """A row that fits is computed once."""
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
    """The gradient is written, and read again once the largest of the row is known."""
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
    tl.debug_barrier()  # what other threads of the program wrote
    j = tl.arange(0, 2 * block)[None, :]
    for c in range(count):
        n = c * each + tl.arange(0, each)[:, None]
        there = (n * block < width) & (j < 2 * block)
        v = tl.load(back + n * 2 * block + j, there, 0.0).to(tl.float32)
        tl.store(
            values + n * 2 * block + j, (v * (largest / most)).to(values.dtype.element_ty), there
        )
    tl.store(scale + row, most / largest)
