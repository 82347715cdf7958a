"""Engines side by side: a table for each group of records that differ in their engine alone, differences of answers first."""

from collections.abc import Callable
from dataclasses import dataclass

from steelyard.metrics import engines
from steelyard.metrics.engines import Apart, EngineRuns, Engines
from steelyard.metrics.runs import Estimate, kinds
from steelyard.metrics.table import row as metric_row
from steelyard.record.record import Record
from steelyard.report.document import Block, Cell, Column, Heading, Lang, Page, Paragraph, Priority, Table, TableRow
from steelyard.report.numbers import UNKNOWN, counted, formed
from steelyard.report.runs import Run, by_case, labels, scope, unit
from steelyard.report.setting import parallel
from steelyard.tasks.task import Differences
from steelyard.words import Words

EMPTY = Cell(UNKNOWN)


@dataclass(frozen=True)
class _Column:
    name: str
    cell: Callable[[EngineRuns, Engines, Words], Cell]
    priority: Priority = 1
    optional: bool = False  # goes where no engine has anything in it


def section(runs: list[Run], level: int, say: Words) -> list[Block]:
    """The section of a case on a page; nothing where no group has two engines."""
    out: list[Block] = []
    for group in engines.groups(run.record for run in runs):
        members = [run for run in runs if any(run.record is record for record in group.records)]
        out += [Paragraph(f"{labels(members, say)}: {_title(group, say)}", "strong"), *_blocks(group, say)]
    return [Heading(level, say("engines")), *out, Paragraph(say("engines.note"), "muted")] if out else []


def page(records: list[Record], lang: Lang = "en") -> Page | None:
    """What the command line prints after a run of all engines; None where there is nothing to compare."""
    say = Words(lang)
    out: list[Block] = []
    for case, runs in by_case(records, lang).items():
        for group in engines.groups(run.record for run in runs):
            title = " · ".join([*case, _title(group, say)])
            out += [Paragraph(f"{say('engines')}: {title}", "strong"), *_blocks(group, say)]
    return Page("", lang, (*out, Paragraph(say("engines.note"), "muted"))) if out else None


def _title(group: Engines, say: Words) -> str:
    """What the records of a group have in common."""
    record = group.records[0]
    places = [f"{record.plan.config} {parallel(record)}"] if record.plan.world > 1 else []
    parts = [record.case.precision, record.case.division, scope(record, say), *places]
    return " · ".join([*parts, ", ".join(kinds(record)) or UNKNOWN])


def _blocks(group: Engines, say: Words) -> list[Block]:
    shown = [one for one in COLUMNS if not one.optional or any(one.cell(row, group, say) != EMPTY for row in group.rows)]
    words = {"quality": group.metric, "apart": group.metric, "ratio": group.base.name}
    units = {"rate": group.unit, "mem": "GiB"}
    heads = [
        Column(
            say(f"engines.{one.name}", words.get(one.name, "")),
            units.get(one.name, ""),
            "left" if one.name == "engine" else "right",
            one.name == "rate",
            one.priority,
        )
        for one in shown
    ]
    rows = tuple(TableRow(tuple(one.cell(row, group, say) for one in shown)) for row in group.rows)
    lost = [Paragraph(say("engines.without", say("comma").join(group.without)))] if group.without else []
    if getattr(group.records[0].question.model, "dropout", 0.0):
        lost.append(Paragraph(say("engines.dropout")))
    return [Table(tuple(heads), rows), *lost]


def _engine(row: EngineRuns, group: Engines, say: Words) -> Cell:
    return Cell(row.name, say("engines.base") if row.base else "")


def _runs(row: EngineRuns, group: Engines, say: Words) -> Cell:
    lacking = len(row.records) - row.valid
    return Cell(counted(len(row.records)), say("engines.runs.invalid", counted(lacking)) if lacking else "")


