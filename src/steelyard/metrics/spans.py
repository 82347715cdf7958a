"""What the passes of a record hold: samples, counts and times, and the span of a run that its rates
are taken over.
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
OTHER_PHASE = "other"  # in no phase: launch gaps, and what an engine does not mark


@dataclass(frozen=True)
class Span:
    """What rates, FLOPs and energy are taken over: a whole pass of scoring, the steady window of
    training.
    """

    counts: dict[str, int]
    wall_s: float
    compute_s: float | None
    borders: dict[int, tuple[float, float]]  # begin and end on each rank, from the start of the run
    steps: dict[int, list[Sample]]  # the working steps of each rank
    slowest: int  # the rank whose wall time it is
    note: Message | None = None


def headline(record: Record) -> str | None:
    """The pass that a record's rates and quality are taken from: train, or infer, else val."""
    ran = {window.pass_name for window in record.passes}
    return next((name for name in record.task.kind_row.headline if name in ran), None)


def devices(record: Record) -> int:
    return record.plan.world


def windows(record: Record, name: str) -> list[Window]:
    return [window for window in record.passes if window.pass_name == name]


def samples(record: Record, name: str) -> list[Sample]:
    return [sample for sample in record.samples if sample.pass_name == name]


def working(record: Record, name: str) -> dict[int, list[Sample]]:
    """Steps of a pass that did work, by rank; others only evaluate, write a checkpoint or read
    answers back.
    """
    return stats.grouped(
        (sample for sample in samples(record, name) if sample.counts), lambda sample: sample.rank
    )


def total(record: Record, name: str) -> dict[str, int]:
    """Counts of a pass over all its samples."""
    return _counts(record, samples(record, name))


def _counts(record: Record, chosen: list[Sample]) -> dict[str, int]:
    """Ranks that hold one model together, in a tensor-parallel group or as stages, count the same
    work: one of them counts.
    """
    out = Counter[str]()
    for sample in chosen:
        at = degrees.place(record.plan, sample.rank)
        if at.tp == at.pp == 0:
            out.update(sample.counts)
    return dict(out)


def wall_s(record: Record, name: str) -> float | None:
    """Wall time of a pass: that of the slowest rank."""
    return max((window.wall_s for window in windows(record, name)), default=None)


def computing_s(sample: Sample) -> float | None:
    """Compute time of a step: from when its inputs are on the device to its last kernel. What ranks
    exchange meanwhile is in it, whether or not the engine marks it. None where an engine does not
    separate it."""
    own_s = sample.phases.get("compute")
    return None if own_s is None else own_s + sample.phases.get("exchange", 0.0)


def compute_s(record: Record, name: str) -> float | None:
    """Compute time of a pass: that of the slowest rank. None where an engine does not separate it."""
    by_rank = _computing(working(record, name).values())
    return None if by_rank is None else max(map(fsum, by_rank), default=None)


def _computing(groups: Iterable[Sequence[Sample]]) -> list[list[float]] | None:
    """Return the compute time of each step in groups of steps; None where an engine does not
    separate one of them."""
    every = [list(map(computing_s, steps)) for steps in groups]
    known = [[time_s for time_s in times if time_s is not None] for times in every]
    return known if list(map(len, known)) == list(map(len, every)) else None


def span(record: Record) -> Span | None:
    """The headline pass, or its steady window where a kind of work has one; None where there is
    none.
    """
    name = headline(record)
    if name is None:
        return None
    return _steady(record, name) if record.task.kind_row.steady else _whole(record, name)


def _whole(record: Record, name: str) -> Span:
    spans = windows(record, name)
    slowest = max(spans, key=lambda window: window.wall_s)
    borders = {window.rank: (window.start_s, window.start_s + window.wall_s) for window in spans}
    counts, compute = total(record, name), compute_s(record, name)
    return Span(counts, slowest.wall_s, compute, borders, working(record, name), slowest.rank)


def _steady(record: Record, name: str) -> Span | None:
    """From the step at which the run becomes steady to the last that every rank finished;
    evaluations and checkpoints between them are in it."""
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
    if record.clock == "reported" and 0 in borders:  # one process tells of all ranks
        borders = {one.rank: borders[0] for one in record.ranks}
    counts = _counts(record, [sample for steps in kept.values() for sample in steps])
    note = Message("steady.window", {"first": first, "last": count - 1, "how": how})
    return Span(counts, walls[slowest], _compute_by_step(kept), borders, kept, slowest, note)


def _compute_by_step(kept: dict[int, list[Sample]]) -> float | None:
    """Per step the slowest rank's, summed: ranks wait for one another in every step."""
    by_step = _computing(zip(*kept.values(), strict=True))
    return None if by_step is None else fsum(map(max, by_step))


def phases_per_step(record: Record) -> dict[str, float]:
    """Return the seconds of a step by phase, on the rank whose wall time the span has; they add up
    to the wall time of the span over its steps. Return an empty table if there is no span. Time
    between two steps, such as that of an evaluation, is divided among all steps."""
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
    """Return the mean number of tokens in a step over all ranks, None if it is not known. Times of
    steps of different sizes cannot be compared."""
    found = span(record)
    steps = found.steps.get(found.slowest, []) if found is not None else []
    return (
        found.counts["tokens"] / len(steps)
        if found is not None and steps and found.counts.get("tokens")
        else None
    )


def phases_in_order(names: Iterable[str]) -> list[str]:
    """The known phases in the order of a step, then others by name."""
    return sorted(
        names,
        key=lambda name: (
            PHASES.index(name) if name in PHASES else len(PHASES),
            name == OTHER_PHASE,
            name,
        ),
    )
