"""What stands between a GLM's matmuls, each in one pass over memory, where Triton is at hand; all
is computed in fp32.

Gradients of biases are column sums of what these kernels write anyway: every program sums its own
rows, and `_reduce_parts` adds those sums to the gradient. What is dropped is a hash of a seed and
the place, hashed again backward: no mask is kept. The seed is on the device, so that a recorded
graph drops other numbers whenever it is replayed. Numbers of tokens are not compiled in:
micro-batches have different ones.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from steelyard.kernels.jit import blocks, constexpr, power_of_2, tensor, tl, triton, varied
from steelyard.kernels.pair_dropout import kept, keys_of, of_keys, of_queries

# programs that sum columns: as many as a large device runs at once, six on each multiprocessor
PARTS = 792
# Of GELU's gradient: columns of a wide row and rows that a program reads at once, its warps, and
# how many programs.
GELU = (512, 1, 4, 1584)


def plain_dropout_add_norm(eps: float, dropout: float) -> Callable[..., tuple[Tensor, Tensor]]:
    """The residual stream and its norm, as they are written, with numbers that a compiler takes for
    constants.
    """

    def run(x: Tensor, delta: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        x = x + F.dropout(delta, dropout)
        return x, F.layer_norm(x, (x.shape[-1],), weight, bias, eps)

    def still(x: Tensor, delta: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        x = x + delta
        return x, F.layer_norm(x, (x.shape[-1],), weight, bias, eps)

    return run if dropout else still


@dataclass(frozen=True)
class Dropout:
    """What is dropped, by a seed and the place in the model: two places drop different numbers."""

    share: float
    seed: Tensor  # int64 [1], on the device; the same until the backward pass is over
    place: int

    @property
    def below(self) -> int:
        """The share as a number of 31 bit: hashes below it are dropped."""
        return int(self.share * (1 << 31))


def dropout_add_norm(
    x: Tensor, delta: Tensor, weight: Tensor, bias: Tensor, eps: float, dropout: Dropout
) -> tuple[Tensor, Tensor, Tensor]:
    """The residual stream, its norm, and each row's mean and scale."""
    x, delta = x.contiguous(), delta.contiguous()
    tokens, width = x.shape
    out, normed = torch.empty_like(x), torch.empty_like(x)
    stats = x.new_empty(tokens, 2, dtype=torch.float32)
    given = (
        x,
        delta,
        weight,
        bias,
        out,
        normed,
        stats,
        dropout.seed,
        dropout.place,
        dropout.share,
        dropout.below,
        eps,
    )
    _dropout_add_norm[(tokens,)](*given, dropout.share > 0, width, power_of_2(width), num_warps=4)
    return out, normed, stats


def dropout_add_norm_backward(
    saved: tuple[Tensor, Tensor, Tensor],
    more: Tensor | None,
    grad: Tensor,
    accumulators: tuple[Tensor, Tensor, Tensor | None],
    dropout: Dropout,
    stays: bool,
) -> tuple[Tensor | None, Tensor]:
    """The gradients of x, if it `stays`, and of delta, from those of the sum (`more`) and of its
    norm. Those of the norm's weight and bias, and of the bias that was added to delta, are added to
    `accumulators`."""
    x, stats, weight = saved
    tokens, width = x.shape
    stays = stays or not dropout.share
    change = torch.empty_like(x) if dropout.share else None
    back = torch.empty_like(x) if stays else None
    sums = 2 if accumulators[2] is None else 3
    parts = x.new_empty(min(tokens, PARTS), sums, width, dtype=torch.float32)
    grad = grad.contiguous()
    given = (
        x,
        stats,
        weight,
        grad if more is None else more.contiguous(),
        grad,
        x if back is None else back,
    )
    _dropout_add_norm_backward[(len(parts),)](
        *given, x if change is None else change, parts, tokens, dropout.seed, dropout.place, dropout.share, dropout.below,
        dropout.share > 0, more is not None, stays, sums, width, power_of_2(width), num_warps=4,
    )  # fmt: skip
    reduce_parts(parts, [one for one in accumulators if one is not None])
    return (back, change) if change is not None else (back, back)  # type: ignore[return-value]


