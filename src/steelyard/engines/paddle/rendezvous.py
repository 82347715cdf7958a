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
    """Return (host, port) at which rank 0 will serve Paddle's store.

    If `meet` has a file (one host), rank 0 chooses a free loopback port and writes it into that
    file, and other ranks wait up to 120 s for it (TimeoutError). Otherwise it is the run's address
    and port, and rank 0 closes `listen_fd`, if there is one, so that Paddle can bind the port.
    Raises ValueError if `meet` has neither.
    """
    if meet.file is not None:
        return _publish_port(meet.file) if rank == 0 else _wait_for_port(meet.file)
    if meet.address is None or meet.port is None:
        raise ValueError("several ranks, but no rendezvous file or address")
    if meet.listen_fd is not None and rank == 0:
        os.close(meet.listen_fd)  # its port is Paddle's now
    return meet.address, meet.port


def _publish_port(file: Path) -> tuple[str, int]:
    """Find a loopback port that is free now, write its number into the file as text, at once and
    completely, and return (host, port). The port is not held.
    """
    with socket.socket() as free:
        free.bind((LOOPBACK, 0))
        port: int = free.getsockname()[1]
    files.write_file(file, str(port).encode())
    return LOOPBACK, port


def _wait_for_port(file: Path) -> tuple[str, int]:
    """Wait until rank 0 has written its port into the file, looking every 0.05 s, and return
    (loopback, port). Raises TimeoutError after 120 s, ValueError if the file holds no number.
    """
    never = threading.Event()
    for _ in range(int(TIMEOUT_S / POLL_S)):
        if file.exists():
            return LOOPBACK, int(files.read_file(file, MAX_FILE_BYTES))
        never.wait(POLL_S)
    raise TimeoutError(f"rank 0 did not publish its port within {TIMEOUT_S:.0f} s")


def launcher_variables(
    host: str, port: int, rank: int, local_rank: int, world: int, backend: str
) -> dict[str, str]:
    """Return those environment variables of Paddle's launcher that its rendezvous needs: rank,
    number of ranks, endpoints of all ranks, master, rank in the node, and the backend if it is
    gloo. No device is selected, and nothing is set here.

    The endpoints, ports after `port`, only name ranks: nothing listens there.
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
