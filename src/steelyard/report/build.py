"""Build the full report page of a set of records, which `steelyard report` renders.

The page has a head (date, machines, a summary paragraph with the best result of each case and the
runs that are not valid), one section per case with charts and tables, the meanings of the metrics,
and every run in full. Input are records, output is a `Page` for one of the renderers.
"""

import re
from collections import Counter

from steelyard import words
from steelyard.metrics import overview, rates
from steelyard.metrics.overview import Against, Row
from steelyard.metrics.result import work_name
from steelyard.metrics.table import in_order
from steelyard.metrics.table import row as metric_row
from steelyard.record.record import Record
from steelyard.report import charts
from steelyard.report.case_tables import conventions, side_by_side, values
from steelyard.report.columns import layout
from steelyard.report.details import details
from steelyard.report.document import (
    Block,
    ColumnOf,
    Contents,
    Fact,
    Facts,
    Figure,
    Figures,
    Fold,
    Heading,
    Lang,
    Link,
    Page,
    Paragraph,
    Table,
    table,
)
from steelyard.report.group_tables import ENGINES, REPEATS, SCALING
from steelyard.report.numbers import UNKNOWN, counted, ends, formed, gib_of_bytes, spelled
from steelyard.report.runs import (
    STATUS_TONE,
    CaseName,
    Run,
    accelerator,
    by_case,
    scope,
    shown,
    status,
    tuned_text,
    unit,
    with_unit,
)
from steelyard.tasks.task import Task
from steelyard.words import Words


def page(records: list[Record], lang: Lang) -> Page:
    """Build the report page: summary, a comparison section per case, the meanings of metrics, then
    every run in full.

    With one case its name is the title of the page, and headings are one level higher.
    """
    say = Words(lang)
    cases = by_case(records, lang)
    single = len(cases) == 1
    title = _short(next(iter(cases)), say) if single else say("report")
    parts: list[Block] = []
    for number, (case, runs) in enumerate(cases.items(), 1):
        name = say("side.comparison") if single else _short(case, say)
        # How its question or case differs from the shipped case.
        differs = [Paragraph(" · ".join(case[2:]), "muted")] if case[2:] else []
        parts += [Heading(2, name, f"case-{number}"), *differs, *_case(case, runs, 3, say)]
    parts += [
        Heading(2, say("page.meanings"), "metrics"),
        *meanings(cases, 3, say),
        Heading(2, say("page.runs"), "runs"),
    ]
    for case, runs in cases.items():
        parts += [] if single else [Heading(3, _short(case, say))]
        parts += [_run(run, 3 if single else 4, say) for run in runs]
    links = tuple(
        Link(one.text, one.anchor) for one in parts if isinstance(one, Heading) and one.anchor
    )
    head = (Heading(1, title), measured(records, say), machines(records, say), _summary(cases, say))
    ids = ", ".join(record.id for record in records)
    return Page(
        title, lang, (*head, Contents(say("page.contents"), links), *parts), say("footer", ids)
    )


def _short(case: CaseName, say: Words) -> str:
    """Return a heading for a case: name and size, then one word each for a question changed on the
    command line, a modified case, and a case of an earlier version.

    The words are in the language of the page; what differs in detail is left out.
    """
    name, size, *others = case
    starts = {"question.": "changed", **{say(word): word for word in ("modified", "earlier")}}
    said = [
        say(word) for start, word in starts.items() if any(one.startswith(start) for one in others)
    ]
    return " · ".join([name, size, *said])


def _case(case: CaseName, runs: list[Run], level: int, say: Words) -> list[Block]:
    """Return the elements of a case: bar charts, the comparison table, tables of engines and of
    scaling, then folded: repeats, all values, and MFU by convention.

    Parts for which the runs have nothing are left out. `level` is that of the headings.
    """
    out = [*charts.of_case(runs, case[0], say), side_by_side(runs, say)]
    out += ENGINES.section(runs, level, say)
    out += SCALING.section(runs, level, say)
    mfu = conventions(runs, say)
    every: list[Block] = [values(runs, say)]
    every += [] if mfu is None else [Heading(level + 1, say("mfu")), mfu]
    repeated = REPEATS.section(runs, level, say)
    out += (
        [Fold(Heading(level, say("repeats")), "", "plain", tuple(repeated[1:]))] if repeated else []
    )
    return [*out, Fold(Heading(level, say("side.all")), "", "plain", tuple(every))]


