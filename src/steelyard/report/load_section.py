"""Build the section of a case that shows its loads: runs that differ in the load alone, as curves
and as a table.

The first chart has throughput per device against interactivity in steps, the others times against
the load. Only points whose rate is proven count for the steps.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from steelyard import words
from steelyard.metrics import standing, stats
from steelyard.metrics.estimates import Estimate
from steelyard.metrics.passes import count_devices
from steelyard.record.record import Record
from steelyard.report.case_tables import (
    ComparedRuns,
    format_shared_field,
    group_compared_runs,
)
from steelyard.report.columns import TableField, load_table_layout
from steelyard.report.document import (
    Cell,
    ChartLimit,
    ColumnSpec,
    Heading,
    Link,
    PageElement,
    Paragraph,
    PlottedPoint,
    PointChart,
    PointSeries,
    Table,
    build_table,
)
from steelyard.report.loads import (
    find_load_position,
    format_load,
    has_load,
    make_curve_key,
    make_load_sort_key,
    make_series_key,
)
from steelyard.report.marks import format_engine
from steelyard.report.numbered_runs import (
    STATUS_TONE,
    NumberedRun,
    average_metric,
    format_metric,
    format_parallel_plan,
    format_reason_codes,
    format_tuned_settings,
    make_estimate_cell,
)
from steelyard.report.numbers import UNKNOWN, format_count, format_number, format_times
from steelyard.report.point_geometry import find_frontier
from steelyard.report.unknown_times import list_unknown_time_notes
from steelyard.words import PageWords

MAX_SERIES = 8
MAX_SERIES_WITH_P99 = 2  # with more engines a chart of three percentiles each cannot be read
LoadMode = Literal["concurrency", "rate"]
TimeName = Literal["ttft", "tpot"]
_PERCENTILES: tuple[tuple[str, Literal[0, 1, 2]], ...] = (("p50", 0), ("p90", 1), ("p99", 2))


@dataclass(frozen=True)
class LoadPoint:
    """The runs of one series under one load (`group`; several are repeats). `rate` is output tokens
    per second of one device, `interactivity` output tokens per second of one user, both means with
    intervals, None if unknown. Properties: `record` (the first), `load` (its name), `is_solid`
    (its rate is proven).
    """

    group: ComparedRuns
    rate: Estimate | None
    interactivity: Estimate | None

    @property
    def record(self) -> Record:
        """Return the first record of the point, which says what was asked."""
        return self.group.row.first_record

    @property
    def load(self) -> str:
        """Return the short name of the point's load, such as C16."""
        return format_load(self.record)

    @property
    def is_solid(self) -> bool:
        """Return whether the point counts: its runs prove their rate."""
        return self.group.row.is_proven

    def get_mean(self, name: str) -> float | None:
        """Return the mean of a metric over the runs of this point; None if it is unknown."""
        mean = average_metric(self.group.averaged, name)
        return None if mean is None else mean.value


@dataclass(frozen=True)
class LoadSeries:
    """The points of one engine, plan and settings on one accelerator, in the order of their loads.
    `name` is what tells it from the other series of its curve.
    """

    name: str
    points: tuple[LoadPoint, ...]


@dataclass(frozen=True)
class LoadCurve:
    """Series that differ in nothing of the question but the load, at least one of them under two
    loads; `title` says what they have in common.
    """

    title: str
    series: tuple[LoadSeries, ...]

    @property
    def points(self) -> list[LoadPoint]:
        """Return the points of all series."""
        return [point for series in self.series for point in series.points]


def build_load_section(runs: list[NumberedRun], level: int, say: PageWords) -> list[PageElement]:
    """Return the section of a case that shows its loads, under a heading of this level: for each
    curve its charts and its table, then a note; empty where no two runs differ in the load alone.
    """
    curves = find_load_curves(runs, say)
    out: list[PageElement] = []
    for curve in curves:
        out += [Paragraph(curve.title, "strong")] if len(curves) > 1 else []
        out += [*_curve_chart(curve, say), *_time_charts(curve, say), _points_table(curve, say)]
    return [Heading(level, say("load")), *out, Paragraph(say("load.note"), "muted")] if out else []


