"""Read CPU time, CPU quotas and OOM kills of this host from the kernel's counters in /proc and
/sys.

The node agent reads CPU time once a second with a `CpuLoadReader` and sends each reading to the
parent, which collects them in `LoadReadings`; the record states them as `CpuLoad`. How much CPU
time other processes took during a pass is computed later from the record
(metrics/cpu_contention.py). All paths are below `root`, so that tests can pass a folder in place of
`/`.
"""

import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from steelyard.accelerators import cpu
from steelyard.record.run_facts import CpuLoad
from steelyard.run.messages import LoadMessage

ROOT = Path("/")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")  # the kernel's unit of CPU time
# Columns of /proc/stat after the name: user, nice, system, irq, softirq, steal. Stolen time, which
# a hypervisor gave to others, was not available to the run either. Guest time is part of user.
BUSY_COLUMNS = (0, 1, 2, 5, 6, 7)
# utime and stime of /proc/PID/stat after the name in brackets; then cutime, cstime
SELF_COLUMNS, SELF_AND_CHILDREN_COLUMNS = (11, 12), (11, 12, 13, 14)
# Finding descendants reads every thread of a process; ranks with many threads are searched at every
# tenth reading only.
FEW_THREADS, SEARCH_EVERY = 256, 10
MAX_READINGS = 2048
CGROUP_ROOT = "sys/fs/cgroup"


def read_allowed_cores() -> frozenset[int]:
    """Return the numbers of the CPU cores on which this process may run: its affinity mask on
    Linux, all cores elsewhere.
    """
    if sys.platform != "linux":
        return frozenset(range(os.cpu_count() or 1))
    return frozenset(os.sched_getaffinity(0))


