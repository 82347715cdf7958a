"""Group runs that were asked the same (repeats), as one result with the spread between them.

Numbers are those of valid runs. A run that is not valid is counted and named, and never averaged:
not even one whose own steps are too uneven for the case while its repeats agree. Its rate may be
right, but its record does not show it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from steelyard.metrics import rates, runs, stats
from steelyard.metrics.runs import Estimate, Source
from steelyard.record.record import Record

# Parts that also failed runs have, and all parts that repeats have in common.
ASKED = ("case", "division", "precision", "limits", "engine", "sample", "steps", "plan", "tune")
ALIKE = (*ASKED, "key", "headline", "weights", "devices", "restarts", "formulas")
RATE = "rate"
LARGEST = 1e30  # as for rates, so that squares stay finite


@dataclass(frozen=True)
class Spread:
    """One metric over the valid runs of a group that have a value for it.

    `deviation` is the sample standard deviation between runs as a share of the mean; None for one
    run, or a mean of 0.
    """

    name: str  # a metric, or `rate`: work of all devices per second of wall time
    unit: str
    runs: int
    mean: Estimate
    source: Source | None  # what the interval of `mean` comes from
    deviation: float | None  # standard deviation as a share of the mean
    lowest: float
    highest: float


@dataclass(frozen=True)
class Repeats:
    """Two or more runs that were asked the same, in the order in which they came, with the spread
    of their metrics.

    `metrics` is empty if no run is valid.
    """

    records: tuple[Record, ...]
    metrics: tuple[Spread, ...]

    @property
    def valid(self) -> tuple[Record, ...]:
        """Return the runs with status valid."""
        return tuple(record for record in self.records if record.status == "valid")

    @property
    def not_valid(self) -> tuple[Record, ...]:
        """Return the runs that are invalid or failed."""
        return tuple(record for record in self.records if record.status != "valid")

    @property
    def interval_only(self) -> int:
        """Return the number of runs whose only reason against validity is that the interval of
        their own steps is too wide.
        """
        return sum(
            {reason.code for reason in one.reasons} == {"interval"} for one in self.not_valid
        )


def groups(records: Iterable[Record]) -> list[Repeats]:
    """Return the groups of at least two runs that were asked the same: equal in all `REPEAT_PARTS`.

    A failed run, which lacks some parts, joins the earliest finished run with equal
    `REPEAT_REQUEST_PARTS`; failed runs without one form a group of their own.
    """
    every = list(records)
    finished = {
        runs.in_common(one, ASKED): runs.in_common(one, ALIKE)
        for one in reversed(every)
        if one.status != "failed"
    }

    def key(record: Record) -> str:
        """Return the grouping key of a record; for a failed run that of a finished run with the
        same request, if there is one.
        """
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
    """Return the spread of rate, MFU, memory, energy per token and quality over the valid runs;
    those that no run has are left out.
    """
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
    """Return the value as an estimate without an interval; None if unknown or absurdly large."""
    return Estimate(value) if value is not None and abs(value) < LARGEST else None


def _spread(name: str, unit: str, every: list[Estimate | None]) -> Spread | None:
    """Return the spread of a metric over the runs that have it; None if none has."""
    known = [one for one in every if one is not None]
    if not known:
        return None
    values = [one.value for one in known]
    mean, source = runs.over_runs(known)
    share = runs.deviation(values) / abs(mean.value) if len(values) > 1 and mean.value else None
    return Spread(name, unit, len(values), mean, source, share, min(values), max(values))
