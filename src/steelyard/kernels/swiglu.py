"""SwiGLU and its gradient, of a matrix that holds gate and up in alternating chunks of a few
columns each.

In a row [g0 u0 g1 u1 ...] every g and u is `chunk` columns wide. Written in torch, the gradient is
a concatenation, for which a compiler computes both sides at every element and takes twice as long
as the bytes need; hence kernels. They compute in fp32. Called by models/llama.py, llama_fused.py
and kernels/fp8_fused.py.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from steelyard.kernels.jit import blocks, constexpr, jit, tensor, tl

NUMBERS = 1024  # elements of one operand that a program loads at a time


def gated(gate_up: Tensor, block: int) -> Tensor:
    """Return silu(gate) · up, [tokens, width], of `gate_up` [tokens, 2 · width] in alternating
    chunks of `chunk` columns.
    """
    gate, up = gate_up.unflatten(-1, (-1, 2, block)).unbind(-2)  # type: ignore[no-untyped-call]
    out: Tensor = (F.silu(gate) * up).flatten(-2)
    return out


def gated_backward(gate_up: Tensor, grad: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Return the gradient of `gate_up`, laid out as it is, and the SwiGLU itself, computed again.

    `grad` is the gradient of the SwiGLU, [tokens, width].
    """
    gate, up = gate_up.unflatten(-1, (-1, 2, block)).unbind(-2)  # type: ignore[no-untyped-call]
    grad = grad.unflatten(-1, (-1, block))  # type: ignore[no-untyped-call]
    share = gate.sigmoid()
    silu = gate * share
    back = torch.stack((grad * up * (share + silu * (1 - share)), grad * silu), dim=-2)
    return back.flatten(1), (silu * up).flatten(-2)


def triton_gated(gate_up: Tensor, block: int) -> Tensor:
    """Compute `swiglu_interleaved` by a kernel. `gate_up` is contiguous, and `chunk` a power of
    two.
    """
    out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    _gated[(blocks(out.numel(), NUMBERS),)](
        gate_up, out, out.numel() // block, block, NUMBERS // block
    )
    return out


def triton_gated_backward(gate_up: Tensor, grad: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Compute `swiglu_interleaved_backward` by a kernel. `gate_up` is contiguous, and `chunk` a
    power of two.
    """
    grad = grad.contiguous()
    back, wide = torch.empty_like(gate_up), torch.empty_like(grad)
    grid = (blocks(grad.numel(), NUMBERS),)
    _gated_backward[grid](gate_up, grad, back, wide, grad.numel() // block, block, NUMBERS // block)
    return back, wide


@jit
def _gated(gate_up: tensor, out: tensor, count: tensor, block: constexpr, each: constexpr) -> None:
    """Write silu(gate) · up for `chunks` chunks of `chunk` columns; equals `swiglu_interleaved`.

    `gate_up` is contiguous [tokens, 2 · width] in alternating chunks, `out` contiguous [tokens,
    width] with `count` chunks in all. Program i has chunks i · chunks to (i + 1) · chunks, counted
    over all tokens.
    """
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
    """Write the gradient of `gate_up` to `back` and silu(gate) · up to `activated`; equals
    `swiglu_interleaved_backward`.

        s = sigmoid(gate);  d gate = grad · up · (s + gate s (1 - s));  d up = grad · gate s

    `gate_up` and `back` are contiguous [tokens, 2 · width] in alternating chunks of `chunk`
    columns, `grad` and `activated` contiguous [tokens, width], with `count` chunks in all. Program
    i has chunks i · chunks to (i + 1) · chunks, counted over all tokens.
    """
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
