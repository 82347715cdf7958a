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

    def open(self, **changes: Any) -> dict[str, Any]:
        """Send the open message with these fields changed and return the agent's hello."""
        self.send(make_open_message(**changes))
        return self.hear("hello")


def make_failure(code: str, text: str) -> dict[str, Any]:
    """Return a failure without a rank, as a message holds it."""
    return {"code": code, "text": text, "rank": None}


def make_open_message(**changes: Any) -> OpenMessage:
    """Return the open message of a run on one CPU device, with these fields changed."""
    required_fields: dict[str, Any] = {
        "token": TOKEN,
        "mark": "m" * 16,
        "accelerator": "cpu",
        "devices": 1,
        "matmul": "fp32",
    }
    optional_fields: dict[str, Any] = {
        "interface": None,
        "peer": None,
        "environment": {},
        "variables": {},
        "needs": [],
        "paths": [],
    }
    return OpenMessage(**(required_fields | optional_fields | changes))


@pytest.fixture
def agent(shell: Shell) -> Iterator[Agent]:
    """Start a node agent, and kill it and all its processes after the test."""
    started_agent = Agent(shell)
    yield started_agent
    started_agent.process.kill()
    started_agent.process.wait()
    shell.clean()


def test_hello_reports_devices_paths_and_modules(agent: Agent) -> None:
    hello = agent.open(
        paths=[["/no/such/file", "/"], ["/no/such/file"]], needs=["pydantic", "no_such_module"]
    )
    assert (hello["accelerator"], hello["divisible"], len(hello["devices"])) == ("cpu", True, 1)
    assert (hello["missing"], hello["lacking"]) == ([1], ["no_such_module"])
    assert (hello["interface"], hello["address"], hello["port"]) == ("lo", None, None)
    assert hello["devices"][0]["free_bytes"] > 0
    assert hello["problem"] is None


def test_hello_identifies_the_engine_if_asked(shell: Shell, agent: Agent) -> None:
    """The identity is that of the workers' Python, with the variables of the run."""
    assert agent.open()["engine_identity"] is None
    asked = Agent(shell)
    try:
        identity = asked.open(engine_modules=["no_such_module"])["engine_identity"]
        assert identity["problem"] is None
        assert len(identity["hash"]) == 16
        assert identity["files"] > 1000
    finally:
        asked.process.kill()
        asked.process.wait()


def test_with_a_peer_the_agent_listens_only_on_the_named_interface(agent: Agent) -> None:
    hello = agent.open(peer="localhost", interface="lo")
    (port,) = [
        connection
        for connection in psutil.Process(agent.process.pid).net_connections()
        if connection.status == "LISTEN"
    ]
    assert (
        (port.laddr.ip, port.laddr.port)
        == (hello["address"], hello["port"])
        == ("127.0.0.1", hello["port"])
    )


def test_unknown_interface_is_reported(agent: Agent) -> None:
    assert agent.open(peer="localhost", interface="ib7")["problem"].startswith(
        "no interface 'ib7'; there are: lo"
    )


def test_interface_of_the_route_is_chosen(agent: Agent) -> None:
    assert agent.open(peer="127.0.0.1")["interface"] == "lo"


def test_pings_are_answered_with_the_clock(agent: Agent) -> None:
    agent.open()
    agent.send(PingMessage(token=TOKEN, sent_s=4.5))
    assert agent.hear("pong")["sent_s"] == 4.5


@pytest.mark.parametrize(
    "line,why",
    [
        (messages.encode_message(PingMessage(token="d" * 32, sent_s=0.0)), b"the token is wrong"),
        (b"start everything\n", b"not JSON"),
        (
            messages.encode_message(StartMessage(token=TOKEN, run={}, world=1)).replace(
                TOKEN.encode(), b""
            ),
            b"token",
        ),
        (messages.encode_message(make_open_message()), b"unexpected message open"),
    ],
)
def test_message_without_the_runs_token_ends_the_agent(
    agent: Agent, line: bytes, why: bytes
) -> None:
    """Only the parent knows the token; whoever writes into the pipe without it is not the
    parent.
    """
    agent.open()
    agent.send(line)
    _, err = agent.process.communicate(timeout=300)
    assert agent.process.returncode == 2
    assert why in err


