"""Tests of the watcher of pipes: which lines came, when it saw them, and how old they can be."""

import os
from collections.abc import Iterator

import pytest

from steelyard.run import pipe_watch
from steelyard.run.messages import EVENTS_VARIABLE, WorkerEvent
from steelyard.run.pipe_watch import PipeWatcher, SeenLine
from steelyard.run.rank_process import EventPipe


class Watched:
    """A watcher with a clock that a test sets, one pipe with the source 7, and a count of wakes."""

    def __init__(self) -> None:
        self.now_s, self.wakes = 0.0, 0
        self.watcher = PipeWatcher(self._wake, lambda: self.now_s)
        reading_end, self.end = os.pipe()
        self.watcher.add(7, reading_end)

    def _wake(self) -> None:
        self.wakes += 1

    def look_at(self, time_s: float) -> list[SeenLine]:
        """Let the watcher look once at this time, and return what it saw."""
        self.now_s = time_s
        self.watcher.look()
        return self.watcher.take()


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    """A watcher that never waits, with one pipe."""
    monkeypatch.setattr(pipe_watch, "LOOK_S", 0.0)
    yield (made := Watched())
    made.watcher.start()
    made.watcher.stop()


def test_a_line_is_at_most_as_old_as_the_last_look_that_found_nothing(watched: Watched) -> None:
    assert watched.look_at(1.0) == []
    assert watched.look_at(2.0) == []
    os.write(watched.end, b"one\ntwo\nthr")
    assert watched.look_at(2.5) == [
        SeenLine(7, b"one", 2.5, 0.5),
        SeenLine(7, b"two", 2.5, 0.5),
    ]
    assert watched.wakes == 1
    os.write(watched.end, b"ee\n")
    assert watched.look_at(2.75) == [SeenLine(7, b"three", 2.75, 0.75)]
    assert watched.look_at(3.0) == []
    os.write(watched.end, b"\n")
    assert watched.look_at(3.25) == [SeenLine(7, b"", 3.25, 0.25)]


def test_a_line_before_the_first_look_is_as_old_as_the_pipe(watched: Watched) -> None:
    os.write(watched.end, b"early\n")
    assert watched.look_at(4.0) == [SeenLine(7, b"early", 4.0, 4.0)]


def test_end_of_a_pipe_is_seen_once(watched: Watched) -> None:
    os.write(watched.end, b"last\nnot ended")
    os.close(watched.end)
    assert watched.look_at(1.0) == [SeenLine(7, b"last", 1.0, 1.0)]
    assert watched.look_at(2.0) == [SeenLine(7, None, 2.0, 2.0)]
    assert watched.look_at(3.0) == []


def test_a_line_without_end_closes_its_pipe(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipe_watch, "MAX_LINE_BYTES", 10)
    os.write(watched.end, b"x" * 11)
    assert watched.look_at(1.0) == [SeenLine(7, None, 1.0, 1.0)]
    with pytest.raises(BrokenPipeError):
        os.write(watched.end, b"more")


BEGIN = WorkerEvent(event="begin", pass_name="val")


def test_worker_writes_events_into_the_pipe_of_its_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reading_end, end = os.pipe()
    os.set_inheritable(end, True)
    monkeypatch.setenv(EVENTS_VARIABLE, str(end))
    pipe = EventPipe()
    assert EVENTS_VARIABLE not in os.environ
    assert not os.get_inheritable(end)
    pipe.send(BEGIN)
    assert WorkerEvent.model_validate_json(os.read(reading_end, 1000)) == BEGIN
    os.close(reading_end)
    pipe.send(BEGIN)  # nobody reads any more
    os.close(end)
    pipe.send(BEGIN)


def test_worker_does_not_write_into_another_file_with_the_pipes_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (reading_end, end), (other_reading_end, other_end) = os.pipe(), os.pipe()
    monkeypatch.setenv(EVENTS_VARIABLE, str(end))
    pipe = EventPipe()
    os.dup2(other_end, end)  # an engine closed the pipe, and opened another
    pipe.send(BEGIN)
    os.set_blocking(other_reading_end, False)
    with pytest.raises(BlockingIOError):
        os.read(other_reading_end, 1000)
    for fd in (reading_end, end, other_reading_end, other_end):
        os.close(fd)


def test_worker_without_a_pipe_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(EVENTS_VARIABLE, raising=False)
    EventPipe().send(BEGIN)
