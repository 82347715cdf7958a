"""Launchers: how a node agent is started on each host. Pure functions from a site to command lines; the parent starts what
they return and talks to it over its stdin and stdout.

Other packages add rows through the entry-point group `steelyard.launchers`: each entry point names a `Launcher`.
"""

import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass

from steelyard import plugins
from steelyard.errors import RequestError
from steelyard.run.site import Site

NODE = ["-P", "-m", "steelyard.run.node"]  # -P: what lies in the current folder is not imported
LOCAL = "localhost"

# No passwords and no questions: keys and the user's own agent. Host keys are checked, whatever a configuration says.
SSH = [
    "-T",
    "-o",
    "BatchMode=yes",
    "-o",
    "StrictHostKeyChecking=yes",
    "-o",
    "ClearAllForwardings=yes",
    "-o",
    "ConnectTimeout=10",
]
# A node of its own each: one srun over several mixes their long lines.
SRUN = ["--nodes=1", "--ntasks=1", "--overlap", "--cpu-bind=none", "--unbuffered", "--quiet"]
HOLD = ["sh", "-c", 'echo "$SLURM_JOB_ID"; exec cat']  # an allocation lasts until its stdin is closed


@dataclass(frozen=True)
class Allocation:
    """Hosts that a scheduler gave, and the name of what it gave."""

    job: str
    hosts: tuple[str, ...]


@dataclass(frozen=True)
class Launcher:
    """A row. `command` starts an agent on a host. A launcher with a `scheduler` asks it for hosts; one without has those of
    the site, or this one."""

    name: str
    command: Callable[[Site, str, Allocation | None], list[str]]
    remote: bool = True
    scheduler: bool = False


def local(site: Site, host: str, allocation: Allocation | None = None) -> list[str]:
    return [sys.executable, *NODE]


def ssh(site: Site, host: str, allocation: Allocation | None = None) -> list[str]:
    """ssh hands one line to the shell of the host: every word of it is quoted."""
    return ["ssh", *SSH, host, shlex.join(_with_prologue(site, host))]


def srun(site: Site, host: str, allocation: Allocation | None = None) -> list[str]:
    job = [f"--jobid={allocation.job}"] if allocation is not None else []
    return ["srun", *job, *SRUN, f"--nodelist={host}", *_with_prologue(site, host)]


def salloc(site: Site, nodes: int) -> list[str]:
    """What gets an allocation, prints its number, and holds it until its stdin is closed."""
    slurm = site.slurm
    told = {"partition": slurm.partition, "account": slurm.account, "time": slurm.time, "gpus-per-node": slurm.gpus_per_node}
    options = [f"--{name}={value}" for name, value in told.items() if value is not None]
    return ["salloc", f"--nodes={nodes}", "--job-name=steelyard", *options, *slurm.options, *HOLD]


def _with_prologue(site: Site, host: str) -> list[str]:
    """The agent's command, after the site's own shell lines where it has any. They are the script, the command its words."""
    command = [site.python_on(host), *NODE]
    prologue = site.prologue_on(host)
    return command if prologue is None else ["sh", "-c", f'{prologue}\nexec "$@"', "sh", *command]


def table() -> dict[str, Launcher]:
    shipped = [
        Launcher("local", local, remote=False),
        Launcher("ssh", ssh),
        Launcher("slurm", srun, scheduler=True),
    ]
    return plugins.table(shipped, "steelyard.launchers", Launcher, "launcher")


def named(name: str) -> Launcher:
    rows = table()
    if name not in rows:
        raise RequestError(f"--launcher {name!r} is not known; known: {', '.join(rows)}")
    return rows[name]


def hosts(launcher: Launcher, site: Site, nodes: int, allocation: Allocation | None = None) -> list[str]:
    """The hosts of a run, in the order of their ranks."""
    if not launcher.remote:
        if nodes > 1:
            raise RequestError(f"--nodes {nodes}: launcher {launcher.name} has this host only; choose --launcher ssh or slurm")
        return [LOCAL]
    known = list(allocation.hosts) if allocation is not None else site.hosts
    if len(set(known)) != len(known):
        raise RequestError(f"site: a host is listed twice in {', '.join(known)}; name each once")
    if nodes > len(known):
        where = f"allocation {allocation.job} has" if allocation is not None else "the site file names"
        raise RequestError(f"--nodes {nodes}: {where} {len(known)} host(s); allowed: 1 to {len(known)}")
    return known[:nodes]
