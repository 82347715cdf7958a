"""A host before a run: settings that can change its results. Read from /proc, /sys and the driver; nothing is set."""

import os
from collections.abc import Mapping
from contextlib import suppress
from math import isfinite
from pathlib import Path

from steelyard.accelerators.row import Accelerator, Found
from steelyard.record.facts import DeviceState, HostState
from steelyard.run import groups, load

ROOT = Path("/")
CPUS, NODES = "sys/devices/system/cpu", "sys/devices/system/node"
CLOCK_SOURCE = "sys/devices/system/clocksource/clocksource0/current_clocksource"
MOST_BYTES = 64 << 10  # of a file that is read
KIB = 1024


def of_host(accelerator: Accelerator, found: list[Found], root: Path = ROOT) -> HostState:
    """The host, and its devices that are used."""
    memory, group = _memory(root), groups.tightest(root)
    told = {
        "load_1m": _load_1m(root),
        "cores": _count(_text(root / CPUS / "online")) or os.cpu_count(),
        "allowed": len(load.affinity()),
        "quota": None if group is None else group.quota,
        "memory_bytes": memory.get("MemTotal"),
        "available_bytes": memory.get("MemAvailable"),
        "swap_bytes": memory.get("SwapTotal"),
        "swap_used_bytes": _difference(memory.get("SwapTotal"), memory.get("SwapFree")),
        "governors": _governors(root),
        "clock_source": _text(root / CLOCK_SOURCE) or None,
        "numa_nodes": _count(_text(root / NODES / "online")) or None,
        "devices": [DeviceState.model_validate(_known(one)) for one in accelerator.states(found)],
    }
    return HostState.model_validate(_known(told))


def _known(table: Mapping[str, object]) -> dict[str, object]:
    """What is not known is left out."""
    return {name: value for name, value in table.items() if value is not None}


def _memory(root: Path) -> dict[str, int]:
    """The lines of /proc/meminfo, in bytes."""
    out = {}
    for line in _text(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        with suppress(ValueError, IndexError):
            out[name] = int(value.split()[0]) * KIB
    return out


def _load_1m(root: Path) -> float | None:
    with suppress(ValueError, IndexError):
        found = float(_text(root / "proc/loadavg").split()[0])
        return found if isfinite(found) else None
    return None


def _difference(whole: int | None, part: int | None) -> int | None:
    return None if whole is None or part is None else max(0, whole - part)


def _governors(root: Path) -> list[str] | None:
    """The frequency governors of all cores, each once; None where the kernel has none, as in most virtual machines."""
    policies = sorted((root / CPUS / "cpufreq").glob("policy*/scaling_governor"))
    names = {_text(path) for path in policies or (root / CPUS).glob("cpu[0-9]*/cpufreq/scaling_governor")}
    return sorted(name for name in names if name) or None


def _count(ranges: str) -> int:
    """How many numbers a list such as 0-3,8 has; 0 where it is none."""
    count = 0
    with suppress(ValueError):
        for part in filter(None, ranges.split(",")):
            first, _, last = part.partition("-")
            count += int(last or first) - int(first) + 1
    return count


def _text(path: Path) -> str:
    """A small file of the system, empty where it is absent or not ours to read."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(MOST_BYTES).strip()
    except OSError:
        return ""
