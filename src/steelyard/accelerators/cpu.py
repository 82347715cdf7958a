"""The CPU as an accelerator, as the host sees it: memory, processes, AMX, and the device class
without a framework.
"""

import os
import platform
import resource
import signal
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

from steelyard.accelerators.events import Clock, HostEvent
from steelyard.accelerators.row import DetectedDevice, Reading, TelemetrySource

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
CPUINFO = PROC / "cpuinfo"
SEARCH_EVERY = 5
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
ISA_VARIABLE = "ONEDNN_MAX_CPU_ISA"  # oneDNN's highest instruction set, which torch's matmuls obey
ISA_WITHOUT_AMX = "AVX512_CORE_BF16"
AMX_PROBE = (
    "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); print(float((a @ a)[0, 0]))"
)
PROBE_TIMEOUT_S = 120.0


def read_model_name(cpuinfo: Path = CPUINFO) -> str:
    """Return the CPU's model, or the machine's architecture if the kernel names no model (most Arm
    machines).
    """
    model = _read_cpuinfo("model name", cpuinfo)
    return platform.machine() if model is None else model


def _read_cpuinfo(key: str, cpuinfo: Path) -> str | None:
    """Return the value of the first line of /proc/cpuinfo with this key; None if there is none or
    it cannot be read.
    """
    try:
        lines = [line.partition(":") for line in cpuinfo.read_text().splitlines()]
    except OSError:
        return None
    return next((value.strip() for name, _, value in lines if name.strip() == key), None)


def find_cpu() -> list[DetectedDevice]:
    """Return the machine's CPUs, as a list of one device."""
    return [DetectedDevice(read_model_name(), None, psutil.virtual_memory().total, 0, None)]


def read_free_bytes() -> int:
    """Return the bytes that are available to new processes on this host without swapping."""
    available: int = psutil.virtual_memory().available
    return available


def read_available_bytes() -> int:
    """Return the bytes that this process can still take: of the host's free memory, within the
    limits of its control group and of its address space (ulimit -v); at least 0.
    """
    memory_info = psutil.Process().memory_info()
    limits = [read_free_bytes(), read_memory_limit()[0] - memory_info.rss]
    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if address_space != resource.RLIM_INFINITY:
        limits.append(address_space - memory_info.vms)
    return max(0, min(limits))


def read_memory_limit(proc: Path = PROC, cgroups: Path = CGROUPS) -> tuple[int, str]:
    """Return the bytes that this process can have at most, and a text that says who limits them:
    its control group, or the host's memory. Nothing is allocated.
    """
    host = psutil.virtual_memory().total
    limits = [
        limit
        for path in _list_limit_files(proc, cgroups)
        if (limit := _read_integer(path)) is not None
    ]
    least = min(limits, default=host)
    if least < host:
        return least, "not tried: the limit of its control group"
    return host, "not tried: the host's memory, which no control group limits further"


def _list_limit_files(proc: Path, cgroups: Path) -> list[Path]:
    """Return the files that may limit this process's memory: of its control group and all groups
    above it, in cgroup versions 2 and 1. They need not exist.
    """
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return []
    out = []
    for line in lines:
        _, controllers, group = [*line.split(":", 2), "", ""][:3]
        if controllers in ("", "memory"):
            root = cgroups / controllers
            folders = [
                root,
                *(
                    root.joinpath(*Path(group).parts[1 : i + 1])
                    for i in range(1, len(Path(group).parts))
                ),
            ]
            out += [
                folder / name
                for folder in folders
                for name in ("memory.max", "memory.limit_in_bytes")
            ]
    return out


def _read_integer(path: Path) -> int | None:
    """Return the integer that a file holds; None if it cannot be read or holds none ("max": no
    limit).
    """
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # "max": no limit
        return None


def make_cpu_source() -> TelemetrySource:
    """Return the telemetry source of the CPU: the resident memory of the run's processes."""
    return TelemetrySource("cpu", ResidentMemoryReader())


