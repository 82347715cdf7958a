"""The runs of a case side by side: repeats as one row, the best of each division, and accelerators
against each other.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from steelyard.metrics import repeats, runs, stats
from steelyard.metrics.result import work_name
from steelyard.metrics.runs import Estimate
from steelyard.record.record import Record

LARGEST = 1e30  # as of rates: squares stay finite


@dataclass(frozen=True)
class Row:
    """Runs that were asked the same. Numbers are those of valid runs; where none is valid, those of
    the finished ones.
    """

    records: tuple[Record, ...]
    rate: Estimate | None  # work of one device over wall time
    mfu: Estimate | None
    energy: Estimate | None  # J per token
    mem: float | None  # GiB, the highest of the runs
    quality: float | None
    metric: str  # of the quality

    @property
    def first(self) -> Record:
        return self.records[0]

    @property
    def valid(self) -> int:
        return sum(record.status == "valid" for record in self.records)

    @property
    def status(self) -> str:
        """The best of its runs."""
        found = {record.status for record in self.records}
        return next(status for status in ("valid", "invalid", "failed") if status in found)

    @property
    def accelerator(self) -> str:
        return ", ".join(runs.kinds(self.first))

    @property
    def work(self) -> str:
        return work_name(self.first)


@dataclass(frozen=True)
class Against:
    """The best valid rows of two accelerators on one question."""

    top: Row
    base: Row
    ratio: Estimate  # of their rates per device


def rows(records: Iterable[Record]) -> list[Row]:
    """Repeats together, in the order in which they came."""
    groups = stats.grouped(records, lambda record: runs.in_common(record, repeats.ALIKE))
    return [_row(group) for group in groups.values()]


def _row(group: Sequence[Record]) -> Row:
    valid = [record for record in group if record.status == "valid"]
    counted = valid or [record for record in group if record.status != "failed"]
    metric = runs.quality(group)
    sizes = [
        size for size in (runs.metric(record, "mem") for record in counted) if size is not None
    ]
    return Row(
        records=tuple(group),
        rate=runs.mean(map(_rate, counted))[0],
        mfu=runs.mean(map(_mfu, counted))[0],
        energy=runs.mean(_own(record, "energy_per_token") for record in counted)[0],
        mem=max(sizes, default=None),
        quality=stats.mean_of_known([runs.metric(record, metric) for record in counted]),
        metric=metric,
    )


def _rate(record: Record) -> Estimate | None:
    found, devices = runs.rate(record), record.plan.world
    return None if found is None else found.scaled(1 / devices)


def _mfu(record: Record) -> Estimate | None:
    """MFU is the rate times what is constant of a run, so its interval is the rate's."""
    found, rate = _own(record, "mfu"), runs.rate(record)
    if found is None or found.interval is not None or rate is None:
        return found
    return Estimate(found.value, rate.scaled(found.value / rate.value).interval)


def _own(record: Record, name: str) -> Estimate | None:
    found = record.metrics.get(name)
    if found is None or found.value is None or not abs(found.value) < LARGEST:
        return None
    return Estimate(found.value, found.interval)


def best(found: Iterable[Row]) -> dict[str, Row]:
    """The valid row with the highest rate per device of each division. The closed one comes first."""
    by_division = stats.grouped(_rated(found), lambda row: row.first.case.division)
    order = sorted(by_division, key=lambda division: (division != "closed", division))
    return {division: max(by_division[division], key=_value) for division in order}


def against(found: Iterable[Row]) -> list[Against]:
    """Accelerators against the slowest of them, on the one question that most of them answered; of
    several such questions, a closed one, and that of the highest rate. None where no question has
    valid rows of two accelerators."""
    by_key = stats.grouped(_rated(found), lambda row: row.first.case.key)
    chosen = max(map(_best_of_each, by_key.values()), key=_worth, default=[])
    if len(chosen) < 2:
        return []
    base, *others = sorted(chosen, key=_value)
    pairs = [(row, row.rate, base.rate) for row in reversed(others)]
    return [
        Against(row, base, runs.ratio(top, bottom))
        for row, top, bottom in pairs
        if top is not None and bottom is not None
    ]


def _best_of_each(found: list[Row]) -> list[Row]:
    """Return the row with the highest rate of each accelerator."""
    return [
        max(own, key=_value) for own in stats.grouped(found, lambda row: row.accelerator).values()
    ]


def _worth(members: list[Row]) -> tuple[int, bool, float]:
    return len(members), members[0].first.case.division == "closed", max(map(_value, members))


def _rated(found: Iterable[Row]) -> list[Row]:
    return [row for row in found if row.valid and row.rate is not None]


def _value(row: Row) -> float:
    return 0.0 if row.rate is None else row.rate.value
