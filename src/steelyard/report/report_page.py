"""Build the full report page of a set of records, which `steelyard report` renders.

The page has a head (date, machines, a summary paragraph with the best result of each case and the
runs that are not valid), one section per case with charts and tables, the meanings of the metrics,
and every run in full. Input are records, output is a `Page` for one of the renderers.
"""

import re
from collections import Counter

from steelyard import words
from steelyard.metrics import overview, rates, standing
from steelyard.metrics.declared_hardware import is_hardware_declared
from steelyard.metrics.metric_table import find_metric as metric_row
from steelyard.metrics.metric_table import sort_metric_names
from steelyard.metrics.overview import AcceleratorRatio, OverviewRow
from steelyard.metrics.result import WorkName, work_name
from steelyard.record.record import Record
from steelyard.report import charts
from steelyard.report.case_tables import build_comparison_table, build_mfu_table, build_values_table
from steelyard.report.columns import load_table_layout
from steelyard.report.document import (
    ColumnSpec,
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
    PageElement,
    Paragraph,
    Table,
    build_table,
)
from steelyard.report.group_tables import ENGINES, REPEATS, SCALING
from steelyard.report.load_section import build_load_section
from steelyard.report.loads import (
    format_load,
    has_load,
    is_latency,
    make_load_sort_key,
)
from steelyard.report.marks import (
    format_engine,
    mark_package,
    mark_task,
    name_devices,
)
from steelyard.report.numbered_runs import (
    CaseName,
    NumberedRun,
    find_status_tone,
    format_accelerator,
    format_metric,
    format_metric_with_unit,
    format_scope,
    format_status,
    format_tuned_settings,
    format_unevaluated,
    format_unit,
    group_by_case,
)
from steelyard.report.numbers import (
    UNKNOWN,
    format_bytes_in_gib,
    format_count,
    format_interval,
    format_number,
    format_setting,
    format_times,
)
from steelyard.report.run_details import build_run_details
from steelyard.tasks.task import Task
from steelyard.words import PageWords


def build_report_page(records: list[Record], lang: Lang) -> Page:
    """Build the report page: title, date, machines, summary, contents, a comparison section per
    case, the meanings of metrics, then every run in full, folded; the footer lists all ids.

    With one case its name is the title of the page, and runs have no heading per case. `records`
    must not be empty.
    """
    say = PageWords(lang)
    cases = group_by_case(records, lang)
    single = len(cases) == 1
    title = _case_heading(*next(iter(cases.items())), say) if single else say("report")
    parts: list[PageElement] = []
    for number, (case, runs) in enumerate(cases.items(), 1):
        name = say("side.comparison") if single else _case_heading(case, runs, say)
        # How its question or case differs from the shipped case.
        difference = [Paragraph(" · ".join(case[2:]), "muted")] if case[2:] else []
        parts += [
            Heading(2, name, f"case-{number}"),
            *difference,
            *_case_elements(case, runs, 3, say),
        ]
    parts += [
        Heading(2, say("page.meanings"), "metrics"),
        *build_meanings(cases, 3, say),
        Heading(2, say("page.runs"), "runs"),
    ]
    for case, runs in cases.items():
        parts += [] if single else [Heading(3, _case_heading(case, runs, say))]
        repeats = _count_repeats(runs)
        parts += [_run_fold(run, repeats[run.number], 3 if single else 4, say) for run in runs]
    links = tuple(
        Link(element.text, element.anchor)
        for element in parts
        if isinstance(element, Heading) and element.anchor
    )
    head = (
        Heading(1, title),
        build_date_paragraph(records, say),
        list_machines(records, say),
        _summary_paragraph(cases, say),
    )
    ids = ", ".join(record.id for record in records)
    return Page(
        title, lang, (*head, Contents(say("page.contents"), links), *parts), say("footer", ids)
    )


def _case_heading(case: CaseName, runs: list[NumberedRun], say: PageWords) -> str:
    """Return a heading for a case: name and size, then one word each for a question changed on the
    command line, a modified case, and a case of an earlier version; and the package that its task
    is from, if it is not Steelyard's.

    The words are in the language of the page; what differs in detail is left out.
    """
    name, size, *differences = case
    starts = {"question.": "changed", **{say(word): word for word in ("modified", "earlier")}}
    remarks = [
        say(word)
        for start, word in starts.items()
        if any(difference.startswith(start) for difference in differences)
    ]
    return mark_task(" · ".join([name, size, *remarks]), runs[0].record, say)


