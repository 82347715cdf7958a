"""Tests of the measured loop with a fake clock, so that every number is exact."""

from collections.abc import Iterator

import pytest

from steelyard.accelerators.events import HostEvent, ReportedEvent
from steelyard.engine.work import Phase, Work
from steelyard.run.measure import Budget, measure, measure_bare, measure_mean_time_s

COUNTS = {"tokens": 0, "samples": 1, "logits": 1, "pairs": 1, "square": 1}


class FakeClock:
    """A clock that moves only when a test or a fake device sets `now`, in seconds."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class FakeEvent:
    """A fake device event that holds the time at which the device reaches it, in seconds."""

    def __init__(self, time_s: float) -> None:
        self.at_s = time_s

    def elapsed_s(self, later: "FakeEvent") -> float:
        return later.at_s - self.at_s


class FakeDevice:
    """A fake asynchronous device: work is queued at once and done later, in order. It counts its
    synchronizations.
    """

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.free_at_s = clock.now
        self.synchronized = 0

    def launch(self, time_s: float) -> None:
        self.free_at_s = max(self.free_at_s, self.clock.now) + time_s

    def event(self) -> FakeEvent:
        return FakeEvent(max(self.free_at_s, self.clock.now))

    def synchronize(self) -> None:
        self.synchronized += 1
        self.clock.now = max(self.clock.now, self.free_at_s)


def run_fake_engine(
    clock: FakeClock, device: FakeDevice, steps: int = 3, hidden_s: float = 0.0
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
    clock = FakeClock()
    device = FakeDevice(clock)
    trace = measure(run_fake_engine(clock, device), device, clock=clock)
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


def test_device_is_synchronized_only_before_and_after_a_pass():
    clock = FakeClock()
    device = FakeDevice(clock)
    measure(run_fake_engine(clock, device, steps=50), device, clock=clock).make_samples("infer")
    assert device.synchronized == 2


def test_work_after_the_last_step_counts_in_the_wall_time():
    clock = FakeClock()
    device = FakeDevice(clock)
    trace = measure(run_fake_engine(clock, device, hidden_s=10.0), device, clock=clock)
    samples = trace.make_samples("infer")
    assert trace.wall_s == 17.75
    assert samples[-1].end_s == 7.75


def test_steps_are_reported_as_they_are_queued():
    clock = FakeClock()
    device = FakeDevice(clock)
    steps_done: list[int] = []
    measure(run_fake_engine(clock, device), device, clock=clock, step_done=steps_done.append)
    assert steps_done == [1, 2, 3]


def test_an_engine_that_marks_no_phases_has_none():
    clock = FakeClock()
    device = FakeDevice(clock)

    def run_without_phases() -> Iterator[Phase | Work]:
        device.launch(1.0)
        yield Work(COUNTS | {"tokens": 1})

    trace = measure(run_without_phases(), device, clock=clock)
    samples = trace.make_samples("val", rank=3)
    (sample,) = samples
    assert (sample.phases, sample.rank, sample.pass_name, sample.end_s) == ({}, 3, "val", 1.0)


def test_a_phase_that_comes_twice_in_a_step_adds_up():
    clock = FakeClock()
    device = FakeDevice(clock)

    def run_phases_twice() -> Iterator[Phase | Work]:
        for time_s in (1.0, 2.0):
            yield Phase("data")
            device.launch(0.5)
            yield Phase("compute")
            device.launch(time_s)
        yield Work(COUNTS | {"tokens": 1})

    (sample,) = measure(run_phases_twice(), device, clock=clock).make_samples("infer")
    assert sample.phases == {"data": 1.0, "compute": 3.0}


def test_values_that_are_not_finite_become_null():
    clock = FakeClock()
    device = FakeDevice(clock)

    def run_with_bad_values() -> Iterator[Phase | Work]:
        yield Work({}, {"loss": float("nan"), "norm": float("inf"), "fine": 2})

    (sample,) = measure(run_with_bad_values(), device, clock=clock).make_samples("infer")
    assert sample.values == {"loss": None, "norm": None, "fine": 2.0}


def test_bare_loop_does_the_same_work_without_samples():
    clock = FakeClock()
    device = FakeDevice(clock)
    trace = measure_bare(run_fake_engine(clock, device), device, clock)
    assert (trace.wall_s, trace.make_samples("infer"), device.synchronized) == (7.75, [], 2)


def test_an_error_of_the_engine_passes_through():
    clock = FakeClock()

    def broken() -> Iterator[Phase | Work]:
        yield Phase("data")
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        measure(broken(), FakeDevice(clock), clock=clock).make_samples("infer")


def test_budget_parts_add_up_and_time_between_them_is_named():
    clock = FakeClock()
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
    clock = FakeClock()
    budget = Budget(clock)
    with pytest.raises(KeyError), budget.part("weights"):
        clock.now += 2.0
        raise KeyError
    assert budget.parts() == {"weights": 2.0, "harness": 0.0}


def test_mean_time_is_device_time_over_calls():
    clock = FakeClock()
    device = FakeDevice(clock)

    def work() -> None:
        clock.now += 0.001
        device.launch(0.5)

    # After 3 calls to warm up, batches of 3 until the host has seen 0.01 s: 12 calls.
    assert measure_mean_time_s(work, device, 0.01, clock) == pytest.approx(0.5, abs=1e-3)


def test_host_event_refuses_events_of_another_kind():
    clock = FakeClock()
    first = HostEvent(clock)
    clock.now += 2.0
    assert first.elapsed_s(HostEvent(clock)) == 2.0
    with pytest.raises(TypeError):
        first.elapsed_s(FakeEvent(3.0))


def test_work_without_all_counts_is_refused():
    """A step without work counts nothing; one that counts, counts all that a formula reads."""
    clock = FakeClock()
    device = FakeDevice(clock)
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
def test_device_and_cpu_time_depend_on_the_kind_of_events(
    kind: str, device_s: float | None, cpu_s: float | None
):
    """For a program that reports its own times, neither the CPU time of this process nor a device
    clock is known.
    """
    clock = FakeClock()
    events = {"device": FakeEvent, "reported": ReportedEvent, "host": lambda at_s: HostEvent(clock)}

    class DeviceOfKind(FakeDevice):
        def event(self):
            return events[kind](clock.now)

    def work() -> Iterator[Work]:
        clock.now += 2.5
        yield Work(COUNTS)

    cpu_times = iter((1.0, 4.0))
    trace = measure(work(), DeviceOfKind(clock), clock=clock, busy=lambda: next(cpu_times))
    samples = trace.make_samples("train")
    assert (trace.clock, trace.wall_s, trace.device_s, trace.cpu_s) == (kind, 2.5, device_s, cpu_s)
    assert (samples[0].end_s, samples[0].host_end_s) == (2.5, 2.5)
