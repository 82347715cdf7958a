"""Launchers: how a node agent is started on each host, and how Slurm gives hosts.

A launcher is a pure function from a site to command lines; the parent starts what it returns and
talks to it over its stdin and stdout. Other packages add rows through the entry-point group
`steelyard.launchers`: each entry point names a `Launcher`.
"""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO

from steelyard import plugins
from steelyard.errors import RequestError
from steelyard.run import processes
from steelyard.run.clock import now, sleep
from steelyard.run.site import Site

NODE = ["-P", "-m", "steelyard.run.node"]  # -P: what lies in the current folder is not imported
LOCAL = "localhost"

# No passwords and no questions: keys and the user's own agent. Host keys are checked, whatever a
# configuration says.
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
# an allocation lasts until its stdin is closed
HOLD = ["sh", "-c", 'echo "$SLURM_JOB_ID"; exec cat']

POLL_S = 0.1
ANSWER_S = 60.0
STATE_S = 5.0  # after a run: its end does not wait for a scheduler that is busy
GONE = "GONE"  # our word for the state of a job that Slurm does not know any more
Waiting = Callable[[float], None]  # told how long the wait in the queue has been


@dataclass(frozen=True)
class Allocation:
    """Hosts that a scheduler gave, and the name of what it gave."""

    job: str
    hosts: tuple[str, ...]


@dataclass(frozen=True)
class Launcher:
    """A row. `command` starts an agent on a host. A launcher with a `scheduler` asks it for hosts;
    one without has those of the site, or this one."""

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
    told = {
        "partition": slurm.partition,
        "account": slurm.account,
        "time": slurm.time,
        "gpus-per-node": slurm.gpus_per_node,
    }
    options = [f"--{name}={value}" for name, value in told.items() if value is not None]
    return ["salloc", f"--nodes={nodes}", "--job-name=steelyard", *options, *slurm.options, *HOLD]


def _with_prologue(site: Site, host: str) -> list[str]:
    """The agent's command, after the site's own shell lines where it has any. They are the script,
    the command its words.
    """
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


def hosts(
    launcher: Launcher, site: Site, nodes: int, allocation: Allocation | None = None
) -> list[str]:
    """The hosts of a run, in the order of their ranks."""
    if not launcher.remote:
        if nodes > 1:
            raise RequestError(
                f"--nodes {nodes}: launcher {launcher.name} has this host only; choose --launcher"
                " ssh or slurm"
            )
        return [LOCAL]
    known = list(allocation.hosts) if allocation is not None else site.hosts
    if len(set(known)) != len(known):
        raise RequestError(f"site: a host is listed twice in {', '.join(known)}; name each once")
    if nodes > len(known):
        where = (
            f"allocation {allocation.job} has" if allocation is not None else "the site file names"
        )
        raise RequestError(
            f"--nodes {nodes}: {where} {len(known)} host(s); allowed: 1 to {len(known)}"
        )
    return known[:nodes]


@contextmanager
def allocated(site: Site, nodes: int, waiting: Waiting | None = None) -> Iterator[Allocation]:
    """The allocation around this process, or a new one that ends with the block, or with this
    process.
    """
    inside = current_allocation(os.environ)
    if inside is not None:
        yield inside
        return
    if shutil.which("salloc") is None:
        raise RequestError(
            "--launcher slurm: there is no salloc here; run on a host that has Slurm's commands, or"
            " choose ssh"
        )
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            salloc(site, nodes),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            start_new_session=True,
            # a wait in the queue does not see its stdin closed
            preexec_fn=processes.hang_up_with_parent,
        )
        job = None
        try:
            job = _granted(process, said, waiting)
            yield Allocation(
                job, _hosts(_ask("squeue", "--noheader", f"--jobs={job}", "--format=%N"))
            )
        finally:
            with processes.ignore_interrupts():
                _release(process, job)


def current_allocation(environment: Mapping[str, str]) -> Allocation | None:
    """The allocation that this process is in."""
    job = environment.get("SLURM_JOB_ID")
    nodes = environment.get("SLURM_JOB_NODELIST")
    return Allocation(job, _hosts(nodes)) if job and nodes else None


def job_state(job: str) -> str | None:
    """How Slurm calls the state of a job; None where it does not answer."""
    try:
        return (
            _ask(
                "squeue",
                "--noheader",
                "--states=all",
                f"--jobs={job}",
                "--format=%T",
                within_s=STATE_S,
            )
            or GONE
        )
    except RequestError as error:
        return GONE if "Invalid job id" in str(error) else None


def _granted(process: subprocess.Popen[bytes], said: IO[bytes], waiting: Waiting | None) -> str:
    """Wait in the queue. The number comes when the hosts are ours."""
    if process.stdout is None:
        raise TypeError("salloc without a pipe")
    os.set_blocking(process.stdout.fileno(), False)
    begun, line = now(), b""
    while not line.endswith(b"\n"):
        line += process.stdout.read() or b""
        if waiting is not None:
            waiting(now() - begun)
        if process.poll() is not None and not line.endswith(b"\n"):
            said.seek(0)
            why = " ".join(said.read().decode("utf-8", "replace").split())[-500:]
            raise RequestError(
                f"salloc gave no hosts (exit code {process.returncode}): {why}; see [slurm] in the"
                " site file"
            )
        sleep(POLL_S)
    job = line.decode("ascii", "replace").strip()
    if not job.isdigit():
        raise RequestError(
            f"salloc gave {job!r} for the number of a job; is salloc wrapped by a script of the"
            " site?"
        )
    return job


def _release(process: subprocess.Popen[bytes], job: str | None) -> None:
    """Close its stdin: salloc's command ends and the hosts are given back. A wait in the queue is
    cancelled by SIGHUP, and a job whose salloc was killed by its number. Any other signal, at the
    moment when its command ends, can leave salloc in an endless loop (22.05)."""
    if process.poll() is not None and job is not None:
        with suppress(RequestError):
            _ask("scancel", job)
    if process.stdin is not None:
        process.stdin.close()
    try:
        process.wait(2.0)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGHUP)
        try:
            process.wait(10.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _hosts(nodes: str) -> tuple[str, ...]:
    """The names behind Slurm's short form, such as gpu[1-4]."""
    return tuple(_ask("scontrol", "show", "hostnames", nodes).split())


def _ask(*command: str, within_s: float = ANSWER_S) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=within_s, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RequestError(f"{command[0]} does not answer: {error}") from error
    if done.returncode:
        raise RequestError(f"{command[0]}: {' '.join(done.stderr.split())}")
    return done.stdout.strip()
