"""Charts of a run from its samples and telemetry: which lines there are, not how they are drawn."""

from collections.abc import Iterable
from typing import Any

from steelyard import words
from steelyard.metrics import training
from steelyard.record.facts import Series as Readings
from steelyard.record.record import Record, Sample
from steelyard.report.columns import layout
from steelyard.report.document import Block, Curve, Lines, Point, Share, Stack
from steelyard.report.numbers import formed, real
from steelyard.words import Words

MAX_POINTS = 400  # more than a page has pixels for
MAX_SERIES = 8
MAX_PARTS = 8
_BEYOND_ALL = 1e15  # no rate, power or clock; an axis cannot hold it

_TELEMETRY = (("power_w", "W"), ("sm_clock_mhz", "MHz"))
_WORK = ("tokens", "samples")


def all_of(record: Record, say: Words) -> list[Block]:
    return [*_losses(record, say), *_rate(record, say), *_telemetry(record, say)]


def budget(parts: list[tuple[str, float]], total: float, say: Words) -> Stack:
    """The largest parts by name, the others together."""
    shares = [(name, max(0.0, time_s) / total) for name, time_s in parts]
    if len(shares) > MAX_PARTS:
        rest = sum(share for _, share in shares[MAX_PARTS - 1 :])
        shares = [*shares[: MAX_PARTS - 1], (say("budget.rest"), rest)]
    return Stack(say("budget"), tuple(Share(name, share, formed("percent", share)) for name, share in shares))


def _losses(record: Record, say: Words) -> list[Block]:
    """The loss of every step of training; it is the same on every rank."""
    if "loss" not in record.task.kind_row.step_values:
        return []
    points = _points(enumerate(training.values(record, "loss")))
    if not any(y is not None for _, y in points):
        return []
    return [Lines(say("chart.loss"), say("chart.loss_x"), words.unit("nats", say.lang), (Curve("loss", _thinned(points)),))]


def _rate(record: Record, say: Words) -> list[Block]:
    kind = record.task.kind_row
    plan = layout(kind)
    ran = {sample.pass_name for sample in record.samples}
    name = next((name for name in kind.headline if name in ran), None)
    samples = [sample for sample in record.samples if sample.pass_name == name]
    work = next((work for work in _WORK if any(sample.counts.get(work) for sample in samples)), None)
    if name is None or work is None:
        return []
    # A step without work, such as reading the answers back at the end, has no rate.
    working = [sample for sample in samples if sample.counts.get(work)]
    ranks = sorted({sample.rank for sample in working})[:MAX_SERIES]
    series = tuple(
        Curve(
            say("stragglers.rank", str(rank)) if len(ranks) > 1 else work, _rates([s for s in working if s.rank == rank], work)
        )
        for rank in ranks
    )
    if not any(y is not None for line in series for _, y in line.points):
        return []
    title = say("chart.rate.train") if name in kind.stepped else say("chart.rate", name)
    titles = (title, say("chart.rate_x"), say("chart.rate_y", work))
    core = record.metrics.get(plan.core)
    comparable = core is not None and core.unit == f"{work}/s" and len(ranks) == 1 and name == kind.headline[0]
    return [Lines(*titles, series, _drawable(core.value) if core is not None and comparable else None, plan.core)]


def _rates(samples: list[Sample], work: str) -> tuple[Point, ...]:
    """Neighbours are put together as total over total where there are more than can be drawn."""
    size = -(-len(samples) // MAX_POINTS)
    pairs: list[tuple[Any, Any]] = []
    for first in range(0, len(samples), size):
        bin_ = samples[first : first + size]
        time_s = sum(sample.end_s - sample.start_s for sample in bin_)
        done = real(sum(sample.counts.get(work, 0) for sample in bin_))
        rate = done / time_s if done is not None and time_s > 0 else None
        pairs.append(((bin_[0].start_s + bin_[-1].end_s) / 2, rate))
    return _points(pairs)


def _points(pairs: Iterable[tuple[Any, Any]]) -> tuple[Point, ...]:
    """What can be drawn: a time that is none is left out, a reading that is none is a gap."""
    known = ((_drawable(x), _drawable(y)) for x, y in pairs)
    return tuple((x, y) for x, y in known if x is not None)


def _drawable(value: Any) -> float | None:
    known = real(value)
    return known if known is not None and 0 <= known < _BEYOND_ALL else None


def _telemetry(record: Record, say: Words) -> list[Block]:
    out: list[Block] = []
    for column, unit in _TELEMETRY:
        series = tuple(_device_series(record.telemetry, column, say))
        if series:
            out.append(Lines(say(f"chart.{column}"), say("chart.time_x"), unit, series[:MAX_SERIES]))
    return out


def _device_series(telemetry: list[Readings], column: str, say: Words) -> Iterable[Curve]:
    hosts = {one.host for one in telemetry}
    for index, device in enumerate(telemetry):
        points = _points(zip(device.columns.t_s, getattr(device.columns, column), strict=False))
        if any(y is not None for _, y in points):
            yield Curve(
                say("chart.device", str(index)) if len(hosts) < 2 else f"{device.host} {device.device}", _thinned(points)
            )


def _thinned(points: tuple[Point, ...]) -> tuple[Point, ...]:
    """The lowest and the highest of each stretch: a mean would hide the dips one looks for."""
    size = -(-len(points) // (MAX_POINTS // 2))
    if size <= 2:
        return points
    out: list[Point] = []
    for first in range(0, len(points), size):
        known = [(y, t) for t, y in points[first : first + size] if y is not None]
        if not known:
            out.append((points[first][0], None))
            continue
        (low, low_t), (high, high_t) = min(known), max(known)
        out += sorted({(low_t, low), (high_t, high)})
    return tuple(out)