def find_load_curves(runs: list[NumberedRun], say: PageWords) -> list[LoadCurve]:
    """Return the curves that the runs of a case form: finished runs that differ in the load alone,
    with a series for each engine, plan and settings. A curve has a series with two loads or more.
    """
    groups = [
        group
        for group in group_compared_runs([run for run in runs if has_load(run.record)])
        if group.row.status != "failed"
    ]
    out = []
    for members in stats.group_by(
        groups, lambda one: make_curve_key(one.row.first_record)
    ).values():
        by_series = stats.group_by(members, lambda one: make_series_key(one.row.first_record))
        if max(_count_loads(one) for one in by_series.values()) < 2:
            continue
        names = _name_series([one[0] for one in by_series.values()], say)
        series = [
            LoadSeries(name, tuple(_make_point(group) for group in _sort_by_load(one)))
            for name, one in zip(names, by_series.values(), strict=True)
        ]
        case = members[0].row.first_record.case
        out.append(LoadCurve(f"{case.precision} · {case.division}", tuple(series[:MAX_SERIES])))
    return out


def _count_loads(groups: Iterable[ComparedRuns]) -> int:
    """Return under how many different loads these runs ran."""
    return len({format_load(group.row.first_record) for group in groups})


def _sort_by_load(groups: Iterable[ComparedRuns]) -> list[ComparedRuns]:
    """Return the groups by growing load."""
    return sorted(groups, key=lambda group: make_load_sort_key(group.row.first_record))


def _name_series(firsts: Sequence[ComparedRuns], say: PageWords) -> list[str]:
    """Return a name for each series, from its first group: its engine, and of accelerator, plan and
    changed settings what is not the same in all series.
    """
    texts = [
        (
            format_engine(group.row.records, say),
            group.format_name(say),
            format_parallel_plan(group.row.first_record),
            format_tuned_settings(group.row.first_record),
        )
        for group in firsts
    ]
    differing = [index for index in range(4) if len({parts[index] for parts in texts}) > 1]
    shown = sorted({0, *differing})
    return [" · ".join(filter(None, (parts[index] for index in shown))) for parts in texts]


def _make_point(group: ComparedRuns) -> LoadPoint:
    """Return the point of some repeats, with its rate per device and its interactivity."""
    devices = count_devices(group.row.first_record)

    def average(name: str, factor: float) -> Estimate | None:
        """Return the mean of a metric times a factor, with its interval; None if unknown."""

        def estimate(record: Record) -> Estimate | None:
            """Return the metric of one record with its interval."""
            stored = record.metrics.get(name)
            if stored is None or stored.value is None:
                return None
            return Estimate(stored.value, stored.interval).scale(factor)

        return standing.average_shown(group.row.records, estimate)

    layout = load_table_layout(group.row.first_record.task.kind_row)
    return LoadPoint(group, average(layout.whole, 1 / devices), average("interactivity", 1.0))


def _curve_chart(curve: LoadCurve, say: PageWords) -> list[PageElement]:
    """Return the chart of throughput per device against interactivity, in a list; empty if no point
    has both. The limit on the time per output token is drawn as that on interactivity.
    """
    series = []
    for index, one in enumerate(curve.series):
        points = tuple(
            PlottedPoint(x, y, point.load, _describe_point(one, point, x, y, say), point.is_solid)
            for point in one.points
            if (x := _drawable(point.interactivity)) and (y := _drawable(point.rate))
        )
        if points:
            series.append(PointSeries(one.name, points, "steps", index))
    if not series:
        return []
    limit_s = _find_limit(curve, "tpot")
    limits = () if limit_s is None else (_interactivity_limit(limit_s, say),)
    titles = (say("load.curve"), say("load.curve.x"), say("load.curve.y"))
    return [PointChart(*titles, _mark_hollow(series, say), limits)]


def _drawable(estimate: Estimate | None) -> float | None:
    """Return the value of an estimate if it can be drawn: above 0 and below 1e15."""
    return estimate.value if estimate is not None and 0 < estimate.value < 1e15 else None


def _mark_hollow(series: list[PointSeries], say: PageWords) -> tuple[PointSeries, ...]:
    """Return the series, and behind them one without points that explains hollow ones in the legend
    if there are any.
    """
    is_any_hollow = any(not point.solid for one in series for point in one.points)
    return (*series, PointSeries(say("load.hollow"), ())) if is_any_hollow else tuple(series)


