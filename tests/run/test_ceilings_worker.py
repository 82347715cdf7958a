"""Tests of how a ceiling is measured, with a fake clock: how often a row is called, when it ends,
and which rows have no rate.
"""

from collections.abc import Callable

import pytest

from fixtures.specs import make_spec_record
from steelyard.accelerators.events import HostEvent
from steelyard.engine.ceiling_rows import CallBudget, CeilingRow, PreparedCeiling, UnavailableError
from steelyard.errors import RequestError
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


class FakeClock:
    """A clock that moves only when a test sets `now`, in seconds."""

    def __init__(self) -> None:
        self.now = 1024.0

    def __call__(self) -> float:
        return self.now


class FakeDevice:
    """A fake device on which each call of `work` takes the next of the given times in seconds; the
    last one repeats for ever.
    """

    def __init__(self, *times_s: float) -> None:
        self.clock, self.call_times_s, self.calls = FakeClock(), list(times_s), 0

    def event(self) -> HostEvent:
        return HostEvent(self.clock)

    def synchronize(self) -> None: ...

    def work(self) -> None:
        self.clock.now += self.call_times_s[min(self.calls, len(self.call_times_s) - 1)]
        self.calls += 1


def hold_work(device: FakeDevice, limits: BenchLimits = LIMITS) -> list[TimedCalls]:
    """Measure one unit of work on the device until it settles, and return its stretches."""
    return time_until_settled(
        PreparedCeiling(device.work, 1.0), device, limits, device.clock, 1000.0
    )


def test_calls_fill_stretches_of_the_requested_length():
    """One warmup call and one call to learn its time, 0.5 s, so that four calls fill a stretch of 2
    s. Three stretches agree at once.
    """
    device = FakeDevice(5.0, 0.5)
    assert hold_work(device) == [
        TimedCalls(start_s=29.5 + 2 * i, time_s=2.0, calls=4) for i in range(3)
    ]
    assert device.calls == 2 + 12


def test_measurement_goes_on_until_the_last_stretches_agree():
    device = FakeDevice(1.0, 2.0, 4.0, 3.0, 2.5, 2.0, 2.0, 2.0)
    assert [stretch.time_s for stretch in hold_work(device)] == [4.0, 3.0, 2.5, 2.0, 2.0, 2.0]


def test_measurement_ends_at_its_time_limit():
    """Every other call takes twice as long, so the stretches never agree. The limit of 64 s is over
    after 22 stretches of 2 and 4 s.
    """
    device = FakeDevice(2.0, 2.0, *[2.0, 4.0] * 50)
    times = [stretch.time_s for stretch in hold_work(device)]
    assert times == [2.0, 4.0] * 11
    assert not ceiling_rates.select_settled_stretches(
        [TimedCalls(start_s=0, time_s=t, calls=1) for t in times], LIMITS
    )[0]


def test_call_too_short_for_the_clock_makes_stretches_of_one_call():
    assert [
        (stretch.time_s, stretch.calls)
        for stretch in hold_work(FakeDevice(0.0), LIMITS.model_copy(update={"limit_s": 0.0}))
    ] == [(0.0, 1)] * 3


def make_row(make: Callable[[CallBudget], PreparedCeiling], **changes) -> CeilingRow:
    """Return a row of the square bf16 matmul with the given fields changed."""
    fields = {
        "group": "matmul",
        "name": "square",
        "precision": "bf16",
        "unit": "FLOP/s",
        "prepare": make,
    }
    return CeilingRow(**{**fields, **changes})


def make_holder(device: FakeDevice, limits: BenchLimits = LIMITS, **options) -> CeilingBenchmarker:
    """Return a holder that measures rows on the fake device as rank 0."""
    return CeilingBenchmarker(device, 0, limits, device.clock, 1000.0, **options)


def derive_value(bench: BenchTimings) -> tuple[float | None, Message | str | None]:
    """Return the rate and the note that a record derives from one measured row."""
    ceiling = ceiling_rates.derive_ceilings(make_spec_record(bench, limits=LIMITS))[0]
    return ceiling.value, ceiling.note


def test_correct_kernel_gets_a_rate():
    device = FakeDevice(2.0)
    bench = make_holder(device).run_row(
        make_row(lambda budget: PreparedCeiling(device.work, 64.0, lambda: (0.001, 0.04), {"m": 4}))
    )
    assert (bench.amount, bench.detail, bench.checked.error, bench.reason) == (
        64.0,
        {"m": 4},
        0.001,
        None,
    )
    assert derive_value(bench) == (32.0, None)


@pytest.mark.parametrize("error", [0.05, float("nan"), float("inf")])
def test_wrong_kernel_gets_no_rate_and_is_not_timed(error: float):
    device = FakeDevice(2.0)
    bench = make_holder(device).run_row(
        make_row(lambda budget: PreparedCeiling(device.work, 64.0, lambda: (error, 0.04)))
    )
    assert (device.calls, bench.stretches, derive_value(bench)[0]) == (0, [], None)
    note = derive_value(bench)[1]
    assert isinstance(note, Message)
    assert render_text(note).startswith("its result is")


