"""Tests of progress reports: every phase from the first, and how long it has taken."""

from collections.abc import Callable

import pytest

from steelyard.run import session
from steelyard.run.measure import Budget
from steelyard.run.session import PhaseProgress, Session
from steelyard.run.worker import Worker


class RecordingWorker(Worker):
    """A worker that stores its progress reports instead of writing them to a file."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.budget = Budget(clock)
        self.told: list[tuple[str, int, int]] = []

    def write_progress(self, phase: str, done: int, total: int) -> None:
        self.told.append((phase, done, total))


def test_budget_parts_are_reported_as_phases() -> None:
    times = iter([0.0, 1.0, 4.0, 10.0, 16.0, 20.0])
    worker = RecordingWorker(lambda: next(times))
    with worker._time_and_report("weights"):
        worker.write_progress("weights", 3, 9)
    with worker._time_and_report("compile_infer"):
        pass
    assert worker.told == [("weights", 0, 0), ("weights", 3, 9), ("compile infer", 0, 0)]
    assert worker.budget.parts() == {"weights": 3.0, "compile_infer": 6.0, "harness": 11.0}


def test_phase_is_starting_until_a_worker_reports_one(monkeypatch: pytest.MonkeyPatch) -> None:
    reports: list[PhaseProgress] = []
    run_session = object.__new__(Session)
    run_session.progress, run_session._created_s, run_session._progress_callback = (
        None,
        100.0,
        reports.append,
    )
    monkeypatch.setattr(session, "now", lambda: 131.0)
    run_session._show_progress()
    run_session.progress, run_session._phase_s = PhaseProgress("val", 3, 9, 0.0), 125.0
    run_session._show_progress()
    run_session._progress_callback = None
    run_session._show_progress()
    assert reports == [PhaseProgress("starting", 0, 0, 31.0), PhaseProgress("val", 3, 9, 6.0)]
