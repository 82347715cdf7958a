"""What the parent makes of hosts that end or fall silent, without any process."""

from types import SimpleNamespace
from typing import Any

import pytest

from steelyard.run import launch
from steelyard.run.clock import now
from steelyard.run.session import Session
from steelyard.run.site import Site


def session(*connections: Any) -> Session:
    made = Session(launch.named("local"), Site(), 1)
    made.connections = list(connections)
    return made


def ended(said: str, code: int = 1) -> Any:
    """A connection that closed without a last message."""
    return SimpleNamespace(name="localhost", bye=None, closed=True, exit_code=lambda: code, said=lambda: said)


@pytest.mark.parametrize(
    "said,code,text",
    [
        (
            "Traceback (most recent call last):\nMemoryError",
            "out_of_memory",
            "host localhost: its agent ran out of memory (exit code 1): MemoryError; free memory, or raise its limit "
            "(ulimit -v)",
        ),
        ("Killed", "agent_killed", "host localhost: its agent ended without a word (exit code 1): Killed"),
    ],
)
def test_an_agent_that_ended_without_a_word(said: str, code: str, text: str) -> None:
    found = session(ended(said))._lost()
    assert found is not None
    assert (found.code, found.text) == (code, text)


@pytest.mark.parametrize("seconds,told", [(0.25, "0.25"), (12.0, "12"), (1_800_000.5, "1800000.5")])
def test_a_hang_and_a_limit_say_the_seconds_that_were_asked(seconds: float, told: str) -> None:
    made = session()
    made._progress_s = now() - 2 * seconds
    hang = made._late(now(), seconds, None)
    assert hang is not None
    assert hang.text == f"nothing was heard of the workers for {told} s, in phase 'start'"
    late = made._late(now() - 2 * seconds, 10 * seconds, seconds)
    assert late is not None
    assert late.text == f"the run took longer than its limit of {told} s, in phase 'start'"