def _other(row: EngineRuns, group: Engines, say: Words) -> Cell:
    found = None if row.answers is None else row.answers.chosen
    return EMPTY if found is None else of_items(found.other, found, say)


def of_items(count: int | None, found: Differences, say: Words) -> Cell:
    """So many of the items that both answered."""
    if count is None:
        return EMPTY
    share = formed("percent", count / found.items) if found.items else ""
    return Cell(say("engines.other.of", counted(count), counted(found.items)), share)


def _tokens(row: EngineRuns, group: Engines, say: Words) -> Cell:
    found = None if row.answers is None else row.answers.chosen
    return EMPTY if found is None else of_items(found.tokens, found, say)


def _largest(row: EngineRuns, group: Engines, say: Words) -> Cell:
    found = None if row.answers is None else row.answers.chosen
    return Cell(formed("number", None if found is None else found.largest))


def _loss(row: EngineRuns, group: Engines, say: Words) -> Cell:
    return apart(None if row.answers is None else row.answers.loss, say)


def _grad_norm(row: EngineRuns, group: Engines, say: Words) -> Cell:
    return apart(None if row.answers is None else row.answers.grad_norm, say)


def apart(found: Apart | None, say: Words) -> Cell:
    """Format a difference with its step, which is counted from 0, as in records."""
    if found is None:
        return EMPTY
    return Cell(
        formed("number", found.value),
        say("engines.step", counted(found.step)) if found.value else "",
    )


def _quality(row: EngineRuns, group: Engines, say: Words) -> Cell:
    value = row.records[0].metrics.get(group.metric)
    known = formed(_form(group), row.quality)
    if known == UNKNOWN:
        return EMPTY
    judged = all(record.quality.evaluated for record in row.records)
    return Cell(f"{known} {unit(group.metric, value, say.lang)}".rstrip(), "" if judged else say("not_evaluated"))


def _quality_apart(row: EngineRuns, group: Engines, say: Words) -> Cell:
    return Cell(formed(_form(group), None if row.answers is None else row.answers.quality))


def _form(group: Engines) -> str:
    """How its quality is written."""
    value = group.records[0].metrics.get(group.metric)
    return metric_row(group.metric, "" if value is None else value.unit).form


def _rate(row: EngineRuns, group: Engines, say: Words) -> Cell:
    """The rate of valid runs. An engine that has none shows that of its other runs in grey, with
    the reasons."""
    if row.rate is not None:
        return _estimate("number", row.rate)
    codes = dict.fromkeys(reason.code for record in row.records for reason in record.reasons)
    why = say("colon").join(filter(None, (say("invalid"), say("comma").join(codes))))
    return Cell(formed("number", row.invalid_rate), why, "muted")


def _ratio(row: EngineRuns, group: Engines, say: Words) -> Cell:
    return _estimate("number", row.ratio)


def _estimate(form: str, one: Estimate | None) -> Cell:
    if one is None:
        return EMPTY
    ends = "" if one.interval is None else " – ".join(formed(form, end) for end in one.interval)
    return Cell(formed(form, one.value), ends)


def _mfu(row: EngineRuns, group: Engines, say: Words) -> Cell:
    return Cell(formed("percent", row.mfu))


def _mem(row: EngineRuns, group: Engines, say: Words) -> Cell:
    return Cell(formed("gib", row.mem))


COLUMNS = (
    _Column("engine", _engine),
    _Column("other", _other, 2, optional=True),
    _Column("tokens", _tokens, 3, optional=True),
    _Column("largest", _largest, 3, optional=True),
    _Column("loss", _loss, 2, optional=True),
    _Column("grad_norm", _grad_norm, 3, optional=True),
    _Column("apart", _quality_apart, 3),
    _Column("quality", _quality, 2),
    _Column("rate", _rate),
    _Column("ratio", _ratio),
    _Column("mfu", _mfu),
    _Column("mem", _mem, 3),
    _Column("runs", _runs, 2),
)
