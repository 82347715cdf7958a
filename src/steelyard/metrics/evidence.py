"""Whether the parts of a record's evidence agree: ranks, budget, passes, samples and telemetry tell
of the same time.

Each was measured on its own. Who changes one by hand, and seals the record again, contradicts the
others. Hashes are no signatures: who changes all of them consistently is not found here.
"""

from collections.abc import Iterator
from itertools import pairwise

from steelyard.metrics import spans as passes
from steelyard.record.record import Record, Sample, Window

# how far a device's clock and the host's may be apart in a pass
CLOCKS_S, CLOCKS_SHARE = 0.002, 0.001
# What surrounds a pass inside its part of the budget: two readings of the clock, and the samples
# put together after it.
AROUND_S, AROUND_SHARE, SAMPLE_S = 0.1, 0.02, 1e-4
LATE_S = 1.0  # a reading of a device that began before the run ended, and other hosts' clocks


def contradictions(record: Record) -> list[str]:
    """What in a finished run cannot be so. A run that failed may have stopped anywhere."""
    if record.failure is not None:
        return []
    windows = (problem for window in record.passes for problem in _window(record, window))
    return [*_ranks(record), *_budgets(record), *_scope(record), *windows, *_readings(record)]


def _ranks(record: Record) -> Iterator[str]:
    told = {one.rank for one in record.ranks}
    # a stranger's world may be vast
    missing = next((rank for rank in range(record.plan.world) if rank not in told), None)
    if missing is not None:
        yield f"rank {missing} is missing from a run that did not fail"
    undone = [one for one in record.ranks if one.status != "done"]
    yield from (
        f"rank {one.rank} is {one.status!r}, and the run did not fail" for one in undone[:1]
    )


def _scope(record: Record) -> Iterator[str]:
    """The answers are those of what was named."""
    scope, answers = record.scope, record.answers
    if answers is None or (scope.subjects is None and scope.rows is None):
        return
    wrong = record.task.off_scope(answers, scope.selected)
    if scope.kind == "full":
        yield "the scope is full, and names a part of the data"
    elif wrong is not None:
        yield f"the answers are not those of the scope: {wrong}"


def _budgets(record: Record) -> list[str]:
    """The parts of rank 0 are those of the run."""
    first = next((one.budget for one in record.ranks if one.rank == 0), None) or {}
    other = [name for name, time_s in first.items() if record.budget.get(name) != time_s]
    return [f"the budget of {name} is not that of rank 0" for name in other[:1]]


def _window(record: Record, window: Window) -> Iterator[str]:
    own = [one for one in passes.samples(record, window.pass_name) if one.rank == window.rank]
    at = f"{window.pass_name} on rank {window.rank}"
    budget = next((one.budget for one in record.ranks if one.rank == window.rank), None)
    if budget is not None:
        spent_s = budget.get(window.pass_name)
        most_s = window.wall_s * (1 + AROUND_SHARE) + AROUND_S + SAMPLE_S * len(own)
        if spent_s is None or not window.wall_s - CLOCKS_S <= spent_s <= most_s:
            yield f"{at} took {window.wall_s} s; the budget has {spent_s} s for it"
    total_s = sum(record.budget.values())
    if window.start_s + window.wall_s > total_s + LATE_S:
        yield f"{at} ends after the run, which took {total_s} s"
    yield from _samples(at, own, window.wall_s, record.clock == "reported")


def _samples(at: str, own: list[Sample], wall_s: float, reported: bool) -> Iterator[str]:
    """Steps follow one another from the start of the pass, on both timelines, and end before it
    does. Times that a program reported are its own, and judged with the result."""
    most_s = wall_s * (1 + CLOCKS_SHARE) + CLOCKS_S
    last = max(
        (one.host_end_s if reported else max(one.end_s, one.host_end_s) for one in own),
        default=most_s,
    )
    if last > most_s:
        yield f"{at}: a step ends at {last} s, and the pass at {wall_s} s"
    backwards = next(
        (one.step for one in own if one.end_s < one.start_s or one.host_end_s < one.host_start_s),
        None,
    )
    if backwards is not None:
        yield f"{at}: step {backwards} ends before it starts"
    torn = next(
        (
            b.step
            for a, b in pairwise(own)
            if (a.end_s, a.host_end_s) != (b.start_s, b.host_start_s)
        ),
        None,
    )
    if torn is not None:
        yield f"{at}: step {torn} does not start where the one before it ends"


def _readings(record: Record) -> Iterator[str]:
    """Readings of devices and of CPU time are in order, and none is after the run."""
    total_s = sum(record.budget.values())
    loads = [(host.name, host.load) for host in record.hosts if host.load is not None]
    every = [
        *((f"device {series.device}", "", series.columns.t_s) for series in record.telemetry),
        *((f"host {name}", " of CPU time", load.t_s) for name, load in loads),
    ]
    for where, what, times in every:
        if any(b < a for a, b in pairwise(times)):
            yield f"{where}: readings{what} are not in the order of their times"
        if times and times[-1] > total_s + LATE_S:
            yield f"{where}: a reading{what} at {times[-1]} s, after a run of {total_s} s"
