"""Kernels for what lies between a GLM's matmuls, each in one pass over memory and in fp32: dropout,
residual addition and LayerNorm; GELU; and their gradients.

The gradient of a bias is the column sum of a gradient that a kernel writes anyway: every program
sums its own rows, and `reduce_parts` adds these sums to the bias's gradient. Dropout hashes a seed
and the element's position, and does so again in the backward pass, so no mask is stored; the seed
is on the device, so that a replayed CUDA graph drops other elements each time. Numbers of tokens
are not compiled in, because micro-batches differ in them. Called by models/glm_fused.py.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from steelyard.kernels.hash_dropout import (
    hash_keys,
    hash_queries,
    make_dropout_keys,
    make_keep_mask,
)
from steelyard.kernels.jit import (
    constexpr,
    count_tiles,
    jit_without_specializing,
    next_power_of_2,
    tensor,
    tl,
    triton,
)

# programs with partial column sums: 6 on each of an H200's 132 multiprocessors, all at once
PROGRAMS = 792
# GELU's gradient: columns and rows that a program loads at a time, its warps, and programs.
GELU_BACKWARD = (512, 1, 4, 1584)


def make_plain_dropout_add_norm(eps: float, dropout: float) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a function (x, delta, weight, bias) that returns x + dropout(delta) and its LayerNorm,
    both [tokens, width], in plain PyTorch.

    `eps` and the probability `dropout` are captured so that a compiler takes them for constants;
    with dropout 0 the function has no dropout at all, otherwise it always drops, by torch's random
    state and not by a hash.
    """

    def with_dropout(
        x: Tensor, delta: Tensor, weight: Tensor, bias: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return x + dropout(delta) and its LayerNorm; dropout is always active."""
        x = x + F.dropout(delta, dropout)
        return x, F.layer_norm(x, (x.shape[-1],), weight, bias, eps)

    def without_dropout(
        x: Tensor, delta: Tensor, weight: Tensor, bias: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return x + delta and its LayerNorm."""
        x = x + delta
        return x, F.layer_norm(x, (x.shape[-1],), weight, bias, eps)

    return with_dropout if dropout else without_dropout


@dataclass(frozen=True)
class Dropout:
    """One dropout site (place in the model where elements are dropped): `share`, the probability
    that an element is dropped; `seed`, an int64 tensor [1] on the device that stays unchanged until
    the backward pass has ended; and `site`, the number of the site in the model. `below` is the
    share as a 31-bit integer.

    Kernels drop by a hash of seed + site and the element's indices, so two sites drop different
    elements with the same seed.
    """

    share: float
    seed: Tensor  # int64 [1], on the device; unchanged until the backward pass has ended
    site: int  # the number of the site in the model

    @property
    def below(self) -> int:
        """The share as a 31-bit integer: elements whose hash is less are dropped."""
        return int(self.share * (1 << 31))


def triton_dropout_add_norm(
    x: Tensor, delta: Tensor, weight: Tensor, bias: Tensor, eps: float, dropout: Dropout
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y = x + dropout(delta), its LayerNorm (both [tokens, width]) and each row's mean and 1
    / sqrt(variance + eps), fp32 [tokens, 2], by one kernel.

    The plain function is that of `make_plain_dropout_add_norm`, except that elements are dropped by
    a hash; with share 0 nothing is.
    """
    x, delta = x.contiguous(), delta.contiguous()
    tokens, width = x.shape
    out, normed = torch.empty_like(x), torch.empty_like(x)
    stats = x.new_empty(tokens, 2, dtype=torch.float32)
    inputs = (
        x,
        delta,
        weight,
        bias,
        out,
        normed,
        stats,
        dropout.seed,
        dropout.site,
        dropout.share,
        dropout.below,
        eps,
    )
    _dropout_add_norm[(tokens,)](
        *inputs, dropout.share > 0, width, next_power_of_2(width), num_warps=4
    )
    return out, normed, stats


def triton_dropout_add_norm_backward(
    saved: tuple[Tensor, Tensor, Tensor],
    sum_grad: Tensor | None,
    norm_grad: Tensor,
    accumulators: tuple[Tensor, Tensor, Tensor | None],
    dropout: Dropout,
    x_needs_grad: bool,
) -> tuple[Tensor | None, Tensor]:
    """Return the gradients of x and of delta, by one kernel; that of x is None if `x_needs_grad` is
    False and something is dropped.

    `saved` is the sum, its row statistics and the norm's weight; `sum_grad` (or None) is the
    gradient of the sum from later uses, `norm_grad` that of the norm. The gradients of the norm's
    weight and bias, and of the bias that delta was made with (if the third is not None), are added
    to `accumulators` in place. Without dropout both results are the same tensor.
    """
    x, stats, weight = saved
    tokens, width = x.shape
    x_needs_grad = x_needs_grad or not dropout.share
    delta_grad = torch.empty_like(x) if dropout.share else None
    x_grad = torch.empty_like(x) if x_needs_grad else None
    sums = 2 if accumulators[2] is None else 3
    parts = x.new_empty(min(tokens, PROGRAMS), sums, width, dtype=torch.float32)
    norm_grad = norm_grad.contiguous()
    inputs = (
        x,
        stats,
        weight,
        norm_grad if sum_grad is None else sum_grad.contiguous(),
        norm_grad,
        x if x_grad is None else x_grad,
    )
    _dropout_add_norm_backward[(len(parts),)](
        *inputs, x if delta_grad is None else delta_grad, parts, tokens, dropout.seed,
        dropout.site, dropout.share, dropout.below, dropout.share > 0, sum_grad is not None,
        x_needs_grad, sums, width, next_power_of_2(width), num_warps=4,
    )  # fmt: skip
    reduce_parts(parts, [accumulator for accumulator in accumulators if accumulator is not None])
    return (x_grad, delta_grad) if delta_grad is not None else (x_grad, x_grad)  # type: ignore[return-value]


def reduce_parts(parts: Tensor, accumulators: list[Tensor]) -> None:
    """Add the sums over programs of `parts`, fp32 [programs, n, width], to the n `accumulators`
    [width], in place, by a kernel; n is 1, 2 or 3.
    """
    programs, _, width = parts.shape
    first, second, third = (accumulators[min(i, len(accumulators) - 1)] for i in range(3))
    _reduce_parts[(triton.cdiv(width, 16), len(accumulators))](
        parts, first, second, third, programs, len(accumulators), width, num_warps=8
    )


def triton_gelu(x: Tensor) -> Tensor:
    """Return the GELU of x [tokens, width] in its tanh form, by a kernel; equals `F.gelu(x,
    approximate="tanh")`.
    """
    x = x.contiguous()
    out = torch.empty_like(x)
    tokens, width = x.shape
    _gelu[(tokens,)](x, out, width, next_power_of_2(width), num_warps=4)
    return out


def triton_gelu_backward(x: Tensor, grad: Tensor, accumulator: Tensor) -> Tensor:
    """Return the gradient of x, the input of `triton_gelu`, and add its column sum, the gradient of
    the bias before it, to `accumulator` in place. `x` is contiguous.
    """
    tokens, width = x.shape
    columns, rows, warps, programs = GELU_BACKWARD
    tile_columns = min(columns, next_power_of_2(width))
    columns = count_tiles(width, tile_columns)
    parts = x.new_empty(
        min(count_tiles(tokens, rows), max(1, programs // columns)), 1, width, dtype=torch.float32
    )
    back = torch.empty_like(x)
    _gelu_backward[(len(parts), columns)](
        x, grad.contiguous(), back, parts, tokens, width, tile_columns, rows, num_warps=warps
    )
    reduce_parts(parts, [accumulator])
    return back


@jit_without_specializing("place", "below")
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
    has_dropout: constexpr,
    width: constexpr,
    padded: constexpr,
) -> None:
    """Compute y = x + dropout(delta) and (y - mean) / sqrt(variance + eps) · weight + bias of one
    token.

    Program i has token i. `x`, `delta`, `out` (y) and `normed` are contiguous [tokens, width],
    `weight` and `bias` [width]; `stats` is fp32 [tokens, 2]: mean and 1 / sqrt(variance + eps). If
    `has_dropout`, elements whose hash of seed, `place` (the dropout site), token and column is less
    than `below` are dropped, and others divided by 1 - dropout. Equals the function of
    `make_plain_dropout_add_norm`, but for which elements are dropped.
    """
    token = tl.program_id(0)
    i = tl.arange(0, padded)
    mask = i < width
    offsets = token.to(tl.int64) * width + i
    change = tl.load(delta + offsets, mask, 0.0).to(tl.float32)
    if has_dropout:
        low, high = make_dropout_keys(seed, place)
        change = tl.where(
            make_keep_mask(hash_queries(token, 0, 1, low), hash_keys(i, high), below),
            change / (1 - dropout),
            0.0,
        )
    total = (tl.load(x + offsets, mask, 0.0).to(tl.float32) + change).to(out.dtype.element_ty)
    tl.store(out + offsets, total, mask)
    wide = total.to(tl.float32)
    mean = tl.sum(wide, 0) / width
    centred = tl.where(mask, wide - mean, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 0) / width + eps)
    tl.store(stats + 2 * token, mean)
    tl.store(stats + 2 * token + 1, scale)
    slope = tl.load(weight + i, mask, 0.0).to(tl.float32)
    tl.store(
        normed + offsets,
        centred * scale * slope + tl.load(bias + i, mask, 0.0).to(tl.float32),
        mask,
    )


@jit_without_specializing("tokens", "place", "below")
def _dropout_add_norm_backward(
    x: tensor,
    stats: tensor,
    weight: tensor,
    sum_grad: tensor,
    norm_grad: tensor,
    x_grad: tensor,
    delta_grad: tensor,
    parts: tensor,
    tokens: tensor,
    seed: tensor,
    place: tensor,
    dropout: tensor,
    below: tensor,
    has_dropout: constexpr,
    has_sum_grad: constexpr,
    x_needs_grad: constexpr,
    sums: constexpr,
    width: constexpr,
    padded: constexpr,
) -> None:
    """Compute the gradients of x and delta, and partial sums of those of weight, bias and the bias
    in delta.

        u = (x - mean) scale;  h = norm_grad · weight
        g = sum_grad + scale (h - mean(h) - u mean(h u))

    `x` (the sum), `sum_grad` (read if `has_sum_grad`), `norm_grad`, `x_grad` (g, written if
    `x_needs_grad`) and `delta_grad` (g with the same elements dropped, written if `has_dropout`)
    are contiguous [tokens, width], `stats` fp32 [tokens, 2]. Program i of P has tokens i, i + P,
    ... and writes to row i of `parts`, fp32 [P, sums, width], its sums of norm_grad · u, of
    norm_grad, and if sums is 3 of the gradient of delta. `place` is the dropout site.
    """
    i = tl.arange(0, padded)
    mask = i < width
    slope = tl.load(weight + i, mask, 0.0).to(tl.float32)
    weight_sum = tl.zeros([padded], tl.float32)
    bias_sum = tl.zeros([padded], tl.float32)
    delta_bias_sum = tl.zeros([padded], tl.float32)
    low, high = make_dropout_keys(seed, place)
    columns = hash_keys(i, high)
    for token in range(tl.program_id(0), tokens, tl.num_programs(0)):
        offsets = tl.cast(token, tl.int64) * width + i
        mean, scale = tl.load(stats + 2 * token), tl.load(stats + 2 * token + 1)
        g = tl.load(norm_grad + offsets, mask, 0.0).to(tl.float32)
        unit = (tl.load(x + offsets, mask, 0.0).to(tl.float32) - mean) * scale
        weight_sum += g * unit
        bias_sum += g
        # loaded before the sums below, which wait for all loads
        stream = tl.load(sum_grad + offsets, mask & has_sum_grad, 0.0).to(tl.float32)
        g = g * slope
        g = stream + scale * (g - tl.sum(g, 0) / width - unit * (tl.sum(g * unit, 0) / width))
        if x_needs_grad:
            tl.store(x_grad + offsets, g, mask)
        if has_dropout:
            keep = make_keep_mask(hash_queries(tl.cast(token, tl.int32), 0, 1, low), columns, below)
            g = tl.where(keep, g / (1 - dropout), 0.0)
            tl.store(delta_grad + offsets, g, mask)
        delta_bias_sum += g
    offsets = tl.program_id(0).to(tl.int64) * sums * width + i
    tl.store(parts + offsets, weight_sum, mask)
    tl.store(parts + offsets + width, bias_sum, mask)
    if sums == 3:
        tl.store(parts + offsets + 2 * width, delta_bias_sum, mask)


@jit_without_specializing("programs")
def _reduce_parts(
    parts: tensor,
    first: tensor,
    second: tensor,
    third: tensor,
    programs: tensor,
    count: constexpr,
    width: constexpr,
) -> None:
    """Add the sum over programs of parts[:, n] to accumulator n (`first`, `second` or `third`,
    [width] each), in place.

    `parts` is fp32 [programs, count, width]. Program (c, n) has 16 columns and accumulator n.
    """
    index = tl.program_id(1)
    i = tl.program_id(0) * 16 + tl.arange(0, 16)
    total = tl.zeros([16], tl.float32)
    for begin in range(0, programs, 256):
        row = begin + tl.arange(0, 256)[:, None]
        mask = (row < programs) & (i[None, :] < width)
        total += tl.sum(tl.load(parts + (row * count + index) * width + i[None, :], mask, 0.0), 0)
    target = first + i
    if index == 1:
        target = second + i
    if index == 2:
        target = third + i
    tl.store(target, tl.load(target, i < width).to(tl.float32) + total, i < width)


@jit_without_specializing()
def _compute_gelu_share(x: tensor) -> tensor:
    """Return GELU(x) / x in its tanh form: (1 + tanh(u)) / 2 = sigmoid(2u), with u = sqrt(2/π) (x +
    0.044715 x³).
    """
    return tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))  # 2 √(2/π)


@jit_without_specializing()
def _gelu(x: tensor, out: tensor, width: constexpr, padded: constexpr) -> None:
    """Write the tanh-form GELU of one token; equals `F.gelu(x, approximate="tanh")`. Program i has
    token i of contiguous `x` and `out` [tokens, width].
    """
    i = tl.arange(0, padded)
    mask = i < width
    offsets = tl.program_id(0).to(tl.int64) * width + i
    a = tl.load(x + offsets, mask, 0.0).to(tl.float32)
    tl.store(out + offsets, a * _compute_gelu_share(a), mask)


@jit_without_specializing("tokens")
def _gelu_backward(
    x: tensor,
    grad: tensor,
    back: tensor,
    parts: tensor,
    tokens: tensor,
    width: constexpr,
    tile_columns: constexpr,
    rows: constexpr,
) -> None:
    """Write grad · GELU'(x) to `back`, and its sum over this program's tokens to `parts`.

    `x`, `grad` and `back` are contiguous [tokens, width], `parts` is fp32 [programs, 1, width].
    Program (i, c) of P has tile_columns columns and every P-th group of `rows` tokens from group i
    on. Equals autograd's gradient of `F.gelu(x, approximate="tanh")`.
    """
    i = tl.program_id(1) * tile_columns + tl.arange(0, tile_columns)
    total = tl.zeros([tile_columns], tl.float32)
    for begin in range(tl.program_id(0) * rows, tokens, tl.num_programs(0) * rows):
        token = begin + tl.arange(0, rows)
        mask = (token < tokens)[:, None] & (i < width)[None, :]
        offsets = token.to(tl.int64)[:, None] * width + i[None, :]
        a = tl.load(x + offsets, mask, 0.0).to(tl.float32)
        g = tl.load(grad + offsets, mask, 0.0).to(tl.float32)
        share = _compute_gelu_share(a)
        g = g * (share + a * share * (1 - share) * 1.5957691216057308 * (1 + 0.134145 * a * a))
        total += tl.sum(g, 0)
        tl.store(back + offsets, g, mask)
    tl.store(parts + tl.program_id(0) * width + i, total, i < width)