def _run(run: Run, level: int, say: Words) -> Fold:
    """Return a run as a collapsed part of the page: figures and all details inside.

    Its heading shows the run's title and status, and quietly the rate, the changed settings, the
    scope and the date to the minute; an unknown rate is left out.
    """
    record = run.record
    whole = layout(record.task.kind_row).whole
    rate = with_unit(whole, record.metrics.get(whole))
    created = record.created[:16].replace("T", " ")
    known = ("" if rate == UNKNOWN else rate, tuned_text(record), scope(record, say), created)
    heading, tone = Heading(level, run.title, run.anchor), STATUS_TONE[record.status]
    blocks = (_figures(run, say), *details(record, level + 1, say))
    return Fold(heading, status(record, say), tone, blocks, " · ".join(filter(None, known)))


def _figures(run: Run, say: Words) -> Figures:
    """Return the headline numbers of a run: core and whole rate, MFU, quality, memory, and
    end-to-end time.

    Unknown ones are shown as `/` without a unit. A quality that was not evaluated says so in the
    place of its unit.
    """
    record = run.record
    plan, quality = layout(record.task.kind_row), record.quality
    items = []
    for name in (plan.core, plan.whole, "mfu", quality.metric, "mem", "e2e_time"):
        value = record.metrics.get(name)
        known = value is not None and value.value is not None
        # A quality that was not evaluated, such as that of random weights, is no result.
        unevaluated = name == quality.metric and not quality.evaluated
        beside = say("not_evaluated") if unevaluated else unit(name, value, say.lang)
        items.append(Figure(metric_row(name).index, shown(name, value), beside if known else ""))
    title, tone = f"{run.title} · {scope(record, say)}", STATUS_TONE[record.status]
    return Figures(title, status(record, say), tone, tuple(items))


# Settings in the comparison table, and the code of the text in their column's head.
_SETTINGS = {
    "precision": "side.precision",
    "division": "side.division",
    "parallel": "side.plan",
    "fix_hp": "side.tune",
}
_RATES = {"tokens": "tokens_per_device_s", "samples": "samples_per_s"}


def meanings(cases: dict[CaseName, list[Run]], level: int, say: Words) -> list[Block]:
    """Return a table that explains settings and metrics: those in the comparison tables at once,
    all others of these runs folded below.
    """
    runs = [run for every in cases.values() for run in every]
    tasks: dict[str, Task] = {}
    for run in runs:
        for name in run.record.metrics:
            tasks.setdefault(name, run.record.task)
    compared = {_RATES[work_name(run.record)] for run in runs} | {
        run.record.quality.metric for run in runs
    }
    compared |= {"mfu", "mem", "energy_per_token"}
    metrics = {name: metric_row(name, task=tasks[name]) for name in in_order(set(tasks))}
    rows = {name: (*row.words(say.lang), row.index) for name, row in metrics.items()}
    settings = [(*say.meaning(f"setting.{name}"), say(head)) for name, head in _SETTINGS.items()]
    known = [row for name, row in rows.items() if name in compared]
    out: list[Block] = [_table([*settings, *known], say)]
    rest = [row for name, row in rows.items() if name not in compared]
    folded = Fold(Heading(level, say("page.meanings.rest")), "", "plain", (_table(rest, say),))
    return [*out, folded] if rest else out


