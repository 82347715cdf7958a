"""Records to pages: the whole page in the seeds' order, and the short table after a run."""

from steelyard.record import Record
from steelyard.report.columns import layout
from steelyard.report.details import details
from steelyard.report.document import Block, Cell, Column, Figure, Figures, Heading, Lang, Page, Row, Table
from steelyard.report.names import meaning
from steelyard.report.numbers import UNKNOWN
from steelyard.report.results import conventions, metric_list, values
from steelyard.report.runs import STATUS_TONE, CaseName, Run, by_case, kind, scope, shown, unit, with_unit
from steelyard.report.setting import Environment, Place, data, environment, environments, model, places, setup
from steelyard.report.words import Words


def page(records: list[Record], lang: Lang) -> Page:
    """The seeds' page. One case makes the page itself; of several, each is a part of it."""
    say = Words(lang)
    cases = by_case(records)
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


def _case(case: CaseName, runs: list[Run], known: dict[Environment, Place], level: int, say: Words) -> list[Block]:
    names = {run.number: known[environment(run.record, say)].name for run in runs}
    shown_kind = "train" if kind(runs[0].record) == "train" else "score"
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
    for run in runs:
        out += details(run, names[run.number], level + 1, say)
    return out


def _figures(run: Run, say: Words) -> Figures:
    record = run.record
    plan = layout(kind(record))
    wanted = (
        plan.core,
        plan.whole,
        "mfu",
        *(name for name in plan.quality if name in record.metrics),
        "mem",
        "e2e_time",
    )
    items = tuple(
        Figure(meaning(name).index, shown(name, record.metrics.get(name)), unit(name, record.metrics.get(name)))
        for name in wanted
    )
    return Figures(f"{run.title} · {scope(record, say)}", say(record.status), STATUS_TONE[record.status], items)


def table(records: list[Record], lang: Lang = "en") -> Page:
    """One row a record: what the command line prints after a run."""
    say = Words(lang)
    plans = [layout(kind(record)) for record in records]
    rates = [("/".join(dict.fromkeys(names))) for names in ([p.whole for p in plans], [p.core for p in plans])]
    texts = ("case", "size", "engine", "division", "precision", "status")
    columns = [Column(say(name)) for name in texts]
    columns += [Column(name, align="right") for name in (*rates, "MFU", "acc/loss", "mem", "e2e_time")]
    return Page("", lang, (Table(tuple(columns), tuple(_summary(record, say) for record in records)),))


def _summary(record: Record, say: Words) -> Row:
    case, plan = record.case, layout(kind(record))
    status = say(record.status) if record.scope.kind == "full" else f"{say(record.status)}, {scope(record, say)}"
    texts = (case.name, case.size, record.engine.name, case.division, case.precision)
    quality = next((name for name in plan.quality if name in record.metrics), None)
    numbers = (
        *(with_unit(name, record.metrics.get(name)) for name in (plan.whole, plan.core, "mfu")),
        UNKNOWN if quality is None else shown(quality, record.metrics[quality]),
        *(with_unit(name, record.metrics.get(name)) for name in ("mem", "e2e_time")),
    )
    cells = [*(Cell(text) for text in texts), Cell(status, tone=STATUS_TONE[record.status])]
    return Row((*cells, *(Cell(text) for text in numbers)))
