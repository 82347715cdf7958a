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
from steelyard.metrics import training_formulas
from steelyard.metrics.estimates import Estimate
from steelyard.metrics.overview import OverviewRow
from steelyard.record.record import Record, Sample
from steelyard.report.case_tables import ComparedRuns, group_compared_runs
from steelyard.report.columns import load_table_layout
from steelyard.report.document import (
    BarChart,
    BarPart,
    BarRow,
    ChartBar,
    ChartPoint,
    Curve,
    LineChart,
    PageElement,
    Panel,
    ReferenceLine,
    StackedBar,
)
from steelyard.report.marks import format_engine
from steelyard.report.numbered_runs import NumberedRun, format_scope, format_tuned_settings
from steelyard.report.numbers import UNKNOWN, finite_or_none, format_interval, format_number
from steelyard.report.published_rows import MFU_CONVENTIONS, PublishedRow, find_published_rows
from steelyard.words import PageWords

MAX_POINTS = 400  # of a line; a page has no pixels for more
MAX_SERIES = 8
MAX_PARTS = 8
_MAX_DRAWN = 1e15  # larger than any rate, power or clock; an axis cannot show more

_TELEMETRY = (("power_w", "W"), ("sm_clock_mhz", "MHz"))
_WORK_COUNTS = ("tokens", "samples")


def build_run_charts(record: Record, say: PageWords) -> list[PageElement]:
    """Return the line charts of a run, which only HTML draws, in this order: training loss by step,
    rate over time in the headline pass, power (W) and SM clock (MHz) of its devices; each only if
    it has points.
    """
    return [*_loss_chart(record, say), *_rate_chart(record, say), *_telemetry_charts(record, say)]


def build_budget_bar(parts: list[tuple[str, float]], total: float, say: PageWords) -> StackedBar:
    """Return a stacked bar of the parts of a run's wall time, given as (name, seconds), as shares
    of `total` seconds, in the order given.

    Of more than MAX_PARTS, all from the MAX_PARTS-th on are added up as one; a negative time counts
    as 0. `total` must not be 0.
    """
    shares = [(name, max(0.0, time_s) / total) for name, time_s in parts]
    if len(shares) > MAX_PARTS:
        remaining = sum(share for _, share in shares[MAX_PARTS - 1 :])
        shares = [*shares[: MAX_PARTS - 1], (say("budget.rest"), remaining)]
    return StackedBar(
        say("budget"),
        tuple(BarPart(name, share, format_number("percent", share)) for name, share in shares),
    )


def _chart_if_any(chart: LineChart) -> list[PageElement]:
    """Return the chart in a list, or an empty list if no point of it has a value."""
    return [chart] if any(y is not None for line in chart.series for _, y in line.points) else []


def _loss_chart(record: Record, say: PageWords) -> list[PageElement]:
    """Return a chart of the training loss in nats by step (from 0), taken from one rank because it
    is the same on all, in a list; empty for other kinds of work and without a loss.

    A resumed run also has the losses of the run that it resumed. Long curves are thinned
    (`_thin_points`).
    """
    if "loss" not in record.task.kind_row.step_values:
        return []
    curve = Curve(
        "loss",
        _thin_points(
            _drawable_points(enumerate(training_formulas.list_step_values(record, "loss")))
        ),
    )
    unit = words.translate_unit("nats", say.lang)
    return _chart_if_any(LineChart(say("chart.loss"), say("chart.loss_x"), unit, (curve,)))


