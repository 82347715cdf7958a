"""Summarize the runs of a case for a page: repeats as one row, the best row of each division, and
accelerators against each other.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import log
from statistics import fmean

from steelyard.metrics import estimates, repeat_groups, standing, stats, vouching
from steelyard.metrics.declared_hardware import is_hardware_declared
from steelyard.metrics.estimates import Estimate
from steelyard.metrics.passes import count_devices
from steelyard.metrics.ratio import Ratio, compare_rates
from steelyard.metrics.result import work_name
from steelyard.record.record import Record, Status

MAX_METRIC_VALUE = 1e30  # as for rates, so that squares stay finite


@dataclass(frozen=True)
class OverviewRow:
    """Runs that were asked the same (repeats; perhaps one alone), as one row of means; made by
    `make_overview_rows`.

    `records` are all of them. `rate` (work per second of wall time of one device), `mfu` (a share)
    and `energy` (J per token) are estimates with an interval, `mem` is the highest in GiB,
    `quality` the mean of the metric that `quality_metric` names. They are of the runs that prove
    the rate (`counted`); if there are none, of the unproven ones, else of those that finished; None
    is unknown. Properties: `first_record`, `is_proven`, `status` (of the runs as one result),
    `is_whole`, `is_evaluated`, `accelerator` (device names), `work_name` ("tokens" or "samples").
    """

    records: tuple[Record, ...]
    rate: Estimate | None  # work per second of wall time of one device
    mfu: Estimate | None
    energy: Estimate | None  # J per token
    mem: float | None  # GiB, highest over runs
    quality: float | None
    quality_metric: str  # name of the quality metric

    @property
    def first_record(self) -> Record:
        """Return the first record of this row of repeats, which stands for all of them."""
        return self.records[0]

    @property
    def counted(self) -> tuple[Record, ...]:
        """Return the runs of this row that prove its rate (`standing.select_proven`)."""
        return tuple(standing.select_proven(self.records))

    @property
    def is_proven(self) -> bool:
        """Return whether the rate of this row is proven and may be compared or called the best."""
        return bool(self.counted)

    @property
    def status(self) -> Status:
        """Return the status of the row's runs as one result (`standing.find_group_status`)."""
        return standing.find_group_status(self.records)

    @property
    def is_whole(self) -> bool:
        """Return whether the runs of this row answered the whole question, not a window of it."""
        return self.first_record.scope.kind == "full"

    @property
    def is_evaluated(self) -> bool:
        """Return whether the quality of every run that counts in this row was evaluated."""
        return all(record.quality.evaluated for record in self.counted or self.records)

    @property
    def accelerator(self) -> str:
        """Return the device names of this row's first record, each once, joined by ", "; empty if
        it has no device.
        """
        return ", ".join(estimates.list_device_names(self.first_record))

    @property
    def work_name(self) -> str:
        """Return what the rates of this row of repeats count: "tokens" or "samples"."""
        return work_name(self.first_record)


@dataclass(frozen=True)
class AcceleratorRatio:
    """How much faster an accelerator is than the slowest one on the same question;
    `compare_accelerators` makes one for each accelerator but the slowest.

    `top` and `base` are `OverviewRow`s: `base` is the best proven row of the slowest accelerator,
    `top` that of the other one. `ratio` is top over base of their rates per device, tested if both
    have repeats.
    """

    top: OverviewRow
    base: OverviewRow
    ratio: Ratio  # top over base, of their rates per device


def make_overview_rows(records: Iterable[Record]) -> list[OverviewRow]:
    """Return one row for each group of runs that are equal in all `repeat_groups.REPEAT_PARTS`
    (question, engine, scope, plan, tune, weights, devices, ...; single runs too), in the order in
    which they come.
    """
    groups = stats.group_by(
        records, lambda record: estimates.make_group_key(record, repeat_groups.REPEAT_PARTS)
    )
    return [_summarize_repeats(group) for group in groups.values()]


def _summarize_repeats(group: Sequence[Record]) -> OverviewRow:
    """Return one row of repeats: means of rate per device, MFU, energy per token and quality, each
    over the runs that have it, and the highest memory; None if no run has it.

    They are of the runs of `standing.select_shown`.
    """
    shown = standing.select_shown(group)
    quality_metric = estimates.choose_quality_metric(group)
    sizes = [
        size
        for size in (estimates.get_metric_value(record, "mem") for record in shown)
        if size is not None
    ]
    return OverviewRow(
        records=tuple(group),
        rate=standing.average_shown(group, _estimate_device_rate),
        mfu=standing.average_shown(group, _estimate_mfu),
        energy=standing.average_shown(
            group, lambda record: _estimate_metric(record, "energy_per_token")
        ),
        mem=max(sizes, default=None),
        quality=stats.mean_of_known(
            [estimates.get_metric_value(record, quality_metric) for record in shown]
        ),
        quality_metric=quality_metric,
    )