class CpuLoadReader:
    """Reads the CPU time counters of this host for one run: `read` returns a `LoadMessage` with the
    CPU seconds of all processes on the counted cores, of the run's own (agent, its parent, ranks
    set by `watch`, and the ranks' descendants), and of the cgroup with the tightest quota. Sending
    it is up to the caller.

    `token` is the run's token, which every message carries. `cores` are the cores to count, by
    default this process's affinity. `agent_pids` are the process ids of the node agent, its own
    first, by default this process and its parent.
    """

    def __init__(
        self,
        token: str,
        root: Path = ROOT,
        cores: Iterable[int] | None = None,
        agent_pids: tuple[int, ...] | None = None,
    ) -> None:
        """Find the cgroup with the tightest CPU quota, and set what is counted: `cores` (None: this
        process's affinity) and the agent's process ids (None: this process and, unless it is pid 1
        or below, its parent). No counter is read yet.
        """
        self._token, self._root = token, root
        self._cores = read_allowed_cores() if cores is None else frozenset(cores)
        # The agent and its parent process: the command, or what ssh or srun started on this host.
        self._agent_pids = (
            (os.getpid(), *(pid for pid in (os.getppid(),) if pid > 1))
            if agent_pids is None
            else agent_pids
        )
        self._cgroup = find_tightest_cgroup(root)
        self._rank_pids: tuple[int, ...] = ()
        self._descendant_pids: list[int] = []
        self._readings = 0

    def watch(self, pids: tuple[int, ...]) -> None:
        """Set the process ids of the ranks whose CPU time this reader counts as the run's own, with
        their descendants; they replace earlier ones.
        """
        self._rank_pids = pids

    def read(self, t_s: float) -> LoadMessage:
        """Return the current CPU counters of this host as a `load` message; `t_s` is the time since
        the start of the run, which is passed on. Nothing is sent.

        The CPU times are in seconds since a start that the kernel chooses, so only differences
        between two readings mean something. `busy_s` and `group_s` are None where they cannot be
        read.
        """
        self._find_descendants()
        return LoadMessage(
            token=self._token,
            allowed=len(self._cores),
            quota=None if self._cgroup is None else self._cgroup.quota,
            t_s=t_s,
            busy_s=self._read_busy_s(),
            own_s=self._read_used_s(
                dict.fromkeys([*self._agent_pids, *self._rank_pids, *self._descendant_pids])
            ),
            agent_s=self._read_used_s(self._agent_pids[:1], SELF_COLUMNS),
            group_s=None if self._cgroup is None else self._cgroup.read_usage_s(),
        )

    def _find_descendants(self) -> None:
        """Update the stored process ids of the ranks' descendants; if the ranks have more than
        `FEW_THREADS` threads together, only at the first and then every `SEARCH_EVERY`-th call.
        """
        proc = self._root / "proc"
        threads = sum(cpu.count_threads(pid, proc) for pid in self._rank_pids)
        if threads <= FEW_THREADS or self._readings % SEARCH_EVERY == 0:
            self._descendant_pids = cpu.list_descendants(self._rank_pids, proc)
        self._readings += 1

    def _read_busy_s(self) -> float | None:
        """Return the CPU seconds that all processes together used on the counted cores since the
        kernel's start, time stolen by a hypervisor included, or None if /proc/stat cannot be read
        or does not list every one of these cores.
        """
        ticks = counted_cores = 0
        with suppress(OSError, ValueError, IndexError):
            for line in (self._root / "proc/stat").read_text().splitlines():
                if not line.startswith("cpu"):
                    break
                name, *columns = line.split()
                if name != "cpu" and int(name[3:]) in self._cores:
                    counted_cores += 1
                    ticks += sum(int(columns[column]) for column in BUSY_COLUMNS)
        return ticks / TICKS_PER_S if counted_cores == len(self._cores) else None

    def _read_used_s(
        self, pids: Iterable[int], stat_columns: tuple[int, ...] = SELF_AND_CHILDREN_COLUMNS
    ) -> float:
        """Return the summed CPU seconds used so far by the processes with these ids; those that no
        longer exist count 0. `stat_columns` selects columns of /proc/PID/stat, by default also
        those of children that were waited for.
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
                ticks += sum(int(columns[column]) for column in stat_columns)
        return ticks / TICKS_PER_S


@dataclass
class LoadReadings:
    """The CPU load readings of one host (`rows`, oldest first), as the session in the parent
    receives them: `add` appends one; `to_load` returns what the record states, or None if there is
    none or one lacks the busy time.

    When there are more than `MAX_READINGS`, every second one is dropped; as the values are running
    totals, no CPU time is lost by that.
    """

    rows: list[LoadMessage] = field(default_factory=list)

    def add(self, row: LoadMessage) -> None:
        """Append a CPU load reading of this host; beyond `MAX_READINGS` readings, drop every second
        one of all but never the newest.
        """
        self.rows.append(row)
        if len(self.rows) > MAX_READINGS:
            self.rows = [*self.rows[:-1:2], self.rows[-1]]

    def to_load(self) -> CpuLoad | None:
        """Return all readings of this host as columns for the record, with CPU seconds counted from
        the first reading; None if there is no reading or one lacks the busy time of the cores.

        Without a quota, quota and `group_s` are left out; a `group_s` is None where it or the first
        is unknown.
        """
        if not self.rows or any(row.busy_s is None for row in self.rows):
            return None
        first = self.rows[0]
        busy_s = [row.busy_s - (first.busy_s or 0.0) for row in self.rows if row.busy_s is not None]
        columns = {
            "t_s": [row.t_s for row in self.rows],
            "busy_s": [_round_s(value) for value in busy_s],
            "own_s": [_round_s(row.own_s - first.own_s) for row in self.rows],
            "agent_s": [_round_s(row.agent_s - first.agent_s) for row in self.rows],
        }
        if first.quota is None:
            return CpuLoad(allowed=first.allowed, **columns)
        group_totals_s = [row.group_s for row in self.rows]
        first_total_s = first.group_s
        group_s = [
            None if first_total_s is None or value is None else _round_s(value - first_total_s)
            for value in group_totals_s
        ]
        return CpuLoad(allowed=first.allowed, quota=first.quota, group_s=group_s, **columns)


def _round_s(seconds: float) -> float:
    """Round to milliseconds; the kernel itself counts in hundredths of a second."""
    return round(seconds, 3)


@dataclass(frozen=True)
class CpuCgroup:
    """A control group (cgroup) of the kernel with a CPU quota: `quota` cores (may be a fraction)
    for all its processes together; `usage_file` counts its CPU time, None if it has no such file.
    `read_usage_s` returns the CPU seconds used so far.
    """

    quota: float
    usage_file: Path | None  # counts its CPU time; None: no such file

    def read_usage_s(self) -> float | None:
        """Return the CPU seconds used by all processes that were ever in this cgroup (version 1:
        cpuacct.usage in ns, version 2: `usage_usec` of cpu.stat), or None if it has no such file
        or the file has no such number.
        """
        if self.usage_file is None:
            return None
        with suppress(OSError, ValueError):
            text = self.usage_file.read_text()
            if self.usage_file.name == "cpuacct.usage":
                return int(text) / 1e9
            for line in text.splitlines():
                if line.startswith("usage_usec "):
                    return int(line.split()[1]) / 1e6
        return None


def find_tightest_cgroup(root: Path = ROOT) -> CpuCgroup | None:
    """Return the cgroup with the smallest CPU quota among this process's cgroup and its ancestors,
    with the file that counts its CPU time, or None if none of them has a quota. `root` is the root
    of the file system (another in tests); /proc/self/cgroup and sys/fs/cgroup below it are read.
    """
    cgroups = [
        group
        for folder, usage_folder in _list_cgroup_folders(root)
        if (group := _read_cgroup(folder, usage_folder)) is not None
    ]
    return min(cgroups, key=lambda group: group.quota, default=None)


def _list_cgroup_folders(root: Path) -> list[tuple[Path, Path]]:
    """Return a pair of folders each for this process's CPU cgroup and its ancestors, innermost
    first: the one with the quota and the one that counts CPU time.

    The two differ where version 1 of cgroups mounts `cpuacct` separately. Not every folder exists:
    in a container, the cgroup's own root may be what is mounted. Returns an empty list without
    /proc/self/cgroup; both versions are listed if the system has both.
    """
    top = root / CGROUP_ROOT
    lines: list[str] = []
    with suppress(OSError):
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    folders: list[tuple[Path, Path]] = []
    for line in lines:
        _, controllers, group = [*line.split(":", 2), "", "", ""][:3]
        names = controllers.split(",")
        if controllers and "cpu" not in names:
            continue
        usage = top if not controllers else top / (controllers if "cpuacct" in names else "cpuacct")
        parts = [part for part in group.split("/") if part and part != ".."]
        for depth in range(len(parts), -1, -1):
            ancestor = parts[:depth]
            folders.append((top.joinpath(controllers, *ancestor), usage.joinpath(*ancestor)))
    return folders


def _read_cgroup(folder: Path, usage_folder: Path) -> CpuCgroup | None:
    """Return the cgroup of a folder with its quota and the file that counts its CPU time (None:
    neither exists), or None if it has no quota; `usage_folder` is the folder of its cpuacct.usage,
    if it is version 1, which is preferred to cpu.stat.
    """
    quota = _read_quota(folder)
    if quota is None:
        return None
    files = (usage_folder / "cpuacct.usage", folder / "cpu.stat")
    return CpuCgroup(quota, next((path for path in files if path.exists()), None))


def _read_quota(folder: Path) -> float | None:
    """Return the CPU quota of a cgroup folder in cores (version 2: cpu.max, version 1:
    cpu.cfs_quota_us by cpu.cfs_period_us), or None if there is no limit or no readable file.
    """
    with suppress(OSError, ValueError, ZeroDivisionError):
        limit, period = (folder / "cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    with suppress(OSError, ValueError, ZeroDivisionError):
        limit_us = int((folder / "cpu.cfs_quota_us").read_text())
        return None if limit_us <= 0 else limit_us / int((folder / "cpu.cfs_period_us").read_text())
    return None


def count_oom_kills(root: Path = ROOT) -> int | None:
    """Return how many processes of this process's memory cgroup the kernel has killed so far
    because memory ran out, or None if there is no counter. It is the first that can be read:
    memory.events, else memory.oom_control, of its own folder, else of the mounted root. `root` is
    the root of the file system.
    """
    with suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if controllers in ("", "memory"):
                top = root / CGROUP_ROOT / controllers
                for path in (top / group.lstrip("/"), top):  # the second in containers
                    for name in ("memory.events", "memory.oom_control"):
                        kills = _read_oom_kills(path / name)
                        if kills is not None:
                            return kills
    return None


def _read_oom_kills(path: Path) -> int | None:
    """Return the `oom_kill` counter of a memory.events or memory.oom_control file, or None if the
    file is unreadable or lacks it.
    """
    with suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    return None
