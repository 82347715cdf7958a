"""Build the page of `steelyard history`: for each trend a table, a chart, and the first bad record.

Input is a `History` of metrics/: trends are records of one question, engine, plan and device over
time.
"""

from steelyard.metrics.metric_table import find_metric as metric_row
from steelyard.metrics.rate_history import (
    FirstBadRecord,
    IndexedRecord,
    RateHistory,
    Trend,
    TrendPoint,
)
from steelyard.report.document import (
    Cell,
    ColumnSpec,
    Curve,
    Heading,
    Lang,
    LineChart,
    Page,
    PageElement,
    Paragraph,
    Table,
    build_table,
)
from steelyard.report.marks import append_package, mark_engine
from steelyard.report.numbered_runs import STATUS_TONE, make_estimate_cell, make_ratio_cell
from steelyard.report.numbers import UNKNOWN, format_count, format_number, format_setting
from steelyard.words import PageWords

REVISION_CHARS = 12  # characters of a source revision that are shown


def build_history_page(history: RateHistory, lang: Lang = "en") -> Page:
    """Build the page of a history: each trend, or a sentence if there is none, then a table of the
    files that are no record or do not verify, with the reason, and a note with the threshold.
    """
    say = PageWords(lang)
    elements: list[PageElement] = [Heading(1, say("history"))]
    for trend in history.trends:
        elements += _trend_elements(trend, say)
    if not history.trends:
        elements.append(Paragraph(say("history.none"), "bad"))
    if history.not_verified:
        columns: tuple[ColumnSpec[IndexedRecord], ...] = (
            ColumnSpec(say("history.record"), lambda indexed: str(indexed.path)),
            ColumnSpec(say("history.why"), lambda indexed: indexed.entry.wrong or UNKNOWN),
        )
        elements += [Heading(2, say("history.wrong")), build_table(columns, history.not_verified)]
    note = Paragraph(say("history.note", format_number("percent", history.threshold)), "muted")
    return Page(say("history"), lang, (*elements, note))


def _trend_elements(trend: Trend, say: PageWords) -> list[PageElement]:
    """Return the elements of a trend: a heading of what its records have in common, the verdict (a
    sentence on its first bad record, in tone `bad`, or that there is none), the table, and the
    chart.
    """
    head = trend.first_entry
    engine = mark_engine(head.engine, trend.engine_mark, say)
    parts = (
        head.name,
        head.size,
        head.division,
        head.precision,
        engine,
        head.plan,
        say("whole") if head.scope == "full" else head.scope,
    )
    devices = append_package(", ".join(head.devices) or UNKNOWN, head.accelerator_package, say)
    title = " · ".join([*parts, devices])
    verdict = (
        say("history.good")
        if trend.first_bad is None
        else describe_bad_record(trend.first_bad, say)
    )
    return [
        Heading(2, title),
        Paragraph(verdict, "plain" if trend.first_bad is None else "bad"),
        _trend_table(trend, say),
        *_trend_chart(trend, say),
    ]


def describe_bad_record(bad_record: FirstBadRecord, say: PageWords) -> str:
    """Return a sentence that names the first bad record of a trend (short id, path) and why: its
    status with reason codes if it is not valid, or its ratio to the best before it, and whether
    that is significant.
    """
    entry = bad_record.record.entry
    if bad_record.ratio is None or bad_record.best is None:
        reason = say(
            "history.status.bad", say(entry.status), say("comma").join(entry.codes) or UNKNOWN
        )
    else:
        significance = say(
            "history.significant" if bad_record.ratio.verdict == "significant" else "history.apart"
        )
        reason = say(
            "history.slower",
            format_number("number", bad_record.ratio.value),
            bad_record.best.entry.id[:8],
            significance,
        )
    return say("history.bad", entry.id[:8], str(bad_record.record.path), reason)


def _trend_table(trend: Trend, say: PageWords) -> Table:
    """Return the table of a trend: one row per point (a run or consecutive repeats), oldest first,
    with date, revision, valid of all runs, rate, ratios to the first and the previous point,
    quality and status.

    Date, revision and quality are those of the point's first run.
    """

    def date_cell(point: TrendPoint) -> Cell:
        """Return date and time of the point's first run, and its short id below."""
        entry = point.runs[0].entry
        return Cell(entry.created.partition(".")[0].replace("T", " "), entry.id[:8])

    def revision_cell(point: TrendPoint) -> Cell:
        """Return the source revision of the point's first run; below, that it was modified, or the
        version if there is no revision.
        """
        entry = point.runs[0].entry
        short_revision = UNKNOWN if entry.revision is None else entry.revision[:REVISION_CHARS]
        version = format_setting(entry.version) if entry.revision is None else ""
        return Cell(short_revision, say("history.dirty") if entry.dirty else version)

    def format_quality(point: TrendPoint) -> str:
        """Return the quality of the point's first run."""
        entry = point.runs[0].entry
        return format_number(metric_row(entry.quality).form, entry.quality_value)

    def status_cell(point: TrendPoint) -> Cell:
        """Return the first status of the point's runs that is not valid, unless they prove a rate
        together, else valid, in its colour, and the reason codes of all its runs, each once, below.
        """
        not_counted = [run for run in point.runs if run not in point.counted]
        worst = next((run.entry.status for run in not_counted), "valid")
        codes = dict.fromkeys(code for run in point.runs for code in run.entry.codes)
        word = say(worst) if worst in STATUS_TONE else worst
        return Cell(word, ", ".join(codes), STATUS_TONE.get(worst, "plain"))

    columns: tuple[ColumnSpec[TrendPoint], ...] = (
        ColumnSpec(say("history.when"), date_cell),
        ColumnSpec(say("history.revision"), revision_cell, priority=2),
        ColumnSpec(
            say("history.runs"),
            lambda point: f"{format_count(len(point.counted))} / {format_count(len(point.runs))}",
            right=True,
            priority=2,
        ),
        ColumnSpec(
            say("history.rate"),
            lambda point: make_estimate_cell(point.rate),
            trend.unit,
            right=True,
            strong=True,
        ),
        ColumnSpec(
            say("history.first"),
            lambda point: make_ratio_cell(point.to_first, say),
            right=True,
            priority=3,
        ),
        ColumnSpec(
            say("history.before"), lambda point: make_ratio_cell(point.to_previous, say), right=True
        ),
        ColumnSpec(
            say("history.quality"),
            format_quality,
            trend.first_entry.quality,
            right=True,
            priority=3,
        ),
        ColumnSpec(say("history.status"), status_cell),
    )
    return build_table(columns, trend.points)


def _trend_chart(trend: Trend, say: PageWords) -> list[PageElement]:
    """Return a chart of the rate by number of the point (from 1) in a list, with gaps where a point
    has no rate; empty if fewer than two points have one.
    """
    points = tuple(
        (float(i), None if point.rate is None else point.rate.value)
        for i, point in enumerate(trend.points, 1)
    )
    if sum(value is not None for _, value in points) < 2:
        return []
    return [
        LineChart(
            say("history.rate"),
            say("history.x"),
            trend.unit,
            (Curve(trend.first_entry.engine, points),),
        )
    ]
