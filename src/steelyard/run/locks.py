"""Who has a device: one run at a time, on a host.

A claim is a listening socket with an abstract name (Linux): it is there as long as its process and leaves no file behind,
and whoever finds it taken can ask the kernel who has it. Where there are no such sockets nothing is claimed.
"""

import os
import pwd
import socket
import struct
import sys
from contextlib import suppress

PREFIX = "\0steelyard/device/"
CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid


class Claims:
    """The devices that this process has claimed."""

    def __init__(self) -> None:
        self._held: list[socket.socket] = []

    def claim(self, device: str) -> str | None:
        """None where it is ours now; otherwise whose it is."""
        if sys.platform != "linux":
            return None
        name = PREFIX + device
        taken = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            taken.bind(name)
            taken.listen(8)
        except OSError:
            taken.close()
            return _owner(name)
        self._held.append(taken)
        return None

    def release(self) -> None:
        for held in self._held:
            held.close()
        self._held = []


def _owner(name: str) -> str:
    """The process that listens there."""
    pid = uid = 0
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking, suppress(OSError):
        asking.settimeout(1.0)
        asking.connect(name)
        raw = asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
        pid, uid, _ = CREDENTIALS.unpack(raw)
    if not pid:
        return "another run, of a process that does not show"
    if uid == os.getuid():
        return f"another run, of process {pid}"
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        user = f"user {uid}"
    return f"another run, of process {pid} of {user}"
