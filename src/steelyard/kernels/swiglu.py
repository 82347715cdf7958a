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

from steelyard.kernels.jit import constexpr, count_tiles, jit, tensor, tl

TILE = 1024  # elements of one operand that a program loads at a time


def swiglu_interleaved(gate_up: Tensor, chunk: int) -> Tensor:
    """Return silu(gate) · up, [tokens, width], of `gate_up` [tokens, 2 · width] in alternating
    chunks of `chunk` columns.
    """
    gate, up = gate_up.unflatten(-1, (-1, 2, chunk)).unbind(-2)  # type: ignore[no-untyped-call]
    out: Tensor = (F.silu(gate) * up).flatten(-2)
    return out


def swiglu_interleaved_backward(gate_up: Tensor, grad: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """Return the gradient of `gate_up`, laid out as it is, and the SwiGLU itself, computed again.

    `grad` is the gradient of the SwiGLU, [tokens, width].
    """
    gate, up = gate_up.unflatten(-1, (-1, 2, chunk)).unbind(-2)  # type: ignore[no-untyped-call]
    grad = grad.unflatten(-1, (-1, chunk))  # type: ignore[no-untyped-call]
    sigmoid = gate.sigmoid()
    silu = gate * sigmoid
    back = torch.stack((grad * up * (sigmoid + silu * (1 - sigmoid)), grad * silu), dim=-2)
    return back.flatten(1), (silu * up).flatten(-2)


def triton_swiglu_interleaved(gate_up: Tensor, chunk: int) -> Tensor:
    """Compute `swiglu_interleaved` by a kernel. `gate_up` is contiguous, and `chunk` a power of
    two.
    """
    out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    _swiglu[(count_tiles(out.numel(), TILE),)](
        gate_up, out, out.numel() // chunk, chunk, TILE // chunk
    )
    return out


def triton_swiglu_interleaved_backward(
    gate_up: Tensor, grad: Tensor, chunk: int
) -> tuple[Tensor, Tensor]:
    """Compute `swiglu_interleaved_backward` by a kernel. `gate_up` is contiguous, and `chunk` a
    power of two.
    """
    grad = grad.contiguous()
    back, activated = torch.empty_like(gate_up), torch.empty_like(grad)
    grid = (count_tiles(grad.numel(), TILE),)
    _swiglu_backward[grid](
        gate_up, grad, back, activated, grad.numel() // chunk, chunk, TILE // chunk
    )
    return back, activated


@jit
def _swiglu(
    gate_up: tensor, out: tensor, count: tensor, chunk: constexpr, chunks: constexpr
) -> None:
    """Write silu(gate) · up for `chunks` chunks of `chunk` columns; equals `swiglu_interleaved`.

    `gate_up` is contiguous [tokens, 2 · width] in alternating chunks, `out` contiguous [tokens,
    width] with `count` chunks in all. Program i has chunks i · chunks to (i + 1) · chunks, counted
    over all tokens.
    """
    n = tl.program_id(0).to(tl.int64) * chunks + tl.arange(0, chunks)[:, None]
    i = tl.arange(0, chunk)[None, :]
    mask = (n < count) & (i < chunk)
    gate = tl.load(gate_up + n * 2 * chunk + i, mask).to(tl.float32)
    up = tl.load(gate_up + n * 2 * chunk + chunk + i, mask).to(tl.float32)
    tl.store(out + n * chunk + i, gate * tl.sigmoid(gate) * up, mask)


@jit
def _swiglu_backward(
    gate_up: tensor,
    grad: tensor,
    back: tensor,
    activated: tensor,
    count: tensor,
    chunk: constexpr,
    chunks: constexpr,
) -> None:
    """Write the gradient of `gate_up` to `back` and silu(gate) · up to `activated`; equals
    `swiglu_interleaved_backward`.

        s = sigmoid(gate);  d gate = grad · up · (s + gate s (1 - s));  d up = grad · gate s

    `gate_up` and `back` are contiguous [tokens, 2 · width] in alternating chunks of `chunk`
    columns, `grad` and `activated` contiguous [tokens, width], with `count` chunks in all. Program
    i has chunks i · chunks to (i + 1) · chunks, counted over all tokens.
    """
    n = tl.program_id(0).to(tl.int64) * chunks + tl.arange(0, chunks)[:, None]
    i = tl.arange(0, chunk)[None, :]
    mask = (n < count) & (i < chunk)
    gate = tl.load(gate_up + n * 2 * chunk + i, mask).to(tl.float32)
    up = tl.load(gate_up + n * 2 * chunk + chunk + i, mask).to(tl.float32)
    g = tl.load(grad + n * chunk + i, mask).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    tl.store(activated + n * chunk + i, silu * up, mask)
    tl.store(back + n * 2 * chunk + i, g * up * (sigmoid + silu * (1 - sigmoid)), mask)
    tl.store(back + n * 2 * chunk + chunk + i, g * silu, mask)