def _case_elements(
    case: CaseName, runs: list[NumberedRun], level: int, say: PageWords
) -> list[PageElement]:
    """Return the elements of a case: bar charts (of one load), the comparison table, its loads as
    curves, tables of engines and of scaling, then as two folds: repeats; all values with MFU by
    convention.

    Parts for which the runs have nothing are left out; the comparison table and the fold of all
    values are always there. `level` is that of the headings.
    """
    one_load = len({format_load(run.record) for run in runs}) == 1
    out = charts.build_case_charts(runs, case[0], say) if one_load else []
    out += [build_comparison_table(runs, say), *build_load_section(runs, level, say)]
    out += ENGINES.build_section(runs, level, say)
    out += SCALING.build_section(runs, level, say)
    mfu = build_mfu_table(runs, say)
    all_values: list[PageElement] = [build_values_table(runs, say)]
    all_values += [] if mfu is None else [Heading(level + 1, say("mfu")), mfu]
    repeated = REPEATS.build_section(runs, level, say)
    out += (
        [Fold(Heading(level, say("repeats")), "", "plain", tuple(repeated[1:]))] if repeated else []
    )
    has_mfu = load_table_layout(runs[0].record.task.kind_row).has_mfu
    title = say("side.all" if has_mfu else "load.all_values")
    return [*out, Fold(Heading(level, title), "", "plain", tuple(all_values))]


def _count_repeats(runs: list[NumberedRun]) -> dict[int, int]:
    """Return, by number of a run, how many of the runs were asked the same, itself included."""
    rows = overview.make_overview_rows(run.record for run in runs)
    sizes = {record.id: len(row.records) for row in rows for record in row.records}
    return {run.number: sizes[run.record.id] for run in runs}


def _run_fold(run: NumberedRun, repeats: int, level: int, say: PageWords) -> Fold:
    """Return a run as a fold: its headline numbers and all details inside. `repeats` is the number
    of runs that were asked the same, itself included.

    The closed fold shows the run's title and status with reason codes, and quietly the rate over
    wall time, the settings that are not the case's own, the scope (how much of the question was
    run) and the date to the minute; an unknown rate is left out.
    """
    record = run.record
    whole = load_table_layout(record.task.kind_row).whole
    rate = format_metric_with_unit(whole, record.metrics.get(whole), say.lang)
    created = record.created[:16].replace("T", " ")
    subtitle = (
        "" if rate == UNKNOWN else rate,
        format_tuned_settings(record),
        format_scope(record, say),
        created,
    )
    heading, tone = Heading(level, run.format_title(say), run.anchor), find_status_tone(record)
    elements = (_headline_figures(run, repeats, say), *build_run_details(record, level + 1, say))
    return Fold(
        heading, format_status(record, say), tone, elements, " · ".join(filter(None, subtitle))
    )


def _headline_figures(run: NumberedRun, repeats: int, say: PageWords) -> Figures:
    """Return the headline numbers of a run: core rate (over compute time), whole rate (over wall
    time), MFU, others of its kind of work (`TableLayout.figures`), quality, memory, and end-to-end
    time, under its title, scope (how much of the
    question was run), number of repeats and status.

    Unknown ones are shown as `/` without a unit. A quality that was not evaluated says so in the
    place of its unit.
    """
    record = run.record
    table_layout, quality = load_table_layout(record.task.kind_row), record.quality
    items = []
    for name in (*table_layout.figures, quality.metric, "mem", "e2e_time"):
        value = record.metrics.get(name)
        if value is not None and is_latency(record, name):
            number, _, unit = format_times([value.value]).partition(" ")
            items.append(Figure(metric_row(name).heading, number, unit))
            continue
        is_known = value is not None and value.value is not None
        # A quality that was not evaluated, such as that of random weights, is no result.
        unevaluated = name == quality.metric and not quality.evaluated
        unit_text = (
            format_unevaluated(record, say) if unevaluated else format_unit(name, value, say.lang)
        )
        items.append(
            Figure(
                metric_row(name).heading, format_metric(name, value), unit_text if is_known else ""
            )
        )
    repeated = say("evidence.single") if repeats == 1 else say("evidence.one_of", str(repeats))
    title = f"{run.format_title(say)} · {format_scope(record, say)} · {repeated}"
    return Figures(title, format_status(record, say), find_status_tone(record), tuple(items))


