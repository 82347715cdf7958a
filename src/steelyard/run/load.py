"""CPU time and memory of a host while a run goes on, from the kernel's counters: of the cores it
may use, of its own processes, of its control group, and how many processes the kernel ended for
lack of memory.

Counters are read once a second. What others used of a stretch of time is worked out from the
record.
"""

import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from steelyard.accelerators import cpu
from steelyard.record.facts import Load
from steelyard.run.messages import LoadSaid

ROOT = Path("/")
TICKS = os.sysconf("SC_CLK_TCK")  # of a second, in which the kernel counts
# Of the columns of /proc/stat after the name: user, nice, system, irq, softirq, steal. Time that a
# hypervisor gave to others (steal) is missing here as well. Guests are in user.
BUSY = (0, 1, 2, 5, 6, 7)
# utime and stime of /proc/PID/stat after the name in brackets; then cutime, cstime
ALONE, OWN = (11, 12), (11, 12, 13, 14)
# Descendants are found through the threads of a process. Where ranks have many, they are looked for
# less often.
FEW_THREADS, SELDOM = 256, 10
MAX_ROWS = 2048
GROUPS = "sys/fs/cgroup"


def affinity() -> frozenset[int]:
    """The cores that this process may run on."""
    if sys.platform != "linux":
        return frozenset(range(os.cpu_count() or 1))
    return frozenset(os.sched_getaffinity(0))


class Reader:
    """Reads the counters of this host for one run."""

    def __init__(
        self,
        token: str,
        root: Path = ROOT,
        cores: Iterable[int] | None = None,
        agent: tuple[int, ...] | None = None,
    ) -> None:
        self._token, self._root = token, root
        self._cores = affinity() if cores is None else frozenset(cores)
        # The agent, and who started it: the command itself, or what stands for it on this host.
        self._agent = (
            (os.getpid(), *(pid for pid in (os.getppid(),) if pid > 1)) if agent is None else agent
        )
        self._group = tightest_group(root)
        self._pids: tuple[int, ...] = ()
        self._below: list[int] = []
        self._readings = 0

    def watch(self, pids: tuple[int, ...]) -> None:
        """The ranks are these."""
        self._pids = pids

    def read(self, t_s: float) -> LoadSaid:
        self._look()
        return LoadSaid(
            token=self._token,
            allowed=len(self._cores),
            quota=None if self._group is None else self._group.quota,
            t_s=t_s,
            busy_s=self._busy_s(),
            own_s=self._used_s(dict.fromkeys([*self._agent, *self._pids, *self._below])),
            agent_s=self._used_s(self._agent[:1], ALONE),
            group_s=None if self._group is None else self._group.usage_s(),
        )

    def _look(self) -> None:
        proc = self._root / "proc"
        threads = sum(cpu.threads(pid, proc) for pid in self._pids)
        if threads <= FEW_THREADS or self._readings % SELDOM == 0:
            self._below = cpu.below(self._pids, proc)
        self._readings += 1

    def _busy_s(self) -> float | None:
        """Of the cores that the run may use, by whomever; None where one of them is not counted."""
        ticks = found = 0
        with suppress(OSError, ValueError, IndexError):
            for line in (self._root / "proc/stat").read_text().splitlines():
                if not line.startswith("cpu"):
                    break
                name, *columns = line.split()
                if name != "cpu" and int(name[3:]) in self._cores:
                    found += 1
                    ticks += sum(int(columns[place]) for place in BUSY)
        return ticks / TICKS if found == len(self._cores) else None

    def _used_s(self, pids: Iterable[int], places: tuple[int, ...] = OWN) -> float:
        """By processes that are there, and by children that they waited for."""
        ticks = 0
        for pid in pids:
            with suppress(OSError, ValueError, IndexError):
                columns = (
                    (self._root / "proc" / str(pid) / "stat")
                    .read_bytes()
                    .rpartition(b")")[2]
                    .split()
                )
                ticks += sum(int(columns[place]) for place in places)
        return ticks / TICKS


