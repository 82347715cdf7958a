"""Launchers: the command line that starts a node agent on each host, and how Slurm allocates hosts.

A launcher is a pure function from a site to a command line; the session (run/session.py) starts it
and talks to the agent over its stdin and stdout. Other packages add launchers through the
entry-point group `steelyard.launchers`: each entry point names a `Launcher`.
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

AGENT_ARGUMENTS = ["-P", "-m", "steelyard.run.node"]  # -P: do not import from the current folder
ENTRY_POINT_GROUP = "steelyard.launchers"
LOCAL_HOST = "localhost"

# No passwords and no prompts, only keys and the user's ssh agent. Host keys are always checked.
SSH_OPTIONS = [
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
# One srun per node: a single one over several nodes mixes their long lines.
SRUN_OPTIONS = [
    "--nodes=1",
    "--ntasks=1",
    "--overlap",
    "--cpu-bind=none",
    "--unbuffered",
    "--quiet",
]
# an allocation lasts until its stdin is closed
HOLD_COMMAND = ["sh", "-c", 'echo "$SLURM_JOB_ID"; exec cat']

POLL_S = 0.1
ANSWER_S = 60.0
STATE_S = 5.0  # short, so that the end of a run does not wait for a busy scheduler
GONE = "GONE"  # our word for the state of a job that Slurm does not know any more
WaitCallback = Callable[[float], None]  # called with the seconds waited in the queue


@dataclass(frozen=True)
class Allocation:
    """Hosts that Slurm has allocated: the id of its `job`, and the names of the `hosts` in Slurm's
    order. From `hold_allocation` or `find_current_allocation`.
    """

    job: str
    hosts: tuple[str, ...]


@dataclass(frozen=True)
class Launcher:
    """A way to start node agents, by `name` (local, ssh, slurm, or a plug-in's). `command(site,
    host, allocation)` returns the command line that starts an agent on a host, which then talks
    over its stdin and stdout; it starts nothing itself. `allocation` is None without a scheduler.

    `remote`: agents run on other hosts, or may. `scheduler`: hosts come from a scheduler's
    allocation; without it, from the site file or, for a local launcher, this host.
    """

    name: str
    command: Callable[[Site, str, Allocation | None], list[str]]
    remote: bool = True
    scheduler: bool = False


def make_local_command(site: Site, host: str, allocation: Allocation | None = None) -> list[str]:
    """Return the command line that starts an agent on this host, with this Python. The arguments,
    which all launchers get, are not used.
    """
    return [sys.executable, *AGENT_ARGUMENTS]


def make_ssh_command(site: Site, host: str, allocation: Allocation | None = None) -> list[str]:
    """Return the command line that starts an agent on a host by ssh, with the site's Python and
    prologue there; every word of the remote command is quoted, because ssh passes one line to the
    shell there. `allocation` is not used.
    """
    return ["ssh", *SSH_OPTIONS, host, shlex.join(_make_agent_command(site, host))]


def make_srun_command(site: Site, host: str, allocation: Allocation | None = None) -> list[str]:
    """Return the srun command line that starts an agent on one host of a Slurm allocation; without
    `allocation`, of the job that this process runs in.
    """
    job = [f"--jobid={allocation.job}"] if allocation is not None else []
    return ["srun", *job, *SRUN_OPTIONS, f"--nodelist={host}", *_make_agent_command(site, host)]


def make_salloc_command(site: Site, nodes: int) -> list[str]:
    """Return the salloc command line that allocates `nodes` nodes with the site's Slurm settings
    (those that are set, then its extra options), prints the job id as one line, and holds the
    allocation until its stdin is closed.
    """
    slurm = site.slurm
    settings = {
        "partition": slurm.partition,
        "account": slurm.account,
        "time": slurm.time,
        "gpus-per-node": slurm.gpus_per_node,
    }
    options = [f"--{name}={value}" for name, value in settings.items() if value is not None]
    return [
        "salloc",
        f"--nodes={nodes}",
        "--job-name=steelyard",
        *options,
        *slurm.options,
        *HOLD_COMMAND,
    ]


def _make_agent_command(site: Site, host: str) -> list[str]:
    """Return the agent's command line on a host, as separate words: with the site's Python there,
    and run by `sh` after the site's prologue lines if it has any. Nothing is started.
    """
    command = [site.choose_python(host), *AGENT_ARGUMENTS]
    prologue = site.choose_prologue(host)
    return command if prologue is None else ["sh", "-c", f'{prologue}\nexec "$@"', "sh", *command]


def load_launchers() -> dict[str, Launcher]:
    """Return all launchers by name: local, ssh, slurm and those of other packages (entry points
    `steelyard.launchers`); raise RequestError if two have one name or one is no Launcher.
    """
    shipped = [
        Launcher("local", make_local_command, remote=False),
        Launcher("ssh", make_ssh_command),
        Launcher("slurm", make_srun_command, scheduler=True),
    ]
    return plugins.load_rows_by_name(shipped, ENTRY_POINT_GROUP, Launcher, "launcher")


def get_launcher(name: str) -> Launcher:
    """Return the launcher of this name; raise RequestError with the known ones if there is none."""
    launchers = load_launchers()
    if name not in launchers:
        raise RequestError(f"--launcher {name!r} is not known; allowed: {', '.join(launchers)}")
    return launchers[name]


def choose_hosts(
    launcher: Launcher, site: Site, nodes: int, allocation: Allocation | None = None
) -> list[str]:
    """Return the names of the hosts of a run, in the order of their ranks: `localhost` for a local
    launcher, else the first `nodes` hosts of the allocation or, without one, of the site file.

    Raises RequestError for several nodes with a local launcher, for a host listed twice, and for
    more nodes than hosts.
    """
    if not launcher.remote:
        if nodes > 1:
            raise RequestError(
                f"--nodes {nodes}: launcher {launcher.name} has this host only; choose --launcher"
                " ssh or slurm"
            )
        return [LOCAL_HOST]
    available = list(allocation.hosts) if allocation is not None else site.hosts
    if len(set(available)) != len(available):
        raise RequestError(
            f"site: a host is listed twice in {', '.join(available)}; name each once"
        )
    if nodes > len(available):
        where = (
            f"allocation {allocation.job} has" if allocation is not None else "the site file names"
        )
        raise RequestError(
            f"--nodes {nodes}: {where} {len(available)} host(s); allowed: 1 to {len(available)}"
        )
    return available[:nodes]


@contextmanager
def hold_allocation(
    site: Site, nodes: int, show_wait: WaitCallback | None = None
) -> Iterator[Allocation]:
    """Provide Slurm's allocation for a `with` block: the one this process runs in, which is left
    alone, or a new one of `nodes` nodes by salloc, which is released at the end of the block or
    when this process dies.

    Waits in the queue without a limit; `show_wait` is called repeatedly with the seconds waited.
    Raises RequestError if salloc is missing, fails, or prints no job id, or Slurm does not list the
    hosts. Interrupts are ignored during the release.
    """
    current = find_current_allocation(os.environ)
    if current is not None:
        yield current
        return
    if shutil.which("salloc") is None:
        raise RequestError(
            "--launcher slurm: there is no salloc here; run on a host that has Slurm's commands, or"
            " choose ssh"
        )
    with tempfile.TemporaryFile() as stderr_file:
        process = subprocess.Popen(
            make_salloc_command(site, nodes),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr_file,
            start_new_session=True,
            # while it waits in the queue, salloc does not notice that stdin is closed
            preexec_fn=processes.hang_up_with_parent,
        )
        job = None
        try:
            job = _wait_for_job(process, stderr_file, show_wait)
            yield Allocation(
                job,
                _expand_host_names(
                    _run_slurm_command("squeue", "--noheader", f"--jobs={job}", "--format=%N")
                ),
            )
        finally:
            with processes.ignore_interrupts():
                _release_allocation(process, job)


def find_current_allocation(environment: Mapping[str, str]) -> Allocation | None:
    """Return the Slurm allocation that SLURM_JOB_ID and SLURM_JOB_NODELIST of these variables name,
    or None if one of them is unset or empty; raises RequestError if scontrol does not list its
    hosts.
    """
    job = environment.get("SLURM_JOB_ID")
    nodes = environment.get("SLURM_JOB_NODELIST")
    return Allocation(job, _expand_host_names(nodes)) if job and nodes else None


def ask_job_state(job: str) -> str | None:
    """Ask squeue for the state of a job and return Slurm's word, such as RUNNING; `GONE` if it no
    longer knows the job, None if it fails otherwise or does not answer within `STATE_S` seconds.
    Nothing is raised.
    """
    try:
        return (
            _run_slurm_command(
                "squeue",
                "--noheader",
                "--states=all",
                f"--jobs={job}",
                "--format=%T",
                timeout_s=STATE_S,
            )
            or GONE
        )
    except RequestError as error:
        return GONE if "Invalid job id" in str(error) else None


def _wait_for_job(
    process: subprocess.Popen[bytes], stderr_file: IO[bytes], show_wait: WaitCallback | None
) -> str:
    """Wait, without a limit, until salloc prints the id of the job as a line, and return it;
    `show_wait` is called with the seconds waited every `POLL_S`. Sets the process's stdout
    non-blocking.

    Raises RequestError with the end of its stderr (the file `stderr_file`) if it ends before, or if
    the id is no number; TypeError without a stdout pipe.
    """
    if process.stdout is None:
        raise TypeError("salloc without a pipe")
    os.set_blocking(process.stdout.fileno(), False)
    begin_s, line = now(), b""
    while not line.endswith(b"\n"):
        line += process.stdout.read() or b""
        if show_wait is not None:
            show_wait(now() - begin_s)
        if process.poll() is not None and not line.endswith(b"\n"):
            stderr_file.seek(0)
            why = " ".join(stderr_file.read().decode("utf-8", "replace").split())[-500:]
            raise RequestError(
                f"salloc returned no hosts (exit code {process.returncode}): {why}; see [slurm] in"
                " the"
                " site file"
            )
        sleep(POLL_S)
    job = line.decode("ascii", "replace").strip()
    if not job.isdigit():
        raise RequestError(
            f"salloc printed {job!r} instead of a job number; is salloc wrapped by a script of the"
            " site?"
        )
    return job


def _release_allocation(process: subprocess.Popen[bytes], job: str | None) -> None:
    """Release an allocation and wait until salloc has ended: close its stdin, send SIGHUP after 2
    s, SIGKILL after 10 s more. If salloc had already ended, cancel `job` (None: there is none) by
    its id; errors of that are ignored.

    No other signal comes first: one that arrives just when its command ends can leave salloc in an
    endless loop (22.05).
    """
    if process.poll() is not None and job is not None:
        with suppress(RequestError):
            _run_slurm_command("scancel", job)
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


def _expand_host_names(node_list: str) -> tuple[str, ...]:
    """Return the host names behind Slurm's short form, such as gpu[1-4], by asking scontrol."""
    return tuple(_run_slurm_command("scontrol", "show", "hostnames", node_list).split())


def _run_slurm_command(*command: str, timeout_s: float = ANSWER_S) -> str:
    """Run a command of Slurm and return its stripped stdout; raise RequestError if it cannot be
    started, exits with an error (with its stderr as text), or takes longer than `timeout_s`
    seconds.
    """
    try:
        completed = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RequestError(f"{command[0]} does not answer: {error}") from error
    if completed.returncode:
        raise RequestError(f"{command[0]}: {' '.join(completed.stderr.split())}")
    return completed.stdout.strip()