# Settings in the comparison table, and the code of the text in their column's head.
_SETTING_HEADS = {
    "engine": "side.engine",
    "precision": "side.precision",
    "division": "side.division",
    "parallel": "side.plan",
    "fix_hp": "side.tune",
}
_RATE_METRICS: dict[WorkName, str] = {
    "tokens": "tokens_per_device_s",
    "samples": "samples_per_s",
    "output_tokens": "output_tokens_per_s",
}


def build_meanings(
    cases: dict[CaseName, list[NumberedRun]], level: int, say: PageWords
) -> list[PageElement]:
    """Return a table that explains settings and metrics, and their short names: those in the
    comparison tables at once, all others of these runs in a fold below, if there are any.

    A metric is explained in the words of the task of the first run that has it. `level` is that of
    the fold's heading.
    """
    runs = [run for case_runs in cases.values() for run in case_runs]
    tasks: dict[str, Task] = {}
    for run in runs:
        for name in run.record.metrics:
            tasks.setdefault(name, run.record.task)
    compared_metrics = {run.record.quality.metric for run in runs} | {"mem"}
    for run in runs:
        compared_metrics |= _list_compared_metrics(run.record)
    metrics = {name: metric_row(name, task=tasks[name]) for name in sort_metric_names(set(tasks))}
    rows = {name: (*row.meaning(say.lang), row.heading) for name, row in metrics.items()}
    settings = [
        (*say.get_meaning(f"setting.{name}"), say(head)) for name, head in _SETTING_HEADS.items()
    ]
    if any(has_load(run.record) for run in runs):
        head = say("column.load.short")
        settings.append((say("load.meaning.name"), say("load.meaning"), head))
    shown_rows = [row for name, row in rows.items() if name in compared_metrics]
    out: list[PageElement] = [_meanings_table([*settings, *shown_rows], say)]
    other_rows = [row for name, row in rows.items() if name not in compared_metrics]
    folded = Fold(
        Heading(level, say("page.meanings.rest")), "", "plain", (_meanings_table(other_rows, say),)
    )
    return [*out, folded] if other_rows else out


def _list_compared_metrics(record: Record) -> set[str]:
    """Return the metrics of the columns that the comparison table has for a record's kind of work,
    beside quality and memory.
    """
    layout = load_table_layout(record.task.kind_row)
    shared = {name for field in layout.shared for name in field.metrics} | set(layout.headline)
    rate = _RATE_METRICS[work_name(record)]
    return shared | {rate, layout.energy or "energy_per_token"} | ({"mfu"} & {*layout.figures})


def _meanings_table(rows: list[tuple[str, str, str]], say: PageWords) -> Table:
    """Return the table of meanings; each row is (name, meaning, short name as in tables), and an
    empty meaning is UNKNOWN.
    """
    columns: tuple[ColumnSpec[tuple[str, str, str]], ...] = (
        ColumnSpec(say("metrics.name"), lambda row: row[0]),
        ColumnSpec(say("metrics.index"), lambda row: row[2]),
        ColumnSpec(say("metrics.meaning"), lambda row: row[1] or UNKNOWN),
    )
    return build_table(columns, rows)


RowsByCase = dict[CaseName, list[OverviewRow]]


def _summary_paragraph(cases: dict[CaseName, list[NumberedRun]], say: PageWords) -> Paragraph:
    """Return the paragraph at the head of a report, in tone `lead`: what ran, the best results,
    accelerators compared, how many runs these sentences leave out, and the runs that are not valid.

    Best results and comparisons are those of `_summarized_cases` only; smoke runs have none.
    """
    records = [run.record for runs in cases.values() for run in runs]
    rows_by_case = {
        case: overview.make_overview_rows(run.record for run in runs)
        for case, runs in cases.items()
    }
    chosen = _summarized_cases(rows_by_case)
    questions = _split_by_load(chosen, say)
    sentences = [
        _runs_sentence(records, say),
        *_best_sentences(questions, say),
        *_accelerator_sentences(questions, say),
    ]
    sentences += [
        *_omitted_sentences(rows_by_case, chosen, say),
        *_status_sentences(rows_by_case, records, say),
    ]
    return Paragraph(say("gap").join(sentences), "lead")


