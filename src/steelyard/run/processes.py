"""The processes of a run on one host: which devices they claim, how they are found and ended, and
how leftovers of dead runs are removed.

A claim is a listening socket with an abstract name (Linux). It exists as long as its process and
leaves no file behind, and the kernel tells who holds it. Where there are no such sockets nothing is
claimed. A node agent holds a lock on the private folder of its run for as long as it lives, however
it ends: a folder that can be locked belongs to a dead run.
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
from steelyard.run.messages import MARK_VARIABLE

PROC = Path("/proc/self/stat")
POLL_S = 0.02
GRACE_S = 5.0
SUBREAPER, DEATH_SIGNAL = 36, 1  # PR_SET_CHILD_SUBREAPER and PR_SET_PDEATHSIG of prctl.h

CLAIM_PREFIX = "\0steelyard/"
# with the mark of a run; the agent holds it, so that it is found if it is suspended
AGENT_CLAIM = "run/{}"
BACKLOG = 4096  # connections are never accepted, so each stays in the queue
CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid

FOLDER_NAME = re.compile(r"steelyard-(?P<mark>[0-9a-f]{16}-\d+)-\w+")


def check_process_control() -> None:
    """Raise RequestError if /proc is not mounted on Linux, without which a run's processes could
    not be found and ended, or if the working directory was deleted; else do nothing.
    """
    if sys.platform == "linux" and not PROC.exists():
        raise RequestError("/proc is not mounted; a run needs it; mount it and run again")
    check_working_directory()


def check_working_directory() -> None:
    """Raise RequestError if the working directory was deleted: libraries of workers fail there
    without saying why.
    """
    try:
        Path.cwd()
    except FileNotFoundError as error:
        text = "the working directory no longer exists; change to one that does (cd), and run again"
        raise RequestError(text) from error


def adopt_orphans() -> None:
    """On Linux, make this process the parent of all descendants whose own parent ends (child
    subreaper), so that they are found at the end; errors are ignored, and elsewhere nothing is
    done.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(SUBREAPER, 1, 0, 0, 0)


def hang_up_with_parent() -> None:
    """On Linux, let the kernel send SIGHUP to this process when the thread that started it ends;
    for use between fork and exec.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(DEATH_SIGNAL, signal.SIGHUP, 0, 0, 0)


def die_with_parent(parent: int) -> None:
    """On Linux, let the kernel kill this process when the thread that started it ends, and exit at
    once if its parent is no longer the process with the id `parent`; elsewhere do nothing. For a
    process that has nothing to write at its end.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before the kernel was told
            os._exit(1)


def wake_with_parent() -> None:
    """On Linux, let the kernel send SIGCONT to this process when its parent dies: a suspended
    process then goes on, sees that it is alone, and ends in order.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(DEATH_SIGNAL, signal.SIGCONT, 0, 0, 0)


def find_run_processes(mark: str, root: int | None = None) -> list[psutil.Process]:
    """Return the live processes (no zombies) of this host that carry the run's mark in their
    environment, and all descendants of the process with id `root` (None: no such), but neither this
    process nor its ancestors.

    Both are needed: a child may have a cleared environment, or a parent that is gone.
    """
    excluded = {os.getpid(), *(process.pid for process in psutil.Process().parents())}
    descendants = {process.pid for process in find_descendants(root)} if root is not None else set()
    return [
        process
        for process in psutil.process_iter()
        if process.pid not in excluded
        and is_alive(process)
        and (process.pid in descendants or has_mark(process, mark))
    ]


def find_descendants(pid: int) -> list[psutil.Process]:
    """Return all descendants of the process with this id, at any depth and without itself; empty if
    it does not exist.
    """
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def has_mark(process: psutil.Process, mark: str) -> bool:
    """Return whether the environment of a process carries this run's mark; False if it is gone or
    not ours to read.
    """
    try:
        return process.environ().get(MARK_VARIABLE) == mark
    except (psutil.Error, OSError):  # gone, or of another user
        return False


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process exists and is no zombie: a zombie only waits for its parent to
    collect it.
    """
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def is_suspended(pid: int) -> bool:
    """Return whether a signal such as SIGSTOP has suspended the process; False if it does not
    exist.
    """
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return False


def end_processes(find: Callable[[], list[psutil.Process]], grace_s: float = GRACE_S) -> int:
    """Send SIGTERM to all processes that `find` returns and wait until they have ended, at most
    `grace_s` seconds; then call `find` again and do the same with SIGKILL. Return how many
    different processes there were.

    SIGCONT follows each signal, so that suspended processes receive it.
    """
    seen: set[int] = set()
    for number in (signal.SIGTERM, signal.SIGKILL):
        processes = find()
        seen |= {process.pid for process in processes}
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)
                process.send_signal(signal.SIGCONT)  # a suspended one would not receive the signal
        end_s = now() + grace_s
        while now() < end_s and any(map(is_alive, processes)):
            sleep(POLL_S)
    return len(seen)


def claim_name(name: str, sockets: list[socket.socket]) -> str | None:
    """Claim a name on this host for as long as this process lives, by a socket of that name: append
    the socket to `sockets` and return None, or return a text on which process has the name already.
    Outside Linux it returns None and claims nothing.
    """
    if sys.platform != "linux":
        return None
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(CLAIM_PREFIX + name)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        return _describe_claim_holder(name)
    sockets.append(listener)
    return None