def test_start_before_open_is_refused(agent: Agent) -> None:
    agent.send(StartMessage(token=TOKEN, run={}, world=1))
    _, err = agent.process.communicate(timeout=300)
    assert (agent.process.returncode, b"unexpected message start" in err) == (2, True)


def test_agent_ends_when_the_parent_is_silent(agent: Agent) -> None:
    agent.open(silence_s=0.5)
    bye = agent.hear("bye")
    assert bye["failure"] == make_failure(
        "parent_silent", golden("nothing-was-heard-of-the-parent")
    )
    assert agent.process.wait(300) == 0


@pytest.mark.full
def test_agent_ends_even_if_the_parent_reads_nothing(agent: Agent) -> None:
    """A pipe holds 64 KiB and each of the 5000 answers more than 80 bytes, so the agent cannot
    write all of them.
    """
    agent.open(silence_s=0.5)
    agent.send(messages.encode_message(PingMessage(token=TOKEN, sent_s=0.0)) * 5000)
    assert agent.process.wait(300) == 0


def test_agent_ends_when_the_parents_pipe_closes(agent: Agent) -> None:
    agent.open()
    assert agent.process.stdin is not None
    agent.process.stdin.close()
    assert agent.hear("bye")["failure"]["code"] == "parent_gone"
    assert agent.process.wait(300) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_agent_reports_the_signal_that_ended_it(agent: Agent, number: int) -> None:
    agent.open()
    agent.process.send_signal(number)
    bye = agent.hear("bye")
    assert bye["failure"] == make_failure(
        "agent_ended", f"the agent was ended by {signal.Signals(number).name}"
    )


def test_stop_before_start_ends_the_agent(agent: Agent) -> None:
    agent.open()
    agent.send(StopMessage(token=TOKEN))
    # without a bye the parent would take the agent for lost
    assert (agent.hear("bye")["failure"], agent.process.wait(300)) == (None, 0)


@pytest.mark.parametrize("number,code", [("ENOSPC", "disk_full"), ("EACCES", "not_started")])
def test_failure_to_start_ranks_is_reported(shell: Shell, number: str, code: str) -> None:
    """The folder of a run is the first thing that the agent writes to disk."""
    program = f"""
import errno, os, tempfile
def fail(*arguments, **options):
    raise OSError(errno.{number}, os.strerror(errno.{number}))
tempfile.mkdtemp = fail
"""
    (shell.folder / "sitecustomize.py").write_text(program)
    agent = Agent(Shell(shell.folder, (shell.folder,)))
    agent.open()
    agent.send(StartMessage(token=TOKEN, run={}, world=1))
    bye = agent.hear("bye")
    assert bye["failure"]["code"] == code
    assert bye["failure"]["text"].startswith("the ranks could not be started: ")
    assert agent.process.wait(300) == 0


def test_invalid_run_spec_ends_the_worker_but_not_the_agent(agent: Agent) -> None:
    agent.open()
    agent.send(StartMessage(token=TOKEN, run={"case": 1}, world=1))
    assert agent.hear("exit")["code"] == 1
    bye = agent.hear("bye")
    assert bye["exits"] == {"0": 1}
    assert "ValidationError" in bye["stderr_tails"]["0"]


def test_sweep_ends_processes_with_the_runs_mark(agent: Agent, shell: Shell) -> None:
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
        for process in (ours, other):
            process.kill()
            process.wait()


def test_sweep_ends_a_suspended_agent(agent: Agent, shell: Shell) -> None:
    """Over ssh nobody else would end it: the agent is no child of the parent there, and its
    environment does not hold the mark.
    """
    suspended_agent = Agent(shell)
    suspended_agent.open(mark="m" * 16)
    suspended_agent.process.send_signal(signal.SIGSTOP)
    agent.send(SweepMessage(token=TOKEN, mark="m" * 16, environment={}))
    assert agent.hear("bye")["ended"] == 1
    assert suspended_agent.process.wait(300) == 0


