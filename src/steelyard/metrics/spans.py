"""Select and sum what a record's passes measured: samples, counts, times, and the span that rates
are taken over.

Formulas and rules build on this module. Times are seconds; `pass_name` is one of the passes in the
glossary, such as `infer` or `train`.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# sum() adds floats differently from Python 3.12 on, and a record must verify everywhere
from math import fsum

from steelyard.metrics import formulas_1, stats
from steelyard.plan import degrees
from steelyard.record.record import Record, Sample, Window
from steelyard.words import Message

PHASES = ("data", "meet", "compute", "exchange", "score", "evaluate", "checkpoint")
OTHER_PHASE = "other"  # time in no phase: launch gaps, and what an engine does not mark


@dataclass(frozen=True)
class Span:
    """The part of a run over which rates, FLOPs and energy are computed: the whole headline pass in
    scoring, its steady window in training.

    `counts` are summed over replicas, `wall_s` is the slowest rank's. `compute_s` is None if the
    engine does not separate compute time. `bounds` are in seconds from the start of the run. `note`
    describes a steady window.
    """

    counts: dict[str, int]
    wall_s: float
    compute_s: float | None
    borders: dict[int, tuple[float, float]]  # begin and end in seconds, by rank
    steps: dict[int, list[Sample]]  # working steps by rank
    slowest: int  # the rank with the longest wall time
    note: Message | None = None


def headline(record: Record) -> str | None:
    """Return the name of the pass that rates and quality come from: `train`, or `infer`, else
    `val`; None if none of these ran.
    """
    ran = {window.pass_name for window in record.passes}
    return next((name for name in record.task.kind_row.headline if name in ran), None)


def devices(record: Record) -> int:
    """Return the number of devices of the run's plan, on all nodes."""
    return record.plan.world


def windows(record: Record, name: str) -> list[Window]:
    """Return the time windows of a pass, one for each rank that ran it; empty if none did."""
    return [window for window in record.passes if window.pass_name == name]


def samples(record: Record, name: str) -> list[Sample]:
    """Return the samples (measured steps) of a pass, of all ranks, in the order of the record."""
    return [sample for sample in record.samples if sample.pass_name == name]


def working(record: Record, name: str) -> dict[int, list[Sample]]:
    """Return the samples of a pass that counted work, by rank.

    Other samples only evaluate, write a checkpoint or read answers back.
    """
    return stats.grouped(
        (sample for sample in samples(record, name) if sample.counts), lambda sample: sample.rank
    )


def total(record: Record, name: str) -> dict[str, int]:
    """Return the counts of a pass (tokens, samples, logits, ...) summed over its samples, each
    replica once; empty if there are none.
    """
    return _counts(record, samples(record, name))


def _counts(record: Record, chosen: list[Sample]) -> dict[str, int]:
    """Return the summed counts of these samples, of the first rank of each replica only.

    Ranks that hold one model together, as a tensor-parallel group or as pipeline stages, count the
    same work.
    """
    out = Counter[str]()
    for sample in chosen:
        at = degrees.place(record.plan, sample.rank)
        if at.tp == at.pp == 0:
            out.update(sample.counts)
    return dict(out)


def wall_s(record: Record, name: str) -> float | None:
    """Return the wall time of a pass in seconds, of the slowest rank; None if no rank ran it."""
    return max((window.wall_s for window in windows(record, name)), default=None)


def computing_s(sample: Sample) -> float | None:
    """Return the compute time of a step in seconds: phases `compute` plus `exchange`, from inputs
    on the device to the last kernel.

    None if the engine does not mark `compute`.
    """
    own_s = sample.phases.get("compute")
    return None if own_s is None else own_s + sample.phases.get("exchange", 0.0)


def compute_s(record: Record, name: str) -> float | None:
    """Return the compute time of a pass in seconds: each rank's working steps summed, of the rank
    with the longest.

    None if the engine does not separate it in every step, or there are no working steps.
    """
    by_rank = _computing(working(record, name).values())
    return None if by_rank is None else max(map(fsum, by_rank), default=None)


def _computing(groups: Iterable[Sequence[Sample]]) -> list[list[float]] | None:
    """Return the compute time in seconds of each step, in the same groups; None if the engine does
    not separate it in any one step.
    """
    every = [list(map(computing_s, steps)) for steps in groups]
    known = [[time_s for time_s in times if time_s is not None] for times in every]
    return known if list(map(len, known)) == list(map(len, every)) else None


