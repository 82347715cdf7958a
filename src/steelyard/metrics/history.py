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

from steelyard.case.key import key_of
from steelyard.errors import RequestError
from steelyard.metrics import fields, rates, ratio, runs, stats, verify
from steelyard.metrics.ratio import Ratio
from steelyard.metrics.runs import Estimate, Source
from steelyard.record.index import Entry
from steelyard.record.record import Record, Scope
from steelyard.schema import canonical

# reason codes of runs that a user ended: they say nothing about the machine or the program
ENDED = {"interrupted", "cancelled", "unfinished"}
# beginnings of the fields that repeats have in common
SETUP = ("tune.", "engine.", "environment.", "weights.")
SHORT = 60  # longer lists of names are shortened to a number and a hash
VARIES = ("environment.hardware.uuids",)  # of these, the ones that may differ between repeats


@dataclass(frozen=True)
class Indexed:
    """A record's index entry, and the path of its file."""

    path: Path
    entry: Entry

    @property
    def rate(self) -> Estimate | None:
        """Return the rate of the record with its interval; None unless the record is valid and has
        one.
        """
        if self.entry.status != "valid" or self.entry.rate is None:
            return None
        return Estimate(self.entry.rate, self.entry.interval)


@dataclass(frozen=True)
class Point:
    """One point of a trend: a run, or consecutive repeats of it, with the mean rate of its valid
    runs.

    `to_first` and `to_previous` are the ratios to the first and to the previous point that has a
    rate; None if there is none. `rate` is None if no run is valid.
    """

    runs: tuple[Indexed, ...]
    rate: Estimate | None
    source: Source | None
    to_first: Ratio | None
    to_before: Ratio | None

    @property
    def rates(self) -> list[Estimate]:
        """Return the rates of the valid runs."""
        return _rates(self.runs)

    @property
    def valid(self) -> int:
        """Return the number of valid runs."""
        return sum(one.entry.status == "valid" for one in self.runs)


@dataclass(frozen=True)
class Bad:
    """The first bad record of a trend: not valid, or slower than the best point before it.

    `ratio` and `best` (a record of that point) are None for a record that is not valid.
    """

    record: Indexed
    ratio: Ratio | None  # to the best point before it
    best: Indexed | None  # a record of that point


@dataclass(frozen=True)
class Trend:
    """The points of one trend, oldest first, and its first bad record; None if there is none."""

    points: tuple[Point, ...]
    bad: Bad | None

    @property
    def head(self) -> Entry:
        """Return the entry of the first record, which names what the trend has in common."""
        return self.points[0].runs[0].entry

    @property
    def unit(self) -> str:
        """Return the unit of the rates; empty if no entry has one."""
        return next(
            (one.entry.unit for point in self.points for one in point.runs if one.entry.unit), ""
        )


@dataclass(frozen=True)
class History:
    """All trends, and the files that are no record or do not verify. `threshold` is the share below
    which a slowdown does not count.
    """

    trends: tuple[Trend, ...]
    wrong: tuple[Indexed, ...]  # files that are no record or do not verify
    threshold: float


def summary(path: Path) -> Entry:
    """Read and verify a record file, and return its index entry.

    A file that is no record or does not verify gets an entry with only `wrong`, the reason; nothing
    is raised for it.
    """
    try:
        return _entry(verify.read(path))
    except RequestError as error:
        return Entry(wrong=str(error).removeprefix(f"{path}: ")[:1000])


def _entry(record: Record) -> Entry:
    """Return the index entry of a record; `setup` is a hash of its tune, engine, environment and
    weights fields.
    """
    case, scope, plan, source = record.case, record.scope, record.plan, record.environment.source
    found = runs.rate(record)
    metric = runs.quality([record])
    quality = record.metrics.get(metric)
    alike = {
        name: value
        for name, value in fields.setting(record).items()
        if name.startswith(SETUP) and not name.startswith(VARIES)
    }
    return Entry(
        id=record.id,
        created=record.created,
        status=record.status,
        codes=tuple(dict.fromkeys(reason.code for reason in record.reasons)),
        name=case.name,
        size=case.size,
        key=case.key,
        unread_key=key_of(case.question, fields.UNREAD),
        read=record.fingerprint != fields.UNREAD,
        division=case.division,
        precision=case.precision,
        engine=record.engine.name,
        plan=f"{plan.config} {plan}",
        scope=_scope(scope),
        devices=tuple(runs.kinds(record)),
        setup=hashlib.sha256(canonical(alike).encode()).hexdigest()[:16],
        revision=source.revision,
        version=source.version,
        dirty=source.dirty,
        unit=rates.work_unit(record),
        rate=None if found is None else found.value,
        interval=None if found is None else found.interval,
        quality=metric,
        quality_value=None if quality is None else quality.value,
    )


