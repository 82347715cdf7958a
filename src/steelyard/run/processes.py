"""The processes of a run on one host: which devices they claim, how they are identified and ended,
and what dead runs left behind.

A claim is a listening socket with an abstract name (Linux). It exists as long as its process and
leaves no file behind, and the kernel tells who holds it. Where there are no such sockets nothing is
claimed. An agent holds a lock on the private folder of its run for as long as it lives, however it
ends: a folder that can be locked belongs to a dead run.
"""

import ctypes
import fcntl
import os
import pwd
import re
import shutil
import signal
import socket
import struct
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from steelyard.errors import RequestError
from steelyard.run.clock import now, sleep
from steelyard.run.messages import MARK

PROC = Path("/proc/self/stat")
POLL_S = 0.02
GRACE_S = 5.0
SUBREAPER, DEATH_SIGNAL = 36, 1  # PR_SET_CHILD_SUBREAPER and PR_SET_PDEATHSIG of prctl.h

PREFIX = "\0steelyard/"
# with the mark of a run; the agent holds it, so that it is found if it is suspended
AGENT_CLAIM = "run/{}"
BACKLOG = 4096  # nobody accepts: each that ever asked has its place in the queue
CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid

NAME = re.compile(r"steelyard-(?P<mark>[0-9a-f]{16}-\d+)-\w+")


def check() -> None:
    """Linux shows there who runs. Without it nobody could be found, and so nobody ended."""
    if sys.platform == "linux" and not PROC.exists():
        raise RequestError("/proc is not mounted; a run needs it; mount it and run again")
    check_working_directory()


def check_working_directory() -> None:
    """Raise RequestError if the working directory was deleted: libraries of workers fail there, and
    do not say why.
    """
    try:
        Path.cwd()
    except FileNotFoundError as error:
        said = "the working directory no longer exists; change to one that does (cd), and run again"
        raise RequestError(said) from error


def adopt_orphans() -> None:
    """Linux: what descendants leave behind becomes a child of this process, and so is found at the
    end.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(SUBREAPER, 1, 0, 0, 0)


def hang_up_with_parent() -> None:
    """Linux, in a child before it becomes another program: SIGHUP, should the thread that started
    it be gone.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(DEATH_SIGNAL, signal.SIGHUP, 0, 0, 0)


def wake_with_parent() -> None:
    """Linux: should this process be stopped when its parent dies, it goes on, sees that it is
    alone, and ends in order.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(DEATH_SIGNAL, signal.SIGCONT, 0, 0, 0)


def family(mark: str, root: int | None = None) -> list[psutil.Process]:
    """All that carry the run's mark, and all below `root`: a child may have a session of its own, a
    cleared environment, or a parent that is gone. Neither this process nor those it was started by.
    """
    ours = {os.getpid(), *(one.pid for one in psutil.Process().parents())}
    below = {one.pid for one in children(root)} if root is not None else set()
    return [
        one
        for one in psutil.process_iter()
        if one.pid not in ours and alive(one) and (one.pid in below or marked(one, mark))
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
    """End processes: first kindly, then for certain, with whatever was started in between. Returns
    how many there were.
    """
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


def claim(name: str, held: list[socket.socket]) -> str | None:
    """Claim a name for as long as this process lives: add its socket to `held` and return None, or
    return who has the name.
    """
    if sys.platform != "linux":
        return None
    taken = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        taken.bind(PREFIX + name)
        taken.listen(BACKLOG)
    except OSError:
        taken.close()
        return _owner(name)
    held.append(taken)
    return None


def holder(name: str) -> tuple[int, int] | None:
    """The process that listens there, and its user. One that is stopped is found too: the kernel
    answers for it.
    """
    if sys.platform != "linux":
        return None
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking, suppress(OSError):
        asking.settimeout(1.0)
        asking.connect(PREFIX + name)
        raw = asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
        pid, uid, _ = CREDENTIALS.unpack(raw)
        return (pid, uid) if pid else None
    return None


def _owner(name: str) -> str:
    found = holder(name)
    if found is None:
        return "another run, of a process that does not show"
    pid, uid = found
    if uid == os.getuid():
        return f"another run, of process {pid}"
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        user = f"user {uid}"
    return f"another run, of process {pid} of {user}"


class RunFolder:
    """A folder of a run in the temporary folder, locked for as long as the run lives. No other user
    may look into it.
    """

    def __init__(self, mark: str) -> None:
        # It gets its name when it is locked: another run that starts now would take it for the
        # folder of a dead one.
        while True:
            new = Path(tempfile.mkdtemp(prefix=f".{_prefix(mark)}"))
            with suppress(FileNotFoundError):  # whoever sweeps came before the lock
                self._lock = os.open(new, os.O_RDONLY | os.O_DIRECTORY)
                with suppress(OSError):  # a file system without locks
                    fcntl.flock(self._lock, fcntl.LOCK_EX)
                self.path = new.rename(new.with_name(new.name[1:]))
                return

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _prefix(mark: str) -> str:
    return f"steelyard-{mark}-"


def sweep(mark: str) -> int:
    """End what an agent that is lost left: itself, where it is stopped, its processes, then its
    folder. Returns how many processes there were."""
    ended = end(lambda: [*family(mark), *_agent(mark)])
    for name in (f"{_prefix(mark)}*", f".{_prefix(mark)}*"):
        for path in filter(_ours, Path(tempfile.gettempdir()).glob(name)):
            shutil.rmtree(path, ignore_errors=True)
    return ended


def sweep_dead() -> list[str]:
    """Sweep up after every run of this user whose agent is dead: killed together with its parent,
    or a host that lost power. Returns their marks."""
    found = []
    for path in Path(tempfile.gettempdir()).iterdir():
        named = NAME.fullmatch(path.name.removeprefix("."))
        if named is None or not _ours(path) or not _nobodys(path):
            continue
        # of a run that died or is about to lock it, and then makes another
        if path.name.startswith("."):
            shutil.rmtree(path, ignore_errors=True)
        else:
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
    found = holder(AGENT_CLAIM.format(mark))
    if found is None or found[1] != os.getuid():
        return []
    with suppress(psutil.NoSuchProcess):
        return [psutil.Process(found[0])]
    return []


@contextmanager
def ignore_interrupts() -> Iterator[None]:
    """Ignore Ctrl-C, SIGTERM and SIGHUP: what is under way ends by itself, and a second Ctrl-C
    would only lose it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {
        number: signal.signal(number, signal.SIG_IGN)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
