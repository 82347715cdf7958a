"""Find contradictions between the parts of a record: ranks, budget, passes, samples and telemetry
must agree about time.

Each was measured on its own, so somebody who edits one by hand and seals the record again
contradicts the others. Hashes are no signatures: consistent edits of all parts are not found here.
Called by `verify.py`, and by the parent before it writes a record.
"""

from collections.abc import Iterator
from itertools import pairwise

from steelyard.metrics import spans as passes
from steelyard.record.record import Record, Sample, Window

# how much a device's clock and the host's may differ over a pass: seconds plus a share
CLOCKS_S, CLOCKS_SHARE = 0.002, 0.001
# By how much a pass's part of the budget may exceed its wall time: seconds, a share, and seconds
# for each sample, since reading the clock and assembling the samples belong to it.
AROUND_S, AROUND_SHARE, SAMPLE_S = 0.1, 0.02, 1e-4
LATE_S = 1.0  # a device reading may end late, and other hosts' clocks differ


def contradictions(record: Record) -> list[str]:
    """Return what cannot be true in a finished run, as sentences; empty if nothing, and always for
    a failed run, which may have ended anywhere.
    """
    if record.failure is not None:
        return []
    windows = (problem for window in record.passes for problem in _window(record, window))
    return [*_ranks(record), *_budgets(record), *_scope(record), *windows, *_readings(record)]


def _ranks(record: Record) -> Iterator[str]:
    """Yield the first rank of the plan that the record lacks, and the first that is not "done"."""
    told = {one.rank for one in record.ranks}
    # stops at the first: a forged record may name a vast number of ranks
    missing = next((rank for rank in range(record.plan.world) if rank not in told), None)
    if missing is not None:
        yield f"rank {missing} is missing from a run that did not fail"
    undone = [one for one in record.ranks if one.status != "done"]
    yield from (
        f"rank {one.rank} is {one.status!r}, and the run did not fail" for one in undone[:1]
    )


def _scope(record: Record) -> Iterator[str]:
    """Yield a sentence if the answers are not those of the subjects or rows that the scope names,
    or if a full scope names any.
    """
    scope, answers = record.scope, record.answers
    if answers is None or (scope.subjects is None and scope.rows is None):
        return
    wrong = record.task.off_scope(answers, scope.selected)
    if scope.kind == "full":
        yield "the scope is full, and names a part of the data"
    elif wrong is not None:
        yield f"the answers are not those of the scope: {wrong}"


def _budgets(record: Record) -> list[str]:
    """Return at most one sentence: a part of rank 0's time budget that differs from the run's
    budget.
    """
    first = next((one.budget for one in record.ranks if one.rank == 0), None) or {}
    other = [name for name, time_s in first.items() if record.budget.get(name) != time_s]
    return [f"the budget of {name} is not that of rank 0" for name in other[:1]]


def _window(record: Record, window: Window) -> Iterator[str]:
    """Yield what cannot be true of one pass on one rank: its time in the rank's budget, its end
    after that of the run, and its samples.
    """
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
    """Yield what cannot be true of a rank's samples in a pass: a step that ends after the pass,
    ends before it starts, or does not start where the one before it ends.

    Device and host timelines are both checked. `label` names pass and rank. If `reported`, step
    ends are checked on the host timeline only, because the others are a program's own.
    """
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
    """Yield what cannot be true of telemetry and CPU readings: times that are out of order, or more
    than a second after the run's end.
    """
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
