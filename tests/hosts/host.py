"""The first process of a host: it keeps the host's namespaces alive, and ends all that runs on the
host when its stdin closes.

Started as `unshare --net --uts --mount python host.py NAME HOSTS_FILE OUTSIDE`, where OUTSIDE is
the network namespace of the process that starts it. Its stdin closes when that process ends,
however it ends, so that no daemon outlives the tests.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path


def network_of(pid: int | str) -> str | None:
    """Return the network namespace of a process; None once it has ended."""
    try:
        return str(Path(f"/proc/{pid}/ns/net").readlink())
    except OSError:
        return None


def processes_in(network: str) -> list[int]:
    """Return the ids of the processes in a network namespace."""
    return [
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and network_of(entry.name) == network
    ]


def kill_others(network: str) -> None:
    """Kill all other processes of a network namespace, again until none is left: one may have
    started another in between.
    """
    while others := [pid for pid in processes_in(network) if pid != os.getpid()]:
        for pid in others:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def main(name: str, hosts_file: str, outside: str) -> None:
    """Set up the host's name, /etc/hosts and /sys, print `ready`, and kill all processes of the
    host when stdin closes.
    """
    network = network_of("self")
    # Without a namespace of its own, all processes of the machine would be killed at the end.
    if network in (None, outside):
        sys.exit("unshare has made no network namespace")
    socket.sethostname(name)
    subprocess.run(["mount", "--bind", hosts_file, "/etc/hosts"], check=True)
    # a new sysfs shows the network links of this namespace
    subprocess.run(["mount", "-t", "sysfs", "sysfs", "/sys"], check=True)
    print("ready", flush=True)
    sys.stdin.read()
    kill_others(str(network))


if __name__ == "__main__":
    main(*sys.argv[1:])
