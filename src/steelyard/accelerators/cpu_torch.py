"""The CPU in framework torch, loaded by workers only."""

from typing import Any

import psutil
import torch

from steelyard.accelerators.cpu import capacity, find
from steelyard.accelerators.events import Clock, HostEvent
from steelyard.errors import RequestError

PRECISIONS = ("fp32", "fp16", "bf16", "fp8")  # fp8 is emulated: its answers count, its rates do not
LACKS = {
    "tf32": "a CPU has no TF32",
    "copies": "a CPU's memory is the host's: nothing is copied between them",
    "peers": "ranks of a CPU share one memory: there is no other device to copy to",
}


class Device:
    backend = "gloo"
    matmul_shape = 1024
    triton = False
    lacks = LACKS

    def __init__(self, local_rank: int, clock: Clock) -> None:
        """All ranks of a machine share its CPUs."""
        self._clock = clock

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    def event(self) -> HostEvent:
        return HostEvent(self._clock)

    def synchronize(self) -> None:
        """A CPU's work is done when its call returns."""

    def reset_memory(self) -> None:
        """Nothing to reset: the framework keeps no count of a CPU's memory."""

    def release_memory(self) -> None:
        """Freed memory of a CPU is back with the system."""

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

    def attention(self, dtype_name: str, shared: bool) -> str:
        return "rows"

    def capacity(self) -> tuple[int, str]:
        """Told: a system that is asked for all of its memory ends processes rather than refuse."""
        return capacity()

    def set_precision(self, matmul: str) -> None:
        if matmul not in PRECISIONS:
            allowed = ", ".join(PRECISIONS)
            raise RequestError(f"a CPU has no precision {matmul!r}; use --precision with one of: {allowed}")
