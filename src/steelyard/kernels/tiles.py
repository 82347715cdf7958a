"""Tiles of a matrix of tokens: some rows of one head, read by descriptors where a device moves
whole tiles (Hopper's TMA), and by addresses elsewhere."""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from steelyard.kernels.jit import constexpr, jit, serve, tensor, tl, triton

SINCE = 90  # compute capability 9.0
NAME = "triton.tools.tensor_descriptor"


@cache
def _describe(device: torch.device) -> Callable[[Tensor, list[int]], Any] | None:
    """What makes descriptors, where the device reads by them."""
    if not serve(device):
        return None
    # a number of NVIDIA's, and of nobody else's
    arch = triton.runtime.driver.active.get_current_target().arch
    if not isinstance(arch, int) or arch < SINCE:
        return None
    if find_spec("triton.tools") is None or find_spec(NAME) is None:  # an older Triton
        return None
    made: Callable[[Tensor, list[int]], Any] = import_module(NAME).TensorDescriptor.from_tensor
    return made


def described(device: torch.device) -> bool:
    return _describe(device) is not None


def tiles(rows: int, *tensors: Tensor) -> list[Any]:
    """Tensors [tokens, heads, D], to be read in tiles of so many tokens of one head."""
    describe = _describe(tensors[0].device)
    return [
        one if describe is None else describe(_matrix(one), [rows, one.shape[-1]])
        for one in tensors
    ]


def _matrix(x: Tensor) -> Tensor:
    """From its first head to its last, with what lies between."""
    tokens, heads, dim = x.shape
    return x.as_strided((tokens, (heads - 1) * x.stride(1) + dim), (x.stride(0), 1))


@jit
def read_tile(
    x: tensor,
    low: tensor,
    side: tensor,
    stride: tensor,
    count: tensor,
    dim: constexpr,
    rows: constexpr,
    by_descriptor: constexpr,
) -> tensor:
    """Rows from a token on, of the head whose numbers begin at `side`; zeros behind the last of
    `count` tokens.
    """
    if by_descriptor:
        return x.load([low, side])
    else:
        at = low + tl.arange(0, rows)
        return tl.load(
            x + at[:, None] * stride + side + tl.arange(0, dim)[None, :], (at < count)[:, None], 0.0
        )
