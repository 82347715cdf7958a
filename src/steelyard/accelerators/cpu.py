"""The CPU as an accelerator. What the parent needs comes without torch; `Device` is the worker's side."""

import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from steelyard.accelerators import Found
from steelyard.errors import RequestError
from steelyard.run.measure import HostEvent
from steelyard.run.telemetry import Reading, Source

if TYPE_CHECKING:
    import torch

CPUINFO = Path("/proc/cpuinfo")
PRECISIONS = ("fp32", "fp16", "bf16")


def model_name(cpuinfo: Path = CPUINFO) -> str:
    """The CPU's model, or its architecture where the kernel names no model (most Arm machines)."""
    try:
        text = cpuinfo.read_text()
    except OSError:
        return platform.machine()
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()


def find() -> list[Found]:
    """The machine's CPUs are one device."""
    return [Found(model_name(), None, psutil.virtual_memory().total, 0, None)]


def source() -> Source:
    return Source("cpu", _resident)


def _resident(root_pid: int) -> Reading:
    """Resident bytes of the process tree; pages that its processes share count for each. None once the root ended."""
    try:
        root = psutil.Process(root_pid)
        total: int = root.memory_info().rss
        children = root.children(recursive=True)
    except psutil.NoSuchProcess:
        return {"memory_bytes": None}
    for child in children:
        try:
            total += child.memory_info().rss
        except psutil.NoSuchProcess:  # ended since it was listed: it holds nothing now
            continue
    return {"memory_bytes": total}


class Device:
    backend = "gloo"
    matmul_shape = 1024

    def __init__(self, local_rank: int) -> None:
        """All ranks of a machine share its CPUs."""

    @property
    def torch_device(self) -> "torch.device":
        import torch

        return torch.device("cpu")

    def event(self) -> HostEvent:
        return HostEvent()

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

    def set_precision(self, matmul: str) -> None:
        if matmul not in PRECISIONS:
            allowed = ", ".join(PRECISIONS)
            raise RequestError(f"precision {matmul!r} is not there on a CPU; choose one of {allowed} with --precision")
