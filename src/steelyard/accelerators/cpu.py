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
    """Return the CPU's model as text, from the key "model name" of `cpuinfo`, or the machine's
    architecture, such as aarch64, if the kernel names no model (most Arm machines) or the file
    cannot be read.
    """
    model = _read_cpuinfo("model name", cpuinfo)
    return platform.machine() if model is None else model


def _read_cpuinfo(key: str, cpuinfo: Path) -> str | None:
    """Return the value of the first line of /proc/cpuinfo (or the file `cpuinfo`) with this key,
    without spaces around it; None if there is none or the file cannot be read.
    """
    try:
        lines = [line.partition(":") for line in cpuinfo.read_text().splitlines()]
    except OSError:
        return None
    return next((value.strip() for name, _, value in lines if name.strip() == key), None)


def find_cpu() -> list[DetectedDevice]:
    """Return the machine's CPUs as a list of one device: the CPU's model as name and the host's
    whole memory; no UUID or driver.
    """
    return [DetectedDevice(read_model_name(), None, psutil.virtual_memory().total, 0, None)]


def read_free_bytes() -> int:
    """Return the bytes that are available to new processes on this host without swapping."""
    available: int = psutil.virtual_memory().available
    return available


def read_available_bytes() -> int:
    """Return the bytes that this process can still take, the least of: the host's free memory, the
    limit of its control group (or the host's memory) less its resident memory, and the limit of its
    address space (ulimit -v), if set, less what it has mapped; at least 0.
    """
    memory_info = psutil.Process().memory_info()
    limits = [read_free_bytes(), read_memory_limit()[0] - memory_info.rss]
    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if address_space != resource.RLIM_INFINITY:
        limits.append(address_space - memory_info.vms)
    return max(0, min(limits))


def read_memory_limit(proc: Path = PROC, cgroups: Path = CGROUPS) -> tuple[int, str]:
    """Return (bytes that this process can have at most, a text that says who limits them): the
    lowest limit of its control group and those above it, or the host's memory if that is not more.
    Nothing is allocated.

    `proc` and `cgroups` are the folders that are read, for tests.
    """
    host = psutil.virtual_memory().total
    limits = [
        limit
        for path in _list_limit_files(proc, cgroups)
        if (limit := _read_integer(path)) is not None
    ]
    least = min(limits, default=host)
    if least < host:
        return least, "not measured: limit of the control group"
    return host, "not measured: memory of the host, which no control group limits further"


def _list_limit_files(proc: Path, cgroups: Path) -> list[Path]:
    """Return the paths of files that may limit this process's memory: of its control group and all
    groups above it, in cgroup versions 2 (memory.max) and 1 (memory.limit_in_bytes), from the root
    down. They need not exist. Empty if the process's groups cannot be read.
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
    """Return the telemetry source of the CPU, named `cpu`: its one column `memory_bytes` is the
    resident memory of the run's processes and their descendants.
    """
    return TelemetrySource("cpu", ResidentMemoryReader())


class HostDevice:
    """The device class of a CPU without a framework; CpuTorchDevice and CpuPaddleDevice inherit it
    and add their part, such as `set_precision`. All ranks of a host share its CPUs; `local_rank` is
    ignored.

    `event` is a reading of the given clock, `synchronize` and `reset_memory` do nothing, `memory`
    has the resident bytes of this process, `identity` the CPU's model and the host's memory,
    `versions` only None. `backend` is gloo, `matmul_shape` 1024.
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
        """Return the CPU memory of this process as a dict: `in_use_bytes`, its resident memory now;
        `allocated_bytes` and `reserved_bytes`, the framework's peaks, are None.
        """
        return {
            "allocated_bytes": None,
            "reserved_bytes": None,
            "in_use_bytes": psutil.Process().memory_info().rss,
        }

    def identity(self) -> dict[str, Any]:
        """Return what identifies the host's CPUs as a device: `name` (the model) and `memory_bytes`
        of the host; `uuid`, `capability` and `multiprocessors` are None.
        """
        device = find_cpu()[0]
        unknown = dict.fromkeys(("capability", "multiprocessors"))
        return {"name": device.name, "uuid": None, "memory_bytes": device.memory_bytes, **unknown}

    def versions(self) -> dict[str, str | None]:
        """Return None for `cuda`, `cudnn` and `nccl`, in a dict: a record of a CPU states that they
        were not used.
        """
        return {"cuda": None, "cudnn": None, "nccl": None}


class ResidentMemoryReader:
    """Reads the resident bytes of processes and all their descendants, added up; pages that
    processes share count for each. An instance is called with process ids, as
    `TelemetrySource.read`, and returns {"memory_bytes": sum}, None if no process exists.

    Descendants are searched at every fifth reading only, or if the process ids change, because
    searching takes longer than reading.
    """

    def __init__(self) -> None:
        self._readings = 0
        self._pids: tuple[int, ...] = ()
        self._descendants: list[int] = []

    def __call__(self, pids: tuple[int, ...]) -> Reading:
        """Return {"memory_bytes": the summed resident bytes of these processes and their
        descendants}, each process once; None as value if none of them exists. The descendants are
        those of the last search, at most four readings ago.
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
    """Return the process ids of all descendants of these processes, without themselves, children
    before grandchildren; processes that are gone have none.

    Read from the kernel's lists of children below `proc`: looking through all processes of a host
    would disturb a measurement.
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
    """Return the ids of the child processes of all threads of a process, from `proc`; those read so
    far, maybe none, if it ends meanwhile or the kernel does not list them.
    """
    children: list[int] = []
    try:
        for task in (proc / str(pid) / "task").iterdir():
            children += map(int, (task / "children").read_bytes().split())
    except OSError:  # ended since it was listed, or a kernel without this list
        pass
    return children


def choose_worker_environment(matmul: str) -> dict[str, str]:
    """Return environment variables for workers on a CPU: {ONEDNN_MAX_CPU_ISA: AVX-512} if matmuls
    run in bf16 or fp8 (`matmul`), the CPU advertises AMX that does not work, and the user has not
    set the variable; else an empty dict. The environment itself is not changed.

    Some virtual machines advertise AMX, and die of an illegal instruction in any bf16 matmul. May
    start a process that tries it.
    """
    return (
        {ISA_VARIABLE: ISA_WITHOUT_AMX}
        if matmul in ("bf16", "fp8")
        and ISA_VARIABLE not in os.environ
        and has_working_amx() is False
        else {}
    )


def has_working_amx() -> bool | None:
    """Return whether the matrix tiles (AMX) that the CPU advertises work; None if it advertises
    none. The first call starts a process that tries it with torch (True if that is not installed);
    the answer is cached.
    """
    return _can_multiply_bf16() if "amx_bf16" in _read_flags() else None


def _read_flags(cpuinfo: Path = CPUINFO) -> set[str]:
    """Return the CPU's feature flags; empty if unknown."""
    return set((_read_cpuinfo("flags", cpuinfo) or "").split())


@cache
def _can_multiply_bf16() -> bool:
    """Return False if a process that multiplies in bf16 with torch is killed by an illegal
    instruction; True in all other cases, also if torch is not installed, it fails otherwise, or
    takes over 120 s. The process is started once, and the answer cached.
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
