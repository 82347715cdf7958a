"""NVIDIA devices in framework torch, imported by workers only: events, memory, identity and
precision.
"""

import os
from collections.abc import Callable
from typing import Any

import torch

from steelyard.accelerators.events import Clock, StreamEvent
from steelyard.errors import RequestError

_cuda: Any = torch.cuda  # partly untyped, depending on the version
_cudnn: Any = torch.backends.cudnn

# By the dtype of the weights. The flash kernel takes 16-bit types only. Both align a causal
# mask at a row's end, so that they work with shared prefixes too.
ATTENTION_KERNELS = {"fp16": "flash", "bf16": "flash", "fp32": "efficient", "tf32": "efficient"}

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
# lowest compute capability with tensor cores for a precision
MIN_CAPABILITIES = {"int8": (7, 5), "bf16": (8, 0), "tf32": (8, 0), "fp8": (8, 9)}


class CudaGraphRecorder:
    """Records what a function launches as a CUDA graph. All its graphs share a memory pool. Torch's
    random generator is part of a graph: each replay draws new numbers.
    """

    def __init__(self) -> None:
        self._pool = _cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], None]) -> Any:
        """Call `run` once while recording, and return the CUDA graph, which has `replay`."""
        graph = _cuda.CUDAGraph()
        # NCCL's threads may query events meanwhile
        with _cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            run()
        return graph


def _enable_expandable_segments() -> None:
    """Set torch's allocator to expandable segments, unless the user has set an allocator variable.
    Must be called before anything is allocated. Otherwise micro-batches of different sizes leave
    holes: 5.7 GiB of 106, which is what a size that was chosen to fit would lack.
    """
    if not any(name in os.environ for name in ALLOCATOR_VARIABLES):
        torch_core: Any = torch._C
        set_allocator = (
            getattr(torch_core, "_accelerator_setAllocatorSettings", None)
            or _cuda.memory._set_allocator_settings
        )
        set_allocator("expandable_segments:True")


class CudaTorchDevice:
    """An NVIDIA GPU, driven by torch."""

    backend = "nccl"
    matmul_shape = 8192
    triton = True

    def __init__(self, local_rank: int, clock: Clock) -> None:
        """Make GPU `local_rank` torch's current device, with expandable allocator segments. `clock`
        is not used: GPUs have events.
        """
        self._index = local_rank
        _enable_expandable_segments()
        _cuda.set_device(local_rank)

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cuda", self._index)

    def event(self) -> StreamEvent:
        """Record an event in the current stream and return it; does not wait."""
        event = _cuda.Event(enable_timing=True)
        event.record()
        return StreamEvent(event)

    def synchronize(self) -> None:
        _cuda.synchronize(self._index)

    def reset_memory(self) -> None:
        """Reset torch's peaks of allocated and reserved memory."""
        _cuda.reset_peak_memory_stats(self._index)

    def release_memory(self) -> None:
        """Return cached memory that no tensor uses to the driver."""
        _cuda.empty_cache()

    def memory(self) -> dict[str, int | None]:
        """Return torch's peaks of allocated and reserved bytes since the last reset."""
        return {
            "allocated_bytes": _cuda.max_memory_allocated(self._index),
            "reserved_bytes": _cuda.max_memory_reserved(self._index),
        }

    def identity(self) -> dict[str, Any]:
        """Return name, UUID (with NVML's prefix `GPU-`), memory, compute capability and number of
        multiprocessors.
        """
        properties = _cuda.get_device_properties(self._index)
        return {
            "name": properties.name,
            "uuid": f"GPU-{properties.uuid}",  # torch leaves out the prefix that NVML has
            "memory_bytes": properties.total_memory,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
        }

    def versions(self) -> dict[str, str | None]:
        """Return the versions of CUDA, cuDNN and NCCL that torch uses; None for one that it does
        not have.
        """
        nccl = _cuda.nccl.version() if torch.distributed.is_nccl_available() else None
        return {
            "cuda": torch.version.cuda,
            "cudnn": format_cudnn_version(_cudnn.version()),
            "nccl": None if nccl is None else ".".join(str(part) for part in nccl),
        }

    def attention(self, dtype_name: str, shared: bool) -> str:
        """Return the fastest attention kernel for this dtype: `flash` for 16-bit types, else
        `efficient`. Both work with shared prefixes.
        """
        return ATTENTION_KERNELS[dtype_name]

    def recorder(self) -> CudaGraphRecorder:
        """Return a new recorder of CUDA graphs, with a memory pool of its own."""
        return CudaGraphRecorder()

    @property
    def lacks(self) -> dict[str, str]:
        """Return the precisions that the GPU has no tensor cores for, with the reason, by compute
        capability (CUDA C++ Programming Guide, "Compute Capabilities"); libraries emulate or refuse
        them.
        """
        capability = torch.cuda.get_device_capability(self._index)
        return {
            name: f"compute capability {capability[0]}.{capability[1]}: {name} needs {least[0]}.{least[1]}"
            for name, least in MIN_CAPABILITIES.items()
            if capability < least
        }

    def capacity(self) -> None:
        """Return None: the memory that a process can have is found by allocating."""
        return

    def set_precision(self, matmul: str) -> None:
        """Allow TF32 in matmuls and cuDNN for `tf32`, and forbid it for all else. Raises
        RequestError for fp8 on a GPU without it.

        The older pair of flags is set, because they set the newer `fp32_precision` too, so that
        both can be read later. The newer ones leave the older unreadable (torch 2.13 raises), and
        torch's own compiler still reads those.
        """
        if matmul == "fp8" and "fp8" in self.lacks:
            raise RequestError(f"{self.lacks['fp8']}; use --precision bf16")
        tf32 = matmul == "tf32"
        torch.backends.cuda.matmul.allow_tf32 = tf32
        torch.backends.cudnn.allow_tf32 = tf32


def format_cudnn_version(number: int | None) -> str | None:
    """Format cuDNN's version number: 91002 is 9.10.2 (cudnn_version.h since cuDNN 9). None stays
    None.
    """
    return None if number is None else f"{number // 10000}.{number // 100 % 100}.{number % 100}"
