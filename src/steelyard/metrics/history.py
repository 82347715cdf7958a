"""The history of a question: its rate over time, and the first record that is bad.

Records of one question, engine, plan, precision, kind of device and scope are one trend.
Consecutive records of it that differ in nothing else are one point: repeats, whose spread says
whether a point is really below another.
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

# by somebody: they say nothing of the machine or the program
ENDED = {"interrupted", "cancelled", "unfinished"}
SETUP = ("tune.", "engine.", "environment.", "weights.")  # of what repeats have in common
SHORT = 60  # characters of names that stand in full
VARIES = ("environment.hardware.uuids",)  # between repeats


@dataclass(frozen=True)
class Indexed:
    """A record's entry, and its file."""

    path: Path
    entry: Entry

    @property
    def rate(self) -> Estimate | None:
        if self.entry.status != "valid" or self.entry.rate is None:
            return None
        return Estimate(self.entry.rate, self.entry.interval)


@dataclass(frozen=True)
class Point:
    """A run, or repeats of it. Ratios are those to the first and to the last point before it that
    has a rate.
    """

    runs: tuple[Indexed, ...]
    rate: Estimate | None
    source: Source | None
    to_first: Ratio | None
    to_before: Ratio | None

    @property
    def rates(self) -> list[Estimate]:
        return _rates(self.runs)

    @property
    def valid(self) -> int:
        return sum(one.entry.status == "valid" for one in self.runs)


@dataclass(frozen=True)
class Bad:
    """The first bad record: not valid, or slower than the best point before it."""

    record: Indexed
    ratio: Ratio | None  # to the best before it
    best: Indexed | None  # a record of that


@dataclass(frozen=True)
class Trend:
    points: tuple[Point, ...]
    bad: Bad | None

    @property
    def head(self) -> Entry:
        return self.points[0].runs[0].entry

    @property
    def unit(self) -> str:
        return next(
            (one.entry.unit for point in self.points for one in point.runs if one.entry.unit), ""
        )


@dataclass(frozen=True)
class History:
    trends: tuple[Trend, ...]
    wrong: tuple[Indexed, ...]  # files that are no records that verify
    threshold: float


def summary(path: Path) -> Entry:
    """The entry of a file, verified."""
    try:
        return _entry(verify.read(path))
    except RequestError as error:
        return Entry(wrong=str(error).removeprefix(f"{path}: ")[:1000])


def _entry(record: Record) -> Entry:
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
    """What of a scope makes a trend; names by their number and hash, where there are many."""
    parts = [f"subjects {_short(scope.subjects, len(scope.subjects))}"] if scope.subjects else []
    parts += [f"rows {_short(scope.rows, scope.selected.row_count)}"] if scope.rows else []
    parts += [f"sample {scope.sample}"] if scope.sample is not None else []
    return "full" if scope.kind == "full" else ", ".join(parts) or "window"


def _short(names: tuple[str, ...], count: int | None) -> str:
    text = ",".join(names)
    return (
        text
        if len(text) <= SHORT
        else f"{count} {hashlib.sha256(canonical(names).encode()).hexdigest()[:8]}"
    )


def history(entries: Mapping[Path, Entry], threshold: float) -> History:
    ratio.check_threshold(threshold)
    every = [Indexed(path, entry) for path, entry in entries.items()]
    # a copy of a record counts once
    sound = {one.entry.id: one for one in every if one.entry.wrong is None}
    ordered = sorted(sound.values(), key=lambda one: (one.entry.created, one.entry.id))
    trends = tuple(_trend(group, threshold) for group in _groups(ordered))
    return History(trends, tuple(one for one in every if one.entry.wrong is not None), threshold)


def _groups(ordered: list[Indexed]) -> list[list[Indexed]]:
    """By question and what else makes a trend. A run that did not come to read its data is counted
    with those of the same question that did, where there are any."""
    keys = {
        _alike(one.entry, one.entry.unread_key): one.entry.key for one in ordered if one.entry.read
    }

    def trend(one: Indexed) -> str:
        entry = one.entry
        return _alike(
            entry, entry.key if entry.read else keys.get(_alike(entry, entry.unread_key), entry.key)
        )

    return list(stats.grouped(ordered, trend).values())


def _alike(entry: Entry, key: str) -> str:
    return canonical([key, entry.engine, entry.plan, entry.precision, entry.devices, entry.scope])


def _trend(group: list[Indexed], threshold: float) -> Trend:
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
    return [found for found in (one.rate for one in group) if found is not None]


def _first_bad(points: list[Point], threshold: float) -> Bad | None:
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
    """The ratio to the best, where it is beyond the threshold and no chance, as far as can be told.
    Where nothing can be tested the intervals, each of its own steps or runs, must not meet."""
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