def _describe_point(
    series: LoadSeries, point: LoadPoint, x: float, y: float, say: PageWords
) -> str:
    """Return the tooltip of a point of the first chart: series, load, both numbers, and its status
    if it does not count.
    """
    text = say(
        "load.point",
        series.name,
        point.load,
        format_number("number", y),
        format_number("number", x),
    )
    return _append_status(text, point, say)


def _append_status(text: str, point: LoadPoint, say: PageWords) -> str:
    """Return a text with the status of a point behind it, if it does not count."""
    status = say(point.group.row.status)
    return text if point.is_solid else say("load.point.status", text, status)


def _find_limit(curve: LoadCurve, name: TimeName) -> float | None:
    """Return the limit in seconds on a time that all records of a curve state alike; None if they
    state none or different ones.
    """
    slos = [record.case.slo for point in curve.points for record in point.group.row.records]
    limits = {None if slo is None else getattr(slo, f"{name}_s") for slo in slos}
    return limits.pop() if len(limits) == 1 else None


def _interactivity_limit(limit_s: float, say: PageWords) -> ChartLimit:
    """Return the limit on the time per output token as one on interactivity."""
    text = say(
        "load.slo.interactivity", format_times([limit_s]), format_number("number", 1 / limit_s)
    )
    return ChartLimit("x", 1 / limit_s, text)


def _time_charts(curve: LoadCurve, say: PageWords) -> list[PageElement]:
    """Return charts of the time to the first token and of the time per output token against the
    load, for closed and for open loops apart; each only if two of its loads have a value.
    """
    modes: tuple[LoadMode, ...] = ("concurrency", "rate")
    names: tuple[TimeName, ...] = ("ttft", "tpot")
    return [
        chart for mode in modes for name in names for chart in _time_chart(curve, mode, name, say)
    ]


def _time_chart(
    curve: LoadCurve, mode: LoadMode, name: TimeName, say: PageWords
) -> list[PageElement]:
    """Return the chart of a time's percentiles against the load of one mode, on logarithmic axes,
    with its limit as a line, in a list; empty if fewer than two loads have a value.
    """
    with_p99 = len(curve.series) <= MAX_SERIES_WITH_P99
    drawn = [
        (index, one, percentile, dashes, _list_times(one, mode, f"{name}_{percentile}"))
        for index, one in enumerate(curve.series)
        for percentile, dashes in _PERCENTILES
        if percentile != "p99" or with_p99
    ]
    times_s = [time_s for *_, points in drawn for _, _, time_s in points]
    if len({x for *_, points in drawn for _, x, _ in points}) < 2:
        return []
    limit_s = _find_limit(curve, name)
    in_seconds = max([*times_s, *([] if limit_s is None else [limit_s])]) >= 10.0
    factor, unit = (1.0, "s") if in_seconds else (1000.0, "ms")
    series = []
    for index, one, percentile, dashes, points in drawn:
        title = say("load.series", one.name, percentile) if len(curve.series) > 1 else percentile
        plotted = tuple(
            PlottedPoint(
                x,
                time_s * factor,
                "",  # the ticks of the axis name the loads
                _append_status(
                    say(
                        "load.point.time", one.name, point.load, percentile, format_times([time_s])
                    ),
                    point,
                    say,
                ),
                point.is_solid,
            )
            for point, x, time_s in points
        )
        if plotted:
            series.append(PointSeries(title, plotted, "straight", index, dashes))
    limits: tuple[ChartLimit, ...] = ()
    if limit_s is not None:
        text = say(f"load.slo.{name}", format_times([limit_s]))
        limits = (ChartLimit("y", limit_s * factor, text),)
    axis = say(f"load.{mode}")
    titles = (say(f"load.{name}", axis), axis, words.translate_unit(unit, say.lang))
    return [PointChart(*titles, _mark_hollow(series, say), limits, log_x=True, log_y=True)]


