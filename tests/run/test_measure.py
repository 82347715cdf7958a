"""Tests of the measured loop with a fake clock, so that every number is exact."""

from collections.abc import Iterator

import pytest

from steelyard.accelerators.events import HostEvent, ReportedEvent
from steelyard.engine.work import Phase, Work
from steelyard.run.measure import Budget, measure, measure_bare, measure_mean_time_s

COUNTS = {"tokens": 0, "samples": 1, "logits": 1, "pairs": 1, "square": 1}


class Clock:
    """A clock that moves only when a test or a fake device sets `now`, in seconds."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Event:
    """A fake device event that holds the time at which the device reaches it, in seconds."""

    def __init__(self, at_s: float) -> None:
        self.at_s = at_s

    def elapsed_s(self, later: "Event") -> float:
        return later.at_s - self.at_s


class Device:
    """A fake asynchronous device: work is queued at once and done later, in order. It counts its
    synchronizations.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.free_at = clock.now
        self.synchronized = 0

    def launch(self, time_s: float) -> None:
        self.free_at = max(self.free_at, self.clock.now) + time_s

    def event(self) -> Event:
        return Event(max(self.free_at, self.clock.now))

    def synchronize(self) -> None:
        self.synchronized += 1
        self.clock.now = max(self.clock.now, self.free_at)


def engine(
    clock: Clock, device: Device, steps: int = 3, hidden_s: float = 0.0
) -> Iterator[Phase | Work]:
    """Yield the phases and work of `steps` steps: the host takes 0.25 s to make inputs, the device
    copies them in 0.5 s and computes for 2 s.

    `hidden_s` seconds of device work follow after the last step.
    """
    for step in range(steps):
        yield Phase("data")
        clock.now += 0.25
        device.launch(0.5)
        yield Phase("compute")
        device.launch(2.0)
        yield Work(COUNTS | {"tokens": 10 + step}, {"loss": 1.5})
    device.launch(hidden_s)


def test_a_pass_is_timed_to_the_end_of_the_device():
    clock = Clock()
    device = Device(clock)
    trace = measure(engine(clock, device), device, clock=clock)
    samples = trace.make_samples("infer")
    assert trace.start_clock_s == 100.0
    # 0.25 s until the first copy, then the device is never idle: three times 0.5 + 2 s.
    assert trace.wall_s == 0.25 + 3 * 2.5
    assert [s.counts["tokens"] for s in samples] == [10, 11, 12]
    assert [s.end_s for s in samples] == [2.75, 5.25, 7.75]
    assert [s.start_s for s in samples] == [0.0, 2.75, 5.25]
    assert [s.phases["compute"] for s in samples] == [2.0, 2.0, 2.0]
    assert [s.phases["data"] for s in samples] == [0.75, 0.5, 0.5]
    assert [s.host_end_s for s in samples] == [0.25, 0.5, 0.75]  # the host ran ahead
    assert [s.values for s in samples] == [{"loss": 1.5}] * 3


def test_the_loop_waits_for_the_device_only_at_the_borders():
    clock = Clock()
    device = Device(clock)
    measure(engine(clock, device, steps=50), device, clock=clock).make_samples("infer")
    assert device.synchronized == 2


def test_work_hidden_behind_the_last_mark_is_in_the_wall_time():
    clock = Clock()
    device = Device(clock)
    trace = measure(engine(clock, device, hidden_s=10.0), device, clock=clock)
    samples = trace.make_samples("infer")
    assert trace.wall_s == 17.75
    assert samples[-1].end_s == 7.75


def test_steps_are_told_as_they_are_queued():
    clock = Clock()
    device = Device(clock)
    told: list[int] = []
    measure(engine(clock, device), device, clock=clock, step_done=told.append)
    assert told == [1, 2, 3]


def test_an_engine_that_marks_no_phases_has_none():
    clock = Clock()
    device = Device(clock)

    def plain() -> Iterator[Phase | Work]:
        device.launch(1.0)
        yield Work(COUNTS | {"tokens": 1})

    trace = measure(plain(), device, clock=clock)
    samples = trace.make_samples("val", rank=3)
    (sample,) = samples
    assert (sample.phases, sample.rank, sample.pass_name, sample.end_s) == ({}, 3, "val", 1.0)


