"""The history of questions as a page: a table and a chart for each trend, and the first bad record of it."""

from steelyard.metrics.history import Bad, History, Point, Trend
from steelyard.metrics.ratio import Ratio
from steelyard.metrics.table import row as metric_row
from steelyard.report.compare import EMPTY, estimate
from steelyard.report.document import (
    Block,
    Cell,
    Column,
    Curve,
    Heading,
    Lang,
    Lines,
    Page,
    Paragraph,
    Priority,
    Table,
    TableRow,
)
from steelyard.report.numbers import UNKNOWN, counted, formed, spelled
from steelyard.report.runs import STATUS_TONE
from steelyard.words import Words

REVISION = 12  # characters of one
_PRIORITY: dict[str, Priority] = {
    **dict.fromkeys(("when", "rate", "before", "status"), 1),
    **dict.fromkeys(("runs", "revision"), 2),
    **dict.fromkeys(("first", "quality"), 3),
}


def page(found: History, lang: Lang = "en") -> Page:
    say = Words(lang)
    blocks: list[Block] = [Heading(1, say("history"))]
    for trend in found.trends:
        blocks += _trend(trend, say)
    if not found.trends:
        blocks.append(Paragraph(say("history.none"), "bad"))
    if found.wrong:
        heads = (Column(say("history.record")), Column(say("history.why")))
        rows = (TableRow((Cell(str(one.path)), Cell(one.entry.wrong or UNKNOWN))) for one in found.wrong)
        blocks += [Heading(2, say("history.wrong")), Table(heads, tuple(rows))]
    note = Paragraph(say("history.note", formed("percent", found.threshold)), "muted")
    return Page(say("history"), lang, (*blocks, note))


def _trend(trend: Trend, say: Words) -> list[Block]:
    head = trend.head
    parts = (head.name, head.size, head.division, head.precision, head.engine, head.plan, head.scope)
    title = " · ".join([*parts, ", ".join(head.devices) or UNKNOWN])
    told = say("history.good") if trend.bad is None else bad(trend.bad, say)
    return [
        Heading(2, title),
        Paragraph(told, "plain" if trend.bad is None else "bad"),
        _table(trend, say),
        *_chart(trend, say),
    ]


def bad(one: Bad, say: Words) -> str:
    """What is wrong with the first bad record."""
    entry = one.record.entry
    if one.ratio is None or one.best is None:
        why = say("history.status.bad", say(entry.status), say("comma").join(entry.codes) or UNKNOWN)
    else:
        how = say("history.significant" if one.ratio.verdict == "significant" else "history.apart")
        why = say("history.slower", formed("number", one.ratio.value), one.best.entry.id[:8], how)
    return say("history.bad", entry.id[:8], str(one.record.path), why)


def _table(trend: Trend, say: Words) -> Table:
    right = ("runs", "rate", "first", "before", "quality")
    names = ("when", "revision", "runs", "rate", "first", "before", "quality", "status")
    units = {"rate": trend.unit, "quality": trend.head.quality}
    heads = (
        Column(
            say(f"history.{name}"), units.get(name, ""), "right" if name in right else "left", name == "rate", _PRIORITY[name]
        )
        for name in names
    )
    return Table(tuple(heads), tuple(_row(point, say) for point in trend.points))


def _row(point: Point, say: Words) -> TableRow:
    first = point.runs[0].entry
    statuses = dict.fromkeys(one.entry.status for one in point.runs)
    worst = next((status for status in statuses if status != "valid"), "valid")
    codes = dict.fromkeys(code for one in point.runs for code in one.entry.codes)
    revision = UNKNOWN if first.revision is None else first.revision[:REVISION]
    cells = (
        Cell(first.created.partition(".")[0].replace("T", " "), first.id[:8]),
        Cell(revision, say("history.dirty") if first.dirty else spelled(first.version) if first.revision is None else ""),
        Cell(f"{counted(point.valid)} / {counted(len(point.runs))}"),
        EMPTY if point.rate is None else estimate(point.rate.value, point.rate.interval),
        _ratio(point.to_first),
        _ratio(point.to_before),
        Cell(formed(metric_row(first.quality).form, first.quality_value)),
        Cell(say(worst) if worst in STATUS_TONE else worst, ", ".join(codes), STATUS_TONE.get(worst, "plain")),
    )
    return TableRow(cells)


def _ratio(found: Ratio | None) -> Cell:
    return EMPTY if found is None else estimate(found.value, found.interval)


def _chart(trend: Trend, say: Words) -> list[Block]:
    """Drawn where there is a line to draw."""
    points = tuple((float(i), None if one.rate is None else one.rate.value) for i, one in enumerate(trend.points, 1))
    if sum(value is not None for _, value in points) < 2:
        return []
    return [Lines(say("history.rate"), say("history.x"), trend.unit, (Curve(trend.head.engine, points),))]
