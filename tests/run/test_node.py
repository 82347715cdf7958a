"""Tests of a real node agent, with the test as its parent."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import psutil
import pytest

from fixtures.commands import Shell
from fixtures.golden import golden
from steelyard.errors import RequestError
from steelyard.run import messages, node, processes
from steelyard.run.failure import Failure
from steelyard.run.host import Host
from steelyard.run.messages import (
    ByeMessage,
    OpenMessage,
    PingMessage,
    StartMessage,
    StopMessage,
    SweepMessage,
)

TOKEN = "c" * 32


class Agent:
    """A real node agent in a process of its own, to which a test sends messages as its parent."""

    def __init__(self, shell: Shell, **variables: str) -> None:
        self.shell = shell
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "steelyard.run.node"],
            env=shell.env(**variables),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def send(self, message: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(
            messages.encode_message(message) if not isinstance(message, bytes) else message
        )
        self.process.stdin.flush()

    def hear(self, kind: str) -> dict[str, Any]:
        """Return the next message of this kind and drop those before it; fail with the agent's
        stderr if there is none.
        """
        assert self.process.stdout is not None
        while line := self.process.stdout.readline():
            table: dict[str, Any] = json.loads(line)
            assert table["token"] == TOKEN
            if table["kind"] == kind:
                return table
        raise AssertionError(
            f"no {kind}: {self.process.stderr.read() if self.process.stderr else b''!r}"
        )

    def open(self, **over: Any) -> dict[str, Any]:
        """Send the open message with these fields changed and return the agent's hello."""
        self.send(opening(**over))
        return self.hear("hello")


def failure(code: str, text: str) -> dict[str, Any]:
    """Return a failure without a rank, as a message holds it."""
    return {"code": code, "text": text, "rank": None}


def opening(**over: Any) -> OpenMessage:
    """Return the open message of a run on one CPU device, with these fields changed."""
    base: dict[str, Any] = {
        "token": TOKEN,
        "mark": "m" * 16,
        "accelerator": "cpu",
        "devices": 1,
        "matmul": "fp32",
    }
    more: dict[str, Any] = {
        "interface": None,
        "peer": None,
        "environment": {},
        "variables": {},
        "needs": [],
        "paths": [],
    }
    return OpenMessage(**(base | more | over))


@pytest.fixture
def agent(shell: Shell) -> Iterator[Agent]:
    """Start a node agent, and kill it and all its processes after the test."""
    one = Agent(shell)
    yield one
    one.process.kill()
    one.process.wait()
    shell.clean()


def test_hello(agent: Agent) -> None:
    hello = agent.open(
        paths=[["/no/such/file", "/"], ["/no/such/file"]], needs=["pydantic", "no_such_module"]
    )
    assert (hello["accelerator"], hello["divisible"], len(hello["devices"])) == ("cpu", True, 1)
    assert (hello["missing"], hello["lacking"]) == ([1], ["no_such_module"])
    assert (hello["interface"], hello["address"], hello["port"]) == ("lo", None, None)
    assert hello["devices"][0]["free_bytes"] > 0
    assert hello["problem"] is None


def test_with_another_host_it_listens_on_the_named_interface_alone(agent: Agent) -> None:
    hello = agent.open(peer="localhost", interface="lo")
    (port,) = [
        one for one in psutil.Process(agent.process.pid).net_connections() if one.status == "LISTEN"
    ]
    assert (
        (port.laddr.ip, port.laddr.port)
        == (hello["address"], hello["port"])
        == ("127.0.0.1", hello["port"])
    )


def test_an_interface_that_is_not_there(agent: Agent) -> None:
    assert agent.open(peer="localhost", interface="ib7")["problem"].startswith(
        "no interface 'ib7'; there are: lo"
    )


def test_the_interface_of_the_route(agent: Agent) -> None:
    assert agent.open(peer="127.0.0.1")["interface"] == "lo"


def test_pings_are_answered_with_the_clock(agent: Agent) -> None:
    agent.open()
    agent.send(PingMessage(token=TOKEN, sent_s=4.5))
    assert agent.hear("pong")["sent_s"] == 4.5


@pytest.mark.parametrize(
    "line,why",
    [
        (messages.encode_message(PingMessage(token="d" * 32, sent_s=0.0)), b"another token"),
        (b"start everything\n", b"no JSON"),
        (
            messages.encode_message(StartMessage(token=TOKEN, run={}, world=1)).replace(
                TOKEN.encode(), b""
            ),
            b"token",
        ),
        (messages.encode_message(opening()), b"open was not expected now"),
    ],
)
def test_what_is_no_message_of_this_run_ends_it(agent: Agent, line: bytes, why: bytes) -> None:
    """Only the parent knows the token; whoever writes into the pipe without it is not the parent."""
    agent.open()
    agent.send(line)
    _, err = agent.process.communicate(timeout=300)
    assert agent.process.returncode == 2
    assert why in err