def _table(rows: list[tuple[str, str, str]], say: Words) -> Table:
    """Return the table of meanings; each row is a name, its meaning and its short name as in
    tables.
    """
    columns: tuple[ColumnOf[tuple[str, str, str]], ...] = (
        ColumnOf(say("metrics.name"), lambda row: row[0]),
        ColumnOf(say("metrics.index"), lambda row: row[2]),
        ColumnOf(say("metrics.meaning"), lambda row: row[1] or UNKNOWN),
    )
    return table(columns, rows)


Rows = dict[CaseName, list[Row]]


def _summary(cases: dict[CaseName, list[Run]], say: Words) -> Paragraph:
    """Return the paragraph at the head of a report: what ran, the best results, accelerators
    compared, runs that are left out of these sentences, and runs that are not valid.
    """
    records = [run.record for runs in cases.values() for run in runs]
    found = {case: overview.rows(run.record for run in runs) for case, runs in cases.items()}
    chosen = _headline(found)
    said = [_ran(records, say), *_best(chosen, say), *_against(chosen, say)]
    said += [*_left_out(found, chosen, say), _not_valid(records, say)]
    return Paragraph(say("gap").join(said), "lead")


def _headline(found: Rows) -> Rows:
    """Return the shipped cases of size full; if there are none, shipped cases of any size, else all
    of them.

    A shipped case has a name of two parts (name and size); more parts say how its question differs.
    """
    shipped: Rows = {case: rows for case, rows in found.items() if len(case) == 2}
    full: Rows = {case: rows for case, rows in shipped.items() if case[1] == "full"}
    return full or shipped or found


def _ran(records: list[Record], say: Words) -> str:
    """Return the sentence that says how many runs of how many cases ran, on which accelerators."""
    names = {record.case.name for record in records}
    cases = say("summary.case") if len(names) == 1 else say("summary.cases", counted(len(names)))
    kinds = dict.fromkeys(accelerator(record) for record in records)
    return say("summary.ran", count_runs(len(records), say), cases, say("comma").join(kinds))


def _best(chosen: Rows, say: Words) -> list[str]:
    """Return a sentence with the fastest valid result of each case and division, then one for each
    case without a valid result.
    """
    several = len({row.accelerator for rows in chosen.values() for row in rows}) > 1
    listed, none = [], []
    for case, rows in chosen.items():
        best = overview.best(rows).values()
        if best:
            listed.append(
                say(
                    "summary.of",
                    case[0],
                    say("summary.and").join(_result(row, several, say) for row in best),
                )
            )
        else:
            none.append(case[0])
    out = [say("summary.best", say("semicolon").join(listed))] if listed else []
    return [*out, *(say("summary.none", name) for name in none)]


def _result(row: Row, several: bool, say: Words) -> str:
    """Return the rate per device with its MFU, then engine, precision and division; also the
    accelerator if `name_accelerator`.
    """
    case = row.first.case
    its = words.unit(rates.work_unit(row.first), say.lang)
    rate = say("summary.rate", formed("number", row.rate.value if row.rate else None), its)
    if row.mfu is not None:
        rate = say("summary.at", rate, formed("percent", row.mfu.value))
    how = [accelerator(row.first)] if several else []
    return say(
        "summary.with",
        rate,
        say("comma").join([*how, row.first.engine.name, case.precision, case.division]),
    )


def _against(chosen: Rows, say: Words) -> list[str]:
    """Return a sentence for each pair of accelerators with the ratio of their rates, or one that
    says that a case has no comparable pair.

    Cases with valid runs on fewer than two accelerators are skipped.
    """
    out = []
    for case, rows in chosen.items():
        if len({row.accelerator for row in rows if row.valid}) < 2:
            continue
        found = overview.against(rows)
        out += [_pair(one, case, say) for one in found] or [say("summary.no_pair", case[0])]
    return out


def _pair(one: Against, case: CaseName, say: Words) -> str:
    """Return a sentence with the ratio of two accelerators' rates per device, with its 95 %
    interval where there is one.
    """
    between, asked = ends(one.ratio.interval), one.top.first.case
    beside = say("summary.interval", between) if between else ""
    where = say("summary.with", case[0], say("comma").join((asked.precision, asked.division)))
    ratio = formed("number", one.ratio.value)
    return say("summary.against", one.top.accelerator, ratio, one.base.accelerator, where, beside)