def _summarized_cases(rows_by_case: RowsByCase) -> RowsByCase:
    """Return the shipped cases of any size but smoke; if there are none, the other cases of such
    sizes. Empty if all runs are of size smoke, which says nothing of the hardware.

    A shipped case has a name of two parts (name and size); more parts say how its question differs.
    """
    measured: RowsByCase = {case: rows for case, rows in rows_by_case.items() if case[1] != "smoke"}
    return {case: rows for case, rows in measured.items() if len(case) == 2} or measured


def _split_by_load(chosen: RowsByCase, say: PageWords) -> RowsByCase:
    """Return the rows by case and load, in the order of loads: a load is a question of its own, so
    its results are named with it and never ranked against those of another. Cases without a load
    stay as they are.
    """
    out: RowsByCase = {}
    for case, rows in chosen.items():
        for row in sorted(rows, key=lambda row: make_load_sort_key(row.first_record)):
            record = row.first_record
            name = say("load.at", case[0], format_load(record)) if has_load(record) else case[0]
            out.setdefault((name, *case[1:]), []).append(row)
    return out


def _runs_sentence(records: list[Record], say: PageWords) -> str:
    """Return the sentence that says how many runs of how many cases ran, on which accelerators."""
    names = {record.case.name for record in records}
    cases = (
        say("summary.case") if len(names) == 1 else say("summary.cases", format_count(len(names)))
    )
    kinds = dict.fromkeys(format_accelerator(record, say) for record in records)
    return say("summary.ran", format_run_count(len(records), say), cases, say("comma").join(kinds))


def _best_sentences(chosen: RowsByCase, say: PageWords) -> list[str]:
    """Return one sentence that lists, for all cases, the proven result with the highest rate per
    device in each division (`find_best_rows`), if there is any, then a sentence for each case
    without one.

    The accelerator is named if the cases ran on several; what all results share is named once.
    """
    all_rows = [row for rows in chosen.values() for row in rows]
    name_accelerator = len({row.accelerator for row in all_rows}) > 1
    best_rows = {case: overview.find_best_rows(rows) for case, rows in chosen.items()}
    facts = {
        id(row): _list_facts(row, name_accelerator, say)
        for rows in best_rows.values()
        for row in rows
    }
    shared = [
        values[0]
        for values in zip(*facts.values(), strict=True)
        if len(facts) > 1 and len(set(values)) == 1
    ]
    results = [
        say(
            "summary.of",
            case[0],
            say("summary.and").join(
                _format_result(row, [fact for fact in facts[id(row)] if fact not in shared], say)
                for row in rows
            ),
        )
        for case, rows in best_rows.items()
        if rows
    ]
    out = []
    if results:
        listed = say("semicolon").join(results)
        common = say("comma").join(shared)
        out = [say("summary.best.all" if shared else "summary.best", listed, common)]
    for case, rows in best_rows.items():
        if not rows:
            out.append(say(f"summary.{_explain_no_best(chosen[case])}", case[0]))
    return out


def _explain_no_best(rows: list[OverviewRow]) -> str:
    """Return why no row of a case is its best result, as the end of a text's name: the hardware of
    those that are proven was never seen (`declared`), no rate is proven (`unproven`), or no run is
    valid (`none`).
    """
    if any(row.is_proven and is_hardware_declared(row.first_record) for row in rows):
        return "declared"
    return "unproven" if any(row.status == "unproven" for row in rows) else "none"


def _list_facts(row: OverviewRow, name_accelerator: bool, say: PageWords) -> list[str]:
    """Return how a result was reached: the accelerator if `name_accelerator`, engine, precision,
    division, and what the number rests on (`_list_evidence`).
    """
    case = row.first_record.case
    return [
        *([format_accelerator(row.first_record, say)] if name_accelerator else []),
        format_engine(row.records, say),
        case.precision,
        case.division,
        *_list_evidence(row, say),
    ]