def span(record: Record) -> Span | None:
    """Return the span that rates are taken over: the headline pass, or its steady window if the
    kind of work (training) has one.

    None if the headline pass did not run, or training has no working step.
    """
    name = headline(record)
    if name is None:
        return None
    return _steady(record, name) if record.task.kind_row.steady else _whole(record, name)


def _whole(record: Record, name: str) -> Span:
    """Return the span of the whole pass; its wall time and rank are those of the slowest rank."""
    spans = windows(record, name)
    slowest = max(spans, key=lambda window: window.wall_s)
    borders = {window.rank: (window.start_s, window.start_s + window.wall_s) for window in spans}
    counts, compute = total(record, name), compute_s(record, name)
    return Span(counts, slowest.wall_s, compute, borders, working(record, name), slowest.rank)


def _steady(record: Record, name: str) -> Span | None:
    """Return the span of the steady window: from the first steady step to the last step that every
    rank finished.

    Time of evaluations and checkpoints between these steps is included. The first steady step is
    found from the slowest rank's time in each step, by the record's version of the formulas. None
    if there is no working step. Times that a program reported (clock `reported`) come from rank 0,
    whose bounds then hold for all ranks.
    """
    every = working(record, name)
    count = min(map(len, every.values()), default=0)
    if not count:
        return None
    times = [
        max(steps[i].end_s - steps[i].start_s for steps in every.values()) for i in range(count)
    ]
    if record.formulas is None:
        first, how = formulas_1.steady(times)
    else:
        tokens = [
            _counts(record, [steps[i] for steps in every.values()]).get("tokens", 0)
            for i in range(count)
        ]
        first, how = stats.steady(times, tokens)
    kept = {rank: steps[first:count] for rank, steps in every.items()}
    walls = {rank: steps[-1].end_s - steps[0].start_s for rank, steps in kept.items()}
    slowest = max(walls, key=lambda rank: walls[rank])
    begun = {window.rank: window.start_s for window in windows(record, name)}
    borders = {
        r: (begun[r] + s[0].start_s, begun[r] + s[-1].end_s) for r, s in kept.items() if r in begun
    }
    if record.clock == "reported" and 0 in borders:  # one process reports for all ranks
        borders = {one.rank: borders[0] for one in record.ranks}
    counts = _counts(record, [sample for steps in kept.values() for sample in steps])
    note = Message("steady.window", {"first": first, "last": count - 1, "how": how})
    return Span(counts, walls[slowest], _compute_by_step(kept), borders, kept, slowest, note)


def _compute_by_step(kept: dict[int, list[Sample]]) -> float | None:
    """Return the sum over steps of the slowest rank's compute time in seconds, because ranks wait
    for one another in every step; None if unknown in one step.
    """
    by_step = _computing(zip(*kept.values(), strict=True))
    return None if by_step is None else fsum(map(max, by_step))


def phases_per_step(record: Record) -> dict[str, float]:
    """Return the mean seconds of a step by phase, on the slowest rank of the span; they add up to
    the span's wall time over its steps.

    Phases are in step order, with `other` last for time in no phase (at least 0). Time between
    working steps, such as that of an evaluation, is divided among all steps. Empty if there is no
    span.
    """
    found, name = span(record), headline(record)
    steps = found.steps.get(found.slowest, []) if found is not None else []
    if found is None or name is None or not steps:
        return {}
    mine = [sample for sample in samples(record, name) if sample.rank == found.slowest]
    if record.task.kind_row.steady:
        mine = [
            sample
            for sample in mine
            if steps[0].start_s <= sample.start_s and sample.end_s <= steps[-1].end_s
        ]
    names = phases_in_order({phase for sample in mine for phase in sample.phases})
    out = {
        name: fsum(sample.phases.get(name, 0.0) for sample in mine) / len(steps) for name in names
    }
    rest_s = found.wall_s / len(steps) - fsum(out.values())
    return out | {OTHER_PHASE: max(0.0, rest_s)}


def tokens_per_step(record: Record) -> float | None:
    """Return the mean number of tokens in a step of the span, summed over replicas; None if it is
    not known.

    Times of steps of different sizes cannot be compared.
    """
    found = span(record)
    steps = found.steps.get(found.slowest, []) if found is not None else []
    return (
        found.counts["tokens"] / len(steps)
        if found is not None and steps and found.counts.get("tokens")
        else None
    )


def phases_in_order(names: Iterable[str]) -> list[str]:
    """Return the phases sorted in the order of a step; unknown ones follow alphabetically, and
    `other` is last.
    """
    return sorted(
        names,
        key=lambda name: (
            PHASES.index(name) if name in PHASES else len(PHASES),
            name == OTHER_PHASE,
            name,
        ),
    )