def test_output_of_plug_ins_is_not_taken_for_a_message(shell: Shell) -> None:
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
    deadline_s = time.monotonic() + 300
    try:
        while agents[-1].open()["devices"][0]["busy"] is not None and time.monotonic() < deadline_s:
            agents.append(Agent(shell))  # another test had claimed it
        agents.append(Agent(shell))
        busy = agents[-1].open()["devices"][0]["busy"]
        assert busy is not None
        assert busy.startswith("another run, of process ")
    finally:
        for started_agent in agents:
            started_agent.process.kill()
            started_agent.process.wait()


@pytest.mark.parametrize(
    "environment,told",
    [
        ({}, {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}),
        ({"NCCL_SOCKET_IFNAME": "ib"}, {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "ib"}),
    ],
)
def test_workers_use_one_network_interface(
    environment: dict[str, str], told: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL matches interfaces by prefix unless the name begins with `=`; a value from the site file
    is left as it is.
    """
    monkeypatch.setattr(os, "environ", {})
    variables = Host(make_open_message(environment=environment)).make_worker_environment()
    assert {name: value for name, value in variables.items() if name.endswith("_IFNAME")} == told


class RecordingSender:
    """A message sender that stores the messages instead of writing them."""

    is_connected = True

    def __init__(self) -> None:
        self.messages: list[Any] = []

    def send(self, message: Any) -> None:
        self.messages.append(message)

    def flush(self, within_s: float) -> None:
        pass


class RanksWithoutMemory:
    """A stand-in for the ranks of a node that raises MemoryError when news are read."""

    is_over, cleaned = False, False

    def read_news(self) -> list[Any]:
        raise MemoryError

    def finish(self, failure: Failure | None, with_stacks: bool) -> Iterator[ByeMessage]:
        yield ByeMessage(token=TOKEN, exits={}, stderr_tails={}, ended=1, failure=failure)
        self.cleaned = True


def make_agent_in_process(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, RecordingSender]:
    """Return an agent in this process, which has received no message yet, and the sender that
    stores its messages.
    """
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    sender = RecordingSender()
    node_agent: Any = node.NodeAgent(SimpleQueue(), sender)  # type: ignore[arg-type]
    node_agent._token = TOKEN
    return node_agent, sender


AGENT_OUT_OF_MEMORY = Failure(
    "out_of_memory", "the agent ran out of memory; free memory, or raise its limit (ulimit -v)"
)


def test_agent_out_of_memory_ends_its_ranks_and_reports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    node_agent, sender = make_agent_in_process(monkeypatch)
    node_agent._ranks = ranks = RanksWithoutMemory()
    node_agent.run()
    (bye,) = [message for message in sender.messages if isinstance(message, ByeMessage)]
    assert (bye.failure, bye.ended, ranks.cleaned) == (AGENT_OUT_OF_MEMORY, 1, True)


def test_agent_out_of_memory_before_hello_reports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_memory_error(_: OpenMessage) -> Host:
        raise MemoryError

    node_agent, sender = make_agent_in_process(monkeypatch)
    node_agent._token = None
    monkeypatch.setattr(node, "Host", raise_memory_error)
    node_agent._lines.put(messages.encode_message(make_open_message()))
    node_agent.run()
    assert [message.failure for message in sender.messages] == [AGENT_OUT_OF_MEMORY]


@pytest.mark.parametrize("error", [MemoryError(), OSError(12, "Cannot allocate memory")])
def test_start_error_for_lack_of_memory_is_out_of_memory(error: MemoryError | OSError) -> None:
    assert node._explain_start_error(error) == Failure(
        "out_of_memory", golden("the-ranks-could-not-be-started")
    )


@pytest.mark.process
def test_deleted_working_directory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a deleted folder, libraries of torch would end a worker without an error message."""
    deleted_folder = tmp_path / "gone"
    deleted_folder.mkdir()
    monkeypatch.chdir(deleted_folder)
    deleted_folder.rmdir()
    expected = "the working directory no longer exists; change to one that does (cd), and run again"
    with pytest.raises(RequestError) as caught:
        processes.check_process_control()
    assert str(caught.value) == expected
    assert Host(make_open_message()).make_hello().problem == expected