def _format_result(row: OverviewRow, facts: list[str], say: PageWords) -> str:
    """Return the rate per device with its MFU, if known, then in parentheses these facts."""
    unit_text = words.translate_unit(rates.work_unit(row.first_record), say.lang)
    rate = say(
        "summary.rate", format_number("number", row.rate.value if row.rate else None), unit_text
    )
    if row.mfu is not None:
        rate = say("summary.at", rate, format_number("percent", row.mfu.value))
    return say("summary.with", rate, say("comma").join(facts)) if facts else rate


def _list_evidence(row: OverviewRow, say: PageWords) -> list[str]:
    """Return what the rate of a row rests on: its scope (the whole question or a window of it), the
    number of runs that count, and whether quality was evaluated, or that the case has no gate.
    """
    count = len(row.counted)
    runs = say("evidence.single") if count == 1 else say("evidence.repeats", format_count(count))
    has_gate = format_unevaluated(row.first_record, say) != say("no_gate")
    unevaluated = say("evidence.unevaluated" if has_gate else "no_gate")
    quality = say("evidence.evaluated") if row.is_evaluated else unevaluated
    return [format_scope(row.first_record, say), runs, quality]


def _accelerator_sentences(chosen: RowsByCase, say: PageWords) -> list[str]:
    """Return, case by case, a sentence for each accelerator but the slowest with the ratio of its
    rate per device to that of the slowest (fastest first), on the question that most of them
    answered, or one that says that the case has no comparable pair.

    Cases with proven rates on fewer than two accelerators are skipped. Nobody has seen a declared
    device, so servers that were not started here are left out.
    """
    out = []
    for case, all_rows in chosen.items():
        rows = [row for row in all_rows if not is_hardware_declared(row.first_record)]
        if len({row.accelerator for row in rows if row.is_proven}) < 2:
            continue
        pairs = overview.compare_accelerators(rows)
        out += [_pair_sentence(pair, case, say) for pair in pairs] or [
            say("summary.no_pair", case[0])
        ]
    return out


def _pair_sentence(pair: AcceleratorRatio, case: CaseName, say: PageWords) -> str:
    """Return a sentence with the ratio of two accelerators' rates per device, the faster over the
    slower, on a case in one precision and division, what each rate rests on, and whether the ratio
    was tested, with its 95 % interval if it was. Engines are named, with their marks.
    """
    case_facts = pair.top.first_record.case
    settings = [case_facts.precision, case_facts.division]
    evidence = [
        [format_engine(row.records, say), *_list_evidence(row, say)]
        for row in (pair.top, pair.base)
    ]
    names = [
        mark_package(row.accelerator, row.first_record, "accelerator", say)
        for row in (pair.top, pair.base)
    ]
    if evidence[0] == evidence[1]:
        settings += evidence[0]
    else:
        names = [
            say("summary.with", name, say("comma").join(texts))
            for name, texts in zip(names, evidence, strict=True)
        ]
    ratio = pair.ratio
    return say(
        "summary.against",
        names[0],
        format_number("number", ratio.value),
        names[1],
        say("summary.with", case[0], say("comma").join(settings)),
        say(f"summary.{ratio.verdict}", format_interval(ratio.interval)),
    )


def _omitted_sentences(rows_by_case: RowsByCase, chosen: RowsByCase, say: PageWords) -> list[str]:
    """Return up to two sentences that count the runs of cases the summary does not use: those of
    size smoke, and all others.
    """
    omitted = [
        (case, sum(len(row.records) for row in rows))
        for case, rows in rows_by_case.items()
        if case not in chosen
    ]
    smoke = sum(count for case, count in omitted if case[1] == "smoke")
    others = sum(count for case, count in omitted if case[1] != "smoke")
    out = [say("summary.smoke", format_run_count(smoke, say))] if smoke else []
    return [*out, say("summary.apart", format_run_count(others, say))] if others else out


