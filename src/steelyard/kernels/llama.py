"""What stands between a block's matmuls and its gradients, each in one pass over memory, where Triton is at hand.

A compiler that is given the gradients as torch writes them computes both sides of every concatenation and keeps one: that of
the rotation then takes five times as long as its bytes, that of SwiGLU twice. The layouts are those of models/llama.py; all is
computed in fp32. The plain meaning of every function here is in fused.py under the same name.
"""

import torch
from torch import Tensor

from steelyard.kernels.jit import constexpr, jit, tensor, tl

NUMBERS = 1024  # that a program reads at once of one operand
PARTS = 528  # sums of a norm's weight gradient, one a program: a few for each multiprocessor of a large device


def add_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    tokens, width = x.shape
    out, normed = torch.empty_like(x), torch.empty_like(x)
    scale = x.new_empty(tokens, 1, dtype=torch.float32)
    _add_norm[(tokens,)](x.contiguous(), delta.contiguous(), weight, out, normed, scale, eps, width, _up(width), num_warps=8)
    return out, normed, scale


def add_norm_backward(x: Tensor, scale: Tensor, weight: Tensor, more: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    tokens, width = x.shape
    back = torch.empty_like(x)
    parts = x.new_empty(min(tokens, PARTS), width, dtype=torch.float32)
    given = (x, scale, weight, more.contiguous(), grad.contiguous())
    _add_norm_backward[(len(parts),)](*given, back, parts, tokens, width, _up(width), num_warps=8)
    return back, parts.sum(0).to(weight.dtype)


def split(qkv: Tensor, cos: Tensor, sin: Tensor, queries: int) -> tuple[Tensor, Tensor, Tensor]:
    tokens, dim = len(qkv), 2 * cos.shape[-1]
    groups = qkv.shape[1] // ((queries + 2) * dim)
    q = qkv.new_empty(tokens, groups * queries, dim)
    k, v = (qkv.new_empty(tokens, groups, dim) for _ in range(2))
    _launch_turn(qkv, q, k, v, cos, sin, True)
    return q, k, v


def join(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    out = k.new_empty(len(k), q[0].numel() + 2 * k[0].numel())
    _launch_turn(out, q, k, v, cos, sin, False)
    return out


def _launch_turn(qkv: Tensor, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, forth: bool) -> None:
    tokens, groups, dim = k.shape
    half = dim // 2
    rows = max(1, NUMBERS // _up(half))
    grid = (tokens, _programs(groups, rows))
    _turn[grid](qkv, q, k, v, cos, sin, groups, forth, q.shape[1] // groups, half, _up(half), rows)


def gated(gate_up: Tensor, block: int) -> Tensor:
    out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    _gated[(_programs(out.numel(), NUMBERS),)](gate_up, out, out.numel() // block, block, NUMBERS // block)
    return out


def gated_backward(gate_up: Tensor, grad: Tensor, block: int) -> tuple[Tensor, Tensor]:
    grad = grad.contiguous()
    back, wide = torch.empty_like(gate_up), torch.empty_like(grad)
    grid = (_programs(grad.numel(), NUMBERS),)
    _gated_backward[grid](gate_up, grad, back, wide, grad.numel() // block, block, NUMBERS // block)
    return back, wide


def _up(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _programs(number: int, each: int) -> int:
    return -(-number // each)


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
    total = tl.load(x + at, there, 0.0).to(tl.float32) + tl.load(delta + at, there, 0.0).to(tl.float32)
    kept = total.to(out.dtype.element_ty)
    tl.store(out + at, kept, there)
    wide = kept.to(tl.float32)
    size = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    tl.store(scale + token, size)
    tl.store(normed + at, wide * size * tl.load(weight + i, there, 0.0).to(tl.float32), there)


@jit
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


@jit
def _turn(
    qkv: tensor,
    q: tensor,
    k: tensor,
    v: tensor,
    cos: tensor,
    sin: tensor,
    groups: tensor,
    forth: constexpr,
    queries: constexpr,
    half: constexpr,
    padded: constexpr,
    rows: constexpr,
) -> None:
    """From qkv to queries, keys and values, forth, or back: a token's heads of some groups."""
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * rows + tl.arange(0, rows)[:, None]
    i = tl.arange(0, padded)[None, :]
    there = (group < groups) & (i < half)
    c = tl.load(cos + token * half + i, i < half).to(tl.float32)
    s = tl.load(sin + token * half + i, i < half).to(tl.float32)
    head = token * groups + group
    for part in tl.static_range(queries + 2):
        joined = qkv + (head * (queries + 2) + part) * 2 * half + i
        if part < queries:
            apart = q + (head * queries + part) * 2 * half + i
        elif part == queries:
            apart = k + head * 2 * half + i
        else:
            apart = v + head * 2 * half + i
        source = joined if forth else apart
        target = apart if forth else joined
        a = tl.load(source, there).to(tl.float32)
        b = tl.load(source + half, there).to(tl.float32)
        if part > queries:  # a value
            x, y = a, b
        elif forth:
            x, y = a * c - b * s, b * c + a * s
        else:
            x, y = a * c + b * s, b * c - a * s
        tl.store(target, x, there)
        tl.store(target + half, y, there)


@jit
def _gated(gate_up: tensor, out: tensor, count: tensor, block: constexpr, blocks: constexpr) -> None:
    n = tl.program_id(0).to(tl.int64) * blocks + tl.arange(0, blocks)[:, None]
    i = tl.arange(0, block)[None, :]
    there = (n < count) & (i < block)
    gate = tl.load(gate_up + n * 2 * block + i, there).to(tl.float32)
    up = tl.load(gate_up + n * 2 * block + block + i, there).to(tl.float32)
    tl.store(out + n * block + i, gate * tl.sigmoid(gate) * up, there)


@jit
def _gated_backward(
    gate_up: tensor, grad: tensor, back: tensor, wide: tensor, count: tensor, block: constexpr, blocks: constexpr
) -> None:
    n = tl.program_id(0).to(tl.int64) * blocks + tl.arange(0, blocks)[:, None]
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