class HostDevice:
    """The device class of a CPU without a framework; each framework's class adds its part. All
    ranks of a host share its CPUs.
    """

    backend = "gloo"
    matmul_shape = 1024

    def __init__(self, local_rank: int, clock: Clock) -> None:
        self._clock = clock

    def event(self) -> HostEvent:
        """Return a reading of the host's clock: work of a CPU is done when its call returns."""
        return HostEvent(self._clock)

    def synchronize(self) -> None:
        """Do nothing: a CPU's work is done when its call returns."""

    def reset_memory(self) -> None:
        """Do nothing: frameworks count no memory of a CPU."""

    def memory(self) -> dict[str, int | None]:
        """Return `in_use_bytes`, the resident memory of this process now; the framework's counts
        are None.
        """
        return {
            "allocated_bytes": None,
            "reserved_bytes": None,
            "in_use_bytes": psutil.Process().memory_info().rss,
        }

    def identity(self) -> dict[str, Any]:
        """Return name and memory of the host's CPUs; `uuid`, `capability` and `multiprocessors` are
        None.
        """
        device = find_cpu()[0]
        unknown = dict.fromkeys(("capability", "multiprocessors"))
        return {"name": device.name, "uuid": None, "memory_bytes": device.memory_bytes, **unknown}

    def versions(self) -> dict[str, str | None]:
        """Return None for cuda, cudnn and nccl: a record states that they were not used."""
        return {"cuda": None, "cudnn": None, "nccl": None}


class ResidentMemoryReader:
    """Reads the resident bytes of processes and all their descendants, added up; pages that
    processes share count for each. Descendants are searched at every fifth reading only, because
    searching takes longer than reading.
    """

    def __init__(self) -> None:
        self._readings = 0
        self._pids: tuple[int, ...] = ()
        self._descendants: list[int] = []

    def __call__(self, pids: tuple[int, ...]) -> Reading:
        """Return `memory_bytes` of these processes and their descendants; None if none of them
        exists.
        """
        if self._readings % SEARCH_EVERY == 0 or pids != self._pids:
            self._pids, self._descendants = pids, list_descendants(pids, PROC)
        self._readings += 1
        sizes = [
            size
            for size in map(_read_resident_bytes, dict.fromkeys([*pids, *self._descendants]))
            if size is not None
        ]
        return {"memory_bytes": sum(sizes) if sizes else None}


def _read_resident_bytes(pid: int) -> int | None:
    """Return the resident bytes of a process, None if it is gone. Read from the second number of
    /proc/PID/statm, in pages, as psutil does, in a tenth of its time.
    """
    try:
        return int((PROC / str(pid) / "statm").read_bytes().split()[1]) * PAGE_BYTES
    except (OSError, IndexError):
        return None


def list_descendants(pids: tuple[int, ...], proc: Path = PROC) -> list[int]:
    """Return all descendants of these processes, without themselves, from the kernel's lists of
    children: looking through all processes of a host would disturb a measurement.
    """
    out: list[int] = []
    level = list(pids)
    while level:
        level = [child for pid in level for child in _list_children(pid, proc)]
        out += level
    return out


def count_threads(pid: int, proc: Path = PROC) -> int:
    """Return how many threads a process has; 0 if it is gone."""
    try:
        return sum(1 for _ in (proc / str(pid) / "task").iterdir())
    except OSError:
        return 0


def _list_children(pid: int, proc: Path) -> list[int]:
    """Return the child processes of all threads of a process; empty if it is gone or the kernel
    does not list them.
    """
    children: list[int] = []
    try:
        for task in (proc / str(pid) / "task").iterdir():
            children += map(int, (task / "children").read_bytes().split())
    except OSError:  # ended since it was listed, or a kernel without this list
        pass
    return children


def choose_worker_environment(matmul: str) -> dict[str, str]:
    """Return environment variables for workers: oneDNN is limited to AVX-512 if matmuls run in bf16
    or fp8 and AMX does not work, unless the user has set that variable. Some virtual machines
    advertise AMX, and die of an illegal instruction in any bf16 matmul. May start a process that
    tries it.
    """
    return (
        {ISA_VARIABLE: ISA_WITHOUT_AMX}
        if matmul in ("bf16", "fp8")
        and ISA_VARIABLE not in os.environ
        and has_working_amx() is False
        else {}
    )


def has_working_amx() -> bool | None:
    """Return whether matrix tiles (AMX) that the CPU advertises work; None if it advertises none.
    The first call starts a process that tries it.
    """
    return _can_multiply_bf16() if "amx_bf16" in _read_flags() else None


def _read_flags(cpuinfo: Path = CPUINFO) -> set[str]:
    """Return the CPU's feature flags; empty if unknown."""
    return set((_read_cpuinfo("flags", cpuinfo) or "").split())


@cache
def _can_multiply_bf16() -> bool:
    """Return whether a process that multiplies in bf16 with torch is not killed by an illegal
    instruction; True if torch is not installed or it times out. The process is started once, and
    the answer cached.
    """
    if find_spec("torch") is None:
        return True
    try:
        process = subprocess.run(
            [sys.executable, "-c", AMX_PROBE],
            capture_output=True,
            timeout=PROBE_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return True
    return process.returncode != -signal.SIGILL
