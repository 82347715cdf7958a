"""Tests of how a ceiling is measured, with a fake clock: how often a row is called, when it ends,
and which rows have no rate.
"""

from collections.abc import Callable

import pytest

from fixtures.specs import record
from steelyard.accelerators.events import HostEvent
from steelyard.engine.ceiling_rows import CallBudget, CeilingRow, PreparedCeiling, UnavailableError
from steelyard.metrics import ceiling_rates
from steelyard.record.ceilings_record import BenchLimits, BenchTimings, TimedCalls
from steelyard.run.ceilings_worker import (
    CALL_SHARE,
    FULL_LIMITS,
    QUICK_LIMITS,
    CeilingBenchmarker,
    time_until_settled,
)
from steelyard.words import Message, render_text

LIMITS = BenchLimits(stretch_s=2.0, limit_s=64.0, total_s=1000.0, within=0.01, last=3)


class Clock:
    """A clock that moves only when a test sets `now`, in seconds."""

    def __init__(self) -> None:
        self.now = 1024.0

    def __call__(self) -> float:
        return self.now


class Device:
    """A fake device on which each call of `work` takes the next of the given times in seconds; the
    last one repeats for ever.
    """

    def __init__(self, *times_s: float) -> None:
        self.clock, self.times, self.calls = Clock(), list(times_s), 0

    def event(self) -> HostEvent:
        return HostEvent(self.clock)

    def synchronize(self) -> None: ...

    def work(self) -> None:
        self.clock.now += self.times[min(self.calls, len(self.times) - 1)]
        self.calls += 1


def held(device: Device, limits: BenchLimits = LIMITS) -> list[TimedCalls]:
    """Measure one unit of work on the device until it settles, and return its stretches."""
    return time_until_settled(
        PreparedCeiling(device.work, 1.0), device, limits, device.clock, 1000.0
    )


def test_stretches_are_as_long_as_asked():
    """One warmup call and one call to learn its time, 0.5 s, so that four calls fill a stretch of 2
    s. Three stretches agree at once.
    """
    device = Device(5.0, 0.5)
    assert held(device) == [TimedCalls(start_s=29.5 + 2 * i, time_s=2.0, calls=4) for i in range(3)]
    assert device.calls == 2 + 12


def test_it_is_held_until_the_last_agree():
    device = Device(1.0, 2.0, 4.0, 3.0, 2.5, 2.0, 2.0, 2.0)
    assert [one.time_s for one in held(device)] == [4.0, 3.0, 2.5, 2.0, 2.0, 2.0]


def test_it_ends_when_its_time_is_over():
    """Every other call takes twice as long, so the stretches never agree. The limit of 64 s is over
    after 22 stretches of 2 and 4 s.
    """
    device = Device(2.0, 2.0, *[2.0, 4.0] * 50)
    times = [one.time_s for one in held(device)]
    assert times == [2.0, 4.0] * 11
    assert not ceiling_rates.select_settled_stretches(
        [TimedCalls(start_s=0, time_s=t, calls=1) for t in times], LIMITS
    )[0]


def test_a_call_too_short_for_the_clock_is_called_once():
    assert [
        (one.time_s, one.calls)
        for one in held(Device(0.0), LIMITS.model_copy(update={"limit_s": 0.0}))
    ] == [(0.0, 1)] * 3


def row(make: Callable[[CallBudget], PreparedCeiling], **over) -> CeilingRow:
    """Return a row of the square bf16 matmul with the given fields changed."""
    told = {
        "group": "matmul",
        "name": "square",
        "precision": "bf16",
        "unit": "FLOP/s",
        "prepare": make,
    }
    return CeilingRow(**{**told, **over})


def holder(device: Device, limits: BenchLimits = LIMITS, **over) -> CeilingBenchmarker:
    """Return a holder that measures rows on the fake device as rank 0."""
    return CeilingBenchmarker(device, 0, limits, device.clock, 1000.0, **over)


def value(bench: BenchTimings) -> tuple[float | None, Message | str | None]:
    """Return the rate and the note that a record derives from one measured row."""
    found = ceiling_rates.derive_ceilings(record(bench, limits=LIMITS))[0]
    return found.value, found.note


def test_a_right_kernel_has_its_rate():
    device = Device(2.0)
    bench = holder(device).run_row(
        row(lambda budget: PreparedCeiling(device.work, 64.0, lambda: (0.001, 0.04), {"m": 4}))
    )
    assert (bench.amount, bench.detail, bench.checked.error, bench.reason) == (
        64.0,
        {"m": 4},
        0.001,
        None,
    )
    assert value(bench) == (32.0, None)