def test_row_that_cannot_run_names_the_reason():
    device = FakeDevice(2.0)

    def lacking(budget: CallBudget) -> PreparedCeiling:
        raise UnavailableError("no such unit")

    def broken(budget: CallBudget) -> PreparedCeiling:
        raise NotImplementedError("no kernel for it\nand a list of all there are")

    def refused(budget: CallBudget) -> PreparedCeiling:
        raise RequestError("this kernel needs another device")

    def get_reason(row: CeilingRow) -> tuple[Message | str | None, str | None]:
        bench = make_holder(device).run_row(row)
        return bench.reason, bench.error_text

    failed = Message("ceiling.failed")
    assert get_reason(make_row(lacking)) == ("no such unit", None)
    assert get_reason(make_row(refused)) == (
        Message("ceiling.refused"),
        "this kernel needs another device",
    )
    assert get_reason(make_row(broken)) == (failed, "NotImplementedError: no kernel for it")
    assert get_reason(make_row(lambda budget: PreparedCeiling(lambda: 1 / 0, 1.0))) == (
        failed,
        "ZeroDivisionError: division by zero",
    )
    known_before = make_row(lacking, unavailable="known before" + "!" * 400)
    assert get_reason(known_before) == ("known before" + "!" * 288, None)


def test_framework_words_the_exception_of_a_row():
    """The reason is what the framework makes of exception and precision; paths and addresses of the
    exception are stored nowhere.
    """

    def explain(error: Exception, precision: str | None) -> Message:
        assert isinstance(error, ValueError)
        return Message("ceiling.unsupported_precision", {"framework": "x", "precision": precision})

    def broken(budget: CallBudget) -> PreparedCeiling:
        raise ValueError("no way at /opt/lib/x.so (0x7f00)\nTraceback")

    bench = make_holder(FakeDevice(2.0), explain_error=explain).run_row(make_row(broken))
    assert bench.reason == Message(
        "ceiling.unsupported_precision", {"framework": "x", "precision": "bf16"}
    )
    assert bench.error_text == "ValueError: no way at … (…)"
    again = BenchTimings.model_validate_json(bench.model_dump_json())
    assert (again.reason, again.error_text) == (bench.reason, bench.error_text)
    assert derive_value(bench) == (None, bench.reason)


def test_budget_is_estimated_from_rates_of_similar_rows():
    """At 32 FLOP/s a call of a fifth of 64 s may have 409.6 FLOPs. The first attention row is
    expected at a tenth of the matmul rate.
    """
    device, budgets = FakeDevice(2.0), []

    def make(budget: CallBudget) -> PreparedCeiling:
        budgets.append(budget)
        return PreparedCeiling(device.work, 64.0)

    holder_of_rows = make_holder(device)
    for changes in (
        {},
        {},
        {"precision": "fp32"},
        {"group": "attention", "kind": "flash"},
        {"group": "memory", "unit": "B/s"},
    ):
        holder_of_rows.run_row(make_row(make, **changes))
    assert [budget.rate for budget in budgets] == [None, 32.0, None, 3.2, None]
    assert (budgets[1].call_s, budgets[1].max_amount, budgets[0].max_amount) == (
        CALL_SHARE * 64.0,
        CALL_SHARE * 64.0 * 32.0,
        None,
    )


def test_rows_after_the_total_time_limit_are_not_tried():
    device = FakeDevice(600.0)
    holder_of_rows = make_holder(device)
    holder_of_rows.run_row(make_row(lambda budget: PreparedCeiling(device.work, 64.0)))
    calls = device.calls
    assert (
        holder_of_rows.run_row(make_row(lambda budget: PreparedCeiling(device.work, 64.0))).reason
    ) == Message("ceiling.no_time", {"total_s": 1000.0})
    assert device.calls == calls


def test_ranks_of_a_collective_row_make_equal_decisions():
    """Another rank measures a slower call and needs one more stretch than this rank; both then run
    the same number of stretches and calls.
    """
    device, votes = FakeDevice(0.5), []
    # what the other rank votes: not late, not failed, not wrong, 1 s a call, three times to go on,
    # once to end
    others = iter((0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0))

    def agree(mine: float) -> float:
        votes.append(mine)
        return max(mine, next(others))

    workload = PreparedCeiling(device.work, 64.0, lambda: (0.0, 0.0))
    bench = make_holder(device, max_over_ranks=agree).run_row(
        make_row(lambda budget: workload, all_ranks=True)
    )
    assert [stretch.calls for stretch in bench.stretches] == [2, 2, 2, 2]
    assert votes == [0.0, 0.0, 0.0, 0.5, 1.0, 1.0, 0.0, 0.0]


def test_row_that_is_wrong_on_another_rank_is_wrong():
    device = FakeDevice(0.5)
    others = iter((0.0, 0.0, 1.0))
    workload = PreparedCeiling(device.work, 64.0, lambda: (0.0, 0.0))
    bench = make_holder(device, max_over_ranks=lambda vote: max(vote, next(others))).run_row(
        make_row(lambda budget: workload, all_ranks=True)
    )
    assert (bench.reason, bench.stretches) == (Message("ceiling.wrong_elsewhere"), [])


def test_row_that_another_rank_cannot_run_is_not_called():
    device = FakeDevice(0.5)
    others = iter((0.0, 1.0))
    bench = make_holder(device, max_over_ranks=lambda vote: max(vote, next(others))).run_row(
        make_row(lambda budget: PreparedCeiling(device.work, 1.0), all_ranks=True)
    )
    assert (bench.reason, device.calls) == (Message("ceiling.other_rank"), 0)


def test_default_limits():
    assert (QUICK_LIMITS.total_s, QUICK_LIMITS.last, FULL_LIMITS.last, FULL_LIMITS.within) == (
        12.0,
        5,
        5,
        0.02,
    )
