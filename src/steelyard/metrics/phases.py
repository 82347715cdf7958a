"""Where the time of a step goes: seconds per step in each phase, over the span that rates are taken over."""

from collections.abc import Iterable
from math import fsum

from steelyard.metrics import spans
from steelyard.record.record import Record

ORDER = ("data", "meet", "compute", "exchange", "score", "evaluate", "checkpoint")
OTHER = "other"  # in no phase: launch gaps, and what an engine does not mark


def per_step(record: Record) -> dict[str, float]:
    """By phase, of the rank whose wall time it is; they add up to the wall time of the span over its steps. Nothing where
    there is no span. What lies between two steps, an evaluation say, is shared out over all steps."""
    found, name = spans.span(record), spans.headline(record)
    steps = found.steps.get(found.slowest, []) if found is not None else []
    if found is None or name is None or not steps:
        return {}
    mine = [sample for sample in spans.samples(record, name) if sample.rank == found.slowest]
    if record.task.kind_row.steady:
        mine = [sample for sample in mine if steps[0].start_s <= sample.start_s and sample.end_s <= steps[-1].end_s]
    sums: dict[str, list[float]] = {}
    for sample in mine:
        for phase, time_s in sample.phases.items():
            sums.setdefault(phase, []).append(time_s)
    named = {phase: fsum(times) / len(steps) for phase, times in sums.items()}
    out = {phase: named[phase] for phase in in_order(named)}
    rest_s = found.wall_s / len(steps) - fsum(out.values())
    return out | {OTHER: max(0.0, rest_s)}


def tokens_per_step(record: Record) -> float | None:
    """How large a step is, over all ranks: times of steps of different sizes are not better or worse than one another."""
    found = spans.span(record)
    steps = found.steps.get(found.slowest, []) if found is not None else []
    return found.counts["tokens"] / len(steps) if found is not None and steps and found.counts.get("tokens") else None


def in_order(names: Iterable[str]) -> list[str]:
    """The known phases in the order of a step, then others by name."""
    return sorted(names, key=lambda name: (ORDER.index(name) if name in ORDER else len(ORDER), name == OTHER, name))
