"""Build the page of `steelyard history`: for each trend a table, a chart, and the first bad record.

Input is a `History` of metrics/: trends are records of one question, engine, plan and device over
time.
"""

from steelyard.metrics.history import Bad, History, Indexed, Point, Trend
from steelyard.metrics.table import row as metric_row
from steelyard.report.document import (
    Block,
    Cell,
    ColumnOf,
    Curve,
    Heading,
    Lang,
    Lines,
    Page,
    Paragraph,
    Table,
    table,
)
from steelyard.report.numbers import UNKNOWN, counted, formed, spelled
from steelyard.report.runs import STATUS_TONE, estimate
from steelyard.words import Words

REVISION = 12  # characters of a source revision that are shown


def page(found: History, lang: Lang = "en") -> Page:
    """Build the page of a history: each trend, then the files that are not records that verify,
    with the reason.
    """
    say = Words(lang)
    blocks: list[Block] = [Heading(1, say("history"))]
    for trend in found.trends:
        blocks += _trend(trend, say)
    if not found.trends:
        blocks.append(Paragraph(say("history.none"), "bad"))
    if found.wrong:
        columns: tuple[ColumnOf[Indexed], ...] = (
            ColumnOf(say("history.record"), lambda one: str(one.path)),
            ColumnOf(say("history.why"), lambda one: one.entry.wrong or UNKNOWN),
        )
        blocks += [Heading(2, say("history.wrong")), table(columns, found.wrong)]
    note = Paragraph(say("history.note", formed("percent", found.threshold)), "muted")
    return Page(say("history"), lang, (*blocks, note))


def _trend(trend: Trend, say: Words) -> list[Block]:
    """Return heading, verdict, table and chart of a trend."""
    head = trend.head
    parts = (
        head.name,
        head.size,
        head.division,
        head.precision,
        head.engine,
        head.plan,
        head.scope,
    )
    title = " · ".join([*parts, ", ".join(head.devices) or UNKNOWN])
    told = say("history.good") if trend.bad is None else bad(trend.bad, say)
    return [
        Heading(2, title),
        Paragraph(told, "plain" if trend.bad is None else "bad"),
        _table(trend, say),
        *_chart(trend, say),
    ]


def bad(one: Bad, say: Words) -> str:
    """Return a sentence that names the first bad record and why: its status with reason codes, or
    how much slower than the best before it.
    """
    entry = one.record.entry
    if one.ratio is None or one.best is None:
        why = say(
            "history.status.bad", say(entry.status), say("comma").join(entry.codes) or UNKNOWN
        )
    else:
        how = say("history.significant" if one.ratio.verdict == "significant" else "history.apart")
        why = say("history.slower", formed("number", one.ratio.value), one.best.entry.id[:8], how)
    return say("history.bad", entry.id[:8], str(one.record.path), why)


def _table(trend: Trend, say: Words) -> Table:
    """Return the table of a trend: one row per point (a run or consecutive repeats) with rate,
    ratios to the first and the previous point, quality and status.
    """

    def when(point: Point) -> Cell:
        """Return date and time of the point's first run, and its short id below."""
        entry = point.runs[0].entry
        return Cell(entry.created.partition(".")[0].replace("T", " "), entry.id[:8])

    def revision(point: Point) -> Cell:
        """Return the source revision of the point's first run; below, that it was modified, or the
        version if there is no revision.
        """
        entry = point.runs[0].entry
        named = UNKNOWN if entry.revision is None else entry.revision[:REVISION]
        version = spelled(entry.version) if entry.revision is None else ""
        return Cell(named, say("history.dirty") if entry.dirty else version)

    def quality(point: Point) -> str:
        """Return the quality of the point's first run."""
        entry = point.runs[0].entry
        return formed(metric_row(entry.quality).form, entry.quality_value)

    def status(point: Point) -> Cell:
        """Return the first status of the point's runs that is not valid, else valid, and all reason
        codes below.
        """
        statuses = dict.fromkeys(one.entry.status for one in point.runs)
        worst = next((status for status in statuses if status != "valid"), "valid")
        codes = dict.fromkeys(code for one in point.runs for code in one.entry.codes)
        word = say(worst) if worst in STATUS_TONE else worst
        return Cell(word, ", ".join(codes), STATUS_TONE.get(worst, "plain"))

    columns: tuple[ColumnOf[Point], ...] = (
        ColumnOf(say("history.when"), when),
        ColumnOf(say("history.revision"), revision, priority=2),
        ColumnOf(
            say("history.runs"),
            lambda point: f"{counted(point.valid)} / {counted(len(point.runs))}",
            right=True,
            priority=2,
        ),
        ColumnOf(
            say("history.rate"),
            lambda point: estimate(point.rate),
            trend.unit,
            right=True,
            strong=True,
        ),
        ColumnOf(
            say("history.first"), lambda point: estimate(point.to_first), right=True, priority=3
        ),
        ColumnOf(say("history.before"), lambda point: estimate(point.to_before), right=True),
        ColumnOf(say("history.quality"), quality, trend.head.quality, right=True, priority=3),
        ColumnOf(say("history.status"), status),
    )
    return table(columns, trend.points)


def _chart(trend: Trend, say: Words) -> list[Block]:
    """Return a chart of the rate by point in a list; empty if fewer than two points have a rate."""
    points = tuple(
        (float(i), None if one.rate is None else one.rate.value)
        for i, one in enumerate(trend.points, 1)
    )
    if sum(value is not None for _, value in points) < 2:
        return []
    return [
        Lines(
            say("history.rate"), say("history.x"), trend.unit, (Curve(trend.head.engine, points),)
        )
    ]