def _left_out(found: Rows, chosen: Rows, say: Words) -> list[str]:
    """Return up to two sentences that count the runs of cases the summary does not use: those of
    size smoke, and all others.
    """
    rest = [
        (case, sum(len(row.records) for row in rows))
        for case, rows in found.items()
        if case not in chosen
    ]
    smoke = sum(count for case, count in rest if case[1] == "smoke")
    others = sum(count for case, count in rest if case[1] != "smoke")
    out = [say("summary.smoke", count_runs(smoke, say))] if smoke else []
    return [*out, say("summary.apart", count_runs(others, say))] if others else out


def _not_valid(records: list[Record], say: Words) -> str:
    """Return a sentence that counts the runs that are not valid by the code of their first reason,
    most frequent first, or that says all are valid.
    """
    lacking = [record for record in records if record.status != "valid"]
    if not lacking:
        return say("summary.all_valid")
    why = Counter(record.reasons[0].code if record.reasons else record.status for record in lacking)
    listed = [
        say("summary.code", counted(count), say.known(f"why.{code}", code))
        for code, count in why.most_common()
    ]
    return say("summary.not_valid", count_runs(len(lacking), say), say("comma").join(listed))


_DAY = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII)


def measured(records: list[Record], say: Words) -> Paragraph:
    """Return a paragraph with the day or the range of days on which the records were made; UNKNOWN
    if none has a date.
    """
    days = sorted({record.created[:10] for record in records if _DAY.match(record.created)}) or [
        UNKNOWN
    ]
    span = days[0] if len(days) == 1 else say("page.span", days[0], days[-1])
    return Paragraph(say("page.measured", span), "muted")


def machines(records: list[Record], say: Words) -> Facts:
    """Return one line for each machine: accelerators, CPU, OS, driver, the machine's own names if
    known, and its number of runs.

    Records with equal hardware and software texts count as one machine.
    """
    found: dict[tuple[str, ...], list[Record]] = {}
    for record in records:
        found.setdefault(_machine(record, say), []).append(record)
    items = []
    for (name, *rest), members in found.items():
        called = dict.fromkeys(
            one.site.get("machine") or one.environment.hardware.machine or "" for one in members
        )
        items.append(
            Fact(
                name,
                " · ".join((*rest, *(one for one in called if one), count_runs(len(members), say))),
            )
        )
    return Facts(tuple(items))


def _machine(record: Record, say: Words) -> tuple[str, ...]:
    """Return the accelerators of a run's machine with their number, then host (CPU, cores, memory),
    OS and driver, as far as they are known.

    The tuple also serves as the key by which `machines` groups records.
    """
    hardware, software = record.environment.hardware, record.environment.software
    every = [device for host in record.hosts for device in host.devices] or hardware.devices
    kinds = Counter(spelled(one.name) for one in every)
    name = ", ".join(f"{kind} × {count}" for kind, count in kinds.items()) or spelled(
        hardware.accelerator
    )
    hosts = f"{len(record.hosts)} × " if len(record.hosts) > 1 else ""
    host = [f"{hosts}{spelled(hardware.cpu)}"]
    host += (
        [] if hardware.cpu_cores is None else [say("machine.cores", counted(hardware.cpu_cores))]
    )
    host += [] if hardware.memory_bytes is None else [gib_of_bytes(hardware.memory_bytes)]
    known = [
        say("comma").join(host),
        software.os,
        say("machine.driver", software.driver) if software.driver else "",
    ]
    return name, *(part for part in known if part)


def count_runs(count: int, say: Words) -> str:
    """Format a number of runs with its noun, such as "1 run" or "1,200 runs", in the language of
    the page.
    """
    return say("count.run") if count == 1 else say("count.runs", counted(count))
