"""Word the exceptions that torch raises in a row of `steelyard spec`: what they mean to a reader,
without their text.
"""

import re

import torch.distributed as dist

from steelyard.errors import is_out_of_memory
from steelyard.words import Message

FRAMEWORK = "torch"
# Device libraries below torch report a lack of memory as an error like any other.
NO_MEMORY = re.compile(r"out of memory|alloc_failed", re.IGNORECASE)
# torch has no exception type for an operation that a device lacks: besides NotImplementedError, its
# kernels and the libraries below them raise RuntimeError with one of these.
UNSUPPORTED = re.compile(
    r"not implemented|not supported|unsupported|only supported|not_supported|could not run"
    r"|no available kernel|no kernel image|not compiled with|compute capability|none is available",
    re.IGNORECASE,
)
# Errors of a device library begin with its name, such as `CUDA error: ` or `cuDNN error: `.
DEVICE_ERROR = re.compile(r"\w+ error: ")


def explain_error(error: Exception, precision: str | None) -> Message:
    """Return what an exception of torch means for a row of `steelyard spec`: memory that ran out,
    an operation that torch does not have for this device (in `precision`, unless it is None), a
    failed exchange between ranks, an error of the device; a general message for all else.
    """
    text = str(error)
    if is_out_of_memory(error) or NO_MEMORY.search(text):
        return Message("ceiling.memory")
    if isinstance(error, NotImplementedError) or UNSUPPORTED.search(text):
        if precision is None:
            return Message("ceiling.unsupported", {"framework": FRAMEWORK})
        return Message(
            "ceiling.unsupported_precision", {"framework": FRAMEWORK, "precision": precision}
        )
    if isinstance(error, dist.DistError):
        return Message("ceiling.exchange")
    return Message("ceiling.device_error" if DEVICE_ERROR.match(text) else "ceiling.failed")
