"""Repeats: a table for each group of runs that were asked the same, with a row for each headline metric."""

from steelyard.metrics import repeats
from steelyard.metrics.repeats import RATE, Repeats, Spread
from steelyard.metrics.runs import kinds
from steelyard.metrics.table import row as metric_row
from steelyard.record.record import Record
from steelyard.report.document import Block, Cell, Column, Heading, Lang, Page, Paragraph, Priority, Table, TableRow
from steelyard.report.numbers import UNKNOWN, counted, formed
from steelyard.report.runs import Run, by_case, labels, scope
from steelyard.report.setting import parallel
from steelyard.words import Words

_COLUMNS = ("metric", "runs", "mean", "interval", "source", "deviation", "lowest", "highest")
_TEXT = ("metric", "source")
_PRIORITY: dict[str, Priority] = {
    **dict.fromkeys(("metric", "mean", "interval"), 1),
    **dict.fromkeys(("runs", "deviation"), 2),
    **dict.fromkeys(("source", "lowest", "highest"), 3),
}


def section(runs: list[Run], level: int, say: Words) -> list[Block]:
    """The section of a case on a page; nothing where every run was asked something else."""
    out: list[Block] = []
    for group, members in _grouped(runs):
        out += [Paragraph(f"{labels(members, say)}: {_title(group, say)}", "strong"), *_blocks(group, members, say)]
    return [Heading(level, say("repeats")), *out, Paragraph(say("repeats.note"), "muted")] if out else []


def page(records: list[Record], lang: Lang = "en") -> Page | None:
    """What the command line prints after repeated runs; None where there is none."""
    say = Words(lang)
    out: list[Block] = []
    for case, runs in by_case(records, lang).items():
        for group, members in _grouped(runs):
            title = " · ".join([*case, _title(group, say)])
            out += [Paragraph(f"{say('repeats')}: {title}", "strong"), *_blocks(group, members, say)]
    return Page("", lang, (*out, Paragraph(say("repeats.note"), "muted"))) if out else None


def _grouped(runs: list[Run]) -> list[tuple[Repeats, list[Run]]]:
    found = repeats.groups(run.record for run in runs)
    return [(group, [run for run in runs if any(run.record is one for one in group.records)]) for group in found]


def _title(group: Repeats, say: Words) -> str:
    """What the runs of a group have in common."""
    record = group.records[0]
    places = [f"{record.plan.config} {parallel(record)}"] if record.plan.world > 1 else []
    parts = [record.engine.name, record.case.precision, record.case.division, scope(record, say), *places]
    return " · ".join([*parts, ", ".join(kinds(record)) or UNKNOWN])


def _blocks(group: Repeats, members: list[Run], say: Words) -> list[Block]:
    heads = [
        Column(say(f"repeats.{name}"), "", "left" if name in _TEXT else "right", name == "mean", _PRIORITY[name])
        for name in _COLUMNS
    ]
    table = Table(tuple(heads), tuple(_row(one, group, say) for one in group.metrics))
    return [*([table] if group.metrics else []), *_not_valid(members, say)]


def _row(one: Spread, group: Repeats, say: Words) -> TableRow:
    form = metric_row(one.name, one.unit).form
    unit = "" if form == "percent" else one.unit
    ends = one.mean.interval
    judged = one.name != group.valid[0].quality.metric or all(record.quality.evaluated for record in group.valid)
    cells = (
        Cell(say("repeats.rate") if one.name == RATE else metric_row(one.name).index, unit),
        Cell(counted(one.runs), _lacking(group, say) if one is group.metrics[0] else ""),
        Cell(formed(form, one.mean.value), "" if judged else say("not_evaluated")),
        Cell(UNKNOWN if ends is None else " – ".join(formed(form, end) for end in ends)),
        Cell(UNKNOWN if one.source is None else say(f"scaling.source.{one.source}")),
        Cell(formed("percent", one.deviation)),
        Cell(formed(form, one.lowest)),
        Cell(formed(form, one.highest)),
    )
    return TableRow(cells)


def _lacking(group: Repeats, say: Words) -> str:
    """How many runs are not averaged, and how many of them only for the spread of their own steps."""
    parts = [("not_valid", len(group.not_valid)), ("interval_only", group.interval_only)]
    return say("comma").join(say(f"repeats.{name}", counted(number)) for name, number in parts if number)


def _not_valid(members: list[Run], say: Words) -> list[Block]:
    """The names of runs that are counted and not averaged, with their reasons."""
    named = []
    for run in members:
        if run.record.status != "valid":
            codes = say("comma").join(dict.fromkeys(reason.code for reason in run.record.reasons)) or say(run.record.status)
            named.append(f"{run.label} {run.record.id} ({codes})")
    return [Paragraph(say("repeats.without", say("comma").join(named)))] if named else []
