"""Triton's names (`triton`, `tl`, `jit`, `tensor`, `constexpr`) for all kernels, whether or not
Triton is installed.

Without Triton `triton` and `tl` are None and `jit` returns the function unchanged: modules with
kernels can then be imported, but their kernels cannot be launched. Callers ask `has_triton(device)`
first.
"""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

TRITON_INSTALLED = find_spec("triton") is not None
triton: Any = import_module("triton") if TRITON_INSTALLED else None
tl: Any = import_module("triton.language") if TRITON_INSTALLED else None
jit: Callable[[Any], Any] = triton.jit if TRITON_INSTALLED else lambda function: function
if TYPE_CHECKING or not TRITON_INSTALLED:
    tensor = Any
    constexpr = Any
else:  # Triton's compiler looks annotations up at run time
    tensor, constexpr = tl.tensor, tl.constexpr


_device_types_without_triton = ["cpu"]  # torch.device.type


def disable_triton(device: torch.device) -> None:
    """Make `has_triton` return False for all devices of this type (`cuda`, ...) in this process.

    Called for accelerators that Triton does not compile for. There is no way to enable a type
    again.
    """
    if device.type not in _device_types_without_triton:
        _device_types_without_triton.append(device.type)


def has_triton(device: torch.device) -> bool:
    """Return whether Triton is installed and compiles for this device. Always False for a CPU and
    for device types that were passed to `disable_triton`.
    """
    return TRITON_INSTALLED and device.type not in _device_types_without_triton


def next_power_of_2(number: int) -> int:
    """Return the smallest power of two that is at least `number`, which must be 1 or more."""
    return 1 << (number - 1).bit_length()


def count_tiles(number: int, size: int) -> int:
    """Return how many tiles of `size` elements cover `number` elements: `number / size`, rounded
    up.
    """
    return -(-number // size)


def jit_without_specializing(*names: str) -> Callable[[Any], Any]:
    """Return a decorator that compiles a Triton kernel without specializing it on the values of the
    named arguments.

    Triton compiles a kernel again when an integer argument becomes 1 or a multiple of 16; arguments
    named here, such as numbers of tokens, do not cause that. Without names it is the same as `jit`.
    If Triton is not installed the decorator returns the function unchanged.
    """
    decorator: Callable[[Any], Any] = (
        triton.jit(do_not_specialize=list(names)) if TRITON_INSTALLED else lambda function: function
    )
    return decorator
