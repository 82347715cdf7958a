"""The rehearsal of `steelyard conform`: a worker computes other rows first, with another engine
object.
"""

from types import SimpleNamespace
from typing import Any

import pytest

from steelyard.engine.work import Phase, Work
from steelyard.plan.degrees import RankPosition
from steelyard.record.record import Scope
from steelyard.run.measure import Budget
from steelyard.run.worker import Worker


class LoggedEngine:
    """Adds what it is asked for to `log`."""

    def __init__(self, rows: Any, log: list[str]) -> None:
        self.rows, self.log = rows, log

    def prepare(self, name: str, part: Any) -> None:
        with part(f"warmup_{name}"):
            self.log.append(f"prepare {name} {self.rows}")

    def work(self, name: str) -> Any:
        self.log.append(f"work {name}")
        yield Phase("compute")
        yield Work({})
        self.log.append(f"end {name}")

    def outputs(self, name: str) -> dict[str, Any]:
        self.log.append(f"outputs {name}")
        return {}


@pytest.mark.parametrize("tp", [0, 1])
def test_rehearsal_runs_the_passes_in_reverse_over_its_own_rows(
    tp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers are asked for as in a pass, only of the first rank of a replica; nothing is kept."""
    log: list[str] = []
    worker = object.__new__(Worker)
    worker.budget = Budget(lambda: 0.0)
    worker.spec = SimpleNamespace(passes=("infer", "val"), rehearsed_rows=("2-3",))  # type: ignore[assignment]
    worker.place = RankPosition(tp=tp, pp=0, dp=0)
    framework: Any = SimpleNamespace(synchronize=lambda: log.append("synchronize"))

    def prepare_data(scope: Scope) -> SimpleNamespace:
        return SimpleNamespace(inputs=scope.rows)

    monkeypatch.setattr(worker, "write_progress", lambda phase, done, total: None)
    monkeypatch.setattr(worker, "_prepare_data", prepare_data)
    monkeypatch.setattr(worker, "_make_job", lambda inputs, *rest: inputs)
    worker._rehearse(lambda job: LoggedEngine(job, log), framework, None)
    assert log == [
        entry
        for name in ("val", "infer")
        for entry in (
            f"prepare {name} ('2-3',)",
            f"work {name}",
            f"end {name}",
            "synchronize",
            *([] if tp else [f"outputs {name}"]),
        )
    ]
    assert "rehearsal" in worker.budget.parts()
