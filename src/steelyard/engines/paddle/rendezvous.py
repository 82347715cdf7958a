"""How ranks of Paddle find each other: its variables, from where the run says that they meet.

Paddle's store is a TCP server of rank 0 alone. It listens on every interface, whatever address it
is told, and takes no socket that is bound already; it holds bytes and unpickles nothing. On one
host ranks reach it over loopback.
"""

import os
import socket
import threading
from pathlib import Path

from steelyard import files
from steelyard.engine.framework import Meeting

LOOPBACK = "127.0.0.1"
# for rank 0 to say where; reading a framework from a busy disk takes its time
MEET_S, LOOK_S = 120.0, 0.05
MOST_BYTES = 100


def master(meet: Meeting, rank: int) -> tuple[str, int]:
    """Where rank 0 serves: a free port of its choice that it writes into the file, or the address
    of the run.
    """
    if meet.file is not None:
        return _chosen(meet.file) if rank == 0 else _read(meet.file)
    if meet.address is None or meet.port is None:
        raise ValueError("ranks that are told nowhere to meet")
    if meet.listen_fd is not None and rank == 0:
        os.close(meet.listen_fd)  # its port is Paddle's now
    return meet.address, meet.port


def _chosen(file: Path) -> tuple[str, int]:
    with socket.socket() as free:
        free.bind((LOOPBACK, 0))
        port: int = free.getsockname()[1]
    files.write(file, str(port).encode())
    return LOOPBACK, port


def _read(file: Path) -> tuple[str, int]:
    never = threading.Event()
    for _ in range(int(MEET_S / LOOK_S)):
        if file.exists():
            return LOOPBACK, int(files.read(file, MOST_BYTES))
        never.wait(LOOK_S)
    raise TimeoutError(f"rank 0 did not say within {MEET_S:.0f} s where to meet")


def variables(
    host: str, port: int, rank: int, local_rank: int, world: int, backend: str
) -> dict[str, str]:
    """What Paddle's launcher would set. Its endpoints are names of ranks: nothing listens there but
    the store.
    """
    endpoints = [f"{host}:{port + 1 + one}" for one in range(world)]
    told = {
        "PADDLE_TRAINER_ID": str(rank),
        "PADDLE_TRAINERS_NUM": str(world),
        "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
        "PADDLE_CURRENT_ENDPOINT": endpoints[rank],
        "PADDLE_MASTER": f"{host}:{port}",
        "PADDLE_RANK_IN_NODE": str(local_rank),
    }
    return told | ({"PADDLE_DISTRI_BACKEND": backend} if backend == "gloo" else {})
