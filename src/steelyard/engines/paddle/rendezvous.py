"""How Paddle's ranks find each other: the environment variables of its launcher, made from the
rendezvous of the run.

Paddle's store is a TCP server of rank 0. It listens on every interface, whatever address it is
told, and takes no socket that is already bound; it holds bytes and unpickles nothing. On one host
ranks reach it over loopback.
"""

import os
import socket
import threading
from pathlib import Path

from steelyard import files
from steelyard.engine.framework import Meeting

LOOPBACK = "127.0.0.1"
# for rank 0 to publish its port; importing a framework from a busy disk is slow
TIMEOUT_S, POLL_S = 120.0, 0.05
MAX_FILE_BYTES = 100


def find_master(meet: Meeting, rank: int) -> tuple[str, int]:
    """Return (host, port) at which rank 0 will serve the store.

    On one host rank 0 chooses a free loopback port and writes it into the rendezvous file, and
    other ranks wait up to 120 s for it (TimeoutError). On several hosts it is the run's address,
    and rank 0 closes `listen_fd` so that Paddle can bind the port. Raises ValueError if `meet` has
    neither.
    """
    if meet.file is not None:
        return _publish_port(meet.file) if rank == 0 else _wait_for_port(meet.file)
    if meet.address is None or meet.port is None:
        raise ValueError("ranks that are told nowhere to meet")
    if meet.listen_fd is not None and rank == 0:
        os.close(meet.listen_fd)  # its port is Paddle's now
    return meet.address, meet.port


def _publish_port(file: Path) -> tuple[str, int]:
    """Find a free loopback port, write it into the file, and return (host, port)."""
    with socket.socket() as free:
        free.bind((LOOPBACK, 0))
        port: int = free.getsockname()[1]
    files.write_file(file, str(port).encode())
    return LOOPBACK, port


def _wait_for_port(file: Path) -> tuple[str, int]:
    """Wait until rank 0 has written its port into the file, and return (host, port); raise
    TimeoutError after 120 s.
    """
    never = threading.Event()
    for _ in range(int(TIMEOUT_S / POLL_S)):
        if file.exists():
            return LOOPBACK, int(files.read_file(file, MAX_FILE_BYTES))
        never.wait(POLL_S)
    raise TimeoutError(f"rank 0 did not say within {TIMEOUT_S:.0f} s where to meet")


def launcher_variables(
    host: str, port: int, rank: int, local_rank: int, world: int, backend: str
) -> dict[str, str]:
    """Return the environment variables that Paddle's launcher would set for this rank. The
    endpoints only name ranks: nothing listens there but the store.
    """
    endpoints = [f"{host}:{port + 1 + index}" for index in range(world)]
    settings = {
        "PADDLE_TRAINER_ID": str(rank),
        "PADDLE_TRAINERS_NUM": str(world),
        "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
        "PADDLE_CURRENT_ENDPOINT": endpoints[rank],
        "PADDLE_MASTER": f"{host}:{port}",
        "PADDLE_RANK_IN_NODE": str(local_rank),
    }
    return settings | ({"PADDLE_DISTRI_BACKEND": backend} if backend == "gloo" else {})
