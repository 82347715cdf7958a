"""Slurm: the allocation that a command is in, or one that is asked for and given back."""

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import IO

from steelyard.errors import RequestError
from steelyard.run import launch, processes
from steelyard.run.clock import now, sleep
from steelyard.run.launch import Allocation
from steelyard.run.site import Site

POLL_S = 0.1
ANSWER_S = 60.0
STATE_S = 5.0  # after a run: its end does not wait for a scheduler that is busy
GONE = "GONE"  # our word for the state of a job that Slurm does not know any more
Waiting = Callable[[float], None]  # told how long the wait in the queue has been


@contextmanager
def allocated(site: Site, nodes: int, waiting: Waiting | None = None) -> Iterator[Allocation]:
    """The allocation around this process, or a new one that ends with the block, or with this process."""
    inside = current(os.environ)
    if inside is not None:
        yield inside
        return
    if shutil.which("salloc") is None:
        raise RequestError("--launcher slurm: there is no salloc here; run on a host that has Slurm's commands, or choose ssh")
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            launch.salloc(site, nodes),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            start_new_session=True,
            preexec_fn=processes.hang_up_with_parent,  # a wait in the queue does not see its stdin closed
        )
        job = None
        try:
            job = _granted(process, said, waiting)
            yield Allocation(job, _hosts(_ask("squeue", "--noheader", f"--jobs={job}", "--format=%N")))
        finally:
            with processes.ignore_interrupts():
                _release(process, job)


def current(environment: Mapping[str, str]) -> Allocation | None:
    """The allocation that this process is in."""
    job = environment.get("SLURM_JOB_ID")
    nodes = environment.get("SLURM_JOB_NODELIST")
    return Allocation(job, _hosts(nodes)) if job and nodes else None


def state(job: str) -> str | None:
    """How Slurm calls the state of a job; None where it does not answer."""
    try:
        return _ask("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T", within_s=STATE_S) or GONE
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
            raise RequestError(f"salloc gave no hosts (exit code {process.returncode}): {why}; see [slurm] in the site file")
        sleep(POLL_S)
    job = line.decode("ascii", "replace").strip()
    if not job.isdigit():
        raise RequestError(f"salloc gave {job!r} for the number of a job; is salloc wrapped by a script of the site?")
    return job


def _release(process: subprocess.Popen[bytes], job: str | None) -> None:
    """Close its stdin: salloc's command ends and the hosts are given back. A wait in the queue is cancelled by SIGHUP, and a
    job whose salloc was killed by its number. Any other signal, at the moment when its command ends, can leave salloc in an
    endless loop (22.05)."""
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
        done = subprocess.run(command, capture_output=True, text=True, timeout=within_s, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RequestError(f"{command[0]} does not answer: {error}") from error
    if done.returncode:
        raise RequestError(f"{command[0]}: {' '.join(done.stderr.split())}")
    return done.stdout.strip()
