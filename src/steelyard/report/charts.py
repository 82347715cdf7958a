"""Build charts as data: bar charts that compare the runs of a case, with published values as lines,
and line charts of one run.

`chart_geometry` computes where things lie, and only the HTML template draws them.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from steelyard import words
from steelyard.metrics import training
from steelyard.metrics.overview import Row
from steelyard.metrics.runs import Estimate
from steelyard.record.record import Record, Sample
from steelyard.report.case_tables import Side, sides
from steelyard.report.columns import layout
from steelyard.report.document import (
    Bar,
    BarRow,
    Bars,
    Block,
    Curve,
    Lines,
    Panel,
    Point,
    Reference,
    Share,
    Stack,
)
from steelyard.report.numbers import UNKNOWN, ends, formed, real
from steelyard.report.published import MFU_CONVENTIONS, PublishedRow, published
from steelyard.report.runs import Run, scope, tuned_text
from steelyard.words import Words

MAX_POINTS = 400  # of a line; a page has no pixels for more
MAX_SERIES = 8
MAX_PARTS = 8
_BEYOND_ALL = 1e15  # larger than any rate, power or clock; an axis cannot show more

_TELEMETRY = (("power_w", "W"), ("sm_clock_mhz", "MHz"))
_WORK = ("tokens", "samples")


def of_run(record: Record, say: Words) -> list[Block]:
    """Return the line charts of a run: loss, rate over time, and telemetry; each only if it has
    points.
    """
    return [*_losses(record, say), *_rate(record, say), *_telemetry(record, say)]


def budget(parts: list[tuple[str, float]], total: float, say: Words) -> Stack:
    """Return a stacked bar of the parts of a run's wall time as shares of `total`, in the order
    given.

    Of more than MAX_PARTS the last ones are added up as one; a negative time counts as 0. `total`
    must not be 0.
    """
    shares = [(name, max(0.0, time_s) / total) for name, time_s in parts]
    if len(shares) > MAX_PARTS:
        rest = sum(share for _, share in shares[MAX_PARTS - 1 :])
        shares = [*shares[: MAX_PARTS - 1], (say("budget.rest"), rest)]
    return Stack(
        say("budget"), tuple(Share(name, share, formed("percent", share)) for name, share in shares)
    )


def _drawn(chart: Lines) -> list[Block]:
    """Return the chart in a list, or an empty list if no point of it has a value."""
    return [chart] if any(y is not None for line in chart.series for _, y in line.points) else []


def _losses(record: Record, say: Words) -> list[Block]:
    """Return a chart of the training loss by step, taken from one rank because it is the same on
    all; nothing for other kinds of work.
    """
    if "loss" not in record.task.kind_row.step_values:
        return []
    curve = Curve("loss", _thinned(_points(enumerate(training.values(record, "loss")))))
    unit = words.unit("nats", say.lang)
    return _drawn(Lines(say("chart.loss"), say("chart.loss_x"), unit, (curve,)))


def _rate(record: Record, say: Words) -> list[Block]:
    """Return a chart of the rate over time in the headline pass, a line for each of the first
    MAX_SERIES ranks; nothing if no sample counts tokens or samples.

    The record's core rate is drawn as a level where it is comparable: one rank, the same unit, and
    the pass that the kind of work prefers.
    """
    kind = record.task.kind_row
    plan = layout(kind)
    ran = {sample.pass_name for sample in record.samples}
    name = next((name for name in kind.headline if name in ran), None)
    samples = [sample for sample in record.samples if sample.pass_name == name]
    work = next(
        (work for work in _WORK if any(sample.counts.get(work) for sample in samples)), None
    )
    if name is None or work is None:
        return []
    # A step without work, such as reading the answers back at the end, has no rate.
    working = [sample for sample in samples if sample.counts.get(work)]
    ranks = sorted({sample.rank for sample in working})[:MAX_SERIES]
    series = tuple(
        Curve(
            say("stragglers.rank", str(rank)) if len(ranks) > 1 else work,
            _rates([s for s in working if s.rank == rank], work),
        )
        for rank in ranks
    )
    title = say("chart.rate.train") if name in kind.stepped else say("chart.rate", name)
    titles = (title, say("chart.rate_x"), say("chart.rate_y", work))
    core = record.metrics.get(plan.core)
    comparable = (
        core is not None
        and core.unit == f"{work}/s"
        and len(ranks) == 1
        and name == kind.headline[0]
    )
    level = _drawable(core.value) if core is not None and comparable else None
    return _drawn(Lines(*titles, series, level, plan.core))


def _rates(samples: list[Sample], work: str) -> tuple[Point, ...]:
    """Return points of (middle time in s, work per second of a step). Neighbouring steps are
    pooled, total work over total time, if there are more than MAX_POINTS.
    """
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
    """Return the points that can be drawn: a pair whose x cannot be drawn is dropped, and a y that
    cannot becomes None, a gap.
    """
    known = ((_drawable(x), _drawable(y)) for x, y in pairs)
    return tuple((x, y) for x, y in known if x is not None)


def _drawable(value: Any) -> float | None:
    """Return a finite number from 0 to below 1e15 as a float; None for anything else."""
    known = real(value)
    return known if known is not None and 0 <= known < _BEYOND_ALL else None


def _telemetry(record: Record, say: Words) -> list[Block]:
    """Return a chart of power (W) and one of SM clock (MHz) over time in s, a line per device;
    devices without readings are left out.
    """
    several = len({one.host for one in record.telemetry}) > 1
    out: list[Block] = []
    for column, unit in _TELEMETRY:
        curves = []
        for index, device in enumerate(record.telemetry):
            points = _points(zip(device.columns.t_s, getattr(device.columns, column), strict=False))
            name = f"{device.host} {device.device}" if several else say("chart.device", str(index))
            if any(y is not None for _, y in points):
                curves.append(Curve(name, _thinned(points)))
        series = tuple(curves[:MAX_SERIES])
        out += _drawn(Lines(say(f"chart.{column}"), say("chart.time_x"), unit, series))
    return out


def _thinned(points: tuple[Point, ...]) -> tuple[Point, ...]:
    """Reduce a line to at most about MAX_POINTS points: the lowest and the highest of each stretch,
    because a mean would hide dips. A stretch without values stays a gap.
    """
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


MOST = 10  # of a bar chart; the table beside it has all
_ALIKE = 0.1  # closer values (as a share of the highest) look equal on an axis from 0
_ROOM = 1.02  # the axis ends this much above the highest number


@dataclass(frozen=True)
class _Metric:
    """A metric of a bar chart: its title, number format and unit, the function that gets its
    estimate from a row, and the published values to draw as lines. `hint` stands in the place of a
    missing unit.
    """

    title: str
    form: str
    unit: str
    of: Callable[[Row], Estimate | None]
    references: tuple[Reference, ...] = ()
    hint: str = ""


def of_case(runs: list[Run], name: str, say: Words) -> list[Block]:
    """Return a bar chart for each unit of rate among the runs of a case, with panels for rate, MFU
    and energy; runs without a rate are left out.
    """
    rated = [(side, side.row.rate) for side in sides(runs)]
    drawn = [side for side, rate in rated if rate and _drawable(rate.value) is not None]
    kinds = list(dict.fromkeys(side.row.accelerator for side in drawn))
    out: list[Block] = []
    for its in dict.fromkeys(side.unit for side in drawn):
        rows = _chosen([side for side in drawn if side.unit == its])
        panels = [
            panel
            for metric in _metrics(runs, its, say)
            if (panel := _panel(metric, rows, say)) is not None
        ]
        scopes = len({scope(side.row.first, say) for side in rows}) > 1
        labels = tuple(_label(side, kinds, scopes, say) for side in rows)
        out.append(Bars(say("bars.title", name), labels, tuple(panels)))
    return out


def _chosen(rows: list[Side]) -> list[Side]:
    """Return at most MAX_ROWS groups in their order; the first of every accelerator, engine and
    precision is preferred to further ones.
    """
    seen = Counter[tuple[str, str, str]]()
    ranks = []
    for number, side in enumerate(rows):
        first = side.row.first
        kind = (side.row.accelerator, first.engine.name, first.case.precision)
        ranks.append((seen[kind] > 0, number))
        seen[kind] += 1
    return [rows[number] for number in sorted(number for _, number in sorted(ranks)[:MOST])]


def _label(side: Side, kinds: list[str], scopes: bool, say: Words) -> BarRow:
    """Return the label of a chart row: accelerator and engine, below them the settings, the scope
    if `with_scope`, and the status if it is not valid.

    `accelerators` lists all of the chart; the position in it is the colour.
    """
    first = side.row.first
    said = [
        first.case.precision,
        first.case.division,
        tuned_text(first),
        scope(first, say) if scopes else "",
    ]
    said += [] if side.row.valid else [say(side.row.status)]
    text = f"{side.name} · {first.engine.name}"
    return BarRow(
        text,
        " · ".join(one for one in said if one),
        kinds.index(side.row.accelerator),
        bool(side.row.valid),
    )


def _metrics(runs: list[Run], its: str, say: Words) -> tuple[_Metric, ...]:
    """Return the metrics of the panels: rate in this unit, MFU, and energy per token. Published
    values are references only for size full.
    """
    references = published(runs) if runs[0].record.case.size == "full" else []
    in_samples = runs[0].record.task.rates_in_samples
    stated = [(one, one.rate(in_samples)) for one in references]
    rate = [
        (one, found[0], "published")
        for one, found in stated
        if found is not None and found[1] == its
    ]
    mfu = [
        (one, value, word)
        for one in references
        for name, word in MFU_CONVENTIONS.items()
        if (value := real(one.values.get(name))) is not None
    ]
    return (
        _Metric(
            say("side.throughput"),
            "number",
            words.unit(its, say.lang),
            lambda row: row.rate,
            _best(rate, "number", say),
        ),
        _Metric(say("side.mfu"), "percent", "", lambda row: row.mfu, _best(mfu, "percent", say)),
        _Metric(say("side.joules"), "number", "", lambda row: row.energy, hint=say("bars.lower")),
    )


def _best(
    found: list[tuple[PublishedRow, float, str]], form: str, say: Words
) -> tuple[Reference, ...]:
    """Return a reference line for the highest published value of each accelerator and convention;
    values that cannot be drawn are dropped.

    Items are (published row, value, convention).
    """
    by_kind: dict[tuple[str, str], tuple[PublishedRow, float]] = {}
    for row, value, word in found:
        where = row.place[0], word
        if 0 < value < _BEYOND_ALL and (where not in by_kind or value > by_kind[where][1]):
            by_kind[where] = row, value
    out = []
    for (kind, word), (row, value) in by_kind.items():
        mark = str(row.number)
        out.append(Reference(value, mark, say(f"bars.{word}", mark, formed(form, value), kind)))
    return tuple(out)


def _panel(metric: _Metric, rows: list[Side], say: Words) -> Panel | None:
    """Return the panel of a metric with a bar for each group, or None if no group has a value."""
    bars = tuple(_bar(metric, side, say) for side in rows)
    values = [bar.value for bar in bars if bar.value is not None]
    if not values:
        return None
    ends = [end for bar in bars if bar.value is not None for end in bar.interval or (bar.value,)]
    low, high = _axis(values, [*ends, *(one.value for one in metric.references)])
    apart = formed("percent", 1 - min(values) / max(values)) if low else ""
    note = say("bars.cut", formed(metric.form, low), apart) if low else ""
    return Panel(metric.title, metric.unit or metric.hint, bars, metric.references, low, high, note)


def _axis(values: list[float], ends: list[float]) -> tuple[float, float]:
    """Return both ends of an axis: from 0, or, if there are several values and no number is more
    than 10 % below the highest value, from a round number below the lowest.

    `ends` are further numbers that must be visible: ends of intervals and references.
    """
    high = max(*values, *ends) * _ROOM or 1.0
    lowest = min(*values, *ends)
    if len(values) < 2 or lowest <= max(values) * (1 - _ALIKE):
        return 0.0, high
    step = 10.0 ** math.floor(math.log10(high - lowest))
    return max(0.0, math.floor((lowest - (high - lowest)) / step) * step), high


def _bar(metric: _Metric, side: Side, say: Words) -> Bar:
    """Return the bar of a group in a panel; without a value if it is unknown, and without an
    interval that cannot be drawn.
    """
    found = metric.of(side.row)
    value = None if found is None else _drawable(found.value)
    if found is None or value is None:
        return Bar(None, UNKNOWN, say("bars.unknown", metric.title))
    interval = found.interval
    within = interval is not None and all(0 <= end < _BEYOND_ALL for end in interval)
    drawn = interval if within else None
    shown = formed(metric.form, value)
    text = say("bars.of", metric.title, shown, metric.unit).rstrip()
    beside = "" if drawn is None else say("bars.interval", ends(drawn, metric.form))
    return Bar(value, shown, text + beside, drawn)
