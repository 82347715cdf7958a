"""Matrices in fp8 with one fp32 scale per row, and products of two of them.

A row's scale is its largest magnitude divided by the largest number of the fp8 type; rows of zeros
get a tiny scale. A product sums along the rows of both operands, so a matrix that is to be scaled
by columns is stored transposed. Used by models/llama_fp8.py and, for the matmul ceilings, by
engines/torch/framework.py.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from steelyard.kernels.jit import (
    constexpr,
    count_tiles,
    has_triton,
    jit,
    jit_without_specializing,
    next_power_of_2,
    tensor,
    tl,
)

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FP8_MAX = {dtype: torch.finfo(dtype).max for dtype in (E4M3, E5M2)}
# smaller row maxima are replaced by it: 1 / TINY must be finite
TINY = 1e-30
# torch._scaled_mm takes sides that are multiples of it, except the rows of its first operand
ALIGNED = 16
# Hopper's tensor cores then accumulate in fewer bits than fp32 has; tests of products use it
FAST_ACCUMULATION = True
ROW = (16384, 32)  # row kernels: columns that a program loads at a time, and its warps at most
TILE = (128, 64)  # column kernels: rows and columns of a tile
TILES_PER_PROGRAM = 16  # tiles whose column maxima one program computes


class Fp8Matrix(NamedTuple):
    """A matrix in fp8: `values` [rows, width] of fp8 times `scale` [rows, 1] of fp32, a named
    tuple; `to_fp32` multiplies them.
    """

    values: Tensor
    scale: Tensor

    def to_fp32(self) -> Tensor:
        """Return values · scale, the matrix in fp32."""
        return self.values.float() * self.scale


def quantize_rows(x: Tensor, dtype: torch.dtype = E4M3) -> Fp8Matrix:
    """Return `x` [rows, width] in fp8 with one scale per row: its largest magnitude divided by the
    largest number of `dtype`; rows of zeros get a tiny scale.

    The values are row-major whatever the strides of `x` are: a device multiplies a row-major matrix
    by a column-major one only.
    """
    wide = x.float().contiguous()
    row_max = wide.abs().amax(-1, keepdim=True).clamp_min(TINY)
    return Fp8Matrix((wide * (FP8_MAX[dtype] / row_max)).to(dtype), row_max / FP8_MAX[dtype])


def quantize_columns(x: Tensor, dtype: torch.dtype = E4M3) -> Fp8Matrix:
    """Quantize the transpose of `x` [rows, width] to fp8 with one scale per column of `x`: the
    result is [width, rows], with rows padded by zeros to a multiple of `ALIGNED`.
    """
    padding = -len(x) % ALIGNED
    return quantize_rows(torch.nn.functional.pad(x.t(), (0, padding)), dtype)


def multiply_fp8(a: Fp8Matrix, b: Fp8Matrix, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return a · bᵀ, [rows of a, rows of b], in `dtype`, by `torch._scaled_mm`; both operands have
    one scale per row.

    On a device all sides but the rows of `a` must be multiples of `ALIGNED` (16), and sums may have
    fewer bits than fp32 (`FAST_ACCUMULATION`). On a CPU it is emulated, with any sizes: fp8 values
    are multiplied and summed in fp32.
    """
    if a.values.device.type == "cpu":
        return ((a.values.float() @ b.values.float().t()) * a.scale * b.scale.t()).to(dtype)
    scaled_mm: Any = torch._scaled_mm
    out: Tensor = scaled_mm(
        a.values,
        b.values.t(),
        scale_a=a.scale,
        scale_b=b.scale.t(),
        out_dtype=dtype,
        use_fast_accum=FAST_ACCUMULATION,
    )
    return out


def triton_quantize_rows(x: Tensor, dtype: torch.dtype = E4M3) -> Fp8Matrix:
    """Compute `quantize_rows` by a Triton kernel, a program per row."""
    x = x.contiguous()
    out = make_empty_fp8(len(x), x.shape[1], dtype, x.device)
    tile = min(ROW[0], next_power_of_2(x.shape[1]))
    tiles = count_tiles(x.shape[1], tile)
    _quantize_rows[(len(x),)](
        x, *out, x.shape[1], FP8_MAX[dtype], TINY, tile, tiles, num_warps=count_warps(tile)
    )
    return out


def triton_quantize_columns(x: Tensor, dtype: torch.dtype = E4M3) -> Fp8Matrix:
    """Compute `quantize_columns` (the transpose, padded to a multiple of `ALIGNED`) by two Triton
    kernels: the largest magnitude of each column, then the scaled transpose.
    """
    x = x.contiguous()
    height, width = x.shape
    padded = count_tiles(height, ALIGNED) * ALIGNED
    tile_rows, tile_columns = TILE
    spans = count_tiles(height, tile_rows * TILES_PER_PROGRAM)
    parts = x.new_empty(spans, width, dtype=torch.float32)
    _column_max[(count_tiles(width, tile_columns), spans)](
        x, parts, height, width, tile_rows, tile_columns, TILES_PER_PROGRAM
    )
    column_max = parts.amax(0).clamp_min_(TINY)
    values = torch.empty(width, padded, dtype=dtype, device=x.device)
    grid = (count_tiles(width, tile_columns), count_tiles(padded, tile_rows))
    _quantize_columns[grid](
        x, values, column_max, height, width, padded, FP8_MAX[dtype], tile_rows, tile_columns
    )
    return Fp8Matrix(values, (column_max / FP8_MAX[dtype])[:, None])


