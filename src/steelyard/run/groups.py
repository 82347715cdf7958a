"""The control group of this process, as far as it limits CPU time: the tightest quota on the way up, and what all in it use."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")
GROUPS = "sys/fs/cgroup"


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
            return next(int(line.split()[1]) / 1e6 for line in text.splitlines() if line.startswith("usage_usec "))
        return None


def tightest(root: Path = ROOT) -> Group | None:
    """The group whose quota holds; None where no group on the way up has one."""
    found = [group for folder, counted in _folders(root) if (group := _group(folder, counted)) is not None]
    return min(found, key=lambda group: group.quota, default=None)


def _folders(root: Path) -> list[tuple[Path, Path]]:
    """This process's group and those above it: where the quota stands, and where CPU time is counted. Version 1 of control
    groups may count elsewhere. In a container a group's own root is what is mounted."""
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
