"""What is done to a run once it is where it shall go wrong."""

import os
import signal
import time
from collections.abc import Callable

from faults.scenes import Scene
from hosts.cluster import kill
from hosts.runs import SILENCE_S

Deed = Callable[[Scene], object]
AGAIN_S = 0.4  # between one Ctrl-C and the next


def nothing(scene: Scene) -> None:
    """What is inside the run does it."""


def rank(number: int) -> Deed:
    """Whoever waits: a rank, or in preflight an agent."""
    return lambda scene: os.kill(scene.waiting, number)


def agent(number: int) -> Deed:
    return lambda scene: os.kill(scene.above, number)


def command(*numbers: int) -> Deed:
    def deed(scene: Scene) -> None:
        for number in numbers:
            scene.command.send_signal(number)
            if number != numbers[-1]:
                time.sleep(AGAIN_S)

    return deed


def stop_command_for_long(scene: Scene) -> None:
    """As a laptop that sleeps, for longer than the hosts wait for it."""
    scene.command.send_signal(signal.SIGSTOP)
    time.sleep(SILENCE_S + 3)
    scene.command.send_signal(signal.SIGCONT)


def cut(host: str) -> Deed:
    return lambda scene: scene.cut(host)


def kill_sshd(host: str) -> Deed:
    return lambda scene: scene.cluster.kill_sshd_sessions(host)


def kill_client(program: str) -> Deed:
    """The parent's end of one connection."""
    return lambda scene: kill(scene.started_by_command(program)[-1:])


def kill_slurmd(host: str) -> Deed:
    return lambda scene: scene.slurm.kill_slurmd(host)


def cancel(scene: Scene) -> None:
    (job,) = scene.jobs()
    scene.slurm("scancel", job)
