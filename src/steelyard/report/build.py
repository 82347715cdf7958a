"""Records to pages: the whole page, and the short table after a run."""

from steelyard.case.resolve import changed_question
from steelyard.metrics.shipped import later, modified
from steelyard.metrics.spans import devices
from steelyard.metrics.table import row as metric_row
from steelyard.record.record import Record
from steelyard.report import engines, repeats, scaling
from steelyard.report.columns import layout
from steelyard.report.details import details
from steelyard.report.document import Block, Cell, Column, Figure, Figures, Heading, Lang, Page, Table, TableRow
from steelyard.report.results import conventions, metric_list, values
from steelyard.report.runs import STATUS_TONE, CaseName, Run, by_case, scope, shown, unit, with_unit
from steelyard.report.setting import (
    EnvironmentFacts,
    NamedEnvironment,
    data,
    environment,
    environments,
    model,
    parallel,
    places,
    setup,
)
from steelyard.report.words import Words


def page(records: list[Record], lang: Lang) -> Page:
    """The whole page. One case makes the page itself; of several, each is a part of it."""
    say = Words(lang)
    cases = by_case(records, lang)
    known = places(cases, say)
    single = len(cases) == 1
    title = " · ".join(next(iter(cases))) if single else say("report")
    blocks: list[Block] = [Heading(1, title)]
    for case, runs in cases.items():
        if not single:
            blocks.append(Heading(2, " · ".join(case)))
        blocks += _case(case, runs, known, 2 if single else 3, say)
    ids = ", ".join(record.id for record in records)
    return Page(title, lang, tuple(blocks), say("footer", ids))


def _case(
    case: CaseName, runs: list[Run], known: dict[EnvironmentFacts, NamedEnvironment], level: int, say: Words
) -> list[Block]:
    names = {run.number: known[environment(run.record, say)].name for run in runs}
    shown_kind = runs[0].record.task.kind
    mfu = conventions(runs, say)
    out: list[Block] = [
        *(_figures(run, say) for run in runs),
        Heading(level, f"1. {say(f'data.{shown_kind}')}"),
        *data(runs, say),
        Heading(level, f"2. {say('model')}"),
        *model(runs, say),
        Heading(level, f"3. {say('environment')}"),
        *environments(case, runs, known, level + 1, say),
        Heading(level + 1, say("setup")),
        *setup(runs, say),
        Heading(level, f"4. {say('results', case[0])}"),
        Heading(level + 1, say("metrics")),
        metric_list(runs, say),
        Heading(level + 1, say("values")),
        values(runs, names if len(known) > 1 else {}, say),
    ]
    if mfu is not None:
        out += [Heading(level + 1, say("mfu")), mfu]
    out += repeats.section(runs, level + 1, say)
    out += engines.section(runs, level + 1, say)
    out += scaling.section(runs, level + 1, say)
    for run in runs:
        out += details(run, names[run.number], level + 1, say)
    return out


def _figures(run: Run, say: Words) -> Figures:
    record = run.record
    plan = layout(record.task.kind)
    items = []
    for name in (plan.core, plan.whole, "mfu", record.quality.metric, "mem", "e2e_time"):
        value = record.metrics.get(name)
        known = value is not None and value.value is not None
        beside = say("not_evaluated") if known and _unevaluated(record, name) else unit(name, value, say.lang) if known else ""
        items.append(Figure(metric_row(name).index, shown(name, value), beside))
    codes = say("comma").join(dict.fromkeys(reason.code for reason in record.reasons))
    status = f"{say(record.status)}: {codes}" if codes else say(record.status)
    return Figures(f"{run.title} · {scope(record, say)}", status, STATUS_TONE[record.status], tuple(items))


def _unevaluated(record: Record, name: str) -> bool:
    """Whether a quality is there that says nothing, such as that of random weights."""
    return name == record.quality.metric and not record.quality.evaluated and name in record.metrics


def table(records: list[Record], lang: Lang = "en", points: list[str] | None = None) -> Page:
    """One row a record: what the command line prints after a run. After a sweep each row begins with its point."""
    say = Words(lang)
    plans = [layout(record.task.kind) for record in records]
    named = ([p.whole for p in plans], [p.core for p in plans], ["MFU"], [record.quality.metric for record in records])
    columns = [Column(say(name)) for name in ("case", "size", "engine", "division", "precision", "status")]
    columns += [Column("/".join(dict.fromkeys(names)), align="right") for names in (*named, ["mem"], ["e2e_time"])]
    rows = [_summary(record, say) for record in records]
    if points is not None:
        columns = [Column(say("point")), *columns]
        rows = [TableRow((Cell(point), *row.cells)) for point, row in zip(points, rows, strict=True)]
    return Page("", lang, (Table(tuple(columns), tuple(rows)),))


def _summary(record: Record, say: Words) -> TableRow:
    case, plan = record.case, layout(record.task.kind)
    status = [say(record.status), *([scope(record, say)] if record.scope.kind == "window" else [])]
    status += [say("changed")] if changed_question(case.origins) else []
    status += [say("modified")] if modified(record) else []
    status += [say("earlier")] if later(record) else []
    many = f" {record.plan.config} {parallel(record)}" if devices(record) > 1 else ""
    texts = (case.name, case.size, record.engine.name + many, case.division, case.precision)
    cells = [*(Cell(text) for text in texts), Cell(say("comma").join(status), tone=STATUS_TONE[record.status])]
    for name in (plan.whole, plan.core, "mfu", record.quality.metric, "mem", "e2e_time"):
        said = with_unit(name, record.metrics.get(name), say.lang)
        cells.append(Cell(f"{said} ({say('not_evaluated')})" if _unevaluated(record, name) else said))
    return TableRow(tuple(cells))
