"""What the fault suite does to a run once it has reached the phase in which it shall fail.

Each function returns, or is, an action on a `Scene`: a signal to a process, a cut link, a killed
daemon.
"""

import os
import signal
import time
from collections.abc import Callable

from faults.scenes import Scene
from hosts.cluster import kill_and_wait
from hosts.runs import SILENCE_S

FaultAction = Callable[[Scene], object]
BETWEEN_INTERRUPTS_S = 0.4  # seconds between two signals, such as Ctrl-C twice


def do_nothing(scene: Scene) -> None:
    """Do nothing: the fault happens inside the run (tests/faults/inside)."""


def signal_rank(number: int) -> FaultAction:
    """Return an action that sends a signal to the process that waits: a rank, or in preflight an
    agent.
    """
    return lambda scene: os.kill(scene.waiting_pid, number)


def signal_agent(number: int) -> FaultAction:
    """Return an action that sends a signal to the node agent that started the waiting process."""
    return lambda scene: os.kill(scene.parent_pid, number)


def signal_command(*numbers: int) -> FaultAction:
    """Return an action that sends signals to the command, BETWEEN_INTERRUPTS_S apart."""

    def send_all(scene: Scene) -> None:
        for number in numbers:
            scene.command.send_signal(number)
            if number != numbers[-1]:
                time.sleep(BETWEEN_INTERRUPTS_S)

    return send_all


def suspend_command(scene: Scene) -> None:
    """Suspend the command for longer than the hosts wait for it, as a laptop that sleeps, then let
    it continue.
    """
    scene.command.send_signal(signal.SIGSTOP)
    time.sleep(SILENCE_S + 3)
    scene.command.send_signal(signal.SIGCONT)


def cut_link(host: str) -> FaultAction:
    """Return an action that cuts the link of a host."""
    return lambda scene: scene.cut_link(host)


def kill_sshd(host: str) -> FaultAction:
    """Return an action that kills the sshd sessions of a host."""
    return lambda scene: scene.cluster.kill_sshd_sessions(host)


def kill_client(program: str) -> FaultAction:
    """Return an action that kills the parent's ssh or srun of one connection."""
    return lambda scene: kill_and_wait(scene.find_children(program)[-1:])


def kill_slurmd(host: str) -> FaultAction:
    """Return an action that kills slurmd and its steps on a host."""
    return lambda scene: scene.slurm.kill_slurmd(host)


def cancel_job(scene: Scene) -> None:
    """Cancel the run's Slurm job with scancel."""
    (job,) = scene.jobs()
    scene.slurm("scancel", job)
