"""Build the history of each question: its rate over time, and the first bad record.

Behind `steelyard history`. Records of one question, engine, plan, precision, kind of device and
scope form a trend. Consecutive records of a trend with the same setup are one point: repeats, whose
spread tells whether a point is really below another.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from steelyard.case.key import compute_question_key
from steelyard.errors import RequestError
from steelyard.metrics import (
    estimates,
    rates,
    ratio,
    record_fields,
    standing,
    stats,
    verify,
    vouching,
)
from steelyard.metrics.estimates import Estimate, IntervalSource
from steelyard.metrics.ratio import Ratio
from steelyard.record.index import RecordSummary
from steelyard.record.record import Record, Scope
from steelyard.schema import to_canonical_json

# reason codes of runs that a user ended: they say nothing about the machine or the program
ENDED_BY_USER = {"interrupted", "cancelled", "unfinished"}
# beginnings of the fields that repeats have in common
SETUP_FIELDS = ("tune.", "engine.", "providers.", "environment.", "weights.")
MAX_NAMES_CHARS = 60  # longer lists of names are shortened to a number and a hash
VARYING_FIELDS = (
    "environment.hardware.uuids",
)  # of these, the ones that may differ between repeats


@dataclass(frozen=True)
class IndexedRecord:
    """A record file in the history: its `path`, and `entry`, the summary of it in the index (id,
    status, rate, key, ...). Property `rate` is an estimate from the entry; None if it has none.
    """

    path: Path
    entry: RecordSummary

    @property
    def rate(self) -> Estimate | None:
        """Return the rate of this record from its index entry, with its interval; None if it has
        none. Whether it counts depends on its repeats (`standing.select_proven_items`).
        """
        entry = self.entry
        return None if entry.rate is None else Estimate(entry.rate, entry.interval)


@dataclass(frozen=True)
class TrendPoint:
    """One point of a trend: a run, or consecutive repeats of it (`runs`), with the mean rate of
    those that prove one.

    `rate` is None if none does; `source` says what its interval comes from ("steps" of
    one run, or "runs"). `to_first` and `to_previous` are the ratios of its rate to those of the
    first and of the last point before it that have a rate; None if there is no such point, or this
    one has no rate. Properties: `counted` runs, and their `rates`.
    """

    runs: tuple[IndexedRecord, ...]
    rate: Estimate | None
    source: IntervalSource | None
    to_first: Ratio | None
    to_previous: Ratio | None

    @property
    def rates(self) -> list[Estimate]:
        """Return the rates (estimates) of this point's counted runs that have one."""
        return _list_rates(self.runs)

    @property
    def counted(self) -> list[IndexedRecord]:
        """Return the runs of this point of a trend that prove a rate."""
        return _select_proven(self.runs)


@dataclass(frozen=True)
class FirstBadRecord:
    """The first bad record of a trend: `record` is invalid or failed, or belongs to a point that is
    slower than the best point before it by more than the threshold, significantly or, where that
    cannot be tested, with an interval wholly below.

    `ratio` (to the best point's rate) and `best` (that point's first run with a rate) are None for
    a record that is invalid or failed.
    """

    record: IndexedRecord
    ratio: Ratio | None  # to the best point before it
    best: IndexedRecord | None  # a record of that point


@dataclass(frozen=True)
class Trend:
    """Records of one question, engine, plan, precision, devices and scope (how much of the question
    was run) over time; made by `build_history`.

    `points` are `TrendPoint`s, oldest first; `first_bad` is its first bad record, None if there is
    none. Properties: `first_entry`, the index entry of the oldest record, and `unit` of the rates
    (empty if none is known), and `engine_mark`, the worst of its records.
    """

    points: tuple[TrendPoint, ...]
    first_bad: FirstBadRecord | None

    @property
    def first_entry(self) -> RecordSummary:
        """Return the index entry of the trend's oldest record, which names what its records have in
        common.
        """
        return self.points[0].runs[0].entry

    @property
    def engine_mark(self) -> str:
        """Return the worst mark of the engine in the trend's records (`vouching.MARKS`)."""
        marks = {indexed.entry.engine_mark for point in self.points for indexed in point.runs}
        return next((mark for mark in reversed(vouching.MARKS) if mark in marks), "untested")

    @property
    def unit(self) -> str:
        """Return the unit of the trend's rates, from the first entry that has one; empty if none
        has.
        """
        return next(
            (
                indexed.entry.unit
                for point in self.points
                for indexed in point.runs
                if indexed.entry.unit
            ),
            "",
        )


@dataclass(frozen=True)
class RateHistory:
    """What `steelyard history` shows, from `build_history`: `trends`, and `not_verified`, the files
    that are no record or do not verify. `threshold` is the share (0.01 is 1 %) below which a
    slowdown does not count.
    """

    trends: tuple[Trend, ...]
    not_verified: tuple[IndexedRecord, ...]  # files that are no record or do not verify
    threshold: float


