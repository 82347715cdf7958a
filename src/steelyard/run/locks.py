"""Who has what on a host: a device, which one run has at a time, and a run, which one agent leads.

A claim is a listening socket with an abstract name (Linux): it is there as long as its process and leaves no file behind,
and whoever finds it taken can ask the kernel who has it. Where there are no such sockets nothing is claimed.
"""

import os
import pwd
import socket
import struct
import sys
from contextlib import suppress

PREFIX = "\0steelyard/"
BACKLOG = 4096  # nobody accepts: each that ever asked has its place in the queue
CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid


class Claims:
    """What this process has claimed."""

    def __init__(self) -> None:
        self._held: list[socket.socket] = []

    def claim(self, name: str) -> str | None:
        """None where it is ours now; otherwise whose it is."""
        if sys.platform != "linux":
            return None
        taken = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            taken.bind(PREFIX + name)
            taken.listen(BACKLOG)
        except OSError:
            taken.close()
            return _owner(name)
        self._held.append(taken)
        return None

    def release(self) -> None:
        for held in self._held:
            held.close()
        self._held = []


def device(uuid: str) -> str:
    return f"device/{uuid}"


def run(mark: str) -> str:
    return f"run/{mark}"


def holder(name: str) -> tuple[int, int] | None:
    """The process that listens there, and its user. One that is stopped is found too: the kernel answers for it."""
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