def _rate_chart(record: Record, say: PageWords) -> list[PageElement]:
    """Return a chart of the rate over time in the headline pass, in a list, with a line for each of
    the first MAX_SERIES ranks; empty if no sample counts tokens or samples. Rates are of tokens if
    any sample counts them, else of samples.

    The record's core rate is drawn as a level where it is comparable: one rank, the same unit, and
    the pass that the kind of work prefers.
    """
    kind = record.task.kind_row
    table_layout = load_table_layout(kind)
    passes = {sample.pass_name for sample in record.samples}
    pass_name = next((pass_name for pass_name in kind.headline if pass_name in passes), None)
    samples = [sample for sample in record.samples if sample.pass_name == pass_name]
    work = next(
        (work for work in _WORK_COUNTS if any(sample.counts.get(work) for sample in samples)), None
    )
    if pass_name is None or work is None:
        return []
    # A step without work, such as reading the answers back at the end, has no rate.
    working = [sample for sample in samples if sample.counts.get(work)]
    ranks = sorted({sample.rank for sample in working})[:MAX_SERIES]
    series = tuple(
        Curve(
            say("stragglers.rank", str(rank)) if len(ranks) > 1 else work,
            _rate_points([s for s in working if s.rank == rank], work),
        )
        for rank in ranks
    )
    title = say("chart.rate.train") if pass_name in kind.stepped else say("chart.rate", pass_name)
    titles = (title, say("chart.rate_x"), say("chart.rate_y", work))
    core = record.metrics.get(table_layout.core)
    comparable = (
        core is not None
        and core.unit == f"{work}/s"
        and len(ranks) == 1
        and pass_name == kind.headline[0]
    )
    level = _drawable_number(core.value) if core is not None and comparable else None
    return _chart_if_any(LineChart(*titles, series, level, table_layout.core))