def _status_sentences(rows_by_case: RowsByCase, records: list[Record], say: PageWords) -> list[str]:
    """Return a sentence that all runs are valid; or one that counts those that are unproven, alone
    and with their repeats, and one that counts the others that are not valid by their first reason
    (by status if they have none), most frequent first, each only if there are any.
    """
    statuses = [standing.find_status(record) for record in records]
    unproven = [
        record
        for rows in rows_by_case.values()
        for row in rows
        for record in standing.select_not_proven(row.records)
        if standing.find_status(record) == "unproven"
    ]
    not_valid = [
        record
        for record, status in zip(records, statuses, strict=True)
        if status not in standing.RIGHT_STATUSES
    ]
    too_short = "too_few_requests" if all(map(has_load, unproven)) else "too_short"
    number = format_run_count(len(unproven), say)
    out = [say(f"summary.{too_short}", number)] if unproven else []
    if not not_valid:
        return out or ([say("summary.all_valid")] if "unproven" not in statuses else [])
    counts = Counter(
        record.reasons[0].code if record.reasons else record.status for record in not_valid
    )
    count_texts = [
        say("summary.code", format_count(count), say.get_or_fallback(f"why.{code}", code))
        for code, count in counts.most_common()
    ]
    number = format_run_count(len(not_valid), say)
    return [*out, say("summary.not_valid", number, say("comma").join(count_texts))]


_DAY = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII)


def build_date_paragraph(records: list[Record], say: PageWords) -> Paragraph:
    """Return a muted paragraph with the day on which the records were made, or the first and the
    last day; UNKNOWN if none has a date of the form 2026-01-31.
    """
    days = sorted({record.created[:10] for record in records if _DAY.match(record.created)}) or [
        UNKNOWN
    ]
    date_range = days[0] if len(days) == 1 else say("page.span", days[0], days[-1])
    return Paragraph(say("page.measured", date_range), "muted")


def list_machines(records: list[Record], say: PageWords) -> Facts:
    """Return a list with one fact for each machine: its accelerators are the label; the text has
    CPU, OS, driver, the machine's own names if known, and its number of runs.

    Records with equal hardware and software texts (`_machine_texts`) count as one machine.
    """
    by_machine: dict[tuple[str, ...], list[Record]] = {}
    for record in records:
        by_machine.setdefault(_machine_texts(record, say), []).append(record)
    items = []
    for (name, *description), members in by_machine.items():
        machine_names = dict.fromkeys(
            member.site.get("machine") or member.environment.hardware.machine or ""
            for member in members
        )
        items.append(
            Fact(
                name,
                " · ".join(
                    (
                        *description,
                        *(member for member in machine_names if member),
                        format_run_count(len(members), say),
                    )
                ),
            )
        )
    return Facts(tuple(items))


def _machine_texts(record: Record, say: PageWords) -> tuple[str, ...]:
    """Return first one text of all accelerators of the run, each kind with its number, such as
    `NVIDIA H200 × 8`; then host (number of hosts, CPU, cores, memory), OS and driver.

    Unknown accelerators or CPU are UNKNOWN; other unknown parts are left out. The tuple is also the
    key by which `list_machines` groups records.
    """
    hardware, software = record.environment.hardware, record.environment.software
    devices = [device for host in record.hosts for device in host.devices] or hardware.devices
    kinds = Counter(format_setting(item.name) for item in devices)
    name = ", ".join(f"{kind} × {count}" for kind, count in kinds.items()) or format_setting(
        hardware.accelerator
    )
    name = name_devices(record, name, say)
    hosts = f"{len(record.hosts)} × " if len(record.hosts) > 1 else ""
    host = [f"{hosts}{format_setting(hardware.cpu)}"]
    host += (
        []
        if hardware.cpu_cores is None
        else [say("machine.cores", format_count(hardware.cpu_cores))]
    )
    host += [] if hardware.memory_bytes is None else [format_bytes_in_gib(hardware.memory_bytes)]
    parts = [
        say("comma").join(host),
        software.os,
        say("machine.driver", software.driver) if software.driver else "",
    ]
    return name, *(part for part in parts if part)


def format_run_count(count: int, say: PageWords) -> str:
    """Format a number of runs with its noun, such as "1 run" or "1,200 runs", in the language of
    the page.
    """
    return say("count.run") if count == 1 else say("count.runs", format_count(count))
