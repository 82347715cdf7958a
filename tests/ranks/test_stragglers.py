"""A rank that is really slow, in a run of real processes, is named with what it costs."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from fixtures.commands import Shell
from steelyard.metrics import stragglers, verify
from steelyard.words import Message

PACKAGE = Path(__file__).parents[1] / "fixtures" / "packages" / "slow_engine"
RUN = (
    "run",
    "llama1-7b-openwebtext",
    "--size",
    "smoke",
    "--accelerator",
    "cpu",
    "--engine",
    "slowed",
    "--devices",
    "2",
)
SMALL = (
    "--set=question.model.layers=1",
    "--set=question.train.batch=2",
    "--set=question.train.length=16",
)
COST_S, STEP_S = 0.2, 1.2  # slow_engine.py sleeps 1.2 s on rank 1, 1.0 s on rank 0


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """A shell with an engine that sleeps for a different time on each rank."""
    new_shell = Shell(tmp_path, (PACKAGE,))
    yield new_shell
    new_shell.clean()


@pytest.mark.full
def test_a_slow_rank_is_named_with_its_cost(shell: Shell) -> None:
    done = shell(*RUN, *SMALL, "--steps", "6", "--out", shell.out)
    assert done.code == 0, done.err
    [path] = shell.out.iterdir()
    record = verify.read_verified_record(path)
    analysis = stragglers.find_stragglers(record)
    assert isinstance(analysis, stragglers.Stragglers)
    assert (analysis.rank, analysis.basis, analysis.is_slow) == (1, "compute", True)
    assert analysis.cost_s == pytest.approx(COST_S, rel=0.1)
    assert analysis.share == pytest.approx(COST_S / STEP_S, rel=0.1)
    slow, fast = analysis.rows
    assert fast.wait_s is not None
    assert slow.wait_s is not None
    # the fast rank waits as long as the slow one is late
    assert fast.wait_s - slow.wait_s == pytest.approx(COST_S, rel=0.25)
    [note] = [
        message
        for message in record.notes
        if isinstance(message, Message) and message.code == "note.slow"
    ]
    assert note.values["who"] == Message("slow.rank_at", {"rank": 1, "host": "localhost"})
    assert record.metrics["straggler_share"].value == analysis.share
    page = shell("report", shell.out, "--full")
    assert "Stragglers" in page.out
    assert "Slowest: rank 1" in page.out
