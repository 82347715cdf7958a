"""Read CPU time, CPU quotas and OOM kills of this host from the kernel's counters in /proc and
/sys.

The node agent reads CPU time once a second with a `CpuLoadReader` and sends each reading to the
parent, which collects them in `LoadReadings`; the record states them as `Load`. How much CPU time
other processes took during a pass is computed later from the record (metrics/busy.py). All paths
are below `root`, so that tests can pass a folder in place of `/`.
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
TICKS = os.sysconf("SC_CLK_TCK")  # the kernel's unit of CPU time
# Columns of /proc/stat after the name: user, nice, system, irq, softirq, steal. Stolen time, which
# a hypervisor gave to others, was not available to the run either. Guest time is part of user.
BUSY = (0, 1, 2, 5, 6, 7)
# utime and stime of /proc/PID/stat after the name in brackets; then cutime, cstime
ALONE, OWN = (11, 12), (11, 12, 13, 14)
# Finding descendants reads every thread of a process; ranks with many threads are searched at every
# tenth reading only.
FEW_THREADS, SELDOM = 256, 10
MAX_ROWS = 2048
GROUPS = "sys/fs/cgroup"


def affinity() -> frozenset[int]:
    """Return the numbers of the CPU cores on which this process may run: its affinity mask on
    Linux, all cores elsewhere.
    """
    if sys.platform != "linux":
        return frozenset(range(os.cpu_count() or 1))
    return frozenset(os.sched_getaffinity(0))


class Reader:
    """Reads the CPU time counters of this host for one run.

    `token` is the run's token, which every message carries. `cores` are the cores to count, by
    default this process's affinity. `agent_pids` holds the process ids of the node agent, first its
    own and then, unless that is pid 1 or below, that of the process that started it.
    """

    def __init__(
        self,
        token: str,
        root: Path = ROOT,
        cores: Iterable[int] | None = None,
        agent: tuple[int, ...] | None = None,
    ) -> None:
        """Find the cgroup with the tightest CPU quota and set what is counted: `cores` (None: this
        process's affinity) and the agent's process ids (None: this process and its parent).
        """
        self._token, self._root = token, root
        self._cores = affinity() if cores is None else frozenset(cores)
        # The agent and its parent process: the command, or what ssh or srun started on this host.
        self._agent = (
            (os.getpid(), *(pid for pid in (os.getppid(),) if pid > 1)) if agent is None else agent
        )
        self._group = tightest_group(root)
        self._pids: tuple[int, ...] = ()
        self._below: list[int] = []
        self._readings = 0

    def watch(self, pids: tuple[int, ...]) -> None:
        """Set the process ids of the ranks whose CPU time counts as the run's own, with their
        descendants.
        """
        self._pids = pids

    def read(self, t_s: float) -> LoadSaid:
        """Return the current counters as a `load` message; `t_s` is the time since the start of the
        run, which is passed on.

        The CPU times are in seconds since a start that the kernel chooses, so only differences
        between two readings mean something.
        """
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
        """Update the list of the ranks' descendants; if the ranks have more than 256 threads
        together, only at every tenth call.
        """
        proc = self._root / "proc"
        threads = sum(cpu.threads(pid, proc) for pid in self._pids)
        if threads <= FEW_THREADS or self._readings % SELDOM == 0:
            self._below = cpu.below(self._pids, proc)
        self._readings += 1

    def _busy_s(self) -> float | None:
        """Return the CPU seconds that all processes together used on the allowed cores, or None if
        /proc/stat does not list every one of these cores.
        """
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
        """Return the CPU seconds used by these processes as far as they still exist; `stat_columns`
        selects columns of /proc/PID/stat, by default also those of children that were waited for.
        """
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
    """The CPU load readings of one host, as the parent receives them.

    When there are more than `MAX_READINGS`, every second one is dropped; as the values are running
    totals, no CPU time is lost by that.
    """

    rows: list[LoadSaid] = field(default_factory=list)

    def add(self, row: LoadSaid) -> None:
        """Append a reading; beyond `MAX_READINGS` readings, drop every second one but never the
        newest.
        """
        self.rows.append(row)
        if len(self.rows) > MAX_ROWS:
            self.rows = [*self.rows[:-1:2], self.rows[-1]]

    def load(self) -> Load | None:
        """Return all readings as columns for the record, with CPU seconds counted from the first
        reading; None if there is no reading or the host did not report the busy time of its cores.
        """
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
    """Round to milliseconds; the kernel itself counts in hundredths of a second."""
    return round(seconds, 3)


@dataclass(frozen=True)
class Group:
    """A control group (cgroup) with a CPU quota: so many cores for all its processes together."""

    quota: float
    usage: Path | None  # counts its CPU time; None: no such file

    def usage_s(self) -> float | None:
        """Return the CPU seconds used by all processes that were ever in the cgroup, or None if its
        counter is missing or unreadable.
        """
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
    """Return the cgroup with the smallest CPU quota among this process's cgroup and its ancestors,
    or None if none of them has a quota.
    """
    found = [
        group
        for folder, counted in _folders(root)
        if (group := _group(folder, counted)) is not None
    ]
    return min(found, key=lambda group: group.quota, default=None)


def _folders(root: Path) -> list[tuple[Path, Path]]:
    """Return two folders each for this process's CPU cgroup and its ancestors, innermost first: the
    one with the quota and the one that counts CPU time.

    The two differ where version 1 of cgroups mounts `cpuacct` separately. Not every folder exists:
    in a container, the cgroup's own root may be what is mounted. Returns an empty list without
    /proc/self/cgroup.
    """
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
    """Return the cgroup of a folder with its quota, or None if it has none; `usage_folder` is the
    folder of its cpuacct.usage, if it is version 1.
    """
    quota = _quota(folder)
    if quota is None:
        return None
    files = (counted / "cpuacct.usage", folder / "cpu.stat")
    return Group(quota, next((path for path in files if path.exists()), None))


def _quota(folder: Path) -> float | None:
    """Return the CPU quota of a cgroup folder in cores (version 2: cpu.max, version 1:
    cpu.cfs_quota_us), or None if there is no limit or no such file.
    """
    with suppress(OSError, ValueError, ZeroDivisionError):
        most, period = (folder / "cpu.max").read_text().split()
        return None if most == "max" else int(most) / int(period)
    with suppress(OSError, ValueError, ZeroDivisionError):
        most_us = int((folder / "cpu.cfs_quota_us").read_text())
        return None if most_us <= 0 else most_us / int((folder / "cpu.cfs_period_us").read_text())
    return None


def oom_kills(root: Path = ROOT) -> int | None:
    """Return how many processes of this process's cgroup the kernel has killed so far because
    memory ran out, or None if no counter can be read.
    """
    with suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if controllers in ("", "memory"):
                top = root / GROUPS / controllers
                for path in (top / group.lstrip("/"), top):  # the second in containers
                    for name in ("memory.events", "memory.oom_control"):
                        found = _oom_kills(path / name)
                        if found is not None:
                            return found
    return None


def _oom_kills(path: Path) -> int | None:
    """Return the `oom_kill` counter of a memory.events or memory.oom_control file, or None if the
    file is unreadable or lacks it.
    """
    with suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    return None
