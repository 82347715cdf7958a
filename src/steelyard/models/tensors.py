"""Names of number types in cases and records as torch's types, transfers of arrays to a device, and
small helpers for building models.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import init
from torch.overrides import TorchFunctionMode

# By what weights are stored in; with fp8, the type of everything but the layers' matrices.
DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8": torch.bfloat16,
}
DTYPE_NAMES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
}
DTYPE_NAMES |= {torch.float8_e4m3fn: "fp8", torch.float8_e5m2: "fp8"}
# By the precision of matmuls; with fp8, the type of everything but the layers' matrices.
COMPUTE_DTYPE_NAMES = {
    "fp32": "fp32",
    "tf32": "fp32",
    "fp16": "fp16",
    "bf16": "bf16",
    "fp8": "bf16",
}


def get_compute_dtype(matmul: str) -> torch.dtype:
    """Return the torch type in which a matmul precision (`fp32`, `tf32`, `fp16`, `bf16`, `fp8`)
    computes: fp32 for tf32, and bf16 for fp8, whose operands are made from it. Raises KeyError for
    others.
    """
    return DTYPES[COMPUTE_DTYPE_NAMES[matmul]]


def format_dtypes(tensors: Iterable[Tensor]) -> str:
    """Return the different types that tensors have as a text for the record, sorted and joined by
    `/`, such as `bf16/fp32`; both fp8 types are `fp8`, and types without a name here have torch's.
    """
    return "/".join(
        sorted({DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype)) for tensor in tensors})
    )


def get_local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, or the tensor itself if it is not one.

    DTensor is recognized by its method `to_local`, because importing the class takes a third as
    long as importing torch.
    """
    part = getattr(tensor, "to_local", None)
    out: Tensor = tensor if part is None else part()
    return out


class _SkipInitialization(TorchFunctionMode):
    """A torch function mode (a context manager) in which the functions of `torch.nn.init` do
    nothing and return their tensor, so that new modules keep uninitialized memory. All other
    functions run as usual.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Return the tensor unchanged for functions of `torch.nn.init`; call any other function."""
        named = kwargs or {}
        if getattr(func, "__module__", None) == init.__name__:
            return named["tensor"] if "tensor" in named else args[0]
        return func(*args, **named)


@contextmanager
def skip_initialization(device: torch.device, dtype: torch.dtype | None = None) -> Iterator[None]:
    """While the context is open, create modules on the device with uninitialized memory and, if
    `dtype` is given, of that type; torch's default type is changed for that time.

    Building on the meta device, as is usual, makes torch import its compiler (800 modules) for
    initial values that nobody reads, and that takes most of the time.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        with device, _SkipInitialization():
            yield
    finally:
        torch.set_default_dtype(before)


def send_array(array: "np.ndarray[Any, np.dtype[np.int64]]", device: torch.device) -> Tensor:
    """Return a numpy int64 array as a tensor on the device, copied asynchronously from pinned
    memory; on a CPU it shares the array's memory.
    """
    return send_tensor(torch.from_numpy(array), device)


def send_tensor(host: Tensor, device: torch.device) -> Tensor:
    """Return a host tensor on the device, copied asynchronously from pinned memory; on a CPU the
    tensor itself.
    """
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def apply_function(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """Call `function.apply(*arguments)`, for which torch has no types, and return its result."""
    return function.apply(*arguments)  # type: ignore[no-untyped-call]


def make_offsets(lens: Sequence[int], device: torch.device) -> Tensor:
    """Return the offsets of packed rows with these lengths: 0 and the cumulative sums, int32 [rows
    + 1], on the device.
    """
    ends = torch.zeros(len(lens) + 1, dtype=torch.int32)
    ends[1:] = torch.tensor(lens, dtype=torch.int32).cumsum(0)
    return send_tensor(ends, device)