def test_a_phase_that_comes_twice_in_a_step_adds_up():
    clock = Clock()
    device = Device(clock)

    def twice() -> Iterator[Phase | Work]:
        for time_s in (1.0, 2.0):
            yield Phase("data")
            device.launch(0.5)
            yield Phase("compute")
            device.launch(time_s)
        yield Work(COUNTS | {"tokens": 1})

    (sample,) = measure(twice(), device, clock=clock).make_samples("infer")
    assert sample.phases == {"data": 1.0, "compute": 3.0}


def test_values_that_are_not_finite_become_null():
    clock = Clock()
    device = Device(clock)

    def bad() -> Iterator[Phase | Work]:
        yield Work({}, {"loss": float("nan"), "norm": float("inf"), "fine": 2})

    (sample,) = measure(bad(), device, clock=clock).make_samples("infer")
    assert sample.values == {"loss": None, "norm": None, "fine": 2.0}


def test_the_bare_loop_does_the_same_work_and_keeps_nothing():
    clock = Clock()
    device = Device(clock)
    trace = measure_bare(engine(clock, device), device, clock)
    assert (trace.wall_s, trace.make_samples("infer"), device.synchronized) == (7.75, [], 2)


def test_an_error_of_the_engine_passes_through():
    clock = Clock()

    def broken() -> Iterator[Phase | Work]:
        yield Phase("data")
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        measure(broken(), Device(clock), clock=clock).make_samples("infer")


def test_budget_parts_add_up_and_time_between_them_is_named():
    clock = Clock()
    budget = Budget(clock)
    with budget.part("imports"):
        clock.now += 3.0
    clock.now += 0.5
    with budget.part("weights"):
        clock.now += 2.0
    with budget.part("imports"):
        clock.now += 1.0
    parts = budget.parts()
    assert parts == {"imports": 4.0, "weights": 2.0, "harness": 0.5}
    assert sum(parts.values()) == 6.5
    with (
        budget.part("outer"),
        pytest.raises(RuntimeError, match="begins inside"),
        budget.part("inner"),
    ):
        pass


def test_a_part_that_fails_still_counts():
    clock = Clock()
    budget = Budget(clock)
    with pytest.raises(KeyError), budget.part("weights"):
        clock.now += 2.0
        raise KeyError
    assert budget.parts() == {"weights": 2.0, "harness": 0.0}


def test_mean_time_is_device_time_over_calls():
    clock = Clock()
    device = Device(clock)

    def work() -> None:
        clock.now += 0.001
        device.launch(0.5)

    # After 3 calls to warm up, batches of 3 until the host has seen 0.01 s: 12 calls.
    assert measure_mean_time_s(work, device, 0.01, clock) == pytest.approx(0.5, abs=1e-3)


def test_host_events_know_only_each_other():
    clock = Clock()
    first = HostEvent(clock)
    clock.now += 2.0
    assert first.elapsed_s(HostEvent(clock)) == 2.0
    with pytest.raises(TypeError):
        first.elapsed_s(Event(3.0))


def test_work_that_counts_too_little_is_refused():
    """A step without work counts nothing; one that counts, counts all that a formula reads."""
    clock = Clock()
    device = Device(clock)
    assert measure(iter([Work({})]), device, clock=clock).make_samples("infer")[0].counts == {}
    with pytest.raises(
        ValueError, match="the Work of step 1 does not count samples, logits, pairs, square"
    ):
        measure(iter([Work(COUNTS), Work({"tokens": 1})]), device, clock=clock).make_samples(
            "infer"
        )


@pytest.mark.parametrize(
    ("kind", "device_s", "cpu_s"),
    [("device", 2.5, 3.0), ("host", None, 3.0), ("reported", None, None)],
)
def test_whose_clock_it_was(kind: str, device_s: float | None, cpu_s: float | None):
    """For a program that reports its own times, neither the CPU time of this process nor a device
    clock is known.
    """
    clock = Clock()
    events = {"device": Event, "reported": ReportedEvent, "host": lambda at_s: HostEvent(clock)}

    class Told(Device):
        def event(self):
            return events[kind](clock.now)

    def work() -> Iterator[Work]:
        clock.now += 2.5
        yield Work(COUNTS)

    busy = iter((1.0, 4.0))
    trace = measure(work(), Told(clock), clock=clock, busy=lambda: next(busy))
    samples = trace.make_samples("train")
    assert (trace.clock, trace.wall_s, trace.device_s, trace.cpu_s) == (kind, 2.5, device_s, cpu_s)
    assert (samples[0].end_s, samples[0].host_end_s) == (2.5, 2.5)
