"""CPU time of a host while a run goes on: of the cores that it may use, of its own processes, of its control group.

What is read are the kernel's counters, once a second. What others used of a stretch of time is worked out from the record.
"""

import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from steelyard.accelerators import cpu
from steelyard.record.facts import Load
from steelyard.run import groups
from steelyard.run.messages import LoadSaid

ROOT = Path("/")
TICKS = os.sysconf("SC_CLK_TCK")  # of a second, in which the kernel counts
# Of the columns of /proc/stat after the name: user, nice, system, irq, softirq, steal. Time that a hypervisor gave to others
# (steal) is missing here as well. Guests are in user.
BUSY = (0, 1, 2, 5, 6, 7)
ALONE, OWN = (11, 12), (11, 12, 13, 14)  # utime and stime of /proc/PID/stat after the name in brackets; then cutime, cstime
# Descendants are found through the threads of a process. Where ranks have many, they are looked for less often.
FEW_THREADS, SELDOM = 256, 10
MAX_ROWS = 2048


def affinity() -> frozenset[int]:
    """The cores that this process may run on."""
    if sys.platform != "linux":
        return frozenset(range(os.cpu_count() or 1))
    return frozenset(os.sched_getaffinity(0))


class Reader:
    """Reads the counters of this host for one run."""

    def __init__(
        self, token: str, root: Path = ROOT, cores: Iterable[int] | None = None, agent: tuple[int, ...] | None = None
    ) -> None:
        self._token, self._root = token, root
        self._cores = affinity() if cores is None else frozenset(cores)
        # The agent, and who started it: the command itself, or what stands for it on this host.
        self._agent = (os.getpid(), *(pid for pid in (os.getppid(),) if pid > 1)) if agent is None else agent
        self._group = groups.tightest(root)
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
                columns = (self._root / "proc" / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
                ticks += sum(int(columns[place]) for place in places)
        return ticks / TICKS


@dataclass
class Kept:
    """The readings of one host as they arrive. Counters lose nothing when every second reading is dropped."""

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
        group = [None if begun is None or value is None else _rounded(value - begun) for value in counted]
        return Load(allowed=first.allowed, quota=first.quota, group_s=group, **columns)


def _rounded(seconds: float) -> float:
    """The kernel counts hundredths."""
    return round(seconds, 3)
