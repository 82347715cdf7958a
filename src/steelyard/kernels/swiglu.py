"""SwiGLU of gate and up, which are one matrix in alternating blocks of a few columns each, and its
gradient.

A compiler that is given the gradient as torch writes it computes both sides of a concatenation and
keeps one: it then takes twice as long as its bytes. The kernels compute in fp32.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from steelyard.kernels.jit import blocks, constexpr, jit, tensor, tl

NUMBERS = 1024  # that a program reads at once of one operand


def gated(gate_up: Tensor, block: int) -> Tensor:
    """SwiGLU of gate and up in alternating blocks."""
    gate, up = gate_up.unflatten(-1, (-1, 2, block)).unbind(-2)  # type: ignore[no-untyped-call]
    out: Tensor = (F.silu(gate) * up).flatten(-2)
    return out


def gated_backward(gate_up: Tensor, grad: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """The gradient of gate and up, and their SwiGLU again."""
    gate, up = gate_up.unflatten(-1, (-1, 2, block)).unbind(-2)  # type: ignore[no-untyped-call]
    grad = grad.unflatten(-1, (-1, block))  # type: ignore[no-untyped-call]
    share = gate.sigmoid()
    silu = gate * share
    back = torch.stack((grad * up * (share + silu * (1 - share)), grad * silu), dim=-2)
    return back.flatten(1), (silu * up).flatten(-2)


def triton_gated(gate_up: Tensor, block: int) -> Tensor:
    out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    _gated[(blocks(out.numel(), NUMBERS),)](
        gate_up, out, out.numel() // block, block, NUMBERS // block
    )
    return out


def triton_gated_backward(gate_up: Tensor, grad: Tensor, block: int) -> tuple[Tensor, Tensor]:
    grad = grad.contiguous()
    back, wide = torch.empty_like(gate_up), torch.empty_like(grad)
    grid = (blocks(grad.numel(), NUMBERS),)
    _gated_backward[grid](gate_up, grad, back, wide, grad.numel() // block, block, NUMBERS // block)
    return back, wide


@jit
def _gated(gate_up: tensor, out: tensor, count: tensor, block: constexpr, each: constexpr) -> None:
    n = tl.program_id(0).to(tl.int64) * each + tl.arange(0, each)[:, None]
    i = tl.arange(0, block)[None, :]
    there = (n < count) & (i < block)
    gate = tl.load(gate_up + n * 2 * block + i, there).to(tl.float32)
    up = tl.load(gate_up + n * 2 * block + block + i, there).to(tl.float32)
    tl.store(out + n * block + i, gate * tl.sigmoid(gate) * up, there)


@jit
def _gated_backward(
    gate_up: tensor,
    grad: tensor,
    back: tensor,
    wide: tensor,
    count: tensor,
    block: constexpr,
    each: constexpr,
) -> None:
    n = tl.program_id(0).to(tl.int64) * each + tl.arange(0, each)[:, None]
    i = tl.arange(0, block)[None, :]
    there = (n < count) & (i < block)
    gate = tl.load(gate_up + n * 2 * block + i, there).to(tl.float32)
    up = tl.load(gate_up + n * 2 * block + block + i, there).to(tl.float32)
    g = tl.load(grad + n * block + i, there).to(tl.float32)
    share = tl.sigmoid(gate)
    silu = gate * share
    tl.store(wide + n * block + i, silu * up, there)
    tl.store(back + n * 2 * block + i, g * up * (share + silu * (1 - share)), there)
    tl.store(back + n * 2 * block + block + i, g * silu, there)
