"""Loads of tiles (some tokens of one head) from tensors [tokens, heads, D] inside Triton kernels.

Where the device copies whole tiles (Hopper's TMA), a tile is loaded through a tensor descriptor,
elsewhere through pointers. Used by the attention kernels: `make_tile_sources` on the host prepares
the kernel arguments, `read_tile` in the kernel loads a tile.
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from steelyard.kernels.jit import constexpr, has_triton, jit, tensor, tl, triton

FIRST_ARCH = 90  # compute capability 9.0
DESCRIPTOR_MODULE = "triton.tools.tensor_descriptor"


@cache
def _find_descriptor_maker(device: torch.device) -> Callable[[Tensor, list[int]], Any] | None:
    """Return Triton's function that makes a tensor descriptor from a tensor and a tile shape, or
    None if the device or the installed Triton has no tensor descriptors.

    It needs Triton for `device`, an NVIDIA GPU of compute capability 9.0 or later (that of the
    current device is read, not that of `device`), and Triton's module `tensor_descriptor`. Cached
    by device.
    """
    if not has_triton(device):
        return None
    # an int for NVIDIA only
    arch = triton.runtime.driver.active.get_current_target().arch
    if not isinstance(arch, int) or arch < FIRST_ARCH:
        return None
    if find_spec("triton.tools") is None or find_spec(DESCRIPTOR_MODULE) is None:  # an older Triton
        return None
    from_tensor: Callable[[Tensor, list[int]], Any] = import_module(
        DESCRIPTOR_MODULE
    ).TensorDescriptor.from_tensor
    return from_tensor


def has_descriptors(device: torch.device) -> bool:
    """Return whether kernels on this device load tiles through tensor descriptors (TMA), not
    pointers.
    """
    return _find_descriptor_maker(device) is not None


def make_tile_sources(rows: int, *tensors: Tensor) -> list[Any]:
    """Return, for each tensor [tokens, heads, D], the kernel argument from which `read_tile` loads
    `rows` tokens of one head at a time, in the same order.

    That is a tensor descriptor with tiles [rows, D] if the device of the first tensor has them,
    otherwise the tensor itself. The last dimension must be contiguous.
    """
    describe = _find_descriptor_maker(tensors[0].device)
    return [
        x if describe is None else describe(_view_as_matrix(x), [rows, x.shape[-1]])
        for x in tensors
    ]


def _view_as_matrix(x: Tensor) -> Tensor:
    """Return a tensor [tokens, heads, D] as a strided view [tokens, (heads - 1) · stride + D]: from
    the first head's first column to the last head's last, with any columns that lie between heads
    in memory.
    """
    tokens, heads, dim = x.shape
    return x.as_strided((tokens, (heads - 1) * x.stride(1) + dim), (x.stride(0), 1))


@jit
def read_tile(
    x: tensor,
    first_token: tensor,
    first_column: tensor,
    stride: tensor,
    count: tensor,
    dim: constexpr,
    rows: constexpr,
    by_descriptor: constexpr,
) -> tensor:
    """Load `rows` tokens from token `first_token` on, [rows, dim], of the head whose columns begin
    at `first_column`; tokens from `count` on are zeros.

    `x` is a tensor descriptor if `by_descriptor`, otherwise a pointer to a matrix whose rows are
    `stride` elements apart (`stride`, `count`, `dim` and `rows` are not read for a descriptor,
    which has its own).
    """
    if by_descriptor:
        return x.load([first_token, first_column])
    else:
        token = first_token + tl.arange(0, rows)
        return tl.load(
            x + token[:, None] * stride + first_column + tl.arange(0, dim)[None, :],
            (token < count)[:, None],
            0.0,
        )
