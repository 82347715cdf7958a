"""Repeats: runs that were asked the same, as one result with the spread between them.

Numbers are those of valid runs. A run that is not valid is counted and named, and never averaged:
also one whose own steps are too uneven for the case while its repeats agree. Its rate may be right;
that its record says so is what valid means.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from steelyard.metrics import rates, runs, stats
from steelyard.metrics.runs import Estimate, Source
from steelyard.record.record import Record

# What is known of a run that failed, too, and what else repeats have in common.
ASKED = ("case", "division", "precision", "limits", "engine", "sample", "steps", "plan", "tune")
ALIKE = (*ASKED, "key", "headline", "weights", "devices", "restarts", "formulas")
RATE = "rate"
LARGEST = 1e30  # as of rates: squares stay finite


@dataclass(frozen=True)
class Spread:
    """A metric over the valid runs that have it."""

    name: str  # `rate`: work of all devices over wall time
    unit: str
    runs: int
    mean: Estimate
    source: Source | None  # of its interval
    deviation: float | None  # standard deviation between runs, a share of the mean; None of one run
    lowest: float
    highest: float


@dataclass(frozen=True)
class Repeats:
    """Two runs or more, in the order in which they came. `metrics` is empty where none is valid."""

    records: tuple[Record, ...]
    metrics: tuple[Spread, ...]

    @property
    def valid(self) -> tuple[Record, ...]:
        return tuple(record for record in self.records if record.status == "valid")

    @property
    def not_valid(self) -> tuple[Record, ...]:
        return tuple(record for record in self.records if record.status != "valid")

    @property
    def interval_only(self) -> int:
        """How many runs are invalid for nothing but the interval of their own steps."""
        return sum(
            {reason.code for reason in one.reasons} == {"interval"} for one in self.not_valid
        )


def groups(records: Iterable[Record]) -> list[Repeats]:
    """The groups of at least two runs that were asked the same."""
    every = list(records)
    finished = {
        runs.in_common(one, ASKED): runs.in_common(one, ALIKE)
        for one in reversed(every)
        if one.status != "failed"
    }

    def key(record: Record) -> str:
        asked = runs.in_common(record, ASKED)
        return (
            finished.get(asked, asked)
            if record.status == "failed"
            else runs.in_common(record, ALIKE)
        )

    return [
        Repeats(tuple(group), _metrics(group))
        for group in stats.grouped(every, key).values()
        if len(group) > 1
    ]


def _metrics(group: list[Record]) -> tuple[Spread, ...]:
    valid = [record for record in group if record.status == "valid"]
    if not valid:
        return ()
    quality = runs.quality(valid)
    found = [_spread(RATE, rates.work_unit(valid[0]), [runs.rate(record) for record in valid])]
    for name in ("mfu", "mem", "energy_per_token", quality):
        unit = next((record.metrics[name].unit for record in valid if name in record.metrics), "")
        found.append(
            _spread(name, unit, [_estimate(runs.metric(record, name)) for record in valid])
        )
    return tuple(one for one in found if one is not None)


def _estimate(value: float | None) -> Estimate | None:
    return Estimate(value) if value is not None and abs(value) < LARGEST else None


def _spread(name: str, unit: str, every: list[Estimate | None]) -> Spread | None:
    known = [one for one in every if one is not None]
    if not known:
        return None
    values = [one.value for one in known]
    mean, source = runs.over_runs(known)
    share = runs.deviation(values) / abs(mean.value) if len(values) > 1 and mean.value else None
    return Spread(name, unit, len(values), mean, source, share, min(values), max(values))
