"""Tests that a run on one host opens no port to other hosts."""

import ipaddress
import json
import os
import re
import signal
import socket
import sys

import psutil
import pytest

from fixtures.commands import Shell, wait_for, wait_for_result
from fixtures.sockets import find_listening_sockets

MANY_STEPS = "--set=question.train.steps=1000000"
RUN = (
    "run",
    "llama1-7b-openwebtext",
    "--size",
    "smoke",
    "--accelerator",
    "cpu",
    "--devices",
    "2",
    MANY_STEPS,
)
TOKEN = re.compile(r"[0-9a-f]{32}")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sockets as Linux lists them")


def test_listening_sockets_are_found() -> None:
    with socket.socket() as stream, socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as datagram:
        before = set(find_listening_sockets(os.getpid()))
        stream.bind(("127.0.0.1", 0))
        stream.listen()
        datagram.bind(("::1", 0))
        expected = {
            ("tcp", "127.0.0.1", stream.getsockname()[1]),
            ("udp6", "::1", datagram.getsockname()[1]),
        }
        assert set(find_listening_sockets(os.getpid())) - before == expected


@pytest.mark.full
@pytest.mark.parametrize("plan", ["DP2", "PP2"])
def test_run_on_one_host_listens_only_on_loopback(shell: Shell, plan: str) -> None:
    """Parent, agent and ranks are looked at once all of them train, also where the user's
    environment names another interface.

    No command line holds the token.
    """
    interfaces = [
        name
        for name, addresses in psutil.net_if_addrs().items()
        if any(one.family == socket.AF_INET for one in addresses)
    ]
    process = shell.start(
        *RUN,
        "--parallel",
        plan,
        "--out",
        shell.out,
        GLOO_SOCKET_IFNAME=max(interfaces, key=lambda n: n != "lo"),
    )
    assert wait_for(lambda: _read_phase(shell) == "train", 120)
    processes = shell.processes()
    commands = [" ".join(one.cmdline()) for one in processes]
    assert [
        sum(name in command for command in commands)
        for name in ("steelyard run", "run.node", "run.worker")
    ] == [1, 1, 2]
    listeners = [
        (one.pid, kind, address)
        for one in processes
        for kind, address, _ in find_listening_sockets(one.pid)
    ]
    assert listeners  # those of gloo
    assert [one for one in listeners if not ipaddress.ip_address(one[2]).is_loopback] == []
    assert [command for command in commands if TOKEN.search(command)] == []
    process.send_signal(signal.SIGINT)
    assert wait_for_result(process).code == 1
    assert shell.wait_until_ended()


def _read_phase(shell: Shell) -> str | None:
    """Return the phase that the run last wrote to its progress file, or None if there is none
    yet.
    """
    for path in shell.tmp.glob("steelyard-*/progress.json"):
        return str(json.loads(path.read_text())["phase"])
    return None
