"""Processes of a run on one host: found by the run's mark, and ended, with SIGTERM first."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from steelyard.errors import RequestError
from steelyard.run.clock import now, sleep
from steelyard.run.messages import MARK

PROC = Path("/proc/self/stat")
POLL_S = 0.02
GRACE_S = 5.0
SUBREAPER, DEATH_SIGNAL = 36, 1  # PR_SET_CHILD_SUBREAPER and PR_SET_PDEATHSIG of prctl.h


def check() -> None:
    """Linux shows there who runs. Without it nobody could be found, and so nobody ended."""
    if sys.platform == "linux" and not PROC.exists():
        raise RequestError("/proc is not mounted; a run needs it; mount it and run again")
    check_working_directory()


def check_working_directory() -> None:
    """Raise RequestError if the working directory was deleted: libraries of workers fail there, and do not say why."""
    try:
        Path.cwd()
    except FileNotFoundError as error:
        said = "the working directory no longer exists; change to one that does (cd), and run again"
        raise RequestError(said) from error


def adopt_orphans() -> None:
    """Linux: what descendants leave behind becomes a child of this process, and so is found at the end."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(SUBREAPER, 1, 0, 0, 0)


def hang_up_with_parent() -> None:
    """Linux, in a child before it becomes another program: SIGHUP, should the thread that started it be gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(DEATH_SIGNAL, signal.SIGHUP, 0, 0, 0)


def wake_with_parent() -> None:
    """Linux: should this process be stopped when its parent dies, it goes on, sees that it is alone, and ends in order."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(DEATH_SIGNAL, signal.SIGCONT, 0, 0, 0)


def family(mark: str, root: int | None = None) -> list[psutil.Process]:
    """All that carry the run's mark, and all below `root`: a child may have a session of its own, a cleared environment, or
    a parent that is gone. Neither this process nor those it was started by."""
    ours = {os.getpid(), *(one.pid for one in psutil.Process().parents())}
    below = {one.pid for one in children(root)} if root is not None else set()
    return [
        one for one in psutil.process_iter() if one.pid not in ours and alive(one) and (one.pid in below or marked(one, mark))
    ]


def children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def marked(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get(MARK) == mark
    except (psutil.Error, OSError):  # gone, or not ours to look at
        return False


def alive(process: psutil.Process) -> bool:
    """A zombie is at its end; whether it is waited for is up to its parent."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def stopped(pid: int) -> bool:
    """Whether a signal stopped the process, and nothing let it go on."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return False


def end(find: Callable[[], list[psutil.Process]], grace_s: float = GRACE_S) -> int:
    """End processes: first kindly, then for certain, with whatever was started in between. Returns how many there were."""
    seen: set[int] = set()
    for number in (signal.SIGTERM, signal.SIGKILL):
        found = find()
        seen |= {one.pid for one in found}
        for one in found:
            with suppress(psutil.NoSuchProcess):
                one.send_signal(number)
                one.send_signal(signal.SIGCONT)  # one that is stopped would not hear of it
        end_s = now() + grace_s
        while now() < end_s and any(map(alive, found)):
            sleep(POLL_S)
    return len(seen)


def signal_name(number: int) -> str:
    names = {one.value: one.name for one in signal.Signals}
    return names.get(number, f"signal {number}")