def reduce_parts(parts: Tensor, accumulators: list[Tensor]) -> None:
    """Add the sums over `parts` [programs, places, width] to as many places, three at most."""
    programs, _, width = parts.shape
    first, second, third = (accumulators[min(i, len(accumulators) - 1)] for i in range(3))
    _reduce_parts[(triton.cdiv(width, 16), len(accumulators))](
        parts, first, second, third, programs, len(accumulators), width, num_warps=8
    )


def gelu(x: Tensor) -> Tensor:
    """The tanh form."""
    x = x.contiguous()
    out = torch.empty_like(x)
    tokens, width = x.shape
    _gelu[(tokens,)](x, out, width, power_of_2(width), num_warps=4)
    return out


def gelu_backward(x: Tensor, grad: Tensor, accumulator: Tensor) -> Tensor:
    """Of the tanh form; the column sum, a bias's gradient, is added to `accumulator`."""
    tokens, width = x.shape
    columns, rows, warps, programs = GELU
    wide = min(columns, power_of_2(width))
    columns = blocks(width, wide)
    parts = x.new_empty(
        min(blocks(tokens, rows), max(1, programs // columns)), 1, width, dtype=torch.float32
    )
    back = torch.empty_like(x)
    _gelu_backward[(len(parts), columns)](
        x, grad.contiguous(), back, parts, tokens, width, wide, rows, num_warps=warps
    )
    reduce_parts(parts, [accumulator])
    return back


@varied("place", "below")
def _dropout_add_norm(
    x: tensor,
    delta: tensor,
    weight: tensor,
    bias: tensor,
    out: tensor,
    normed: tensor,
    stats: tensor,
    seed: tensor,
    place: tensor,
    dropout: tensor,
    below: tensor,
    eps: tensor,
    dropped: constexpr,
    width: constexpr,
    padded: constexpr,
) -> None:
    token = tl.program_id(0)
    i = tl.arange(0, padded)
    there = i < width
    at = token.to(tl.int64) * width + i
    change = tl.load(delta + at, there, 0.0).to(tl.float32)
    if dropped:
        low, high = keys_of(seed, place)
        change = tl.where(
            kept(of_queries(token, 0, 1, low), of_keys(i, high), below), change / (1 - dropout), 0.0
        )
    total = (tl.load(x + at, there, 0.0).to(tl.float32) + change).to(out.dtype.element_ty)
    tl.store(out + at, total, there)
    wide = total.to(tl.float32)
    mean = tl.sum(wide, 0) / width
    centred = tl.where(there, wide - mean, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 0) / width + eps)
    tl.store(stats + 2 * token, mean)
    tl.store(stats + 2 * token + 1, scale)
    slope = tl.load(weight + i, there, 0.0).to(tl.float32)
    tl.store(
        normed + at, centred * scale * slope + tl.load(bias + i, there, 0.0).to(tl.float32), there
    )


@varied("tokens", "place", "below")
def _dropout_add_norm_backward(
    x: tensor,
    stats: tensor,
    weight: tensor,
    more: tensor,
    grad: tensor,
    back: tensor,
    change: tensor,
    parts: tensor,
    tokens: tensor,
    seed: tensor,
    place: tensor,
    dropout: tensor,
    below: tensor,
    dropped: constexpr,
    ongoing: constexpr,
    stays: constexpr,
    sums: constexpr,
    width: constexpr,
    padded: constexpr,
) -> None:
    i = tl.arange(0, padded)
    there = i < width
    slope = tl.load(weight + i, there, 0.0).to(tl.float32)
    of_weight = tl.zeros([padded], tl.float32)
    of_bias = tl.zeros([padded], tl.float32)
    before = tl.zeros([padded], tl.float32)
    low, high = keys_of(seed, place)
    columns = of_keys(i, high)
    for token in range(tl.program_id(0), tokens, tl.num_programs(0)):
        at = tl.cast(token, tl.int64) * width + i
        mean, scale = tl.load(stats + 2 * token), tl.load(stats + 2 * token + 1)
        g = tl.load(grad + at, there, 0.0).to(tl.float32)
        unit = (tl.load(x + at, there, 0.0).to(tl.float32) - mean) * scale
        of_weight += g * unit
        of_bias += g
        # before the sums, which wait for all loads
        stream = tl.load(more + at, there & ongoing, 0.0).to(tl.float32)
        g = g * slope
        g = stream + scale * (g - tl.sum(g, 0) / width - unit * (tl.sum(g * unit, 0) / width))
        if stays:
            tl.store(back + at, g, there)
        if dropped:
            stays_on = kept(of_queries(tl.cast(token, tl.int32), 0, 1, low), columns, below)
            g = tl.where(stays_on, g / (1 - dropout), 0.0)
            tl.store(change + at, g, there)
        before += g
    at = tl.program_id(0).to(tl.int64) * sums * width + i
    tl.store(parts + at, of_weight, there)
    tl.store(parts + at + width, of_bias, there)
    if sums == 3:
        tl.store(parts + at + 2 * width, before, there)


@varied("programs")
def _reduce_parts(
    parts: tensor,
    first: tensor,
    second: tensor,
    third: tensor,
    programs: tensor,
    places: constexpr,
    width: constexpr,
) -> None:
    place = tl.program_id(1)
    i = tl.program_id(0) * 16 + tl.arange(0, 16)
    total = tl.zeros([16], tl.float32)
    for begin in range(0, programs, 256):
        row = begin + tl.arange(0, 256)[:, None]
        there = (row < programs) & (i[None, :] < width)
        total += tl.sum(tl.load(parts + (row * places + place) * width + i[None, :], there, 0.0), 0)
    kept = first + i
    if place == 1:
        kept = second + i
    if place == 2:
        kept = third + i
    tl.store(kept, tl.load(kept, i < width).to(tl.float32) + total, i < width)


@varied()
def _share(x: tensor) -> tensor:
    """Of x that GELU lets through, in its tanh form: a half of 1 + tanh(u) is the sigmoid of 2u."""
    return tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))  # 2 √(2/π)