def find_claim_holder(name: str) -> tuple[int, int] | None:
    """Return (process id, user id) of the process that holds a claimed name on this host, also a
    suspended one; None if nobody does, it cannot be told (no answer, or another PID namespace), or
    outside Linux. It connects to the claim's socket, and closes the connection at once.
    """
    if sys.platform != "linux":
        return None
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe, suppress(OSError):
        probe.settimeout(1.0)
        probe.connect(CLAIM_PREFIX + name)
        raw = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
        pid, uid, _ = CREDENTIALS.unpack(raw)
        return (pid, uid) if pid else None
    return None


def _describe_claim_holder(name: str) -> str:
    """Return a text such as `another run, of process 7 of USER` on who holds a claimed name;
    without the user if it is this one, and without both if it does not show.
    """
    ids = find_claim_holder(name)
    if ids is None:
        return "another run, whose process is unknown"
    pid, uid = ids
    if uid == os.getuid():
        return f"another run, of process {pid}"
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        user = f"user {uid}"
    return f"another run, of process {pid} of {user}"


class RunFolder:
    """A private folder for one run on this host, `steelyard-MARK-...` in the temporary folder
    (`path`), created on construction with mode 0700 and locked as long as this process lives: a
    folder without lock is that of a dead run, and may be swept. `remove` deletes it with its
    content and releases the lock.
    """

    def __init__(self, mark: str) -> None:
        """Create a folder with mode 0700 and a hidden name in the temporary folder, lock it, then
        rename it to `steelyard-MARK-...`; try again if another run removes it before. A file system
        without locks is accepted. Raises OSError if it cannot be created.
        """
        # It is renamed once it is locked: before, another run that starts now could take it for
        # that of a dead run.
        while True:
            new = Path(tempfile.mkdtemp(prefix=f".{_make_folder_prefix(mark)}"))
            with suppress(FileNotFoundError):  # another run removed it before the lock
                self._lock = os.open(new, os.O_RDONLY | os.O_DIRECTORY)
                with suppress(OSError):  # a file system without locks
                    fcntl.flock(self._lock, fcntl.LOCK_EX)
                self.path = new.rename(new.with_name(new.name[1:]))
                return

    def remove(self) -> None:
        """Delete the run's folder with its content, ignoring errors, and release the lock."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _make_folder_prefix(mark: str) -> str:
    """Return the beginning of the folder names of the run with this mark."""
    return f"steelyard-{mark}-"


def sweep_run(mark: str) -> int:
    """End the processes of this host that a lost agent left, found by the run's mark, and the agent
    itself if it is still alive (suspended), and delete its folders in the temporary folder if they
    are this user's; return how many processes there were.
    """
    ended = end_processes(lambda: [*find_run_processes(mark), *_find_agent(mark)])
    for name in (f"{_make_folder_prefix(mark)}*", f".{_make_folder_prefix(mark)}*"):
        for path in filter(_is_own_folder, Path(tempfile.gettempdir()).glob(name)):
            shutil.rmtree(path, ignore_errors=True)
    return ended


def sweep_dead_runs() -> list[str]:
    """Clean up after every run of this user on this host whose agent is dead, such as one killed
    together with its parent: end its processes and delete its folders in the temporary folder,
    recognized by name and missing lock.

    Return the marks of these runs. Hidden folders, which a run had not locked yet, are only
    deleted, and their marks not returned.
    """
    marks = []
    for path in Path(tempfile.gettempdir()).iterdir():
        match = FOLDER_NAME.fullmatch(path.name.removeprefix("."))
        if match is None or not _is_own_folder(path) or not _is_unlocked(path):
            continue
        # its run died, or has not locked it yet and will then make another
        if path.name.startswith("."):
            shutil.rmtree(path, ignore_errors=True)
        else:
            sweep_run(match["mark"])
            marks.append(match["mark"])
    return marks


def _is_own_folder(path: Path) -> bool:
    """Return whether the path is a folder of this user and no link; False if it does not exist."""
    with suppress(FileNotFoundError):
        return path.is_dir() and path.lstat().st_uid == os.getuid() and not path.is_symlink()
    return False


def _is_unlocked(path: Path) -> bool:
    """Return whether no process holds the lock of a run's folder, which is then that of a dead run;
    False if it cannot be opened or locked. The lock is released again.
    """
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


def _find_agent(mark: str) -> list[psutil.Process]:
    """Return the process that holds the agent's claim for this run's mark, as a list of one, if it
    is a process of this user; else an empty list.
    """
    ids = find_claim_holder(AGENT_CLAIM.format(mark))
    if ids is None or ids[1] != os.getuid():
        return []
    with suppress(psutil.NoSuchProcess):
        return [psutil.Process(ids[0])]
    return []


@contextmanager
def ignore_interrupts() -> Iterator[None]:
    """Ignore SIGINT, SIGTERM and SIGHUP of this process inside a `with` block, and restore their
    handlers after it, also if it raises; does nothing outside the main thread.

    What is under way ends by itself, and a second Ctrl-C would only lose it. Signals that come
    meanwhile are lost.
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