def summarize_record(path: Path) -> RecordSummary:
    """Read and verify a record file, and return its index entry.

    A file that is no record or does not verify gets an entry with only `wrong`, the reason without
    the path (at most 1000 characters); no RequestError is raised.
    """
    try:
        return _make_entry(verify.read_verified_record(path))
    except RequestError as error:
        return RecordSummary(wrong=str(error).removeprefix(f"{path}: ")[:1000])


def _make_entry(record: Record) -> RecordSummary:
    """Return the index entry of a record; nothing is written.

    `setup` is a hash of its tune, engine, providers, environment and weights fields without the
    devices' UUIDs: equal for repeats. The load of generation stands behind the case's name.
    `unread_key` is the key that the question has if the data were not read. `rate` and `interval`
    are None if it has no rate.
    """
    case, scope, plan, source = record.case, record.scope, record.plan, record.environment.source
    load = record.question.load
    rate_estimate = estimates.estimate_rate(record)
    metric = estimates.choose_quality_metric([record])
    quality = record.metrics.get(metric)
    setup_fields = {
        name: value
        for name, value in record_fields.list_setting_fields(record).items()
        if name.startswith(SETUP_FIELDS) and not name.startswith(VARYING_FIELDS)
    }
    return RecordSummary(
        id=record.id,
        created=record.created,
        status=standing.find_status(record),
        codes=tuple(standing.list_reason_codes(record)),
        name=case.name if load is None else f"{case.name} · {load.name}",
        size=case.size,
        key=case.key,
        unread_key=compute_question_key(case.question, record_fields.UNREAD_FINGERPRINT),
        read=record.fingerprint != record_fields.UNREAD_FINGERPRINT,
        division=case.division,
        precision=case.precision,
        engine=record.engine.name,
        engine_mark=vouching.find_engine_mark(record),
        plan=f"{plan.config} {plan}",
        scope=_format_scope(scope),
        devices=tuple(estimates.list_device_names(record)),
        accelerator_package=vouching.find_provider(record, "accelerator"),
        setup=hashlib.sha256(to_canonical_json(setup_fields).encode()).hexdigest()[:16],
        revision=source.revision,
        version=source.version,
        dirty=source.dirty,
        unit=rates.work_unit(record),
        rate=None if rate_estimate is None else rate_estimate.value,
        interval=None if rate_estimate is None else rate_estimate.interval,
        max_interval=case.max_interval,
        quality=metric,
        quality_value=None if quality is None else quality.value,
    )


def _format_scope(scope: Scope) -> str:
    """Return a text of what distinguishes trends in a scope: "full", or "subjects …, rows …, sample
    …" as far as set, else "window" (only `--steps`). The number of steps does not count.
    """
    parts = (
        [f"subjects {_shorten_names(scope.subjects, len(scope.subjects))}"]
        if scope.subjects
        else []
    )
    parts += [f"rows {_shorten_names(scope.rows, scope.selected.row_count)}"] if scope.rows else []
    parts += [f"sample {scope.sample}"] if scope.sample is not None else []
    return "full" if scope.kind == "full" else ", ".join(parts) or "window"


def _shorten_names(names: tuple[str, ...], count: int | None) -> str:
    """Return the names joined by commas, or, if that is longer than 60 characters, "`count` HASH"
    with the first 8 hex digits of their SHA-256.
    """
    text = ",".join(names)
    return (
        text
        if len(text) <= MAX_NAMES_CHARS
        else f"{count} {hashlib.sha256(to_canonical_json(names).encode()).hexdigest()[:8]}"
    )


def build_history(entries: Mapping[Path, RecordSummary], threshold: float) -> RateHistory:
    """Group index entries by path into trends, oldest first, and find the first bad record of each.

    Of several copies of a record (equal id) the last counts. Entries that do not verify (`wrong`)
    are in `not_verified` and in no trend. Raises RequestError if `threshold` is not a share from 0
    to below 1.
    """
    ratio.check_threshold(threshold)
    all_indexed = [IndexedRecord(path, entry) for path, entry in entries.items()]
    # a copy of a record counts once
    verified = {indexed.entry.id: indexed for indexed in all_indexed if indexed.entry.wrong is None}
    ordered = sorted(
        verified.values(), key=lambda indexed: (indexed.entry.created, indexed.entry.id)
    )
    trends = tuple(_make_trend(group, threshold) for group in _group_trends(ordered))
    return RateHistory(
        trends,
        tuple(indexed for indexed in all_indexed if indexed.entry.wrong is not None),
        threshold,
    )