@dataclass
class LoadReadings:
    """The readings of one host as they arrive. Counters lose nothing when every second reading is
    dropped.
    """

    rows: list[LoadSaid] = field(default_factory=list)

    def add(self, row: LoadSaid) -> None:
        self.rows.append(row)
        if len(self.rows) > MAX_ROWS:
            self.rows = [*self.rows[:-1:2], self.rows[-1]]

    def load(self) -> Load | None:
        """Counted from the first reading on; None where the host does not count what its cores do."""
        if not self.rows or any(row.busy_s is None for row in self.rows):
            return None
        first = self.rows[0]
        told = [row.busy_s - (first.busy_s or 0.0) for row in self.rows if row.busy_s is not None]
        columns = {
            "t_s": [row.t_s for row in self.rows],
            "busy_s": [_rounded(value) for value in told],
            "own_s": [_rounded(row.own_s - first.own_s) for row in self.rows],
            "agent_s": [_rounded(row.agent_s - first.agent_s) for row in self.rows],
        }
        if first.quota is None:
            return Load(allowed=first.allowed, **columns)
        counted = [row.group_s for row in self.rows]
        begun = first.group_s
        group = [
            None if begun is None or value is None else _rounded(value - begun) for value in counted
        ]
        return Load(allowed=first.allowed, quota=first.quota, group_s=group, **columns)


def _rounded(seconds: float) -> float:
    """The kernel counts hundredths."""
    return round(seconds, 3)


@dataclass(frozen=True)
class Group:
    """A group with a quota: so many cores, for all processes in it together."""

    quota: float
    usage: Path | None  # the file that counts its CPU time

    def usage_s(self) -> float | None:
        """CPU seconds of all that was ever in it."""
        if self.usage is None:
            return None
        with suppress(OSError, ValueError):
            text = self.usage.read_text()
            if self.usage.name == "cpuacct.usage":
                return int(text) / 1e9
            return next(
                int(line.split()[1]) / 1e6
                for line in text.splitlines()
                if line.startswith("usage_usec ")
            )
        return None


def tightest_group(root: Path = ROOT) -> Group | None:
    """The group whose quota holds; None where no group on the way up has one."""
    found = [
        group
        for folder, counted in _folders(root)
        if (group := _group(folder, counted)) is not None
    ]
    return min(found, key=lambda group: group.quota, default=None)


def _folders(root: Path) -> list[tuple[Path, Path]]:
    """This process's group and those above it: where the quota stands, and where CPU time is
    counted. Version 1 of control groups may count elsewhere. In a container a group's own root is
    what is mounted."""
    top = root / GROUPS
    lines: list[str] = []
    with suppress(OSError):
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    out: list[tuple[Path, Path]] = []
    for line in lines:
        _, controllers, group = [*line.split(":", 2), "", "", ""][:3]
        names = controllers.split(",")
        if controllers and "cpu" not in names:
            continue
        usage = top if not controllers else top / (controllers if "cpuacct" in names else "cpuacct")
        parts = [part for part in group.split("/") if part and part != ".."]
        for depth in range(len(parts), -1, -1):
            own = parts[:depth]
            out.append((top.joinpath(controllers, *own), usage.joinpath(*own)))
    return out


def _group(folder: Path, counted: Path) -> Group | None:
    quota = _quota(folder)
    if quota is None:
        return None
    files = (counted / "cpuacct.usage", folder / "cpu.stat")
    return Group(quota, next((path for path in files if path.exists()), None))


def _quota(folder: Path) -> float | None:
    """Cores; None where there is no limit."""
    with suppress(OSError, ValueError, ZeroDivisionError):
        most, period = (folder / "cpu.max").read_text().split()
        return None if most == "max" else int(most) / int(period)
    with suppress(OSError, ValueError, ZeroDivisionError):
        most_us = int((folder / "cpu.cfs_quota_us").read_text())
        return None if most_us <= 0 else most_us / int((folder / "cpu.cfs_period_us").read_text())
    return None


def oom_kills(root: Path = ROOT) -> int | None:
    """Return how many processes of this control group the kernel has ended for lack of memory, or
    None if it does not count.
    """
    with suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if controllers in ("", "memory"):
                top = root / GROUPS / controllers
                for path in (top / group.lstrip("/"), top):  # within a container a group's own root
                    for name in ("memory.events", "memory.oom_control"):
                        found = _oom_kills(path / name)
                        if found is not None:
                            return found
    return None


def _oom_kills(path: Path) -> int | None:
    with suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    return None
