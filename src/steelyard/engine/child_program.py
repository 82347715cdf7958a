"""End a program that an engine started as a child process, with all that it started itself."""

import ctypes
import signal
import subprocess
import sys
from contextlib import suppress
from typing import Any

import psutil

DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl.h
# loaded at import: between fork and exec nothing may be loaded
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def kill_with_parent() -> None:
    """On Linux, let the kernel kill this process when the thread that started it ends; for use
    between fork and exec.
    """
    if _LIBC is not None:
        _LIBC.prctl(DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)


def end_with_descendants(process: "subprocess.Popen[Any]", grace_s: float) -> None:
    """End a child process and all processes that it started: SIGTERM, so that it can end its own
    children, then SIGKILL after `grace_s` seconds; descendants that remain are killed. Harmless if
    it has exited.
    """
    descendants: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        descendants = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    if wait_for_exit(process, grace_s) is None:
        process.kill()
        process.wait()
    for descendant in descendants:
        with suppress(psutil.NoSuchProcess):
            descendant.kill()
    psutil.wait_procs(descendants, grace_s)


def wait_for_exit(process: "subprocess.Popen[Any]", timeout_s: float) -> int | None:
    """Return the exit code if the process exits within so many seconds, else None."""
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None
