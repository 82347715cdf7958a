"""The private folder of a host's ranks, and what runs leave behind that nobody could end in order.

An agent holds a lock on its folder for as long as it lives, however it ends: a folder that can be locked belongs to nobody.
"""

import fcntl
import os
import re
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

import psutil

from steelyard.run import locks, processes

NAME = re.compile(r"steelyard-(?P<mark>[0-9a-f]{16}-\d+)-\w+")


class RunFolder:
    """Made and locked; nobody else may look into it."""

    def __init__(self, mark: str) -> None:
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=_prefix(mark)))
            self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            with suppress(OSError):  # a file system without locks
                fcntl.flock(self._lock, fcntl.LOCK_EX)
            if self.path.exists():  # whoever sweeps may have come before the lock
                return
            os.close(self._lock)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _prefix(mark: str) -> str:
    return f"steelyard-{mark}-"


def sweep(mark: str) -> int:
    """End what an agent that is lost left: itself, where it is stopped, its processes, then its folder. Returns how many
    processes there were."""
    ended = processes.end(lambda: [*processes.family(mark), *_agent(mark)])
    for path in Path(tempfile.gettempdir()).glob(f"{_prefix(mark)}*"):
        if _ours(path):
            shutil.rmtree(path, ignore_errors=True)
    return ended


def sweep_dead() -> list[str]:
    """Sweep up after every run of this user whose agent is dead: killed together with its parent, or a host that lost power.
    Returns their marks."""
    found = []
    for path in Path(tempfile.gettempdir()).glob("steelyard-*"):
        named = NAME.fullmatch(path.name)
        if named is not None and _ours(path) and _nobodys(path):
            sweep(named["mark"])
            found.append(named["mark"])
    return found


def _ours(path: Path) -> bool:
    with suppress(FileNotFoundError):
        return path.is_dir() and path.lstat().st_uid == os.getuid() and not path.is_symlink()
    return False


def _nobodys(path: Path) -> bool:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(handle)
    return True


def _agent(mark: str) -> list[psutil.Process]:
    found = locks.holder(locks.run(mark))
    if found is None or found[1] != os.getuid():
        return []
    with suppress(psutil.NoSuchProcess):
        return [psutil.Process(found[0])]
    return []
