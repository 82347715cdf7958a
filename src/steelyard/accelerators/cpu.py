"""The CPU as an accelerator, as the host sees it."""

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
from steelyard.accelerators.row import Found, Reading, Source

PROC, GROUPS = Path("/proc"), Path("/sys/fs/cgroup")
CPUINFO = PROC / "cpuinfo"
LOOK = 5
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
ISA = "ONEDNN_MAX_CPU_ISA"  # oneDNN's highest instruction set, which torch's matmuls obey
WITHOUT_AMX = "AVX512_CORE_BF16"
PROBE = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); print(float((a @ a)[0, 0]))"
PROBE_TIMEOUT_S = 120.0


def model_name(cpuinfo: Path = CPUINFO) -> str:
    """Return the CPU's model, or its architecture where the kernel names no model (most Arm
    machines).
    """
    found = _first_line("model name", cpuinfo)
    return platform.machine() if found is None else found


def _first_line(key: str, cpuinfo: Path) -> str | None:
    """Return the value of the first line of this key; None where there is none."""
    try:
        lines = [line.partition(":") for line in cpuinfo.read_text().splitlines()]
    except OSError:
        return None
    return next((value.strip() for name, _, value in lines if name.strip() == key), None)


def find() -> list[Found]:
    """The machine's CPUs are one device."""
    return [Found(model_name(), None, psutil.virtual_memory().total, 0, None)]


def free() -> int:
    """Bytes that processes can have without another losing its own."""
    available: int = psutil.virtual_memory().available
    return available


def available_to_process() -> int:
    """Return the bytes that this process can still take: of the host's free memory, within the
    limits of its control group and of its address space (ulimit -v)."""
    own = psutil.Process().memory_info()
    limits = [free(), capacity()[0] - own.rss]
    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if address_space != resource.RLIM_INFINITY:
        limits.append(address_space - own.vms)
    return max(0, min(limits))


def capacity(proc: Path = PROC, groups: Path = GROUPS) -> tuple[int, str]:
    """Bytes that this process can have, and who says so: its control group, or the host."""
    host = psutil.virtual_memory().total
    limits = [limit for path in _limits(proc, groups) if (limit := _number(path)) is not None]
    least = min(limits, default=host)
    if least < host:
        return least, "not tried: the limit of its control group"
    return host, "not tried: the host's memory, which no control group limits further"


def _limits(proc: Path, groups: Path) -> list[Path]:
    """Where limits of this process's memory may stand: of its control group, or a container's root,
    in versions 2 and 1.
    """
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return []
    out = []
    for line in lines:
        _, controllers, group = [*line.split(":", 2), "", ""][:3]
        if controllers in ("", "memory"):
            root = groups / controllers
            places = [
                root,
                *(
                    root.joinpath(*Path(group).parts[1 : i + 1])
                    for i in range(1, len(Path(group).parts))
                ),
            ]
            out += [
                place / name for place in places for name in ("memory.max", "memory.limit_in_bytes")
            ]
    return out


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # "max": no limit
        return None


def source() -> Source:
    return Source("cpu", Resident())


class HostDevice:
    """The device class of a CPU without a framework; each framework adds its own part. All ranks of
    a host share its CPUs.
    """

    backend = "gloo"
    matmul_shape = 1024

    def __init__(self, local_rank: int, clock: Clock) -> None:
        self._clock = clock

    def event(self) -> HostEvent:
        return HostEvent(self._clock)

    def synchronize(self) -> None:
        """A CPU's work is done when its call returns."""

    def reset_memory(self) -> None:
        """Nothing to reset: the framework keeps no count of a CPU's memory."""

    def memory(self) -> dict[str, int | None]:
        return {
            "allocated_bytes": None,
            "reserved_bytes": None,
            "in_use_bytes": psutil.Process().memory_info().rss,
        }

    def identity(self) -> dict[str, Any]:
        found = find()[0]
        unknown = dict.fromkeys(("capability", "multiprocessors"))
        return {"name": found.name, "uuid": None, "memory_bytes": found.memory_bytes, **unknown}

    def versions(self) -> dict[str, str | None]:
        """A record says of the libraries of other devices that they were not used."""
        return {"cuda": None, "cudnn": None, "nccl": None}


class Resident:
    """Reads the resident bytes of processes and of all they started; pages that processes share
    count for each. None where none is there. What they started is looked for at every fifth
    reading: looking takes longer than reading."""

    def __init__(self) -> None:
        self._readings = 0
        self._pids: tuple[int, ...] = ()
        self._below: list[int] = []

    def __call__(self, pids: tuple[int, ...]) -> Reading:
        if self._readings % LOOK == 0 or pids != self._pids:
            self._pids, self._below = pids, below(pids, PROC)
        self._readings += 1
        known = [
            size
            for size in map(_resident_bytes, dict.fromkeys([*pids, *self._below]))
            if size is not None
        ]
        return {"memory_bytes": sum(known) if known else None}


def _resident_bytes(pid: int) -> int | None:
    """Of a process that is there, from the second number of statm, in pages: what psutil reads, at
    a tenth of the time.
    """
    try:
        return int((PROC / str(pid) / "statm").read_bytes().split()[1]) * PAGE_BYTES
    except (OSError, IndexError):
        return None


def below(pids: tuple[int, ...], proc: Path = PROC) -> list[int]:
    """All processes that these started, as the kernel lists them: looking through all processes of
    a host would be seen in a measurement."""
    out: list[int] = []
    level = list(pids)
    while level:
        level = [child for pid in level for child in _children(pid, proc)]
        out += level
    return out


def threads(pid: int, proc: Path = PROC) -> int:
    """How many a process has; 0 of one that is gone."""
    try:
        return sum(1 for _ in (proc / str(pid) / "task").iterdir())
    except OSError:
        return 0


def _children(pid: int, proc: Path) -> list[int]:
    found: list[int] = []
    try:
        for task in (proc / str(pid) / "task").iterdir():
            found += map(int, (task / "children").read_bytes().split())
    except OSError:  # ended since it was listed, or a kernel without this list
        pass
    return found


def environment(matmul: str) -> dict[str, str]:
    """Variables for workers. Some virtual machines advertise AMX and die of an illegal instruction
    in any matmul in bf16: there, and only there, oneDNN is told to do without."""
    return (
        {ISA: WITHOUT_AMX}
        if matmul in ("bf16", "fp8") and ISA not in os.environ and amx() is False
        else {}
    )


def amx() -> bool | None:
    """Whether matrix tiles (AMX) that the CPU advertises work; None where it advertises none."""
    return _survives() if "amx_bf16" in _flags() else None


def _flags(cpuinfo: Path = CPUINFO) -> set[str]:
    return set((_first_line("flags", cpuinfo) or "").split())


@cache
def _survives() -> bool:
    """Whether a throw-away process survives a matmul in bf16; asked once."""
    if find_spec("torch") is None:
        return True
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROBE], capture_output=True, timeout=PROBE_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return True
    return done.returncode != -signal.SIGILL
