"""Triton, if it is installed. Kernels are written against these names; without Triton they can be
read but not run.
"""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

HERE = find_spec("triton") is not None
triton: Any = import_module("triton") if HERE else None
tl: Any = import_module("triton.language") if HERE else None
jit: Callable[[Any], Any] = triton.jit if HERE else lambda function: function
if TYPE_CHECKING or not HERE:
    tensor = Any
    constexpr = Any
else:  # the compiler looks these up
    tensor, constexpr = tl.tensor, tl.constexpr


_without = ["cpu"]  # types of torch's devices for which Triton does not compile


def disable(device: torch.device) -> None:
    """Make `serve` return False for devices of this type: Triton does not compile for their
    accelerator.
    """
    if device.type not in _without:
        _without.append(device.type)


def serve(device: torch.device) -> bool:
    """Return whether Triton compiles for this device."""
    return HERE and device.type not in _without


def power_of_2(number: int) -> int:
    """The first that is not less."""
    return 1 << (number - 1).bit_length()


def blocks(number: int, each: int) -> int:
    """How many blocks of `each` hold so many."""
    return -(-number // each)


def varied(*names: str) -> Callable[[Any], Any]:
    """Compile, but nothing of what these arguments are."""
    made: Callable[[Any], Any] = (
        triton.jit(do_not_specialize=list(names)) if HERE else lambda function: function
    )
    return made