@varied()
def _gelu(x: tensor, out: tensor, width: constexpr, padded: constexpr) -> None:
    i = tl.arange(0, padded)
    there = i < width
    at = tl.program_id(0).to(tl.int64) * width + i
    a = tl.load(x + at, there, 0.0).to(tl.float32)
    tl.store(out + at, a * _share(a), there)


@varied("tokens")
def _gelu_backward(
    x: tensor,
    grad: tensor,
    back: tensor,
    parts: tensor,
    tokens: tensor,
    width: constexpr,
    wide: constexpr,
    rows: constexpr,
) -> None:
    i = tl.program_id(1) * wide + tl.arange(0, wide)
    total = tl.zeros([wide], tl.float32)
    for begin in range(tl.program_id(0) * rows, tokens, tl.num_programs(0) * rows):
        token = begin + tl.arange(0, rows)
        there = (token < tokens)[:, None] & (i < width)[None, :]
        at = token.to(tl.int64)[:, None] * width + i[None, :]
        a = tl.load(x + at, there, 0.0).to(tl.float32)
        g = tl.load(grad + at, there, 0.0).to(tl.float32)
        share = _share(a)
        g = g * (share + a * share * (1 - share) * 1.5957691216057308 * (1 + 0.134145 * a * a))
        total += tl.sum(g, 0)
        tl.store(back + at, g, there)
    tl.store(parts + tl.program_id(0) * width + i, total, i < width)