def test_nothing_can_be_started_before_open(agent: Agent) -> None:
    agent.send(StartMessage(token=TOKEN, run={}, world=1))
    _, err = agent.process.communicate(timeout=300)
    assert (agent.process.returncode, b"start was not expected now" in err) == (2, True)


def test_a_silent_parent_is_gone(agent: Agent) -> None:
    agent.open(silence_s=0.5)
    bye = agent.hear("bye")
    assert bye["failure"] == failure("parent_silent", golden("nothing-was-heard-of-the-parent"))
    assert agent.process.wait(300) == 0


@pytest.mark.full
def test_a_parent_that_takes_nothing_holds_up_nobody(agent: Agent) -> None:
    """A pipe holds 64 KiB and each of the 5000 answers more than 80 bytes, so the agent cannot
    write all of them.
    """
    agent.open(silence_s=0.5)
    agent.send(messages.encode_message(PingMessage(token=TOKEN, sent_s=0.0)) * 5000)
    assert agent.process.wait(300) == 0


def test_a_closed_pipe_is_a_parent_that_is_gone(agent: Agent) -> None:
    agent.open()
    assert agent.process.stdin is not None
    agent.process.stdin.close()
    assert agent.hear("bye")["failure"]["code"] == "parent_gone"
    assert agent.process.wait(300) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_an_agent_that_is_told_to_end_says_so(agent: Agent, number: int) -> None:
    agent.open()
    agent.process.send_signal(number)
    bye = agent.hear("bye")
    assert bye["failure"] == failure(
        "agent_ended", f"the agent was ended by {signal.Signals(number).name}"
    )


def test_stop_before_start(agent: Agent) -> None:
    agent.open()
    agent.send(StopMessage(token=TOKEN))
    # without a bye the parent would take the agent for lost
    assert (agent.hear("bye")["failure"], agent.process.wait(300)) == (None, 0)


@pytest.mark.parametrize("number,code", [("ENOSPC", "disk_full"), ("EACCES", "not_started")])
def test_ranks_that_cannot_be_started(shell: Shell, number: str, code: str) -> None:
    """The folder of a run is the first thing that the agent writes to disk."""
    fails = f"""
import errno, os, tempfile
def fail(*arguments, **options):
    raise OSError(errno.{number}, os.strerror(errno.{number}))
tempfile.mkdtemp = fail
"""
    (shell.folder / "sitecustomize.py").write_text(fails)
    agent = Agent(Shell(shell.folder, (shell.folder,)))
    agent.open()
    agent.send(StartMessage(token=TOKEN, run={}, world=1))
    bye = agent.hear("bye")
    assert bye["failure"]["code"] == code
    assert bye["failure"]["text"].startswith("the ranks could not be started: ")
    assert agent.process.wait(300) == 0


def test_a_spec_that_is_none_ends_the_worker_not_the_agent(agent: Agent) -> None:
    agent.open()
    agent.send(StartMessage(token=TOKEN, run={"case": 1}, world=1))
    assert agent.hear("exit")["code"] == 1
    bye = agent.hear("bye")
    assert bye["exits"] == {"0": 1}
    assert "ValidationError" in bye["stderr_tails"]["0"]


def test_sweep_ends_what_carries_the_mark(agent: Agent, shell: Shell) -> None:
    ours = subprocess.Popen(
        ["sleep", "300"],
        env={**shell.env(), messages.MARK_VARIABLE: "m" * 16},
        start_new_session=True,
    )
    other = subprocess.Popen(
        ["sleep", "300"], env={**shell.env(), messages.MARK_VARIABLE: "n" * 16}
    )
    try:
        for mark in "mn":
            (shell.tmp / f"steelyard-{mark * 16}-x1").mkdir()
        agent.send(SweepMessage(token=TOKEN, mark="m" * 16, environment={}))
        assert agent.hear("bye")["ended"] == 1
        assert ours.wait(300) == -signal.SIGTERM
        assert other.poll() is None
        assert [path.name for path in shell.tmp.iterdir()] == [f"steelyard-{'n' * 16}-x1"]
    finally:
        for one in (ours, other):
            one.kill()
            one.wait()


