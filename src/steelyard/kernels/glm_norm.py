"""What stands between a GLM's matmuls, each in one pass over memory, where Triton is at hand; all is computed in fp32.

Gradients of biases are column sums of what these kernels write anyway: every program sums its own rows, and `_reduce_parts`
adds those sums to the gradient. What is dropped is drawn by a counter from a seed and drawn again backward: no mask is kept.
The seed is on the device, so that a recorded graph drops other numbers whenever it is replayed. Numbers of tokens are not
compiled in: micro-batches have different ones.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from steelyard.kernels.jit import constexpr, power_of_2, tensor, tl, triton, varied

PARTS = 792  # programs that sum columns: as many as a large device runs at once, six on each multiprocessor
COLUMNS = 1024  # of a wide row, that one program reads


def plain_dropout_add_norm(eps: float, dropout: float) -> Callable[..., tuple[Tensor, Tensor]]:
    """The residual stream and its norm, as they are written, with numbers that a compiler takes for constants."""

    def run(x: Tensor, delta: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        x = x + F.dropout(delta, dropout)
        return x, F.layer_norm(x, (x.shape[-1],), weight, bias, eps)

    def still(x: Tensor, delta: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        x = x + delta
        return x, F.layer_norm(x, (x.shape[-1],), weight, bias, eps)

    return run if dropout else still


@dataclass(frozen=True)
class Dropout:
    """What is dropped, drawn from a seed and the place in the model: two places drop different numbers."""

    share: float
    seed: Tensor  # int64 [1], on the device; the same until the backward pass is over
    place: int


def dropout_add_norm(
    x: Tensor, delta: Tensor, weight: Tensor, bias: Tensor, eps: float, dropout: Dropout
) -> tuple[Tensor, Tensor, Tensor]:
    """The residual stream, its norm, and each row's mean and scale."""
    x, delta = x.contiguous(), delta.contiguous()
    tokens, width = x.shape
    out, normed = torch.empty_like(x), torch.empty_like(x)
    stats = x.new_empty(tokens, 2, dtype=torch.float32)
    given = (x, delta, weight, bias, out, normed, stats, dropout.seed, dropout.place, dropout.share, eps)
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
    """The gradients of x, if it `stays`, and of delta, from those of the sum (`more`) and of its norm. Those of the norm's
    weight and bias, and of the bias that was added to delta, are added to `accumulators`."""
    x, stats, weight = saved
    tokens, width = x.shape
    stays = stays or not dropout.share
    change = torch.empty_like(x) if dropout.share else None
    back = torch.empty_like(x) if stays else None
    sums = 2 if accumulators[2] is None else 3
    parts = x.new_empty(min(tokens, PARTS), sums, width, dtype=torch.float32)
    grad = grad.contiguous()
    given = (x, stats, weight, grad if more is None else more.contiguous(), grad, x if back is None else back)
    _dropout_add_norm_backward[(len(parts),)](
        *given, x if change is None else change, parts, tokens, dropout.seed, dropout.place, dropout.share,
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


def gelu_backward(x: Tensor, grad: Tensor, accumulator: Tensor) -> Tensor:
    """Of the tanh form; the column sum, a bias's gradient, is added to `accumulator`."""
    tokens, width = x.shape
    wide = min(COLUMNS, power_of_2(width))
    columns = triton.cdiv(width, wide)
    parts = x.new_empty(min(tokens, max(1, PARTS // columns)), 1, width, dtype=torch.float32)
    back = torch.empty_like(x)
    _gelu_backward[(len(parts), columns)](x, grad.contiguous(), back, parts, tokens, width, wide, num_warps=4)
    reduce_parts(parts, [accumulator])
    return back


@varied()
def _kept(seed: tensor, place: tensor, token: tensor, dropout: tensor, padded: constexpr) -> tensor:
    """Which numbers of a row are not dropped. A draw gives four."""
    at = token * (padded // 4) + tl.arange(0, padded // 4)
    a, b, c, d = tl.rand4x(tl.load(seed) + place, at)
    return tl.reshape(tl.join(tl.join(a, b), tl.join(c, d)), [padded]) >= dropout


@varied("place")
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
        change = tl.where(_kept(seed, place, token, dropout, padded), change / (1 - dropout), 0.0)
    total = (tl.load(x + at, there, 0.0).to(tl.float32) + change).to(out.dtype.element_ty)
    tl.store(out + at, total, there)
    wide = total.to(tl.float32)
    mean = tl.sum(wide, 0) / width
    centred = tl.where(there, wide - mean, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 0) / width + eps)
    tl.store(stats + 2 * token, mean)
    tl.store(stats + 2 * token + 1, scale)
    slope = tl.load(weight + i, there, 0.0).to(tl.float32)
    tl.store(normed + at, centred * scale * slope + tl.load(bias + i, there, 0.0).to(tl.float32), there)


@varied("tokens", "place")
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
    for token in range(tl.program_id(0), tokens, tl.num_programs(0)):
        at = tl.cast(token, tl.int64) * width + i
        mean, scale = tl.load(stats + 2 * token), tl.load(stats + 2 * token + 1)
        g = tl.load(grad + at, there, 0.0).to(tl.float32)
        unit = (tl.load(x + at, there, 0.0).to(tl.float32) - mean) * scale
        of_weight += g * unit
        of_bias += g
        stream = tl.load(more + at, there & ongoing, 0.0).to(tl.float32)  # before the sums, which wait for all loads
        g = g * slope
        g = stream + scale * (g - tl.sum(g, 0) / width - unit * (tl.sum(g * unit, 0) / width))
        if stays:
            tl.store(back + at, g, there)
        if dropped:
            g = tl.where(_kept(seed, place, token, dropout, padded), g / (1 - dropout), 0.0)
            tl.store(change + at, g, there)
        before += g
    at = tl.program_id(0).to(tl.int64) * sums * width + i
    tl.store(parts + at, of_weight, there)
    tl.store(parts + at + width, of_bias, there)
    if sums == 3:
        tl.store(parts + at + 2 * width, before, there)


@varied("programs")
def _reduce_parts(
    parts: tensor, first: tensor, second: tensor, third: tensor, programs: tensor, places: constexpr, width: constexpr
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


@varied("tokens")
def _gelu_backward(
    x: tensor, grad: tensor, back: tensor, parts: tensor, tokens: tensor, width: constexpr, wide: constexpr
) -> None:
    i = tl.program_id(1) * wide + tl.arange(0, wide)
    there = i < width
    total = tl.zeros([wide], tl.float32)
    for token in range(tl.program_id(0), tokens, tl.num_programs(0)):
        at = tl.cast(token, tl.int64) * width + i
        a = tl.load(x + at, there, 0.0).to(tl.float32)
        root = 1.5957691216057308  # 2 √(2/π): a half of 1 + tanh(u) is the sigmoid of 2u
        share = tl.sigmoid(root * (a + 0.044715 * a * a * a))
        steep = share + a * share * (1 - share) * root * (1 + 0.134145 * a * a)
        g = tl.load(grad + at, there, 0.0).to(tl.float32) * steep
        total += g
        tl.store(back + at, g, there)
    tl.store(parts + tl.program_id(0) * width + i, total, there)
