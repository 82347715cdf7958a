"""Summarize the runs of a case for a page: repeats as one row, the best row of each division, and
accelerators against each other.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from steelyard.metrics import repeats, runs, stats
from steelyard.metrics.result import work_name
from steelyard.metrics.runs import Estimate
from steelyard.record.record import Record

LARGEST = 1e30  # as for rates, so that squares stay finite


@dataclass(frozen=True)
class Row:
    """Runs that were asked the same, as one row of means.

    Numbers are those of the valid runs; if none is valid, of those that finished. None is unknown.
    `metric` names the quality.
    """

    records: tuple[Record, ...]
    rate: Estimate | None  # work per second of wall time of one device
    mfu: Estimate | None
    energy: Estimate | None  # J per token
    mem: float | None  # GiB, highest over runs
    quality: float | None
    metric: str  # name of the quality metric

    @property
    def first(self) -> Record:
        """Return the first record, which stands for what all have in common."""
        return self.records[0]

    @property
    def valid(self) -> int:
        """Return the number of valid runs."""
        return sum(record.status == "valid" for record in self.records)

    @property
    def status(self) -> str:
        """Return the best status of its runs: valid, else invalid, else failed."""
        found = {record.status for record in self.records}
        return next(status for status in ("valid", "invalid", "failed") if status in found)

    @property
    def accelerator(self) -> str:
        """Return the device names, joined by ", "."""
        return ", ".join(runs.kinds(self.first))

    @property
    def work(self) -> str:
        """Return what rates count: "tokens" or "samples"."""
        return work_name(self.first)


@dataclass(frozen=True)
class Against:
    """The ratio of the rates per device of two accelerators' best valid rows on one question: `top`
    over `base`, the slowest accelerator.
    """

    top: Row
    base: Row
    ratio: Estimate  # top over base, of their rates per device


def rows(records: Iterable[Record]) -> list[Row]:
    """Return one row for each group of repeats, in the order in which they come."""
    groups = stats.grouped(records, lambda record: runs.in_common(record, repeats.ALIKE))
    return [_row(group) for group in groups.values()]


def _row(group: Sequence[Record]) -> Row:
    """Summarize repeats: means of rate per device, MFU, energy per token and quality, and the
    highest memory.

    Valid runs count; if none is valid, all that did not fail. Quality is the mean over the runs
    that have one.
    """
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
    """Return the record's rate per device (tokens or samples per second); None if it has none."""
    found, devices = runs.rate(record), record.plan.world
    return None if found is None else found.scaled(1 / devices)


def _mfu(record: Record) -> Estimate | None:
    """Return the record's MFU; its interval is the rate's, scaled, because MFU is the rate times a
    constant of the run. None if it has none.
    """
    found, rate = _own(record, "mfu"), runs.rate(record)
    if found is None or found.interval is not None or rate is None:
        return found
    return Estimate(found.value, rate.scaled(found.value / rate.value).interval)


def _own(record: Record, name: str) -> Estimate | None:
    """Return a stored metric with its interval; None if it is unknown or absurdly large."""
    found = record.metrics.get(name)
    if found is None or found.value is None or not abs(found.value) < LARGEST:
        return None
    return Estimate(found.value, found.interval)


def best(found: Iterable[Row]) -> dict[str, Row]:
    """Return the valid row with the highest rate per device by division, closed first; divisions
    without one are left out.
    """
    by_division = stats.grouped(_rated(found), lambda row: row.first.case.division)
    order = sorted(by_division, key=lambda division: (division != "closed", division))
    return {division: max(by_division[division], key=_value) for division in order}


def against(found: Iterable[Row]) -> list[Against]:
    """Return the ratios of accelerators to the slowest of them, fastest first, on one question.

    It is the question that most accelerators answered validly; among equals a closed one, then the
    one with the highest rate. Empty if no question has valid rows of two accelerators.
    """
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
    """Return the sort key of a question for `compare_accelerators`: number of accelerators, whether
    it is closed, highest rate.
    """
    return len(members), members[0].first.case.division == "closed", max(map(_value, members))


def _rated(found: Iterable[Row]) -> list[Row]:
    """Return the rows that have a valid run and a rate."""
    return [row for row in found if row.valid and row.rate is not None]


def _value(row: Row) -> float:
    """Return the rate per device; 0 if it is unknown."""
    return 0.0 if row.rate is None else row.rate.value
