"""The CPU as an accelerator, as the host sees it."""

import os
import platform
import signal
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import psutil

from steelyard.accelerators.row import Found, Reading, Source

CPUINFO = Path("/proc/cpuinfo")
ISA = "ONEDNN_MAX_CPU_ISA"  # oneDNN's highest instruction set, which torch's matmuls obey
WITHOUT_AMX = "AVX512_CORE_BF16"
PROBE = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); print(float((a @ a)[0, 0]))"
PROBE_TIMEOUT_S = 120.0


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


def environment(matmul: str) -> dict[str, str]:
    """Variables for workers. Some virtual machines advertise AMX and die of an illegal instruction in any matmul in bf16:
    there, and only there, oneDNN is told to do without."""
    if matmul != "bf16" or ISA in os.environ or "amx_bf16" not in _flags() or _survives():
        return {}
    return {ISA: WITHOUT_AMX}


def _flags(cpuinfo: Path = CPUINFO) -> set[str]:
    try:
        text = cpuinfo.read_text()
    except OSError:
        return set()
    return next((set(line.partition(":")[2].split()) for line in text.splitlines() if line.startswith("flags")), set())


@cache
def _survives() -> bool:
    """Whether a throw-away process survives a matmul in bf16; asked once."""
    if find_spec("torch") is None:
        return True
    try:
        done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, timeout=PROBE_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return True
    return done.returncode != -signal.SIGILL
