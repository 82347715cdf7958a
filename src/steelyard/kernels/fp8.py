"""Matrices in fp8 with one fp32 scale per row, and products of two of them.

A row's scale is its largest magnitude divided by the largest number of the fp8 type; rows of zeros
get a tiny scale. A product sums along the rows of both operands, so a matrix that is to be scaled
by columns is stored transposed. Products are summed in fp32. Used by models/llama_fp8.py and, for
the matmul ceilings, by engines/torch/framework.py.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from steelyard.kernels.jit import blocks, constexpr, jit, power_of_2, serve, tensor, tl, varied

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {dtype: torch.finfo(dtype).max for dtype in (E4M3, E5M2)}
# smaller row maxima are replaced by it: 1 / TINY must be finite
TINY = 1e-30
# torch._scaled_mm takes sides that are multiples of it, except the rows of its first operand
ALIGNED = 16
# Hopper's tensor cores then accumulate in fewer bits than fp32 has; tests of products use it
FAST_SUMS = True
ROW = (16384, 32)  # row kernels: columns that a program loads at a time, and its warps at most
TILE = (128, 64)  # column kernels: rows and columns of a tile
SPAN = 16  # tiles whose column maxima one program computes


class Fp8(NamedTuple):
    """A matrix in fp8: `values` [rows, width] of fp8 times `scale` [rows, 1] of fp32."""

    values: Tensor
    scale: Tensor

    def wide(self) -> Tensor:
        """Return values · scale, the matrix in fp32."""
        return self.values.float() * self.scale


def rows(x: Tensor, dtype: torch.dtype = E4M3) -> Fp8:
    """Quantize a matrix to fp8 with one scale per row.

    The values are row-major whatever the strides of `x` are: a device multiplies a row-major matrix
    by a column-major one only.
    """
    wide = x.float().contiguous()
    most = wide.abs().amax(-1, keepdim=True).clamp_min(TINY)
    return Fp8((wide * (LARGEST[dtype] / most)).to(dtype), most / LARGEST[dtype])


def columns(x: Tensor, dtype: torch.dtype = E4M3) -> Fp8:
    """Quantize the transpose of `x` [rows, width] to fp8 with one scale per column of `x`: the
    result is [width, rows], with rows padded by zeros to a multiple of `ALIGNED`.
    """
    more = -len(x) % ALIGNED
    return rows(torch.nn.functional.pad(x.t(), (0, more)), dtype)


def product(a: Fp8, b: Fp8, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return a · bᵀ in `dtype`, by `torch._scaled_mm`.

    On a CPU it is emulated: fp8 values are multiplied and summed in fp32.
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
    """Compute `quantize_rows` by a kernel, a program per row."""
    x = x.contiguous()
    out = empty(len(x), x.shape[1], dtype, x.device)
    each = min(ROW[0], power_of_2(x.shape[1]))
    count = blocks(x.shape[1], each)
    _rows[(len(x),)](x, *out, x.shape[1], LARGEST[dtype], TINY, each, count, num_warps=warps(each))
    return out


def triton_columns(x: Tensor, dtype: torch.dtype = E4M3) -> Fp8:
    """Compute `quantize_columns` by two kernels: the largest magnitude of each column, then the
    scaled transpose.
    """
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
    """Compute `quantize_rows`, by the kernel if the device has Triton."""
    return (triton_rows if serve(x.device) else rows)(x, dtype)


def make_columns(x: Tensor, dtype: torch.dtype = E4M3) -> Fp8:
    """Compute `quantize_columns`, by the kernel if the device has Triton."""
    return (triton_columns if serve(x.device) else columns)(x, dtype)


def empty(height: int, width: int, dtype: torch.dtype, device: torch.device) -> Fp8:
    """Return an uninitialized fp8 matrix [height, width] with its scales [height, 1]."""
    values = torch.empty(height, width, dtype=dtype, device=device)
    return Fp8(values, torch.empty(height, 1, dtype=torch.float32, device=device))


def warps(numbers: int) -> int:
    """Return how many warps a program gets that holds `elements` elements of a row: one for each
    512, at least 4 and at most `ROW[1]`.
    """
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
    """Quantize one row to fp8: scale = max(|x|, tiny) / largest, values = x / scale; equals
    `quantize_rows`.

    Program i has row i of contiguous `x` and `values` [rows, width] and of `scale`, fp32 [rows]. A
    row is read in `tiles` tiles of `tile` columns: once if one tile holds it, otherwise twice.
    `largest` is the largest number of the fp8 type, `tiny` the least magnitude that is scaled by.
    """
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
    """Write the largest magnitudes of some columns over some rows to `parts`.

    `x` is contiguous [height, width]. Program (c, r) has tile_columns columns and `span` tiles of
    tile_rows rows, and writes row r of `parts`, fp32 [programs, width]; the maximum over `parts` is
    the first step of `quantize_columns`.
    """
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
    """Write one tile of the scaled transpose, values = xᵀ · largest / column_max; the second step
    of `quantize_columns`.

    `x` is contiguous [height, width], `column_max` fp32 [width] and `values` contiguous fp8 [width,
    padded], zero from column `height` on. Program (c, r) has a tile of tile_columns columns and
    tile_rows rows of x.
    """
    column = tl.program_id(0) * wide + tl.arange(0, wide)
    row = tl.program_id(1).to(tl.int64) * tall + tl.arange(0, tall)
    there = (row[:, None] < height) & (column[None, :] < width)
    v = tl.load(x + row[:, None] * width + column[None, :], there, 0.0).to(tl.float32)
    scaled = v * (largest / tl.load(most + column, column < width, 1.0))[None, :]
    turned = tl.trans(scaled.to(values.dtype.element_ty))
    at = column.to(tl.int64)[:, None] * padded + row[None, :]
    tl.store(values + at, turned, (column[:, None] < width) & (row[None, :] < padded))