def _group_trends(ordered: list[IndexedRecord]) -> list[list[IndexedRecord]]:
    """Return the records in lists, one for each trend, in the order in which they come; equal in
    question key, engine, plan, precision, devices and scope.

    A run that ended before it read its data has no full key; it joins the trend of the same
    question whose data were read, if there is one (of several, the last).
    """
    read_keys = {
        _make_trend_key(indexed.entry, indexed.entry.unread_key): indexed.entry.key
        for indexed in ordered
        if indexed.entry.read
    }

    def make_key(indexed: IndexedRecord) -> str:
        """Return the text by which a record's trend is grouped; for a record whose data were not
        read, with the key of a record of the same question that read them, if there is one.
        """
        entry = indexed.entry
        return _make_trend_key(
            entry,
            entry.key
            if entry.read
            else read_keys.get(_make_trend_key(entry, entry.unread_key), entry.key),
        )

    return list(stats.group_by(ordered, make_key).values())


def _make_trend_key(entry: RecordSummary, key: str) -> str:
    """Return the text by which an index entry is grouped into a trend: `key` (of its question),
    engine, plan, precision, devices and scope, as JSON.
    """
    return to_canonical_json(
        [key, entry.engine, entry.plan, entry.precision, entry.devices, entry.scope]
    )


def _make_trend(group: list[IndexedRecord], threshold: float) -> Trend:
    """Return the trend of records sorted by time: consecutive records with equal `setup` become one
    point, which is compared with the first and the last point before it that have a rate.
    """
    points: list[TrendPoint] = []
    for _, repeats in groupby(group, key=lambda indexed: indexed.entry.setup):
        point_records = tuple(repeats)
        rated_points = [point for point in points if point.rate is not None]
        known_rates = _list_rates(point_records)
        ratios = [
            ratio.compare_rates(earlier.rates, known_rates)
            for earlier in rated_points[:1] + rated_points[-1:]
        ] or [
            None,
            None,
        ]
        points.append(
            TrendPoint(point_records, *estimates.average_known_runs(known_rates), *ratios)
        )
    return Trend(tuple(points), _find_first_bad(points, threshold))


def _list_rates(group: Iterable[IndexedRecord]) -> list[Estimate]:
    """Return the rates of the records that prove one together and have one."""
    rated = (indexed.rate for indexed in _select_rated(group))
    return [estimate for estimate in rated if estimate is not None]


def _select_rated(group: Iterable[IndexedRecord]) -> list[IndexedRecord]:
    """Return the records of a point whose rates count and that have one."""
    return [indexed for indexed in _select_proven(group) if indexed.rate is not None]


def _select_proven(group: Iterable[IndexedRecord]) -> list[IndexedRecord]:
    """Return the records of a point whose rates count (`standing.select_proven_items`)."""
    return standing.select_proven_items(
        group,
        lambda indexed: standing.RunEvidence(
            indexed.entry.status, indexed.rate, indexed.entry.max_interval
        ),
    )


def _find_first_bad(points: list[TrendPoint], threshold: float) -> FirstBadRecord | None:
    """Return the first record, oldest point first, that is invalid or failed, or a rated run of a
    point that is slower than the best point before it (`_find_slowdown`); None if there is none.

    The best is the point with the highest mean rate so far. Records that a user ended (reasons
    interrupted, cancelled, unfinished) are passed over.
    """
    best: TrendPoint | None = None
    for point in points:
        slowdown = None if best is None else _find_slowdown(best, point, threshold)
        for indexed in point.runs:
            is_bad = indexed.entry.status not in standing.RIGHT_STATUSES
            if is_bad and not set(indexed.entry.codes) & ENDED_BY_USER:
                return FirstBadRecord(indexed, None, None)
            if slowdown is not None and best is not None and indexed in _select_rated(point.runs):
                return FirstBadRecord(indexed, slowdown, _select_rated(best.runs)[0])
        if point.rate is not None and (
            best is None or best.rate is None or point.rate.value > best.rate.value
        ):
            best = point
    return None


def _find_slowdown(best: TrendPoint, point: TrendPoint, threshold: float) -> Ratio | None:
    """Return the ratio of a point's rates to the best point's if it is below 1 by more than the
    threshold and significant; else None.

    If it cannot be tested (too few runs), the point's interval must lie wholly below the best's;
    None if one is unknown.
    """
    point_ratio = ratio.compare_rates(best.rates, point.rates)
    if (
        point_ratio is None
        or point_ratio.value >= 1
        or not point_ratio.exceeds(threshold)
        or best.rate is None
        or point.rate is None
    ):
        return None
    if point_ratio.verdict != "not tested":
        return point_ratio if point_ratio.verdict == "significant" else None
    best_interval, point_interval = best.rate.interval, point.rate.interval
    return (
        point_ratio
        if best_interval is not None
        and point_interval is not None
        and point_interval[1] < best_interval[0]
        else None
    )
