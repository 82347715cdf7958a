"""What the records of two engines must agree on."""

from collections.abc import Iterator

import pytest

from steelyard.record.record import Record

APART = 1e-5
STEPS = 10


def curve(record: Record, rank: int = 0) -> Iterator[tuple[str, float]]:
    """Yield the loss, gradient norm and learning rate of each step of a rank, then the held-out
    losses, as (name, value).
    """
    for sample in record.samples:
        if sample.pass_name == "train" and sample.rank == rank:
            yield from ((name, sample.values[name]) for name in ("loss", "grad_norm", "lr"))
    yield from ((name, record.metrics[name].value) for name in ("loss_before", "loss_after"))


def assert_alike(found: Record, wanted: Record) -> None:
    """Assert that a valid record has the same question and training curve as the expected one."""
    assert (found.status, found.reasons) == ("valid", [])
    ours, theirs = list(curve(wanted)), list(curve(found))
    assert len(ours) == 3 * STEPS + 2
    assert [name for name, _ in theirs] == [name for name, _ in ours]
    for (name, a), (_, b) in zip(ours, theirs, strict=True):
        assert b == pytest.approx(a, rel=APART), name
    assert found.case.key == wanted.case.key
    assert found.drawn == wanted.drawn
