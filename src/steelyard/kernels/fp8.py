"""Matrices of fp8 numbers with a scale for each row, and their products.

A row's scale is its largest magnitude over the largest number of the type, so that this one is hit;
rows of zeros have a tiny scale. Columns are scaled by writing the matrix transposed: a product sums
over what lies side by side in both of its operands. Sums of products are fp32.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from steelyard.kernels.jit import blocks, constexpr, jit, power_of_2, serve, tensor, tl, varied

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {dtype: torch.finfo(dtype).max for dtype in (E4M3, E5M2)}
# magnitudes below are scaled as if they were this large: 1 / TINY must still be a number
TINY = 1e-30
# a device's products take matrices whose sides are multiples of it, but for the rows of the first
ALIGNED = 16
# Hopper's tensor cores then sum fewer bits than fp32 has; a device's products are tested with it
FAST_SUMS = True
ROW = (16384, 32)  # of rows: numbers that a program reads at once, and its warps
TILE = (128, 64)  # of columns: tokens and columns of a tile
SPAN = 16  # tiles that a program goes through for the largest of a column


class Fp8(NamedTuple):
    """`values * scale` is the matrix: [rows, width] of fp8, [rows, 1] of fp32."""

    values: Tensor
    scale: Tensor

    def wide(self) -> Tensor:
        """The matrix that it stands for, in fp32."""
        return self.values.float() * self.scale


def rows(x: Tensor, dtype: torch.dtype = E4M3) -> Fp8:
    """Return the matrix in fp8 with a scale for each row. Its values are row-major whatever the
    strides of `x` are: a device multiplies a row-major matrix by a column-major one and no others.
    """
    wide = x.float().contiguous()
    most = wide.abs().amax(-1, keepdim=True).clamp_min(TINY)
    return Fp8((wide * (LARGEST[dtype] / most)).to(dtype), most / LARGEST[dtype])


def columns(x: Tensor, dtype: torch.dtype = E4M3) -> Fp8:
    """A matrix transposed, scaled by what were its columns. Zeros are added to its rows up to a
    multiple of `ALIGNED`.
    """
    more = -len(x) % ALIGNED
    return rows(torch.nn.functional.pad(x.t(), (0, more)), dtype)


def product(a: Fp8, b: Fp8, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """a times bᵀ. Where no device computes it, it is emulated: numbers of fp8, products and sums of
    fp32.
    """
    if a.values.device.type == "cpu":
        return ((a.values.float() @ b.values.float().t()) * a.scale * b.scale.t()).to(dtype)
    scaled: Any = torch._scaled_mm
    out: Tensor = scaled(
        a.values,
        b.values.t(),
        scale_a=a.scale,
        scale_b=b.scale.t(),
        out_dtype=dtype,
        use_fast_accum=FAST_SUMS,
    )
    return out


def triton_rows(x: Tensor, dtype: torch.dtype = E4M3) -> Fp8:
    x = x.contiguous()
    out = empty(len(x), x.shape[1], dtype, x.device)
    each = min(ROW[0], power_of_2(x.shape[1]))
    count = blocks(x.shape[1], each)
    _rows[(len(x),)](x, *out, x.shape[1], LARGEST[dtype], TINY, each, count, num_warps=warps(each))
    return out


def triton_columns(x: Tensor, dtype: torch.dtype = E4M3) -> Fp8:
    x = x.contiguous()
    height, width = x.shape
    padded = blocks(height, ALIGNED) * ALIGNED
    tall, wide = TILE
    spans = blocks(height, tall * SPAN)
    parts = x.new_empty(spans, width, dtype=torch.float32)
    _column_most[(blocks(width, wide), spans)](x, parts, height, width, tall, wide, SPAN)
    most = parts.amax(0).clamp_min_(TINY)
    values = torch.empty(width, padded, dtype=dtype, device=x.device)
    grid = (blocks(width, wide), blocks(padded, tall))
    _columns[grid](x, values, most, height, width, padded, LARGEST[dtype], tall, wide)
    return Fp8(values, (most / LARGEST[dtype])[:, None])


def make_rows(x: Tensor, dtype: torch.dtype = E4M3) -> Fp8:
    """By the kernel, where the device runs it."""
    return (triton_rows if serve(x.device) else rows)(x, dtype)


def make_columns(x: Tensor, dtype: torch.dtype = E4M3) -> Fp8:
    return (triton_columns if serve(x.device) else columns)(x, dtype)


def empty(height: int, width: int, dtype: torch.dtype, device: torch.device) -> Fp8:
    values = torch.empty(height, width, dtype=dtype, device=device)
    return Fp8(values, torch.empty(height, 1, dtype=torch.float32, device=device))


def warps(numbers: int) -> int:
    """Of a program that holds a row of so many numbers."""
    return max(4, min(ROW[1], numbers // 512))


@jit
def _rows(
    x: tensor,
    values: tensor,
    scale: tensor,
    width: tensor,
    largest: constexpr,
    tiny: constexpr,
    each: constexpr,
    count: constexpr,
) -> None:
    """A row that fits is read once."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, each)
    if count == 1:
        v = tl.load(x + row * width + i, i < width, 0.0).to(tl.float32)
        most = tl.maximum(tl.max(tl.abs(v), 0), tiny)
        tl.store(
            values + row * width + i, (v * (largest / most)).to(values.dtype.element_ty), i < width
        )
    else:
        high = tl.zeros([each], tl.float32)
        for c in range(count):
            at = c * each + i
            high = tl.maximum(
                high, tl.abs(tl.load(x + row * width + at, at < width, 0.0).to(tl.float32))
            )
        most = tl.maximum(tl.max(high, 0), tiny)
        for c in range(count):
            at = c * each + i
            v = tl.load(x + row * width + at, at < width, 0.0).to(tl.float32)
            tl.store(
                values + row * width + at,
                (v * (largest / most)).to(values.dtype.element_ty),
                at < width,
            )
    tl.store(scale + row, most / largest)


