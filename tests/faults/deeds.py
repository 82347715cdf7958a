"""What the fault suite does to a run once it has reached the phase in which it shall fail.

Each function returns, or is, an action on a `Scene`: a signal to a process, a cut link, a killed
daemon.
"""

import os
import signal
import time
from collections.abc import Callable

from faults.scenes import Scene
from hosts.cluster import kill
from hosts.runs import SILENCE_S

Deed = Callable[[Scene], object]
AGAIN_S = 0.4  # seconds between two signals, such as Ctrl-C twice


def nothing(scene: Scene) -> None:
    """Do nothing: the fault happens inside the run (tests/faults/inside)."""


def rank(number: int) -> Deed:
    """Return an action that sends a signal to the process that waits: a rank, or in preflight an
    agent.
    """
    return lambda scene: os.kill(scene.waiting, number)


def agent(number: int) -> Deed:
    """Return an action that sends a signal to the node agent that started the waiting process."""
    return lambda scene: os.kill(scene.above, number)


def command(*numbers: int) -> Deed:
    """Return an action that sends signals to the command, BETWEEN_INTERRUPTS_S apart."""

    def deed(scene: Scene) -> None:
        for number in numbers:
            scene.command.send_signal(number)
            if number != numbers[-1]:
                time.sleep(AGAIN_S)

    return deed


def stop_command_for_long(scene: Scene) -> None:
    """Suspend the command for longer than the hosts wait for it, as a laptop that sleeps, then let
    it continue.
    """
    scene.command.send_signal(signal.SIGSTOP)
    time.sleep(SILENCE_S + 3)
    scene.command.send_signal(signal.SIGCONT)


def cut(host: str) -> Deed:
    """Return an action that cuts the link of a host."""
    return lambda scene: scene.cut(host)


def kill_sshd(host: str) -> Deed:
    """Return an action that kills the sshd sessions of a host."""
    return lambda scene: scene.cluster.kill_sshd_sessions(host)


def kill_client(program: str) -> Deed:
    """Return an action that kills the parent's ssh or srun of one connection."""
    return lambda scene: kill(scene.started_by_command(program)[-1:])


def kill_slurmd(host: str) -> Deed:
    """Return an action that kills slurmd and its steps on a host."""
    return lambda scene: scene.slurm.kill_slurmd(host)


def cancel(scene: Scene) -> None:
    """Cancel the run's Slurm job with scancel."""
    (job,) = scene.jobs()
    scene.slurm("scancel", job)
