"""The CPU in framework paddle, loaded by workers only."""

import os
from typing import Any

import paddle
import psutil

from steelyard.accelerators.cpu import find
from steelyard.accelerators.events import Clock, HostEvent
from steelyard.errors import RequestError

# Of Paddle 3.3, all tried: what it does on a GPU alone.
LACKS = {
    "tp": "fleet's tensor parallel layers have kernels for GPUs alone",
    "pp": "Paddle's gloo has neither send nor receive",
    "sharding 2": "group_sharded_parallel takes GPUs alone",
    "copies of shards": "Paddle's gloo hangs in groups of some of the ranks",
    "flash": "flash attention has kernels for GPUs alone",
}


class Device:
    place = "cpu"
    backend = "gloo"
    matmul_shape = 1024
    lacks = LACKS

    def __init__(self, local_rank: int, clock: Clock) -> None:
        """All ranks of a machine share its CPUs. Paddle takes one thread of them, unless it is told."""
        self._clock = clock
        paddle.set_device(self.place)
        paddle.base.core.set_num_threads(self.threads())

    def threads(self) -> int:
        told = os.environ.get("OMP_NUM_THREADS", "")
        return int(told) if told.isdecimal() and int(told) else len(os.sched_getaffinity(0))

    def event(self) -> HostEvent:
        return HostEvent(self._clock)

    def synchronize(self) -> None:
        """A CPU's work is done when its call returns."""

    def reset_memory(self) -> None:
        """Nothing to reset: the framework keeps no count of a CPU's memory."""

    def memory(self) -> dict[str, int | None]:
        return {"allocated_bytes": None, "reserved_bytes": None, "in_use_bytes": psutil.Process().memory_info().rss}

    def identity(self) -> dict[str, Any]:
        seen = find()[0]
        return {
            "name": seen.name,
            "uuid": None,
            "memory_bytes": seen.memory_bytes,
            "capability": None,
            "multiprocessors": None,
        }

    def versions(self) -> dict[str, str | None]:
        return {"cuda": None, "cudnn": None, "nccl": None}

    def set_precision(self, matmul: str) -> None:
        """Paddle's O2 leaves a model on a CPU in fp32, and says nothing of it."""
        if matmul != "fp32":
            raise RequestError(f"Paddle on a CPU has no precision {matmul!r}; use --precision fp32")
