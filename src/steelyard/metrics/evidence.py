"""Find contradictions between the parts of a record: ranks, budget, passes, samples and telemetry
must agree about time.

Each was measured on its own, so somebody who edits one by hand and seals the record again
contradicts the others. Hashes are no signatures: consistent edits of all parts are not found here.
Called by `verify.py`, and by the parent before it writes a record.
"""

from collections.abc import Iterator
from itertools import pairwise

from steelyard.metrics import passes
from steelyard.record.record import PassFacts, Record, Sample

# how much a device's clock and the host's may differ over a pass: seconds plus a share
CLOCK_DIFFERENCE_S, CLOCK_DIFFERENCE_SHARE = 0.002, 0.001
# By how much a pass's part of the budget may exceed its wall time: seconds, a share, and seconds
# for each sample, since reading the clock and assembling the samples belong to it.
AROUND_S, AROUND_SHARE, SAMPLE_S = 0.1, 0.02, 1e-4
LATE_S = 1.0  # a device reading may end late, and other hosts' clocks differ


def find_contradictions(record: Record) -> list[str]:
    """Return what cannot be true together in a finished run, as English sentences: about its ranks,
    budget, scope, passes and samples, and readings; empty if nothing, and always for a failed run,
    which may have ended anywhere.
    """
    if record.failure is not None:
        return []
    window_problems = (
        problem for window in record.passes for problem in _check_window(record, window)
    )
    return [
        *_check_ranks(record),
        *_check_budget(record),
        *_check_scope(record),
        *window_problems,
        *_check_readings(record),
    ]


def _check_ranks(record: Record) -> Iterator[str]:
    """Yield a sentence for the first rank of the plan that the record lacks, and one for the first
    rank whose status is not "done".
    """
    known_ranks = {facts.rank for facts in record.ranks}
    # stops at the first: a forged record may name a vast number of ranks
    missing = next((rank for rank in range(record.plan.world) if rank not in known_ranks), None)
    if missing is not None:
        yield f"rank {missing} is missing from a run that did not fail"
    unfinished = [facts for facts in record.ranks if facts.status != "done"]
    yield from (
        f"rank {facts.rank} is {facts.status!r}, and the run did not fail"
        for facts in unfinished[:1]
    )


def _check_scope(record: Record) -> Iterator[str]:
    """Yield at most one sentence: that a full scope names subjects or rows, or else that the
    answers are not those of the subjects or rows that the scope names (`Task.off_scope`). Nothing
    if there are no answers or the scope names neither.
    """
    scope, answers = record.scope, record.answers
    if answers is None or (scope.subjects is None and scope.rows is None):
        return
    problem = record.task.off_scope(answers, scope.selected)
    if scope.kind == "full":
        yield "the scope is full, but names subjects or rows"
    elif problem is not None:
        yield f"the answers do not match the subjects or rows of the scope: {problem}"


def _check_budget(record: Record) -> list[str]:
    """Return at most one sentence: the first part of rank 0's time budget (wall seconds by named
    part) that the run's budget lacks or has with other seconds; empty if all are equal or rank 0
    has none.
    """
    first_budget = next((facts.budget for facts in record.ranks if facts.rank == 0), None) or {}
    different = [name for name, time_s in first_budget.items() if record.budget.get(name) != time_s]
    return [f"the budget of {name} is not that of rank 0" for name in different[:1]]


def _check_window(record: Record, window: PassFacts) -> Iterator[str]:
    """Yield a sentence for each thing that cannot be true of one pass on one rank (`window`): its
    seconds in the rank's budget (wall seconds by named part) missing, less than its wall time or
    clearly more (2 %, 0.1 s and 0.1 ms for each sample); an end more than 1 s after the run's (the
    sum of its budget); and contradictions in its samples (`_check_samples`).

    A rank without a budget is not compared with it.
    """
    steps = [
        item for item in passes.select_samples(record, window.pass_name) if item.rank == window.rank
    ]
    label = f"{window.pass_name} on rank {window.rank}"
    budget = next((item.budget for item in record.ranks if item.rank == window.rank), None)
    if budget is not None:
        spent_s = budget.get(window.pass_name)
        most_s = window.wall_s * (1 + AROUND_SHARE) + AROUND_S + SAMPLE_S * len(steps)
        if spent_s is None or not window.wall_s - CLOCK_DIFFERENCE_S <= spent_s <= most_s:
            yield f"{label} took {window.wall_s} s; the budget has {spent_s} s for it"
    total_s = sum(record.budget.values())
    if window.start_s + window.wall_s > total_s + LATE_S:
        yield f"{label} ends after the run, which took {total_s} s"
    yield from _check_samples(label, steps, window.wall_s, record.clock == "reported")


def _check_samples(label: str, steps: list[Sample], wall_s: float, reported: bool) -> Iterator[str]:
    """Yield what cannot be true of a rank's samples in a pass, at most one sentence for each: a
    step that ends after the pass (by over 0.1 % and 2 ms), ends before it starts, or does not start
    exactly where the one before it ends.

    Device and host times are both checked. `label` names pass and rank, `wall_s` is the pass's. If
    `reported`, the first check is on host times only, because the others are a program's own.
    """
    most_s = wall_s * (1 + CLOCK_DIFFERENCE_SHARE) + CLOCK_DIFFERENCE_S
    last_end_s = max(
        (
            sample.host_end_s if reported else max(sample.end_s, sample.host_end_s)
            for sample in steps
        ),
        default=most_s,
    )
    if last_end_s > most_s:
        yield f"{label}: a step ends at {last_end_s} s, and the pass at {wall_s} s"
    backwards = next(
        (
            sample.step
            for sample in steps
            if sample.end_s < sample.start_s or sample.host_end_s < sample.host_start_s
        ),
        None,
    )
    if backwards is not None:
        yield f"{label}: step {backwards} ends before it starts"
    not_adjacent = next(
        (
            b.step
            for a, b in pairwise(steps)
            if (a.end_s, a.host_end_s) != (b.start_s, b.host_start_s)
        ),
        None,
    )
    if not_adjacent is not None:
        yield f"{label}: step {not_adjacent} does not start where the one before it ends"


def _check_readings(record: Record) -> Iterator[str]:
    """Yield a sentence for each device's telemetry and each host's CPU readings whose times are not
    in order, or whose last is more than 1 s after the run's end (the sum of its budget).
    """
    total_s = sum(record.budget.values())
    loads = [(host.name, host.load) for host in record.hosts if host.load is not None]
    all_readings = [
        *((f"device {series.device}", "", series.columns.t_s) for series in record.telemetry),
        *((f"host {name}", " of CPU time", load.t_s) for name, load in loads),
    ]
    for source_name, kind_text, times in all_readings:
        if any(b < a for a, b in pairwise(times)):
            yield f"{source_name}: readings{kind_text} are not sorted by time"
        if times and times[-1] > total_s + LATE_S:
            yield (
                f"{source_name}: a reading{kind_text} at {times[-1]} s, after a run of {total_s} s"
            )