def _rate_points(samples: list[Sample], work: str) -> tuple[ChartPoint, ...]:
    """Return points of (middle of a step in s, work per second of it); a step that took no time is
    a gap. If there are more than MAX_POINTS, neighbouring steps are pooled, as total work over
    total time.

    `samples` are the working steps of one rank, `work` the name of the count ("tokens" or
    "samples").
    """
    size = -(-len(samples) // MAX_POINTS)
    pairs: list[tuple[Any, Any]] = []
    for first in range(0, len(samples), size):
        bin_ = samples[first : first + size]
        time_s = sum(sample.end_s - sample.start_s for sample in bin_)
        work_done = finite_or_none(sum(sample.counts.get(work, 0) for sample in bin_))
        rate = work_done / time_s if work_done is not None and time_s > 0 else None
        pairs.append(((bin_[0].start_s + bin_[-1].end_s) / 2, rate))
    return _drawable_points(pairs)


def _drawable_points(pairs: Iterable[tuple[Any, Any]]) -> tuple[ChartPoint, ...]:
    """Return the points that can be drawn: a pair whose x cannot be drawn is dropped, and a y that
    cannot becomes None, a gap.
    """
    drawable = ((_drawable_number(x), _drawable_number(y)) for x, y in pairs)
    return tuple((x, y) for x, y in drawable if x is not None)


def _drawable_number(value: Any) -> float | None:
    """Return a finite number from 0 to below 1e15 as a float; None for anything else."""
    number = finite_or_none(value)
    return number if number is not None and 0 <= number < _MAX_DRAWN else None


def _telemetry_charts(record: Record, say: PageWords) -> list[PageElement]:
    """Return a chart of power (W) and one of SM clock (MHz) over time in s, with a line for each of
    the first MAX_SERIES devices that have readings; a chart without any is left out. Lines are
    named by host and device if there are several hosts.
    """
    several = len({series_of_device.host for series_of_device in record.telemetry}) > 1
    out: list[PageElement] = []
    for column, unit in _TELEMETRY:
        curves = []
        for index, device in enumerate(record.telemetry):
            points = _drawable_points(
                zip(device.columns.t_s, getattr(device.columns, column), strict=False)
            )
            name = f"{device.host} {device.device}" if several else say("chart.device", str(index))
            if any(y is not None for _, y in points):
                curves.append(Curve(name, _thin_points(points)))
        series = tuple(curves[:MAX_SERIES])
        out += _chart_if_any(LineChart(say(f"chart.{column}"), say("chart.time_x"), unit, series))
    return out


def _thin_points(points: tuple[ChartPoint, ...]) -> tuple[ChartPoint, ...]:
    """Reduce a line of more than MAX_POINTS points to about as many: the lowest and the highest of
    each stretch, because a mean would hide dips. A stretch without values stays a gap; a shorter
    line is unchanged.
    """
    size = -(-len(points) // (MAX_POINTS // 2))
    if size <= 2:
        return points
    out: list[ChartPoint] = []
    for first in range(0, len(points), size):
        values = [(y, t) for t, y in points[first : first + size] if y is not None]
        if not values:
            out.append((points[first][0], None))
            continue
        (low, low_t), (high, high_t) = min(values), max(values)
        out += sorted({(low_t, low), (high_t, high)})
    return tuple(out)


MAX_ROWS = 10  # of a bar chart; the table beside it has all
_CUT_AXIS_RANGE = 0.1  # closer values (as a share of the highest) look equal on an axis from 0
_HEADROOM = 1.02  # the axis ends this much above the highest number


@dataclass(frozen=True)
class _ChartMetric:
    """A metric of a bar chart, from which a panel is made: its `title`, `number_format` (such as
    "percent") and `unit`, the function `get_estimate` that gets its estimate from an `OverviewRow`
    (None if unknown), and `references`, published values to draw as lines. `hint`, such as "lower
    is better", stands in the place of a missing unit.
    """

    title: str
    number_format: str
    unit: str
    get_estimate: Callable[[OverviewRow], Estimate | None]
    references: tuple[ReferenceLine, ...] = ()
    hint: str = ""


def build_case_charts(runs: list[NumberedRun], case_name: str, say: PageWords) -> list[PageElement]:
    """Return a bar chart for each unit of rate among the runs of a case, with panels for rate per
    device, MFU and energy per token; only HTML draws it.

    A row is a group of repeated runs, at most MAX_ROWS of them (`_choose_rows`); groups without a
    rate and panels without a value are left out, so the list may be empty.
    """
    rated = [(group, group.row.rate) for group in group_compared_runs(runs)]
    drawable = [group for group, rate in rated if rate and _drawable_number(rate.value) is not None]
    accelerators = list(dict.fromkeys(group.row.accelerator for group in drawable))
    out: list[PageElement] = []
    for unit in dict.fromkeys(group.unit for group in drawable):
        rows = _choose_rows([group for group in drawable if group.unit == unit])
        panels = [
            panel
            for metric in _panel_metrics(runs, unit, say)
            if (panel := _build_panel(metric, rows, say)) is not None
        ]
        with_scope = len({format_scope(group.row.first_record, say) for group in rows}) > 1
        labels = tuple(_row_label(group, accelerators, with_scope, say) for group in rows)
        out.append(BarChart(say("bars.title", case_name), labels, tuple(panels)))
    return out


def _choose_rows(groups: list[ComparedRuns]) -> list[ComparedRuns]:
    """Return at most MAX_ROWS groups in their order; the first of every accelerator, engine and
    precision is preferred to further ones.
    """
    seen = Counter[tuple[str, str, str]]()
    ranks = []
    for number, group in enumerate(groups):
        first_record = group.row.first_record
        kind = (group.row.accelerator, first_record.engine.name, first_record.case.precision)
        ranks.append((seen[kind] > 0, number))
        seen[kind] += 1
    return [groups[number] for number in sorted(number for _, number in sorted(ranks)[:MAX_ROWS])]


def _row_label(
    group: ComparedRuns, accelerators: list[str], with_scope: bool, say: PageWords
) -> BarRow:
    """Return the label of a chart row: accelerator, number of devices and engine; below them
    precision, division, the settings that are not the case's own, the scope (how much of the
    question was run: whole, or a window with its sizes) if `with_scope`, and, if its rate
    is not proven, the status. Such a row is marked not `valid`, and so drawn hollow.

    `accelerators` lists all of the chart; the position in it is the colour.
    """
    first_record = group.row.first_record
    parts = [
        first_record.case.precision,
        first_record.case.division,
        format_tuned_settings(first_record),
        format_scope(first_record, say) if with_scope else "",
    ]
    parts += [] if group.row.is_proven else [say(group.row.status)]
    text = f"{group.format_name(say)} · {format_engine(group.row.records, say)}"
    return BarRow(
        text,
        " · ".join(part for part in parts if part),
        accelerators.index(group.row.accelerator),
        group.row.is_proven,
    )


def _panel_metrics(runs: list[NumberedRun], unit: str, say: PageWords) -> tuple[_ChartMetric, ...]:
    """Return the metrics of the panels: rate per device in this unit, MFU, and energy per token.

    Published values are reference lines of rate (same unit only) and MFU, and only if the runs are
    of size full; energy has a hint that lower is better in place of its unit.
    """
    references = find_published_rows(runs) if runs[0].record.case.size == "full" else []
    in_samples = runs[0].record.task.rates_in_samples
    published_rates = [
        (published_row, published_row.device_rate(in_samples)) for published_row in references
    ]
    rate_references = [
        (published_row, published_rate[0], "published")
        for published_row, published_rate in published_rates
        if published_rate is not None and published_rate[1] == unit
    ]
    mfu_references = [
        (published_row, value, convention)
        for published_row in references
        for name, convention in MFU_CONVENTIONS.items()
        if (value := finite_or_none(published_row.values.get(name))) is not None
    ]
    return (
        _ChartMetric(
            say("side.throughput"),
            "number",
            words.translate_unit(unit, say.lang),
            lambda row: row.rate,
            _best_references(rate_references, "number", say),
        ),
        _ChartMetric(
            say("side.mfu"),
            "percent",
            "",
            lambda row: row.mfu,
            _best_references(mfu_references, "percent", say),
        ),
        _ChartMetric(
            say("side.joules"), "number", "", lambda row: row.energy, hint=say("bars.lower")
        ),
    )


def _best_references(
    candidates: list[tuple[PublishedRow, float, str]], number_format: str, say: PageWords
) -> tuple[ReferenceLine, ...]:
    """Return a reference line for the highest published value of each accelerator and convention;
    values that cannot be drawn (not above 0, or from 1e15 on) are dropped.

    Candidates are (published row, value, convention); a line's mark is the row's footnote number,
    its text the line in the legend.
    """
    by_kind: dict[tuple[str, str], tuple[PublishedRow, float]] = {}
    for row, value, convention in candidates:
        key = row.configuration[0], convention
        if 0 < value < _MAX_DRAWN and (key not in by_kind or value > by_kind[key][1]):
            by_kind[key] = row, value
    out = []
    for (kind, convention), (row, value) in by_kind.items():
        mark = str(row.number)
        out.append(
            ReferenceLine(
                value,
                mark,
                say(f"bars.{convention}", mark, format_number(number_format, value), kind),
            )
        )
    return tuple(out)


def _build_panel(metric: _ChartMetric, groups: list[ComparedRuns], say: PageWords) -> Panel | None:
    """Return the panel of a metric with a bar for each group, in their order, or None if no group
    has a value. If the axis does not begin at 0, its note says so, with the difference between the
    lowest and the highest value.
    """
    bars = tuple(_build_bar(metric, group, say) for group in groups)
    values = [bar.value for bar in bars if bar.value is not None]
    if not values:
        return None
    ends = [end for bar in bars if bar.value is not None for end in bar.interval or (bar.value,)]
    low, high = _axis_range(values, [*ends, *(reference.value for reference in metric.references)])
    difference = format_number("percent", 1 - min(values) / max(values)) if low else ""
    note = say("bars.cut", format_number(metric.number_format, low), difference) if low else ""
    return Panel(metric.title, metric.unit or metric.hint, bars, metric.references, low, high, note)


def _axis_range(values: list[float], ends: list[float]) -> tuple[float, float]:
    """Return both ends of an axis: from 0, or, if there are several values and no number is 10 % or
    more below the highest value, from a round number below the lowest; it ends 2 % above the
    highest number.

    `ends` are further numbers that must be visible: ends of intervals and references.
    """
    high = max(*values, *ends) * _HEADROOM or 1.0
    lowest = min(*values, *ends)
    if len(values) < 2 or lowest <= max(values) * (1 - _CUT_AXIS_RANGE):
        return 0.0, high
    step = 10.0 ** math.floor(math.log10(high - lowest))
    return max(0.0, math.floor((lowest - (high - lowest)) / step) * step), high


def _build_bar(metric: _ChartMetric, group: ComparedRuns, say: PageWords) -> ChartBar:
    """Return the bar of a group in a panel, with number, tooltip and interval; value None, shown as
    UNKNOWN, if the estimate is unknown or cannot be drawn. An interval with an end below 0 or from
    1e15 on is dropped.
    """
    estimate = metric.get_estimate(group.row)
    value = None if estimate is None else _drawable_number(estimate.value)
    if estimate is None or value is None:
        return ChartBar(None, UNKNOWN, say("bars.unknown", metric.title))
    interval = estimate.interval
    can_draw = interval is not None and all(0 <= end < _MAX_DRAWN for end in interval)
    drawn_interval = interval if can_draw else None
    shown = format_number(metric.number_format, value)
    text = say("bars.of", metric.title, shown, metric.unit).rstrip()
    interval_text = (
        ""
        if drawn_interval is None
        else say("bars.interval", format_interval(drawn_interval, metric.number_format))
    )
    return ChartBar(value, shown, text + interval_text, drawn_interval)
