"""Names of number types as torch's, and arrays on a device."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import init
from torch.overrides import TorchFunctionMode

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
SHORT = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
}
SHORT |= {torch.float8_e4m3fn: "fp8", torch.float8_e5m2: "fp8"}
# By what matmuls run in; of fp8, what is none of the layers' matrices.
COMPUTED_IN = {"fp32": "fp32", "tf32": "fp32", "fp16": "fp16", "bf16": "bf16", "fp8": "bf16"}


def compute_dtype(matmul: str) -> torch.dtype:
    """The type that a matmul's operands have, or of fp8 the one they are made of."""
    return DTYPES[COMPUTED_IN[matmul]]


def dtype_names(tensors: Iterable[Tensor]) -> str:
    """The types that tensors really have, for a record."""
    return "/".join(sorted({SHORT.get(one.dtype, str(one.dtype)) for one in tensors}))


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor. Only one that ranks divide (a DTensor) has such a part; its
    class is not asked for, because importing it takes a third as long as torch itself."""
    part = getattr(tensor, "to_local", None)
    out: Tensor = tensor if part is None else part()
    return out


class _NoInitialValues(TorchFunctionMode):
    """Torch's functions for initial values do nothing."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        told = kwargs or {}
        if getattr(func, "__module__", None) == init.__name__:
            return told["tensor"] if "tensor" in told else args[0]
        return func(*args, **told)


@contextmanager
def without_values(device: torch.device, dtype: torch.dtype | None = None) -> Iterator[None]:
    """Modules made in it lie on the device, of this type, and have no values yet. The usual way,
    over no device (meta), makes torch import its compiler for initial values that nobody reads: 800
    modules, and most of the time to build a model."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        with device, _NoInitialValues():
            yield
    finally:
        torch.set_default_dtype(before)


def send(array: "np.ndarray[Any, np.dtype[np.int64]]", device: torch.device) -> Tensor:
    """An array on the device, without waiting for it."""
    return send_tensor(torch.from_numpy(array), device)


def send_tensor(host: Tensor, device: torch.device) -> Tensor:
    """The same of a tensor of the host."""
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """Call a function with its own backward pass; torch has no types for that."""
    return function.apply(*arguments)  # type: ignore[no-untyped-call]


def cumulative(lens: Sequence[int], device: torch.device) -> Tensor:
    """Borders of rows with these lengths: int32 [rows + 1]."""
    ends = torch.zeros(len(lens) + 1, dtype=torch.int32)
    ends[1:] = torch.tensor(lens, dtype=torch.int32).cumsum(0)
    return send_tensor(ends, device)
