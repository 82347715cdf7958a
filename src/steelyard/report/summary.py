"""Runs as a terminal shows them: one row a run in short columns, and above the table what all of them have in common."""

from collections.abc import Callable
from dataclasses import dataclass

from steelyard import words
from steelyard.case.resolve import changed_question
from steelyard.metrics import own
from steelyard.metrics.rates import work_unit
from steelyard.metrics.result import work_name
from steelyard.metrics.runs import kinds, quality, rate
from steelyard.metrics.shipped import later, modified
from steelyard.metrics.spans import headline
from steelyard.record.record import Record
from steelyard.report.columns import layout
from steelyard.report.derived import DerivedTexts
from steelyard.report.document import Align, Block, Cell, Column, Heading, Lang, Page, Paragraph, Priority, Table, TableRow
from steelyard.report.numbers import UNKNOWN, formed
from steelyard.report.runs import STATUS_TONE, by_case, scope, shown, with_unit
from steelyard.words import Words

UNCHECKED = "*"
_EXPLAINED = ("size", "terminal.plan")


@dataclass(frozen=True)
class _Field:
    """A column. A `shared` one stands above the table where all rows have the same."""

    title: str
    cell: Callable[[Record, Words], Cell]
    priority: Priority = 1
    align: Align = "left"
    shared: bool = False
    sub: str = ""
    optional: bool = False  # goes where no row has anything in it


def table(records: list[Record], lang: Lang = "en", points: list[str] | None = None) -> Page:
    """What the command line prints after runs. After a sweep each row begins with its point."""
    say = Words(lang)
    several = _several(records)
    fields = [_named("case", lambda one, _: _marked(one, one.case.name) if several else one.case.name), *_asked(records)]
    fields += [*_found(records, say), *_times(records)]
    return Page("", lang, tuple(_blocks(records, fields, say, [say("point")] if points else [], points)))


def brief(records: list[Record], lang: Lang = "en") -> Page:
    """A screen a case: its runs and their headline numbers, and how to see more."""
    say = Words(lang)
    out: list[Block] = []
    for case, runs in by_case(records).items():
        members = [run.record for run in runs]
        fields = [_named("terminal.device", lambda one, _: ", ".join(kinds(one)) or UNKNOWN), *_asked(members, brief=True)]
        fields += [*_found(members, say), _energy(members)]
        out += [
            Heading(2, " · ".join(case)),
            *_blocks(members, fields, say, [say("terminal.run")], [run.label for run in runs]),
        ]
    return Page("", lang, (*out, Paragraph(say("terminal.interval"), "muted"), Paragraph(say("terminal.more"), "muted")))


def _named(title: str, text: Callable[[Record, Words], str], priority: Priority = 1) -> _Field:
    return _Field(title, lambda record, say: Cell(text(record, say)), priority, shared=True)


def _asked(records: list[Record], brief: bool = False) -> list[_Field]:
    """What was asked. A brief page has the size in its heading, and its table no room for a column of divisions."""
    many = brief or any(record.plan.world > 1 for record in records)
    part = any(record.scope.kind == "window" or record.restarts for record in records)
    several = _several(records)
    return [
        *([] if brief else [_named("size", lambda record, _: record.case.size, 3)]),
        *([] if several else [_named("division", lambda record, _: record.case.division)]),
        _named("engine", lambda record, _: record.engine.name),
        *([_named("terminal.plan", lambda record, _: _plan(record))] if many else []),
        _named("precision", lambda one, _: _marked(one, one.case.precision) if brief and several else one.case.precision),
        *([_named("terminal.scope", scope, 3)] if part else []),
    ]


def _several(records: list[Record]) -> bool:
    return len({record.case.division for record in records}) > 1


def _marked(record: Record, text: str) -> str:
    """With its division, unless that is the usual one."""
    return text if record.case.division == "closed" else f"{text} {record.case.division}"


def _found(records: list[Record], say: Words) -> list[_Field]:
    units = {work_unit(record) for record in records}
    unit = units.pop() if len(units) == 1 else ""
    metrics = {quality([record]) for record in records}
    metric = metrics.pop() if len(metrics) == 1 else ""
    return [
        _Field("status", _status),
        _Field("terminal.rate", lambda record, _: _rate(record, unit), 1, "right", sub=unit),
        _Field("±", lambda record, _: _half(record), 2, "right", optional=True),
        _Field("MFU", lambda record, _: Cell(shown("mfu", record.metrics.get("mfu"))), 1, "right", optional=True),
        _Field(metric or "terminal.quality", lambda record, _: _quality(record, metric), 1, "right"),
    ]


def _times(records: list[Record]) -> list[_Field]:
    names = [_rates(record) for record in records]
    columns = (
        ("/".join(dict.fromkeys(whole for whole, _ in names)), lambda record: _rates(record)[0]),
        ("/".join(dict.fromkeys(core for _, core in names)), lambda record: _rates(record)[1]),
        ("mem", lambda _: "mem"),
        ("e2e_time", lambda _: "e2e_time"),
    )
    return [_Field(title, _metric(name), 3, "right", optional=True) for title, name in columns]


