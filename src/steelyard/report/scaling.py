"""How the rate grows with the number of devices: a table for each group of records that differ in their plan alone."""

from steelyard.metrics import scaling
from steelyard.metrics.runs import Estimate, kinds
from steelyard.metrics.scaling import Scaling, ScalingRow
from steelyard.record.record import Record
from steelyard.report.document import Block, Cell, Column, Heading, Lang, Page, Paragraph, Priority, Table, TableRow
from steelyard.report.numbers import UNKNOWN, counted, formed, spelled
from steelyard.report.runs import Run, by_case, labels, scope
from steelyard.report.setting import parallel
from steelyard.words import Words

_COLUMNS = ("config", "plan", "runs", "rate", "speedup", "efficiency", "source")
_TEXT = ("config", "plan", "source")
_PRIORITY: dict[str, Priority] = {
    **dict.fromkeys(("config", "rate", "efficiency"), 1),
    **dict.fromkeys(("plan", "speedup"), 2),
    **dict.fromkeys(("runs", "source"), 3),
}


def section(runs: list[Run], level: int, say: Words) -> list[Block]:
    """The section of a case on a page; nothing where no group has two numbers of devices."""
    found = scaling.groups(run.record for run in runs)
    out: list[Block] = []
    for group in found:
        members = [run for run in runs if any(run.record is record for record in group.records)]
        out += [Paragraph(f"{labels(members, say)}: {_title(group, found, say)}", "strong"), _table(group, say)]
    return [Heading(level, say("scaling")), *out, Paragraph(say("scaling.note"), "muted")] if out else []


def page(records: list[Record], lang: Lang = "en") -> Page | None:
    """What the command line prints after a sweep over devices; None where there is nothing to compare."""
    say = Words(lang)
    out: list[Block] = []
    for case, runs in by_case(records, lang).items():
        found = scaling.groups(run.record for run in runs)
        for group in found:
            title = " · ".join([*case, _title(group, found, say)])
            out += [Paragraph(f"{say('scaling')}: {title}", "strong"), _table(group, say)]
    return Page("", lang, (*out, Paragraph(say("scaling.note"), "muted"))) if out else None


def _title(group: Scaling, every: list[Scaling], say: Words) -> str:
    """What the records of a group have in common, and the settings in which it differs from the other groups."""
    record = group.records[0]
    parts = [record.engine.name, record.case.precision, record.case.division, scope(record, say)]
    tunes = [one.records[0].tune.model_dump(mode="json", exclude={"parallel"}) for one in every]
    own = record.tune.model_dump(mode="json")
    differ = [f"{key}={spelled(own[key], depth=1)}" for key in tunes[0] if any(tune[key] != own[key] for tune in tunes)]
    return " · ".join([*parts, ", ".join(kinds(record)) or UNKNOWN, *differ])


def _table(group: Scaling, say: Words) -> Table:
    units = {"rate": group.unit}
    heads = [
        Column(
            say(f"scaling.{name}"), units.get(name, ""), "left" if name in _TEXT else "right", name == "rate", _PRIORITY[name]
        )
        for name in _COLUMNS
    ]
    return Table(tuple(heads), tuple(_row(row, say) for row in group.rows))


def _row(row: ScalingRow, say: Words) -> TableRow:
    cells = (
        Cell(row.plan.config),
        Cell(parallel(row.records[0])),
        Cell(counted(len(row.records))),
        _estimate("number", row.rate),
        Cell(formed("number", row.speedup.value), say("scaling.base")) if row.base else _estimate("number", row.speedup),
        _estimate("percent", row.efficiency),
        Cell(UNKNOWN if row.source is None else say(f"scaling.source.{row.source}")),
    )
    return TableRow(cells)


def _estimate(form: str, one: Estimate) -> Cell:
    ends = "" if one.interval is None else " – ".join(formed(form, end) for end in one.interval)
    return Cell(formed(form, one.value), ends)