def quantize_rows_fast(x: Tensor, dtype: torch.dtype = E4M3) -> Fp8Matrix:
    """Compute `quantize_rows`, by the kernel if the device has Triton."""
    return (triton_quantize_rows if has_triton(x.device) else quantize_rows)(x, dtype)


def quantize_columns_fast(x: Tensor, dtype: torch.dtype = E4M3) -> Fp8Matrix:
    """Compute `quantize_columns`, by the kernel if the device has Triton."""
    return (triton_quantize_columns if has_triton(x.device) else quantize_columns)(x, dtype)


def make_empty_fp8(height: int, width: int, dtype: torch.dtype, device: torch.device) -> Fp8Matrix:
    """Return an uninitialized fp8 matrix [height, width] with its scales [height, 1]."""
    values = torch.empty(height, width, dtype=dtype, device=device)
    return Fp8Matrix(values, torch.empty(height, 1, dtype=torch.float32, device=device))


def count_warps(elements: int) -> int:
    """Return how many warps a program gets that holds `elements` elements of a row: one for each
    512, at least 4 and at most `ROW[1]`.
    """
    return max(4, min(ROW[1], elements // 512))


@jit
def _quantize_rows(
    x: tensor,
    values: tensor,
    scale: tensor,
    width: tensor,
    largest: constexpr,
    tiny: constexpr,
    tile: constexpr,
    tiles: constexpr,
) -> None:
    """Quantize one row to fp8: scale = max(|x|, tiny) / largest, values = x / scale; equals
    `quantize_rows`.

    Program i has row i of contiguous `x` and `values` [rows, width] and of `scale`, fp32 [rows]. A
    row is read in `tiles` tiles of `tile` columns: once if one tile holds it, otherwise twice.
    `largest` is the largest number of the fp8 type, `tiny` the least magnitude that is scaled by.
    """
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, tile)
    if tiles == 1:
        v = tl.load(x + row * width + i, i < width, 0.0).to(tl.float32)
        row_max = tl.maximum(tl.max(tl.abs(v), 0), tiny)
        tl.store(
            values + row * width + i,
            (v * (largest / row_max)).to(values.dtype.element_ty),
            i < width,
        )
    else:
        high = tl.zeros([tile], tl.float32)
        for c in range(tiles):
            column = c * tile + i
            high = tl.maximum(
                high, tl.abs(tl.load(x + row * width + column, column < width, 0.0).to(tl.float32))
            )
        row_max = tl.maximum(tl.max(high, 0), tiny)
        for c in range(tiles):
            column = c * tile + i
            v = tl.load(x + row * width + column, column < width, 0.0).to(tl.float32)
            tl.store(
                values + row * width + column,
                (v * (largest / row_max)).to(values.dtype.element_ty),
                column < width,
            )
    tl.store(scale + row, row_max / largest)


@jit_without_specializing("height")
def _column_max(
    x: tensor,
    parts: tensor,
    height: tensor,
    width: tensor,
    tile_rows: constexpr,
    tile_columns: constexpr,
    span: constexpr,
) -> None:
    """Write the largest magnitudes of some columns over some rows to `parts`.

    `x` is contiguous [height, width]. Program (c, r) has tile_columns columns and `span` tiles of
    tile_rows rows, and writes row r of `parts`, fp32 [programs, width]; the maximum over `parts` is
    the first step of `quantize_columns`.
    """
    column = tl.program_id(0) * tile_columns + tl.arange(0, tile_columns)
    high = tl.zeros([tile_columns], tl.float32)
    for tile in range(span):
        row = (tl.program_id(1).to(tl.int64) * span + tile) * tile_rows + tl.arange(0, tile_rows)
        mask = (row[:, None] < height) & (column[None, :] < width)
        v = tl.load(x + row[:, None] * width + column[None, :], mask, 0.0).to(tl.float32)
        high = tl.maximum(high, tl.max(tl.abs(v), 0))
    tl.store(parts + tl.program_id(1).to(tl.int64) * width + column, high, column < width)


@jit_without_specializing("height")
def _quantize_columns(
    x: tensor,
    values: tensor,
    column_max: tensor,
    height: tensor,
    width: tensor,
    padded: tensor,
    largest: constexpr,
    tile_rows: constexpr,
    tile_columns: constexpr,
) -> None:
    """Write one tile of the scaled transpose, values = xᵀ · largest / column_max; the second step
    of `quantize_columns`.

    `x` is contiguous [height, width], `column_max` fp32 [width] and `values` contiguous fp8 [width,
    padded], zero from column `height` on. Program (c, r) has a tile of tile_columns columns and
    tile_rows rows of x.
    """
    column = tl.program_id(0) * tile_columns + tl.arange(0, tile_columns)
    row = tl.program_id(1).to(tl.int64) * tile_rows + tl.arange(0, tile_rows)
    mask = (row[:, None] < height) & (column[None, :] < width)
    v = tl.load(x + row[:, None] * width + column[None, :], mask, 0.0).to(tl.float32)
    scaled = v * (largest / tl.load(column_max + column, column < width, 1.0))[None, :]
    transposed = tl.trans(scaled.to(values.dtype.element_ty))
    offsets = column.to(tl.int64)[:, None] * padded + row[None, :]
    tl.store(values + offsets, transposed, (column[:, None] < width) & (row[None, :] < padded))