def _rates(record: Record) -> tuple[str, str]:
    """The headline rates; of a run of the reference pass alone, that pass's."""
    plan = layout(record.task.kind_row)
    return plan.other.get(headline(record) or "", (plan.whole, plan.core))


def _metric(name: Callable[[Record], str]) -> Callable[[Record, Words], Cell]:
    return lambda record, _: Cell(with_unit(name(record), record.metrics.get(name(record))))


def _energy(records: list[Record]) -> _Field:
    names = {"tokens": "energy_per_token", "samples": "energy_per_sample"}
    per = {one.unit for record in records if (one := record.metrics.get(names[work_name(record)])) is not None}
    title = per.pop() if len(per) == 1 else "J"

    def cell(record: Record, say: Words) -> Cell:
        name = names[work_name(record)]
        found = record.metrics.get(name)
        return Cell(shown(name, found) if title != "J" else with_unit(name, found))

    return _Field(title, cell, 2, "right", optional=True)


def _blocks(records: list[Record], fields: list[_Field], say: Words, first: list[str], names: list[str] | None) -> list[Block]:
    """The table, after what all rows have in common; rows begin with their names where they have some."""
    cells = {field.title: [field.cell(record, say) for record in records] for field in fields}
    shared = [field for field in fields if field.shared and len(set(cells[field.title])) == 1]
    told = " · ".join(_told(field, cells[field.title][0].text, say) for field in shared)
    empty = [field for field in fields if field.optional and {cell.text for cell in cells[field.title]} == {UNKNOWN}]
    kept = [field for field in fields if field not in (*shared, *empty)]
    columns = [*(Column(title) for title in first), *(_column(field, say) for field in kept)]
    rows = [
        TableRow((*([Cell(names[place])] if names else []), *(cells[field.title][place] for field in kept)))
        for place in range(len(records))
    ]
    starred = any(cell.text.endswith(UNCHECKED) for field in kept for cell in cells[field.title])
    notes = [say("terminal.unchecked")] if starred else []
    notes += _no_mfu(records, say) if any(field.title == "MFU" for field in empty) else []
    notes += [words.text(one, say.lang) for one in own.counted(records)]
    return [*([Paragraph(told)] if told else []), Table(tuple(columns), tuple(rows), tuple(notes))]


def _told(field: _Field, text: str, say: Words) -> str:
    """A value that all rows have; with its name where it does not explain itself."""
    return f"{say(field.title)} {text}" if field.title in _EXPLAINED else text


def _no_mfu(records: list[Record], say: Words) -> list[str]:
    """Why no run has an MFU, where all have the same reason."""
    found = {DerivedTexts(record, say).metric_note("mfu") for record in records}
    return [say("terminal.no_mfu", note) for note in found if note] if len(found) == 1 else []


def _column(field: _Field, say: Words) -> Column:
    return Column(say.known(field.title, field.title), field.sub, field.align, priority=field.priority)


def _plan(record: Record) -> str:
    """Nodes x devices, and how the work is divided over them; degrees of 1 are left out."""
    plan = record.plan
    sharding = record.tune.sharding if record.task.kind_row.trains and plan.world > 1 else 0
    degrees = {"TP": plan.tp, "PP": plan.pp, "DP": plan.dp}
    told = "".join(f"{name}{degree}" for name, degree in degrees.items() if degree > 1)
    return " ".join(filter(None, (plan.config, told, f"SH{sharding}" if sharding else "")))


def _status(record: Record, say: Words) -> Cell:
    codes = say("comma").join(dict.fromkeys(reason.code for reason in record.reasons))
    told = [f"{say(record.status)}: {codes}" if codes else say(record.status)]
    told += [say("changed")] if changed_question(record.case.origins) else []
    told += [say("modified")] if modified(record) else []
    told += [say("earlier")] if later(record) else []
    return Cell(say("comma").join(told), tone=STATUS_TONE[record.status])


def _rate(record: Record, common: str) -> Cell:
    """Of all devices, as the verbs that compare count it."""
    found = rate(record)
    if found is None:
        return Cell(UNKNOWN)
    value = formed("number", found.value)
    return Cell(value if common else f"{value} {work_unit(record)}")


def _half(record: Record) -> Cell:
    """Half of the rate's interval, as a share of it."""
    found = rate(record)
    ends = None if found is None else found.interval
    return Cell(formed("percent", None if found is None or ends is None else (ends[1] - ends[0]) / 2 / found.value))


def _quality(record: Record, common: str) -> Cell:
    """With its short name where rows have different ones: a loss on held-out data is a loss."""
    name = quality([record])
    text = shown(name, record.metrics.get(name))
    if text == UNKNOWN:
        return Cell(text)
    unchecked = name == record.quality.metric and not record.quality.evaluated
    told = text if common else f"{name.partition('_')[0]} {text}"
    return Cell(told + UNCHECKED if unchecked else told)