def _list_times(
    series: LoadSeries, mode: LoadMode, metric_name: str
) -> list[tuple[LoadPoint, float, float]]:
    """Return (point, position of its load on the axis, seconds) for the points of a series whose
    load is of this mode and that have the metric.
    """
    out = []
    for point in series.points:
        load, position = point.record.question.load, find_load_position(point.record)
        time_s = point.get_mean(metric_name)
        if load is not None and load.mode == mode and position and time_s and time_s > 0:
            out.append((point, position, time_s))
    return out


def _points_table(curve: LoadCurve, say: PageWords) -> Table:
    """Return the table of a curve's points: engine (if there are several), load, rate per device
    and interactivity with their intervals, times, goodput, requests of the window, whether it is on
    the steps, and status.
    """
    rows = [(series, point) for series in curve.series for point in series.points]
    on_steps = _find_points_on_steps(curve)
    fields = [
        field for field in load_table_layout(rows[0][1].record.task.kind_row).shared if field.times
    ]
    columns: list[ColumnSpec[tuple[LoadSeries, LoadPoint]]] = [
        ColumnSpec(say("load.name"), lambda row: _load_cell(row[1])),
        ColumnSpec(
            say("load.rate_column"),
            lambda row: make_estimate_cell(
                row[1].rate, tone="strong" if row[1].is_solid else "muted"
            ),
            say("unit.output tokens/s"),
            right=True,
            strong=True,
        ),
        ColumnSpec(
            say("load.interactivity"),
            lambda row: make_estimate_cell(row[1].interactivity),
            words.translate_unit("tokens/s", say.lang),
            right=True,
        ),
        *(_time_column(field, say) for field in fields),
        ColumnSpec(
            say("load.goodput"),
            lambda row: format_metric("goodput", average_metric(row[1].group.averaged, "goodput")),
            words.translate_unit("requests/s", say.lang),
            right=True,
            priority=2,
            optional=True,
        ),
        ColumnSpec(
            say("load.requests"),
            lambda row: _format_requests(row[1].get_mean("window_requests")),
            say("load.requests.sub"),
            right=True,
            priority=3,
            optional=True,
        ),
        ColumnSpec(
            say("load.frontier"),
            lambda row: say(f"load.frontier.{'yes' if id(row[1]) in on_steps else 'no'}"),
            priority=3,
        ),
        ColumnSpec(say("load.status"), lambda row: _status_cell(row[1], say)),
    ]
    if len(curve.series) > 1:
        columns.insert(0, ColumnSpec(say("load.engine"), lambda row: row[0].name))
    records = [record for point in curve.points for record in point.group.row.records]
    return build_table(columns, rows, list_unknown_time_notes(records, say))


def _format_requests(count: float | None) -> str:
    """Return a mean number of requests, rounded; UNKNOWN for None."""
    return UNKNOWN if count is None else format_count(round(count))


def _find_points_on_steps(curve: LoadCurve) -> set[int]:
    """Return the `id`s of the points that make the steps of their series."""
    out = set()
    for series in curve.series:
        plotted = {
            id(point): PlottedPoint(x, y, point.load, "", point.is_solid)
            for point in series.points
            if (x := _drawable(point.interactivity)) and (y := _drawable(point.rate))
        }
        steps = {id(point) for point in find_frontier(plotted.values())}
        out |= {number for number, point in plotted.items() if id(point) in steps}
    return out


def _load_cell(point: LoadPoint) -> Cell:
    """Return the load of a point, with the numbers of its runs below, which link to them."""
    links = tuple(Link(run.label, run.anchor) for run in point.group.runs)
    return Cell(point.load, point.group.labels, links=links)


def _time_column(field: TableField, say: PageWords) -> ColumnSpec[tuple[LoadSeries, LoadPoint]]:
    """Return the column of one time's percentiles, with the unit in each cell."""
    return ColumnSpec(
        say(f"{field.title}.short"),
        lambda row: format_shared_field(field, row[1].group.averaged),
        say("column.percentiles"),
        right=True,
    )


def _status_cell(point: LoadPoint, say: PageWords) -> Cell:
    """Return the status of a point's runs as one result, with the reason codes of those that do not
    count below.
    """
    row = point.group.row
    codes = format_reason_codes(standing.select_not_proven(row.records), say)
    return Cell(say(row.status), codes, STATUS_TONE[row.status])
