"""What the records of two engines must agree on."""

from collections.abc import Iterator

import pytest

from steelyard.record.record import Record

RELATIVE_TOLERANCE = 1e-5
STEPS = 10


def training_curve(record: Record, rank: int = 0) -> Iterator[tuple[str, float]]:
    """Yield the loss, gradient norm and learning rate of each step of a rank, then the held-out
    losses, as (name, value).
    """
    for sample in record.samples:
        if sample.pass_name == "train" and sample.rank == rank:
            yield from ((name, sample.values[name]) for name in ("loss", "grad_norm", "lr"))
    yield from ((name, record.metrics[name].value) for name in ("loss_before", "loss_after"))


def assert_same_training(actual: Record, expected: Record) -> None:
    """Assert that a valid record has the same question and training curve as the expected one."""
    assert (actual.status, actual.reasons) == ("valid", [])
    expected_curve, actual_curve = list(training_curve(expected)), list(training_curve(actual))
    assert len(expected_curve) == 3 * STEPS + 2
    assert [name for name, _ in actual_curve] == [name for name, _ in expected_curve]
    for (name, a), (_, b) in zip(expected_curve, actual_curve, strict=True):
        assert b == pytest.approx(a, rel=RELATIVE_TOLERANCE), name
    assert actual.case.key == expected.case.key
    assert actual.drawn == expected.drawn