@varied("height")
def _column_most(
    x: tensor,
    parts: tensor,
    height: tensor,
    width: tensor,
    tall: constexpr,
    wide: constexpr,
    span: constexpr,
) -> None:
    column = tl.program_id(0) * wide + tl.arange(0, wide)
    high = tl.zeros([wide], tl.float32)
    for tile in range(span):
        row = (tl.program_id(1).to(tl.int64) * span + tile) * tall + tl.arange(0, tall)
        there = (row[:, None] < height) & (column[None, :] < width)
        v = tl.load(x + row[:, None] * width + column[None, :], there, 0.0).to(tl.float32)
        high = tl.maximum(high, tl.max(tl.abs(v), 0))
    tl.store(parts + tl.program_id(1).to(tl.int64) * width + column, high, column < width)


@varied("height")
def _columns(
    x: tensor,
    values: tensor,
    most: tensor,
    height: tensor,
    width: tensor,
    padded: tensor,
    largest: constexpr,
    tall: constexpr,
    wide: constexpr,
) -> None:
    """A tile, turned; what is beyond the last row is zero."""
    column = tl.program_id(0) * wide + tl.arange(0, wide)
    row = tl.program_id(1).to(tl.int64) * tall + tl.arange(0, tall)
    there = (row[:, None] < height) & (column[None, :] < width)
    v = tl.load(x + row[:, None] * width + column[None, :], there, 0.0).to(tl.float32)
    scaled = v * (largest / tl.load(most + column, column < width, 1.0))[None, :]
    turned = tl.trans(scaled.to(values.dtype.element_ty))
    at = column.to(tl.int64)[:, None] * padded + row[None, :]
    tl.store(values + at, turned, (column[:, None] < width) & (row[None, :] < padded))
