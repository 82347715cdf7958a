"""Build the details of one run for the report page: all that its record says, in the order of a
published page.

Data, model, hardware, software, settings, status, reasons, failure, every metric with its interval,
wall time by part, hosts, ranks, stragglers, waterfall, checks, the task's own tables, and charts.
"""

from collections import Counter
from typing import Any

from steelyard.metrics import standing
from steelyard.metrics.estimates import get_metric_value
from steelyard.metrics.metric_table import find_metric as metric_row
from steelyard.metrics.metric_table import sort_metric_names
from steelyard.record.record import Check, Record
from steelyard.record.run_facts import PeakFacts
from steelyard.report import charts, host_tables, waterfall_page
from steelyard.report.derived_texts import DerivedTexts, ReasonLine
from steelyard.report.document import (
    Cell,
    Code,
    ColumnSpec,
    Fact,
    Facts,
    Heading,
    PageElement,
    Paragraph,
    Table,
    TableColumn,
    TableRow,
    build_table,
)
from steelyard.report.loads import is_latency
from steelyard.report.marks import (
    format_declared_device,
    format_engine,
    format_providers,
    mark_package,
    name_devices,
)
from steelyard.report.numbered_runs import (
    FRAMEWORKS,
    find_status_tone,
    format_changed_settings,
    format_metric,
    format_parallel_plan,
    format_scope,
    format_unit,
    list_stored_settings,
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
from steelyard.report.request_details import build_request_sections
from steelyard.words import LANGS, PageWords

MAX_IDS = 40  # selected rows whose ids a page lists


def build_run_details(record: Record, level: int, say: PageWords) -> list[PageElement]:
    """Return everything that a page says of a run as page elements, each section under a heading of
    this level, in this order: data, model, hardware, software, setup, the run itself, reasons,
    failure, requests and latencies of generation, metrics, time budget (wall seconds by part),
    hosts, ranks, stragglers, waterfalls of profiled ranks, checks; then the task's own tables and
    the charts. Sections without content are left out.
    """
    texts, heading = DerivedTexts(record, say), record.task.kind_row.data_heading
    sections: tuple[tuple[str, list[PageElement]], ...] = (
        (say.get_or_fallback(heading, heading), [_data_facts(record, say)]),
        (say("model"), [_model_facts(record, say)]),
        (say("hardware"), [_hardware_facts(record, say)]),
        (say("software"), [_software_facts(record, say)]),
        (say("setup"), [_setup_facts(record, say)]),
        (say("record"), [_run_facts(record, texts, say)]),
        (say("reasons"), _reasons_elements(record, texts, say)),
        (say("failure"), _failure_elements(record, say)),
        *build_request_sections(record, texts, say),
        (say("all"), [_metrics_element(record, texts, say)]),
        (say("budget"), _budget_elements(record, say)),
        (say("hosts"), host_tables.build_hosts_table(record, say)),
        (say("ranks"), host_tables.build_ranks_table(record, say)),
        (say("stragglers"), host_tables.build_straggler_section(record, say)),
        (
            say("explain"),
            waterfall_page.build_waterfall_section(record, say, include_unprofiled=False),
        ),
        (say("checks"), _checks_elements(record, texts, say)),
    )
    out: list[PageElement] = []
    for title, elements in sections:
        out += [Heading(level, title), *elements] if elements else []
    return [*out, *_breakdown_elements(record, level, say), *charts.build_run_charts(record, say)]


def _run_facts(record: Record, texts: DerivedTexts, say: PageWords) -> Facts:
    """Return the facts of the run itself as a labelled list: status, scope (how much of the
    question was run), selected subjects and rows (if any), quality and gate, devices, id, date,
    key, hash, number of restarts (if any), and notes, one fact each.

    Of selected rows only the first MAX_IDS are listed.
    """
    quality, extent = record.quality, record.scope
    value = format_number(metric_row(quality.metric).form, quality.value)
    quality_text = say("quality.yes" if quality.evaluated else "quality.no", quality.metric, value)
    ids = extent.rows or ()  # the record has all of them
    more = "" if len(ids) <= MAX_IDS else f" … ({format_count(len(ids))})"
    selected = (
        ("subjects", ", ".join(extent.subjects or ())),
        ("rows", ", ".join(ids[:MAX_IDS]) + more),
    )
    labelled = (
        ("scope", format_scope(record, say)),
        *(pair for pair in selected if pair[1]),
        ("quality", say("colon").join(filter(None, (quality_text, texts.quality_note())))),
        (
            "gate",
            format_setting({} if quality.gate is None else quality.gate.model_dump(mode="json")),
        ),
        ("environment", _format_devices(record, say)),
        ("id", record.id),
        ("created", record.created),
        ("key", record.case.key),
        ("hash", format_setting(record.hashes.get("record"))),
        *([("restarts", format_count(len(record.restarts)))] if record.restarts else []),
        *(("note", note) for note in texts.list_notes()),
    )
    status = Fact(say("run.status"), say(standing.find_status(record)), find_status_tone(record))
    return Facts((status, *(Fact(say(f"run.{key}"), text) for key, text in labelled)))


def _reasons_elements(record: Record, texts: DerivedTexts, say: PageWords) -> list[PageElement]:
    """Return a table of the reasons (code and sentence) why a run is not valid, in a list; empty
    for a record without reasons.
    """
    columns: tuple[ColumnSpec[ReasonLine], ...] = (
        ColumnSpec(say("reasons.code"), lambda line: Cell(line.code, tone="bad")),
        ColumnSpec(say("reasons.text"), lambda line: line.format(say)),
    )
    return [build_table(columns, texts.list_reasons())] if record.reasons else []


def _failure_elements(record: Record, say: PageWords) -> list[PageElement]:
    """Return the facts of a failure (rank that caused it, host, exit code, error), then as code the
    end of stderr, if not empty, and the stack traces by rank; empty for a run that did not fail.
    """
    failure = record.failure
    if failure is None:
        return []
    labelled = (
        ("rank", failure.rank),
        ("host", failure.host),
        ("exit", failure.exit_code),
        ("error", failure.error),
    )
    out: list[PageElement] = [
        Facts(
            tuple(Fact(say(f"failed_run.{key}"), format_setting(value)) for key, value in labelled)
        )
    ]
    if failure.stderr_tail.strip():
        out += [Paragraph(say("failed_run.stderr"), "muted"), Code(failure.stderr_tail)]
    for rank, stack in sorted(failure.stacks.items()):
        out += [Paragraph(say("failed_run.stack", format_count(rank)), "muted"), Code(stack)]
    return out


def _metrics_element(record: Record, texts: DerivedTexts, say: PageWords) -> PageElement:
    """Return the table of all metrics of a run in the order of the metric table, with units,
    intervals and notes, or a sentence if its record has none.
    """
    if not record.metrics:
        return Paragraph(say("all.absent"), "muted")
    metrics = record.metrics
    rows = {
        name: metric_row(name, metrics[name].unit, record.task)
        for name in sort_metric_names(set(metrics))
    }
    columns: tuple[ColumnSpec[str], ...] = (
        ColumnSpec(say("metrics.name"), lambda name: rows[name].meaning(say.lang)[0]),
        ColumnSpec(say("metrics.index"), lambda name: name),
        ColumnSpec(
            say("all.value"),
            lambda name: Cell(_format_value(record, name, say)[0], tone="strong"),
            right=True,
        ),
        ColumnSpec(say("all.unit"), lambda name: _format_value(record, name, say)[1]),
        ColumnSpec(
            say("all.interval"),
            lambda name: _format_ends(record, name, rows[name].form) or UNKNOWN,
            right=True,
        ),
        ColumnSpec(say("all.note"), texts.metric_note),
    )
    return build_table(columns, list(rows))


def _format_value(record: Record, name: str, say: PageWords) -> tuple[str, str]:
    """Return a stored metric and its unit; a latency is in ms if it is below a second."""
    value = record.metrics[name]
    if is_latency(record, name) and value.value is not None:
        number, _, unit = format_times([value.value]).partition(" ")
        return number, unit
    return format_metric(name, value), format_unit(name, value, say.lang)


def _format_ends(record: Record, name: str, form: str) -> str:
    """Return both ends of the interval of a stored metric, those of a latency with their units;
    empty if it has none.
    """
    interval = record.metrics[name].interval
    if interval is not None and is_latency(record, name):
        return " – ".join(format_times([end]) for end in interval)
    return format_interval(interval, form)


def _budget_elements(record: Record, say: PageWords) -> list[PageElement]:
    """Return a bar and a table of the named parts of the run's wall time in seconds and as shares,
    the largest first, and remarks on the start-up; empty without a positive total.

    The table ends with the sum and with e2e_time, if known, so that a reader sees whether they
    agree.
    """
    parts = sorted(record.budget.items(), key=lambda part: -part[1])
    total = sum(record.budget.values())
    if not total > 0:
        return []
    e2e = get_metric_value(record, "e2e_time")
    totals = [(say("budget.sum"), total), *([] if e2e is None else [("e2e_time", e2e)])]
    columns: tuple[ColumnSpec[tuple[str, float]], ...] = (
        ColumnSpec(say("budget.part"), lambda part: part[0]),
        ColumnSpec(
            say("budget.time"), lambda part: format_number("seconds", part[1]), "s", right=True
        ),
        ColumnSpec(
            say("budget.share"), lambda part: format_number("percent", part[1] / total), right=True
        ),
    )
    budget_table = build_table(columns, parts, last_rows=totals)
    return [
        charts.build_budget_bar(parts, total, say),
        budget_table,
        *map(Paragraph, _start_up_sentences(record, say)),
    ]


def _start_up_sentences(record: Record, say: PageWords) -> list[str]:
    """Return sentences about the start of the first rank in the record: hits and misses of the
    compiler's cache, and the parts that ran in parallel with others, with their seconds; each only
    if recorded.
    """
    first_rank = record.ranks[0] if record.ranks else None
    cache, parallel_parts = (
        (None, None) if first_rank is None else (first_rank.compile_cache, first_rank.beside)
    )
    out = (
        []
        if cache is None
        else [
            say(
                "budget.cache",
                format_count(cache.get("hits", 0)),
                format_count(cache.get("misses", 0)),
            )
        ]
    )
    listed = ", ".join(
        f"{name} {format_number('seconds', time_s)} s"
        for name, time_s in (parallel_parts or {}).items()
    )
    return [*out, say("budget.beside", listed)] if listed else out


def _breakdown_elements(record: Record, level: int, say: PageWords) -> list[PageElement]:
    """Return the tables of answers that the task defines, such as accuracy by subject, each under a
    heading of this level; for a table in which every share is 0 or unknown, a sentence instead.

    Empty if the record has no answers.
    """
    answers, language = record.answers, LANGS.index(say.lang)
    out: list[PageElement] = []
    for breakdown in record.task.breakdowns(answers) if answers is not None else []:
        if not any(isinstance(value, float) and value for row in breakdown.rows for value in row):
            absent = say(
                "breakdown.empty", breakdown.title[language], format_count(len(breakdown.rows))
            )
            out.append(Paragraph(absent, "muted"))
            continue
        values = zip(*breakdown.rows, strict=True)
        numeric = [not any(isinstance(value, str) for value in column) for column in values]
        heads = zip(breakdown.columns, numeric, strict=True)
        columns = (
            TableColumn(text[language], align="right" if right else "left") for text, right in heads
        )
        rows = tuple(
            TableRow(tuple(Cell(_format_breakdown_value(value)) for value in row))
            for row in breakdown.rows
        )
        out += [Heading(level, breakdown.title[language]), Table(tuple(columns), rows)]
    return out


def _format_breakdown_value(value: str | int | float | None) -> str:
    """Format text as it is, an integer as a count, a float as a percentage, None as UNKNOWN."""
    if isinstance(value, str):
        return value
    return format_count(value) if isinstance(value, int) else format_number("percent", value)


def _checks_elements(record: Record, texts: DerivedTexts, say: PageWords) -> list[PageElement]:
    """Return a table of checks with name, result (ok or not) and detail, in a list; empty for a
    record without checks.
    """
    columns: tuple[ColumnSpec[Check], ...] = (
        ColumnSpec(say("checks.name"), lambda check: check.name),
        ColumnSpec(
            say("checks.ok"),
            lambda check: (
                Cell(say("ok"), tone="good") if check.ok else Cell(say("not_ok"), tone="bad")
            ),
        ),
        ColumnSpec(say("checks.detail"), lambda check: str(check.detail)),
    )
    return [build_table(columns, texts.list_checks())] if record.checks else []


_WEIGHTS_KEYS = ("source", "header_sha256")


def _facts_of_dict(
    values: dict[str, Any], known: tuple[str, ...], prefix: str, say: PageWords
) -> list[Fact]:
    """Return a fact for each of the `known` keys (UNKNOWN if missing), then for every other key of
    the dict in alphabetical order; integers have thousands separators.

    Labels are the texts with the code `prefix.key`, or the bare key where there is no text.
    """
    others = sorted(set(values) - set(known))
    return [
        Fact(say.get_or_fallback(f"{prefix}.{key}", key), format_count(values.get(key)))
        for key in (*known, *others)
    ]


def _data_facts(record: Record, say: PageWords) -> Facts:
    """Return, as a labelled list, the data that the question asks for, then the facts of the data
    that was read: those that the kind of work names first, the others by alphabet.
    """
    question_fact = Fact(say("data.asked"), format_setting(record.case.question["data"]))
    known = record.task.kind_row.data_facts
    return Facts((question_fact, *_facts_of_dict(record.data.model_dump(), known, "data", say)))


def _model_facts(record: Record, say: PageWords) -> Facts:
    """Return, as a labelled list, model, precision and training settings of the question (those
    that it has), then the facts of the weights that were loaded.
    """
    question = record.case.question
    question_values = {name: question.get(name) for name in ("model", "precision", "train")}
    question_facts = (
        Fact(say(f"model.{name}"), format_setting(value))
        for name, value in question_values.items()
        if value
    )
    return Facts(
        (*question_facts, *_facts_of_dict(record.weights.model_dump(), _WEIGHTS_KEYS, "model", say))
    )


def _format_devices(record: Record, say: PageWords) -> str:
    """Return the devices in the record's environment with their number, such as `8x NVIDIA H200`,
    or the CPU if it has none (UNKNOWN if not recorded); the declared device of a server that was
    not started here.
    """
    declared = format_declared_device(record, say)
    if declared is not None:
        return declared
    hardware = record.environment.hardware
    kinds = Counter(format_setting(device.name) for device in hardware.devices)
    return ", ".join(f"{count}x {name}" for name, count in kinds.items()) or format_setting(
        hardware.cpu
    )


def _hardware_facts(record: Record, say: PageWords) -> Facts:
    """Return the facts of machine, accelerators, datasheet peak, CPU, memory and network as a
    labelled list, UNKNOWN where not known, then everything else that the site file states, and that
    file with the start of its hash.

    A machine name of the site file replaces the detected one.
    """
    hardware, site = record.environment.hardware, record.site
    kinds = dict.fromkeys(
        f"{format_setting(device.name)} ({format_bytes_in_gib(device.memory_bytes)})"
        for device in hardware.devices
    )
    cpu, cores = format_setting(hardware.cpu), hardware.cpu_cores
    labelled = (
        ("machine", site.get("machine") or format_setting(hardware.machine)),
        (
            "accelerator",
            name_devices(record, ", ".join(kinds) or format_setting(hardware.accelerator), say),
        ),
        ("count", format_count(len(hardware.devices)) if hardware.devices else UNKNOWN),
        ("peak", mark_package(_format_peak(hardware.peak), record, "peak", say)),
        ("cpu", cpu if cores is None else say("hardware.cores", cpu, format_count(cores))),
        ("memory", format_bytes_in_gib(hardware.memory_bytes)),
        ("network", format_setting(site.get("network"))),
    )
    shown_above = ("machine", "network", "file", "file_sha256")
    stated = [Fact(key, site[key]) for key in sorted(site) if key not in shown_above]
    if "file" in site:
        stated.append(
            Fact(
                say("hardware.site"), f"{site['file']}, SHA-256 {site.get('file_sha256', '')[:12]}"
            )
        )
    return Facts((*(Fact(say(f"hardware.{key}"), text) for key, text in labelled), *stated))


def _format_peak(peak: PeakFacts | None) -> str:
    """Return the datasheet's name, its peak rates in TFLOP/s by precision, and its source, on one
    line; UNKNOWN if there is no datasheet or it has no rate.
    """
    if peak is None:
        return UNKNOWN
    listed = ", ".join(
        f"{name} {format_setting(rate / 1e12)}" for name, rate in peak.flops_per_s.items()
    )
    return (
        f"{format_setting(peak.name)}: {listed} TFLOP/s ({format_setting(peak.source)})"
        if listed
        else UNKNOWN
    )


def _software_facts(record: Record, say: PageWords) -> Facts:
    """Return the facts of OS, kernel, driver, container, framework, all other packages and
    libraries, and Steelyard's own version and revision (and whether it was modified), as a labelled
    list; UNKNOWN where not known.
    """
    software, source = record.environment.software, record.environment.source
    packages, cleanness = software.packages, "source.dirty" if source.dirty else "source.clean"
    framework = next((name for name in FRAMEWORKS if name in packages), None)
    versions = {**software.libraries, "python": software.python}
    dependent = {name: version for name, version in versions.items() if version}
    dependent |= {name: version for name, version in sorted(packages.items()) if name != framework}
    listed = ", ".join(f"{name} {format_setting(version)}" for name, version in dependent.items())
    labelled = (
        *(
            (key, format_setting(getattr(software, key)))
            for key in ("os", "kernel", "driver", "container")
        ),
        (
            "framework",
            f"{framework} {format_setting(packages[framework])}" if framework else UNKNOWN,
        ),
        ("packages", listed or UNKNOWN),
        ("source", say(cleanness, format_setting(source.version), format_setting(source.revision))),
    )
    return Facts(tuple(Fact(say(f"software.{key}"), text) for key, text in labelled))


def _setup_facts(record: Record, say: PageWords) -> Facts:
    """Return the facts of the engine with its details, the settings that were changed and where
    they came from, all settings, the parallel plan with its launcher, and the packages of others
    that brought a part of the run (if any), as a labelled list.
    """
    heading, details = record.task.kind_row.tool_heading, record.engine.details.model_dump()
    engine = format_engine(record, say)
    tool = f"{engine} ({format_setting(details)})" if details else engine
    plan = say("plan.text", format_parallel_plan(record), record.plan.config, record.plan.launcher)
    providers = format_providers(record, say)
    labelled = (
        (say.get_or_fallback(heading, heading), tool),
        (say("tune.set"), format_changed_settings(record, say)),
        (say("tune.all"), format_setting(list_stored_settings(record))),
        (say("plan"), plan),
        *([(say("providers"), providers)] if providers else []),
    )
    return Facts(tuple(Fact(label, text) for label, text in labelled))