def test_sweep_ends_an_agent_that_is_stopped(agent: Agent, shell: Shell) -> None:
    """Over ssh nobody else would end it: the agent is no child of the parent there, and its
    environment does not hold the mark.
    """
    lost = Agent(shell)
    lost.open(mark="m" * 16)
    lost.process.send_signal(signal.SIGSTOP)
    agent.send(SweepMessage(token=TOKEN, mark="m" * 16, environment={}))
    assert agent.hear("bye")["ended"] == 1
    assert lost.process.wait(300) == 0


def test_what_a_plug_in_prints_is_no_message(shell: Shell) -> None:
    (shell.folder / "sitecustomize.py").write_text("print('hello from a plug-in')\n")
    agent = Agent(Shell(shell.folder, (shell.folder,)))
    assert agent.process.stdout is not None
    # printed before the agent redirects stdout; the parent ignores such lines
    assert agent.process.stdout.readline() == b"hello from a plug-in\n"
    assert agent.open()["kind"] == "hello"
    agent.process.kill()
    agent.process.wait()


def test_devices_are_claimed_by_one_agent(shell: Shell) -> None:
    agents = [Agent(shell)]
    end = time.monotonic() + 300
    try:
        while agents[-1].open()["devices"][0]["busy"] is not None and time.monotonic() < end:
            agents.append(Agent(shell))  # another test had claimed it
        agents.append(Agent(shell))
        found = agents[-1].open()["devices"][0]["busy"]
        assert found is not None
        assert found.startswith("another run, of process ")
    finally:
        for one in agents:
            one.process.kill()
            one.process.wait()


@pytest.mark.parametrize(
    "environment,told",
    [
        ({}, {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}),
        ({"NCCL_SOCKET_IFNAME": "ib"}, {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "ib"}),
    ],
)
def test_workers_are_told_one_interface(
    environment: dict[str, str], told: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL matches interfaces by prefix unless the name begins with `=`; a value from the site file
    is left as it is.
    """
    monkeypatch.setattr(os, "environ", {})
    found = Host(opening(environment=environment)).make_worker_environment()
    assert {name: value for name, value in found.items() if name.endswith("_IFNAME")} == told


class Said:
    """A message sender that stores the messages instead of writing them."""

    is_connected = True

    def __init__(self) -> None:
        self.messages: list[Any] = []

    def send(self, message: Any) -> None:
        self.messages.append(message)

    def flush(self, within_s: float) -> None:
        pass


class Starved:
    """A stand-in for the ranks of a node that raises MemoryError when news are read."""

    is_over, cleaned = False, False

    def read_news(self) -> list[Any]:
        raise MemoryError

    def finish(self, failure: Failure | None, with_stacks: bool) -> Iterator[ByeMessage]:
        yield ByeMessage(token=TOKEN, exits={}, stderr_tails={}, ended=1, failure=failure)
        self.cleaned = True


def in_process(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Said]:
    """Return an agent in this process, which has received no message yet, and the sender that
    stores its messages.
    """
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    said = Said()
    made: Any = node.NodeAgent(SimpleQueue(), said)  # type: ignore[arg-type]
    made._token = TOKEN
    return made, said


STARVED = Failure(
    "out_of_memory", "the agent ran out of memory; free memory, or raise its limit (ulimit -v)"
)


def test_an_agent_that_runs_out_of_memory_ends_its_ranks_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, said = in_process(monkeypatch)
    made._ranks = ranks = Starved()
    made.run()
    (bye,) = [one for one in said.messages if isinstance(one, ByeMessage)]
    assert (bye.failure, bye.ended, ranks.cleaned) == (STARVED, 1, True)


def test_so_does_one_that_never_got_to_say_hello(monkeypatch: pytest.MonkeyPatch) -> None:
    def starve(_: OpenMessage) -> Host:
        raise MemoryError

    made, said = in_process(monkeypatch)
    made._token = None
    monkeypatch.setattr(node, "Host", starve)
    made._lines.put(messages.encode_message(opening()))
    made.run()
    assert [one.failure for one in said.messages] == [STARVED]


@pytest.mark.parametrize("error", [MemoryError(), OSError(12, "Cannot allocate memory")])
def test_ranks_that_cannot_be_started_for_lack_of_memory(error: MemoryError | OSError) -> None:
    assert node._explain_start_error(error) == Failure(
        "out_of_memory", golden("the-ranks-could-not-be-started")
    )


@pytest.mark.process
def test_a_working_directory_that_was_deleted_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a deleted folder, libraries of torch would end a worker without an error message."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    said = "the working directory no longer exists; change to one that does (cd), and run again"
    with pytest.raises(RequestError) as caught:
        processes.check_process_control()
    assert str(caught.value) == said
    assert Host(opening()).make_hello().problem == said
