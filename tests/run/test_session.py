"""Tests of how the parent judges hosts that end or stay silent, without any process."""

from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, cast

import pytest

from steelyard.run import launch, session
from steelyard.run.clock import now
from steelyard.run.failure import Failure
from steelyard.run.messages import StartMessage
from steelyard.run.session import Session
from steelyard.run.site import Site


def make_session(*connections: Any) -> Session:
    """Return a session of the local launcher with these connections."""
    new_session = Session(launch.get_launcher("local"), Site(), 1)
    new_session.connections = list(connections)
    return new_session


def make_closed_connection(last_words: str, code: int = 1) -> Any:
    """Return a connection that closed without a bye; `last_words` is the agent's last output."""
    return SimpleNamespace(
        name="localhost",
        bye=None,
        disconnected=True,
        wait_for_exit_code=lambda: code,
        read_output=lambda: last_words,
    )


@pytest.mark.parametrize(
    "said,code,text",
    [
        (
            "Traceback (most recent call last):\nMemoryError",
            "out_of_memory",
            (
                "host localhost: its agent ran out of memory (exit code 1): MemoryError; free"
                " memory, or raise its limit (ulimit -v)"
            ),
        ),
        (
            "Killed",
            "agent_killed",
            "host localhost: its agent ended without a message (exit code 1): Killed",
        ),
    ],
)
def test_agent_that_ended_without_a_message_is_reported(said: str, code: str, text: str) -> None:
    failure = make_session(make_closed_connection(said))._find_lost_host()
    assert failure is not None
    assert (failure.code, failure.text) == (code, text)


@pytest.mark.parametrize("seconds,told", [(0.25, "0.25"), (12.0, "12"), (1_800_000.5, "1800000.5")])
def test_hang_and_time_limit_errors_give_the_requested_seconds(seconds: float, told: str) -> None:
    new_session = make_session()
    new_session._progress_s = now() - 2 * seconds
    hang = new_session._find_timeout(now(), seconds, None)
    assert hang is not None
    assert hang.text == f"no progress from the workers for {told} s, in phase 'start'"
    timeout = new_session._find_timeout(now() - 2 * seconds, 10 * seconds, seconds)
    assert timeout is not None
    assert timeout.text == f"the run took longer than its limit of {told} s, in phase 'start'"


def test_on_several_hosts_a_rank_is_named_with_its_host() -> None:
    two_hosts = Session(launch.get_launcher("ssh"), Site(hosts=["north", "south"]), 2)
    assert [two_hosts._format_rank(rank, 2) for rank in (1, 3)] == [
        "rank 1 on north",
        "rank 3 on south",
    ]
    assert make_session()._format_rank(1, 2) == "rank 1"


def test_ctrl_c_is_a_failure_once_there_is_a_run_to_record() -> None:
    def raise_interrupt() -> StartMessage:
        raise KeyboardInterrupt

    with ExitStack() as undisturbed, pytest.raises(KeyboardInterrupt):
        make_session().run_to_end(raise_interrupt, 0.0, 1.0, None, None, undisturbed)
    with ExitStack() as undisturbed:
        failure = make_session().run_to_end(
            raise_interrupt, 0.0, 1.0, None, None, undisturbed, has_begun=lambda: True
        )
    assert failure == Failure("interrupted", "interrupted by the user")


def test_a_host_that_cannot_be_cleaned_up_for_lack_of_threads_is_skipped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail_to_start(*arguments: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(session, "Connection", fail_to_start)
    lost = SimpleNamespace(name="localhost", mark="mark-0")
    make_session()._sweep_lost_hosts([cast(Any, lost)])
