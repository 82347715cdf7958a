"""Build the tables that a terminal shows: after runs, and for `steelyard report` without --full.

One row per run in short columns; what all rows have in common stands above the table instead of in
columns.
"""

from collections.abc import Callable
from dataclasses import replace

from steelyard import words
from steelyard.case.resolve import changed_question
from steelyard.metrics import shipped
from steelyard.metrics.rates import work_unit
from steelyard.metrics.result import work_name
from steelyard.metrics.runs import kinds, quality, rate
from steelyard.metrics.shipped import later, modified
from steelyard.metrics.spans import headline
from steelyard.record.record import Record
from steelyard.report.columns import layout
from steelyard.report.derived import DerivedTexts
from steelyard.report.document import (
    Block,
    Cell,
    Column,
    ColumnOf,
    Heading,
    Lang,
    Page,
    Paragraph,
    TableRow,
)
from steelyard.report.document import table as make_table
from steelyard.report.numbers import UNKNOWN, formed
from steelyard.report.runs import STATUS_TONE, by_case, scope, shown, status, with_unit
from steelyard.words import Words

UNCHECKED = "*"
Columns = list[ColumnOf[Record]]


def table(records: list[Record], lang: Lang = "en", points: list[str] | None = None) -> Page:
    """Build the table that the command line prints after runs. After a sweep `points` names each
    record's point, the first cell of its row.
    """
    say = Words(lang)
    several = _several(records)
    case = ColumnOf[Record](
        say("case"), lambda one: _marked(one, one.case.name) if several else one.case.name
    )
    found = [*_found(records, say), *_times(records, say)]
    first = (say("point"), points) if points else None
    return Page("", lang, tuple(_blocks(records, [case, *_asked(records, say)], found, first, say)))


def brief(records: list[Record], lang: Lang = "en") -> Page:
    """Build a short page: for each case a heading and a table of its runs with headline numbers,
    then how to see more.
    """
    say = Words(lang)
    device = ColumnOf[Record](say("terminal.device"), lambda one: ", ".join(kinds(one)) or UNKNOWN)
    out: list[Block] = []
    for case, runs in by_case(records).items():
        members = [run.record for run in runs]
        asked = [device, *_asked(members, say, brief=True)]
        found = [*_found(members, say), _energy(members)]
        first = (say("terminal.run"), [run.label for run in runs])
        out += [Heading(2, " · ".join(case)), *_blocks(members, asked, found, first, say)]
    return Page(
        "",
        lang,
        (
            *out,
            Paragraph(say("terminal.interval"), "muted"),
            Paragraph(say("terminal.more"), "muted"),
        ),
    )


def _asked(records: list[Record], say: Words, brief: bool = False) -> Columns:
    """Return the columns of what was asked: size, division, engine, plan, precision and scope,
    without those that say nothing for these records.

    Where the records differ in division there is no column for it: the case's name carries it, or
    on a brief page the precision. A brief page has the size in its heading and always a column of
    plans.
    """
    many = brief or any(record.plan.world > 1 for record in records)
    part = any(record.scope.kind == "window" or record.restarts for record in records)
    several = _several(records)
    marked = brief and several
    columns: tuple[tuple[bool, ColumnOf[Record]], ...] = (
        (not brief, ColumnOf(say("size"), lambda one: one.case.size, priority=3)),
        (not several, ColumnOf(say("division"), lambda one: one.case.division)),
        (True, ColumnOf(say("engine"), lambda one: one.engine.name)),
        (many, ColumnOf(say("terminal.plan"), _plan)),
        (
            True,
            ColumnOf(
                say("precision"),
                lambda one: _marked(one, one.case.precision) if marked else one.case.precision,
            ),
        ),
        (part, ColumnOf(say("terminal.scope"), lambda one: scope(one, say), priority=3)),
    )
    return [column for wanted, column in columns if wanted]


def _several(records: list[Record]) -> bool:
    """Return whether the records are of more than one division."""
    return len({record.case.division for record in records}) > 1


def _marked(record: Record, text: str) -> str:
    """Return the text, followed by the run's division unless that is closed."""
    return text if record.case.division == "closed" else f"{text} {record.case.division}"


def _found(records: list[Record], say: Words) -> Columns:
    """Return the columns of the results: status, rate of all devices, half of its interval, MFU and
    quality.

    The unit of the rate and the name of the quality are in the head if all records agree, and
    otherwise in each cell.
    """
    units = {work_unit(record) for record in records}
    unit = units.pop() if len(units) == 1 else ""
    metrics = {quality([record]) for record in records}
    metric = metrics.pop() if len(metrics) == 1 else ""
    title = say.known(metric, metric) if metric else say("terminal.quality")
    return [
        ColumnOf(say("status"), lambda record: _status(record, say)),
        ColumnOf(say("terminal.rate"), lambda record: _rate(record, unit), unit, right=True),
        ColumnOf("±", _half, right=True, priority=2, optional=True),
        ColumnOf(
            "MFU", lambda record: shown("mfu", record.metrics.get("mfu")), right=True, optional=True
        ),
        ColumnOf(title, lambda record: _quality(record, metric), right=True),
    ]


