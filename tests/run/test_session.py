"""Tests of how the parent judges hosts that end or stay silent, without any process."""

from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from steelyard.run import launch
from steelyard.run.clock import now
from steelyard.run.failure import Failure
from steelyard.run.messages import StartMessage
from steelyard.run.session import Session
from steelyard.run.site import Site


def session(*connections: Any) -> Session:
    """Return a session of the local launcher with these connections."""
    made = Session(launch.get_launcher("local"), Site(), 1)
    made.connections = list(connections)
    return made


def ended(said: str, code: int = 1) -> Any:
    """Return a connection that closed without a bye; `last_words` is the agent's last output."""
    return SimpleNamespace(
        name="localhost",
        bye=None,
        disconnected=True,
        wait_for_exit_code=lambda: code,
        read_output=lambda: said,
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
            "host localhost: its agent ended without a word (exit code 1): Killed",
        ),
    ],
)
def test_an_agent_that_ended_without_a_word(said: str, code: str, text: str) -> None:
    found = session(ended(said))._find_lost_host()
    assert found is not None
    assert (found.code, found.text) == (code, text)


@pytest.mark.parametrize("seconds,told", [(0.25, "0.25"), (12.0, "12"), (1_800_000.5, "1800000.5")])
def test_a_hang_and_a_limit_say_the_seconds_that_were_asked(seconds: float, told: str) -> None:
    made = session()
    made._progress_s = now() - 2 * seconds
    hang = made._find_timeout(now(), seconds, None)
    assert hang is not None
    assert hang.text == f"nothing was heard of the workers for {told} s, in phase 'start'"
    late = made._find_timeout(now() - 2 * seconds, 10 * seconds, seconds)
    assert late is not None
    assert late.text == f"the run took longer than its limit of {told} s, in phase 'start'"


def test_on_several_hosts_a_rank_is_named_with_its_host() -> None:
    made = Session(launch.get_launcher("ssh"), Site(hosts=["north", "south"]), 2)
    assert [made._format_rank(rank, 2) for rank in (1, 3)] == ["rank 1 on north", "rank 3 on south"]
    assert session()._format_rank(1, 2) == "rank 1"


def test_ctrl_c_is_a_failure_once_there_is_a_run_to_record() -> None:
    def interrupted() -> StartMessage:
        raise KeyboardInterrupt

    with ExitStack() as undisturbed, pytest.raises(KeyboardInterrupt):
        session().run_to_end(interrupted, 0.0, 1.0, None, None, undisturbed)
    with ExitStack() as undisturbed:
        found = session().run_to_end(
            interrupted, 0.0, 1.0, None, None, undisturbed, has_begun=lambda: True
        )
    assert found == Failure("interrupted", "interrupted by the user")
