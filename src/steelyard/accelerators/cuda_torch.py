"""NVIDIA devices in framework torch, imported by workers only: events, memory, identity and
precision.
"""

import os
from collections.abc import Callable
from typing import Any

import torch

from steelyard.accelerators.events import Clock, StreamEvent
from steelyard.accelerators.peaks import check_precision_name
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
    """Records what a function launches as a CUDA graph: call it with the function, and it returns
    the graph, which has `replay`. All its graphs share a memory pool. Torch's random generator is
    part of a graph: each replay draws new numbers.
    """

    def __init__(self) -> None:
        self._pool = _cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], None]) -> Any:
        """Call `run` once while its launches are recorded as a CUDA graph, which does not execute
        them, and return the graph; its `replay` does. Its memory comes from this recorder's pool.
        """
        graph = _cuda.CUDAGraph()
        # NCCL's threads may query events meanwhile
        with _cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            run()
        return graph


def _enable_expandable_segments() -> None:
    """Set the allocator of torch in this process to expandable segments, unless the user has set
    PYTORCH_ALLOC_CONF or PYTORCH_CUDA_ALLOC_CONF. Must be called before anything is allocated.

    Otherwise micro-batches of different sizes leave holes: 5.7 GiB of 106, which is what a size
    that was chosen to fit would lack.
    """
    if not any(name in os.environ for name in ALLOCATOR_VARIABLES):
        torch_core: Any = torch._C
        set_allocator = (
            getattr(torch_core, "_accelerator_setAllocatorSettings", None)
            or _cuda.memory._set_allocator_settings
        )
        set_allocator("expandable_segments:True")


class CudaTorchDevice:
    """An NVIDIA GPU, driven by torch in a worker: implements `TorchDevice` with CUDA events,
    allocator peaks, Triton, CUDA graphs (`recorder`) and NCCL; `matmul_shape` is 8192,
    `set_precision` switches TF32, `lacks` names precisions without tensor cores, `capacity` is
    None.

    Constructing it makes the GPU torch's current device and sets torch's allocator to expandable
    segments, unless the user has set one.
    """

    backend = "nccl"
    matmul_shape = 8192
    triton = True

    def __init__(self, local_rank: int, clock: Clock) -> None:
        """Make GPU `local_rank` torch's current device, and set torch's allocator to expandable
        segments unless the user has set one. `clock` is not used: GPUs have events.
        """
        self._index = local_rank
        _enable_expandable_segments()
        _cuda.set_device(local_rank)

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cuda", self._index)

    def event(self) -> StreamEvent:
        """Record a CUDA event, with timing, in torch's current stream and return it; the host does
        not wait for it.
        """
        event = _cuda.Event(enable_timing=True)
        event.record()
        return StreamEvent(event)

    def synchronize(self) -> None:
        _cuda.synchronize(self._index)

    def reset_memory(self) -> None:
        """Reset the peaks of allocated and reserved memory that torch's allocator counts on this
        GPU.
        """
        _cuda.reset_peak_memory_stats(self._index)

    def release_memory(self) -> None:
        """Return cached memory that no tensor uses to the driver."""
        _cuda.empty_cache()

    def memory(self) -> dict[str, int | None]:
        """Return `allocated_bytes` and `reserved_bytes`: the peaks of torch's allocator on this GPU
        since the last reset.
        """
        return {
            "allocated_bytes": _cuda.max_memory_allocated(self._index),
            "reserved_bytes": _cuda.max_memory_reserved(self._index),
        }

    def identity(self) -> dict[str, Any]:
        """Return what identifies this GPU: `name`, `uuid` (with NVML's prefix `GPU-`),
        `memory_bytes`, `capability` (such as "9.0") and `multiprocessors`, their number.
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
        """Return the versions of `cuda`, `cudnn` and `nccl` that torch uses, as dotted texts; None
        for one that it does not have.
        """
        nccl = _cuda.nccl.version() if torch.distributed.is_nccl_available() else None
        return {
            "cuda": torch.version.cuda,
            "cudnn": format_cudnn_version(_cudnn.version()),
            "nccl": None if nccl is None else ".".join(str(part) for part in nccl),
        }

    def attention(self, dtype_name: str, shared: bool) -> str:
        """Return the name of the fastest attention kernel on a GPU for weights of this dtype:
        `flash` for fp16 and bf16, `efficient` for fp32 and tf32; KeyError for others. `shared` is
        ignored: both work with shared prefixes.
        """
        return ATTENTION_KERNELS[dtype_name]

    def recorder(self) -> CudaGraphRecorder:
        """Return a new recorder of CUDA graphs, with a memory pool of its own."""
        return CudaGraphRecorder()

    @property
    def lacks(self) -> dict[str, str]:
        """Return the precisions (of int8, bf16, tf32, fp8) that this GPU has no tensor cores for,
        with the reason as text, by compute capability (CUDA C++ Programming Guide, "Compute
        Capabilities"); libraries emulate or refuse them. Empty if it has all.
        """
        capability = torch.cuda.get_device_capability(self._index)
        return {
            name: f"compute capability {capability[0]}.{capability[1]}: {name} needs"
            f" {least[0]}.{least[1]}"
            for name, least in MIN_CAPABILITIES.items()
            if capability < least
        }

    def capacity(self) -> None:
        """Return None: the memory that a process can have is found by allocating."""
        return

    def set_precision(self, matmul: str) -> None:
        """Allow TF32 in torch's matmuls and cuDNN if `matmul` is `tf32`, and forbid it for all
        else; global in this process. Raises RequestError for fp8 on a GPU without it, and for
        a name that is no precision.

        The older pair of flags is set, because they set the newer `fp32_precision` too, so that
        both can be read later. The newer ones leave the older unreadable (torch 2.13 raises), and
        torch's own compiler still reads those.
        """
        check_precision_name(matmul)
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