def _scope(scope: Scope) -> str:
    """Format what of a scope distinguishes trends: "full", or subjects, rows and sample, else
    "window". The number of steps does not count.
    """
    parts = [f"subjects {_short(scope.subjects, len(scope.subjects))}"] if scope.subjects else []
    parts += [f"rows {_short(scope.rows, scope.selected.row_count)}"] if scope.rows else []
    parts += [f"sample {scope.sample}"] if scope.sample is not None else []
    return "full" if scope.kind == "full" else ", ".join(parts) or "window"


def _short(names: tuple[str, ...], count: int | None) -> str:
    """Return the names joined by commas, or `count` and a hash of them if that exceeds 60
    characters.
    """
    text = ",".join(names)
    return (
        text
        if len(text) <= SHORT
        else f"{count} {hashlib.sha256(canonical(names).encode()).hexdigest()[:8]}"
    )


def history(entries: Mapping[Path, Entry], threshold: float) -> History:
    """Group index entries into trends, and find the first bad record of each.

    A copy of a record counts once. Entries that do not verify are listed apart. Raises RequestError
    if `threshold` is not a share from 0 to below 1.
    """
    ratio.check_threshold(threshold)
    every = [Indexed(path, entry) for path, entry in entries.items()]
    # a copy of a record counts once
    sound = {one.entry.id: one for one in every if one.entry.wrong is None}
    ordered = sorted(sound.values(), key=lambda one: (one.entry.created, one.entry.id))
    trends = tuple(_trend(group, threshold) for group in _groups(ordered))
    return History(trends, tuple(one for one in every if one.entry.wrong is not None), threshold)


def _groups(ordered: list[Indexed]) -> list[list[Indexed]]:
    """Group records into trends, in the order in which they come.

    A run that ended before it read its data has no full key; it joins the trend of the same
    question whose data were read, if there is one.
    """
    keys = {
        _alike(one.entry, one.entry.unread_key): one.entry.key for one in ordered if one.entry.read
    }

    def trend(one: Indexed) -> str:
        """Return the grouping key of a record's trend."""
        entry = one.entry
        return _alike(
            entry, entry.key if entry.read else keys.get(_alike(entry, entry.unread_key), entry.key)
        )

    return list(stats.grouped(ordered, trend).values())


def _alike(entry: Entry, key: str) -> str:
    """Return the grouping key of an entry in which `key` stands for its question."""
    return canonical([key, entry.engine, entry.plan, entry.precision, entry.devices, entry.scope])


def _trend(group: list[Indexed], threshold: float) -> Trend:
    """Make a trend of records sorted by time: consecutive records with equal setup become one
    point.
    """
    points: list[Point] = []
    for _, repeats in groupby(group, key=lambda one: one.entry.setup):
        own = tuple(repeats)
        before = [point for point in points if point.rate is not None]
        found = _rates(own)
        ratios = [ratio.of_rates(other.rates, found) for other in before[:1] + before[-1:]] or [
            None,
            None,
        ]
        points.append(Point(own, *runs.mean(found), *ratios))
    return Trend(tuple(points), _first_bad(points, threshold))


def _rates(group: Iterable[Indexed]) -> list[Estimate]:
    """Return the rates of the records that are valid and have one."""
    return [found for found in (one.rate for one in group) if found is not None]


def _first_bad(points: list[Point], threshold: float) -> Bad | None:
    """Return the first record that is not valid, or is slower than the best point before it; None
    if there is none.

    Runs that somebody ended (interrupted, cancelled, unfinished) are passed over.
    """
    best: Point | None = None
    for point in points:
        slow = None if best is None else _below(best, point, threshold)
        for one in point.runs:
            if one.entry.status != "valid" and not set(one.entry.codes) & ENDED:
                return Bad(one, None, None)
            if slow is not None and best is not None and one.rate is not None:
                return Bad(one, slow, next(run for run in best.runs if run.rate is not None))
        if point.rate is not None and (
            best is None or best.rate is None or point.rate.value > best.rate.value
        ):
            best = point
    return None


def _below(best: Point, point: Point, threshold: float) -> Ratio | None:
    """Return the ratio to the best point if it is below 1 by more than the threshold and
    significant; else None.

    If it cannot be tested, the intervals of both points must not overlap.
    """
    found = ratio.of_rates(best.rates, point.rates)
    if (
        found is None
        or found.value >= 1
        or not found.beyond(threshold)
        or best.rate is None
        or point.rate is None
    ):
        return None
    if found.verdict != "not tested":
        return found if found.verdict == "significant" else None
    ours, theirs = best.rate.interval, point.rate.interval
    return found if ours is not None and theirs is not None and theirs[1] < ours[0] else None
