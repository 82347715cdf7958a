"""The one measured loop that every engine's work passes through, and other timing of device work.

An engine yields marks: a `Phase` where a phase of a step begins, a `Work` where a step ends. At
each mark the loop takes the host time and a device event and goes on; it never waits for the device
inside a pass. The pass ends when the engine has nothing more to yield and the device is idle, so
work hidden behind the last mark is inside the wall time. Called by run/worker.py; the samples go
into the rank file.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from steelyard.accelerators.events import Clock, ClockName, Event, Timeline, get_clock_name
from steelyard.engine.work import Phase, Work
from steelyard.record.record import Sample
from steelyard.run.clock import now

CountStep = Callable[[Work], dict[str, int]]
# what an engine yielded, the host time since the start of the pass, and the device event
Mark = tuple[Phase | Work, float, Event]


@dataclass(frozen=True)
class PassTrace:
    """One measured pass on this rank, from `measure` or `measure_bare`: `start_clock_s` and
    `wall_s` on the host's clock, `device_s` by device events (None: the device has no clock of its
    own), `cpu_s` of this process (None: not read, or another program did the work), all in seconds;
    `first`, the event at the start (None: nothing was marked); and `marks`: what the engine
    yielded, host time since the start, and device event. `make_samples` computes the samples after
    the pass, because that takes time too.

    `clock` is whose times the events have: `device`, `host`, or `reported` by an external program.
    A bare pass has only `start_clock_s` and `wall_s`.
    """

    start_clock_s: float  # reading of the clock at the start
    wall_s: float
    # the wall time by device events; None if the device has no clock of its own
    device_s: float | None = None
    cpu_s: float | None = None  # CPU time of this process; None if another program did the work
    clock: ClockName = "host"
    first: Event | None = None  # None: nothing was marked
    marks: list[Mark] = field(default_factory=list)

    def make_samples(
        self, pass_name: str, rank: int = 0, count: CountStep = lambda item: item.counts
    ) -> list[Sample]:
        """Return a sample of this pass for each step, which ends at a `Work` mark: start and end in
        seconds since the start of the pass, by events and on the host's clock, and seconds by
        phase.

        A step begins where the one before ended; marks after the last `Work` are in no sample.
        `count` returns the counts of a step's work, by default those that the engine reported.
        Values that are not finite become None; device tensors among them are read here. Empty for a
        pass without marks.
        """
        if self.first is None:
            return []
        step_samples: list[Sample] = []
        phase_starts: list[tuple[str, float]] = []
        start_s = host_start_s = 0.0
        for item, host_s, event in self.marks:
            mark_s = self.first.elapsed_s(event)
            if isinstance(item, Phase):
                phase_starts.append((item.name, mark_s))
                continue
            bounds_s = [*(begin for _, begin in phase_starts), mark_s]
            phases: dict[str, float] = {}
            for (phase, begin), end in zip(phase_starts, bounds_s[1:], strict=True):
                phases[phase] = phases.get(phase, 0.0) + end - begin
            step_samples.append(
                Sample(
                    pass_name=pass_name,
                    rank=rank,
                    step=len(step_samples),
                    start_s=start_s,
                    end_s=mark_s,
                    host_start_s=host_start_s,
                    host_end_s=host_s,
                    phases=phases,
                    counts=count(item),
                    values={key: _to_finite(value) for key, value in item.values.items()},
                )
            )
            phase_starts = []
            start_s, host_start_s = mark_s, host_s
        return step_samples


def measure(
    items: Iterator[Phase | Work],
    device: Timeline,
    clock: Clock = now,
    step_done: Callable[[int], None] | None = None,
    busy: Clock | None = None,
) -> PassTrace:
    """Run a pass to its end and return its marks and times; no sample is computed yet. The device
    is waited for before and after, never in between.

    `items` does the engine's work while it is iterated. `step_done` is called after each step with
    the number of steps so far. `busy` reads the CPU time of this process in seconds; without it, or
    if the engine reports times of another program, `cpu_s` is None. `device_s` is None unless the
    device has its own clock.
    """
    device.synchronize()
    busy_s = None if busy is None else busy()
    start = clock()
    first = device.event()
    marks: list[Mark] = []
    steps = 0
    for item in items:
        marks.append((item, clock() - start, device.event()))
        if isinstance(item, Work):
            steps += 1
            if step_done is not None:
                step_done(steps)
    last = device.event()
    device.synchronize()
    wall = clock() - start
    clock_name = get_clock_name(last)
    device_s = first.elapsed_s(last) if clock_name == "device" else None
    cpu_s = None if busy is None or busy_s is None or clock_name == "reported" else busy() - busy_s
    return PassTrace(start, wall, device_s, cpu_s, clock_name, first, marks)


def measure_bare(items: Iterator[Phase | Work], device: Timeline, clock: Clock = now) -> PassTrace:
    """Run a pass without marks, events or callbacks, and return a trace with its start and wall
    time alone, until the device is idle: the overhead of `measure` is found by comparison. `items`
    does the engine's work while it is iterated.
    """
    device.synchronize()
    start = clock()
    for _ in items:
        pass
    device.synchronize()
    return PassTrace(start, clock() - start)


def _to_finite(value: Any) -> float | None:
    """Return the value as a float, or None if it is not finite: JSON has no NaN."""
    number = float(value)
    return number if number - number == 0.0 else None


def measure_mean_time_s(
    work: Callable[[], Any], device: Timeline, min_time_s: float, clock: Clock = now
) -> float:
    """Return the mean device seconds of one call of `work`, by one pair of events around at least
    three calls and as many, in threes, as fill `min_time_s` seconds of `clock`, after three to warm
    up. The device is waited for after every 30 calls.
    """
    for _ in range(3):
        work()
    device.synchronize()
    begin, calls, first = clock(), 0, device.event()
    while calls < 3 or clock() - begin < min_time_s:
        for _ in range(3):
            work()
        calls += 3
        if calls % 30 == 0:
            device.synchronize()  # the host must not run far ahead of what it is timing
    last = device.event()
    device.synchronize()
    return first.elapsed_s(last) / calls


def time_calls(work: Callable[[], Any], device: Timeline, calls: int) -> float:
    """Return the device seconds of all `calls` calls of `work` together, by one pair of events
    around them, and wait until the device is idle; nothing is warmed up. Ranks that communicate in
    `work` must pass the same number of calls.
    """
    first = device.event()
    for _ in range(calls):
        work()
    last = device.event()
    device.synchronize()
    return first.elapsed_s(last)


class Budget:
    """Wall seconds of a process by named part since its creation: `part(name)` times a `with`
    block, `parts` returns the sums by name. Parts follow one another and never nest; time between
    them is the part `harness`, so that all add up to the time since its creation. No limit is set
    by it.
    """

    def __init__(self, clock: Clock = now) -> None:
        """Start the budget: all time counts from now on `clock`, which returns seconds."""
        self._clock = clock
        self._start = clock()
        self._parts: dict[str, float] = {}
        self._current: str | None = None
        self._begin = self._start

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the time of a `with` block as part `name` of this process's budget, added to
        earlier time of that name, also if the block raises; raise RuntimeError if it begins inside
        another part.
        """
        if self._current is not None:
            raise RuntimeError(f"budget part {name!r} begins inside {self._current!r}")
        self._current, self._begin = name, self._clock()
        try:
            yield
        finally:
            self._parts[name] = self._parts.get(name, 0.0) + self._clock() - self._begin
            self._current = None

    def parts(self) -> dict[str, float]:
        """Return a new dict with the seconds of all parts of this process's budget until now, by
        name, including a part that has not ended, and last `harness` for the time between parts.
        """
        now_s = self._clock()
        parts = dict(self._parts)
        if self._current is not None:
            parts[self._current] = parts.get(self._current, 0.0) + now_s - self._begin
        return {**parts, "harness": now_s - self._start - sum(parts.values())}
