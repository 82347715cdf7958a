"""The page of runs: its head, a part for each case with its runs, and what the metrics mean."""

from steelyard.metrics.result import work_name
from steelyard.metrics.table import in_order
from steelyard.metrics.table import row as metric_row
from steelyard.record.record import Record
from steelyard.report import setting
from steelyard.report.bars import charts
from steelyard.report.columns import layout
from steelyard.report.details import details
from steelyard.report.document import (
    Block,
    Cell,
    Column,
    Contents,
    Figure,
    Figures,
    Fold,
    Heading,
    Lang,
    Link,
    Page,
    Paragraph,
    Table,
    TableRow,
)
from steelyard.report.group_tables import ENGINES, REPEATS, SCALING
from steelyard.report.lead import machines, measured, summary
from steelyard.report.numbers import UNKNOWN
from steelyard.report.results import conventions, values
from steelyard.report.runs import STATUS_TONE, CaseName, Run, accelerator, by_case, scope, shown, status, unit, with_unit
from steelyard.report.setting import tuned
from steelyard.report.side_by_side import table as side_by_side
from steelyard.tasks.task import Task
from steelyard.words import Words


def page(records: list[Record], lang: Lang) -> Page:
    """The comparison first: what ran and what came of it, case by case, then what metrics mean, then every run in full."""
    say = Words(lang)
    cases = by_case(records, lang)
    single = len(cases) == 1
    title = _short(next(iter(cases)), say) if single else say("report")
    parts: list[Block] = []
    for number, (case, runs) in enumerate(cases.items(), 1):
        name = say("side.comparison") if single else _short(case, say)
        parts += [Heading(2, name, f"case-{number}"), *_apart(case), *_case(case, runs, 3, say)]
    parts += [Heading(2, say("page.meanings"), "metrics"), *meanings(cases, 3, say), Heading(2, say("page.runs"), "runs")]
    for case, runs in cases.items():
        parts += [] if single else [Heading(3, _short(case, say))]
        parts += [_run(run, 3 if single else 4, say) for run in runs]
    links = tuple(Link(one.text, one.anchor) for one in parts if isinstance(one, Heading) and one.anchor)
    head = (Heading(1, title), measured(records, say), machines(records, say), summary(cases, say))
    ids = ", ".join(record.id for record in records)
    return Page(title, lang, (*head, Contents(say("page.contents"), links), *parts), say("footer", ids))


def _short(case: CaseName, say: Words) -> str:
    """A case's name and size, and in a word that its question is another one."""
    name, size, *others = case
    starts = {"question.": "changed", **{say(word): word for word in ("modified", "earlier")}}
    said = [say(word) for start, word in starts.items() if any(one.startswith(start) for one in others)]
    return " · ".join([name, size, *said])


def _apart(case: CaseName) -> list[Block]:
    """In what a question is another one than that of the shipped case."""
    return [Paragraph(" · ".join(case[2:]), "muted")] if case[2:] else []


def _case(case: CaseName, runs: list[Run], level: int, say: Words) -> list[Block]:
    """Charts and one table; then what only some cases have; what is looked up rarely is folded."""
    out = [*charts(runs, case[0], say), side_by_side(runs, say)]
    out += ENGINES.section(runs, level, say)
    out += SCALING.section(runs, level, say)
    mfu = conventions(runs, say)
    names = {run.number: accelerator(run.record) for run in runs}
    every: list[Block] = [values(runs, names if len(set(names.values())) > 1 else {}, say)]
    every += [] if mfu is None else [Heading(level + 1, say("mfu")), mfu]
    repeated = REPEATS.section(runs, level, say)
    out += [Fold(Heading(level, say("repeats")), "", "plain", tuple(repeated[1:]))] if repeated else []
    return [*out, Fold(Heading(level, say("side.all")), "", "plain", tuple(every))]


def _run(run: Run, level: int, say: Words) -> Fold:
    """All that is known of a run, in the order of a published page: data, model, environment, tool, results."""
    record = run.record
    data_heading = record.task.kind_row.data_heading
    parts = (
        (say.known(data_heading, data_heading), setting.data),
        (say("model"), setting.model),
        (say("hardware"), setting.hardware),
        (say("software"), setting.software),
        (say("setup"), setting.setup),
    )
    blocks: list[Block] = [_figures(run, say)]
    for title, facts in parts:
        blocks += [Heading(level + 1, title), facts(record, say)]
    blocks += details(record, level + 1, say)
    heading = Heading(level, run.title, run.anchor)
    return Fold(heading, status(record, say), STATUS_TONE[record.status], tuple(blocks), _told_apart(record, say))


def _told_apart(record: Record, say: Words) -> str:
    """Its rate, settings, scope and time."""
    rate = with_unit(layout(record.task.kind_row).whole, record.metrics.get(layout(record.task.kind_row).whole))
    known = (rate if rate != UNKNOWN else "", tuned(record), scope(record, say), record.created[:16].replace("T", " "))
    return " · ".join(part for part in known if part)


def _figures(run: Run, say: Words) -> Figures:
    record = run.record
    plan = layout(record.task.kind_row)
    items = []
    for name in (plan.core, plan.whole, "mfu", record.quality.metric, "mem", "e2e_time"):
        value = record.metrics.get(name)
        known = value is not None and value.value is not None
        beside = say("not_evaluated") if known and _unevaluated(record, name) else unit(name, value, say.lang) if known else ""
        items.append(Figure(metric_row(name).index, shown(name, value), beside))
    title, tone = f"{run.title} · {scope(record, say)}", STATUS_TONE[record.status]
    return Figures(title, status(record, say), tone, tuple(items))


def _unevaluated(record: Record, name: str) -> bool:
    """Whether a quality is there that says nothing, such as that of random weights."""
    return name == record.quality.metric and not record.quality.evaluated and name in record.metrics


# Settings that are compared, and the phrase that heads their column.
_SETTINGS = {"precision": "side.precision", "division": "side.division", "parallel": "side.plan", "fix_hp": "side.tune"}
_RATES = {"tokens": "tokens_per_device_s", "samples": "samples_per_s"}


def meanings(cases: dict[CaseName, list[Run]], level: int, say: Words) -> list[Block]:
    runs = [run for every in cases.values() for run in every]
    tasks: dict[str, Task] = {}
    for run in runs:
        for name in run.record.metrics:
            tasks.setdefault(name, run.record.task)
    compared = {_RATES[work_name(run.record)] for run in runs} | {run.record.quality.metric for run in runs}
    compared |= {"mfu", "mem", "energy_per_token"}
    known = [name for name in in_order(set(tasks)) if name in compared]
    rest = [name for name in in_order(set(tasks)) if name not in compared]
    settings = [(*say.meaning(f"setting.{name}"), say(head)) for name, head in _SETTINGS.items()]
    out: list[Block] = [_table([*settings, *(_words(name, tasks[name], say) for name in known)], say)]
    if rest:
        folded = _table([_words(name, tasks[name], say) for name in rest], say)
        out.append(Fold(Heading(level, say("page.meanings.rest")), "", "plain", (folded,)))
    return out


def _words(name: str, task: Task, say: Words) -> tuple[str, str, str]:
    metric = metric_row(name, task=task)
    return *metric.words(say.lang), metric.index


def _table(rows: list[tuple[str, str, str]], say: Words) -> Table:
    heads = tuple(Column(say(f"metrics.{key}")) for key in ("name", "index", "meaning"))
    return Table(heads, tuple(TableRow((Cell(title), Cell(index), Cell(text or UNKNOWN))) for title, text, index in rows))