def _estimate_device_rate(record: Record) -> Estimate | None:
    """Return the record's rate divided by its number of devices (tokens or samples per second of
    wall time), with its interval; None if it has no rate.
    """
    total_rate, devices = estimates.estimate_rate(record), count_devices(record)
    return None if total_rate is None else total_rate.scale(1 / devices)


def _estimate_mfu(record: Record) -> Estimate | None:
    """Return the record's stored MFU (a share); None if it has none. If it has no interval of its
    own, it gets the rate's, scaled, because MFU is the rate times a constant of the run.
    """
    mfu_estimate, rate = _estimate_metric(record, "mfu"), estimates.estimate_rate(record)
    if mfu_estimate is None or mfu_estimate.interval is not None or rate is None:
        return mfu_estimate
    return Estimate(mfu_estimate.value, rate.scale(mfu_estimate.value / rate.value).interval)


def _estimate_metric(record: Record, metric_name: str) -> Estimate | None:
    """Return a stored metric with its interval; None if the record lacks it, its value is None, or
    its size is 1e30 or more.
    """
    stored = record.metrics.get(metric_name)
    if stored is None or stored.value is None or not abs(stored.value) < MAX_METRIC_VALUE:
        return None
    return Estimate(stored.value, stored.interval)


def find_best_rows(candidates: Iterable[OverviewRow]) -> list[OverviewRow]:
    """Return for each division, closed first, the proven row with the highest rate per device among
    those that answered the whole question and, after it, the best window if that is faster.
    Divisions without a proven row are left out.
    """
    by_division = stats.group_by(
        _select_rated(candidates), lambda row: row.first_record.case.division
    )
    best_rows = []
    for division in sorted(by_division, key=lambda division: (division != "closed", division)):
        whole = [row for row in by_division[division] if row.is_whole]
        best_whole = max(whole, key=_rate_or_zero, default=None)
        best = max(by_division[division], key=_rate_or_zero)
        best_rows += [row for row in (best_whole, best) if row is not None]
    return list({id(row): row for row in best_rows}.values())


def compare_accelerators(candidates: Iterable[OverviewRow]) -> list[AcceleratorRatio]:
    """Return the ratio of each accelerator's best row to that of the slowest accelerator, by rate
    per device, fastest first, on one question (key); the slowest itself is not listed.

    It is the question that most accelerators answered with a proven rate; among equals one of
    division closed, then the one with the highest rate. Empty if no question has proven rows of two
    accelerators, and for size smoke, which says nothing of an accelerator.
    """
    rated = [row for row in _select_rated(candidates) if row.first_record.case.size != "smoke"]
    by_key = stats.group_by(rated, lambda row: row.first_record.case.key)
    best_rows = max(
        map(_find_best_by_accelerator, by_key.values()), key=_question_sort_key, default=[]
    )
    if len(best_rows) < 2:
        return []
    base, *others = sorted(best_rows, key=_mean_log_rate)
    ratios = [
        (row, compare_rates(_list_device_rates(base), _list_device_rates(row)))
        for row in reversed(others)
    ]
    return [AcceleratorRatio(row, base, ratio) for row, ratio in ratios if ratio is not None]


def _mean_log_rate(row: OverviewRow) -> float:
    """Return the mean of the logarithms of a row's rates per device: accelerators are compared by
    their geometric means.
    """
    return fmean(log(rate.value) for rate in _list_device_rates(row))


def _list_device_rates(row: OverviewRow) -> list[Estimate]:
    """Return the rate per device of each run that proves the row's rate and has one."""
    return [rate for rate in map(_estimate_device_rate, row.counted) if rate is not None]


def _find_best_by_accelerator(candidates: list[OverviewRow]) -> list[OverviewRow]:
    """Return the row with the highest rate of each accelerator."""
    return [
        max(accelerator_rows, key=_rate_or_zero)
        for accelerator_rows in stats.group_by(candidates, lambda row: row.accelerator).values()
    ]


def _question_sort_key(best_rows: list[OverviewRow]) -> tuple[int, bool, float]:
    """Return the sort key of a question for `compare_accelerators`: number of accelerators, whether
    it is closed, highest rate.
    """
    return (
        len(best_rows),
        best_rows[0].first_record.case.division == "closed",
        max(map(_rate_or_zero, best_rows)),
    )


def _select_rated(candidates: Iterable[OverviewRow]) -> list[OverviewRow]:
    """Return the rows that have a proven rate, on hardware that was seen and not only declared, of
    an engine that is not known to compute something else than engine torch (`conform`).
    """
    return [
        row
        for row in candidates
        if row.is_proven
        and row.rate is not None
        and not any(map(is_hardware_declared, row.records))
        and vouching.find_weakest_mark(row.records) != "nonconforming"
    ]


def _rate_or_zero(row: OverviewRow) -> float:
    """Return the rate per device; 0 if it is unknown."""
    return 0.0 if row.rate is None else row.rate.value