@pytest.mark.parametrize("error", [0.05, float("nan"), float("inf")])
def test_a_wrong_kernel_has_none_and_is_not_timed(error: float):
    device = Device(2.0)
    bench = holder(device).run_row(
        row(lambda budget: PreparedCeiling(device.work, 64.0, lambda: (error, 0.04)))
    )
    assert (device.calls, bench.stretches, value(bench)[0]) == (0, [], None)
    note = value(bench)[1]
    assert isinstance(note, Message)
    assert render_text(note).startswith("its result is")


def test_what_a_device_lacks_says_why():
    device = Device(2.0)

    def lacking(budget: CallBudget) -> PreparedCeiling:
        raise UnavailableError("no such unit")

    def broken(budget: CallBudget) -> PreparedCeiling:
        raise NotImplementedError("no kernel for it\nand a list of all there are")

    take = holder(device).run_row
    assert take(row(lacking)).reason == "no such unit"
    assert take(row(broken)).reason == "NotImplementedError: no kernel for it"
    assert (
        take(row(lambda budget: PreparedCeiling(lambda: 1 / 0, 1.0))).reason
        == "ZeroDivisionError: division by zero"
    )
    assert take(row(lacking, unavailable="known before")).reason == "known before"


def test_a_row_knows_how_fast_others_like_it_were():
    """At 32 FLOP/s a call of a fifth of 64 s may have 409.6 FLOPs. The first attention row is
    expected at a tenth of the matmul rate.
    """
    device, seen = Device(2.0), []

    def make(budget: CallBudget) -> PreparedCeiling:
        seen.append(budget)
        return PreparedCeiling(device.work, 64.0)

    one = holder(device)
    for over in (
        {},
        {},
        {"precision": "fp32"},
        {"group": "attention", "kind": "flash"},
        {"group": "memory", "unit": "B/s"},
    ):
        one.run_row(row(make, **over))
    assert [budget.rate for budget in seen] == [None, 32.0, None, 3.2, None]
    assert (seen[1].call_s, seen[1].max_amount, seen[0].max_amount) == (
        CALL_SHARE * 64.0,
        CALL_SHARE * 64.0 * 32.0,
        None,
    )


def test_rows_that_begin_too_late_are_not_tried():
    device = Device(600.0)
    one = holder(device)
    one.run_row(row(lambda budget: PreparedCeiling(device.work, 64.0)))
    calls = device.calls
    assert (
        one.run_row(row(lambda budget: PreparedCeiling(device.work, 64.0))).reason
        == "not tried: 1000 s were over"
    )
    assert device.calls == calls


def test_ranks_that_work_together_agree():
    """Another rank measures a slower call and needs one more stretch than this rank; both then run
    the same number of stretches and calls.
    """
    device, said = Device(0.5), []
    # what the other rank votes: not late, not failed, not wrong, 1 s a call, three times to go on,
    # once to end
    others = iter((0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0))

    def agree(mine: float) -> float:
        said.append(mine)
        return max(mine, next(others))

    made = PreparedCeiling(device.work, 64.0, lambda: (0.0, 0.0))
    bench = holder(device, max_over_ranks=agree).run_row(row(lambda budget: made, all_ranks=True))
    assert [one.calls for one in bench.stretches] == [2, 2, 2, 2]
    assert said == [0.0, 0.0, 0.0, 0.5, 1.0, 1.0, 0.0, 0.0]


def test_what_is_wrong_on_another_rank_is_wrong():
    device = Device(0.5)
    others = iter((0.0, 0.0, 1.0))
    made = PreparedCeiling(device.work, 64.0, lambda: (0.0, 0.0))
    bench = holder(device, max_over_ranks=lambda mine: max(mine, next(others))).run_row(
        row(lambda budget: made, all_ranks=True)
    )
    assert (bench.reason, bench.stretches) == ("its result is wrong on another rank", [])


def test_what_cannot_be_had_on_another_rank_is_not_called():
    device = Device(0.5)
    others = iter((0.0, 1.0))
    bench = holder(device, max_over_ranks=lambda mine: max(mine, next(others))).run_row(
        row(lambda budget: PreparedCeiling(device.work, 1.0), all_ranks=True)
    )
    assert (bench.reason, device.calls) == ("it cannot be had on another rank", 0)


def test_the_limits_that_are_shipped():
    assert (QUICK_LIMITS.total_s, QUICK_LIMITS.last, FULL_LIMITS.last, FULL_LIMITS.within) == (
        12.0,
        5,
        5,
        0.02,
    )