def _times(records: list[Record], say: Words) -> Columns:
    """Return the columns of both headline rates, memory and end-to-end time, each number with its
    unit; optional and of lowest priority.
    """

    def column(name: Callable[[Record], str]) -> ColumnOf[Record]:
        """Return the column of the metric that `metric_name` names for each record; the title joins
        the different names by a slash.
        """
        title = "/".join(dict.fromkeys(map(name, records)))
        return ColumnOf(
            say.known(title, title),
            lambda record: with_unit(name(record), record.metrics.get(name(record))),
            right=True,
            priority=3,
            optional=True,
        )

    rates = (lambda record: _rates(record)[0]), (lambda record: _rates(record)[1])
    return [*map(column, rates), column(lambda _: "mem"), column(lambda _: "e2e_time")]


def _rates(record: Record) -> tuple[str, str]:
    """Return the names of the two headline rate metrics, over wall time and over compute time, of
    the pass that this run has.
    """
    plan = layout(record.task.kind_row)
    return plan.other.get(headline(record) or "", (plan.whole, plan.core))


def _energy(records: list[Record]) -> ColumnOf[Record]:
    """Return the column of energy per token or per sample, in J; the unit is the title if all
    records share it, else it is in each cell.
    """
    names = {"tokens": "energy_per_token", "samples": "energy_per_sample"}
    per = {
        one.unit
        for record in records
        if (one := record.metrics.get(names[work_name(record)])) is not None
    }
    title = per.pop() if len(per) == 1 else "J"

    def cell(record: Record) -> str:
        """Return a record's energy per token or sample; with its unit if the title has none."""
        name = names[work_name(record)]
        found = record.metrics.get(name)
        return shown(name, found) if title != "J" else with_unit(name, found)

    return ColumnOf(title, cell, right=True, priority=2, optional=True)


def _blocks(
    records: list[Record],
    asked: Columns,
    found: Columns,
    first: tuple[str, list[str]] | None,
    say: Words,
) -> list[Block]:
    """Return the table, and above it a paragraph with the question columns whose cells are equal in
    all rows.

    `row_names` is the title and the cells of an extra first column, or None. Footnotes explain
    qualities that were not evaluated, and why no run has an MFU.
    """
    shared = [one for one in asked if len({one.cell(record) for record in records}) == 1]
    named = {say("size"), say("terminal.plan")}  # their cells need the title beside them
    titles = (f"{one.title} " if one.title in named else "" for one in shared)
    alike = [f"{title}{one.cell(records[0])}" for title, one in zip(titles, shared, strict=True)]
    unchecked = any(_quality(record, "any").endswith(UNCHECKED) for record in records)
    notes = [say("terminal.unchecked")] if unchecked else []
    without_mfu = all(shown("mfu", record.metrics.get("mfu")) == UNKNOWN for record in records)
    notes += _no_mfu(records, say) if without_mfu else []
    notes += [words.text(one, say.lang) for one in shipped.counted_types(records)]
    made = make_table([*(one for one in asked if one not in shared), *found], records, notes)
    if first is not None:
        named_rows = zip(first[1], made.rows, strict=True)
        rows = [TableRow((Cell(name), *row.cells)) for name, row in named_rows]
        made = replace(made, columns=(Column(first[0]), *made.columns), rows=tuple(rows))
    return [*([Paragraph(" · ".join(alike))] if alike else []), made]


def _no_mfu(records: list[Record], say: Words) -> list[str]:
    """Return a note in a list why no run has an MFU, if all have the same reason; else empty."""
    found = {DerivedTexts(record, say).metric_note("mfu") for record in records}
    return [say("terminal.no_mfu", note) for note in found if note] if len(found) == 1 else []


def _plan(record: Record) -> str:
    """Return nodes x devices, degrees above 1, and the sharding stage of training on several
    devices, such as `1x8 TP2DP4 SH1`.
    """
    plan = record.plan
    sharding = record.tune.sharding if record.task.kind_row.trains and plan.world > 1 else 0
    degrees = {"TP": plan.tp, "PP": plan.pp, "DP": plan.dp}
    told = "".join(f"{name}{degree}" for name, degree in degrees.items() if degree > 1)
    return " ".join(filter(None, (plan.config, told, f"SH{sharding}" if sharding else "")))


def _status(record: Record, say: Words) -> Cell:
    """Return status and reason codes, and whether the question was changed, the case modified, or
    of an earlier version.
    """
    remarks = {
        "changed": changed_question(record.case.origins),
        "modified": modified(record),
        "earlier": later(record),
    }
    parts = [status(record, say), *(say(word) for word, holds in remarks.items() if holds)]
    return Cell(say("comma").join(parts), tone=STATUS_TONE[record.status])


def _rate(record: Record, common: str) -> str:
    """Format the rate of all devices together, as `compare` counts it; with the unit if
    `common_unit` is empty; UNKNOWN if there is none.
    """
    found = rate(record)
    if found is None:
        return UNKNOWN
    value = formed("number", found.value)
    return value if common else f"{value} {work_unit(record)}"


def _half(record: Record) -> str:
    """Return half the width of the rate's 95 % interval as a percentage of the rate; UNKNOWN if
    there is no interval.
    """
    found = rate(record)
    if found is None or found.interval is None:
        return UNKNOWN
    low, high = found.interval
    return formed("percent", (high - low) / 2 / found.value)


def _quality(record: Record, common: str) -> str:
    """Format the quality; with a short name (`loss` for a loss on held-out data too) if
    `common_metric` is empty. A `*` marks one that was not evaluated.
    """
    name = quality([record])
    text = shown(name, record.metrics.get(name))
    if text == UNKNOWN:
        return text
    unchecked = name == record.quality.metric and not record.quality.evaluated
    named = text if common else f"{name.partition('_')[0]} {text}"
    return named + UNCHECKED if unchecked else named
