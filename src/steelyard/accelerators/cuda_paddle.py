"""NVIDIA devices in framework paddle, imported by workers only: events, memory, identity and
precision.

Written from Paddle 3.3's own source; nobody here has run it on a GPU yet (docs/engines.md).
"""

import os
from collections.abc import Mapping
from typing import Any

import paddle

from steelyard.accelerators import nvml
from steelyard.accelerators.events import Clock, StreamEvent
from steelyard.accelerators.peaks import check_precision_name
from steelyard.errors import RequestError

_cuda: Any = paddle.device.cuda


class CudaPaddleDevice:
    """An NVIDIA GPU, driven by Paddle in a worker: implements `PaddleDevice` with CUDA events,
    allocator peaks and NCCL; `place` is such as gpu:0, `matmul_shape` 8192, `lacks` empty, and
    `set_precision` switches TF32.

    Constructing it makes the GPU Paddle's device and sets FLAGS_selected_gpus; RequestError if this
    Paddle is built for CPUs only.
    """

    backend = "nccl"
    matmul_shape = 8192
    lacks: Mapping[str, str] = {}

    def __init__(self, local_rank: int, clock: Clock) -> None:
        """Make GPU `local_rank` Paddle's device, and set FLAGS_selected_gpus in this process's
        environment. Raises RequestError if this Paddle is built for CPUs only. `clock` is not used:
        GPUs have events. `place` is such as "gpu:0".
        """
        if not paddle.device.is_compiled_with_cuda():
            raise RequestError(
                "this Paddle is built for CPUs; install paddlepaddle-gpu, or choose"
                " --accelerator cpu"
            )
        self._index, self.place = local_rank, f"gpu:{local_rank}"
        os.environ["FLAGS_selected_gpus"] = str(local_rank)  # noqa: SIM112  Paddle's own spelling
        paddle.set_device(self.place)

    def threads(self) -> int:
        """Return the number of CPUs that this process may use."""
        return len(os.sched_getaffinity(0))

    def event(self) -> StreamEvent:
        """Record a CUDA event, with timing, in Paddle's current stream and return it; the host does
        not wait for it.
        """
        event = _cuda.Event(enable_timing=True)
        event.record(_cuda.current_stream())
        return StreamEvent(event)

    def synchronize(self) -> None:
        _cuda.synchronize(self._index)

    def reset_memory(self) -> None:
        """Reset the peaks of allocated and reserved memory that Paddle's allocator counts on this
        GPU.
        """
        _cuda.reset_max_memory_allocated(self._index)
        _cuda.reset_max_memory_reserved(self._index)

    def memory(self) -> dict[str, int | None]:
        """Return `allocated_bytes` and `reserved_bytes`: the peaks of Paddle's allocator on this
        GPU since the last reset.
        """
        return {
            "allocated_bytes": _cuda.max_memory_allocated(self._index),
            "reserved_bytes": _cuda.max_memory_reserved(self._index),
        }

    def identity(self) -> dict[str, Any]:
        """Return what identifies this GPU: `name`, `uuid`, `memory_bytes`, `capability` (such as
        "9.0") and `multiprocessors`, their number.

        The UUID comes from NVML, by the device's position among those of CUDA_VISIBLE_DEVICES,
        since Paddle does not tell it; None if NVML lists fewer devices. Raises RequestError if NVML
        fails.
        """
        properties = _cuda.get_device_properties(self._index)
        # Paddle does not tell the UUID
        devices = nvml.find_nvidia_devices(os.environ.get("CUDA_VISIBLE_DEVICES"))
        return {
            "name": properties.name,
            "uuid": devices[self._index].uuid if self._index < len(devices) else None,
            "memory_bytes": properties.total_memory,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
        }

    def versions(self) -> dict[str, str | None]:
        """Return the versions of `cuda`, `cudnn` and `nccl` that Paddle was built with, as texts;
        NCCL's is None if it has none.
        """
        nccl = int(paddle.version.nccl())  # 22005 is 2.20.5
        return {
            "cuda": str(paddle.version.cuda()),
            "cudnn": str(paddle.version.cudnn()),
            "nccl": f"{nccl // 10000}.{nccl // 100 % 100}.{nccl % 100}" if nccl else None,
        }

    def set_precision(self, matmul: str) -> None:
        """Switch TF32 in cuBLAS and cuDNN on if `matmul` is `tf32`, and off for all else: Paddle
        has it on by default. Changes Paddle's global state, and skips a switch that this Paddle
        does not have. Raises RequestError for a name that is no precision.
        """
        check_precision_name(matmul)
        for switch in ("set_cublas_switch", "set_cudnn_switch"):
            if hasattr(paddle.base.core, switch):
                getattr(paddle.base.core, switch)(matmul == "tf32")
